"""async_op: many operations under way, completed in any order, dropped, or left for the end of the program."""

import gc
import itertools
import random
import threading
import time
import weakref

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.distributed import process_group
from bagua.distributed.work import Work
from bagua.testing import world as thread_world
from tests.distributed.oracles import DTYPES, assert_reduced, assert_same, ops_of, values
from tests.distributed.worlds import ALL_WORLDS, FEW_WORLDS, TIMEOUT_S, fast_in, in_worlds, shm
from tests.meeting import meet, wait_until

NUM_OPERATIONS = 60


def submit_random(rng, rank, world_size):
    """One random operation, the same on all ranks: its Work and what to check once it is completed."""
    kind = rng.choice(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "codec"])
    dtype = rng.choice(DTYPES)
    numel = rng.choice((0, 1, 33, 1000, 30_000))
    root = rng.randrange(world_size)
    op = rng.choice([op for op in ops_of(dtype) if op is not ReduceOp.PRODUCT])
    inputs = [values(r, world_size, numel, dtype) for r in range(world_size)]
    mine = inputs[rank].clone()
    what = f"{kind} {dtype} {numel} {op.name}"
    if kind == "all_reduce":
        return bagua.all_reduce(mine, op, async_op=True), lambda: assert_reduced(mine, inputs, op, what)
    if kind == "broadcast":
        return bagua.broadcast(mine, root, async_op=True), lambda: assert_same(mine, inputs[root], what)
    if kind == "barrier":
        return bagua.barrier(async_op=True), lambda: None
    if kind == "codec":
        x = torch.full((numel,), 3.0)
        return bagua.all_reduce(x, codec="bf16", async_op=True), lambda: assert_same(x, x * 0 + 3 * world_size, what)
    if kind == "all_gather":
        output = torch.empty(numel * world_size, dtype=dtype)
        return bagua.all_gather(output, mine, async_op=True), lambda: assert_same(output, torch.cat(inputs), what)
    wide = [values(r, world_size, numel * world_size, dtype) for r in range(world_size)]
    blocks = [x.view(world_size, numel)[rank] for x in wide]
    if kind == "reduce_scatter":
        output = torch.empty(numel, dtype=dtype)
        work = bagua.reduce_scatter(output, wide[rank].clone(), op, async_op=True)
        return work, lambda: assert_reduced(output, blocks, op, what)
    output = torch.empty(numel * world_size, dtype=dtype)
    work = bagua.all_to_all(output, wide[rank].clone(), async_op=True)
    return work, lambda: assert_same(output, torch.cat(blocks), what)


def check_random_order(rank, world_size, seed):
    shared, own = random.Random(seed), random.Random(100 * seed + rank)
    pending = []
    for i in range(NUM_OPERATIONS):
        pending.append(submit_random(shared, rank, world_size))
        if own.random() < 0.2:
            time.sleep(0.001)
        if i % 7 == 0:  # a blocking call behind the queued ones
            x = torch.ones(5)
            bagua.all_reduce(x)
            assert x[0] == world_size
    own.shuffle(pending)
    for work, check in pending:
        work.wait()
        assert work.is_completed() and work.exception() is None
        check()


@fast_in(
    "world, seed", list(zip(FEW_WORLDS, [1, 2, 3], strict=True)), list(itertools.product(ALL_WORLDS[1:], [1, 2, 3]))
)
def test_completed_in_any_order(pools, world, seed):
    pools.run(world, check_random_order, seed)


def check_layouts(rank, world_size):
    """Transposed, strided, expanded-from and zero-dimensional tensors, blocking and not."""
    base = values(rank, world_size, 12_000, torch.float32).view(100, 120)
    inputs = [values(r, world_size, 12_000, torch.float32).view(100, 120) for r in range(world_size)]
    total = sum(x.double() for x in inputs).float()

    def views(x):
        return {"transposed": x.t(), "strided": x[::3, 1::2], "column": x[:, 5], "row": x[7], "one": x[3, 4]}

    for name in views(base):
        for async_op in (False, True):
            x = base.clone()
            view = views(x)[name]
            work = bagua.all_reduce(view, async_op=async_op)
            if async_op:
                work.wait()
            assert_same(view, views(total)[name], f"all_reduce {name}")
            view.copy_(views(base)[name])
            assert torch.equal(x, base), f"{name}: elements beside the view have changed"

            wide = torch.zeros(world_size, 1000, 2)[..., 0]  # not contiguous
            bagua.all_gather(wide, base.view(-1)[:2000:2])
            assert_same(wide, torch.stack([x.view(-1)[:2000:2] for x in inputs]), "all_gather")
    scalar = torch.tensor(float(rank))
    bagua.all_reduce(scalar, ReduceOp.MAX)
    assert scalar.shape == () and scalar == world_size - 1
    empty = torch.empty(0, 7)
    bagua.all_reduce(empty)
    bagua.broadcast(empty, 0)
    leaf = torch.ones(5, requires_grad=True)
    bagua.all_reduce(leaf)
    assert leaf.requires_grad and leaf.is_leaf and (leaf == world_size).all()


