"""`python -m bagua.run`: the launcher, which is bagua/cli/run.py."""

import sys

from .cli.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
