"""choco beside its oracle in plain loops, and its identity with decentralized."""

from __future__ import annotations

import copy

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in

LR, STEPS = 0.1, 8
SIZES = (91, 5)


def neighbors_of(rank, num_ranks, topology):
    if topology == "all":
        return list(range(num_ranks))
    return sorted({(rank - 1) % num_ranks, rank, (rank + 1) % num_ranks})


def coded(values, codec):
    """C of the formula: as it is, or what codec "topk" keeps of a block of 2048."""
    if not codec:
        return list(values)
    largest = sorted(range(len(values)), key=lambda i: -abs(values[i]))[:8]
    return [value if index in largest else 0.0 for index, value in enumerate(values)]


def oracle(n, codec="", topology="ring", consensus=0.45, interval=1):
    """The weights of all ranks after each step; each part of the model is coded by itself."""
    weights = [[0.0] * sum(SIZES) for _ in range(n)]
    known, average = copy.deepcopy(weights), copy.deepcopy(weights)
    for step in range(STEPS):
        targets = [target_of(rank, step, sum(SIZES)).tolist() for rank in range(n)]
        weights = [[x - LR * (x - c) for x, c in zip(weights[i], targets[i], strict=True)] for i in range(n)]
        if step % interval == 0:
            sent = []
            for i in range(n):
                difference = [x - k for x, k in zip(weights[i], known[i], strict=True)]
                sent.append(coded(difference[: SIZES[0]], codec) + coded(difference[SIZES[0] :], codec))
            known = [[k + q for k, q in zip(known[i], sent[i], strict=True)] for i in range(n)]
            for i in range(n):
                near = neighbors_of(i, n, topology)
                average[i] = [a + sum(sent[j][e] for j in near) / len(near) for e, a in enumerate(average[i])]
            weights = [
                [x + consensus * (a - k) for x, a, k in zip(weights[i], average[i], known[i], strict=True)]
                for i in range(n)
            ]
        yield weights


def wrapped(dtype=torch.float64, algorithm="choco", **options):
    model = Quadratic(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=1, **options)
    return model, optimizer


def _follows(rank, world_size, options):
    with process_group():
        dtype = torch.float32 if options["codec"] else torch.float64
        model, optimizer = wrapped(dtype, **options)
        for step, expected in enumerate(oracle(world_size, **options)):
            weights = step_once(model, optimizer, rank, step)
            assert weights == pytest.approx(expected[rank], abs=1e-5 if options["codec"] else 1e-12)


VARIANTS = [
    {"codec": ""},
    {"codec": "topk:k=8", "consensus": 0.3},
    {"codec": "topk:k=8", "topology": "all", "interval": 2},
    {"codec": "", "topology": "all", "consensus": 1.0},
]


@fast_in("options", VARIANTS[:2], VARIANTS[2:])
def test_follows_the_oracle(pool4, options):
    pool4.run(_follows, args=(options,))


@pytest.mark.slow("test_follows_the_oracle")
@pytest.mark.parametrize("options", VARIANTS[:2])
def test_two_ranks_follow_the_oracle(pool2, options):
    pool2.run(_follows, args=(options,))


class Linear(torch.nn.Module):
    """A loss whose gradient does not depend on the weights."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))

    def forward(self, rank, step):
        return (self.weight * target_of(rank, step, 40)).sum()


def _equals_decentralized(rank, world_size):
    """At full precision with gamma 1 it is `decentralized`, which averages before the step in the place of after it."""
    with process_group():
        results = []
        for algorithm, options in (("decentralized", {}), ("choco", {"codec": "", "consensus": 1.0})):
            model = Linear()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            bagua.with_bagua(model, optimizer, algorithm=algorithm, topology="ring", **options)
            for step in range(STEPS):
                optimizer.zero_grad()
                model(rank, step).backward()
                optimizer.step()
            results.append(model.weight.detach().clone())
        bagua.neighbor_average(results[0], "ring")
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)
        assert float(results[1].abs().max()) > 0.1


def test_full_precision_equals_decentralized(pool4):
    pool4.run(_equals_decentralized)


def _consensus(rank, world_size, codec, consensus):
    """Without gradients coarse codes bring all ranks to the mean of where they began: the rest is sent later."""
    with process_group():
        model = torch.nn.ParameterDict({"weight": torch.zeros(2048)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, optimizer, algorithm="choco", codec=codec, consensus=consensus)
        start = torch.randn(2048, generator=torch.Generator().manual_seed(rank))
        model["weight"].grad = -start
        for _ in range(300):
            optimizer.step()
            model["weight"].grad = torch.zeros(2048)
        mean = start.clone()
        bagua.all_reduce(mean, bagua.ReduceOp.AVG)
        return float((model["weight"].detach() - mean).norm() / (start - mean).norm())


@pytest.mark.parametrize(
    "codec, consensus, largest", [("qsgd:bits=4", 0.4, 1e-3), ("topk:k=64", 0.1, 0.01), ("onebit", 0.1, 0.1)]
)
def test_ranks_agree(pool4, codec, consensus, largest):
    for distance in pool4.run(_consensus, args=(codec, consensus)):
        assert distance < largest


def _resumes(rank, world_size):
    with process_group():
        model, optimizer = wrapped(torch.float32)
        straight = [step_once(model, optimizer, rank, step) for step in range(STEPS)]
        model, optimizer = wrapped(torch.float32)
        for step in range(3):
            step_once(model, optimizer, rank, step)
        saved = copy.deepcopy((model.state_dict(), model.bagua.state_dict()))
        model, optimizer = wrapped(torch.float32)
        model.load_state_dict(saved[0])
        model.bagua.load_state_dict(saved[1])
        assert [step_once(model, optimizer, rank, step) for step in range(3, STEPS)] == straight[3:]
        assert weights_of(model) == straight[-1]


def test_resumes(pool2):
    pool2.run(_resumes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topology": "shift_one"}, "topology is 'shift_one', expected 'ring' or 'all'"),
        ({"interval": 0}, "interval is 0, expected 1 or more"),
        ({"consensus": 0.0}, "consensus is 0.0, expected a number above 0"),
        ({"consensus": 1.5}, "consensus is 1.5"),
        ({"codec": "qsgd:bits=2"}, "codec 'qsgd:bits=2' is off by more than it says"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("choco", options)
