"""`cleave.plan`: plan a gemm or a model's training step over a fleet, and load the files that needs."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from cleave import settings
from cleave.api.checks import check_type, checked_wire
from cleave.core.cost.lease import ADAM_STATES
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import PLAN_WIRE, WireName
from cleave.core.fleet import sampling
from cleave.core.fleet.profiles import Profiles, read_csv
from cleave.core.model.gemms import Gemm
from cleave.core.model.grain import Grain
from cleave.core.model.lease import LeaseMode
from cleave.core.model.shapes import ModelShape, from_config, named
from cleave.core.plan.gemm.product import GemmPlan, Split, plan_gemm
from cleave.core.plan.resident.problem import Leasing
from cleave.core.plan.step import StepChoice, StepPlan, choose_step, plan_step
from cleave.disk import read_whole
from cleave.errors import FleetError, InputError, ModelError
from cleave.facts import table

_USUAL_SEQUENCE = 1024
_LEAST, _MOST = 1e-6, 1e21
_MOST_BYTES = 1 << 26  # a fleet of half a million devices


def plan(
    fleet: Profiles | str | Path,
    *,
    model: str | ModelShape | None = None,
    tokens: int | None = None,
    gemm: Gemm | tuple[int, int, int] | None = None,
    sequence: int | None = None,
    wire: WireName = PLAN_WIRE,
    server: Server | None = None,
    split: Split = "auto",
    grouped: bool = True,
    grain: Grain = settings.GRAIN,
    lora: int | None = None,
    lease: LeaseMode = settings.LEASE,
) -> GemmPlan | StepPlan | StepChoice:
    """Plan one gemm, or a model's whole step, over a fleet: profiles, or the path of a fleet CSV.

    A step with grain "gemm" is returned as a `StepPlan`; `split` and `grouped` apply to it only. Otherwise it is a
    `StepChoice`: the faster grain, or the resident one with grain "resident", beside every rival.
    With `lora`, a step trains adapters of that rank beside every linear layer of attention and MLP, and nothing else.
    With `lease` "auto", a device that holds layers alone may keep them with the state of AdamW and update them itself.
    """
    check_type(fleet, Profiles | str | Path, "a fleet as Profiles or the path of a fleet CSV")
    format = checked_wire(wire)
    profiles = fleet if isinstance(fleet, Profiles) else load_fleet(fleet)
    if (gemm is None) == (model is None):
        raise InputError("expected either a model or a gemm to plan, not both or neither")
    if gemm is not None:
        if grain == "resident":
            raise InputError(
                "a single product has no resident layers; use --grain gemm, or plan a model with --model and --tokens"
            )
        product = gemm if isinstance(gemm, Gemm) else Gemm(m=gemm[0], n=gemm[1], k=gemm[2])
        if min(product.m, product.n, product.k) < 1:
            raise InputError(
                f"expected sizes of at least 1, got gemm {product.m}, {product.n}, {product.k}; give M, N, K"
            )
        if lora is not None:
            raise InputError("a single product has no adapters; plan a model with --model and --tokens, or drop --lora")
        return plan_gemm(profiles, product, wire=format, server=server, split=split)
    assert model is not None
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    if tokens is None:
        raise InputError("planning a model needs the tokens per step; add --tokens, such as --tokens 131072")
    if lora is not None:
        if not 1 <= lora <= shape.hidden:
            raise InputError(
                f"expected --lora to be a rank from 1 to {shape.hidden}, the hidden size, got {lora}; change it"
            )
        shape = replace(shape, adapter_rank=lora)
    length = checked_sequence(shape, tokens, sequence)
    if grain == "gemm" or (grain == "auto" and (split != "auto" or not grouped)):
        return plan_step(
            profiles, shape, tokens, sequence=length, wire=format, server=server, split=split, grouped=grouped
        )
    return choose_step(
        profiles,
        shape,
        tokens,
        sequence=length,
        wire=format,
        server=server,
        resident_only=grain == "resident",
        leasing=Leasing(states=ADAM_STATES) if lease == "auto" else None,
    )


def load_fleet(path: str | Path) -> Profiles:
    """Read a fleet CSV. Numbers that no device has are refused, as plans with them leave the range of floats."""
    profiles = read_csv(_read(path, FleetError, "a fleet CSV; draw one with cleave fleet sample"), str(path))
    rates = (profiles.flops_per_s, profiles.down_bytes_per_s, profiles.up_bytes_per_s, profiles.memory_bytes)
    if min(map(np.min, rates)) < _LEAST or max(map(np.max, (*rates, profiles.latency_s))) > _MOST:
        raise FleetError(
            f"expected rates and memory from {_LEAST:g} to {_MOST:g} in {path}, and latencies up to that, got one "
            "beyond; correct it"
        )
    return profiles


def load_shape(model: str) -> ModelShape:
    """Load a shape: a preset by name, a Hugging Face config.json, or a folder with one."""
    path = Path(model)
    with suppress(OSError):  # a name too long for a path
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file() and path.suffix != ".json" and "/" not in model:
            return named(model)
    text = _read(path, ModelError, "a Hugging Face config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ModelError(f"expected JSON in {path}, but {fault}; check the file") from None
    if not isinstance(config, dict):
        raise ModelError(f"expected a JSON object in {path}, got {type(config).__name__}; give a model's config.json")
    return from_config(cast("dict[str, object]", config), path.parent.resolve().name)


def sample_fleet(mix: str, country: str, seed: int) -> Profiles:
    return sampling.sample(
        table("devices"),
        table("access"),
        table("device_memory_policy"),
        mix=sampling.parse_mix(mix),
        country=country,
        rng=np.random.default_rng(seed),
    )


def _read(path: str | Path, error: type[InputError], expected: str) -> str:
    try:
        return read_whole(Path(path), _MOST_BYTES).decode("utf-8")
    except OSError as fault:
        raise error(f"cannot read {path}: {fault.strerror}; give the path of {expected}") from None
    except UnicodeDecodeError:
        raise error(f"{path} is not text; give the path of {expected}") from None


def checked_sequence(shape: ModelShape, tokens: int, sequence: int | None) -> int:
    """Tokens per sequence as given, or the largest divisor of all tokens up to 1,024."""
    if sequence is None:
        longest = min(_USUAL_SEQUENCE, shape.max_positions, tokens)
        return next(length for length in range(longest, 0, -1) if tokens % length == 0)
    if sequence > shape.max_positions:
        raise InputError(f"{shape.name} has {shape.max_positions} positions, but --sequence is {sequence}; lower it")
    return sequence
