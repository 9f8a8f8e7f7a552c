"""Values and derivatives of federated programs against plain loops in one process, on one to four ranks.

The example is FAX's: least squares of clients with a row each.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import platform
import re
import subprocess
import sys
import threading
from typing import NamedTuple

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

import bagua
from bagua import federated
from bagua.errors import BaguaError, InvalidArgument
from bagua.federated.library.aggregators import Aggregator, Mean, Median, SecureSum
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet, wait_until

X = torch.tensor([2.0, -1.0])
Y = torch.tensor([[1.0, 2.0], [3.0, -4.0], [-7.0, 6.0]])
SPLITS = ((3, 3), (5, 1), (4, 0, 2), (2, 2, 1, 1))  # clients by rank


def square(x, y):
    return 0.5 * (x @ y - 1) ** 2


def mean_loss(x, y):
    return federated.reduce_mean(federated.map_fn(square, (federated.broadcast(x), y)))


fax = federated.program(mean_loss, clients=3)


# ---- FAX's numbers


@pytest.mark.parametrize(
    "second", [hessian, lambda f: jacrev(grad(f)), lambda f: jacfwd(jacfwd(f)), lambda f: jacfwd(grad(f))]
)
def test_the_numbers_of_the_paper(second):
    torch.testing.assert_close(fax(X, Y), torch.tensor(87.166667))
    gradient = grad(fax)(X, Y)
    torch.testing.assert_close(gradient, torch.tensor([57.666668, -54.666668]))
    torch.testing.assert_close(
        second(fax)(X, Y), torch.tensor([[19.6667, -17.3333], [-17.3333, 18.6667]]), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(fax(X - 0.01 * gradient, Y), torch.tensor(35.551258))


BROADCAST, MEAN, SUM = "broadcast", "reduce_mean", "reduce_sum"
SEQUENCES = {  # of verbs, as FAX's
    "value": (lambda: fax(X, Y), [BROADCAST, MEAN]),
    "gradient": (lambda: grad(fax)(X, Y), [BROADCAST, MEAN, BROADCAST, SUM]),
    "tangent": (lambda: jvp(lambda x: fax(x, Y), (X,), (X,)), [BROADCAST] * 2 + [MEAN] * 2),
    "Hessian": (lambda: hessian(fax)(X, Y), [BROADCAST] * 2 + [MEAN] * 2 + [BROADCAST] + [SUM] * 2),
    "four models": (lambda: vmap(fax, (0, None))(X.expand(4, 2), Y), [BROADCAST, MEAN]),
    "gradients of four models": (
        lambda: vmap(grad(fax), (0, None))(X.expand(4, 2), Y),
        [BROADCAST, MEAN, BROADCAST, SUM],
    ),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_derivatives_are_programs_of_the_same_verbs(what):
    run, expected = SEQUENCES[what]
    with federated.record() as verbs:
        run()
    assert verbs == expected


# ---- on ranks, against loops


def oracle(x, y):
    total = torch.zeros(())
    for row in y:
        total = total + 0.5 * (x @ row - 1) ** 2
    return total / len(y)


def derivatives(loss):
    """By each of torch.func's transforms, of a function of x."""
    x, t = X.double(), torch.tensor([0.3, -2.0], dtype=torch.float64)
    yield "value", loss(x)
    yield "grad", grad(loss)(x)
    yield "jvp", jvp(loss, (x,), (t,))[1]
    yield "hessian", hessian(loss)(x)
    yield "jacfwd twice", jacfwd(jacfwd(loss))(x)
    yield "third", jvp(lambda x: jvp(grad(loss), (x,), (t,))[1], (x,), (t,))[1]
    yield "vmap of grad", vmap(grad(loss))(torch.stack([x, t, x + t]))
    z = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(z), z, create_graph=True)
    yield "backward", first.detach()
    constant = 0 * z.sum()  # torch asks for a graph, which the gradient of a linear function has none of
    yield "backward of backward", torch.autograd.grad((first * t).sum() + constant, z)[0]


def fused_loss(chunk_size, x, y):
    return federated.map_reduce(square, (federated.broadcast(x), y), chunk_size=chunk_size)


def local_loss(x, y):
    """After a step at the client, whose derivative is taken within."""
    return square(x - 0.1 * grad(square)(x, y), y)


def linear(x, y):
    return x @ y


@pytest.mark.parametrize("function", [local_loss, linear])
def test_a_node_is_the_two_verbs(function):
    rows = rows_of(3)
    node = federated.program(
        lambda x: federated.map_reduce(function, (federated.broadcast(x), rows), chunk_size=2), clients=3
    )
    for (what, ours), (_, theirs) in zip(
        derivatives(node), derivatives(lambda x: sum(function(x, row) for row in rows) / 3), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=what)


@pytest.mark.slow("test_a_node_is_the_two_verbs")
def test_a_node_takes_masks():
    """Examples that count, of clients that have different numbers of them: arguments of bools, and sums."""
    rows = torch.stack([rows_of(3), rows_of(3) + 1.0])
    mask = torch.tensor([[True, False, True], [False, True, False]])

    def of_client(x, rows, mask):
        values = torch.where(mask, vmap(square, (None, 0))(x, rows), 0.0)
        return values.sum(), mask.sum()

    @federated.program(clients=2)
    def mean(x):
        total, number = federated.map_reduce(of_client, (federated.broadcast(x), rows, mask), reduce="sum")
        return total / number

    chosen = [rows[0][0], rows[0][2], rows[1][1]]
    for (what, ours), (_, theirs) in zip(
        derivatives(mean), derivatives(lambda x: sum(square(x, row) for row in chosen) / 3), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=what)


BODIES = {"two verbs": mean_loss, **{f"chunks of {k}": functools.partial(fused_loss, k) for k in (1, 4)}}


FAST = [("two verbs", (4, 0, 2)), ("chunks of 4", (3, 3))]


