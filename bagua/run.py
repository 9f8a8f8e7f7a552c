"""`python -m bagua.run`: the launcher, which is bagua/cli/run.py."""

from .cli.run import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
