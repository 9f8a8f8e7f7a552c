"""docs/algorithms.md has all algorithms, as described by their classes, and all options and codecs."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
from bagua.algorithms import About

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/algorithms.md"
# Not those of other packages that happen to be installed.
NAMES = [name for name in bagua.algorithms.available() if (ROOT / f"bagua/algorithms/{name}.py").exists()]


def run_script(*arguments):
    command = [sys.executable, str(ROOT / "scripts/algorithms_table.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def rows(text):
    table = text.partition("<!-- algorithms: begin")[2].partition("<!-- algorithms: end")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[3:]]
    return {first.strip("`"): rest for first, *rest in cells}


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_of_this_package_says_what_it_is_about(name):
    about = bagua.algorithms.get(name).about
    assert isinstance(about, About)
    for column, text in dataclasses.asdict(about).items():
        assert text and not set("|\n") & set(text), f"{name}: about.{column} is {text!r}"
    *declared, kept = rows(PAGE.read_text())[name]
    assert declared == list(dataclasses.astuple(about))
    measured = next(
        line for line in (ROOT / "docs/memory.md").read_text().splitlines() if line.startswith(f"| `{name}` |")
    )
    assert kept.split(";")[0] == measured.split(" | ")[2]


def test_the_table_holds_them_all_and_nothing_else():
    assert set(rows(PAGE.read_text())) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_on_the_page_with_its_algorithm(name):
    table = PAGE.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    options = {}
    for line in table.splitlines()[3:]:
        if line.startswith("| `"):
            names, algorithms = line.split(" | ")[:2]
            options |= dict.fromkeys(re.findall(r"`(\w+)`", names), algorithms)
    for field in dataclasses.fields(bagua.algorithms.get(name)):
        assert f"`{name}`" in options[field.name], f"`{field.name}` of {name}: {options[field.name]}"


def test_the_table_is_up_to_date():
    done = run_script("--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


def test_a_table_that_is_out_of_date_is_found_and_written_anew(tmp_path):
    text = PAGE.read_text()
    page = tmp_path / "algorithms.md"
    page.write_text(text.replace("| `bytegrad` | gradients", "| `bytegrad` | graduates"))
    done = run_script("--check", page)
    assert done.returncode == 1
    assert f"{page} is out of date; run: python scripts/algorithms_table.py" in done.stderr
    assert "graduates" in page.read_text()
    done = run_script(page)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert page.read_text() == text


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "algorithms.md"
    page.write_text("no marks")
    done = run_script(page)
    assert done.returncode == 1
    assert "algorithms: begin" in done.stderr
    assert page.read_text() == "no marks"
