"""`bagua timeline`: merges the timelines of several ranks, and prints the report on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua.cli.progress import Progress
from bagua.errors import InvalidArgument

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when it has done its work, 1 when it says why not."""
    parser = argparse.ArgumentParser(
        prog="bagua timeline",
        description="Lays the timelines of several ranks side by side, and says in words what they show.",
    )
    parser.add_argument("files", nargs="+", type=Path, help="one per rank, of one model.bagua.save_timeline(folder)")
    parser.add_argument("--out", type=Path, help="the merged trace, for ui.perfetto.dev or chrome://tracing")
    args = parser.parse_args(argv)

    from bagua.profiler import chrome_trace
    from bagua.profiler.report import load, merge, report

    try:
        if args.out is not None and args.out.resolve() in {path.resolve() for path in args.files}:
            raise InvalidArgument(f"--out is {args.out}, which is a rank's file and would be lost; name another one")
        with Progress("bagua timeline") as progress:
            progress.tell(f"reading {len(args.files)} files")
            ranks = load(args.files)
            progress.tell("comparing the ranks")
            text = report(ranks)
        print(text)
        if args.out is not None:
            with Progress("bagua timeline") as progress:
                progress.tell(f"writing {args.out}")
                chrome_trace.write(args.out, merge(ranks))
            print(f"\nwritten: {args.out}; open it at https://ui.perfetto.dev or in chrome://tracing")
    except InvalidArgument as error:
        print(f"bagua timeline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
