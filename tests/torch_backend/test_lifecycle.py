"""Opening and closing bagua's world, and making torch's groups from it."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua
from tests.distributed.worlds import fast_in
from tests.meeting import meet
from tests.torch_backend.programs import TIMEOUT, needs_torch, run, start, values

ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs_torch


def total(world_size, ranks, numel=10):
    return sum(values(rank, world_size, numel) for rank in ranks)


def open_and_close(rank, world_size):
    for _ in range(3):
        start()
        assert dist.get_backend() == "bagua" and bagua.get_rank() == rank and bagua.get_world_size() == world_size
        x, y = values(rank, world_size, 10), values(rank, world_size, 10)
        dist.all_reduce(x)
        bagua.all_reduce(y)
        assert torch.equal(x, total(world_size, range(world_size))) and torch.equal(x, y)
        model = bagua.with_bagua(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
        dist.destroy_process_group()
        assert not bagua.is_initialized() and not dist.is_initialized()


def test_init_destroy_init(pool2):
    pool2.run(open_and_close)


def share(rank, world_size):
    bagua.init_process_group(timeout=TIMEOUT)
    mine = bagua.get_default_group()
    start()
    work = dist.all_reduce(values(rank, world_size, 10), async_op=True)
    x = values(rank, world_size, 10)
    bagua.all_reduce(x)
    work.wait()
    dist.destroy_process_group()
    assert bagua.get_default_group() is mine
    bagua.all_reduce(x)  # what torch has opened is closed, and only that
    start()
    bagua.destroy_process_group()
    with pytest.raises(bagua.InvalidArgument, match="destroyed"):
        dist.barrier()
    dist.destroy_process_group()
    start()
    bagua.destroy_process_group()
    bagua.init_process_group(timeout=TIMEOUT)
    dist.destroy_process_group()
    assert bagua.is_initialized()  # not the world that torch had opened
    bagua.destroy_process_group()


def test_the_program_has_its_own_world(pool2):
    pool2.run(share)


def another_world(rank, world_size):
    store = dist.HashStore()
    bagua.init_process_group(store=store, rank=0, world_size=1)
    with pytest.raises(bagua.InvalidArgument, match="rank 0 of 1.*of 2"):
        start()
    bagua.destroy_process_group()


def test_a_world_of_another_size_is_refused(pool2):
    pool2.run(another_world)


def subgroups(rank, world_size):
    """Groups overlap, are used at the same time, and are made by all ranks or by members, in any order of ranks."""
    first, last = [0, 1, 2], [1, 2, 3]
    overlapping = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in (first, last)]
    works = []
    for ranks, group in zip((first, last), overlapping, strict=True):
        if rank in ranks:
            x = values(rank, world_size, 10)
            works.append((dist.all_reduce(x, group=group, async_op=True), x, total(world_size, ranks)))
    for work, x, expected in reversed(works):
        work.wait()
        assert torch.equal(x, expected)
    twins = [dist.new_group(timeout=TIMEOUT) for _ in range(2)]  # of the same ranks, and yet two
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=twins[0], async_op=True)
        dist.barrier(twins[1])
        work.wait()
    else:
        dist.barrier(twins[1])
        dist.all_reduce(torch.ones(3), group=twins[0])
    pair = [0, 1] if rank < 2 else [2, 3]
    for _ in range(2):  # torch makes the same name again
        local = dist.new_group(pair, use_local_synchronization=True, timeout=TIMEOUT)
        x = values(rank, world_size, 10)
        dist.all_reduce(x, group=local)
        assert torch.equal(x, total(world_size, pair))
        dist.destroy_process_group(local)
    # bagua's own groups count by themselves, though not all ranks made the same groups of torch.
    if rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True, timeout=TIMEOUT)
        dist.barrier(alone)
    own = bagua.new_group([0, 3])
    if rank in (0, 3):
        x = values(rank, world_size, 10)
        bagua.all_reduce(x, group=own)
        assert torch.equal(x, total(world_size, [0, 3]))
    dist.barrier()


def test_subgroups(pool4):
    run(pool4, subgroups)


def unsorted_group(rank, world_size):
    order = [2, 0, 3, 1]
    group = dist.new_group(order, sort_ranks=False, timeout=TIMEOUT)
    assert dist.get_rank(group) == order.index(rank)
    gathered = [torch.zeros(1) for _ in order]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    assert [int(x) for x in gathered] == order
    x = torch.tensor([float(rank)])
    dist.broadcast(x, src=3, group=group)
    assert x == 3
    right, left = order[order.index(rank) - 3], order[order.index(rank) - 1]
    work = dist.isend(torch.tensor([float(rank)]), right, group=group)
    dist.recv(x, left, group=group)
    work.wait()
    assert x == left


@pytest.mark.skipif("sort_ranks" not in dist.new_group.__code__.co_varnames and
                    "sort_ranks" not in getattr(dist.new_group, "__wrapped__", dist.new_group).__code__.co_varnames,
                    reason="this torch sorts the ranks of every group")  # fmt: skip
def test_ranks_in_any_order(pool4):
    run(pool4, unsorted_group)


def beside_gloo(rank, world_size):
    """The default group is gloo's: a group of bagua is made by its members alone, whatever others there are."""
    start("gloo")
    pair, other = [0, 1] if rank < 2 else [2, 3], [0, 2] if rank % 2 == 0 else [1, 3]
    for _ in range(2):  # torch makes the same name again
        groups = {}
        for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 1, 0]):
            group = dist.new_group(ranks, backend="bagua", timeout=TIMEOUT)
            if rank in ranks:
                groups[tuple(sorted(ranks))] = group
        assert not bagua.is_initialized()
        for ranks, group in groups.items():
            x = values(rank, world_size, 10)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, total(world_size, ranks))
            gathered = [None] * len(ranks)
            dist.all_gather_object(gathered, (rank, dist.get_rank(group)), group=group)
            assert gathered == [(r, i) for i, r in enumerate(ranks)]
        for ranks in (pair, other):
            dist.destroy_process_group(groups[tuple(ranks)])
        if rank != 2:
            dist.destroy_process_group(groups[0, 1, 3])
    if rank == 0:  # and ranks that have made another number of groups than the other members
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    if rank in (0, 3):
        local = dist.new_group([0, 3], backend="bagua", use_local_synchronization=True, timeout=TIMEOUT)
        dist.barrier(local)
        dist.destroy_process_group(local)
    everybody = dist.new_group(backend="bagua", timeout=TIMEOUT)
    beside = dist.new_group([0, 3], backend="bagua", timeout=TIMEOUT)
    x = values(rank, world_size, 10)
    dist.all_reduce(x, group=everybody)
    assert torch.equal(x, total(world_size, range(world_size)))
    assert bagua.is_initialized()
    dist.destroy_process_group(everybody)
    assert not bagua.is_initialized()
    if rank in (0, 3):
        dist.barrier(beside)
    dist.barrier()
    dist.destroy_process_group()


