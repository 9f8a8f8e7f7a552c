"""What a rank does in a rehearsal is what it does among others, operation by operation and byte by byte."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.simulator.rehearsal import RehearsalGroup
from tests.conformance.training import batch, loss_of, make_net, make_optimizer, process_group
from tests.conformance.variants import ONE_OF_EACH, VARIANTS, described
from tests.distributed.worlds import fast_in, tcp

NUM_STEPS = 7
SYNCHRONOUS = [one for one in VARIANTS if one[0] != "async_averaging"]


def _operations(group, variant):
    """The operations of rank 0 from its wrapping on: what, how many bytes it is about, and how many it has sent."""
    algorithm, options = variant
    torch.manual_seed(0)
    model = make_net()
    optimizer = make_optimizer(algorithm, model, lr=0.002)
    # Time decides when replicas are checked again.
    options = {"bucket_bytes": 64 * 1024, "check_replicas": False, **options}
    bagua.with_bagua(model, optimizer, algorithm=algorithm, group=group, **options)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(group.rank, step)).backward()
        optimizer.step()
    model.bagua.remove()
    events = sorted((e for e in group.events(parts=False) if e.kind != "queued"), key=lambda event: event.ticket)
    return [(event.kind, event.bytes, event.bytes_sent) for event in events]


def _real(rank, world_size, variants):
    with process_group():
        found = {}
        for variant in variants:
            group = bagua.new_group(list(range(world_size)))
            found[described(variant)] = _operations(group, variant)
            bagua.destroy_process_group(group)
        return found


@fast_in("size, variants", [(3, "one of each")], [(size, "all") for size in (2, 3, 4)])
def test_every_algorithm_does_the_same_among_others(pool2, pool3, pool4, size, variants):
    chosen = [one for one in (ONE_OF_EACH if variants == "one of each" else SYNCHRONOUS) if one in SYNCHRONOUS]
    real = {2: pool2, 3: pool3, 4: pool4}[size].run(_real, args=(chosen,), env=tcp(size).env)[0]
    for variant in chosen:
        group = RehearsalGroup(hosts=size, ranks_per_host=1)
        rehearsed = _operations(group, variant)
        group.close()
        assert len(rehearsed) > NUM_STEPS / 4, variant
        assert rehearsed == real[described(variant)], variant


@pytest.fixture(scope="module")
def pool3():
    from bagua.testing import Pool

    with Pool(3) as pool:
        yield pool
