"""`python -m cleave` is `cleave`."""

import sys

from cleave.cli import main

sys.exit(main())
