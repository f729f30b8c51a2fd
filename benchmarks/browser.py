"""A browser as a device: its kernel beside numpy on one thread, and how fast operands reach it.

Chromium is launched by itself, without a driver that listens to its traffic, and told by its debugging port to press
the button. Both figures come from one run, so compare ratios. Run it on an idle machine: python benchmarks/browser.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar, cast

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # before numpy reads them

import numpy as np
from websockets.sync.client import connect

from cleave import Fleet
from cleave.errors import CleaveError

_Found = TypeVar("_Found")
SIDE = 512
ROUNDS = 20
TOKEN = "benchmark"
PATIENCE_S = 60.0
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-port=0")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
MEASURE = """
(async () => {
  const { Kernel } = await import("/web/device/kernel.mjs");
  const read = async (file) => (await fetch("/web/device/" + file)).arrayBuffer();
  const kernel = await Kernel.load(read, 1 << 26), side = %d;
  const [a, b, c] = [0, 1, 2].map(() => kernel.zeros(side, side));
  kernel.numbers(a).set(Float32Array.from({ length: side * side }, (_, i) => Math.sin(i)));
  kernel.numbers(b).set(Float32Array.from({ length: side * side }, (_, i) => Math.cos(i)));
  let best = Infinity;
  for (let i = 0; i < %d; i++) {
    const start = performance.now();
    kernel.product(c, a, b.T);
    best = Math.min(best, performance.now() - start);
  }
  return JSON.stringify({ name: kernel.name, gflops: (2 * side ** 3) / best / 1e6 });
})()
"""


def numpy_gflops() -> float:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    best_s = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        np.matmul(a, b.T)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * SIDE**3 / best_s / 1e9


class Tab:
    """The only tab of a Chromium, over its debugging port."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        port = wait_for(lambda: (folder / "DevToolsActivePort").read_text().split()[0])
        targets = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/json").read())
        address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
        self._socket, self._number = opened.enter_context(connect(address, max_size=None)), 0

    def call(self, method: str, **parameters: object) -> dict[str, object]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(PATIENCE_S))
            if answer.get("id") == self._number:
                return answer["result"]

    def evaluate(self, expression: str) -> bool | str | None:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:400])
        return cast("dict[str, bool | str | None]", found["result"]).get("value")


def wait_for(read: Callable[[], _Found]) -> _Found:
    """Repeat until it neither fails nor says no."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        try:
            if found := read():
                return found
        except (OSError, IndexError, RuntimeError):
            pass
        time.sleep(0.05)
    raise SystemExit("expected Chromium to answer within a minute; is it installed?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="operands to send (default: 256)")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with ExitStack() as opened:
        fleet = opened.enter_context(Fleet.serve("127.0.0.1:0", token=TOKEN, wire="fp32", offload="always"))
        name = opened.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        page = f"{fleet.url.replace('ws://', 'http://', 1)}/join#{TOKEN}"
        command = [chromium, *FLAGS, *QUIET, f"--user-data-dir={name}", page]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            tab = Tab(Path(name), opened)
            wait_for(lambda: tab.evaluate("!document.getElementById('button').disabled"))
            kernel = json.loads(str(tab.evaluate(MEASURE % (SIDE, ROUNDS))))
            beside = numpy_gflops()
            tab.evaluate("document.getElementById('button').click()")
            fleet.wait(1)
            down_s, sent_bytes = throughput(fleet, options.megabytes)
        finally:
            browser.terminate()
            browser.wait(PATIENCE_S)
    share = kernel["gflops"] / beside
    print(f"{kernel['name']} {kernel['gflops']:.1f} GFLOP/s at {SIDE}^3, numpy {beside:.1f}: {share:.2f}")
    print(f"{sent_bytes / 1e6:.0f} MB to the page in {down_s:.2f} s: {sent_bytes / down_s / 1e6:.0f} MB/s")


def throughput(fleet: Fleet, megabytes: int) -> tuple[float, int]:
    """Seconds and bytes of products whose operands are large and whose results are small."""
    rows, inner = 64, 4096
    a = np.ones((rows, inner), dtype=np.float32)
    b = np.ones((inner, megabytes * 1_000_000 // inner // 4), dtype=np.float32)
    fleet.matmul(a, a.T.copy())
    before = fleet.devices[0].down_bytes
    start = time.perf_counter()
    try:
        fleet.matmul(a, b)
    except CleaveError as fault:
        sys.exit(str(fault))
    return time.perf_counter() - start, fleet.devices[0].down_bytes - before


if __name__ == "__main__":
    main()
