"""Runs the command `bagua`, as `python -m bagua`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
