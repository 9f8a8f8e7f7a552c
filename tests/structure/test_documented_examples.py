"""What docstrings and README.md show runs: every doctest, and every block of Python, as the reader would run them."""

import contextlib
import copy
import dataclasses
import doctest
import importlib
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

ROOT = Path(__file__).resolve().parents[2]
OWN_ENDS = ("init_process_group(", "spawn(", "Pool(", "world(")  # an example with one of these makes its own world


def readers_names(is_wrapped=True):
    """What a reader of a fragment has: a model that trains, wrapped by all ranks of a world, and its data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"bagua": bagua, "torch": torch, "copy": copy, "os": os, "model": model, "optimizer": optimizer}
    names |= {"loss": torch.nn.functional.mse_loss, "data": range(8)}
    names |= {"DistributedSampler": torch.utils.data.DistributedSampler}
    for end in ("", "1", "2"):
        names |= {f"x{end}": torch.randn(8, 4), f"y{end}": torch.randn(8, 2)}
    names |= {"register": register, "ReduceOp": bagua.ReduceOp, "dataclasses": dataclasses}
    if is_wrapped:
        bagua.with_bagua(model, optimizer)
    return names


def doctests():
    """By module."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), []
    for info in pkgutil.walk_packages(bagua.__path__, "bagua.", onerror=lambda name: None):
        with contextlib.suppress(NoSuchModule):
            if not info.name.endswith("__main__"):
                found += [test for test in finder.find(importlib.import_module(info.name)) if test.examples]
    return [*finder.find(bagua, "bagua", globs={})[:1], *found]


def starts_ranks(test):
    return test.name.startswith("bagua.testing.ranks.")


def run_doctests(rank, world_size, folder, are_to_run):
    """What failed, as text, and how many examples have run."""
    os.chdir(folder)
    output, num_run = [], 0
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for test in filter(are_to_run, doctests()):
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


def in_a_rank(test):
    return not starts_ranks(test)


def test_doctests(tmp_path, monkeypatch):
    env = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())}
    failures, num_run = spawn(run_doctests, 1, args=(tmp_path, in_a_rank), env=env)[0]
    monkeypatch.chdir(tmp_path)
    more_failures, num_more = run_doctests(0, 1, tmp_path, starts_ranks)
    assert not failures + more_failures, failures + more_failures
    assert num_run > 50 and num_more > 2


def blocks_of_readme():
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def run_blocks(rank, world_size, blocks, folder):
    os.chdir(folder)
    for block in blocks:
        is_fragment = re.search(r"\b(model|data)\b", block) and "init_process_group" not in block
        names = {"__name__": "__main__"}
        if is_fragment:
            bagua.init_process_group(timeout=30)
            names |= readers_names()
        exec(compile(block, "README.md", "exec"), names)
        if is_fragment:
            bagua.destroy_process_group()
        assert not bagua.is_initialized() and not torch.distributed.is_initialized()
    # What the last one registers averages gradients.
    bagua.init_process_group(timeout=30)
    model = torch.nn.Linear(3, 1, bias=False)
    bagua.with_bagua(model, algorithm="half_precision")
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    grad = model.weight.grad.tolist()
    bagua.destroy_process_group()
    return grad


@pytest.mark.skipif(torch.__version__ < (2, 9), reason='the backend "bagua" needs torch 2.9')
def test_the_blocks_of_the_readme(tmp_path):
    blocks = blocks_of_readme()
    assert len(blocks) >= 5
    assert spawn(run_blocks, 2, args=(blocks, tmp_path)) == [[[1.5] * 3]] * 2


def test_the_examples_of_federated_programs():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    path = str(ROOT / "docs" / "federated.md")
    output = []
    test = doctest.DocTestParser().get_doctest(Path(path).read_text(), {}, "federated.md", path, 0)
    results = doctest.DocTestRunner(optionflags=options, verbose=False).run(test, out=output.append)
    assert not results.failed and results.attempted > 20, "".join(output)
