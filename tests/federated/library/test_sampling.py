"""Cohorts and the random numbers of clients: by seed, whoever draws them."""

from __future__ import annotations

import collections

import pytest
import torch

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.library import sampling
from tests.conformance.training import process_group


def test_a_cohort_is_drawn_evenly_and_without_replacement():
    counts = collections.Counter()
    for number in range(2000):
        cohort = sampling.cohort(10, 4, seed=3, round=number).tolist()
        assert len(set(cohort)) == 4
        counts.update((position, client) for position, client in enumerate(cohort))
    assert set(counts) == {(position, client) for position in range(4) for client in range(10)}
    assert all(abs(count - 200) < 5 * (2000 * 0.1 * 0.9) ** 0.5 for count in counts.values())
    assert not torch.equal(sampling.cohort(10, 10, seed=3, round=0), sampling.cohort(10, 10, seed=4, round=0))
    assert sampling.cohort(10**9, 3, seed=1, round=0).dtype == torch.int64


def test_clients_drop_out_at_the_rate_and_independently():
    masks = torch.stack([sampling.participates(range(50), 0.7, seed=1, round=number) for number in range(200)])
    assert masks.dtype == torch.bool and abs(masks.float().mean() - 0.7) < 0.025
    assert (masks.float().mean(0) - 0.7).abs().max() < 0.17 and len(set(masks[:, 0].tolist())) == 2
    assert sampling.participates([7, 3], 0.7, seed=1, round=9).tolist() == [bool(masks[9, 7]), bool(masks[9, 3])]
    assert sampling.participates(range(5), 1.0, seed=1, round=0).all()
    assert not sampling.participates(range(5), 0.0, seed=1, round=0).any()


def draws(rank, world_size, split):
    """This rank's clients of a cohort, their shuffles, and what a program makes of their noise."""
    with process_group():
        cohort = sampling.cohort(100, 6, seed=1, round=2)
        mine = cohort[federated.local_slice(6, num_local=split)]
        shuffle = sampling.per_client(lambda g: torch.randperm(5, generator=g), mine, seed=1, round=2)
        noise = sampling.per_client(lambda g: torch.randn(3, generator=g, dtype=torch.float64), mine, seed=2, round=2)
        program = federated.program(
            lambda x, noise: federated.reduce_mean(federated.map_fn(torch.mul, (federated.broadcast(x), noise))),
            clients=6,
            num_local=split,
        )
        value = program(torch.ones(3, dtype=torch.float64), noise)
    return cohort, mine, shuffle, value


def test_draws_do_not_depend_on_the_ranks(pools):
    for split in (None, [4, 0, 2]):
        size = 2 if split is None else len(split)
        results = pools[size].run(draws, args=(split,))
        cohorts, mine, shuffles, values = zip(*results, strict=True)
        assert [len(one) for one in mine] == (split or [3, 3])
        assert torch.equal(torch.cat(mine), cohorts[0]) and all(torch.equal(one, cohorts[0]) for one in cohorts)
        together = torch.cat(shuffles)
        total = torch.zeros(3, dtype=torch.float64)
        for position, client in enumerate(cohorts[0].tolist()):
            by_itself = sampling.generator_of(1, "client", 2, client)
            assert torch.equal(together[position], torch.randperm(5, generator=by_itself))
            total += torch.randn(3, generator=sampling.generator_of(2, "client", 2, client), dtype=torch.float64)
        for value in values:
            torch.testing.assert_close(value, total / 6, rtol=1e-12, atol=0)


def test_seeds_depend_on_every_part():
    parts = [(1,), (2,), (1, 2), (2, 1), (12,), (1, "2"), ("1", 2), (1, 2, 0), (-1, 2)]
    seeds = [sampling.seed_of(*one) for one in parts]
    assert len(set(seeds)) == len(parts) and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sampling.cohort(3, 4, seed=1, round=0), "a cohort of 4 of 3 clients"),
        (lambda: sampling.participates([1], 1.5, seed=1, round=0), "rate=1.5"),
        (lambda: federated.local_slice(3, num_local=[1, 1, 1]), "a number for each of 1 ranks"),
    ],
)
def test_mistakes(make, message):
    assert not bagua.is_initialized()
    with pytest.raises(InvalidArgument, match=message):
        make()
