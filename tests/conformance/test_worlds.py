"""Every registered algorithm in worlds of one to four ranks, over every transport."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

import bagua
from bagua.testing import world as thread_world
from tests.conformance.training import (
    OF_GRADIENTS,
    batch,
    grads_of,
    loss_of,
    make_optimizer,
    mean_in_loops,
    process_group,
)
from tests.conformance.variants import ONE_OF_EACH, VARIANTS, described
from tests.distributed.worlds import fast_in, shm, tcp

_seeding = threading.Lock()  # ranks that are threads share torch's generator


def _train(group, variant, num_steps=7):
    """Trains, and says what the ranks' weights and gradients have to do with one another. Returns the last weights."""
    algorithm, options = variant
    with _seeding:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1), torch.nn.Flatten(0)
        )
    optimizer = make_optimizer(algorithm, model, lr=0.002)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, group=group, **options)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(group.rank, 0))
        loss.backward()
        grads = grads_of(model)
        if algorithm in OF_GRADIENTS:
            everyone = group.all_gather_object(grads)
            assert all(torch.equal(theirs[name], grads[name]) for theirs in everyone for name in grads), step
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    everyone = group.all_gather_object(weights)
    spread = max(float((theirs[name] - weights[name]).abs().max()) for theirs in everyone for name in weights)
    assert (
        spread == 0
        if algorithm in OF_GRADIENTS or options.get("warmup_steps", 0) >= num_steps
        else (0 < spread < 0.05) == (group.size > 1 and options.get("sync_every") != 1)
    )
    assert losses[-1] < losses[0]
    model.bagua.remove()
    return mean_in_loops(everyone)


def _train_all(rank, world_size, variants):
    with process_group():
        return {described(variant): _train(bagua.get_default_group(), variant) for variant in variants}


_OF = {
    "some": [one for one in ONE_OF_EACH if one[0] in ("bytegrad", "low_precision_decentralized")],
    "one of each": ONE_OF_EACH,
    "all": VARIANTS,
}


@functools.cache
def _over_threads(size, which):
    return thread_world(size, lambda group: {described(variant): _train(group, variant) for variant in _OF[which]})


@pytest.fixture(scope="module")
def pool3():
    from bagua.testing import Pool

    with Pool(3) as pool:
        yield pool


@fast_in("size, which", [(3, "one of each")], [(size, "all") for size in (1, 2, 3, 4)])
def test_over_threads(size, which):
    results = _over_threads(size, which)
    assert all(len(result) == len(_OF[which]) for result in results)


@fast_in("world, which", [(tcp(3), "some")], [(make(size), "all") for size in (2, 3, 4) for make in (shm, tcp)])
def test_over_processes(pool2, pool3, pool4, world, which):
    """The transport changes neither what is computed, nor, but for the order of sums, how it is rounded."""
    results = {2: pool2, 3: pool3, 4: pool4}[world.size].run(_train_all, args=(_OF[which],), env=world.env)
    for over_threads, over_processes in zip(_over_threads(world.size, which), results, strict=True):
        for variant, weights in over_processes.items():
            for name, weight in weights.items():
                torch.testing.assert_close(weight, over_threads[variant][name], rtol=0, atol=2e-3, msg=variant)
