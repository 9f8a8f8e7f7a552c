"""Prints the results of several example logs as one table, a column for each: examples end with a line of JSON."""

import json
import sys
from pathlib import Path


def result_of(path):
    """Returns the last line of the log that is a JSON object."""
    for line in reversed(path.read_text(errors="replace").splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    sys.exit(f"{path} holds no result: the run did not reach its end")


def shown(value):
    if value is None:
        return "n/a"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main(paths):
    results = [result_of(path) for path in paths]
    names = list(dict.fromkeys(name for result in results for name in result))
    rows = [[name.replace("_", " "), *(shown(result.get(name)) for result in results)] for name in names]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
