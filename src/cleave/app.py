"""The composition root: reads files, calls the core, hands results to `observe`. It alone knows every part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal, cast

import numpy as np

from cleave.core import sampling
from cleave.core.cost import Server, WireFormat
from cleave.core.fleet import Profiles, describe, read_csv, write_csv
from cleave.core.graph import Gemm
from cleave.core.planner.gemm import GemmPlan, Split, plan_gemm
from cleave.core.planner.step import StepChoice, StepPlan, choose_step, plan_step
from cleave.core.shapes import ModelShape, from_config, named
from cleave.errors import FleetError, InputError, ModelError
from cleave.facts import table

_GBIT_BYTES = 1e9 / 8
_USUAL_SEQUENCE = 1024


def plan(
    fleet: Profiles | str | Path,
    *,
    model: str | ModelShape | None = None,
    tokens: int | None = None,
    gemm: Gemm | tuple[int, int, int] | None = None,
    sequence: int | None = None,
    wire: WireFormat = "bf16",
    server: Server | None = None,
    split: Split = "auto",
    grouped: bool = True,
    grain: Literal["auto", "gemm", "resident"] = "auto",
) -> GemmPlan | StepPlan | StepChoice:
    """Cut one gemm, or a model's whole step, over a fleet (profiles, or the path of a fleet CSV).

    A step comes as a `StepPlan` with grain "gemm" (which `split` and `grouped` speak of), else as a `StepChoice`: the
    fastest of all ways, or the best columns with grain "resident".
    """
    profiles = fleet if isinstance(fleet, Profiles) else load_fleet(fleet)
    if (gemm is None) == (model is None):
        raise InputError("expected either a model or a gemm to plan; give one of them")
    if gemm is not None:
        if grain == "resident":
            raise InputError("a gemm alone has no resident weights; use --grain gemm, or give --model and --tokens")
        product = gemm if isinstance(gemm, Gemm) else Gemm(m=gemm[0], n=gemm[1], k=gemm[2])
        if min(product.m, product.n, product.k) < 1:
            raise InputError(f"expected sizes from 1 up, got gemm {product.m}, {product.n}, {product.k}; give M, N, K")
        return plan_gemm(profiles, product, wire=wire, server=server, split=split)
    assert model is not None
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    if tokens is None:
        raise InputError("a model's step needs its number of tokens; add --tokens, such as --tokens 131072")
    length = _sequence(shape, tokens, sequence)
    if grain == "gemm" or (grain == "auto" and (split != "auto" or not grouped)):
        return plan_step(
            profiles, shape, tokens, sequence=length, wire=wire, server=server, split=split, grouped=grouped
        )
    return choose_step(
        profiles,
        shape,
        tokens,
        sequence=length,
        wire=wire,
        server=server,
        resident_only=grain == "resident",
    )


def load_fleet(path: str | Path) -> Profiles:
    return read_csv(_read(path, FleetError, "a fleet CSV; draw one with cleave fleet sample"), str(path))


def load_shape(model: str) -> ModelShape:
    """A preset by name, or a Hugging Face config.json, or the folder that holds one."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file() and path.suffix != ".json" and "/" not in model:
        return named(model)
    text = _read(path, ModelError, "a Hugging Face config.json")
    try:
        config = json.loads(text)
    except ValueError as fault:
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


# ------------------------------------------------------------------------------------------------------ commands


def run_plan(
    *,
    fleet: str,
    model: str | None,
    gemm: tuple[int, int, int] | None,
    tokens: int | None,
    sequence: int | None,
    wire: WireFormat,
    server_down_gbit: float | None,
    server_up_gbit: float | None,
    server_tflops: float | None,
    grain: Literal["auto", "gemm", "resident"],
    split: Split,
    grouped: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    from cleave.observe import plan_json, plan_report, plan_words

    if gemm is not None and tokens is not None:
        raise InputError("--tokens goes with --model, and a gemm has its size already; leave it out")
    if plot is not None:
        _check_plot(Path(plot))
    server = Server(
        down_bytes_per_s=np.inf if server_down_gbit is None else server_down_gbit * _GBIT_BYTES,
        up_bytes_per_s=np.inf if server_up_gbit is None else server_up_gbit * _GBIT_BYTES,
        flops_per_s=0.0 if server_tflops is None else server_tflops * 1e12,
    )
    profiles = load_fleet(fleet)
    found = plan(
        profiles,
        model=model,
        tokens=tokens,
        gemm=gemm,
        sequence=sequence,
        wire=wire,
        server=server,
        split=split,
        grouped=grouped,
        grain=grain,
    )
    if as_json:
        sys.stdout.write(json.dumps(plan_json.as_json(found)) + "\n")
    else:
        plan_report.show(found, profiles, server, plan_words.cloud_gpu(table("cloud")))
    if plot is not None:
        from cleave.observe import plan_plot

        plan_plot.draw(found, profiles, server, Path(plot))
        if not as_json:
            plan_words.say(f"drawn: {plot}")


def run_fleet_sample(*, mix: str, country: str, seed: int, out: str | None, as_json: bool) -> None:
    from cleave.observe import fleet_report

    if as_json and out is None:
        raise InputError("--json describes a fleet that is written to a file; add --out FLEET.csv")
    profiles = sample_fleet(mix, country, seed)
    if out is None:
        sys.stdout.write(write_csv(profiles))
        return
    try:
        Path(out).write_text(write_csv(profiles))
    except OSError as fault:
        raise InputError(f"cannot write the fleet to {out}: {fault.strerror}; choose another --out") from None
    fleet_report.show(describe(profiles), out, as_json=as_json)


def run_fleet_show(*, fleet: str, as_json: bool) -> None:
    from cleave.observe import fleet_report

    fleet_report.show(describe(load_fleet(fleet)), fleet, as_json=as_json)


def _read(path: str | Path, error: type[InputError], expected: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as fault:
        raise error(f"cannot read {path}: {fault.strerror}; give the path of {expected}") from None
    except UnicodeDecodeError:
        raise error(f"{path} is not text; give the path of {expected}") from None


def _sequence(shape: ModelShape, tokens: int, sequence: int | None) -> int:
    if sequence is None:
        longest = min(_USUAL_SEQUENCE, shape.max_positions, tokens)
        return next(length for length in range(longest, 0, -1) if tokens % length == 0)
    if sequence > shape.max_positions:
        raise InputError(
            f"{shape.name} has {shape.max_positions} positions, got --sequence {sequence}; give at most that many"
        )
    return sequence


def _check_plot(path: Path) -> None:
    """Say so before a long plan is made, not after."""
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise InputError(f"expected --plot to end in .png, .svg or .pdf, got {path}; rename it")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise InputError("--plot needs matplotlib, which is not installed; pip install 'cleave[plot]'") from None
