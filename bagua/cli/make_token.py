"""`bagua token`: makes the secret that the ranks of a job prove to each other."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence

__all__ = ["main", "new_token"]


def new_token() -> str:
    """43 characters of 256 random bits, which need no quotes in a shell."""
    return secrets.token_urlsafe(32)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a token, or write it into a file that only its owner can read; 0 when that worked."""
    parser = argparse.ArgumentParser(
        prog="bagua token",
        description=__doc__.split(": ")[1].replace("makes", "Makes"),
        epilog="Give the same one to all ranks: BAGUA_AUTH_TOKEN_FILE or `bagua run --auth-token-file` name the file, "
        "BAGUA_AUTH_TOKEN holds the token itself.",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write it there, into a new file of mode 0600")
    args = parser.parse_args(argv)
    if args.output is None:
        print(new_token())
        return 0
    try:
        # Exclusively: a token that ranks already have is not replaced, and no link is followed.
        fd = os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        print(f"bagua token: {args.output}: {error.strerror}; name a new file", file=sys.stderr)
        return 1
    with open(fd, "w") as file:
        file.write(new_token() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