def rows_of(number):
    return torch.randn(number, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same_as_in_loops(rank, world_size, split, body):
    rows = rows_of(sum(split))
    mine = rows.split(split)[rank]
    with process_group():
        program = federated.program(BODIES[body], clients=sum(split), num_local=split)
        pairs = zip(derivatives(lambda x: program(x, mine)), derivatives(lambda x: oracle(x, rows)), strict=True)
        for (what, ours), (_, theirs) in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=what)


@fast_in("body, split", FAST, list(itertools.product(BODIES, SPLITS)))
def test_derivatives_on_ranks_are_those_of_loops(pools, split, body):
    pools[len(split)].run(same_as_in_loops, args=(split, body))


def in_the_clients_values(rank, world_size, body):
    """Derivatives in what the clients have stay at the clients."""
    rows = rows_of(5)
    mine = rows.split([4, 1])[rank]
    with process_group():
        program = federated.program(BODIES[body], clients=5, num_local=[4, 1])
        found = grad(program, argnums=(0, 1))(X.double(), mine)
        expected = grad(oracle, argnums=(0, 1))(X.double(), rows)
        torch.testing.assert_close(found, (expected[0], expected[1].split([4, 1])[rank]))


@pytest.mark.parametrize("body", ["two verbs", "chunks of 4"])
def test_derivatives_in_the_clients_values(pool2, body):
    pool2.run(in_the_clients_values, args=(body,))


# ---- collectives


def sent_by(run):
    bagua.get_default_group().events(clear=True)
    run()
    return sum(event.kind == "operation" for event in bagua.get_default_group().events(clear=True, parts=False))


def _num_held():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def many_groups_and_cohorts(rank, world_size):
    with process_group():
        counts = []
        for index in range(1, 8):
            reduce = federated.program(federated.reduce_mean, clients=2 * index)
            assert reduce(torch.ones(index, 1000))[0] == 1
            counts.append(_num_held())
        num_held = counts[0]
        # One buffer, whatever the number of clients. What a group has had open is closed soon after its end, not in it.
        wait_until(lambda: _num_held() <= num_held, f"no more than {num_held} descriptors after other programs")
        meet()  # a rank that is ahead would open connections for its next group on one that still counts
        for _ in range(8):
            group = bagua.new_group([0, 1])
            reduce = federated.program(federated.reduce_mean, clients=4, group=group)
            assert reduce(torch.ones(2, 1000))[0] == 1
            bagua.destroy_process_group(group)
            del group, reduce
        wait_until(lambda: _num_held() <= num_held, f"no more than {num_held} descriptors after groups have ended")


def test_programs_hold_nothing_of_groups_that_are_no_more(pool2):
    pool2.run(many_groups_and_cohorts)


def counted(rank, world_size):
    with process_group():
        tree = {f"leaf {i}": torch.full((2, 4), float(rank + i)) for i in range(100)}
        program = federated.program(lambda x, y: mean_loss(x, y), clients=4)
        many = federated.program(lambda tree: federated.reduce_sum(tree), clients=4)
        y = torch.ones(2, 2)
        runs = {
            "value": lambda: program(X, y),
            "gradient": lambda: grad(program)(X, y),
            "gradients of a batch": lambda: vmap(grad(program), (0, None))(X.expand(3, 2), y),
            "a hundred leaves": lambda: many(tree),
        }
        counts = {}
        for what, run in runs.items():
            run()  # agrees on the program and its shapes
            counts[what] = sent_by(run)
        totals = many(tree)
        assert all(torch.equal(totals[f"leaf {i}"], torch.full((4,), 4.0 * i + 2)) for i in range(100))
        return counts


def test_a_reduction_is_one_collective(pool2):
    expected = {"value": 1, "gradient": 2, "gradients of a batch": 2, "a hundred leaves": 1}
    for counts in pool2.run(counted):
        assert counts == expected


LARGE = {  # means of what float16 has, whose sums it does not have
    "mean": federated.reduce_mean,
    "weights of halves": lambda v: federated.reduce_weighted_mean(v, torch.full((2,), 6e4, dtype=torch.float16)),
    "node of a weighted mean": lambda v: federated.map_reduce(
        lambda x: (x, x.detach()[0]), v, reduce="weighted_mean", chunk_size=3
    ),
}


