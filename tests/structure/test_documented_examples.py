"""The examples of docstrings, README.md and docs/ run: doctests, and blocks of Python, as a reader would run them."""

import contextlib
import copy
import dataclasses
import doctest
import importlib
import io
import os
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import bagua
from bagua.algorithms import register
from bagua.testing import free_port, spawn
from bagua.torch_api.unsupported import NoSuchModule
from bagua.torch_version import is_torch_at_least

ROOT = Path(__file__).resolve().parents[2]
OWN_ENDS = ("init_process_group(", "spawn(", "Pool(", "world(")  # an example with one of these makes its own world


def readers_imports():
    """Returns the modules that a reader of a fragment has imported."""
    names = {"bagua": bagua, "torch": torch, "copy": copy, "os": os, "dataclasses": dataclasses}
    return names | {"register": register, "DistributedSampler": torch.utils.data.DistributedSampler}


def readers_names(is_wrapped=True):
    """Returns the other names of a fragment's reader: a model, wrapped by all ranks of a world, and its data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {**readers_imports(), "model": model, "optimizer": optimizer, "ReduceOp": bagua.ReduceOp}
    names |= {
        "loss": torch.nn.functional.mse_loss,
        "data": range(8),
        "step": 0,
        "num_steps": 2,
        "train": lambda step: None,
    }
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for end in ("", "1", "2"):
        names |= {f"x{end}": torch.randn(8, 4), f"y{end}": torch.randn(8, 2)}
    names["batches"] = [(names["x"], names["y"])]
    if is_wrapped:
        bagua.with_bagua(model, optimizer)
    return names


def module_names(package):
    """Returns the names of the package's modules that have no program, and its own."""
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None)
    return [package.__name__, *(info.name for info in found if not info.name.endswith("__main__"))]


def doctests(names):
    """Returns the doctests of modules."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), []
    for name in names:
        with contextlib.suppress(NoSuchModule):
            own = finder.find(importlib.import_module(name), name)
            found += own[:1] if name == "bagua" else own  # its names are other modules'
    return [test for test in found if test.examples]


def run_doctests(rank, world_size, folder, names):
    """Runs the doctests of modules; returns the failures as text, and the number of examples."""
    os.chdir(folder)
    output, num_run = [], 0
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for test in doctests(names):
        has_own = any(end in example.source for example in test.examples for end in OWN_ENDS)
        if not has_own:
            bagua.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        test.globs = readers_names(is_wrapped=not has_own) | test.globs
        runner.run(test, out=output.append)
        num_run += sum(not example.options.get(doctest.SKIP, False) for example in test.examples)
        if bagua.is_initialized():
            bagua.destroy_process_group()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return "".join(output), num_run


STARTS_RANKS = "bagua.testing.ranks"
# For a process that is the only one.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": None}


def test_doctests(tmp_path, monkeypatch):
    """Those of bagua.integrations run in tests/integrations/test_documented_programs.py; NVFlare need not be there."""
    elsewhere = ("bagua.integrations.", "bagua.federated.nvflare", STARTS_RANKS)
    names = [name for name in module_names(bagua) if not name.startswith(elsewhere)]
    env = {**ALONE, "MASTER_PORT": str(free_port())}
    failures, num_run = spawn(run_doctests, 1, args=(tmp_path, names), env=env)[0]
    monkeypatch.chdir(tmp_path)
    more_failures, num_more = run_doctests(0, 1, tmp_path, [STARTS_RANKS])
    assert not failures + more_failures, failures + more_failures
    assert num_run > 50 and num_more > 2


# Those on federated programs are doctests, or one program, and run below; the block of docs/torch_api.md does not
# destroy its group; those of docs/trainers.md, which leave that to the trainers, run in
# tests/integrations/test_documented_programs.py; those of docs/fsdp.md in tests/torch_hooks/test_documented.py.
FEDERATED = ("federated.md", "federated-clients.md", "federated-tutorial.md")
NOT_HERE = {*FEDERATED, "fsdp.md", "torch_api.md", "trainers.md"}


def blocks(pages):
    """Yields the page name and source of each block of Python."""
    for page in pages:
        text = page.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield page.name, "\n" * text.count("\n", 0, found.start(1)) + found[1]  # errors name the page's line


def run_blocks(rank, world_size, blocks, folder):
    os.chdir(folder)
    for page, source in blocks:
        names = {"__name__": "__main__"}
        is_program = re.search(r"^import bagua\b", source, re.MULTILINE) is not None
        makes_a_group = "init_process_group(" in source
        if not is_program:
            names |= readers_imports()
        if not makes_a_group:
            bagua.init_process_group(timeout=30)
            names |= readers_names()
        exec(compile(source, page, "exec"), names)
        if not makes_a_group:
            bagua.destroy_process_group()
        assert not bagua.is_initialized() and not torch.distributed.is_initialized(), page


@pytest.mark.skipif(not is_torch_at_least(2, 9), reason='the backend "bagua" needs torch 2.9')
@pytest.mark.needs("prometheus_client", "tensorboard")
def test_the_blocks_of_the_pages(tmp_path):
    pages = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in NOT_HERE)]
    found = list(blocks(pages))
    assert len(found) >= 15
    spawn(run_blocks, 2, args=(found, tmp_path), timeout=100)


def test_the_tests_that_the_pages_show():
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs/plugins.md"]
    tests = [(page, source) for page, source in blocks(pages) if "def test_" in source]
    assert len(tests) == 2
    for page, source in tests:
        names = {**readers_imports(), "__name__": "__main__"}
        exec(compile(source, page, "exec"), names)
        for name in [name for name in names if name.startswith("test_")]:
            names[name]()


def run_the_diff(rank, world_size, added):
    names = readers_names(is_wrapped=False)
    exec(compile("\n".join(added), "README.md", "exec"), names)
    model, x = names["model"], torch.full((1, 4), 1.0 + rank)
    model(x).sum().backward()
    bagua.destroy_process_group()
    return model.weight.grad.tolist()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_diff_of_the_start_pages(page):
    """The added lines average gradients; the removed ones are torch's."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    added, removed = ([line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "+-")
    assert len(added) == len(removed) == 3
    torch.testing.assert_close(torch.tensor(spawn(run_the_diff, 2, args=(added,))), torch.full((2, 2, 4), 1.5))


