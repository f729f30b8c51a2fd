# pyright: standard
"""The lease in force, and the ways back to what devices keep: fetch it, end the lease, recover from a departure.

A fetch leaves the lease as it is. An end brings weights, states and gradients here, as if there had been no lease. When
a device is gone, a recovery has others do its work again from the log (`lease_recovery.py`), and the lease goes on; if
they cannot, or gradients on devices are not those the caller wants, everything is rebuilt here and the lease ends.
`leases.py` decides when, and holds its lock meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch

from cleave.errors import LeaseLost
from cleave.train.offload.lease_held import Generation, Held
from cleave.train.offload.lease_recovery import Regaining, Replay, fetch_survivors
from cleave.train.offload.leased_tensors import release
from cleave.train.offload.linear import Weights

log = logging.getLogger(__name__)


class Recall:
    def __init__(self, fleet: Any, weights: Weights, announce: Callable[[str], None]) -> None:
        """`announce` tells the user of every recovery."""
        self._fleet, self._weights, self._announce = fleet, weights, announce
        self.held: Held | None = None
        """The lease in force."""
        self.is_recovering = False

    def fetch(self, held: Held) -> None:
        """Fetch weights and states; the lease goes on, unless devices are gone and it cannot."""
        if held.behind:
            self._recover_again(held, self.fetch)
            return
        held.take_snapshots()
        held.cancel_snapshots()  # what comes up now is newer
        try:
            self.settle(held)
            values = self._read(held, held.lease.parameters, gradients=False)
        except LeaseLost as fault:
            self._recover_again(held, self.fetch, fault)
            return
        held.write(values)
        held.have_all()
        self._weights.touched()

    def end(self, why: str) -> None:
        """End the lease: weights, states and gradients are here again, as if there had been none."""
        held = self.held
        if held is None or self.is_recovering:
            return
        log.info("lease ends: %s", why)
        generation = held.generation
        wants = bool(held.shown)
        if wants and not generation.is_complete:
            self.rebuild(held, why)
            return
        if held.behind:
            self._recover_again(held, lambda _: self.end(why))
            return
        try:
            self.settle(held)
            values = self._read(held, held.lease.parameters, gradients=wants)
        except LeaseLost as fault:
            self._recover_again(held, lambda _: self.end(why), fault)
            return
        if held.is_old:  # else the numbers here are current, and may have been changed since they were read
            held.write(values)
        if wants:
            for number, one in values.items():
                gradient = torch.from_numpy(one.gradient).view(held.parameters[number].shape)
                held.give(number, gradient * generation.gradients[number].factor)
        self._detach(held)

    def recover(self, reason: str) -> None:
        """Recover from devices that are gone: others keep what is lost and do what was logged, and the lease goes on.

        Where they cannot, it ends.
        """
        held = self.held
        if held is None or self.is_recovering:
            return
        with suppress(LeaseLost):
            self.settle(held)
        held.take_snapshots()
        generation = held.generation
        regaining = Regaining(self._fleet, self._weights, held)
        self.is_recovering = True
        try:
            is_back = regaining.regain()
        except BaseException:  # such as KeyboardInterrupt: `behind` says what is still to do
            generation.begun = generation.returned + 1  # some gradients on devices are of no complete pass
            raise
        finally:
            self.is_recovering = False
        if not is_back:
            self.rebuild(held, reason)
            return
        self._announce(f"weights that devices kept are recovered on others: {reason}")
        generation.begun = generation.returned
        if generation.is_spent:
            self._drop_spent(held)

    def rebuild(self, held: Held, reason: str) -> None:
        """End a lease of which a device is gone, or whose gradients are not the caller's: do its work again.

        Weights that a device has in their present state are fetched. The others are trained again from their bases,
        shard by shard, by whatever devices there are; and so are the gradients since the last update, of all.
        """
        self._announce(f"weights that devices kept are recovered: {reason}")
        with suppress(LeaseLost):
            self.settle(held)
        held.take_snapshots()
        held.cancel_snapshots()
        lost = fetch_survivors(self._fleet, held)
        held.lease.end()  # survivors need room for what is lost
        generation = held.generation
        self.held, self.is_recovering = None, True
        try:
            for tensor in held.tensors:
                release(tensor)
            shown = held.shown
            replay = Replay(self._fleet, self._weights, held)
            with self._fleet.rescue():
                for one in lost:
                    replay.updates(one)
                self._weights.touched()
                if shown and not generation.is_spent:
                    for number, total in replay.gradients().items():
                        held.give(number, total * generation.scale(number))
            if generation.is_spent:
                self._drop_spent(held)
        finally:
            self.is_recovering = False
        held.forget_unused_states()
        held.log.close()

    def settle(self, held: Held) -> None:
        """Wait until the last update is done everywhere."""
        pending, held.pending = held.pending, None
        if pending is not None:
            self._fleet.wait(pending)

    def _recover_again(self, held: Held, then: Callable[[Held], None], fault: LeaseLost | None = None) -> None:
        """Recover, then try again what needed it if the lease goes on."""
        self.recover("an earlier recovery was interrupted" if fault is None else str(fault))
        if self.held is held and not self.is_recovering:
            then(held)

    def _read(self, held: Held, parameters: Collection[int], *, gradients: bool) -> Mapping[int, Any]:
        matrices = self._fleet.wait(held.lease.read(parameters, gradients=gradients))
        return held.lease.values(parameters, matrices, gradients=gradients)

    def _detach(self, held: Held) -> None:
        self.held = None
        for tensor in held.tensors:
            release(tensor)
        held.forget_unused_states()
        held.log.close()
        held.lease.end()
        self._weights.touched()

    def _drop_spent(self, held: Held) -> None:
        """Drop gradients that the optimizer has stepped with: no device has those of a lost shard."""
        for number in held.shown:
            held.parameters[number].grad = None
        held.generation = Generation()
