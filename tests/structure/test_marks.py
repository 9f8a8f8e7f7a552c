"""Tests that read a clock are `timed`, and what is `slow` names the fast test that catches the same mutations."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}
# These tests read a clock to compare orders, or pass it to the code under test; durations do not matter.
ORDERS = {
    "test_nobody_leaves_a_barrier_before_all_have_entered",
    "test_backwards_inside_no_sync_belong_to_the_step",
    "test_the_exchange_runs_under_forward_and_backward",
    "test_a_slow_rank_slows_no_other_down",
    "test_threads_on_imitated_nodes",
    "test_measurements_are_told_apart",
    "test_over_tcp",
    "test_operations_are_as_the_device_has_run_them",
    "test_the_cpu_has_its_arithmetic_in_the_same_process",
}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def reads_clock(node):
    return any(isinstance(n, ast.Attribute) and n.attr in CLOCKS for n in ast.walk(node))


def marks_of(decorators):
    return {match for d in decorators for match in re.findall(r"mark\.(\w+)", ast.unparse(d))}


def readers_of_a_clock(path):
    """Returns tests that read a clock, also through the functions, classes and fixtures of the file that they use."""
    definitions = {node.name: node for node in tree_of(path).body if hasattr(node, "name")}
    uses = {}
    for name, node in definitions.items():  # a fixture is used by the name of an argument
        uses[name] = [getattr(n, "id", None) or getattr(n, "arg", None) for n in ast.walk(node)]
    for test in (name for name in definitions if name.startswith("test_")):
        seen, todo = set(), [test]
        while todo:
            name = todo.pop()
            if name in definitions and name not in seen:
                seen.add(name)
                todo += uses[name]
        if any(reads_clock(definitions[name]) for name in seen):
            yield test, definitions[test]


def unmarked_in(path):
    """Returns the tests that read a clock and have no mark, in a file without a mark."""
    if not any(clock in path.read_text() for clock in CLOCKS):
        return []
    module = [node for node in tree_of(path).body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if "timed" in marks_of(module):
        return []
    return [name for name, node in readers_of_a_clock(path) if "timed" not in marks_of(node.decorator_list)]


def test_what_reads_a_clock_is_timed():
    unmarked = [f"{path.relative_to(ROOT)}: {name}" for path in FILES for name in set(unmarked_in(path)) - ORDERS]
    assert not unmarked, "mark them timed, or wait for what must come with tests.meeting.wait_until"


def test_the_mark_is_where_the_makefile_looks_for_it():
    text = (ROOT / "Makefile").read_text()
    assert text.count("grep -rl --include='test_*.py' 'mark\\.timed' tests") == 1
    elsewhere = [path for path in (ROOT / "tests").rglob("*.py") if "mark.timed" in path.read_text()]
    assert set(elsewhere) <= set(FILES)


def test_what_is_slow_names_a_fast_test():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert not re.search(r"mark\.slow\b(?!\()", text), "slow(fast): name the fast test"
    named = re.findall(r'mark\.slow\("([^"]+)"', text)
    assert len(named) > 10
    for name in named:
        known = name.startswith(("the same test", "nothing: ")) or re.search(rf"^def {name}\(", text, re.MULTILINE)
        assert known, f"slow({name!r}) names no test"
