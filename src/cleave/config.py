"""Settings of a training run: TOML and command-line flags in, one validated frozen struct out.

The defaults are the demo: a small byte model, four local devices, Python's own library as text, about two minutes. Keys
are flat and match the field names, with - or _. This module validates single values only; whether a model, a file or an
address exists is checked where it is opened.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cleave import settings
from cleave.core.cost.wire import WireFormat, format_of
from cleave.core.model.grain import Grain
from cleave.core.model.lease import LeaseMode
from cleave.core.verify.trust import Level, level_of
from cleave.disk import read_whole
from cleave.errors import InputError
from cleave.settings import Alone, Offload

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")

_LOCAL_DEVICES = 4
_ALIASES = {"wait": "wait_s", "alone_wait": "alone_wait_s"}
"""Names of options that lack the unit of their field."""
_MAX_MAGNITUDE = 1e300  # rejects infinities, and integers beyond any float
_MOST_BYTES = 1 << 16
_LONGEST_LINE = 1 << 13
"""Bytes of a line of TOML: the memory for a dotted key grows with its length squared."""


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed range of a number; `above` excludes the lowest value itself."""

    lowest: float
    highest: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest and not (self.above and value == self.lowest)

    def __str__(self) -> str:
        start = f"above {self.lowest:,}" if self.above else f"of at least {self.lowest:,}"
        return start if math.isinf(self.highest) else f"{start} and at most {self.highest:,}"


Count = Annotated[int, Range(1, 2**31 - 1)]
CountOrZero = Annotated[int, Range(0, 2**31 - 1)]
Share = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 0.999999)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All settings of a run."""

    model: str = "demo"
    """Preset, named shape such as opt-125m, model directory, or Hugging Face name."""
    data: Path | None = None
    """Text, .jsonl or .parquet file, or a directory of them; default: the sources of Python's standard library."""
    steps: Count = 100
    """Optimizer updates of the whole run, including those before a resume."""
    sequence: Count = 256
    """Tokens per sequence."""
    batch: Count = 8
    """Sequences per micro-batch."""
    accumulate: Count = 1
    """Micro-batches per step; the loss of a step is their mean."""
    in_flight: Count = 1
    """Micro-batches computed concurrently, each in a thread; values above `accumulate` have no effect."""
    learning_rate: Annotated[float, Range(0, above=True)] = 2e-3
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: CountOrZero = 10
    """Steps of linear warm-up."""
    minimum_learning_rate_share: Share = 0.1
    """Final learning rate of the cosine decay, as a share of `learning_rate`."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Weight decay of AdamW, applied to matrices only, not to norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of AdamW."""
    clip: Annotated[float, Range(0)] = 1.0
    """Gradient clipping by global norm; 0 disables it."""
    dropout: Annotated[float, Range(0, 0.999)] | None = None
    """Dropout probability; default: 0 for a model with fresh weights, a loaded model's own. Layers stay resident on
    devices only without it."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 1
    """Seed for initial weights, data order, dropout and the text sample."""
    eval_every: CountOrZero = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_batches: CountOrZero = 4
    """Micro-batches of held-out text per evaluation; 0 disables evaluation."""
    save_every: CountOrZero = 50
    """Steps between checkpoints; 0 disables them. One is always saved at the end or when the run stops."""
    save_minutes: Annotated[float, Range(0)] = 10.0
    """Minutes between checkpoints, the most work a killed server can lose; 0 disables them."""
    keep: Count = 2
    """Checkpoints to keep on disk, the newest ones."""
    wire: WireFormat = settings.WIRE
    """Number format on the wire, fp32, bf16, fp16 or q8 (8 bits, also called int8): smaller ones are less exact."""
    grain: Grain = settings.GRAIN
    """Unit of work: gemm, blocks of single products; resident, layers that stay on devices; auto, the faster one."""
    lease: LeaseMode = settings.LEASE
    """auto: your own devices that hold layers alone keep their weights and optimizer states, where that is faster;
    never: the server updates all weights."""
    overlap: bool = False
    """With resident layers, update each weight as soon as its gradient arrives, and send it out while others are still
    computed. A run stopped in the middle of a step then resumes from its last checkpoint."""
    offload: Offload = settings.OFFLOAD
    """auto: keep gemms on the server that are not worth sending; always: send every gemm."""
    devices: CountOrZero | None = None
    """Device processes to start on this machine; default: 4, or 0 if `listen` is set, where others join."""
    device_threads: Count = settings.DEVICE_THREADS
    """Threads per local device."""
    trust: Level | None = None
    """Trust in the devices that join with this run's token: own machines, known people, strangers. Decides how much
    of their work on resident layers is audited; default: stranger, and own for devices that the run starts itself."""
    listen: str | None = None
    """HOST:PORT that devices dial, port 0 for any free one; default: this machine only."""
    token: str | None = None
    """Secret that devices need to join. Only its hash is written to the run directory."""
    tls: bool = False
    """Encrypt connections, by default with a self-signed certificate that devices pin by its fingerprint."""
    tls_certificate: Path | None = None
    """PEM file of a certificate and its chain, for the name that devices dial; implies `tls`."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, if separate."""
    out: Path | None = None
    """Run directory; default: a new one."""
    wait_s: Annotated[float, Range(0, above=True)] | None = None
    """Seconds to wait for the first devices before giving up; default: 60 for local ones, without limit for others."""
    alone: Alone = settings.ALONE
    """While no device is connected: wait for one to join, or compute on the server until then."""
    alone_wait_s: Annotated[float, Range(0, above=True)] | None = None
    """Seconds without a device before the run stops, with its last finished step saved; default: 3600, or without limit
    if `listen` is set."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the parameters."""
    autocast: Literal["bf16"] | None = None
    """Lower precision for products while parameters keep theirs."""
    checkpointing: bool = False
    """Gradient checkpointing: recompute activations in the backward pass instead of keeping them."""
    tensorboard: bool = True
    """Write TensorBoard files to the run directory, if TensorBoard is installed."""
    scale_test: bool = False
    """Measure this server alone: devices may answer without computing, nothing is checked, and nothing is saved."""
    sample: CountOrZero = 240
    """Tokens of text to sample from the trained model at the end; 0 for none."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch * self.accumulate

    @property
    def address(self) -> str:
        """HOST:PORT to listen on."""
        return self.listen or "127.0.0.1:0"

    @property
    def local_devices(self) -> int:
        """Device processes to start on this machine."""
        if self.devices is not None:
            return self.devices
        return _LOCAL_DEVICES if self.listen is None else 0


def load_config(path: Path | None, overrides: Mapping[str, object]) -> TrainConfig:
    """Merge defaults, file and overrides, in rising precedence; overrides that are None are ignored."""
    values = _values(TrainConfig, path, overrides)
    if "wire" in values:
        values["wire"] = format_of(values["wire"]) or values["wire"]
    if "trust" in values:
        values["trust"] = level_of(values["trust"]) or values["trust"]
    config = _filled(TrainConfig, values)
    _check_address(config.address)
    if config.tls_key is not None and config.tls_certificate is None:
        raise InputError("expected tls_certificate along with tls_key, got only the key; give both, or just tls")
    return config


def load_settings(kind: type[Settings], path: Path | None, overrides: Mapping[str, object]) -> Settings:
    """Do the same for another frozen dataclass with a default and, for a number, a `Range` in every field."""
    return _filled(kind, _values(kind, path, overrides))


def to_toml(config: TrainConfig) -> str:
    """Write a config that `load_config` reads back unchanged, except for the token, which is secret."""
    lines = ["# The settings of this run, defaults included. To resume it: cleave train --resume --out DIRECTORY"]
    for field in fields(config):
        value: object = getattr(config, field.name)
        if value is not None and field.name != "token":
            lines.append(f"{field.name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _values(kind: type[DataclassInstance], path: Path | None, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return what file and overrides say, by the names of fields."""
    values: dict[str, object] = {}
    for key, value in _read(path).items() if path is not None else ():
        values[_field_name(kind, key, f" in {path}", value)] = value
    for key, value in overrides.items():
        if value is not None:
            values[_field_name(kind, key, "")] = value
    return values


