"""Leases: weights that one device each keeps, with their optimizer states, and updates itself.

A column with a single holder needs no sum of gradients, so neither its weights nor their gradients have to travel: the
device adds gradients up over passes, and an update changes weights and states in place. The server words updates, reads
sums of squares for clipping, and reads weights and states back when somebody needs them; `train/offload/leases.py`
decides when. Until then this process's own copies are old. A device that leaves takes its weights with it: requests and
passes then end with LeaseLost, and the caller lends those to another device, while all others stay where they are.

A snapshot is such a reading in idle link time: the device copies what fits beside the passes, so that updates can go
on, and sends the copies up when its link has nothing else to do; the next update waits for what does not fit. It
travels in pieces, as an urgent result waits for the piece that is on its way.

Operands get their identities in the engine's thread; everything else is called from the caller's.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from cleave.core.cost.update import copy_flops, update_flops
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.model.decoder import Decoder, View
from cleave.core.model.update_rule import Rule
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.schedule.tasks import DeviceId, Operand, OperandsReleased
from cleave.errors import FleetGoneError, LeaseLost
from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import Collect, Copy, Hold, Leased, SquareSum, Update
from cleave.server.contract import EngineEvent, Prompted, Run, RunSubmitted
from cleave.server.fleet_view import FleetView
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.errands import Errand, ErrandRun
from cleave.server.resident.pass_lease import PassLease

_PIECE_S, _LEAST_PIECE_BYTES = 0.05, 64 << 10
"""Time that a piece of a snapshot takes on its device's uplink, and bytes below which it would not be worth a task."""

Lent = tuple[Tensor, ...]
"""A parameter and its optimizer states, as they are when a lease begins; fp32, bound until they are sent."""