def test_beside_another_backend(pool4):
    pool4.run(beside_gloo)


def late_member(rank, world_size):
    """A rank that waits for a member that does not take part in making a group names it."""
    start("gloo")
    meet()  # gloo still connects on one rank where it has ended on another, which may leave then
    if rank == 1:
        with pytest.raises(bagua.DeadlineExceeded, match=r"rank 1 did not come.*its rank 1 is rank 2"):
            dist.new_group([1, 2], backend="bagua", timeout=timedelta(seconds=0.4))
    dist.destroy_process_group()


@pytest.mark.timed
def test_a_member_that_does_not_come(pool4):
    pool4.run(late_member)


def hybrid(rank, world_size, backend, override):
    """Replicas of shards, 2 x 2, with a backend for each dimension."""
    start(backend)
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=dict(override))
    for name in names:
        assert dist.get_backend(mesh[name].get_group()) == override.get(name, backend)
    torch.manual_seed(5)
    model = fully_shard(torch.nn.Linear(16, 6), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.sin(values(rank, world_size, 32).view(2, 16) + step)).square().mean().backward()
        optimizer.step()
    result = [parameter.full_tensor().detach() for parameter in model.parameters()]
    dist.barrier()  # a rank of gloo that leaves takes with it what others have not read yet
    dist.destroy_process_group()
    assert not bagua.is_initialized()
    return result


OVERRIDES = [
    {"dp_replicate": "bagua"},
    {"dp_shard": "bagua"},
    {"dp_replicate": "bagua", "dp_shard": "bagua"},
    {"dp_replicate": "gloo"},
    {},
]


@pytest.mark.parametrize(
    "override",
    [
        pytest.param(override, marks=[pytest.mark.slow("test_a_backend_for_each_dimension")] if i else [])
        for i, override in enumerate(OVERRIDES)
    ],
    ids=repr,
)
def test_a_backend_for_each_dimension(pool4, override):
    expected = pool4.run(hybrid, args=("gloo", {}))[0]
    for backend in ("gloo", "bagua"):
        for result in pool4.run(hybrid, args=(backend, override)):
            torch.testing.assert_close(result, expected)


def refused_options(rank, world_size):
    with pytest.raises(bagua.InvalidArgument, match="takes no options"):
        dist.init_process_group("bagua", pg_options=object(), timeout=TIMEOUT)
    assert not bagua.is_initialized()


def test_options_are_refused(pool2):
    pool2.run(refused_options)


def deadline(rank, world_size, set_later):
    start(timeout=TIMEOUT if set_later else timedelta(seconds=1))
    if set_later:
        options = dist.distributed_c10d.BarrierOptions()
        options.timeout = timedelta(seconds=20)
        dist.group.WORLD.barrier(options).wait()
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(bagua.DeadlineExceeded) as raised:
            dist.all_reduce(torch.ones(3))
        assert raised.value.rank == 1
    else:
        dist.distributed_c10d._get_default_group().get_group_store().wait(["done"], timedelta(seconds=20))
    if rank == 0:
        dist.distributed_c10d._get_default_group().get_group_store().set("done", "1")
    dist.destroy_process_group()


@fast_in("set_later", [True], [False, True])
def test_the_timeout_is_torchs(pool2, set_later):
    pool2.run(deadline, args=(set_later,))


def forked(rank, world_size):
    """A forked child (a DataLoader worker) gets an error, and may destroy the groups without harm to its parent."""
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(3))
        except bagua.InvalidArgument as error:
            dist.destroy_process_group()
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == world_size and bagua.is_initialized()


def test_a_forked_child_is_no_rank(pool2):
    run(pool2, forked)


PAGE_FENCE = "```python\nimport torch.distributed as dist\n"


def example_of_the_page(rank, world_size):
    _, _, after = (ROOT / "docs/torch_distributed.md").read_text().partition(PAGE_FENCE)
    exec(compile("import torch.distributed as dist\n" + after.split("```")[0], "torch_distributed.md", "exec"), {})
    assert after and not dist.is_initialized()


def test_the_example_of_the_page(pool2):
    pool2.run(example_of_the_page)
