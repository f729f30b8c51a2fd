"""Run a benchmark scenario: `python benchmarks/run.py benchmarks/scenarios/gemm_planner.toml [--save]`.

Takes the scenarios that name a `benchmark`, a module of this directory; `cleave bench` takes the others, which list
fleets and models. METHODOLOGY.md explains the output. Threads are set to one before numpy is loaded.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import sys
import tomllib
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a benchmark scenario.")
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--save", action="store_true", help="write results/DATE-NAME.md next to this file")
    options = parser.parse_args()
    path: Path = options.scenario
    scenario = tomllib.loads(path.read_text())
    if "benchmark" not in scenario:
        sys.exit(f"{path} is a scenario of `cleave bench`, not of this script; run: cleave bench {path}")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    today = datetime.date.today().isoformat()
    say(f"# {scenario['title']}\n")
    say(f"{today}, `python benchmarks/run.py benchmarks/scenarios/{path.name} --save`, Python")
    say(f"{platform.python_version()}, one thread; METHODOLOGY.md explains how to read this.\n")
    importlib.import_module(scenario["benchmark"]).run(scenario, say)
    if options.save:
        (Path(__file__).parent / "results" / f"{today}-{path.stem}.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
