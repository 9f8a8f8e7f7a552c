"""Plain English in docstrings and comments, by budgets that may only fall.

A docstring begins with a verb in the third person or an article and a noun, a comment is a sentence, and software is
not called "who", "nobody" or "somebody". Prose that begins with one of OPENERS usually breaks that: it is a clause
without its head.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bagua", "benchmarks", "examples", "scripts", "csrc", "rust_core/src")
COMMENT_MARKS = {".py": "#", ".sh": "#", ".cc": "//", ".h": "//", ".cu": "//", ".rs": "//"}
OPENERS = {
    "docstrings": "what whether who whom whose how which where when why of that those as by for from to with nor or",
    "comments": "what who whose which where of that as by for nor or",
}
PERSONS = re.compile(r"\b(nobody|somebody|everybody)\b", re.IGNORECASE)

# Findings that are left, by kind. Lower a budget when its findings become fewer; never raise one.
BUDGETS = {"docstrings": 0, "comments": 0, "persons": 17}


def first_word(prose):
    """Returns the first word, in lower case; "" if the text begins with a symbol."""
    return re.match(r"[a-z_]*", prose.strip().lower())[0]


def docstrings(source):
    """Yields the line and text of every docstring of a Python file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def has_opener(comment):
    """Returns True if a comment begins with a word that it should not begin with."""
    return first_word(comment) in OPENERS["comments"].split()


def comments(source, suffix):
    """Yields the line and text of the first line of every block of comments that have their lines to themselves.

    Of a Python file in which no line looks like one that breaks the rule, it yields nothing.
    """
    mark = COMMENT_MARKS[suffix]
    last = None  # line of the last comment
    lines = source.splitlines()
    if suffix == ".py":  # to tell comments from lines of strings takes long
        may_break = any(line.strip().startswith(mark) and has_opener(line.strip().lstrip(mark + "!")) for line in lines)
        lines = without_strings(source) if may_break else []
    for number, line in enumerate(lines, 1):
        if line.strip().startswith(mark):
            if last is None or number > last + 1:
                yield number, line.strip().lstrip(mark + "!")
            last = number


def without_strings(source):
    """Returns the lines of a Python file, blank where no comment begins them."""
    lines = [""] * (source.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            lines[token.start[0] - 1] = token.string
    return lines


def findings_in(source, suffix):
    """Yields the kind, line and text of everything in a file that breaks the rule."""
    for number, text in docstrings(source) if suffix == ".py" else ():
        if first_word(text) in OPENERS["docstrings"].split():
            yield "docstrings", number, text.splitlines()[0]
    for number, text in comments(source, suffix):
        if has_opener(text):
            yield "comments", number, text
    for number, line in enumerate(source.splitlines(), 1):
        if PERSONS.search(line):
            yield "persons", number, line.strip()


@pytest.fixture(scope="module")
def findings():
    """The findings in all files by kind, as lines to print."""
    found = {kind: [] for kind in BUDGETS}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in COMMENT_MARKS:
                for kind, number, text in findings_in(path.read_text(), path.suffix):
                    found[kind].append(f"{path.relative_to(ROOT)}:{number}: {text}")
    return found


@pytest.mark.parametrize("kind", BUDGETS)
def test_findings_are_within_their_budget(findings, kind):
    count, budget = len(findings[kind]), BUDGETS[kind]
    assert count <= budget, f"{count} {kind} break the rule, expected at most {budget}:\n" + "\n".join(findings[kind])
    assert count >= budget, f"{kind}: the budget is {budget}, but {count} are left; lower it to {count}"


@pytest.mark.parametrize(
    ("source", "suffix", "expected"),
    [
        ('"""What it does."""\n', ".py", [("docstrings", 1)]),
        ('def f():\n    """Returns what it does, of which ..."""\n', ".py", []),
        ('def f():\n    """Whose."""\n    # of it\n    # Which goes on.\n\n    # Nor this.\n', ".py",
         [("docstrings", 2), ("comments", 3), ("comments", 6)]),
        ('x = """\n# of a string\n"""  # of a line\n', ".py", []),
        ("# Forms a group.\n# WHERE it stands.\n", ".py", []),
        ("/// What is next.\nint x;  // of all\n// By rank.\n", ".h", [("comments", 1), ("comments", 3)]),
        ("//! Who meets.\n", ".rs", [("comments", 1)]),
        ("#!/bin/sh\n# That is all.\n", ".sh", []),
        ("// Nobody waits.\nx = everybody_else;\n", ".cc", [("persons", 1)]),
    ],
)  # fmt: skip
def test_the_rule_on_examples(source, suffix, expected):
    assert [(kind, line) for kind, line, _ in findings_in(source, suffix)] == expected
