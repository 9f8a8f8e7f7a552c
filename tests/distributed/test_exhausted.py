"""Threads that end on one rank: no process aborts, and all ranks name that rank and what to raise."""

import contextlib
import ctypes

import pytest
import torch

import bagua
from bagua import TransportError
from bagua.distributed.consensus import agree
from bagua.testing import spawn
from bagua.testing import world as thread_world

_NUM_BYTES_OF_ATTRIBUTES = 128  # more than pthread_attr_t has
VALUES = torch.ones(2_000_000)  # more than the rings of a channel hold


@contextlib.contextmanager
def no_threads():
    """This process can have no more: no address space has room for their stacks."""
    libc = ctypes.CDLL(None)
    before, changed = (ctypes.create_string_buffer(_NUM_BYTES_OF_ATTRIBUTES) for _ in range(2))
    for attributes in (before, changed):
        assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(changed, ctypes.c_size_t(1 << 47)) == 0
    assert libc.pthread_setattr_default_np(changed) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(before) == 0


def train_async():
    model = torch.nn.Linear(2, 2)
    bagua.with_bagua(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="async")


def receive():
    bagua.recv(VALUES, 1) if bagua.get_rank() == 0 else bagua.send(VALUES, 0)


OPERATIONS = {
    "first connection": lambda: bagua.barrier(),
    "message": receive,
    "new_group": lambda: bagua.barrier(group=bagua.new_group()),
    "async": train_async,
}


def failure_of(what, limit, after=(), limited=0):
    """Its (class, rank, message) in a new group of all ranks, where `limit` holds on one; None if it has none."""
    bagua.init_process_group(timeout=30)
    try:
        for each in after:
            OPERATIONS[each]()
        with limit if bagua.get_rank() == limited else contextlib.nullcontext():
            OPERATIONS[what]()
    except Exception as error:
        return type(error).__name__, getattr(error, "rank", None), str(error)
    finally:
        with contextlib.suppress(bagua.BaguaError):
            bagua.barrier()  # where the world has not failed, until the other rank has its error
        bagua.destroy_process_group()


def without_threads(rank, world_size):
    # On the one of the two that dials, which needs a thread for that, whoever comes first.
    return {
        what: failure_of(what, no_threads(), before, limited=1)
        for what, before in {
            "first connection": [],
            "message": [],
            "new_group": ["first connection"],
            "async": ["first connection", "new_group"],
        }.items()
    }


def test_where_threads_end_all_ranks_name_the_rank_and_the_limit():
    other, first = spawn(without_threads, 2)
    for what in first:
        (kind, rank, text), (other_kind, other_rank, other_text) = first[what], other[what]
        assert (kind, rank) == ("TransportError", 1), (what, first[what])
        assert (other_kind, other_rank) == ("RemoteError", 1), (what, other[what])
        for each in (text, other_text):
            assert "cannot start the thread 'bagua-" in each and "raise `ulimit -u`" in each, (what, each)


def check_agreement(group):
    def prepare():
        if group.rank == 0:
            raise TransportError("nothing is left", rank=0)
        return None, {}

    expected, text = (TransportError, "nothing is left") if group.rank == 0 else (bagua.RemoteError, "rank 0 raised")
    with pytest.raises(expected, match=text) as raised:
        agree(group, prepare, "do something")
    assert type(raised.value) is expected and raised.value.rank == 0


def test_what_ends_while_ranks_agree_is_no_mistake_of_the_others():
    thread_world(2, check_agreement)
