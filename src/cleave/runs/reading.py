"""Read a run from its directory: state, losses, devices, checkpoints and sizes.

Everything comes from files: the event log, the settings, and the claim of a process that still trains there. Only
reads, which is safe beside a running server. Printing is in `report/runs.py`, removing in `removal.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal

import msgspec

from cleave import events
from cleave.config import TrainConfig, load_config
from cleave.errors import InputError
from cleave.run_files import EVENTS, SETTINGS, Claim, find_runs, running, runs_home

State = Literal["running", "done", "interrupted", "failed"]
CHECKPOINTS: Final = "checkpoints"
MODEL: Final = "model"
CHECKPOINT_NAME: Final = re.compile(r"step-(\d{6,})")
_LAST_S: Final = 2.5e11  # in the year 9892
_ABSURD: Final = 1e30
_STOPPED: Final = frozenset({"interrupted", "stopped"})  # reasons for which a run is no failure


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    """A device as the event log shows it."""

    name: str
    kernel: str
    flops_per_s: float
    memory_bytes: float
    joined: int
    """How often it joined."""
    connected_s: float
    lost_tasks: int
    audited_units: int
    wrong: int
    """Results that were refused, and audits that it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    path: Path
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that is not the default."""

    name: str
    value: object
    default: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its directory shows it."""

    path: Path
    state: State
    reason: str
    """Why it failed; empty otherwise."""
    claim: Claim | None
    started_s: float | None
    """Seconds since 1970; None if it never started."""
    ended_s: float | None
    """Time of the last event, in seconds since 1970."""
    model: str
    parameters: int | None
    step: int
    """Finished steps."""
    steps: int
    """Steps of the whole run."""
    losses: tuple[float, ...]
    """One per finished step in the log, in order."""
    evaluations: tuple[tuple[int, float], ...]
    """Step and loss."""
    tokens: int
    devices: tuple[SeenDevice, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    """Oldest first."""
    exported: Path | None
    settings: tuple[Setting, ...]
    settings_problem: str
    """Why the settings cannot be read; empty otherwise."""
    size_bytes: int

    @property
    def name(self) -> str:
        return self.path.name


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run: settings and an event log."""
    return (directory / SETTINGS).is_file() and (directory / EVENTS).is_file()


def has_checkpoint(directory: Path) -> bool:
    """Whether a run has a checkpoint to resume from."""
    return bool(_checkpoints(directory / CHECKPOINTS))


def list_runs(directory: Path | None = None) -> list[Run]:
    """Read the runs in a directory, by default the home of all runs, newest first."""
    return [read_run(path) for path in _runs_in(directory)]


def find_run(name: str | None, directory: Path | None = None) -> Path:
    """Find a run by its name or path; None finds the newest one."""
    home = directory or runs_home()
    if name is None:
        newest = next(iter(_runs_in(directory)), None)
        if newest is None:
            raise InputError(f"there is no run in {home}; start one with cleave train, or give its directory")
        return newest
    name = str(Path(name))  # without the slash that shells add to directories
    is_name = Path(name).name == name and name not in {".", ".."}
    candidates = [home / name, Path(name)] if is_name else [Path(name)]
    if is_name and directory is not None and is_run(directory) and directory.absolute().name == name:
        candidates.insert(0, directory)
    found = next((path for path in candidates if is_run(path)), None)
    if found is not None:
        return found
    existing = next((path for path in candidates if path.exists()), None)
    if existing is not None:
        raise InputError(f"{existing} is not a run: expected {SETTINGS} and {EVENTS} in it; see cleave runs list")
    raise InputError(f"there is no run {name}{f' in {home}' if is_name else ''}; see cleave runs list")


def read_run(directory: Path) -> Run:
    """Read a run. Damaged settings or log lines are reported or skipped, never raised."""
    config, problem = _settings(directory / SETTINGS)
    history = _History()
    for event in _events(directory / EVENTS):
        history.add(event)
    claim = running(directory)
    model = directory / MODEL
    return Run(
        path=directory,
        state="running" if claim is not None else history.state,
        reason="" if claim is not None else history.failure,
        claim=claim,
        started_s=history.started_s,
        ended_s=history.last_s,
        model=history.started.model if history.started else config.model,
        parameters=history.started.parameters if history.started else None,
        step=history.step,
        steps=history.started.steps if history.started else config.steps,
        losses=tuple(history.losses[step] for step in sorted(history.losses)),
        evaluations=tuple(sorted(history.evaluations.items())),
        tokens=sum(history.tokens.values()),
        devices=tuple(device.seen(history.last_s or 0.0) for device in history.devices.values()),
        checkpoints=_checkpoints(directory / CHECKPOINTS),
        exported=model if model.is_dir() else None,
        settings=_changed(config),
        settings_problem=problem,
        size_bytes=size_bytes(directory),
    )


def size_bytes(path: Path) -> int:
    """Sum the sizes of the files below a path. Does not follow links."""
    total, waiting = 0, [path]
    while waiting:
        with suppress(OSError):  # removed meanwhile, as a running server removes old checkpoints
            found = waiting.pop()
            if found.is_symlink() or not found.is_dir():
                total += found.lstat().st_size
            else:
                waiting += found.iterdir()
    return total


# ------------------------------------------------------------------------------------------------------ event log


@dataclass(slots=True, kw_only=True)
class _Device:
    """A device while its events are read."""

    joined: events.DeviceJoined
    times: int = 0
    since_s: float | None = None
    connected_s: float = 0.0
    lost_tasks: int = 0
    audited_units: int = 0
    wrong: int = 0

    def disconnect(self, now_s: float) -> None:
        if self.since_s is not None:
            self.connected_s += max(0.0, now_s - self.since_s)
        self.since_s = None

    def seen(self, now_s: float) -> SeenDevice:
        self.disconnect(now_s)
        return SeenDevice(
            name=self.joined.device,
            kernel=self.joined.kernel,
            flops_per_s=self.joined.flops_per_s,
            memory_bytes=self.joined.memory_bytes,
            joined=self.times,
            connected_s=self.connected_s,
            lost_tasks=self.lost_tasks,
            audited_units=self.audited_units,
            wrong=self.wrong,
        )


@dataclass(slots=True)
class _History:
    """State of a run while its events are read, in order; a resumed run starts several times."""

    started: events.RunStarted | None = None
    finished: events.RunFinished | None = None
    started_s: float | None = None
    last_s: float | None = None
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict[int, float])
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    devices: dict[str, _Device] = field(default_factory=dict[str, _Device])

    @property
    def state(self) -> State:
        """State of a run without a process: killed ones left no last event."""
        if self.finished is None or self.finished.reason in _STOPPED:
            return "interrupted"
        return "done" if self.finished.reason == "done" else "failed"

    @property
    def failure(self) -> str:
        return self.finished.reason if self.finished is not None and self.state == "failed" else ""

    def add(self, event: events.AnyEvent) -> None:
        match event:
            case events.RunStarted():
                self._start(event)
            case events.RunFinished():
                self.finished = event
                self._disconnect_all(event.time_s)
            case events.StepDone():
                self.step = event.step
                self.losses[event.step], self.tokens[event.step] = event.loss, event.tokens
            case events.Evaluated():
                self.evaluations[event.step] = event.loss
            case events.DeviceJoined():
                device = self.devices.setdefault(event.device, _Device(joined=event))
                device.joined, device.since_s, device.times = event, event.time_s, device.times + 1
            case events.DeviceLeft() if (device := self.devices.get(event.device)) is not None:
                device.disconnect(event.time_s)
                device.lost_tasks += event.lost_tasks
            case events.Audited() if (device := self.devices.get(event.device)) is not None:
                device.audited_units += event.units
                device.wrong += not event.is_right
            case events.ResultRefused() if (device := self.devices.get(event.device)) is not None:
                device.wrong += 1
            case _:
                pass
        self.last_s = event.time_s

    def _start(self, event: events.RunStarted) -> None:
        """Forget steps after the checkpoint that the run resumed from: they are done again."""
        if self.started is None:
            self.started_s = event.time_s
        else:
            self._disconnect_all(self.last_s or event.time_s)
        self.started, self.finished = event, None
        self.step = event.first_step - 1
        for known in (self.losses, self.tokens, self.evaluations):
            for step in [step for step in known if step >= event.first_step]:
                del known[step]

    def _disconnect_all(self, now_s: float) -> None:
        for device in self.devices.values():
            device.disconnect(now_s)


def _events(log: Path) -> Iterable[events.AnyEvent]:
    try:
        yield from filter(_is_plausible, events.read_events(log))
    except OSError as fault:
        raise InputError(f"cannot read {log}: {fault.strerror}; check who may read it") from None


def _is_plausible(event: events.AnyEvent) -> bool:
    """Whether an event's numbers can be added up and shown, and its time is one; a stranger's log may hold anything."""
    values: tuple[object, ...] = msgspec.structs.astuple(event)
    numbers = [value for value in values if isinstance(value, int | float)]
    return 0 <= event.time_s <= _LAST_S and all(abs(number) < _ABSURD for number in numbers)


# ---------------------------------------------------------------------------------------------------------- files


def _runs_in(directory: Path | None) -> list[Path]:
    """List the runs in a directory, newest first; a run's own directory is a list of one."""
    if directory is None:
        return [path for path in find_runs(runs_home()) if is_run(path)]
    if not directory.is_dir():
        raise InputError(f"--dir {directory}: there is no such directory; check the path")
    return [directory] if is_run(directory) else [path for path in find_runs(directory) if is_run(path)]


def _settings(file: Path) -> tuple[TrainConfig, str]:
    try:
        return load_config(file, {}), ""
    except InputError as fault:  # damaged, or written by another version
        return TrainConfig(), str(fault)


def _changed(config: TrainConfig) -> tuple[Setting, ...]:
    """List the settings that differ from the defaults, except for the place of the run itself."""
    usual = TrainConfig()
    names = [each.name for each in fields(config) if each.name != "out"]
    values = [Setting(name=name, value=getattr(config, name), default=getattr(usual, name)) for name in names]
    return tuple(setting for setting in values if setting.value != setting.default)


def _checkpoints(directory: Path) -> tuple[SavedCheckpoint, ...]:
    try:
        found = [(CHECKPOINT_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    except OSError:
        return ()
    saved = [
        SavedCheckpoint(path=path, step=int(match[1]), size_bytes=size_bytes(path))
        for match, path in found
        if match is not None
    ]
    return tuple(sorted(saved, key=lambda each: each.step))
