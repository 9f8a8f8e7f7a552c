"""A mesh of clients and shards of their models: derivatives against loops over whole models in one process.

Four ranks: 0 and 1 share some clients and hold half of each model, 2 and 3 the others. The model is Megatron's MLP, the
first layer by columns and the second by rows, with a bias before it that both ranks have.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, hessian, jvp, vmap

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in


@contextlib.contextmanager
def mesh(rank):
    """The group of the ranks with other clients, and that of those with other shards."""
    with process_group():
        rows = [bagua.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        columns = [bagua.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        yield rows[rank % 2], columns[rank // 2]


def drawn(seed):
    """The server's bias and two layers, and five clients' rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"bias": (3,), "first": (3, 4), "second": (4, 2)}
    model = {key: torch.randn(shape, dtype=torch.float64, generator=generator) for key, shape in shapes.items()}
    return model, torch.randn(5, 3, dtype=torch.float64, generator=generator)


def shard_of(model, shard):
    """What a rank has of it, also of what is added to it."""
    columns = slice(2 * shard, 2 * shard + 2)
    return {"bias": model["bias"], "first": model["first"][:, columns], "second": model["second"][columns]}


def oracle(model, rows):
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        total = total + ((torch.tanh((row + model["bias"]) @ model["first"]) @ model["second"]) ** 2).sum()
    return total / len(rows)


def by_operators(group):
    def client(model, row):
        row = federated.copy_to_group(row + model["bias"], group)
        return (federated.reduce_from_group(torch.tanh(row @ model["first"]) @ model["second"], group) ** 2).sum()

    return client


def by_a_program(group):
    """The same in verbs: a program over the shards."""

    @federated.program(shards=2, group=group)
    def outputs(row, first, second):
        return federated.reduce_sum(
            federated.map_fn(
                lambda row, first, second: torch.tanh(row @ first) @ second,
                (federated.broadcast(row), first[None], second[None]),
            )
        )

    return lambda model, row: (outputs(row + model["bias"], model["first"], model["second"]) ** 2).sum()


def two_verbs(client, model, rows):
    return federated.reduce_mean(federated.map_fn(client, (federated.broadcast(model), rows)))


def chunks_of_2(client, model, rows):
    return federated.map_reduce(client, (federated.broadcast(model), rows), chunk_size=2)


WAYS = {
    "operators": (by_operators, two_verbs),
    "a program": (by_a_program, two_verbs),
    "a node": (by_operators, chunks_of_2),
}


def derivatives(loss, model, tangent):
    yield "value", loss(model)
    yield "grad", grad(loss)(model)
    yield "jvp", jvp(loss, (model,), (tangent,))[1]
    yield "hessian in the bias", hessian(lambda bias: loss({**model, "bias": bias}))(model["bias"])
    batch = {key: torch.stack([model[key], tangent[key]]) for key in model}
    yield "vmap of grad", vmap(grad(loss))(batch)
    leaves = {key: value.clone().requires_grad_() for key, value in model.items()}
    loss(leaves).backward()
    yield "backward", {key: leaf.grad for key, leaf in leaves.items()}


def same_as_whole(rank, world_size, way, split):
    model, rows = drawn(1)
    tangent, _ = drawn(2)
    make, verbs = WAYS[way]
    shard, mine = rank % 2, rows.split(split)[rank // 2]
    with mesh(rank) as (clients, group):
        loss = federated.program(
            lambda model, rows: verbs(make(group), model, rows), clients=5, group=clients, num_local=split
        )
        ours = derivatives(lambda model: loss(model, mine), shard_of(model, shard), shard_of(tangent, shard))
        whole = derivatives(lambda model: oracle(model, rows), model, tangent)
        for (what, found), (_, expected) in zip(ours, whole, strict=True):
            if what == "vmap of grad":
                expected = vmap(lambda one: shard_of(one, shard))(expected)
            elif isinstance(expected, dict):
                expected = shard_of(expected, shard)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=f"{what}: {found} {expected}")


@fast_in(
    "way, split",
    [("operators", (3, 2)), ("a program", (5, 0))],
    [(way, split) for way in WAYS for split in ((3, 2), (5, 0), (0, 5))],
)
def test_derivatives_are_those_of_whole_models(pool4, way, split):
    pool4.run(same_as_whole, args=(way, split))


