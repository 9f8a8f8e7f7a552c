"""Cohorts and the random numbers of clients: by seed, whoever draws them."""

from __future__ import annotations

import collections
import math

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


def test_poisson_cohorts_have_each_client_at_the_rate_independently_of_the_others():
    population, rate, rounds = 30, 0.2, 3000
    is_there = torch.zeros(rounds, population)
    for number in range(rounds):
        cohort, is_drawn = sampling.Poisson(rate).draw(population, seed=3, round=number)
        num_drawn = int(is_drawn.sum())
        assert cohort.dtype == torch.int64 and len(cohort) == len(is_drawn) == len(set(cohort.tolist()))
        assert cohort.min() >= 0 and cohort.max() < population and is_drawn[:num_drawn].all()
        assert len(cohort) == max(4, 4 * math.ceil(num_drawn / 4))
        is_there[number, cohort[is_drawn]] = 1

    def is_near(found, probability):
        return ((found - probability).abs() < 5 * (probability * (1 - probability) / rounds) ** 0.5).all()

    assert is_near(is_there.mean(0), rate)
    pairs = is_there.T @ is_there / rounds
    assert is_near(pairs[~torch.eye(population, dtype=torch.bool)], rate**2)
    sizes = is_there.sum(1)
    assert abs(sizes.var() - population * rate * (1 - rate)) < 0.5 and sizes.min() == 0
    assert is_near((sizes == 0).float().mean(), (1 - rate) ** population)


def test_poisson_cohorts_of_all_and_by_seed():
    cohort, is_drawn = sampling.Poisson(rate=1.0).draw(5, seed=1, round=0)
    assert sorted(cohort.tolist()) == list(range(5)) and is_drawn.all()
    first, again, other = [sampling.Poisson(rate=1e-5).draw(10**8, seed=seed, round=0) for seed in (1, 1, 2)]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]) and len(first[0]) in (960, 1024, 1152)
    assert len(set(first[0].tolist()) & set(other[0].tolist())) < 5


def test_sizes_are_few_and_little_above_what_they_hold():
    sizes = [sampling.padded_size(number) for number in range(5000)]
    assert sizes[0] == 4
    for number, size in enumerate(sizes[1:], 1):
        assert 0 <= size - number <= max(3, number / 8) and sampling.padded_size(size) == size
    assert sizes == sorted(sizes)
    assert all(len({size for size in sizes if low < size <= 2 * low}) == 8 for low in (32, 64, 128, 256, 512, 1024))
    assert {size for size in sizes if size <= 32} == set(range(4, 33, 4))


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
        (lambda: sampling.Poisson(0.0), "rate=0.0, expected a probability above 0"),
        (lambda: sampling.Poisson(1.5), "rate=1.5"),
        (lambda: sampling.check_cohort(sampling.Poisson(0.5), 0), r"a cohort of Poisson\(rate=0.5\) of 0 clients"),
        (lambda: sampling.participates([1], 1.5, seed=1, round=0), "rate=1.5"),
        (lambda: federated.local_slice(3, num_local=[1, 1, 1]), "a number for each of 1 ranks"),
    ],
)
def test_mistakes(make, message):
    assert not bagua.is_initialized()
    with pytest.raises(InvalidArgument, match=message):
        make()