@pytest.fixture
def one_thread():
    """As in ranks: the tensors of examples are small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.needs("dp_accounting")
@pytest.mark.parametrize("page", FEDERATED[:2])
def test_the_examples_of_federated_programs(one_thread, page):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    path = str(ROOT / "docs" / page)
    output = []
    test = doctest.DocTestParser().get_doctest(Path(path).read_text(), {}, page, path, 0)
    results = doctest.DocTestRunner(optionflags=options, verbose=False).run(test, out=output.append)
    assert not results.failed and results.attempted > 20, "".join(output)


def run_the_tutorial(rank, world_size, text):
    """Runs the blocks of Python as one program; returns pairs of what one printed and what the page shows."""
    names, printed, pairs = {"__name__": "__main__"}, "", []
    for language, body in re.findall(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(body, FEDERATED[2], "exec"), names)
            printed = output.getvalue()
        else:
            pairs.append((printed, body))
    if bagua.is_initialized():
        bagua.destroy_process_group()
    return pairs


@pytest.mark.needs("dp_accounting", "sklearn")
@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.slow("test_the_tutorial_prints_what_it_shows"))]
)
def test_the_tutorial_prints_what_it_shows(pool2, one_thread, monkeypatch, world_size):
    """One process without a launcher, and two ranks; numbers with a point may differ by two hundredths."""
    text = (ROOT / "docs" / FEDERATED[2]).read_text()
    if world_size == 2:
        found = pool2.run(run_the_tutorial, args=(text,))
    else:
        monkeypatch.delenv("RANK", raising=False)
        found = [run_the_tutorial(0, 1, text)]
    number = r"\d+\.\d+"
    for pairs in found:
        assert len(pairs) == 5
        for printed, shown in pairs:
            assert re.sub(number, "#", printed) == re.sub(number, "#", shown)
            values, expected = ([float(one) for one in re.findall(number, part)] for part in (printed, shown))
            assert values == pytest.approx(expected, abs=0.021)