def _filled(kind: type[Settings], values: Mapping[str, object]) -> Settings:
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{name: _convert(name, hints[name], value) for name, value in values.items()})


def _read(path: Path) -> dict[str, object]:
    try:
        raw = read_whole(path, _MOST_BYTES)
        if max(map(len, raw.splitlines()), default=0) > _LONGEST_LINE:
            raise InputError(f"{path} has a line of more than {_LONGEST_LINE:,} bytes; correct the file")
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as fault:
        raise InputError(f"cannot read {path}: {fault.strerror}; give the path of a TOML file") from None
    except (ValueError, RecursionError) as fault:  # TOML's own errors are ValueErrors, too
        raise InputError(f"expected TOML in {path}, but {fault}; correct the file") from None


def _field_name(kind: type[DataclassInstance], key: str, where: str, value: object = None) -> str:
    name = key.replace("-", "_")
    names = [field.name for field in fields(kind)]
    if name not in names:
        name = _ALIASES.get(name, name)
    if name in names:
        return name
    if isinstance(value, dict):
        raise InputError(f"settings have no sections, but there is a [{key}]{where}; remove that line")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(names)}"
    raise InputError(f"there is no setting {reprlib.repr(key)}{where}; {advice}")


def _convert(name: str, hint: object, value: object) -> object:
    """Convert a value to the field's type, or raise InputError saying what was expected."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(name, next(part for part in arguments if part is not type(None)), value)
    if origin is Annotated:
        allowed = cast("Range", arguments[1])
        number = cast("float", _convert(name, arguments[0], value))
        return number if number in allowed else _reject(name, f"a number {allowed}", value)
    if origin is Literal:
        return value if value in arguments else _reject(name, f"one of {', '.join(map(str, arguments))}", value)
    if origin is tuple:
        items = cast("list[object]", value) if isinstance(value, list | tuple) else []
        if len(items) != len(arguments):
            return _reject(name, f"{len(arguments)} numbers", cast("object", value))
        return tuple(_convert(name, part, item) for part, item in zip(arguments, items, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_MAGNITUDE:
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and value and value.isprintable():
        return value
    if hint is Path and isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        return Path(value)
    expected = {
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        str: "a printable string",
        Path: "a path",
    }
    return _reject(name, expected[cast("type", hint)], value)


def _reject(name: str, expected: str, value: object) -> object:
    try:
        got = reprlib.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        got = "a number of thousands of digits"
    raise InputError(f"expected {name} to be {expected}, got {got}; change this setting")


def _check_address(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        _reject("listen", "HOST:PORT such as 0.0.0.0:7077 (port 0: any free one)", listen)


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(_toml_value(item) for item in cast('tuple[object, ...]', value))}]"
        case _:
            # JSON string escapes are valid TOML, except that JSON leaves DEL bare.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
