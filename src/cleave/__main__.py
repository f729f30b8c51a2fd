"""Run `python -m cleave` as the `cleave` command."""

import sys

from cleave.cli.main import main

sys.exit(main())
