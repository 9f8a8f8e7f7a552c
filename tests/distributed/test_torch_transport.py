"""backend="torch": the same bits as the native transports, the same values as torch's own collectives, its set-up."""

import itertools
import threading
import time
from collections import defaultdict, deque
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua import _C, ReduceOp
from bagua.net.torch_transport import Forwarder
from bagua.testing import spawn
from tests.distributed.oracles import DTYPES, assert_same, ops_of
from tests.distributed.worlds import TIMEOUT_S, fast_in
from tests.meeting import meet

SIZES = (1, 1200, 70_001)


def noise(rank, numel, dtype):
    """Values whose sum depends on the order of the additions, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=generator).to(dtype)


def results(group, rank, cases):
    """(what, result) of every collective with every type and size of `cases`, operator and codec."""
    members, size = group.ranks, group.size
    root = members[-1]
    for dtype, numel in cases:
        what = f"{dtype} {numel}"
        x, wide = noise(rank, numel, dtype), noise(rank, numel * size, dtype)
        for op in ops_of(dtype) if numel == SIZES[1] else ops_of(dtype)[:1]:
            y = x.clone()
            bagua.all_reduce(y, op, group=group)
            yield f"all_reduce {op.name} {what}", y
            y = x.clone()
            bagua.reduce(y, root, op, group=group)
            if rank == root:
                yield f"reduce {op.name} {what}", y
            y = torch.empty_like(x)
            bagua.reduce_scatter(y, wide, op, group=group)
            yield f"reduce_scatter {op.name} {what}", y
        if dtype in (torch.float32, torch.float16, torch.bfloat16):
            for codec in bagua.codecs.available():
                y = x.clone()
                bagua.all_reduce(y, ReduceOp.AVG, group=group, codec=codec)
                yield f"all_reduce {codec} {what}", y
        yield from movements(group, rank, root, x, wide, what)


def movements(group, rank, root, x, wide, what):
    y = x.clone()
    bagua.broadcast(y, root, group=group)
    yield f"broadcast {what}", y
    y = torch.empty_like(wide)
    bagua.all_gather(y, x, group=group)
    yield f"all_gather {what}", y
    y = torch.empty_like(wide) if rank == root else None
    bagua.gather(y, x, root, group=group)
    if rank == root:
        yield f"gather {what}", y
    y = torch.empty_like(x)
    bagua.scatter(y, wide if rank == root else None, root, group=group)
    yield f"scatter {what}", y
    y = torch.empty_like(wide)
    bagua.all_to_all(y, wide, group=group)
    yield f"all_to_all {what}", y
    bagua.barrier(group=group)


def in_backend(backend, rank, world_size, is_whole):
    """The results in the world and in a group of two, and what carried them."""
    bagua.init_process_group(backend, timeout=TIMEOUT_S)
    group = bagua.new_group([0, 2])
    cases = list(itertools.product(DTYPES, SIZES))
    few = [(dtype, numel) for dtype, numel in cases if dtype is torch.float32 or numel == SIZES[1]]
    found = dict(results(bagua.get_default_group(), rank, cases if is_whole else few))
    if rank in group.ranks:
        found.update((f"{what} in a group", y) for what, y in results(group, rank, few))
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-torch-")}
    bagua.destroy_process_group()
    assert bool(threads) == (backend == "torch"), threads
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-torch-")]
    assert not left, f"threads after the end: {left}"
    return found


def compare_with_native(rank, world_size, is_whole):
    ours, theirs = (in_backend(backend, rank, world_size, is_whole) for backend in ("torch", "native"))
    assert ours.keys() == theirs.keys() and len(ours) > (250 if is_whole else 150)
    for what, result in ours.items():
        assert_same(result.view(torch.uint8), theirs[what].view(torch.uint8), what)


@fast_in("is_whole", [False], [True])
def test_the_same_bits_as_the_native_transport(is_whole):
    """Without shared memory both run the same algorithms."""
    spawn(compare_with_native, 3, args=(is_whole,), env={"BAGUA_SHARED_MEMORY": "0"})


# ---- torch's own collectives, on the group that moves bagua's bytes


# ---- set-up


def beside_torch(rank, world_size):
    """A group of its own leaves torch.distributed to the program."""
    bagua.init_process_group("torch", timeout=TIMEOUT_S)
    bagua.barrier()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    x, y = torch.ones(3), torch.ones(3)
    dist.all_reduce(x)
    bagua.all_reduce(y)
    assert torch.equal(x, y)
    dist.destroy_process_group()
    bagua.all_reduce(y)
    assert (y == world_size**2).all()
    memory = bagua.empty(1000)
    assert not _C.is_shared(memory.data_ptr(), memory.nbytes)
    assert bagua.get_local_world_size() == world_size, "ranks of one host, though they share no memory"
    bagua.destroy_process_group()


def test_torch_distributed_stays_the_programs():
    spawn(beside_torch, 2)


def wrong_groups(rank, world_size):
    dist.Backend.register_backend("bagua", lambda *a: dist.ProcessGroupGloo(*a[:3], timeout=a[3]), devices=["cpu"])
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    cases = [
        ("cpu:bagua", 1, "is bagua itself, which would send through itself"),
        ("cuda:gloo", 1, r'\(cuda:gloo\) does not move CPU tensors; initialise it with "cpu:gloo,cuda:nccl"'),
        ("gloo", 2, "this process is rank 0 of 1 in torch.distributed but rank 0 of 2 in bagua"),
    ]
    for number, (backend, size, message) in enumerate(cases):
        dist.init_process_group(backend, store=dist.PrefixStore(str(number), store), rank=0, world_size=1)
        with pytest.raises(bagua.InvalidArgument, match=message):
            bagua.init_process_group("torch", store=store, rank=0, world_size=size)
        dist.destroy_process_group()
    bagua.init_process_group("torch", store=store, rank=0, world_size=1)
    bagua.all_reduce(torch.ones(1))
    bagua.destroy_process_group()


def test_groups_that_cannot_serve():
    spawn(wrong_groups, 1)


def disagree(rank, world_size):
    if rank == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(bagua.BaguaError) as caught:
        bagua.init_process_group("torch" if rank == 0 else "native", timeout=TIMEOUT_S)
    return str(caught.value)


def test_ranks_that_disagree_about_the_backend():
    for message in spawn(disagree, 2):
        assert "rank 0 has 'torch (a gloo group of its own)', rank 1 has 'native'" in message
        assert "pass the same backend= (or BAGUA_BACKEND) on all ranks" in message


# ---- ends


LATE_S = 0.4


def leave_early(rank, world_size):
    """What was sent arrives, though its sender destroys its groups before anybody asks for it."""
    bagua.init_process_group("torch", timeout=TIMEOUT_S)
    x, first = torch.full((300_000,), 3.0), torch.ones(1)
    if rank == 0:
        bagua.recv(first, 1)  # both are connected
        begin = time.monotonic()
        meet()
        bagua.send(x, 1)
        bagua.destroy_process_group()
        return time.monotonic() - begin
    bagua.send(first, 0)
    meet()
    time.sleep(LATE_S)
    y = torch.empty_like(x)
    bagua.recv(y, 0)
    assert_same(y, x, "recv")
    bagua.destroy_process_group()
    return None


@pytest.mark.timed
def test_the_end_waits_for_what_was_sent():
    assert spawn(leave_early, 2)[0] >= LATE_S


def leave_for_nobody(rank, world_size):
    bagua.init_process_group("torch", timeout=TIMEOUT_S)
    begin = time.monotonic()
    if rank == 1:
        bagua.send(torch.ones(300_000), 0)  # nobody receives it
    else:
        time.sleep(0.2)
    bagua.destroy_process_group()
    return time.monotonic() - begin


@pytest.mark.timed
def test_the_end_waits_for_nobody_who_has_left():
    assert max(spawn(leave_for_nobody, 2)) < TIMEOUT_S / 3


# ---- a group whose wait() shuts everybody else out, as MPI's does


class OneLock:
    """Both ranks of a world of two in one process. Every call takes the lock, and wait() keeps it until the end."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sent = defaultdict(deque)  # by sender and tag

    def rank(self, rank):
        return OneLockRank(self, rank)


