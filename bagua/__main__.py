"""`python -m bagua`: the command `bagua`."""

import sys

from .cli import main

sys.exit(main())
