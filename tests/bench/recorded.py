"""Results as if they had been measured, for tests of reports."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from cleave.bench.records import Measured, Rates, Reference, Results, Run, Step
from cleave.bench.scenario import read_scenario

SCENARIO = """title = "Two cells"
modes = ["full", "lora-8"]
steps = 4
warmup = 2
target = [0.9, 1.15]
[fleets.two]
file = "two.csv"
[models.tiny]
name = "tiny-llama"
"""
FLEET = """device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes,medium,medium_bytes_per_s
a,1e9,1e6,2e5,0.01,1e9,,
b,2e9,4e6,4e5,0.01,1e9,wifi,2e6
c,2e9,4e6,4e5,0.01,1e9,wifi,2e6
"""


def step(number: int, seconds: float, **changes: object) -> Step:
    given = Step(
        number=number,
        seconds=seconds,
        batch_s=seconds,
        predicted_s=2.0,
        modeled_s=1.5,
        loss=5.0 - number,
        down_bytes=3_000_000,
        up_bytes=1_000_000,
        grain="resident",
        plan="sublayers 0-8: a, b",
        devices=2,
        server_cpu_s=0.25,
        device_cpu_s=0.5,
        other_cpu_s=0.1,
        rates=(
            Rates(
                device="a",
                flops_per_s=1e9,
                down_bytes_per_s=1.1e6,
                up_bytes_per_s=1.9e5,
                down_bytes=10**7,
                up_bytes=10**7,
            ),
            Rates(
                device="b",
                flops_per_s=2e9,
                down_bytes_per_s=1.9e6,
                up_bytes_per_s=9e5,
                down_bytes=10**7,
                up_bytes=0,
            ),
        ),
    )
    return replace(given, **changes)


def results(tmp_path: Path) -> Results:
    """Two cells: one that was measured, one that failed after a step."""
    (tmp_path / "two.csv").write_text(FLEET)
    path = tmp_path / "recorded.toml"
    path.write_text(SCENARIO)
    scenario, (full, lora) = read_scenario(path)
    steps = tuple(step(number, seconds) for number, seconds in enumerate((9.0, 5.0, 2.0, 3.0), start=1))
    kept_up: dict[str, object] = {"results": 200, "late_results": 8}
    good = Run(
        started="2026-01-01T00:00:00+00:00", steps=steps, join_s=0.5, peak_rss_bytes=500_000_000, emulation=kept_up
    )
    bad = Run(started="2026-01-01T00:01:00+00:00", steps=steps[:1], failed="not finished | within 600 s")
    versions = {"cleave": "0.1.0", "code": "abc", "cores": "2", "torch": "2.13"}
    return Results(
        scenario=scenario,
        command="cleave bench recorded.toml",
        date="2026-01-01",
        versions=versions,
        cells=tuple(
            Measured(cell=cell, digest=cell.digest("abc"), command="cleave bench", versions=versions, runs=(run,))
            for cell, run in ((full, good), (lora, bad))
        ),
        references=(
            Reference(digest=full.reference_digest(), seconds=(1.0,) * 4, losses=(4.0, 3.0, 2.25, 1.0)),
            Reference(digest=lora.reference_digest(), seconds=(1.0,) * 4, losses=(4.0, 3.0, 2.0, 1.0)),
        ),
    )
