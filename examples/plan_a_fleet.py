"""Draw a fleet of devices, plan one training step on it, and print what to expect.

    python examples/plan_a_fleet.py

Nothing is trained: a plan is computed from the speed, links and memory of each device.
"""

import subprocess

import cleave

MODEL, TOKENS = "opt-1.3b", 32_768


def main() -> None:
    # Device speeds and home links are drawn from published measurements. The same seed gives the same fleet.
    mix = "laptop=20,desktop=10"
    subprocess.run(["cleave", "fleet", "sample", "--mix", mix, "--seed", "1", "--out", "fleet.csv"], check=True)

    # With grain "resident", layers stay on devices and tokens flow through them. Fewer bits per number, less to send.
    for wire in ("bf16", "q8"):
        step = cleave.plan("fleet.csv", model=MODEL, tokens=TOKENS, grain="resident", wire=wire)
        print(f"{MODEL}, {TOKENS:,} tokens in {wire}: {step.step_s:,.0f} s a step", end=", ")
        print(f"{step.step_s / step.bound_s:.2f} times the lower bound")

    # The server's own link counts too: all that devices receive and return goes through it. Here 100 Mbit/s each way.
    at_home = cleave.Server(down_bytes_per_s=12.5e6, up_bytes_per_s=12.5e6)
    step = cleave.plan("fleet.csv", model=MODEL, tokens=TOKENS, grain="resident", server=at_home)
    print(f"in bf16 with the server behind 100 Mbit/s: {step.step_s:,.0f} s a step")


if __name__ == "__main__":
    main()