def means_of_halves(rank, world_size, reduction):
    values = torch.full((4, 2), 6e4, dtype=torch.float16)[2 * rank :][:2]
    with process_group():
        program = federated.program(LARGE[reduction], clients=4)
        mean = program(values)
        assert mean.dtype is torch.float16 and mean.tolist() == [6e4 // 32 * 32] * 2
        assert jvp(program, (values,), (values,))[1].tolist() == mean.tolist()
        slope = grad(lambda v: program(v)[0])(values)
        assert slope.dtype is torch.float16 and slope[:, 0].sum() <= 1 and (slope[:, 0] > 0).all()


@pytest.mark.parametrize("reduction", LARGE)
def test_means_of_halves_whose_sums_are_none(pool2, reduction):
    pool2.run(means_of_halves, args=(reduction,))


MEANS = {  # of all clients' models, each of which counts something
    "mean": federated.reduce_mean,
    "weighted mean": lambda v: federated.reduce_weighted_mean(v, torch.full(v.shape[:1], 0.5)),
    "node": lambda v: federated.map_reduce(torch.clone, v, chunk_size=2),
    "secure aggregator": lambda v: Aggregator(SecureSum(), Mean())(v, ((), ()), weights=torch.ones(v.shape[0]))[0],
}


def means_of_bfloat16(rank, world_size, reduction):
    """Of five clients: of equal models, of others, and their derivatives."""
    model = torch.linspace(1, 2, 129).bfloat16()
    others = torch.stack([model, -model.flip(0), model**3, model / 7, model * 5])
    with process_group() if world_size > 1 else contextlib.nullcontext():
        mine = federated.local_slice(5)
        program = federated.program(MEANS[reduction], clients=5)
        _, along = jvp(program, (others[mine],), (model.expand(5, -1)[mine],))
        return program(model.expand(5, -1)[mine]), along, program(others[mine])


@pytest.mark.parametrize("reduction", MEANS)
def test_means_of_bfloat16_are_rounded_once(pool2, reduction):
    model = torch.linspace(1, 2, 129).bfloat16()
    others = torch.stack([model, -model.flip(0), model**3, model / 7, model * 5])
    once = (others.double().sum(0) / 5).bfloat16()
    for equal, along, mean in [means_of_bfloat16(0, 1, reduction), *pool2.run(means_of_bfloat16, args=(reduction,))]:
        assert equal.dtype is along.dtype is mean.dtype is torch.bfloat16
        assert torch.equal(equal, model) and torch.equal(along, model) and torch.equal(mean, once)


def test_graphs_of_means_of_bfloat16_round_once():
    model = torch.linspace(1, 2, 129).bfloat16()
    for reduction in ("mean", "secure aggregator"):
        program, values = federated.program(MEANS[reduction], clients=5), model.expand(5, -1).contiguous()
        graph = federated.trace(program, values)
        platform = federated.IsolatedClients([federated.Client(**{graph.inputs[0].name: one}) for one in values])
        assert torch.equal(graph(values), model) and torch.equal(federated.run_on(platform, graph), model)


def test_chunks_of_a_sum_of_bfloat16_are_rounded_once():
    values = torch.tensor([256.0, 1.5] * 3).bfloat16()
    for chunk_size in (None, 2, 3):
        program = federated.program(
            lambda v, size=chunk_size: federated.map_reduce(torch.clone, v, reduce="sum", chunk_size=size), clients=6
        )
        assert program(values) == values.double().sum().bfloat16()


KINDS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def of_every_kind(rank, world_size):
    values = torch.arange(10.0).reshape(5, 2)
    mine = values.split([4, 1])[rank]
    with process_group():
        for reduce in (
            federated.reduce_sum,
            lambda tree: federated.map_reduce(lambda tree: tree, (tree,), reduce="sum", chunk_size=2),
        ):
            program = federated.program(lambda tree, reduce=reduce: reduce(tree), clients=5, num_local=[4, 1])
            found = program({kind: mine.to(kind) for kind in KINDS} | {"numbers": mine[:, 0].short()})
            assert torch.equal(found.pop("numbers"), torch.tensor(20, dtype=torch.int16))
            for kind, total in found.items():
                assert torch.equal(total, torch.tensor([20, 25]).to(kind)), kind


def test_sums_are_of_every_kind_of_number(pool2):
    pool2.run(of_every_kind)


# ---- weighted means


def test_a_weighted_mean_is_differentiable_in_its_weights():
    program = federated.program(
        lambda x, w: federated.reduce_weighted_mean(
            federated.map_fn(lambda x, y: x * y, (federated.broadcast(x), Y)), w
        ),
        clients=3,
    )

    def by_hand(x, w):
        return sum(w[i] * x * Y[i] for i in range(3)) / (w[0] + w[1] + w[2])

    w = torch.tensor([1.0, 2.0, 0.5])
    for argnums in (0, 1):
        torch.testing.assert_close(jacrev(program, argnums)(X, w), jacrev(by_hand, argnums)(X, w))
        torch.testing.assert_close(jacfwd(program, argnums)(X, w), jacfwd(by_hand, argnums)(X, w))


WEIGHTED = {
    "verb": federated.reduce_weighted_mean,
    "node": lambda y, w: federated.map_reduce(lambda y, w: (y, w), (y, w), reduce="weighted_mean"),
    "aggregator": lambda y, w: Aggregator(Mean())(y, Aggregator(Mean()).init(y), weights=w)[0],
}


@pytest.mark.parametrize("way", WEIGHTED)
def test_weighted_means_of_doubles_are_as_exact_as_doubles(way):
    """Totals in float32 would lose the ones beside 2**24."""
    weights = torch.tensor([2**24, 1, 1])
    w = weights.double()
    expected = (w[0] * Y[0].double() + w[1] * Y[1].double() + w[2] * Y[2].double()) / (w[0] + w[1] + w[2])
    found = federated.program(WEIGHTED[way], clients=3)(Y.double(), weights)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert federated.program(WEIGHTED[way], clients=3)(Y.bfloat16(), weights).dtype is torch.bfloat16


def weighted_client(x, y):
    return {"loss": square(x, y), "x": x * y}, y.abs().sum()


@fast_in("chunk_size", [None], [None, 2])
def test_a_node_of_a_weighted_mean_is_the_two_verbs(chunk_size):
    rows = rows_of(5)

    @federated.program(clients=5)
    def node(x, rows=rows):
        found = federated.map_reduce(
            weighted_client, (federated.broadcast(x), rows), reduce="weighted_mean", chunk_size=chunk_size
        )
        return found["loss"] + found["x"].sum() ** 2

    def by_hand(x):
        losses, xs, total = 0.0, 0.0, 0.0
        for row in rows:
            weight = row.abs().sum()
            losses, xs, total = losses + weight * square(x, row), xs + weight * (x * row), total + weight
        return losses / total + (xs / total).sum() ** 2

    for (what, ours), (_, theirs) in zip(derivatives(node), derivatives(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=what)
    with federated.record() as verbs:
        node(X.double())
    assert verbs == ["broadcast", "reduce_sum"]
    graph = federated.trace(node, X.double(), rows)
    torch.testing.assert_close(graph(X.double(), rows), by_hand(X.double()))
    assert "weighted_client" in str(graph)


def weighted_on_ranks(rank, world_size, split):
    rows = rows_of(6)

    def of_client(x, y):
        return x * y, (y[0] > 0).to(torch.int64) + 1

    with process_group():
        own = federated.local_slice(6, num_local=split)
        node = federated.program(
            lambda x, y: federated.map_reduce(
                of_client, (federated.broadcast(x), y), reduce="weighted_mean", chunk_size=2
            ),
            clients=6,
            num_local=split,
        )
        found = node(X.double(), rows[own])
        operations = sent_by(lambda: node(X.double(), rows[own]))
    weights = [1 + int(row[0] > 0) for row in rows]
    expected = sum(w * X.double() * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
    torch.testing.assert_close(found, expected)
    return operations


def test_a_node_of_a_weighted_mean_on_ranks(pools):
    """Integers count as the float64 values do, with which they are reduced, as those of reduce_weighted_mean."""
    assert pools[3].run(weighted_on_ranks, args=((4, 0, 2),)) == [1, 1, 1]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_forward_mode_twice_of_what_does_not_move():
    """Such as the number of a client's examples."""
    node = federated.program(
        lambda x: federated.map_reduce(
            lambda x, y: ((x @ y) ** 2, y.sum()), (federated.broadcast(x), Y), reduce="sum", chunk_size=1
        ),
        clients=3,
    )
    moving, still = jacfwd(jacfwd(node))(X)
    torch.testing.assert_close(moving, sum(2 * row.outer(row) for row in Y))
    assert not still.any()


@pytest.mark.parametrize("verb", ["map_fn", "map_reduce"])
def test_a_named_tuple_is_one_argument(verb):
    """As of any other class; in traces too."""

    def of_pair(pair):
        assert type(pair) is Pair
        return square(pair.x, pair.y)

    @federated.program(clients=3)
    def loss(x, y):
        pair = Pair(federated.broadcast(x), y)
        if verb == "map_reduce":
            return federated.map_reduce(of_pair, pair, chunk_size=2)
        return federated.reduce_mean(federated.map_fn(of_pair, pair))

    torch.testing.assert_close(grad(loss)(X, Y), grad(fax)(X, Y))
    torch.testing.assert_close(federated.trace(grad(loss), X, Y)(X, Y), grad(fax)(X, Y))


def test_who_does_not_take_part_does_not_count():
    program = federated.program(lambda x, w, mask: federated.reduce_weighted_mean(x, w, mask=mask), clients=3)
    x = torch.tensor([1.0, float("nan"), 4.0])
    w, mask = torch.tensor([1.0, float("inf"), 3.0]), torch.tensor([True, False, True])
    assert program(x, w, mask) == 13 / 4
    torch.testing.assert_close(grad(program, 0)(x, w, mask), torch.tensor([0.25, 0.0, 0.75]))
    assert torch.isfinite(grad(program, 1)(x, w, mask)).all()


# ---- where torch's batched derivatives are wrong


def test_rows_of_padding_have_no_gradient():
    """They would have one under vmap; in torch's loops they have tangents, so the oracle is reverse mode alone."""
    torch.manual_seed(0)
    rows, indices = torch.randn(5, 2, dtype=torch.float64), torch.tensor([[0, 2, 2], [1, 4, 2], [3, 3, 0]])

    def of_client(rows, indices):
        return (torch.nn.functional.embedding(indices, rows, 2).cumsum(0) ** 2).sum()

    def body(rows):
        return federated.reduce_sum(federated.map_fn(of_client, (federated.broadcast(rows), indices)))

    def in_a_loop(rows):
        return sum(of_client(rows, one) for one in indices)

    program = federated.program(body, clients=3)
    torch.testing.assert_close(grad(program)(rows), grad(in_a_loop)(rows))
    torch.testing.assert_close(hessian(program)(rows), jacrev(grad(in_a_loop))(rows))


# ---- torch.compile


TRANSFORMS = {
    "value": lambda f: f,
    "grad": grad,
    "hessian": hessian,
    "jvp": lambda f: lambda x, y: jvp(f, (x, y), (x, y)),
}


@fast_in("transform", ["grad"], list(TRANSFORMS))
def test_compiled(transform):
    torch.compiler.reset()
    transformed = TRANSFORMS[transform](fax)
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, Y), transformed(X, Y))


def in_parts(x, y):
    """By an operation that returns a list."""
    first, second = torch.chunk(x * y, 2)
    return local_loss(x, y) + (first * second).sum()


@pytest.mark.slow("test_a_node_is_the_two_verbs")
def test_compiled_steps_at_the_client():
    torch.compiler.reset()
    program = federated.program(
        lambda x, y: federated.reduce_mean(federated.map_fn(in_parts, (federated.broadcast(x), y))), clients=3
    )
    compiled = torch.compile(grad(program), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, Y), grad(program)(X, Y))


