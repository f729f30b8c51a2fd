"""GB/s of CPU time of encoding and decoding, all formats side by side in one run, with numpy's codec and torch's.

`python benchmarks/codec.py`: formats take turns, round by round, and the best round counts, as the machine is shared;
the matrix is small enough for a round to end before another process gets its turn. GB/s of numbers are those of the
matrix in fp32, GB/s sent those of its encoding. What a format costs beside bf16 in the same run is the ratio to read.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from cleave.core.cost.wire import WIRE_FORMATS, WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.protocol.numbers import Codec, NumpyCodec
from cleave.train.offload.codec import TorchCodec

_WORK = ("encode", "decode", "add")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the wire's number formats.")
    parser.add_argument("--rows", type=int, default=512, help="rows of the matrix (default: 512)")
    parser.add_argument("--cols", type=int, default=1024, help="columns of the matrix (default: 1024)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds, of which the best counts (default: 200)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrix = np.random.default_rng(0).standard_normal((options.rows, options.cols), dtype=np.float32)
    print(f"{options.rows} x {options.cols} numbers, one thread, best of {options.rounds} rounds\n")
    print("Encode, decode, decode and add:\n")
    print("| codec | format | GB/s of numbers | GB/s sent | s per number over bf16 | s per byte over bf16 |")
    print("|---|---|---|---|---|---|")
    codecs: dict[str, Codec] = {"numpy": NumpyCodec(), "torch": TorchCodec()}
    for name, codec in codecs.items():
        jobs = {format: _jobs(codec, matrix, format) for format in WIRE_FORMATS}
        best = {(format, work): float("inf") for format in WIRE_FORMATS for work in _WORK}
        for _ in range(options.rounds):
            for format, work in best:
                best[format, work] = min(best[format, work], _seconds(jobs[format][work]))
        for format in WIRE_FORMATS:
            share = encoded_bytes(format, *matrix.shape) / encoded_bytes("bf16", *matrix.shape)
            seconds = [best[format, work] for work in _WORK]
            ratios = [best[format, work] / best["bf16", work] for work in _WORK]
            columns = (
                [matrix.nbytes / each / 1e9 for each in seconds],
                [encoded_bytes(format, *matrix.shape) / each / 1e9 for each in seconds],
                ratios,
                [each / share for each in ratios],
            )
            cells = (", ".join(f"{value:.2f}" for value in column) for column in columns)
            print(f"| {name} | {format} | {' | '.join(cells)} |")


def _jobs(codec: Codec, matrix: Matrix, format: WireFormat) -> dict[str, Callable[[], object]]:
    out, encoded = np.zeros_like(matrix), codec.encode(matrix, format)
    return {
        "encode": lambda: codec.encode(matrix, format),
        "decode": lambda: codec.decode_into(encoded.data, format, out),
        "add": lambda: codec.decode_into(encoded.data, format, out, add=True),
    }


def _seconds(job: Callable[[], object]) -> float:
    started = time.process_time()
    job()
    return time.process_time() - started


if __name__ == "__main__":
    main()
