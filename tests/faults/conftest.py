"""Puts this folder on the path, and that of the mutated frames, so that the tests here can import them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "wire"))
