"""decentralized beside its oracle in plain float64 loops, and its overlap with forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import bagua
from bagua.errors import BaguaError, InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.conformance.training import process_group
from tests.distributed.oracles import neighbor_weights
from tests.distributed.worlds import fast_in
from tests.meeting import wait_until

TOPOLOGIES = ["all", "ring", "shift_one", "exponential"]


def weights_matrix(topology, n, s):
    """W[i][j], as the definitions of the algorithms have it."""
    return [neighbor_weights(topology, n, i, s) for i in range(n)]


def oracle(topology, n, num_steps, interval, lr, numel, matrix=weights_matrix):
    """x <- sum_j w_ij x_j every so many steps, and then x <- x - lr g, g at the x before."""
    weights = [[0.0] * numel for _ in range(n)]
    num_exchanges = 0
    history = []
    for step in range(num_steps):
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        gradients = [[x - c for x, c in zip(weights[i], targets[i], strict=True)] for i in range(n)]
        if step % interval == 0:
            w = matrix(topology, n, num_exchanges)
            weights = [[sum(w[i][j] * weights[j][e] for j in range(n)) for e in range(numel)] for i in range(n)]
            num_exchanges += 1
        weights = [[x - lr * g for x, g in zip(weights[i], gradients[i], strict=True)] for i in range(n)]
        history.append(weights)
    return history


def _train(rank, world_size, num_steps, lr, options):
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        bagua.with_bagua(model, optimizer, algorithm="decentralized", **options)
        return [step_once(model, optimizer, rank, step) for step in range(num_steps)]


def push_sum(n, num_steps, lr, numel):
    """Stochastic gradient push (arXiv 1811.10792): a numerator and a weight travel, to one rank at 1, 2, 4, ... ranks.

    The weights of all ranks after each step, and the push-sum weights.
    """
    numerators, shares = [[0.0] * numel for _ in range(n)], [1.0] * n
    distances = [2**k for k in range(n) if 2**k < n]
    history = []
    for step in range(num_steps):
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        models = [[x / shares[i] for x in numerators[i]] for i in range(n)]
        gradients = [[x - c for x, c in zip(models[i], targets[i], strict=True)] for i in range(n)]
        received = [[x / 2 for x in numerators[i]] for i in range(n)]
        weights = [share / 2 for share in shares]
        for i in range(n):
            to = (i + distances[step % len(distances)]) % n
            received[to] = [x + y / 2 for x, y in zip(received[to], numerators[i], strict=True)]
            weights[to] += shares[i] / 2
        shares = weights
        numerators = [[x - lr * g for x, g in zip(received[i], gradients[i], strict=True)] for i in range(n)]
        history.append([[x / shares[i] for x in numerators[i]] for i in range(n)])
    return history, shares


def test_exponential_is_stochastic_gradient_push(pool4):
    """Whose weights stay 1 where every rank sends to one and receives from one, so that they need not travel."""
    history, shares = push_sum(4, 10, 0.3, Quadratic().numel)
    assert shares == [1.0] * 4
    assert_follows(pool4.run(_train, args=(10, 0.3, {"topology": "exponential"})), history)


def assert_follows(per_rank, history, tolerance=1e-5):
    for step, weights in enumerate(history):
        for rank, expected in enumerate(weights):
            actual = torch.tensor(per_rank[rank][step], dtype=torch.float64)
            assert float((actual - torch.tensor(expected, dtype=torch.float64)).abs().max()) < tolerance, (step, rank)


@pytest.fixture(scope="module")
def pool3():
    from bagua.testing import Pool

    with Pool(3) as pool:
        yield pool


WORLDS = [(2, 1), (3, 1), (4, 1), (4, 3)]  # sizes, and steps between exchanges
FAST = [("shift_one", 3, 1), ("exponential", 4, 1), ("ring", 4, 3), ("all", 2, 1)]


@fast_in("topology, size, interval", FAST, [(topology, *world) for topology in TOPOLOGIES for world in WORLDS])
def test_follows_the_oracle(pool2, pool3, pool4, topology, size, interval):
    pool = {2: pool2, 3: pool3, 4: pool4}[size]
    per_rank = pool.run(_train, args=(8, 0.3, {"topology": topology, "interval": interval}))
    assert_follows(per_rank, oracle(topology, size, 8, interval, 0.3, Quadratic().numel))


def _in_another_layout(rank, world_size):
    with process_group():
        model = torch.nn.Conv2d(4, 8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        bagua.with_bagua(model, optimizer, algorithm="decentralized")
        numbers = torch.arange(model.weight.numel(), dtype=torch.float32).view_as(model.weight)
        model.weight.data = (numbers + rank).to(memory_format=torch.channels_last)
        model(torch.ones(1, 4, 3, 3)).sum().backward()
        optimizer.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        return torch.equal(model.weight, numbers + (world_size - 1) / 2)


def test_weights_whose_memory_has_another_order_than_when_they_were_wrapped(pool2):
    assert pool2.run(_in_another_layout) == [True, True]


class Computes(torch.nn.Module):
    """A layer whose backward takes as long as what `until` waits for, and no processor."""

    def __init__(self, layer: torch.nn.Module, until: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.until = layer, until

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y.register_hook(lambda grad: self.until())
        return y


def _overlap(rank, world_size, is_late):
    with process_group():

        def exchanges_of_this_step():
            spans = [span for span in model.bagua.timeline().spans if span.kind == "operation"]
            return [span for span in spans if span.begin_ns > begin_ns]

        def until_exchanged():
            """They end while backward computes: they do not wait for its end, nor for the step."""
            wait_until(lambda: len(exchanges_of_this_step()) == len(model.bagua.buckets), "exchanged under backward")

        model = Computes(torch.nn.Linear(1024, 1024), until_exchanged)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="decentralized", topology="ring", bucket_bytes=1 << 20)
        x = torch.ones(1, 1024)
        for _ in range(3):
            optimizer.zero_grad()
            begin_ns = time.monotonic_ns()
            if is_late and rank == 1:
                time.sleep(0.05)
            model(x).sum().backward()
            optimizer.step()
            assert len(exchanges_of_this_step()) == len(model.bagua.buckets) >= 2


@fast_in("is_late", [True], [False, True])
def test_the_exchange_runs_under_forward_and_backward(pool2, is_late):
    pool2.run(_overlap, args=(is_late,))


def _hierarchical(rank, world_size, topology):
    return _train(rank, world_size, 6, 0.3, {"topology": topology, "hierarchical": True})


def _nodes_matrix(counts):
    """Between nodes w_kl m / n_k, m the smallest node; inside a node all ranks get the same."""

    def matrix(topology, n, s):
        node_of = [k for k, count in enumerate(counts) for _ in range(count)]
        between = weights_matrix(topology, len(counts), s)
        if topology == "all" or (len(counts) <= 3 and topology == "ring"):  # all ranks with all
            return [[1 / n] * n for _ in range(n)]
        smallest = min(counts)
        for k, row in enumerate(between):
            for j in range(len(row)):
                row[j] *= smallest / counts[k] if j != k else 1
            row[k] = 1 - sum(weight for j, weight in enumerate(row) if j != k)
        return [[between[node_of[i]][node_of[j]] / counts[node_of[j]] for j in range(n)] for i in range(n)]

    return matrix


@fast_in("topology", ["ring", "shift_one"], TOPOLOGIES)
def test_nodes_of_unequal_size(topology):
    from bagua.testing.thread_ranks import world

    counts = [1, 3, 2]

    def train(group):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        bagua.with_bagua(model, optimizer, algorithm="decentralized", group=group, topology=topology, hierarchical=True)
        return [step_once(model, optimizer, group.rank, step) for step in range(6)]

    per_rank = world(6, train, nodes=[0, 1, 1, 1, 2, 2])
    history = oracle(topology, 6, 6, 1, 0.3, Quadratic().numel, _nodes_matrix(counts))
    assert_follows(per_rank, history)
    matrix = _nodes_matrix(counts)(topology, 6, 1)
    assert all(abs(sum(row) - 1) < 1e-12 for row in matrix)
    assert all(abs(sum(row[j] for row in matrix) - 1) < 1e-12 for j in range(6))  # the mean over ranks is kept


def _add_in_place(parameter):
    with torch.no_grad():
        parameter.add_(1.0)


def _put_others_in_their_place(parameter):
    parameter.data = parameter.data + 1.0


def _changed_weights(rank, world_size, change):
    with process_group(timeout_s=5.0):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        bagua.with_bagua(model, optimizer, algorithm="decentralized")
        target = target_of(rank, 0, model.numel).float()
        model(target)  # its average is under way
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        saved = model.bagua.state_dict()
        model.bagua.load_state_dict(saved)  # starts anew
        step_once(model, optimizer, rank, 0)
        expected = [1 - 0.3 * (1 - c) for c in target.tolist()]
        assert weights_of(model) == pytest.approx(expected, abs=1e-5)
        model(target)
        change(model.parts[0])
        bagua.barrier()  # else the error of one rank ends the other's step above
        # The other rank's, if that is first.
        with pytest.raises(BaguaError, match=r"weights were changed between a forward .* under torch.no_grad\(\)"):
            step_once_without_forward(model, optimizer, target)


def step_once_without_forward(model, optimizer, target):
    model(target).backward()
    optimizer.step()


@pytest.mark.parametrize("change", [_add_in_place, _put_others_in_their_place])
def test_weights_that_were_changed_meanwhile_are_not_lost_silently(pool2, change):
    pool2.run(_changed_weights, args=(change,))


def test_options():
    with pytest.raises(InvalidArgument, match="topology 'star' is unknown; the topologies are all"):
        bagua.algorithms.create("decentralized", {"topology": "star"})
    with pytest.raises(InvalidArgument, match="interval is 0, expected 1 or more"):
        bagua.algorithms.create("decentralized", {"interval": 0})
