"""Puts virtual time on the path, so that the tests here can import it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "faults"))
