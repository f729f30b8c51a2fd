"""Drive the engine in an event loop: devices' messages become its events, its actions become messages and jobs.

One crossing in (`post_soon`, from any thread) and one out (futures that actions resolve). The loop moves bytes and lets
the engine decide; computation goes to the pool, planning to the planner. Other threads read the engine's state under
`lock`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

from cleave import events
from cleave.core.schedule.ledger import TICK_S
from cleave.core.schedule.members import STAND_IN
from cleave.core.schedule.shared_links import Carried
from cleave.core.schedule.tasks import (
    Cancel,
    DeviceAdded,
    DeviceId,
    DeviceRemoved,
    Forget,
    OperandId,
    OperandsReleased,
    Resend,
    Start,
    Tick,
)
from cleave.errors import CleaveError, ConnectionLost
from cleave.protocol.numbers import Codec
from cleave.server.admission.doorkeeper import Doorkeeper
from cleave.server.admission.handshake import ProbeBudget, joined, welcome
from cleave.server.admission.tokens import Keys
from cleave.server.connection import Connection, Disconnected
from cleave.server.contract import (
    Action,
    Audit,
    AuditEnded,
    Check,
    Checked,
    Closed,
    Disconnect,
    EngineEvent,
    Keep,
    Kept,
    MakePlan,
    Planned,
    Reject,
    Resolve,
    Resume,
    Run,
    Tell,
    Wait,
    WaitedInVain,
    run_of,
)
from cleave.server.engine import Engine
from cleave.server.heartbeats import Heartbeats
from cleave.server.operands import Operands
from cleave.server.pool import Pool
from cleave.server.vacancy import StandIn, Vacancy
from cleave.transport.base import Channel

Planner = Callable[[Run], object]
"""Plan a run for the connected devices, or raise InfeasibleError; called off the loop."""

_NOTICED_S = 0.25
"""Time for which a device may owe its first result and leave without being made to wait before it rejoins."""

_SAMPLED_S, _SAMPLED_DEVICE_S = 0.05, 1e-3
"""Seconds between two samples of the traffic, and the minimum per device, as a sample visits all of them."""

log = logging.getLogger(__name__)


class Driver:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        *,
        lock: threading.RLock,
        codec: Codec,
        keys: Keys,
        planner: Planner,
        wait_s: float,
        stand_in: StandIn | None,
        stands_in: bool,
        listener: events.Listener,
        is_scale_test: bool = False,
    ) -> None:
        """`lock` guards the engine's state. With `stands_in`, the server stands in whenever no device is connected."""
        self.operands = Operands(codec, self._release)
        self._engine, self._loop, self._lock, self._keys, self._planner = engine, loop, lock, keys, planner
        self._listener, self._is_scale_test = listener, is_scale_test
        self._pool = Pool(loop)
        self.doorkeeper = Doorkeeper(keys)
        self._vacancy = Vacancy(
            loop,
            wait_s=wait_s,
            stand_in=stand_in,
            serve=self.serve,
            is_empty=lambda: not self._connections,
            is_waiting=lambda: self._engine.is_waiting,
            give_up=lambda error: self.post(WaitedInVain(error)),
            listener=listener,
        )
        self._stands_in = self._vacancy.may_stand_in = stands_in
        self.fleet_changed = threading.Condition(lock)
        """Notified when a device joins or leaves."""
        self._inbox: deque[EngineEvent] = deque()
        self._released: deque[OperandId] = deque()
        """Operands that nothing refers to any more; filled from any thread."""
        self._is_releasing = False
        self._is_draining = False
        self._ticking: asyncio.TimerHandle | None = None
        self._sampling: asyncio.TimerHandle | None = None
        self._connections: dict[DeviceId, Connection] = {}
        self._probes, self._heartbeats = ProbeBudget(), Heartbeats(loop)
        self._goodbye: tuple[str, bool] | None = None
        self._gone_down = self._gone_up = 0
        self._idle_reason = ""

    # -------------------------------------------------------------------------------------------- any thread

    def post_soon(self, event: EngineEvent) -> None:
        """Hand an event to the loop."""
        self._loop.call_soon_threadsafe(self.post, event)

    def traffic(self) -> tuple[int, int]:
        """Return bytes down and up so far, including those of departed devices."""
        channels = [connection.channel for connection in list(self._connections.values())]
        down, up = sum(c.sent_bytes for c in channels), sum(c.received_bytes for c in channels)
        return self._gone_down + down, self._gone_up + up

    def rescue(self, *, is_on: bool) -> None:
        """Let the server stand in for missing devices from now on; or only as it usually does."""
        self._loop.call_soon_threadsafe(lambda: self._rescue(is_on=is_on))

    def _rescue(self, *, is_on: bool) -> None:
        self._vacancy.may_stand_in = is_on or self._stands_in
        if not self._vacancy.may_stand_in:
            self.disconnect(DeviceId(STAND_IN), "what had to be saved is saved", rejoin=False)

    def tell_idle(self, reason: str) -> None:
        """Tell every device, and those that join later, why the fleet has no work; empty once it has some again."""
        self._loop.call_soon_threadsafe(self._tell_idle, reason)

    def _tell_idle(self, reason: str) -> None:
        self._idle_reason = reason
        for connection in self._connections.values():
            if reason:
                connection.tell_idle(reason)
            else:
                connection.forget_idleness()

    def _release(self, operands: tuple[OperandId, ...]) -> None:
        """Release operands that are no longer referenced; called by the garbage collector, in any thread."""
        self._released.extend(operands)
        if not self._is_releasing and not self._loop.is_closed():
            self._is_releasing = True
            self._loop.call_soon_threadsafe(self._release_all)

    def _release_all(self) -> None:
        """Release what was garbage-collected since the last time."""
        self._is_releasing = False  # first, so that what comes from now on is not missed
        released: list[OperandId] = []
        while self._released:
            released.append(self._released.popleft())
        self.operands.forget(released)
        self.post(OperandsReleased(tuple(released)))

    # -------------------------------------------------------------------------------------------- the loop

    def post(self, event: EngineEvent) -> None:
        """Hand an event to the engine, behind those already waiting."""
        self._inbox.append(event)
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self._inbox:
                with self._lock:
                    actions = self._engine.handle(self._inbox.popleft(), self._loop.time())
                for action in actions:
                    try:
                        self._act(action)
                    except Exception:  # a bug of ours, which must not keep the other actions from being carried out
                        log.exception("an action failed: %r", type(action).__name__)
        finally:
            self._is_draining = False
            if self._ticking is None and self._engine.ledger.is_busy:
                self._ticking = self._loop.call_later(TICK_S, self._tick)
            if self._sampling is None and self._engine.ledger.is_busy:
                each_s = max(_SAMPLED_S, len(self._connections) * _SAMPLED_DEVICE_S)
                self._sampling = self._loop.call_later(each_s, self._sample_traffic)

    def _tick(self) -> None:
        self._ticking = None
        self.post(Tick())

    def _sample_traffic(self) -> None:
        """Note what every device carried so far."""
        self._sampling = None
        carried = {str(name): Carried(*one.channel.flow) for name, one in self._connections.items() if name != STAND_IN}
        with self._lock:
            self._engine.roster.traffic.sampled(self._loop.time(), carried)

    def _act(self, action: Action) -> None:
        match action:
            case Start(task, missing):
                if task.device in self._connections:  # else it just left, and the engine is about to learn that
                    self._connections[task.device].start(task, missing)
            case Cancel(task):
                if task.device in self._connections:
                    self._connections[task.device].cancel(task)
            case Resend(device, operands):
                if device in self._connections:
                    self._connections[device].resend(operands)
            case Forget(device, operands):
                if device in self._connections:
                    self._connections[device].forget(operands)
            case Disconnect(device, reason, rejoin):
                if device in self._connections:
                    self._connections[device].disconnect(reason, rejoin=rejoin)
            case Check():
                self._check(action)
            case Keep(run, item):
                self._pool.submit(
                    "results",
                    lambda: run.results.keep(item),
                    lambda _, fault: self.post(Kept(run, item, fault)),
                )
            case Audit(run, case):
                self._pool.submit(
                    "audits",
                    lambda: run.results.audit(case),
                    lambda reason, fault: self.post(AuditEnded(run, case, str(reason or ""), fault)),
                )
            case MakePlan(run):
                self._pool.submit(
                    "plans",
                    lambda: self._planner(run),
                    lambda plan, fault: self.post(Planned(run, plan if fault is None else fault)),
                )
            case Wait(reason):
                self._vacancy.wait(reason)
            case Resume():
                self._vacancy.end()
            case Resolve(future, value):
                if not future.done():
                    future.set_result(value)
            case Reject(future, error):
                if not future.done():
                    future.set_exception(error)
            case Tell(event):
                self._listener(event)

    def _check(self, check: Check) -> None:
        task, part = check.task, check.part
        connection = self._connections.get(task.device)
        if connection is not None:
            connection.wait_for_check()
        results = run_of(task).results

        def checked(values: object, fault: Exception | None) -> None:
            if connection is not None:
                connection.result_checked()
            self.post(Checked(task.device, task, part, values, fault))

        self._pool.submit(
            "results", lambda: results.check(task, part, check.payload, is_strict=check.is_strict), checked
        )

    # -------------------------------------------------------------------------------------------- connections

    def disconnect(self, device: DeviceId, reason: str, *, rejoin: bool) -> None:
        """Send a device away that did nothing wrong."""
        if device in self._connections:
            self._connections[device].disconnect(reason, rejoin=rejoin, is_fault=False)

    async def serve(self, channel: Channel, own: str = "") -> None:
        """Serve a device from its hello to its last byte; `own` names the server's own device."""
        connection: Connection | None = None
        reason, rejoin, is_fault = "the connection closed", True, False
        try:
            member = await welcome(
                channel,
                self._engine.roster,
                self.doorkeeper,
                self._probes,
                self._lock,
                own,
                is_scale_test=self._is_scale_test,
            )
            if member is not None:
                connection = Connection(
                    channel,
                    member,
                    post=self.post,
                    operands=self.operands,
                    keys=self._keys,
                    ledger=self._engine.ledger,
                    roster=self._engine.roster,
                    lock=self._lock,
                    heartbeats=self._heartbeats,
                    runs_so_far=lambda: self._engine.runs_so_far,
                    listener=self._listener,
                )
                self._connections[connection.device] = connection
                self._listener(joined(member))
                if self._idle_reason:
                    connection.tell_idle(self._idle_reason)
                self.post(DeviceAdded(connection.device, member.memory_bytes, member.pace))
                if STAND_IN in self._connections and connection.device != STAND_IN:
                    self.disconnect(DeviceId(STAND_IN), "a device joined", rejoin=False)
                self._notify()
                reason = await connection.serve()
        except ConnectionLost as fault:
            reason = str(fault)
        except Disconnected as fault:
            reason, rejoin, is_fault = str(fault), fault.rejoin, fault.is_fault
        except (CleaveError, TimeoutError) as fault:
            reason, is_fault = str(fault) or "joining timed out", True
            log.info("connection ended: %s", reason)
        except Exception as fault:
            log.exception("internal error while serving a device")
            reason = f"internal server error: {fault!r}"
        finally:
            if connection is not None:
                self._end_stay(connection, is_fault=is_fault)
                self._remove(connection, self._goodbye[0] if self._goodbye else reason)
                told, may_rejoin = self._goodbye or (reason, rejoin)
                await connection.say_goodbye(told, rejoin=may_rejoin)
            await channel.close(reason)

    def _end_stay(self, connection: Connection, *, is_fault: bool) -> None:
        """Note whether the device was more trouble than help; one that vanishes at once costs nothing."""
        member, now = connection.member, self._loop.time()
        is_fault = is_fault or self._engine.ledger.waited_s(connection.device, now) > _NOTICED_S
        with self._lock:
            is_bad = member.was_bad or (is_fault and not member.has_helped)
            self._engine.roster.end_stay(connection.device, now, is_bad=is_bad)

    def _remove(self, connection: Connection, reason: str) -> None:
        device, channel = connection.device, connection.channel
        lost = self._engine.ledger.unfinished(device)
        self._gone_down += channel.sent_bytes
        self._gone_up += channel.received_bytes
        del self._connections[device]
        self._listener(events.DeviceLeft(device=device, reason=reason, lost_tasks=lost))
        self.post(DeviceRemoved(device))
        self._notify()

    def _notify(self) -> None:
        with self.fleet_changed:
            self.fleet_changed.notify_all()

    async def close(self, error: CleaveError, reason: str, *, rejoin: bool) -> None:
        """End every run with the error, and say goodbye to every device."""
        self._goodbye = (reason, rejoin)
        self.doorkeeper.close()
        self.post(Closed(error))
        for timer in (self._ticking, self._sampling):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(
            *(connection.say_goodbye(reason, rejoin=rejoin) for connection in self._connections.values())
        )
        self._pool.close()
