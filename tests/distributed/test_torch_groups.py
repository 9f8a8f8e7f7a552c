"""from_torch_group: the ranks of a torch.distributed group, without a word from those that are not in it."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import bagua
from bagua.testing import spawn


def initialise(rank, world_size, path):
    store = dist.FileStore(str(path), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    bagua.init_process_group(store=dist.PrefixStore("bagua", store), rank=rank, world_size=world_size, timeout=30)
    return store  # kept by the caller: the file goes with it


def end():
    bagua.barrier()
    bagua.destroy_process_group()
    dist.destroy_process_group()


def total(x, group):
    x = torch.tensor([float(x)])
    bagua.all_reduce(x, group=group)
    return x.item()


def check_groups(rank, world_size, path):
    store = initialise(rank, world_size, path)
    world = bagua.from_torch_group(dist.group.WORLD)
    assert world.ranks == list(range(world_size))
    assert total(10**rank, world) == sum(10**r for r in range(world_size))
    assert bagua.from_torch_group(dist.group.WORLD) is world
    for ranks in itertools.combinations(range(world_size), 2):
        torch_group = dist.new_group(list(ranks))
        if rank not in ranks:
            with pytest.raises(bagua.InvalidArgument, match="that are not members there is no group to convert"):
                bagua.from_torch_group(torch_group)
            continue
        group = bagua.from_torch_group(torch_group, timeout=20)
        assert group.ranks == list(ranks) and group.timeout == timedelta(seconds=20)
        assert total(10**rank, group) == sum(10**r for r in ranks)
    # Two groups of the same ranks are two groups; bagua's own are counted apart from torch's.
    again = [bagua.from_torch_group(dist.new_group([0, 1])) for _ in range(2) if rank < 2]
    mine = bagua.new_group([0, 1])
    if rank < 2:
        assert again[0] is not again[1]
        assert [total(rank, group) for group in (*again, mine)] == [1, 1, 1]
    if rank < 2:  # a group that only its members make
        group = bagua.from_torch_group(dist.new_group([0, 1], use_local_synchronization=True))
        assert total(10**rank, group) == 11
    end()
    del store


def test_groups(tmp_path):
    spawn(check_groups, 3, args=(tmp_path / "store",))


def check_meshes(rank, world_size, path):
    """Each argument ``group`` takes torch's groups and meshes: the sums are those of the mesh's rows."""
    store = initialise(rank, world_size, path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    replicas, shards = mesh["dp_replicate"], mesh["dp_shard"]
    assert total(10**rank, replicas) == 10 ** (rank % 2) + 10 ** (rank % 2 + 2)
    assert total(10**rank, shards.get_group()) == total(10**rank, shards) == (11 if rank < 2 else 1100)
    assert bagua.get_world_size(replicas) == 2 and bagua.get_rank(replicas) == rank // 2
    model = torch.nn.Linear(2, 1, bias=False)
    bagua.with_bagua(model, group=replicas)
    model(torch.full((2,), float(rank))).sum().backward()
    assert model.weight.grad.tolist() == [[rank % 2 + 1.0] * 2]
    assert model.bagua.group is bagua.from_torch_group(replicas.get_group())
    with pytest.raises(bagua.InvalidArgument, match=r"dimensions \('dp_replicate', 'dp_shard'\), expected one"):
        bagua.with_bagua(model, group=mesh)
    end()
    del store


def test_meshes(tmp_path):
    spawn(check_meshes, 4, args=(tmp_path / "store",))


def check_other_ranks(rank, world_size, path):
    store = dist.FileStore(str(path), world_size)
    dist.init_process_group("gloo", store=store, rank=world_size - 1 - rank, world_size=world_size)
    with pytest.raises(bagua.InvalidArgument, match="bagua is not initialised"):
        bagua.from_torch_group(dist.group.WORLD)
    bagua.init_process_group(store=dist.PrefixStore("bagua", store), rank=rank, world_size=world_size, timeout=30)
    with pytest.raises(bagua.InvalidArgument, match=r"calls this process rank \d of 2, bagua rank \d of 2"):
        bagua.from_torch_group(dist.group.WORLD)
    end()


def test_other_ranks_are_refused(tmp_path):
    spawn(check_other_ranks, 2, args=(tmp_path / "store",))


def check_torch_begins_again(rank, world_size, path):
    """torch's new groups may have the names, or the addresses, of old ones."""
    store = dist.FileStore(str(path), world_size)
    bagua.init_process_group(store=dist.PrefixStore("bagua", store), rank=rank, world_size=world_size, timeout=30)
    converted = []
    for turn in range(3):
        prefix = dist.PrefixStore(f"torch{turn}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
        ranks = [0, 1] if turn != 1 else [1, 2]
        part = dist.new_group(ranks)
        groups = [dist.group.WORLD, part] if rank in ranks else [dist.group.WORLD]
        for group in groups:
            mine = bagua.from_torch_group(group)
            assert mine.ranks == dist.get_process_group_ranks(group)
            assert not any(mine is other for other in converted)
            converted.append(mine)
            assert total(10**rank, mine) == sum(10**r for r in mine.ranks)
        dist.barrier()
        del group, groups, part
        dist.destroy_process_group()
    for group in converted:  # they outlive torch's
        assert total(1, group) == group.size
    bagua.barrier()
    bagua.destroy_process_group()


def test_torch_begins_again(tmp_path):
    spawn(check_torch_begins_again, 3, args=(tmp_path / "store",))