# ---- programs


def test_programs_within_programs():
    """Silos of clients: the inner program runs for every silo at once."""
    inner = federated.program(lambda x, y: mean_loss(x, y), clients=3)

    @federated.program(silos=2)
    def outer(x, ys):
        return federated.reduce_sum(federated.map_fn(inner, (federated.broadcast(x), ys)))

    ys = torch.stack([Y, 2 * Y])
    torch.testing.assert_close(outer(X, ys), oracle(X, Y) + oracle(X, 2 * Y))
    torch.testing.assert_close(grad(outer)(X, ys), grad(lambda x: oracle(x, Y) + oracle(x, 2 * Y))(X))


def test_threads_have_programs_of_their_own():
    def run(number, found):
        program = federated.program(lambda x: federated.reduce_sum(federated.broadcast(x)), clients=number)
        for _ in range(50):
            found.append(float(program(torch.tensor(1.0))))

    found = {number: [] for number in range(1, 5)}
    threads = [threading.Thread(target=run, args=item) for item in found.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [float(number)] * 50 for number in found}


# ---- mistakes


def captures(x, lr):
    return federated.reduce_mean(federated.map_fn(lambda x, y: lr * (x - y).sum(), (federated.broadcast(x), Y)))


def captures_a_view(x, lr):
    """By an attribute."""
    return federated.reduce_mean(federated.map_fn(lambda x, y: lr.T * (x - y).sum(), (federated.broadcast(x), Y)))


