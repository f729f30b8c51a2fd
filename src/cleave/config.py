"""A run's settings: TOML and command-line flags in, one frozen struct out, checked once and here.

Defaults are those of the demo: a small byte model, four local devices, Python's own library as text, about two minutes.
Keys are flat and are the names of the fields, with - or _. This module knows only what one value may be; whether a
model, a file or an address exists is found out by who opens it.
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
from typing import Annotated, Literal, Union, cast, get_args, get_origin, get_type_hints

from cleave.errors import InputError

_LARGEST = 1e300  # infinities and whole numbers beyond any float are refused

Wire = Literal["fp32", "bf16", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be; `above` leaves the lowest value itself out."""

    lowest: float
    highest: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest and not (self.above and value == self.lowest)

    def __str__(self) -> str:
        start = f"above {self.lowest:,}" if self.above else f"from {self.lowest:,}"
        return f"{start} up" if math.isinf(self.highest) else f"{start} to {self.highest:,}"


Count = Annotated[int, Range(1, 2**31 - 1)]
CountOrNone = Annotated[int, Range(0, 2**31 - 1)]
Share = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 0.999999)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    model: str = "demo"
    """A preset, a named size such as opt-125m, a model directory, or a Hugging Face name."""
    data: Path | None = None
    """Text, .jsonl or .parquet, or a directory of them; without it, the sources of Python's own library."""
    steps: Count = 100
    """Optimizer updates of the whole run, those before a resume included."""
    sequence: Count = 256
    """Tokens of one sequence."""
    batch: Count = 8
    """Sequences of one micro-batch."""
    accumulate: Count = 1
    """Micro-batches of one step; their mean loss is the loss of the step."""
    in_flight: Count = 1
    """Micro-batches computed at the same time, each in a thread; more than `accumulate` is no use."""
    learning_rate: Annotated[float, Range(0, above=True)] = 2e-3
    """The highest, reached at the end of the warm-up."""
    warmup_steps: CountOrNone = 10
    """Steps in which the learning rate rises in a line."""
    minimum_learning_rate_share: Share = 0.1
    """Where the cosine ends, as a share of `learning_rate`."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """AdamW's, for matrices only: norms and biases have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's."""
    clip: Annotated[float, Range(0)] = 1.0
    """The largest norm of the gradient; a larger one is scaled down. 0: no clipping."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 1
    """Of the initial weights, the order of the text, dropout and the sample."""
    eval_every: CountOrNone = 50
    """Steps between evaluations; 0: only at the end."""
    eval_batches: CountOrNone = 4
    """Micro-batches of held-back text in one evaluation; 0: never evaluate."""
    save_every: CountOrNone = 50
    """Steps between checkpoints; 0: none by steps. There is always one at the end, or when something stops the run."""
    save_minutes: Annotated[float, Range(0)] = 10.0
    """The most that a killed server loses, in minutes: a checkpoint after that time without one; 0: none by time."""
    keep: Count = 2
    """How many checkpoints stay on disk, the newest ones."""
    wire: Wire = "fp32"
    """Numbers on the wire: fewer bytes, less exact."""
    grain: Literal["auto", "gemm", "resident"] = "auto"
    """gemm: blocks of single products; resident: layers that stay on devices; auto: whichever should be faster."""
    overlap: bool = False
    """With resident layers, update each weight as soon as its gradient is there, and send it out while others are still
    computed. A run that is stopped in the middle of a step then goes on from its last checkpoint."""
    offload: Literal["auto", "always"] = "always"
    """auto: gemms too small to be worth sending stay on the server; always: every gemm goes to devices."""
    devices: CountOrNone = 4
    """Local device processes to start; 0: only wait for others to join."""
    device_threads: Count = 1
    """Threads of each local device."""
    trust: Literal["sample", "strict", "none"] = "sample"
    """Which work on resident layers the server computes again: a random share, all of it, or none."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT that devices dial; port 0 is any free one."""
    token: str | None = None
    """The secret that a device must know to join. Only its hash is written into the run directory."""
    tls: bool = False
    """Encrypt connections, with a certificate the server makes and devices know by its fingerprint, or a given one."""
    tls_certificate: Path | None = None
    """A certificate with its chain, in PEM, for the name that devices dial; implies `tls`."""
    tls_key: Path | None = None
    """Its key, in PEM, if that is another file."""
    out: Path | None = None
    """The run directory; without it, one is chosen."""
    wait_s: Annotated[float, Range(0, above=True)] = 60.0
    """How long to wait for a first device."""
    alone: Literal["wait", "compute"] = "wait"
    """When every device is gone: wait for one to join, or let the server itself compute until then."""
    alone_wait_s: Annotated[float, Range(0, above=True)] = 3600.0
    """How long to wait before the run stops, with its last finished step saved."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the parameters."""
    autocast: Literal["bf16"] | None = None
    """The lower precision of the products while the parameters keep theirs."""
    checkpointing: bool = False
    """Gradient checkpointing: activations are computed again in the backward pass instead of kept."""
    tensorboard: bool = True
    """Write TensorBoard's files into the run directory, if TensorBoard is installed."""
    sample: CountOrNone = 240
    """Tokens of text that the trained model writes at the end; 0: none."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch * self.accumulate


def load_config(path: Path | None, overrides: Mapping[str, object]) -> TrainConfig:
    """The defaults, then the file, then the overrides; an override that is None was not given."""
    values: dict[str, object] = {}
    for key, value in _read(path).items() if path is not None else ():
        values[_field_name(key, f" in {path}")] = value
    for key, value in overrides.items():
        if value is not None:
            values[_field_name(key, "")] = value
    hints = get_type_hints(TrainConfig, include_extras=True)
    config = TrainConfig(**{name: _checked(name, hints[name], value) for name, value in values.items()})  # pyright: ignore[reportArgumentType]
    _check_address(config.listen)
    if config.tls_key is not None and config.tls_certificate is None:
        raise InputError("expected tls_certificate along with tls_key, got the key alone; give both, or only tls")
    return config


def to_toml(config: TrainConfig) -> str:
    """What `load_config` reads back as the same config, but for the token, which is a secret."""
    lines = ["# The settings of this run, defaults included. To go on with it: cleave train --resume --out DIRECTORY"]
    for field in fields(config):
        value: object = getattr(config, field.name)
        if value is not None and field.name != "token":
            lines.append(f"{field.name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise InputError(f"cannot read {path}: {fault.strerror}; give the path of a run's TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise InputError(f"expected TOML in {path}, but {fault}; correct the file") from None


def _field_name(key: str, where: str) -> str:
    name = key.replace("-", "_")
    names = [field.name for field in fields(TrainConfig)]
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(names)}"
    raise InputError(f"there is no setting {reprlib.repr(key)}{where}; {advice}")


def _checked(name: str, hint: object, value: object) -> object:
    """The value as the field's type, or an error that says what was expected."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _checked(name, next(part for part in arguments if part is not type(None)), value)
    if origin is Annotated:
        allowed = cast("Range", arguments[1])
        number = cast("float", _checked(name, arguments[0], value))
        return number if number in allowed else _refuse(name, f"a number {allowed}", value)
    if origin is Literal:
        return value if value in arguments else _refuse(name, f"one of {', '.join(map(str, arguments))}", value)
    if origin is tuple:
        items = cast("list[object]", value) if isinstance(value, list | tuple) else []
        if len(items) != len(arguments):
            return _refuse(name, f"{len(arguments)} numbers", cast("object", value))
        return tuple(_checked(name, part, item) for part, item in zip(arguments, items, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST:
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and value:
        return value
    if hint is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    expected = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", Path: "a path"}
    return _refuse(name, expected[cast("type", hint)], value)


def _refuse(name: str, expected: str, value: object) -> object:
    raise InputError(f"expected {name} to be {expected}, got {reprlib.repr(value)}; change that setting")


def _check_address(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        _refuse("listen", "HOST:PORT such as 0.0.0.0:7077 (port 0: any free one)", listen)


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(_toml_value(item) for item in cast('tuple[object, ...]', value))}]"
        case _:
            # JSON's escapes of a string are TOML's too; it leaves one control character bare that TOML does not.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
