"""Laws of leased weights: operations of an optimizer's step, a sum of squares and a copy on the device.

They read every number once and compute little with it, so `ROWS` tells whoever turns operations into seconds that
nothing shares the reading (`rates.thin_effort`). One core at 80 GFLOP/s took 3 ns a number for Adam in numpy, where
this law says 7; with four cores, which products use and these do not, it says 2.
"""

from __future__ import annotations

from cleave.core.model.update_rule import Adam, Rule, Sgd

ROWS = 1
"""Rows that share each reading of a weight."""


def update_flops(rule: Rule, numbers: int) -> float:
    """Operations of one step on so many weights, entry by entry."""
    match rule:
        case Sgd():
            momentum = (3 + 2 * rule.is_nesterov) if rule.momentum else 0
            each = 3 + 2 * bool(rule.weight_decay) + momentum
        case Adam():
            each = 14 + (2 - rule.is_decoupled) * bool(rule.weight_decay)
    return float(each * numbers)


def square_sum_flops(numbers: int) -> float:
    return 2.0 * numbers


def copy_flops(numbers: int) -> float:
    """Count a copied number as an operation: it takes as long."""
    return float(numbers)