def captures_in_a_node(x, lr):
    return federated.map_reduce(lambda x, y: grad(lambda z: (z * x * y).sum())(lr), (federated.broadcast(x), Y))


@federated.program(parts=2)
def captures_within(lr, y):
    return federated.reduce_sum(federated.map_fn(lambda y: lr * y, y))


def captures_of_a_client(x, lr):
    """The program within sees what is a client's, but around its own client function."""
    return federated.reduce_mean(federated.map_fn(captures_within, (federated.broadcast(lr), Y)))


def captures_what_it_returns(x, lr):
    """As it is: no operation uses it."""
    mapped = federated.map_fn(lambda x, y: {"error": (x - y).sum(), "rate": lr}, (federated.broadcast(x), Y))
    return sum(federated.reduce_mean(mapped).values())


CAPTURING = {
    "two verbs": captures,
    "what it returns": captures_what_it_returns,
    "a view": captures_a_view,
    "a node": captures_in_a_node,
    "a program within": captures_of_a_client,
}


def ways_to_a_closure(body):
    """Functions with their argument, in which a gradient leads to a tensor that a client function captures."""
    program, lr = federated.program(body, clients=3), torch.tensor(0.5)

    def by_lr(lr):
        return program(X, lr)

    return {
        "grad": (grad(by_lr), lr),
        "vmap of grad": (vmap(grad(by_lr)), lr.expand(2)),
        "grad of vmap": (grad(lambda lr: vmap(by_lr)(lr).sum()), lr.expand(2)),
        "autograd": (by_lr, lr.clone().requires_grad_()),
        "hessian": (hessian(by_lr), lr),
    }


@pytest.mark.filterwarnings("ignore:Tensor.T is deprecated on 0-D")
@pytest.mark.parametrize("body", CAPTURING)
def test_a_gradient_through_a_closure_is_refused(body):
    body = CAPTURING[body]
    program, lr = federated.program(body, clients=3), torch.tensor(0.5)
    assert torch.isfinite(program(X, lr)), "a constant may be used"
    for way, argument in ways_to_a_closure(body).values():
        with pytest.raises(InvalidArgument, match=r"tensor of shape \[2?\] from around it, and a gradient"):
            way(argument)
    with torch.no_grad():
        program(X, lr.clone().requires_grad_())


@pytest.mark.filterwarnings("ignore:Tensor.T is deprecated on 0-D")
@pytest.mark.slow("test_a_gradient_through_a_closure_is_refused")
@pytest.mark.parametrize("body", CAPTURING)
def test_torch_compile_refuses_it_too(body):
    torch.compiler.reset()
    function, argument = ways_to_a_closure(CAPTURING[body])["grad"]
    # Where torch.compile cannot trace a function as a whole, it runs as it is.
    with pytest.raises((RuntimeError, InvalidArgument), match=r"tensor of shape \[2?\] from around it"):
        torch.compile(function, backend="eager")(argument)


@pytest.mark.parametrize("verb", [federated.map_fn, federated.map_reduce])
def test_clients_may_not_write_into_what_they_share(verb):
    def write(x, y):
        x.mul_(2)
        return x * y

    program = federated.program(lambda x: verb(write, (federated.broadcast(x), Y[:, 0]), chunk_size=2), clients=3)
    with pytest.raises(InvalidArgument, match="writes into what was broadcast, .*: clone it first"):
        program(torch.tensor(1.0))
    part = federated.program(
        lambda x: verb(write, (federated.broadcast(x.expand(2))[:, :1], Y[:, :1]), chunk_size=2), clients=3
    )
    with pytest.raises(InvalidArgument, match="writes into what was broadcast, .*: clone it first"):
        part(torch.tensor(1.0))
    alone = federated.program(lambda x: verb(write, (federated.broadcast(x), Y[:1, 0])), clients=1)
    with pytest.raises(InvalidArgument, match="writes into what was broadcast, .*: clone it first"):
        alone(torch.tensor(1.0))


def test_clients_may_not_write_into_a_tensor_of_no_client():
    def total(y):
        result = torch.zeros(2)
        result.copy_(y)
        return result

    program = federated.program(lambda: federated.map_fn(total, Y), clients=3)
    with pytest.raises(
        InvalidArgument, match="writes a client's values into a tensor that is not .*: return new values"
    ):
        program()


@pytest.mark.parametrize(("num", "chunk_size", "calls"), [(6, None, 2), (6, 6, 1), (6, 1, 6), (4, None, 1)])
def test_clients_of_wide_models_are_computed_some_at_a_time(num, chunk_size, calls):
    """Four at most of arguments of 4 MB each, in parts of about one size, unless chunk_size says otherwise."""
    seen = []

    def client(w):
        seen.append(w.shape)
        return w.sum()

    wide = torch.ones(num, 2**20)
    total = federated.program(
        lambda w: federated.reduce_sum(federated.map_fn(client, w, chunk_size=chunk_size)), clients=num
    )
    assert total(wide) == num * 2**20
    assert len(seen) == calls
    node = federated.program(
        lambda w: federated.map_reduce(client, w, reduce="sum", chunk_size=chunk_size), clients=num
    )
    assert node(wide) == num * 2**20
    assert len(seen) == 2 * calls


