"""Partitions: every example once, nobody without, and as uneven as asked for."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch

from bagua.errors import InvalidArgument
from bagua.federated.library import partition
from bagua.federated.library.sampling import seed_of

LABELS = torch.randint(10, (1000,), generator=torch.Generator().manual_seed(1))
KINDS = {
    "iid": lambda labels, clients, seed, **o: partition.iid(len(labels), clients, seed=seed, **o),
    "dirichlet 0.02": lambda labels, clients, seed, **o: partition.dirichlet(
        labels, clients, alpha=0.02, seed=seed, **o
    ),
    "dirichlet 100": lambda labels, clients, seed, **o: partition.dirichlet(
        labels, clients, alpha=100.0, seed=seed, **o
    ),
    "by label": lambda labels, clients, seed, **o: partition.by_label(labels, clients, seed=seed, **o),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [7, 300])
def test_every_example_is_at_one_client(kind, clients):
    parts = KINDS[kind](LABELS, clients, 3)
    assert len(parts) == clients and all(part.dtype == torch.int64 and len(part) for part in parts)
    assert sorted(itertools.chain(*(part.tolist() for part in parts))) == list(range(1000))
    assert all(torch.equal(one, two) for one, two in zip(parts, KINDS[kind](LABELS, clients, 3), strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(parts, KINDS[kind](LABELS, clients, 4), strict=True))
    longest = max(parts, key=len).tolist()
    assert longest != sorted(longest), "in random order"


def num_labels(parts):
    return [len(set(LABELS[part].tolist())) for part in parts]


def test_how_labels_are_spread():
    iid, few, many, shards = (KINDS[kind](LABELS, 20, 3) for kind in KINDS)
    assert {len(part) for part in iid} == {50} and min(num_labels(iid)) >= 8
    assert sum(num_labels(few)) / 20 < 2.5 and max(map(len, few)) > 100
    assert min(num_labels(many)) >= 9 and max(map(len, many)) < 80
    assert {len(part) for part in shards} == {50} and max(num_labels(shards)) <= 4
    assert max(int(LABELS[part].max() - LABELS[part].min()) for part in shards) > 4, "shards that do not stand together"
    assert all(abs(part.float().mean() - 500) < 160 for part in many), "wherever in the dataset they stand"
    alone = partition.by_label(LABELS, 20, shards_per_client=1, seed=1)
    assert max(num_labels(alone)) <= 2


def test_dirichlet_by_hand():
    """The numbers of each label at each client are the draw's shares, rounded where they end."""
    generator = numpy.random.default_rng(seed_of(5, "partition", "dirichlet"))
    parts = partition.dirichlet(LABELS, 6, alpha=0.5, seed=5, allow_empty=True)
    for label in range(10):
        indices = [i for i in range(1000) if LABELS[i] == label]
        generator.shuffle(numpy.array(indices))
        shares, begin, total = generator.dirichlet([0.5] * 6).tolist(), 0, 0.0
        for client in range(6):
            total += shares[client]
            end = round(total * len(indices))
            assert (LABELS[parts[client]] == label).sum() == end - begin
            begin = end


def test_empty_clients_where_allowed():
    for kind in KINDS:
        parts = KINDS[kind](LABELS[:5], 8, 1, allow_empty=True)
        assert len(parts) == 8 and sorted(itertools.chain(*(part.tolist() for part in parts))) == list(range(5))


@pytest.mark.parametrize("length", [None, 9])
def test_padded(length):
    generator = torch.Generator().manual_seed(1)
    data = {"image": torch.randn(20, 2, 3, generator=generator), "label": torch.arange(20)}
    parts = [torch.tensor([3, 19, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([5, 1, 2, 4, 6])]
    found, mask = partition.padded(data, parts, length=length)
    longest = length or 5
    assert mask.shape == (3, longest) and found["image"].shape == (3, longest, 2, 3)
    assert found["label"].dtype == torch.int64 and mask.sum(1).tolist() == [3, 0, 5]
    for client, part in enumerate(parts):
        for row in range(longest):
            is_there = row < len(part)
            assert mask[client, row] == is_there
            for name, leaf in data.items():
                expected = leaf[part[row]] if is_there else torch.zeros_like(leaf[0])
                assert torch.equal(found[name][client, row], expected)
    nobody, mask = partition.padded(data, [], length=4)
    assert nobody["image"].shape == (0, 4, 2, 3) and mask.shape == (0, 4)


MISTAKES = {
    "short": (lambda: partition.padded(LABELS, [torch.arange(3)], length=2), "length=2 for a client with 3 examples"),
    "an index": (lambda: partition.padded(LABELS[:3], [torch.tensor([0, 3])]), "index 3 of an example, but .* 3 of"),
    "few": (lambda: partition.iid(3, 4, seed=0), "3 examples for 4 clients: give allow_empty"),
    "alpha": (lambda: partition.dirichlet(LABELS, 4, alpha=0.0, seed=0), "alpha=0.0"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what):
    make, message = MISTAKES[what]
    with pytest.raises(InvalidArgument, match=message):
        make()