@in_worlds([shm(3)], slow=FEW_WORLDS)
def test_layouts(pools, world):
    pools.run(world, check_layouts)


def check_dropped(rank, world_size):
    """Work that nobody keeps still has its memory: other tensors of the same size are made meanwhile."""
    tensors = []
    for i in range(30):
        tensor = torch.full((50_000,), float(i))
        tensors.append(weakref.ref(tensor))
        bagua.all_reduce(tensor, async_op=True)
        del tensor
        torch.full((50_000,), -1.0)
    result = torch.ones(1)
    bagua.all_reduce(result)
    assert result == world_size
    bagua.barrier(async_op=True).wait()
    assert not any(tensor() is not None for tensor in tensors), "what is completed has been let go"


@in_worlds([shm(2)], slow=[shm(3)])
def test_dropped_work_keeps_its_memory_while_it_runs(pools, world):
    pools.run(world, check_dropped)


def check_wait_with_timeout(rank, world_size):
    x = torch.ones(4)
    if rank == 1:
        meet()  # when the other one has waited
    work = bagua.all_reduce(x, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        begin = time.monotonic()
        with pytest.raises(bagua.DeadlineExceeded, match=r"^all_reduce is still running after 0\.05 s"):
            work.wait(0.05)
        assert 0.05 <= time.monotonic() - begin < TIMEOUT_S / 4
        for timeout in (0, -1, float("inf")):
            with pytest.raises(bagua.InvalidArgument, match="timeout"):
                work.wait(timeout)
        meet()
    work.wait()
    assert (x == world_size).all()
    work.wait()  # again is harmless
    bagua.all_reduce(x)  # and the group is as good as before


@pytest.mark.timed
def test_wait_with_a_timeout_of_its_own(pools):
    pools.run(shm(2), check_wait_with_timeout)


def check_threads(rank, world_size):
    """Several threads of a process use groups of their own at the same time."""
    groups = [bagua.new_group() for _ in range(3)]
    failures = []

    def work(group):
        try:
            for i in range(50):
                x = torch.full((2000,), float(i + rank))
                bagua.all_reduce(x, group=group)
                assert x[0] == world_size * i + world_size * (world_size - 1) / 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_with_groups_of_their_own(pools):
    pools.run(shm(2), check_threads)


def check_a_failed_copy_back(group):
    """A result that could not be put where it belongs never looks like success, however often one asks."""
    target = torch.zeros(3, 4)
    work = group.all_reduce(target.t())
    attempts = []

    def fail():
        attempts.append(len(attempts))
        raise MemoryError("no room")

    work.finish_with(fail)
    for _ in range(2):
        with pytest.raises(MemoryError):
            work.wait()
        assert isinstance(work.exception(), MemoryError)
    assert attempts == [0]


def test_a_failed_copy_back():
    thread_world(2, check_a_failed_copy_back)


def copies_of(monkeypatch):
    """The contiguous copies that operations are given from here on, as weak references."""
    copies, prepare = [], process_group.prepare

    def prepare_and_note(*args, **options):
        prepared = prepare(*args, **options)
        copies.append(weakref.ref(prepared.data))
        return prepared

    monkeypatch.setattr(process_group, "prepare", prepare_and_note)
    return copies


def interrupt(*_):
    raise KeyboardInterrupt


def test_who_is_interrupted_behind_a_submission_leaves_its_memory_to_the_core(monkeypatch):
    """Ctrl-C may come before there is a Work."""
    numel, is_interrupted = 300_000, threading.Event()
    copies = copies_of(monkeypatch)

    def check(group):
        x = torch.full((numel, 2), group.rank + 1.0)[:, 0]
        if group.rank == 0:
            with monkeypatch.context() as patched:
                patched.setattr(Work, "__init__", interrupt)
                try:
                    group.all_reduce(x)
                except KeyboardInterrupt:
                    pass
            gc.collect()
            is_there = copies[0]() is not None
            others = [torch.full((numel,), -1.0) for _ in range(5)]  # which would lie where it was
            is_interrupted.set()
            group.barrier().wait()
            assert is_there and all((other == -1).all() for other in others)
            wait_until(lambda: copies[0]() is None, "it has ended")
        else:
            is_interrupted.wait()
            work = group.all_reduce(x)
            work.wait()
            assert (x == 3).all()
            assert copies[1]() is None, "wait() frees it"
            group.barrier().wait()

    thread_world(2, check)


def test_a_closed_group_keeps_nothing():
    """Of an operation that fails as the group is closed, for which nobody has waited."""
    kept = []

    def check(group):
        if group.rank == 0:
            x = torch.ones(100_000)
            kept.append(weakref.ref(x))
            group.all_reduce(x)  # which the other one does not call
            del x
            assert kept[0]() is not None

    thread_world(2, check)
    gc.collect()
    assert kept[0]() is None