KEEPS_MEMORY = """
import resource
from pathlib import Path
import torch
from bagua import federated

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def given_back():
    tensor = torch.ones(2**24)  # 64 MiB
    before = resident_bytes()
    del tensor
    return before - resident_bytes()

seen = []
program = federated.program(lambda w: federated.map_fn(lambda w: seen.append(1) or w.sum(), w), clients=6)
for keep in (lambda: False, federated.keep_memory):
    is_kept = keep()
    program(torch.ones(6, 2**20))
    print(is_kept, given_back(), len(seen))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory by itself, or not at all")
def test_memory_is_kept_and_more_clients_are_computed_at_a_time():
    done = subprocess.run([sys.executable, "-c", KEEPS_MEMORY], capture_output=True, text=True, timeout=60)
    before, after = (line.split() for line in done.stdout.splitlines())
    assert (before[0], after[0]) == ("False", "True"), done.stderr
    assert (before[2], after[2]) == ("2", "3")  # in two parts, and then at once
    assert int(before[1]) > 60 * 2**20, done.stdout
    assert int(after[1]) < 16 * 2**20, done.stdout  # the kernel counts in batches


def test_forward_mode_and_batches_go_through_a_closure():
    program, lr = federated.program(captures, clients=3), torch.tensor(0.5)
    torch.testing.assert_close(jvp(lambda lr: program(X, lr), (lr,), (lr,))[1], program(X, lr))
    torch.testing.assert_close(vmap(lambda lr: program(X, lr))(torch.stack([lr, 2 * lr]))[1], program(X, 2 * lr))


def test_they_do_not_go_through_that_of_a_node():
    """A node computes anew, under no transform but its own."""
    program, lr = federated.program(captures_in_a_node, clients=3), torch.tensor(0.5)
    for way in (vmap(lambda lr: program(X, lr)), lambda lr: jvp(lambda lr: program(X[0], lr), (lr[0],), (lr[0],))):
        with torch.no_grad(), pytest.raises(InvalidArgument, match="over which a transform of torch.func runs"):
            way(lr.expand(3))


# Of programs over two clients on a rank, for x [2] and y [2, 2], and what is said of them.
MISTAKES = {
    "other clients": (lambda x, y: mean_loss(x, y[:1]), r"shape \[1, 2\] at \[1\], expected 2 as the first axis"),
    "mean of integers": (
        lambda x, y: federated.reduce_mean(torch.ones(2, dtype=torch.int64)) * x.sum(),
        "reduce_mean of torch.int64",
    ),
    "no tensor": (lambda x, y: federated.map_fn(lambda y: {"n": 3}, y), r"returns 3 at \['n'\], a int"),
    "random numbers": (lambda x, y: federated.map_fn(torch.rand_like, y), 'draws random numbers: say randomness="dif'),
    "writes": (
        lambda x, y: federated.map_fn(lambda x: x.add_(1), federated.broadcast(x)),
        "writes into what was broadcast, .* clone it first",
    ),
    "verbs at a client": (
        lambda x, y: federated.map_fn(lambda y: federated.reduce_sum(y), y),
        "reduce_sum inside a client function",
    ),
    "no pair": (
        lambda x, y: federated.map_reduce(lambda y: y.sum(), y, reduce="weighted_mean"),
        "returns a Tensor, expected a pair: a value and its weight",
    ),
    "no weight in a node": (
        lambda x, y: federated.map_reduce(lambda y: (y, 0 * y.sum()), y, reduce="weighted_mean"),
        "add up to 0",
    ),
    "no weight": (lambda x, y: federated.reduce_weighted_mean(x * y, torch.zeros(2)), "add up to 0"),
}


def refused(rank, world_size, what, wrong_rank):
    """What a rank sees, by transform, where all ranks run the body of that name, or one alone."""
    found = {}
    body, _ = MISTAKES[what]
    is_wrong = wrong_rank in (None, rank)
    for transform, (make, server) in {
        "none": (lambda f: f, X),
        "grad": (lambda f: grad(lambda *args: f(*args).sum()), X),
        "hessian": (lambda f: hessian(lambda *args: f(*args).sum()), X),
        "vmap": (lambda f: vmap(f, (0, None)), torch.stack([X, X, X])),
    }.items():
        program = federated.program(lambda x, y: (body if is_wrong else mean_loss)(x, y), clients=2 * world_size)
        f = make(program)
        with pytest.raises(InvalidArgument) as caught:
            f(server, Y[:2])
        found[transform] = str(caught.value)
        if world_size > 1:
            bagua.barrier()  # the group is as it was
    return found


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what):
    for found in refused(0, 1, what, None).values():
        assert re.search(MISTAKES[what][1], found), found


def refused_on_ranks(rank, world_size):
    found = {}
    with process_group():
        for what in MISTAKES:
            for wrong_rank in (None, 1):
                # Which are right where the other's clients have some.
                if wrong_rank is None or what not in ("no weight", "no weight in a node"):
                    found[what, wrong_rank] = refused(rank, world_size, what, wrong_rank)
    return found


def test_mistakes_on_ranks_are_known_on_all(pool2):
    for rank, cases in enumerate(pool2.run(refused_on_ranks)):
        for (what, wrong_rank), messages in cases.items():
            said = "rank 1 raised InvalidArgument: .*" if (wrong_rank, rank) == (1, 0) else ""
            for transform, message in messages.items():
                assert re.search(said + MISTAKES[what][1], message), (what, wrong_rank, rank, transform, message)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: federated.broadcast(X), "outside of a program"),
        (lambda: federated.program(mean_loss, clients=3, silos=2), "one placement"),
        (lambda: federated.program(mean_loss, clients=0), "clients=0"),
        (lambda: federated.local_slice(5, num_local=5), "num_local=5, expected a number for each rank"),
    ],
)
def test_mistakes_around_programs(run, message):
    with pytest.raises(InvalidArgument, match=message):
        run()


def a_later_mistake(rank, world_size):
    """What ranks see where one alone fails in a program whose reductions have run before."""

    def body(x, y, fails):
        if fails:
            raise ZeroDivisionError("of rank 1")
        return mean_loss(x, y)

    with process_group():
        program = federated.program(body, clients=4)
        program(X, Y[:2], False)
        with pytest.raises((BaguaError, ZeroDivisionError)) as caught:
            grad(program)(X, Y[:2], rank == 1)
        return caught.value


def test_a_later_mistake_keeps_nobody_waiting(pool2):
    others, own = pool2.run(a_later_mistake)
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(others, BaguaError) and "rank 1" in str(others)


def differs(rank, world_size, what):
    """What this rank sees where rank 1 runs another program, other clients or other shapes."""
    total = lambda y: federated.reduce_sum(y)  # noqa: E731
    other = lambda y: federated.reduce_sum(y)  # noqa: E731
    other.__qualname__ = "other"
    is_odd = rank == 1
    with process_group():
        program = federated.program(
            other if is_odd and what == "program" else total,
            clients=6,
            num_local=2 if what == "sizes" else 3,
        )
        rows = 1 if is_odd and what == "axis" else 2 if what == "sizes" else 3
        y, messages = torch.ones(rows, 5 if is_odd and what == "shapes" else 4), []
        for run in (program, grad(lambda y: program(y).sum()), vmap(program)):
            with pytest.raises(InvalidArgument) as caught:
                run(y.expand(3, *y.shape) if len(messages) == 2 else y)
            messages.append(str(caught.value))
            bagua.barrier()  # the group is as it was
    return messages


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("program", ["rank 1 has .*other"] * 2),
        ("shapes", [r"rank 0 has \[(3, )?4\] torch.float32, rank 1 has \[(3, )?5\]"] * 2),
        ("sizes", [r"the ranks hold \[2, 2\] clients, 4 in all, but .* is over 6"] * 2),
        ("axis", ["rank 1 raised InvalidArgument: .*expected 3 as the first", "expected 3 as the first"]),
    ],
)
def test_a_rank_that_differs_is_named_on_all(pool2, what, messages):
    for found, message in zip(pool2.run(differs, args=(what,)), messages, strict=True):
        assert all(re.search(message, one) for one in found), found


def turned_around(rank, world_size, is_gathered):
    """What this rank sees where rank 1 reduces other shapes of as many elements, which all had agreed upon before."""

    def body(x, width):
        parts = {"a": x[:, :width], "b": x[:, width:]}
        return Aggregator(Median())(parts, ((),))[0] if is_gathered else federated.reduce_sum(parts)

    with process_group():
        program = federated.program(body, clients=4)
        x = torch.arange(8.0).view(2, 4)
        before = [program(x, width) for width in (1, 3)]
        again = [program(x, width) for width in (3, 1)]
        for one, other in zip(before, reversed(again), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in ("a", "b"))
        with pytest.raises(BaguaError) as caught:
            program(x, 1 if rank == 1 else 3)
    return str(caught.value)


@pytest.mark.parametrize("is_gathered", [False, True])
def test_ranks_at_different_reductions_of_one_size_find_out(pool2, is_gathered):
    verb = "all_gather" if is_gathered else "all_reduce"
    for found in pool2.run(turned_around, args=(is_gathered,)):
        difference = f"called {verb} #.* about subject .* while this rank called {verb} #.* about subject"
        assert re.search(difference, found), found


NAMED = {"a": torch.tensor(1.0), "b": torch.tensor(100.0), "deep": [torch.tensor(5.0 + i) for i in range(11)]}
COUNT = torch.tensor(7)  # which has no derivative


def linear(values):
    """1 a + 2 b + 3 deep[0] + 4 deep[1] ..., whatever `b` is called."""
    second = values["b" if "b" in values else "other"]
    return sum(number * value for number, value in enumerate([values["a"], second, *values["deep"]], 1))


def over_names():
    """Programs of two clients, of which each has NAMED, and whether they are of server values."""

    def loss(shared):
        return federated.reduce_mean(federated.map_fn(linear, (federated.broadcast(shared),)))

    def without_count(values):
        return {name: values[name] for name in values if name != "count"}

    def aggregated(step):
        aggregate = Aggregator(step)
        return lambda values: aggregate(without_count(values), aggregate.init(NAMED))[0]

    return {
        "sum": (federated.reduce_sum, False),
        "weighted mean": (lambda values: federated.reduce_weighted_mean(without_count(values), torch.ones(1)), False),
        "node": (lambda values: federated.map_reduce(lambda value: value, (values,), reduce="sum"), False),
        "secure sum": (aggregated(SecureSum()), False),
        "median": (aggregated(Median()), False),
        "gradient": (grad(loss), True),
        "hessian": (hessian(loss), True),
        "tangent": (lambda shared: jvp(loss, (shared,), (shared,))[1], True),
    }


def by_name(rank, world_size, change):
    """What programs give, or what they raise, where rank 1's dictionaries have another order, or another name."""
    found = {}
    with process_group():
        for what, (body, is_shared) in over_names().items():
            values = NAMED if is_shared else pytree.tree_map(lambda x: x.expand(1), {**NAMED, "count": COUNT})
            if rank == 1 and change == "order":
                values = dict(reversed(values.items()))
            if rank == 1 and change == "name":
                values = {"other" if name == "b" else name: value for name, value in values.items()}
            try:
                found[what] = federated.program(body, clients=2)(values)
            except InvalidArgument as error:
                found[what] = str(error)
    return found


