"""Forked children (DataLoader workers): they keep no connection open, and nothing that they do disturbs the rank."""

import contextlib
import ctypes
import gc
import os
import signal
import time

import pytest
import torch

import bagua
from bagua import _C
from bagua.testing import free_port, kill, spawn
from tests.distributed.worlds import in_worlds, mixed, shm, tcp
from tests.faults.scenarios import note_time, noted_time, process_group, spawn_in, watch
from tests.faults.test_killed import VICTIM, check_survivors
from tests.meeting import meet


def fork_and_die(rank, world_size, path):
    with process_group():
        shared = bagua.empty(100_000)
        bagua.all_reduce(shared)
        other = bagua.new_group()
        bagua.barrier(group=other)
        bagua.send(torch.ones(3), (rank + 1) % world_size, async_op=True)
        bagua.recv(torch.ones(3), (rank - 1) % world_size)
        if rank == VICTIM:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            with open(f"{path}.child", "w") as file:
                file.write(str(child))
        meet()
        if rank == VICTIM:
            note_time(path)
            kill()
        return watch(lambda: bagua.all_reduce(shared))


@pytest.mark.timed
@in_worlds([tcp(3)], slow=[shm(3), mixed(4)])
def test_a_child_that_outlives_its_rank_does_not_hide_the_death(world, tmp_path):
    path = str(tmp_path / "died")
    try:
        results = spawn_in(world, fork_and_die, path, expect_exit={VICTIM: signal.SIGKILL})
        check_survivors(results, noted_time(path))
        with open(f"{path}.child") as file:
            os.kill(int(file.read()), 0)  # it was there all the time
    finally:
        with contextlib.suppress(OSError, ValueError), open(f"{path}.child") as file:
            os.kill(int(file.read()), signal.SIGKILL)


class Dataset(torch.utils.data.Dataset):
    """Lives in shared memory; its workers find out that they are no ranks."""

    def __init__(self, memory):
        self.memory = memory

    def __len__(self):
        return 32

    def __getitem__(self, index):
        with pytest.raises(bagua.InvalidArgument, match="not initialised"):
            bagua.all_reduce(torch.ones(1))
        return self.memory[index]


def train_with_workers(rank, world_size):
    with process_group():
        memory = bagua.empty(32)
        memory += torch.arange(32.0)
        bagua.all_reduce(memory)
        group = bagua.get_default_group()
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                Dataset(memory), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            for step, batch in enumerate(loader):
                assert torch.equal(batch, world_size * (4.0 * step + torch.arange(4.0)))
                bagua.all_reduce(batch)
                assert batch[0] == world_size**2 * 4.0 * step
            assert group.rank == rank


@in_worlds([shm(3)], slow=[tcp(3)])
def test_data_loader_workers(world):
    spawn_in(world, train_with_workers)


def child_work(group, memory):
    """In the child: everything that was inherited is used, dropped and collected."""
    assert not bagua.is_initialized()
    with pytest.raises(bagua.InvalidArgument, match="not initialised"):
        bagua.barrier()
    with pytest.raises(bagua.InvalidArgument, match=r"forked child of rank \d+ \(process \d+\) and not a rank"):
        group.all_reduce(torch.ones(1))
    group.close()
    memory += 1  # shared with the parent, and with the peers
    del memory
    gc.collect()
    bagua.destroy_process_group()


def children_come_and_go(rank, world_size):
    """Each child makes a group of its own too, of one rank, with threads and descriptors in the old numbers."""
    with process_group():
        group = bagua.get_default_group()
        memory = bagua.empty(50_000)
        is_shared = _C.is_shared(memory.data_ptr(), memory.nbytes)
        bagua.all_reduce(memory)
        descriptors = len(os.listdir("/proc/self/fd"))
        for round_ in range(5):
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    child_work(group, memory)
                    bagua.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
                    bagua.all_reduce(torch.ones(10))
                    bagua.destroy_process_group()
                    status = 0
                os._exit(status)
            bagua.all_reduce(torch.ones(10))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            bagua.barrier()
            assert memory[0] == (round_ + 1 if is_shared else 0)
            bagua.barrier()
            x = bagua.empty(50_000)
            bagua.all_reduce(x)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


@in_worlds([shm(3)], slow=[tcp(3)])
def test_children_that_clean_up_do_not_touch_what_is_their_parents(world):
    spawn_in(world, children_come_and_go)


def a_child_ends_as_programs_end(rank, world_size):
    with process_group():
        memory = bagua.empty(50_000)
        bagua.all_reduce(memory)
        child = os.fork()
        if child == 0:
            ctypes.pythonapi.Py_Exit(7)  # the interpreter's whole way down: atexit, modules, destructors
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        bagua.all_reduce(memory)


def test_a_child_that_ends_as_programs_end():
    """Without a launcher's store, so that rank 0 holds it, whose threads the child does not have either."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())}
    spawn(a_child_ends_as_programs_end, 2, env=env)