def counted(rank, world_size):
    model, rows = drawn(1)
    with mesh(rank) as groups:
        client = by_operators(groups[1])
        loss = federated.program(
            lambda model: two_verbs(client, model, rows.split([3, 2])[rank // 2]),
            clients=5,
            group=groups[0],
            num_local=[3, 2],
        )
        mine = shard_of(model, rank % 2)
        batch = {key: torch.stack([value] * 4) for key, value in mine.items()}
        runs = {
            "value": lambda: loss(mine),
            "gradient": lambda: grad(loss)(mine),
            "gradients of a batch": lambda: vmap(grad(loss))(batch),
        }
        counts = {}
        for what, run in runs.items():
            run()  # agrees on the shapes
            for group in groups:
                group.events(clear=True)
            run()
            counts[what] = tuple(
                sum(event.kind == "operation" for event in group.events(clear=True, parts=False)) for group in groups
            )
        return counts


def test_one_collective_serves_all_clients(pool4):
    expected = {"value": (1, 1), "gradient": (2, 2), "gradients of a batch": (2, 2)}
    for counts in pool4.run(counted):
        assert counts == expected


def compiled(rank, world_size, way):
    torch.compiler.reset()
    model, rows = drawn(1)
    make, _ = WAYS[way]
    with mesh(rank) as (clients, group):
        client = make(group)
        loss = federated.program(
            lambda model, rows: two_verbs(client, model, rows), clients=5, group=clients, num_local=[3, 2]
        )
        mine, shard = rows.split([3, 2])[rank // 2], shard_of(model, rank % 2)
        found = torch.compile(grad(loss), backend="aot_eager", fullgraph=True)(shard, mine)
        torch.testing.assert_close(found, grad(loss)(shard, mine))


@pytest.mark.slow("test_derivatives_are_those_of_whole_models")
@pytest.mark.parametrize("way", ["operators", "a program"])
def test_compiled(pool4, way):
    pool4.run(compiled, args=(way,))


# ---- mistakes


def message_of(run, kind=InvalidArgument):
    with pytest.raises(kind) as caught:
        run()
    return str(caught.value)


def other_clients(rank, world_size, numbers):
    """What each rank sees where it holds numbers[rank] clients."""
    model, rows = drawn(1)
    with mesh(rank) as (clients, group):
        messages = []
        for transform in (lambda f: f, grad, lambda f: vmap(f, (None, 0))):
            client = by_operators(group)
            loss = federated.program(
                lambda model, rows, client=client: two_verbs(client, model, rows),
                clients=5,
                group=clients,
                num_local=numbers[rank],
            )
            mine, f = rows[: numbers[rank]], transform(loss)
            if len(messages) == 2:
                mine = mine.expand(4, *mine.shape)
            messages.append(message_of(lambda f=f, x=mine: f(shard_of(model, rank % 2), x)))
            bagua.barrier()  # the groups are as they were
    return messages


def test_ranks_of_a_client_hold_the_same_clients(pool4):
    for rank, messages in enumerate(pool4.run(other_clients, args=((3, 2, 2, 3),))):
        for message in messages:
            assert "rank 0 has" in message and f"of {[3, 2][rank // 2]} clients on this rank" in message


def all_reduce_of_torch(x):
    dist.all_reduce(x)
    return x


def all_reduce_of_bagua(x):
    bagua.all_reduce(x)
    return x


def barrier(x):
    bagua.barrier()
    return x


def within(x):
    """A program over the same ranks."""
    program = federated.program(
        lambda x: federated.reduce_sum(federated.broadcast(x)), others=2, group=bagua.get_default_group()
    )
    return program(x)


ACROSS = {
    "copy_to_group": lambda x: federated.copy_to_group(x, bagua.get_default_group()),
    "reduce_from_group": lambda x: federated.reduce_from_group(x, bagua.get_default_group()),
    "a program": within,
    "bagua.all_reduce": all_reduce_of_bagua,
    "bagua.barrier": barrier,
    "torch.distributed.all_reduce": all_reduce_of_torch,
}


def across_clients(rank, world_size):
    """What a rank sees where a client function communicates with ranks that hold other clients."""
    found = {}
    dist.init_process_group("gloo")
    with process_group():
        for what, function in ACROSS.items():
            for verbs in (two_of_one, one_of_one):
                program = federated.program(lambda x, f=function, verbs=verbs: verbs(f, x), clients=4)
                for transform, (f, shape) in {
                    "none": (program, (2,)),
                    "grad": (grad(program), (2,)),
                    "vmap": (vmap(program), (3, 2)),
                }.items():
                    x = torch.ones(shape)
                    found[what, verbs.__name__, transform] = message_of(lambda f=f, x=x: f(x))
                    bagua.barrier()  # the group is as it was
    dist.destroy_process_group()
    return found


def two_of_one(function, x):
    return federated.reduce_sum(federated.map_fn(function, x))


def one_of_one(function, x):
    return federated.map_reduce(function, x, reduce="sum")


def test_client_functions_do_not_communicate_with_ranks_of_other_clients(pool2):
    for found in pool2.run(across_clients):
        for case, message in found.items():
            assert "call federated.reduce_sum after map_fn" in message, (case, message)


def not_a_member(rank, world_size):
    with process_group():
        group = bagua.new_group([0])
        if rank == 0:
            x = torch.ones(2)
            assert torch.equal(federated.reduce_from_group(federated.copy_to_group(x, group), group), x)
        else:
            return message_of(lambda: federated.copy_to_group(torch.ones(2), group))


def test_a_rank_outside_of_the_group(pool2):
    assert "this rank is not in the group" in pool2.run(not_a_member)[1]


def shards_of_two_sizes(rank, world_size):
    with process_group():
        alone = [bagua.new_group([0]), bagua.new_group([1])][rank]

        def client(shard):
            return federated.reduce_from_group(shard.sum(), bagua.get_default_group())

        program = federated.program(
            lambda shards: federated.reduce_sum(federated.map_fn(client, shards)), clients=16, group=alone
        )
        return program(torch.ones(16, 2**19 >> rank)).item()


def test_ranks_with_shards_of_two_sizes_compute_as_many_clients_at_a_time(pool2):
    """Shards of 2 MB and of 1 MB, of which other numbers fit into the caches."""
    assert pool2.run(shards_of_two_sizes) == [16 * (2**19 + 2**18)] * 2