@pytest.mark.parametrize("change", ["order", "name"])
def test_other_names_are_an_error_on_all_ranks(pool2, change):
    """In another order, too: the axes of a Jacobian over them would be another rank's."""
    for found in pool2.run(by_name, args=(change,)):
        assert found.pop("tangent") == linear(NAMED), "nothing but one value without a name crosses ranks there"
        assert set(found) == set(over_names()) - {"tangent"}
        for what, message in found.items():
            first, second = re.search(
                r"rank 0 has .*?(\['\w+'\].*), rank 1 has .*?(\['\w+'\].*); run", message
            ).groups()
            if change == "name":
                assert "['b']" in first and "['other']" in second, (what, message)
            assert first != second


class Key:
    """Written with where it is in memory."""


def of_keys(rank, world_size, kind):
    """What dictionaries with such keys give, and with them in another order on one rank."""
    keys = {
        "tuples": [(0, "w"), (0, "b")],
        "objects": [Key(), Key()],
    }[kind]
    with process_group():
        values = {key: torch.full((1,), 10.0**number) for number, key in enumerate(keys)}
        program = federated.program(federated.reduce_sum, clients=2)
        if kind == "tuples":
            with pytest.raises(InvalidArgument) as caught:
                program(values if rank == 0 else dict(reversed(values.items())))
            assert all(f"has {pytree.MappingKey(key)} " in str(caught.value) for key in keys), str(caught.value)
        return [float(x) for x in program(values).values()]


