"""Writes the table of docs/algorithms.md, between its two marks, from the `about` of every algorithm's class.

The memory that each algorithm needs beyond plain training is read from docs/memory.md.

The script reads the sources without importing them, so it runs before anything is built. It prints nothing, unless
--check finds that the table is not up to date.

    python scripts/algorithms_table.py [--check] [docs/algorithms.md]
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {  # fields of About -> columns of the table
    "sends": "what is sent",
    "to": "to whom",
    "when": "when",
    "bytes_per_step": "bytes per step",
    "memory": "extra memory",
    "use_when": "when to use it",
    "paper": "paper",
}
_MEASURED = {  # options of a row of docs/memory.md -> text before its figure
    (): "",
    ("error_feedback=True", "state_dtype='float32'"): "with error feedback ",
    ("error_feedback=True", "state_dtype='bfloat16'"): "in bfloat16 ",
}
MARKS = re.compile(r"(<!-- algorithms: begin\b[^>]*-->\n).*?(<!-- algorithms: end\b[^>]*-->)", re.DOTALL)


def algorithms(folder: Path = ROOT / "bagua" / "algorithms") -> dict[str, dict[str, str]]:
    """Returns the texts of `about` by algorithm: first those that exchange gradients, then those of weights."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(_name_of(one) == "register" for one in node.decorator_list):
                assigned = {_name_of(line.targets[0]): line.value for line in node.body if isinstance(line, ast.Assign)}
                about = assigned.get("about", ast.Call(None, [], []))
                texts = {keyword.arg: ast.literal_eval(keyword.value) for keyword in about.keywords}
                if set(texts) != set(COLUMNS):
                    sys.exit(f"{path}: `about = About(...)` of {node.name} needs {', '.join(COLUMNS)}, as literals")
                exchanges = ast.literal_eval(assigned.get("exchanges", ast.Constant("gradients")))
                found[path.stem] = (exchanges, texts)
    return {name: texts for name, (_, texts) in sorted(found.items(), key=lambda item: (item[1][0], item[0]))}


def measured(document: Path = ROOT / "docs" / "memory.md") -> dict[str, str]:
    """Returns the memory of each algorithm: with its defaults, and with error feedback if that was measured."""
    kept: dict[str, list[str]] = {}
    for line in document.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            name, *options = (word.strip(" `") for word in cells[0].split(","))
            kept.setdefault(name, []).append(f"{_MEASURED[tuple(options)]}{cells[2]}")
    return {name: "; ".join(figures) for name, figures in kept.items()}


def table() -> str:
    """Returns the table in Markdown."""
    kept = measured()
    lines = [["algorithm", *COLUMNS.values(), "kept, measured, n = 4"], ["---"] * (2 + len(COLUMNS))]
    lines += [
        [f"`{name}`", *(texts[column] for column in COLUMNS), kept.get(name, "")]
        for name, texts in algorithms().items()
    ]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def updated(text: str) -> str:
    """Returns `text` with the current table between the marks."""
    if len(MARKS.findall(text)) != 1:
        sys.exit("expected one `<!-- algorithms: begin ... -->` and one `<!-- algorithms: end -->` after it")
    return MARKS.sub(lambda found: found[1] + table() + found[2], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 if the table is out of date"
    )
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "docs" / "algorithms.md")
    args = parser.parse_args()
    before = args.page.read_text()
    after = updated(before)
    if args.check and before != after:
        sys.exit(f"the table of algorithms in {args.page} is out of date; run: python scripts/algorithms_table.py")
    if not args.check and before != after:
        args.page.write_text(after)


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    main()