class LeasedRun(Run, Protocol):
    """A pass under a lease, or a snapshot."""

    @property
    def is_done(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterValues:
    """What a device keeps of a parameter."""

    weight: Matrix
    states: tuple[Matrix, ...]
    gradient: Matrix | None


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Weights and states as they were at one moment, on their way here."""

    done: Future[list[Matrix]]
    """What they are; `Lease.values` reads it."""
    settled: Future[None]
    """Done when updates may go on."""
    cancel: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A rectangle of a parameter on its device."""

    view: View
    device: DeviceId
    weight: Operand
    states: tuple[Operand, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.weight, *self.states


class Lease:
    def __init__(
        self,
        decoder: Decoder,
        plan: ResidentPlan,
        lent: Mapping[int, Lent],
        *,
        operands: Operands,
        ids: Iterator[int],
        fleet: FleetView,
        post: Callable[[EngineEvent], None],
    ) -> None:
        """Lend parameters of a decoder to the devices that hold them alone under a plan."""
        self.decoder, self.plan, self.parameters = decoder, plan, frozenset(lent)
        self._lent, self._operands, self._ids, self._fleet, self._post = dict(lent), operands, ids, fleet, post
        self._device = self._placed(plan, self.parameters)
        self._passes: weakref.WeakSet[LeasedRun] = weakref.WeakSet()
        self._snapshots: weakref.WeakSet[LeasedRun] = weakref.WeakSet()
        self.is_over = False
        self.round = 0
        """Grows with every recovery."""
        self.failed: set[DeviceId] = set()
        """Devices that failed a request while they were connected: what they hold is unknown."""
        self._pieces: dict[View, _Piece] = {}
        self.sums: dict[View, Operand] = {}
        """Accumulators of gradients."""
        self._spare_bytes: dict[DeviceId, int] = {}
        """Memory that the last pass left free on a device, apart from copies."""
        self._copies: dict[Operand, DeviceId] = {}

    # -------------------------------------------------------------------------------------------- any thread

    def for_pass(self, plan: ResidentPlan | None = None, numbers: Sequence[int] | None = None) -> PassLease:
        """Return the lease as a pass needs it; `plan` and `numbers` are those of a decoder that is only a shard."""
        return PassLease(self, plan or self.plan, numbers)

    def lend(self) -> Future[list[Matrix]]:
        """Send weights and states to their devices."""
        placed = dict(self._device)
        return self._run(lambda: self._sending(placed))

    def lend_again(self, plan: ResidentPlan, lent: Mapping[int, Lent]) -> Future[list[Matrix]]:
        """Send parameters that were lost to the devices that hold them under another plan; others stay where they are.

        Ends the passes under way, and drops what they have added to the gradients of those parameters.
        """
        self.plan = plan
        self._lent.update(lent)
        placed = self._placed(plan, lent.keys())
        self._device.update(placed)
        self.failed.difference_update(placed.values())  # whatever they kept before is no longer theirs
        self.begin_round({view: sum for view, sum in self.sums.items() if view not in placed})
        return self._run(lambda: self._sending(placed))

    def begin_round(self, sums: dict[View, Operand]) -> None:
        """End the passes under way; only these accumulators keep what they have."""
        self.round += 1
        for run in [run for run in self._passes if not run.is_done]:
            self._post(Prompted(run, LeaseLost("weights were recovered")))
        dropped, self.sums = self.sums, sums
        self._forget([sum for view, sum in dropped.items() if sums.get(view) is not sum])

    def forget_numbers(self) -> None:
        """Drop the numbers that were sent; only the devices' own count from now on."""
        for tensor in itertools.chain.from_iterable(self._lent.values()):
            tensor.bind(None)

    def measure(self) -> Future[list[Matrix]]:
        """Request the sums of squares of all gradients; `square_sums` reads them."""
        sums = self.sums
        return self._run(lambda: self._measuring(sums))

    def square_sums(self, matrices: list[Matrix]) -> dict[int, float]:
        """Return the sum of squares of each parameter's gradient, from the matrices of `measure`."""
        sums = dict.fromkeys(self.parameters, 0.0)
        numbers = itertools.chain.from_iterable(matrix[0].tolist() for matrix in matrices)
        for view, number in zip(self._in_order(), numbers, strict=True):
            sums[view.parameter] += number
        return sums

    def update(self, rules: Mapping[int, tuple[Rule, float]]) -> Future[list[Matrix]]:
        """Request that parameters follow their gradients, by a rule and with a factor on the gradient each."""
        sums = self.sums  # those of now: the caller may clear them before the engine has begun
        return self._run(lambda: self._updating(rules, sums))

    def read(self, parameters: Collection[int], *, gradients: bool) -> Future[list[Matrix]]:
        """Request weights and states, and gradients if there are any; `values` reads them."""
        sums = self.sums if gradients else None
        return self._run(lambda: self._reading(parameters, sums))

    def values(
        self, parameters: Collection[int], matrices: list[Matrix], *, gradients: bool
    ) -> dict[int, ParameterValues]:
        """Return the parameters in the matrices of `read`."""
        remaining, found = iter(matrices), dict[int, ParameterValues]()
        for number in sorted(parameters):
            held = len(self._lent[number])
            wholes = [_empty(self.decoder, number) for _ in range(held + gradients)]
            for view in self.views(number):
                for whole in wholes:
                    _fill(whole[slice(*view.rows), slice(*view.cols)], remaining)
            found[number] = ParameterValues(
                weight=wholes[0], states=tuple(wholes[1:held]), gradient=wholes[held] if gradients else None
            )
        return found

    def snapshot(self, parameters: Collection[int]) -> Snapshot:
        """Request weights and states as the updates requested so far leave them, in idle link time."""
        copies: list[Operand] = []

        def assign() -> list[Errand]:
            return self._snapping(parameters, copies)

        run = ErrandRun(assign, self.failed.add, ids=self._ids, fleet=self._fleet, is_in_turn=True)
        run.done.add_done_callback(lambda _: self._drop_copies(copies))
        self._snapshots.add(run)
        self._post(RunSubmitted(run))
        return Snapshot(run.done, run.settled, lambda: self._post(Prompted(run, LeaseLost("nobody needs it"))))

    def clear_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Start the next pass from zero gradients; only of some parameters, while passes of others may be under way."""
        if parameters is None:
            dropped, self.sums = list(self.sums.values()), {}
        else:
            dropped = [self.sums.pop(view) for view in list(self.sums) if view.parameter in parameters]
        self._forget(dropped)

    def end(self) -> None:
        """End passes and snapshots and release everything on devices; tensors go when nothing refers to them."""
        self.is_over = True
        for run in [run for run in (*self._passes, *self._snapshots) if not run.is_done]:
            self._post(Prompted(run, LeaseLost("the lease ended")))
        self.clear_gradients()
        self._lent.clear()

    def follow(self, run: LeasedRun) -> None:
        """Note a pass that is about to run under the lease."""
        self._passes.add(run)

    def _run(self, assign: Callable[[], list[Errand]]) -> Future[list[Matrix]]:
        run = ErrandRun(assign, self.failed.add, ids=self._ids, fleet=self._fleet)
        self._post(RunSubmitted(run))
        return run.done

    def _forget(self, sums: Sequence[Operand]) -> None:
        """Release accumulators, but not before what was requested so far has begun with them."""
        if sums:
            with suppress(FleetGoneError):
                self._post(OperandsReleased(tuple(sum.id for sum in sums)))

    def _placed(self, plan: ResidentPlan, parameters: Collection[int]) -> dict[View, DeviceId]:
        """Return the devices of the rectangles of parameters under a plan."""
        return {
            view: column.holdings[0].device
            for stage in plan.stages
            for column in stage.columns
            if column.is_leased
            for view in column.shard.views(self.decoder)
            if view.parameter in parameters
        }

    @property
    def devices(self) -> frozenset[DeviceId]:
        return frozenset(self._device.values())

    def devices_of(self, parameters: Collection[int]) -> frozenset[DeviceId]:
        return frozenset(device for view, device in self._device.items() if view.parameter in parameters)

    def views(self, number: int) -> list[View]:
        """Rectangles of a parameter on devices."""
        return [view for view in self._device if view.parameter == number]

    def _in_order(self) -> list[View]:
        """Views by device, in the order in which sums of squares are requested."""
        return [view for device in sorted(self.devices) for view, owner in self._device.items() if owner == device]

    # -------------------------------------------------------------------------------------------- the engine's thread

    def __contains__(self, view: View) -> bool:
        return view in self._device

    @property
    def intact(self) -> frozenset[int]:
        """Parameters that their devices still hold as the server believes."""
        broken = {
            piece.view.parameter
            for piece in self._pieces.values()
            if piece.device in self.failed
            or not all(self._fleet.holds(piece.device, operand) for operand in piece.operands)
        }
        return self.parameters - broken

    def weight(self, view: View) -> Operand:
        return self._pieces[view].weight

    def accumulator(self, view: View, sums: dict[View, Operand]) -> Operand:
        if view not in sums:
            sums[view] = self._operands.made(self._pieces[view].weight.bytes)
        return sums[view]

    def kept_bytes(self, device: DeviceId) -> int:
        """Memory that optimizer states take on a device, and copies of a snapshot under way."""
        states = sum(state.bytes for piece in self._pieces.values() if piece.device == device for state in piece.states)
        return states + self._copied_bytes(device)

    def other_bytes(self, device: DeviceId, parameters: Collection[int]) -> int:
        """Memory that weights and gradients take on a device, apart from those of some parameters."""
        others = (piece for piece in self._pieces.values() if piece.device == device)
        return sum(2 * piece.weight.bytes for piece in others if piece.view.parameter not in parameters)

    def passes_leave(self, device: DeviceId, free_bytes: int) -> None:
        """Note the memory that passes leave free on a device, with what is kept there now."""
        self._spare_bytes[device] = free_bytes + self._copied_bytes(device)

    def _copied_bytes(self, device: DeviceId) -> int:
        return sum(operand.bytes for operand, owner in list(self._copies.items()) if owner == device)

    def _drop_copies(self, copies: list[Operand]) -> None:
        for operand in copies:
            del self._copies[operand]
        if copies:
            self._operands.drop(copies)

    def _sending(self, placed: Mapping[View, DeviceId]) -> list[Errand]:
        sent: dict[DeviceId, list[Operand]] = {}
        for view, device in placed.items():
            weight, *states = (self._slice(tensor, view) for tensor in self._lent[view.parameter])
            self._pieces[view] = _Piece(view, device, weight, tuple(states))
            sent.setdefault(device, []).extend(self._pieces[view].operands)
        errands: list[Errand] = []
        for device in sorted(sent):
            operands = tuple(sent[device])
            program = Hold(operands=tuple(operand.id for operand in operands))
            errands.append(Errand(device=device, program=program, operands=operands))
        return errands

    def _measuring(self, sums: dict[View, Operand]) -> list[Errand]:
        errands: list[Errand] = []
        for device in sorted(self.devices):
            used = tuple(self.accumulator(piece.view, sums) for piece in self._pieces_of(device))
            program = SquareSum(accumulators=tuple(operand.id for operand in used))
            errands.append(Errand(device=device, program=program, operands=used, held=used, cols=len(used)))
        return errands

    def _updating(self, rules: Mapping[int, tuple[Rule, float]], sums: dict[View, Operand]) -> list[Errand]:
        errands: list[Errand] = []
        for device in sorted(self.devices):
            groups: dict[tuple[Rule, float], list[_Piece]] = {}
            for piece in self._pieces_of(device):
                if piece.view.parameter in rules:
                    groups.setdefault(rules[piece.view.parameter], []).append(piece)
            for (rule, scale), pieces in groups.items():
                used = tuple(
                    one for piece in pieces for one in (piece.weight, self.accumulator(piece.view, sums), *piece.states)
                )
                weights = tuple(
                    Leased(
                        piece.weight.id, self.accumulator(piece.view, sums).id, tuple(one.id for one in piece.states)
                    )
                    for piece in pieces
                )
                program = Update(rule=rule, weights=weights, scale=scale)
                flops = update_flops(rule, sum(piece.view.area for piece in pieces))
                errands.append(Errand(device=device, program=program, operands=used, held=used, flops=flops))
        return errands

    def _reading(self, parameters: Collection[int], sums: dict[View, Operand] | None) -> list[Errand]:
        errands: list[Errand] = []
        for piece in self._pieces_with(parameters):
            gradient = () if sums is None else (self.accumulator(piece.view, sums),)
            wanted = (*piece.operands, *gradient)
            errands += [_collect(piece, operand) for operand in wanted]
        return errands

    def _snapping(self, parameters: Collection[int], copies: list[Operand]) -> list[Errand]:
        """Word the errands of a snapshot: what `_reading` collects, in that order, from copies as far as they fit."""
        errands: list[Errand] = []
        copied: dict[DeviceId, list[tuple[Operand, Operand]]] = {}
        for piece in self._pieces_with(parameters):
            device = piece.device
            size_bytes = max(_PIECE_S * self._fleet.up_bytes_per_s(device), _LEAST_PIECE_BYTES)
            for operand in piece.operands:
                if self._copied_bytes(device) + operand.bytes <= self._spare_bytes.get(device, 0):
                    copy = self._operands.made(operand.bytes)
                    copies.append(copy)
                    self._copies[copy] = device
                    copied.setdefault(device, []).append((operand, copy))
                    collect = replace(_collect(piece, copy), held=(operand,), is_pressing=False)
                else:
                    collect = _collect(piece, operand)
                errands += _cut(replace(collect, is_urgent=False), size_bytes)
        for device, pairs in copied.items():
            used = tuple(operand for pair in pairs for operand in pair)
            program = Copy(copies=tuple((operand.id, copy.id) for operand, copy in pairs))
            flops = copy_flops(sum(copy.bytes for _, copy in pairs) // DEVICE_BYTES)
            held = tuple(operand for operand, _ in pairs)
            errands.append(Errand(device=device, program=program, operands=used, held=held, flops=flops))
        return errands

    def _pieces_with(self, parameters: Collection[int]) -> list[_Piece]:
        return [self._pieces[view] for number in sorted(parameters) for view in self.views(number)]

    def _pieces_of(self, device: DeviceId) -> list[_Piece]:
        return [piece for piece in self._pieces.values() if piece.device == device]

    def _slice(self, tensor: Tensor, view: View) -> Operand:
        return replace(self._operands.slice(tensor, view.rows, view.cols).operand, is_kept=True)


def _collect(piece: _Piece, operand: Operand) -> Errand:
    rows, cols = piece.view.height, piece.view.width
    program = Collect(accumulator=operand.id, rows=rows, cols=cols)
    return Errand(device=piece.device, program=program, operands=(operand,), held=(operand,), rows=rows, cols=cols)


def _cut(collect: Errand, size_bytes: float) -> Iterator[Errand]:
    """Cut the reading of an operand into pieces of whole rows."""
    height = max(1, int(size_bytes) // (DEVICE_BYTES * collect.cols))
    for first in range(0, collect.rows, height):
        rows = min(height, collect.rows - first)
        program = msgspec.structs.replace(collect.program, rows=rows, first_row=first)
        yield replace(collect, program=program, rows=rows)


def _fill(whole: Matrix, pieces: Iterator[Matrix]) -> None:
    """Copy as many pieces as a matrix has, from its first row on."""
    filled = 0
    while filled < len(whole):
        piece = next(pieces)
        whole[filled : filled + len(piece)] = piece
        filled += len(piece)


def _empty(decoder: Decoder, number: int) -> Matrix:
    shape = decoder.parameters[number]
    return np.empty((shape.rows, shape.cols), dtype=np.float32)
