"""Each collective compared with plain loops over ranks, on two ranks and on three; groups; refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import bagua
import bagua.torch_api as api
from bagua.torch_api.data_parallel import functional
from bagua.torch_api.data_parallel.distributed import to_bagua_process_group
from tests.distributed.worlds import SAME_TEST
from tests.torch_api.programs import original_process_group, process_group

NUMEL = 5


@pytest.fixture(params=[3, pytest.param(2, marks=SAME_TEST)])
def pool(request):
    return request.getfixturevalue(f"pool{request.param}")


def inputs(world_size: int, numel: int = NUMEL) -> list[torch.Tensor]:
    """x[rank][i] = i * world_size + rank + 1."""
    return [torch.arange(float(numel)) * world_size + rank + 1 for rank in range(world_size)]


def fold(tensors: list[torch.Tensor], op: api.ReduceOp) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        combine = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}.get(op.name, torch.add)
        total = combine(total, tensor)
    return total / len(tensors) if op.name == "AVG" else total


def _reductions(rank, world_size):
    with process_group():
        xs, wide = inputs(world_size), inputs(world_size, NUMEL * world_size)
        for op in (api.ReduceOp.SUM, api.ReduceOp.PRODUCT, api.ReduceOp.MIN, api.ReduceOp.MAX, api.ReduceOp.AVG):
            expected = fold(xs, op)
            sent, received = xs[rank].clone(), torch.full((NUMEL,), -1.0)
            api.allreduce(sent, received, op)
            assert torch.equal(received, expected) and torch.equal(sent, xs[rank])
            api.allreduce_inplace(sent, int(op))  # the original's numbers are understood
            assert torch.equal(sent, expected)
            root = world_size - 1
            sent, received = xs[rank].clone(), torch.full((NUMEL,), -1.0)
            api.reduce(sent, received, root, op=op)
            assert torch.equal(received, expected if rank == root else torch.full((NUMEL,), -1.0))
            assert torch.equal(sent, xs[rank])
            api.reduce_inplace(sent, dst=root, op=op)
            assert torch.equal(sent, expected if rank == root else xs[rank])
            blocks = [x.view(world_size, NUMEL) for x in wide]
            sent, received = wide[rank].clone(), torch.empty(NUMEL)
            api.reduce_scatter(sent, received, op)
            assert torch.equal(received, fold([b[rank] for b in blocks], op)) and torch.equal(sent, wide[rank])
            api.reduce_scatter_inplace(sent, op)
            assert torch.equal(sent[:NUMEL], received) and torch.equal(sent[NUMEL:], wide[rank][NUMEL:])
        bits = [torch.tensor([5 + 3 * r, 1 << r]) for r in range(world_size)]
        for op, combine in (("BOR", torch.bitwise_or), ("BAND", torch.bitwise_and), ("BXOR", torch.bitwise_xor)):
            x, expected = bits[rank].clone(), bits[0]
            for other in bits[1:]:
                expected = combine(expected, other)
            api.allreduce_inplace(x, api.ReduceOp[op])
            assert torch.equal(x, expected)
        same = xs[rank].clone().view(1, NUMEL)
        api.allreduce(same, same)
        assert torch.equal(same, fold(xs, api.ReduceOp.SUM).view(1, NUMEL))
        pair = [xs[rank].clone(), bits[rank].clone()]
        api.communication.allreduce_coalesced_inplace(pair, api.ReduceOp.MAX)
        assert torch.equal(pair[0], fold(xs, api.ReduceOp.MAX)) and int(pair[1][1]) == 1 << (world_size - 1)


def test_reductions(pool):
    pool.run(_reductions)


def _movements(rank, world_size):
    with process_group():
        xs, root = inputs(world_size), world_size - 1
        together = torch.cat(xs)
        x = xs[rank].clone()
        api.broadcast(x)
        assert torch.equal(x, xs[0])
        api.broadcast(x := xs[rank].clone(), src=root)
        assert torch.equal(x, xs[root])
        pair = [xs[rank].clone(), torch.tensor([rank])]
        api.communication.broadcast_coalesced(pair, src=root)
        assert torch.equal(pair[0], xs[root]) and int(pair[1]) == root
        assert api.broadcast_object({"lr": 0.1 * rank}, src=root) == {"lr": 0.1 * root}
        if rank == 0:
            for peer in range(1, world_size):
                api.send(xs[peer], peer)
        else:
            api.recv(x, src=0)
            assert torch.equal(x, xs[rank])
        received = torch.empty(world_size, NUMEL)
        api.allgather(xs[rank], received)
        assert torch.equal(received.view(-1), together)
        blocks = torch.full((world_size, NUMEL), -1.0)
        blocks[rank] = xs[rank]
        api.allgather_inplace(blocks)
        assert torch.equal(blocks.view(-1), together)
        received = torch.full((world_size * NUMEL,), -1.0)
        api.gather(xs[rank], received, root)
        assert torch.equal(received, together if rank == root else torch.full_like(together, -1.0))
        x = xs[rank].clone()
        if rank == root:
            x = torch.full((world_size * NUMEL,), -1.0)
            x[NUMEL * rank :] = xs[rank]  # the root is the last rank
        api.gather_inplace(x, NUMEL, root)
        assert torch.equal(x, together if rank == root else xs[rank])
        received = torch.empty(NUMEL)
        api.scatter(together, received, root)
        assert torch.equal(received, xs[rank])
        x = together.clone() if rank == root else torch.full((NUMEL,), -1.0)
        api.scatter_inplace(x, NUMEL, root)
        assert torch.equal(x, together if rank == root else xs[rank])
        wide = [x.view(world_size, NUMEL) for x in inputs(world_size, NUMEL * world_size)]
        expected = torch.stack([wide[r][rank] for r in range(world_size)])
        received = torch.empty(world_size * NUMEL)
        api.alltoall(wide[rank], received)
        assert torch.equal(received, expected.view(-1))
        api.alltoall_inplace(x := wide[rank].clone())
        assert torch.equal(x, expected)
        api.barrier()


def test_movements(pool):
    pool.run(_movements)


def _uneven_all_to_all(rank, world_size):
    """Rank s sends s + 2 t elements to rank t, some of them none, with gaps of one element between the pieces."""

    def layout(counts):
        return counts, [sum(counts[:r]) + r for r in range(world_size)], sum(counts) + world_size

    with process_group():
        counts = [[s + 2 * t for t in range(world_size)] for s in range(world_size)]
        send_counts, send_displs, send_numel = layout(counts[rank])
        recv_counts, recv_displs, recv_numel = layout([counts[s][rank] for s in range(world_size)])
        sent, received = torch.arange(send_numel) + 1000 * rank, torch.full((recv_numel,), -1)
        # The original's example gives one displacement more than there are ranks.
        api.alltoall_v(sent, send_counts, [*send_displs, send_numel], received, recv_counts, recv_displs)
        expected = torch.full((recv_numel,), -1)
        for s in range(world_size):
            displs = layout(counts[s])[1]
            for i in range(recv_counts[s]):
                expected[recv_displs[s] + i] = 1000 * s + displs[rank] + i
        assert torch.equal(received, expected)
        even, displs = [2] * world_size, [2 * r for r in range(world_size)]
        x = torch.arange(2 * world_size) + 100 * rank
        api.alltoall_v_inplace(x, even, displs)
        assert x.tolist() == [100 * s + 2 * rank + i for s in range(world_size) for i in range(2)]


def test_uneven_all_to_all(pool):
    pool.run(_uneven_all_to_all)


def _groups(rank, world_size):
    with original_process_group():
        dist.barrier()  # torch.distributed is initialised too
        everybody = api.communication._get_default_group()
        assert everybody is api.communication._get_default_group()
        comm = everybody.get_global_communicator()
        assert (comm.rank(), comm.nranks()) == (rank, world_size)
        ranks = [2, 1]
        group = api.new_group(ranks)
        assert group.ranks == [1, 2] and group.stream is None and group.group_name != everybody.group_name
        assert api.new_group(ranks, group.stream).ranks == [1, 2]
        assert everybody.intra_ranks == [0, 1, 2] and everybody.inter_ranks == [0]
        assert group.intra_ranks == ([1, 2] if rank in ranks else []) and group.inter_ranks == [1]
        assert api.communication._rank_not_in_group(group) == (rank not in ranks)
        assert not api.communication._rank_not_in_group() and not api.communication._rank_not_in_comm()
        x, object_of_1 = torch.tensor([10.0 ** (rank + 1)]), None
        comm = group.get_global_communicator()
        api.allreduce_inplace(x, comm=comm)  # a rank that is no member does nothing
        object_of_1 = api.broadcast_object(rank, 0, comm)  # the first rank of the group
        assert x.item() == (1100.0 if rank in ranks else 10.0)
        assert object_of_1 == (1 if rank in ranks else 0)
        api.broadcast(x := torch.tensor([rank]), 1, api.communication.comm.WORLD)
        assert x.item() == 1
        converted = dist.new_group([0, 2])
        if rank != 1:
            comm = api.from_torch_group(converted).get_global_communicator()
            assert (comm.rank(), comm.nranks()) == (dist.get_rank(converted), 2)
            api.allreduce_inplace(x := torch.tensor([rank]), comm=comm)
            assert x.item() == 2
            same = to_bagua_process_group(converted)
            assert same.ranks == [0, 2] and to_bagua_process_group(same) is same
            assert torch.equal(functional.all_reduce(x, dist.ReduceOp.MAX, same), x)
        assert to_bagua_process_group() is everybody


def test_groups(pool3):
    pool3.run(_groups)


def _parts_of_a_group(rank, world_size):
    with process_group():
        group = api.communication._get_default_group()
        assert group.intra_ranks == ([0, 1] if rank < 2 else [2, 3]) and group.inter_ranks == [0, 2]
        assert api.env.get_node_rank() == rank // 2
        some = api.new_group([1, 2, 3])
        assert some.inter_ranks == [1, 2] and some.intra_ranks == [[], [1], [2, 3], [2, 3]][rank]
        inter, intra = group.get_inter_node_communicator(), group.get_intra_node_communicator()
        assert intra is group.get_intra_node_communicator()
        x = torch.tensor([10**rank])
        api.allreduce_inplace(x, comm=intra)
        assert x.item() == (11 if rank < 2 else 1100)
        api.allreduce_inplace(x, comm=inter)
        assert x.item() == (1111 if rank in (0, 2) else 11 if rank == 1 else 1100)
        api.broadcast(x, 0, intra)
        assert x.item() == 1111
        again = api.communication.BaguaProcessGroup(group.group)
        api.broadcast(x := torch.tensor([rank]), 1, again.get_intra_node_communicator())
        assert x.item() == (1 if rank < 2 else 3)


def test_parts_of_a_group(pool_of_two_nodes):
    pool_of_two_nodes.run(_parts_of_a_group, env={"BAGUA_SOCKET_IFNAME": "lo"})


def _differentiable(rank, world_size):
    """loss of rank r is (r + 1) * sum over i of (sum over s of x[s][i])^2, so dx[r] = 2 sum x * sum of (s + 1)."""
    with process_group():
        xs = inputs(world_size)
        x = xs[rank].clone().requires_grad_()
        total = functional.all_reduce(x)
        assert torch.equal(total, fold(xs, api.ReduceOp.SUM)) and torch.equal(x, xs[rank])
        ((rank + 1) * total.square().sum()).backward()
        weight = sum(r + 1 for r in range(world_size))
        assert torch.equal(x.grad, 2 * weight * fold(xs, api.ReduceOp.SUM))
        strided = functional.all_reduce(torch.ones(2, 3).T)
        assert torch.equal(strided, torch.full((3, 2), float(world_size)))
        assert torch.equal(functional.all_reduce(x.detach(), dist.ReduceOp.MAX), fold(xs, api.ReduceOp.MAX))
        for op, message in ((dist.ReduceOp.MAX, "pass tensor.detach"), (dist.ReduceOp.MIN, "expected torch.distr")):
            with pytest.raises(bagua.InvalidArgument, match=message):
                functional.all_reduce(x, op)


def _overlaps(rank, world_size):
    """One tensor may be both; what meets only in part is refused on the rank itself, before anything is sent."""
    with process_group():
        x = torch.arange(4.0 * world_size)
        ones = torch.ones(world_size)
        places = list(range(world_size))
        for call, message in (
            (lambda: api.allreduce(x[:4], x[1:5]), "send_tensor and recv_tensor overlap"),
            (lambda: api.reduce(x[:4], x[1:5], rank), "send_tensor and recv_tensor overlap"),
            (lambda: api.allgather(x[1:5], x), "input .* begins 1 element after the beginning of output"),
            (lambda: api.reduce_scatter(x, x[1:5]), "output .* begins 1 element after the beginning of input"),
            (lambda: api.alltoall(x, x), "no all_to_all in place"),
            (
                lambda: api.alltoall_v(ones, ones, places, x, 2 * ones, places),
                "blocks from ranks 0 and 1 would share memory",
            ),
        ):
            with pytest.raises(bagua.InvalidArgument, match=message):
                call()
        api.allreduce(x, x)
        assert torch.equal(x, world_size * torch.arange(4.0 * world_size))


def test_tensors_that_overlap(pool2):
    pool2.run(_overlaps)


def test_all_reduce_has_gradients(pool):
    pool.run(_differentiable)


def _refused(rank, world_size):
    with process_group():
        x = torch.ones(3, 3)
        calls = {
            "elements of torch.float32": lambda: api.allreduce(x, torch.ones(8)),
            "of torch.float64": lambda: api.reduce(x, x.double(), rank),
            "op 4 is not one of SUM \\(0\\)": lambda: api.allreduce_inplace(x, 4),
            "cannot be split into 2 equal blocks": lambda: api.allgather_inplace(x),
            "strides": lambda: api.alltoall_inplace(torch.ones(2, 3).T),
            "expected 18 for this count": lambda: api.gather_inplace(x, 9, rank),
            "expected 4 for this count": lambda: api.scatter_inplace(x, 4, 1 - rank),
            "lie in send_tensor, which has 9": lambda: api.alltoall_v(x, [5, 5], [0, 5], x, [5, 4], [0, 5]),
            "recv_counts \\[9\\]": lambda: api.alltoall_v(x, [5, 4], [0, 5], x, [9], [0]),
            "stream": lambda: api.new_group(stream=object()),
            "get_global_communicator": lambda: api.barrier(comm=api.communication._get_default_group()),
            "was called before": api.init_process_group,
        }
        for message, call in calls.items():
            with pytest.raises(bagua.InvalidArgument, match=message):
                call()
        api.barrier()  # nothing was sent, so nothing is out of step


def test_what_cannot_be_done_is_refused(pool2):
    pool2.run(_refused)


def _with_a_store(rank, world_size):
    """And torch.distributed is left alone where it is initialised already."""
    store = dist.PrefixStore("mine", next(dist.rendezvous("env://"))[0])
    api.init_process_group(store)
    assert dist.is_initialized() and dist.get_rank() == api.get_rank() == rank
    dist.destroy_process_group()
    bagua.destroy_process_group()
    dist.init_process_group("gloo")
    api.init_process_group()
    assert dist.get_backend() == "gloo"
    api.allreduce_inplace(x := torch.tensor([rank + 1]))
    assert x.item() == 3
    bagua.destroy_process_group()
    dist.destroy_process_group()


def test_with_a_store_and_beside_torch(pool2):
    pool2.run(_with_a_store)
