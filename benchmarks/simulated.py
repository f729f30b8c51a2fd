"""The simulator beside a real cluster with real workers on emulated links, as a table.

Both sides run in virtual time, so that the table does not depend on this machine. The cells are those of
`tests/sim/test_agreement.py`, which holds some of them to 3 %, with more latencies and widths.
Run: python -m benchmarks.simulated
"""

from __future__ import annotations

import argparse
import itertools

from tests.sim import test_agreement as agreement
from tests.support.stacks import decoder

_CHUNKS, _LATENCIES_S, _WIDTHS = (16, 64), (0.0, 0.02, 0.1), (128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one width and one latency")
    quick = parser.parse_args().quick
    widths, latencies_s = (_WIDTHS[:1], _LATENCIES_S[1:2]) if quick else (_WIDTHS, _LATENCIES_S)
    print("| layout | hidden | chunk | latency s | cluster s | simulated s | simulated / cluster |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for hidden, latency_s, chunk, layout in itertools.product(widths, latencies_s, _CHUNKS, agreement.LAYOUTS):
        agreement.LATENCY_S = latency_s
        model, how = decoder(has_head=True, hidden=hidden), agreement.LAYOUTS[layout]
        live_s, simulated_s = (seconds(how, chunk, model)[-1] for seconds in (agreement.live_s, agreement.simulated_s))
        ratio = simulated_s / live_s
        worst = max(worst, abs(ratio - 1))
        print(
            f"| {layout} | {hidden} | {chunk} | {latency_s:g} | {live_s:.3f} | {simulated_s:.3f} | {ratio:.3f} |",
            flush=True,
        )
    print(f"\nfarthest: {worst:.1%}")


if __name__ == "__main__":
    main()
