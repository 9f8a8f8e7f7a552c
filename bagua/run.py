"""Runs the launcher, bagua/cli/run.py, as `python -m bagua.run`."""

import sys

from .cli.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
