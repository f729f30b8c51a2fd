# pyright: standard
"""An optimizer's next step, as devices are to do it with what they keep: its rules, or the reason why they cannot.

Nothing here changes anything: whoever finds a reason ends the lease, and the optimizer does the step itself.
"""

from __future__ import annotations

from cleave.core.model.update_rule import Rule, check
from cleave.errors import ProtocolError
from cleave.train.offload import update_rules
from cleave.train.offload.lease_held import Held, shown_gradient

CALLS_MODEL = "the optimizer's step calls the model again"


def why_not_on_devices(held: Held, *, has_closure: bool) -> str | None:
    """Return why devices cannot do the next step; None if they can, once their gradients are those of whole passes."""
    if has_closure:
        return CALLS_MODEL
    reason = update_rules.why_not(held.optimizer)
    if reason is not None or not held.generation.is_complete:
        return reason
    gradients = held.generation.gradients
    present = {number: shown_gradient(parameter) for number, parameter in held.parameters.items()}
    if not all(one is None or one is gradients.get(number) for number, one in present.items()):
        return "some gradients were replaced"
    if held.generation.is_spent and held.shown:
        return "the optimizer stepped twice with the same gradients"
    if not all(_has_states(held, number) for number in held.parameters):
        return "the optimizer keeps other states than before"
    try:
        for rule, factor in next_rules(held).values():
            check(rule, factor)
    except ProtocolError as fault:
        return f"devices refuse the optimizer's step: {fault}"
    return None


def next_rules(held: Held) -> dict[int, tuple[Rule, float]]:
    """Return what every parameter with a gradient is to follow next, and the factor on that gradient."""
    return {
        number: (
            update_rules.next_rule(held.optimizer, held.group(number), held.parameters[number]),
            held.generation.gradients[number].factor,
        )
        for number in held.shown
    }


def _has_states(held: Held, number: int) -> bool:
    """Whether the optimizer keeps the states of a parameter that its device keeps too."""
    own, names = held.optimizer.state.get(held.parameters[number], {}), held.states[number]
    return update_rules.state_names(held.group(number)) == names and all(own.get(name) is not None for name in names)
