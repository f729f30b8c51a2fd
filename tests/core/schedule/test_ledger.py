"""Laws of the ledger: elements are accepted once, nothing is lost, held operands are not resent, memory suffices.

A twin replays the ledger's commands as devices would see them; the state machine below handles orphans, hedges and
deadlines as a server might, well or badly.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.grids import examples
from tests.support.ledger_twin import (
    LAST,
    MISSING,
    NO_GROUP,
    OPERANDS,
    Cells,
    Stay,
    Twin,
    span,
)
from tests.support.ledgers import NAMES, PACE, T

from cleave.core.cost.rates import Pace
from cleave.core.schedule.ledger import TICK_S, Ledger
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Cancel,
    CancelSent,
    Command,
    DeviceAdded,
    DeviceAnswered,
    DeviceId,
    DeviceRemoved,
    Event,
    Forget,
    GroupsAbandoned,
    Hedge,
    Late,
    Operand,
    OperandId,
    OperandsReleased,
    Orphan,
    Overdue,
    PaceMeasured,
    Refuse,
    Resend,
    ResultArrived,
    Start,
    Task,
    TaskFailed,
    TaskId,
    TasksSubmitted,
    Tick,
)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.twin = Ledger(), Twin()
        self.now, self.ticked = 0.0, 0.0
        self.tasks: list[Task] = []
        self.cancels: list[tuple[Task, tuple[OperandId, ...]]] = []
        """Cancellations yet to be sent, of departed devices too, with the operands sent for their tasks."""
        self.answers: list[Cells] = []
        """How often each element of each product was accepted."""
        self.places: dict[TaskId, tuple[int, int, int]] = {}
        """region -> its product and its position there"""
        self.parked: list[tuple[Task, Rectangle]] = []
        self.abandoned: set[int] = set()
        self.depth = 0
        self.data: st.DataObject | None = None

    def draw(self, strategy: st.SearchStrategy[T], otherwise: T) -> T:
        return otherwise if self.data is None else self.data.draw(strategy)

    # -------------------------------------------------------------------------------------------- the driver

    def tell(self, event: Event) -> list[Command]:
        sent = {id: missing for stay in self.twin.stays.values() for id, missing in stay.sent_with.items()}
        if isinstance(event, TasksSubmitted) and not self.twin.regions.keys() - {task.id for task in event.tasks}:
            self.ticked = self.now
        commands = self.ledger.handle(event, self.now)
        for command in commands:
            self.twin.replay(command)
            if isinstance(command, Accept):
                product, top, left = self.places[command.task.region_id]
                for fresh in command.fresh:
                    at = span(fresh.moved(top + command.task.top, left + command.task.left))
                    self.answers[product][at] += 1
            elif isinstance(command, Start):
                sent[command.task.id] = command.missing
            elif isinstance(command, Cancel):
                self.cancels.append((command.task, sent[command.task.id]))
        self.note_moved_tasks()
        self.twin.settle()
        self.ledger.check()
        self.depth += 1
        for command in commands:
            if isinstance(command, Orphan):
                for part in command.missing:
                    self.plan_again(command.task, part)
        for command in commands:
            if isinstance(command, Hedge):
                for part in command.missing:
                    self.hedge(command.task, part)
        self.depth -= 1
        return commands

    def note_moved_tasks(self) -> None:
        """Notice when a late device's waiting tasks moved; tasks that others cover entirely move without a command."""
        for name, stay in self.twin.stays.items():
            if stay.is_late and self.ledger.unfinished(name) == len(stay.running):
                stay.waiting = []

    def new_task(self, device: DeviceId, at: Rectangle, *, product: int = NO_GROUP, of: Task | None = None) -> Task:
        small = [OPERANDS[0]]
        operands = st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=3, unique=True)
        task = Task(
            id=TaskId(len(self.tasks) + 1),
            device=device,
            priority=self.draw(st.integers(0, 3), 0),
            operands=tuple(self.draw(operands if of is None else st.just(list(of.operands)) | operands, small)),
            rows=at.rows,
            cols=at.cols,
            result_bytes=self.draw(st.integers(0, 20), 0),
            flops=self.draw(st.sampled_from([0.0, 1.0, 10.0, 50.0]), 1.0),
            up_bytes=at.area,
            region=None if of is None else of.region_id,
            top=0 if of is None else of.top + at.top,
            left=0 if of is None else of.left + at.left,
            group=product,
        )
        self.tasks.append(task)
        return task

    def submit(self, tasks: Sequence[Task]) -> list[Command]:
        for task in tasks:
            self.twin.submit(task)
        return self.tell(TasksSubmitted(tuple(tasks)))

    def plan_again(self, lost: Task, part: Rectangle) -> None:
        """Submit an orphan as new regions, in one or several pieces, on any devices; or park it."""
        there = sorted(self.twin.stays)
        if not there or self.depth > 3 or self.draw(st.booleans(), True):
            self.parked.append((lost, part))
            return
        product, top, left = self.places[lost.region_id]
        new: list[Task] = []
        for piece in self.pieces(part):
            task = self.new_task(self.draw(st.sampled_from(there), there[0]), piece, product=product)
            self.places[task.id] = (product, top + lost.top + piece.top, left + lost.left + piece.left)
            new.append(task)
        self.submit(new)

    def hedge(self, late: Task, part: Rectangle) -> None:
        """Submit hedges in one or several pieces, on healthy or departed devices; or none."""
        others = [name for name, stay in self.twin.stays.items() if not stay.is_late]
        others += [name for name in NAMES if name not in self.twin.stays][:1]
        if not others or self.depth > 3 or self.draw(st.integers(0, 3), 0) == 3:
            return
        self.submit(
            [
                self.new_task(self.draw(st.sampled_from(others), others[0]), piece, of=late)
                for piece in self.pieces(part)
            ]
        )

    def pieces(self, part: Rectangle) -> list[Rectangle]:
        row = self.draw(st.integers(part.top, part.bottom), part.bottom)
        col = self.draw(st.integers(part.left, part.right), part.right)
        cut = [
            Rectangle(top, bottom, left, right)
            for top, bottom in pairwise((part.top, row, part.bottom))
            for left, right in pairwise((part.left, col, part.right))
        ]
        return [piece for piece in cut if piece.area > 0]

    # -------------------------------------------------------------------------------------------- devices

    @initialize(memory=st.lists(st.integers(60, 250), min_size=2, max_size=4))
    def devices_are_here(self, memory: list[int]) -> None:
        for name, size in zip(NAMES, memory, strict=False):
            self.joins(name, size)

    @rule(name=st.sampled_from(NAMES), memory=st.integers(1, 150) | st.integers(60, 250))
    def joins(self, name: DeviceId, memory: int) -> None:
        if name not in self.twin.stays:
            self.twin.stays[name] = Stay(memory)
            assert self.tell(DeviceAdded(name, memory, PACE)) == []

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def leaves(self, name: DeviceId, data: st.DataObject) -> None:
        self.data = data
        self.part(name)

    def part(self, name: DeviceId) -> None:
        self.twin.leave(name)
        assert all(isinstance(command, Orphan) for command in self.tell(DeviceRemoved(name)))

    @rule(name=st.sampled_from(NAMES))
    def answers_a_probe(self, name: DeviceId) -> None:
        assert all(isinstance(command, Back) for command in self.tell(DeviceAnswered(name)))

    @rule(name=st.sampled_from(NAMES), rate=st.sampled_from([30.0, 100.0, 300.0]))
    def is_measured(self, name: DeviceId, rate: float) -> None:
        assert self.tell(PaceMeasured(name, Pace(rate, rate, rate, 0.0071))) == []

    # -------------------------------------------------------------------------------------------- tasks

    @rule(data=st.data(), count=st.integers(1, 8))
    def products_come(self, data: st.DataObject, count: int) -> None:
        self.data = data
        new: list[Task] = []
        for _ in range(count):
            rows, cols = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
            name = data.draw(st.sampled_from(sorted(self.twin.stays) or NAMES) | st.sampled_from(NAMES))
            task = self.new_task(name, Rectangle(0, rows, 0, cols), product=len(self.answers))
            self.places[task.id] = (len(self.answers), 0, 0)
            self.answers.append(np.zeros((rows, cols), dtype=np.int64))
            new.append(task)
        there = self.twin.stays
        hopeless = [task.id for task in new if task.device not in there or not there[task.device].can_ever_fit(task)]
        commands = self.submit(new)
        assert [command.task.id for command in commands if isinstance(command, Orphan)] == hopeless

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def parked_orphans_are_planned(self, data: st.DataObject) -> None:
        self.data = data
        parked, self.parked = self.parked, []
        for lost, part in parked:
            self.plan_again(lost, part)

    @precondition(lambda self: self.twin.regions)
    @rule(data=st.data())
    def a_product_is_abandoned(self, data: st.DataObject) -> None:
        """Abandon all regions that a product has become, and a group that does not exist."""
        self.data = data
        product = self.places[data.draw(st.sampled_from(sorted(self.twin.regions)))][0]
        self.abandoned.add(product)
        self.parked = [(lost, part) for lost, part in self.parked if self.places[lost.region_id][0] != product]
        regions = [id for id, place in self.places.items() if place[0] == product]
        for id in regions:
            self.twin.abandon(id)
        commands = self.tell(GroupsAbandoned((product, NO_GROUP)))
        assert all(isinstance(command, Cancel | Start | Forget) for command in commands)

    @rule(operands=st.lists(st.sampled_from(OPERANDS), min_size=1, max_size=4, unique=True))
    def operands_are_released(self, operands: list[Operand]) -> None:
        stays = self.twin.stays.values()
        wanted = {operand.id for stay in stays for task in stay.waiting for operand in task.operands}
        released = {operand.id for operand in operands}
        self.twin.dead |= released - wanted
        self.tell(OperandsReleased(tuple(sorted(released))))

    # -------------------------------------------------------------------------------------------- results

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def any_result_arrives(self, data: st.DataObject) -> None:
        """Any rectangle of any task from any device: too large, repeated, stale, empty, outside, inside out."""
        self.data = data
        task = data.draw(st.sampled_from(self.twin.running() or self.tasks) | st.sampled_from(self.tasks))
        name = data.draw(st.just(task.device) | st.sampled_from(NAMES))
        top, left = data.draw(st.integers(-1, task.rows)), data.draw(st.integers(-1, task.cols))
        height, width = data.draw(st.integers(-2, 4)), data.draw(st.integers(-2, 4))
        self.result(name, task, Rectangle(top, top + height, left, left + width))

    @precondition(lambda self: self.twin.running())
    @rule(data=st.data(), repeat=st.booleans())
    def a_correct_result_arrives(self, data: st.DataObject, repeat: bool) -> None:
        self.data = data
        running = self.twin.running()
        task = data.draw(st.sampled_from(self.contested() or running) | st.sampled_from(running))
        most = self.largest_owed(task, data.draw(st.integers(0, 24)))
        height, width = data.draw(st.integers(1, most.rows)), data.draw(st.integers(1, most.cols))
        part = most._replace(bottom=most.top + height, right=most.left + width)
        self.result(task.device, task, part)
        if repeat and task.id not in self.twin.stays[task.device].ghosts:
            assert not self.result(task.device, task, part)

    @precondition(lambda self: self.twin.running())
    @rule(data=st.data())
    def the_rest_of_a_task_arrives(self, data: st.DataObject) -> None:
        self.data = data
        self.finish(data.draw(st.sampled_from(self.twin.running())))

    @precondition(lambda self: self.cancels)
    @rule(data=st.data())
    def a_result_of_a_cancelled_task_arrives(self, data: st.DataObject) -> None:
        self.data = data
        task, _ = data.draw(st.sampled_from(self.cancels))
        assert not self.result(task.device, task, task.whole)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def a_task_fails(self, data: st.DataObject) -> None:
        self.data = data
        task = data.draw(st.sampled_from(self.twin.running() or self.tasks) | st.sampled_from(self.tasks))
        name = data.draw(st.just(task.device) | st.sampled_from(NAMES))
        stay = self.twin.stays.get(name)
        is_its_own = stay is not None and task.id in stay.running
        if is_its_own:
            self.twin.fail(task)
        commands = self.tell(TaskFailed(name, task.id))
        assert [command.task.id for command in commands if isinstance(command, Cancel)] == [task.id] * is_its_own
        assert any(isinstance(command, Refuse) for command in commands) == (not is_its_own)

    @precondition(lambda self: self.cancels)
    @rule(data=st.data())
    def a_cancellation_is_sent(self, data: st.DataObject) -> None:
        self.data = data
        index = data.draw(st.integers(0, len(self.cancels) - 1))
        task, sent = self.cancels.pop(index)
        unsent = tuple(data.draw(st.lists(st.sampled_from(sent), unique=True))) if sent else ()
        self.send_cancel(task, unsent)

    def send_cancel(self, task: Task, unsent: tuple[OperandId, ...]) -> None:
        """Send a cancellation; its device may have left since, or rejoined."""
        stay = self.twin.stays.get(task.device)
        is_there = stay is not None and task.id in stay.ghosts
        running = stay.running.values() if stay is not None else ()
        live = {operand.id for other in running for operand in other.operands}
        self.twin.cancel_sent(task.device, task.id, unsent)
        commands = self.tell(CancelSent(task.device, task.id, unsent))
        resent = {operand for command in commands if isinstance(command, Resend) for operand in command.operands}
        if is_there:
            assert resent >= set(unsent) & live, "unsent operands that are needed are resent"
        else:
            assert commands == []

    def result(self, name: DeviceId, task: Task, part: Rectangle) -> bool:
        """Deliver a result; return whether some of it was new."""
        stay = self.twin.stays.get(name)
        is_owed = self.twin.owes(name, task, part)
        is_running = stay is not None and task.id in stay.running
        cells = self.twin.regions.get(task.region_id)
        area = part.moved(task.top, task.left)
        is_new = is_owed and is_running and cells is not None and bool((cells[span(area)] == MISSING).any())
        if is_owed and is_running and not is_new:
            self.twin.returned(task, part)
        is_fault = not (is_owed or (stay is not None and task.id in stay.past))
        commands = self.tell(ResultArrived(name, task.id, part))
        first = commands[0]
        if is_new:
            assert isinstance(first, Accept)
            assert (first.task, first.part) == (task, part)
        else:
            assert isinstance(first, Refuse)
            assert (first.device, first.is_fault) == (name, is_fault)
        return is_new

    def contested(self) -> list[Task]:
        """Running tasks whose regions other devices run too."""
        regions = Counter(task.region_id for task in self.twin.running())
        return [task for task in self.twin.running() if regions[task.region_id] > 1]

    def largest_owed(self, task: Task, start: int) -> Rectangle:
        """Grow a rectangle from some owed element, to the right and then down."""
        owed = self.twin.stays[task.device].owed[task.id]
        elements: list[list[int]] = np.argwhere(owed).tolist()
        top, left = elements[start % len(elements)]
        right, bottom = left, top
        while right < task.cols and owed[top, right]:
            right += 1
        while bottom < task.rows and owed[bottom, left:right].all():
            bottom += 1
        return Rectangle(top, bottom, left, right)

    def finish(self, task: Task) -> None:
        stay = self.twin.stays[task.device]
        while task.id in stay.running:
            self.result(task.device, task, self.largest_owed(task, 0))

    # -------------------------------------------------------------------------------------------- time

    @rule(data=st.data(), count=st.sampled_from([1, 5, 20, 80]), step=st.sampled_from([0.05, TICK_S, 2 * TICK_S]))
    def time_passes(self, data: st.DataObject, count: int, step: float) -> None:
        self.data = data
        for _ in range(count):
            self.tick(step)

    @precondition(lambda self: len(self.twin.stays) > 1 and self.twin.running())
    @rule(data=st.data())
    def time_passes_until_something_is_hedged(self, data: st.DataObject) -> None:
        self.data = data
        for _ in range(80):
            if any(isinstance(command, Hedge) for command in self.tick(TICK_S)):
                break

    @rule(data=st.data(), step=st.sampled_from([0.3, 1.0, 7.0, 60.0, 5000.0]))
    def the_server_stalls(self, data: st.DataObject, step: float) -> None:
        """For devices, a stall of any length is no longer than two ticks."""
        self.data = data
        other = copy.deepcopy(self.ledger).handle(Tick(), max(self.now, self.ticked + 2 * TICK_S))
        commands = self.tick(max(self.now + step - self.ticked, 0.0) if self.now > self.ticked else step)
        for kind in (Late, Overdue):
            blamed, expected = ([c.device for c in some if isinstance(c, kind)] for some in (commands, other))
            assert blamed == expected

    def tick(self, step: float) -> list[Command]:
        self.now = self.now + step
        self.ticked = self.now
        commands = self.tell(Tick())
        for command in commands:
            if isinstance(command, Overdue) and self.draw(st.integers(0, 3), 1):
                self.part(command.device)
        return commands

    # -------------------------------------------------------------------------------------------- laws

    @invariant()
    def the_twin_agrees(self) -> None:
        assert self.ledger.is_busy == bool(self.twin.regions)
        unfinished = {self.places[id][0] for id in self.twin.regions}
        assert {group for group in range(NO_GROUP, len(self.answers)) if self.ledger.is_open(group)} == unfinished
        assert self.ledger.late == {name for name, stay in self.twin.stays.items() if stay.is_late}
        for name, stay in self.twin.stays.items():
            assert set(self.ledger.tasks(name)) == {task.id for task in stay.placed}
            assert self.ledger.unfinished(name) == len(stay.live)
            held = {operand.id for operand in OPERANDS if self.ledger.holds(name, operand.id)}
            assert held == set(stay.held)
            assert held == {operand.id for operand in OPERANDS if name in self.ledger.holders(operand.id)}
            needed = {operand.id for operand in OPERANDS if self.ledger.needs(name, operand.id)}
            assert needed == {operand.id for task in stay.running.values() for operand in task.operands}
            assert held & self.twin.dead <= stay.needed, "released operands go with the last task that needs them"

    @invariant()
    def the_least_busy_devices_are_the_soonest_free(self) -> None:
        stays = {name: stay for name, stay in self.twin.stays.items() if not stay.is_late}
        busy_s = {
            name: self.ledger.backlog_s(name, self.now) if stay.placed or stay.waiting else -1.0
            for name, stay in stays.items()
        }
        for limit in range(len(NAMES) + 1):
            found = self.ledger.least_busy(limit)
            assert len(found) == min(limit, len(stays))
            assert len({*found}) == len(found)
            left_out = [busy_s[name] for name in stays if name not in found]
            ranked = [busy_s[name] for name in found]
            assert ranked == sorted(ranked), "idle devices first, then by their backlog"
            assert max(ranked, default=-1.0) <= min(left_out, default=math.inf)

    @invariant()
    def the_most_urgent_waiting_task_starts_as_soon_as_it_fits(self) -> None:
        assert not any(stay.could_start() for stay in self.twin.stays.values())

    def teardown(self) -> None:
        """Once all remaining work is done, every element was accepted once and nothing is held."""
        self.data = None
        self.twin.stays[LAST] = Stay(10**6)
        self.tell(DeviceAdded(LAST, 10**6, PACE))
        while self.cancels or self.twin.regions or self.parked:
            while self.cancels:
                task, sent = self.cancels.pop()
                self.send_cancel(task, sent)
            for task in self.twin.running():
                if task.device in self.twin.stays and task.id in self.twin.stays[task.device].running:
                    self.finish(task)
            parked, self.parked = self.parked, []
            new: list[Task] = []
            for lost, part in parked:
                product, top, left = self.places[lost.region_id]
                task = self.new_task(LAST, part, product=product)
                self.places[task.id] = (product, top + lost.top + part.top, left + lost.left + part.left)
                new.append(task)
            self.submit(new)
        for product, answers in enumerate(self.answers):
            assert (answers <= 1 if product in self.abandoned else answers == 1).all()
        assert not self.ledger.is_busy
        assert all(self.ledger.unfinished(name) == 0 for name in self.twin.stays)
        self.tell(OperandsReleased(tuple(operand.id for operand in OPERANDS)))
        assert not any(stay.held or stay.placed for stay in self.twin.stays.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None, derandomize=True)
