"""Rows of an embedding that no batch has met stay as they were, bit for bit, under every algorithm and every rounding.

Their gradient is 0 on every rank, so nothing that is rounded on the way may become a step: Adam divides by the size of
what it is given, and would make a learning rate of 1e-9.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.codec_specs import ROUNDINGS
from tests.conformance.training import ALGORITHMS, make_optimizer, process_group
from tests.conformance.variants import VARIANTS, described
from tests.distributed.worlds import SAME_TEST

ROWS, WIDTH = 1024, 12  # six blocks of 2048, whose edges cut rows
NUM_STEPS = 6
_OPTIONS = {"qadam": {"warmup_steps": 2}, "async_averaging": {"sync_interval": 0.01, "warmup_steps": 2}}


def _cases():
    for name in ALGORITHMS:
        fields = {field.name for field in dataclasses.fields(bagua.algorithms.get(name))}
        options = dict(_OPTIONS.get(name, {}))
        if "min_compressed_bytes" in fields:
            options["min_compressed_bytes"] = 0
        if "codec" in fields:
            for codec in ROUNDINGS:
                with contextlib.suppress(InvalidArgument):  # what an algorithm refuses to send under
                    bagua.algorithms.create(name, {**options, "codec": codec})
                    yield name, {**options, "codec": codec}
        else:
            own = [variant for of, variant in VARIANTS if of == name and not variant.get("error_feedback")]
            yield from ((name, {**variant, **options}) for variant in own)


def _rows_of(rank, step):
    """Some of the first quarter of the rows, and the last row but one: half of the blocks meet none."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.cat([3 * torch.randint(ROWS // 12, (20,), generator=generator), torch.tensor([ROWS - 2])])


def _train(rank, world_size, algorithm, options, kind):
    touched = torch.zeros(ROWS, dtype=torch.bool)
    for other in range(world_size):
        for step in range(NUM_STEPS):
            touched[_rows_of(other, step)] = True
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(ROWS, WIDTH), torch.nn.Linear(WIDTH, 3))
        start = model[0].weight.detach().clone()
        optimizer = make_optimizer(algorithm, model, kind, lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(_rows_of(rank, step)).square().mean().backward()
            optimizer.step()
        if algorithm == "async_averaging":
            model.bagua.pause()
        moved = (model[0].weight.detach() != start).any(dim=1)
        strays = (moved & ~touched).nonzero().flatten().tolist()
        assert not strays, f"{kind.__name__}: {len(strays)} rows that no batch has met moved, first {strays[:3]}"
        assert bool(moved[touched].any())


def _with(kind):
    """Fast are each algorithm with one codec, and each codec with one algorithm, under Adam."""
    seen = set()
    for case in _cases():
        name = case[0]
        is_fast = kind is torch.optim.Adam and (name in ("bytegrad", "qsgd") or name not in seen)
        seen.add(name)
        yield pytest.param(case, kind, id=f"{described(case)}-{kind.__name__}", marks=() if is_fast else SAME_TEST)


@pytest.mark.parametrize("case, kind", [*_with(torch.optim.Adam), *_with(torch.optim.SGD)])
def test_rows_without_a_gradient_stay(pool2, case, kind):
    pool2.run(_train, args=(*case, kind))