@pytest.mark.parametrize("kind", ["tuples", "objects"])
def test_keys_of_all_kinds_are_told_apart(pool2, kind):
    """But for those that each rank has at another place, which are taken in their order."""
    assert pool2.run(of_keys, args=(kind,)) == [[2.0, 20.0]] * 2


def split_anew(rank, world_size):
    """Rank 1 has one client in both splits."""
    found = []
    with process_group():
        for split in ([1, 1, 3], [2, 1, 2], [1, 1, 3]):
            program = federated.program(federated.reduce_sum, clients=5, num_local=split)
            found.append(float(program(torch.arange(5.0).split(split)[rank])))
    return found


def test_clients_are_split_anew_from_call_to_call(pools):
    assert pools[3].run(split_anew) == [[10.0] * 3] * 3


# ---- random numbers of client functions


def drawn(rank, world_size, verb):
    """What this rank's clients draw, with one seed on all ranks, and what the generator gives then."""
    torch.manual_seed(0)
    found = []

    def draw(y):
        number = torch.rand(()) + 0 * y
        return number, number**2

    def body(y):
        if verb == "map_fn":
            found.append(federated.map_fn(lambda y: draw(y)[0], y, randomness="different"))
        else:
            found.append(torch.stack(federated.map_reduce(draw, y, randomness="different", chunk_size=1)))

    with process_group():
        y = torch.zeros(3)[federated.local_slice(3)]
        program = federated.program(body, clients=3)
        program(y)
        program(y)
        return [one.tolist() for one in found], float(torch.rand(()))


def test_clients_of_different_ranks_draw_different_numbers(pool2):
    (first, after), (second, after_second) = pool2.run(functools.partial(drawn, verb="map_fn"))
    numbers = [number for of_rank in (first, second) for of_call in of_rank for number in of_call]
    assert len(numbers) == 6 == len(set(numbers)), "of two calls, and three clients"
    assert after == after_second, "one rank has two clients, and yet what the server draws next is equal"


def test_clients_of_different_ranks_draw_different_numbers_in_a_node(pool2):
    (moments, after), (others, after_second) = pool2.run(functools.partial(drawn, verb="map_reduce"))
    assert moments == others and after == after_second
    for mean, mean_of_squares in moments:
        assert mean_of_squares - mean**2 > 1e-4, "the variance over the clients"


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_all_chunks_of_a_node_draw_the_same(chunk_size):
    def draw(y):
        number = torch.rand(()) + 0 * y
        return number, number**2

    for seed in range(3):
        torch.manual_seed(seed)
        expected, then = torch.rand(()), torch.rand(())
        torch.manual_seed(seed)
        mean, mean_of_squares = federated.program(
            lambda y: federated.map_reduce(draw, y, randomness="same", chunk_size=chunk_size), clients=3
        )(torch.zeros(3))
        torch.testing.assert_close((mean, mean_of_squares), (expected, expected**2))
        assert torch.rand(()) == then


def solutions(rank, world_size):
    """Rank 2 has no client, and no matrix that could be inverted."""
    matrices, y = torch.stack([2 * torch.eye(2), 4 * torch.eye(2)]), torch.ones(2, 2)
    found = []
    with process_group():
        own = federated.local_slice(2)
        for body in (
            lambda a, y: federated.reduce_mean(federated.map_fn(torch.linalg.solve, (a, y))),
            lambda a, y: federated.map_reduce(torch.linalg.solve, (a, y)),
        ):
            program = federated.program(body, clients=2)
            found.append(program(matrices[own], y[own]))
            found.append(grad(lambda y, program=program: program(matrices[own], y).sum())(y[own]))
    return found


def test_what_stands_for_a_client_can_be_inverted(pools):
    for rank, (value, gradient, of_node, gradient_of_node) in enumerate(pools[3].run(solutions)):
        for one in (value, of_node):
            torch.testing.assert_close(one, torch.full((2,), 0.375))  # the mean of 1/2 and 1/4
        for one in (gradient, gradient_of_node):
            own = [[0.25] * 2], [[0.125] * 2], []
            torch.testing.assert_close(one, torch.tensor(own[rank]).view(-1, 2))


def compiled_on_some(rank, world_size):
    """torch.compile may give up on one rank and not on another, and one may not use it at all."""
    values, found = {"b": torch.full((1,), 2.0), "a": torch.ones(1)}, []
    with process_group():
        program = federated.program(lambda values: federated.reduce_sum(values), clients=2)
        function = torch.compile(program, backend="eager", fullgraph=True)
        for compiled in ([0], [0, 1], [1], []):
            found.append((function if rank in compiled else program)(values))
        with pytest.raises(InvalidArgument) as caught:
            (function if rank == 0 else program)({"ac"[rank]: torch.ones(1)})
    return [[float(one["a"]), float(one["b"])] for one in found], str(caught.value)


@pytest.mark.slow("test_other_names_are_an_error_on_all_ranks")
def test_ranks_of_which_one_runs_without_torch_compile(pool2):
    for found, message in pool2.run(compiled_on_some):
        assert found == [[2.0, 4.0]] * 4
        assert re.search(r"rank 0 has .*\['a'\] .*, rank 1 has .*\['c'\] ", message), message
