"""send and recv: order, both directions at once, first contacts in any order, beside collectives."""

import random
import time

import pytest
import torch

import bagua
from tests.distributed.oracles import DTYPES, assert_same, values
from tests.distributed.worlds import ALL_WORLDS, FEW_WORLDS, in_turns, in_worlds, shm, tcp

SIZES = (0, 1, 33, 65537, 500_000)


def wait_all(works):
    for work in works:
        work.wait()


def check_pairs(rank, world_size):
    """Everybody sends everything to everybody and receives it, all of it under way at once."""
    for dtype in DTYPES:
        for numel in SIZES if dtype is torch.float32 else (0, 1, 33):
            others = [peer for peer in range(world_size) if peer != rank]
            mine = values(rank, world_size, numel, dtype).clone()
            received = {peer: torch.empty(numel, dtype=dtype) for peer in others}
            works = [bagua.send(mine, peer, async_op=True) for peer in others]
            works += [bagua.recv(received[peer], peer, async_op=True) for peer in others]
            wait_all(works)
            for peer in others:
                assert_same(received[peer], values(peer, world_size, numel, dtype), f"{dtype} {numel} from {peer}")


def check_order(rank, world_size):
    """Messages of a pair keep their order, whatever their sizes, and a blocking send needs no receiver yet."""
    rng = random.Random(7)  # the same on all ranks
    sizes = [rng.choice((0, 1, 5, 1000, 40_000)) for _ in range(60)]
    for sender in range(world_size):
        receiver = (sender + 1) % world_size
        if rank == sender:
            wait_all([bagua.send(torch.full((n,), float(i)), receiver, async_op=True) for i, n in enumerate(sizes)])
        elif rank == receiver:
            boxes = [torch.empty(n) for n in sizes]
            wait_all([bagua.recv(box, sender, async_op=True) for box in boxes])
            for i, box in enumerate(boxes):
                assert (box == i).all()


def check_ring_of_blocking_calls(rank, world_size):
    """Even ranks send first, odd ones receive first; then a ring that only async sends can close."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    box = torch.empty(100_000)
    if world_size % 2 == 0:
        mine = torch.full_like(box, float(rank))
        if rank % 2 == 0:
            bagua.send(mine, right)
            bagua.recv(box, left)
        else:
            bagua.recv(box, left)
            bagua.send(mine, right)
        assert (box == left).all()
    work = bagua.send(torch.full_like(box, rank + 0.5), right, async_op=True)
    bagua.recv(box, left)
    work.wait()
    assert (box == left + 0.5).all()


@in_worlds(FEW_WORLDS, slow=ALL_WORLDS[1:])
def test_pairs(pools, world):
    pools.run(world, check_pairs)


@in_worlds(FEW_WORLDS, slow=ALL_WORLDS[1:])
def test_order(pools, world):
    pools.run(world, check_order)


@in_worlds(FEW_WORLDS, slow=ALL_WORLDS[1:])
def test_rings(pools, world):
    pools.run(world, check_ring_of_blocking_calls)


def check_first_contact(rank, world_size, first):
    """`first` sends to all at once, before it was ever connected to them; they turn to it one after the other."""
    if rank == first:
        others = [peer for peer in range(world_size) if peer != rank]
        works = [bagua.send(torch.tensor([peer]), peer, async_op=True) for peer in others]
        for peer in others:
            box = torch.empty(1, dtype=torch.int64)
            bagua.recv(box, peer)
            assert box.item() == 100 + peer
        wait_all(works)
        return
    # The last rank answers first: whoever stood in the queue behind a rank that is not ready would wait forever.
    box = torch.empty(1, dtype=torch.int64)
    order = [peer for peer in reversed(range(world_size)) if peer != first]
    if rank != order[0]:
        bagua.recv(torch.empty(1), order[order.index(rank) - 1])
    bagua.recv(box, first)
    if rank != order[-1]:
        bagua.send(torch.zeros(1), order[order.index(rank) + 1])
    bagua.send(100 + box, first)


@in_turns("first, world", [0, 1, 2], [tcp(3), shm(3)])
def test_first_contact_waits_for_nobody_else(pools, first, world):
    """Each run has a new group, so nobody is connected at its beginning."""
    pools.run(world, check_first_contact, first, timeout=20)


def check_beside_collectives(rank, world_size):
    """A message that nobody has received yet does not hold up collectives."""
    box = torch.empty(300_000)
    if rank == 0:
        work = bagua.send(torch.ones(300_000), 1, async_op=True)
    elif rank == 1:
        work = None
    x = torch.ones(100_000)
    for _ in range(20):
        bagua.all_reduce(x, bagua.ReduceOp.AVG)
    assert (x == 1).all()
    if rank == 1:
        bagua.recv(box, 0)
        assert (box == 1).all()
    elif rank == 0:
        work.wait()


@in_worlds(FEW_WORLDS, slow=ALL_WORLDS[1:])
def test_messages_do_not_hold_up_collectives(pools, world):
    pools.run(world, check_beside_collectives)


def check_mismatch(rank, world_size):
    group = bagua.get_default_group()
    begin = time.monotonic()
    with pytest.raises(bagua.BaguaError, match=r"send/recv of 5 float32.*send/recv of 4 float32|4 float32.*5 float32"):
        if rank == 0:
            bagua.send(torch.ones(5), 1)
            bagua.recv(torch.ones(1), 1)  # a small send may be done before anybody looks at it
        else:
            bagua.recv(torch.ones(4), 0)
    assert time.monotonic() - begin < 10
    with pytest.raises(bagua.BaguaError, match="float32"):
        group.send(torch.ones(1), 1 - rank).wait()
    with pytest.raises(bagua.BaguaError, match="float32"):  # the first cause, for collectives too
        bagua.all_reduce(torch.ones(1))


@pytest.mark.timed
@in_worlds([shm(2), tcp(2)])
def test_different_sizes_are_an_error_on_both_sides(pools, world):
    pools.run(world, check_mismatch)


def check_arguments(rank, world_size):
    x = torch.ones(3)
    with pytest.raises(bagua.InvalidArgument, match=f"dst {rank} is this rank itself"):
        bagua.send(x, rank)
    with pytest.raises(bagua.InvalidArgument, match="src 7 is not a rank of the group"):
        bagua.recv(x, 7)
    bagua.barrier()


def test_arguments(pools):
    pools.run(shm(2), check_arguments)
