"""`python -m cleave` is `cleave`."""

import sys

from cleave.cli.main import main

sys.exit(main())