class OneLockRank:
    def __init__(self, world, rank):
        self.world, self._rank = world, rank

    def send(self, tensors, peer, tag):
        with self.world.lock:
            self.world.sent[self._rank, tag].append(tensors[0].clone())
        return OneLockWork(self.world, lambda: True)

    def recv(self, tensors, peer, tag):
        def arrived():
            queue = self.world.sent[peer, tag]
            if queue:
                tensors[0].copy_(queue.popleft())
                return True
            return False

        return OneLockWork(self.world, arrived)


class OneLockWork:
    def __init__(self, world, look):
        self.world, self.look, self.done = world, look, False

    def is_completed(self):
        with self.world.lock:
            self.done = self.done or self.look()
            return self.done

    def wait(self, timeout=timedelta(0)):
        with self.world.lock:
            deadline = time.monotonic() + TIMEOUT_S / 3
            while not (self.done or self.look()):
                assert time.monotonic() < deadline, "it waits for what the lock keeps from coming"
                time.sleep(0.001)
        return True


@pytest.mark.timed
def test_works_are_polled_where_waiting_shuts_others_out():
    def refuse(peer):
        raise AssertionError("both are connected")

    world = OneLock()
    cores = [
        _C.Group("polled", "polled", rank, [0, 1], 20.0, [True, False][:: 1 - 2 * rank], {}, refuse, None)
        for rank in range(2)
    ]
    forwarders = []
    for rank, core in enumerate(cores):
        link = core.attach_torch(1 - rank)
        forwarders.append(Forwarder(link, world.rank(rank), 1 - rank, 0, True, f"polled-{rank}"))
    data = [torch.full((70_000,), float(rank + 1)) for rank in range(2)]
    works = [
        core.all_reduce(x.data_ptr(), x.numel(), 0, 0, None, (10.0, False, None, None))
        for core, x in zip(cores, data, strict=True)
    ]
    for work, x in zip(works, data, strict=True):
        assert work.wait(10.0)
        assert (x == 3).all()
    for core, forwarder in zip(cores, forwarders, strict=True):
        core.close()
        assert forwarder.join(time.monotonic() + TIMEOUT_S / 3)
