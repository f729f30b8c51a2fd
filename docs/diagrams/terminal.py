"""Take a picture of a terminal program: run a command in tmux, wait for a text to appear, write the screen as SVG.

    python -m docs.diagrams.terminal docs/assets/train.svg 100x30 "30 of 100" cleave train

Pictures show real runs. Needs tmux and rich.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

_TIMEOUT_S = 300.0
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich refers to fonts on the web


def capture(command: list[str], columns: int, rows: int, until: str) -> str:
    """Run a command in a terminal of this size until a text is on its screen; return the screen with its colors."""
    session = f"cleave-picture-{time.monotonic_ns()}"
    tmux = ["tmux", "-L", session]
    size = ["-x", str(columns), "-y", str(rows)]
    line = f"{shlex.join(command)}; sleep {_TIMEOUT_S:.0f}"
    environment = ["-e", "TERM=xterm-256color", "-e", "COLORTERM=truecolor"]
    new = ["-f", "/dev/null", "new-session", "-d", "-s", session, *environment, *size, line]
    subprocess.run([*tmux, *new], check=True)
    try:
        subprocess.run([*tmux, "set", "-g", "status", "off"], check=True)
        give_up = time.monotonic() + _TIMEOUT_S
        while True:
            screen = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True)
            if until in Text.from_ansi(screen.stdout).plain:
                return screen.stdout
            if time.monotonic() > give_up:
                raise SystemExit(f"{until!r} did not appear; the last screen was:\n{screen.stdout}")
            time.sleep(0.2)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def svg(screen: str, columns: int, title: str) -> str:
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(Text.from_ansi(screen.rstrip("\n")), no_wrap=True, overflow="crop")
    return _FONT_FACE.sub("", console.export_svg(title=title)).replace("Fira Code,", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("size", help="columns and rows, such as 100x30")
    parser.add_argument("until", help="text that must be on the screen")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    columns, rows = map(int, options.size.split("x"))
    screen = capture(options.command, columns, rows, options.until)
    options.picture.write_text(svg(screen, columns, shlex.join(options.command)))


if __name__ == "__main__":
    main()
