"""A group of some ranks of the job: errors name the rank of the job, and say what the group's own numbers mean."""

import os
import pickle
import signal
import time

import pytest
import torch

import bagua
from bagua.distributed.job_ranks import JobRanks, in_group
from bagua.errors import InvalidArgument, RemoteError, TransportError
from bagua.testing import Pool
from tests.distributed.worlds import shm, tcp
from tests.faults.scenarios import NOTICED_S, process_group, spawn_in, watch
from tests.meeting import meet

RANKS = [1, 3, 4]  # of five
VICTIM = 3  # rank 1 of the group
SAYS = "(ranks count within the group '{}', of ranks 1, 3, 4 of the job; its rank 1 is rank 3)"


def die(rank, world_size, is_wrapped):
    with process_group():
        group = bagua.new_group(RANKS)
        bagua.barrier()
        if rank not in RANKS:
            return meet()
        if is_wrapped:
            model = bagua.with_bagua(torch.nn.Linear(3, 2), group=group)

            def call():
                model(torch.ones(1, 3)).sum().backward()

        else:

            def call():
                bagua.all_reduce(torch.ones(100), group=group)

        call()
        meet()
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        if not is_wrapped:
            return watch(call), group.name
        began = time.monotonic()
        with pytest.raises(bagua.BaguaError) as caught:
            while True:
                call()
        assert time.monotonic() - began < NOTICED_S
        assert model.bagua.timeline().failure.rank == 1  # as the files of timelines are named
        return caught.value, group.name


@pytest.mark.timed
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("world", [shm(5), tcp(5)], ids=str)
def test_a_rank_that_dies_is_named_by_its_rank_in_the_job(world, is_wrapped):
    results = spawn_in(world, die, is_wrapped, expect_exit={VICTIM: -signal.SIGKILL})
    for rank in RANKS:
        if rank != VICTIM:
            seen, name = results[rank]
            message = str(seen) if is_wrapped else seen.message
            assert seen.rank == VICTIM and message.endswith(SAYS.format(name)) and "rank 1 " in message, seen
            assert is_wrapped or seen.at - seen.began < NOTICED_S


def disagree(rank, world_size):
    found = []
    with process_group():
        group = bagua.new_group(RANKS)
        if rank in RANKS:
            wide = 2 if rank == VICTIM else 3
            with pytest.raises(InvalidArgument, match="rank 0 has .*, rank 1 has ") as caught:
                bagua.with_bagua(torch.nn.Linear(3, wide), group=group)
            found.append(caught.value)
            for call in (lambda: bagua.all_reduce(torch.ones(wide), group=group), lambda: bagua.barrier(group)):
                with pytest.raises(bagua.BaguaError) as caught:
                    call()
                found.append(caught.value)
            found.append(group.failure())
            other = bagua.new_group(RANKS)  # what a group raised may be handed to another one
            other.poison(found[-1])
            found.append(other.failure())
        else:
            bagua.new_group(RANKS)
    return group.name, [(error.rank, error.ranks, str(error)) for error in found]


def test_mismatches_and_disagreements_too():
    with Pool(5) as pool:
        results = pool.run(disagree)
    for rank in RANKS:
        name, found = results[rank]
        assert len(found) == 5
        first = found[0]
        assert first[:2] == (VICTIM, (VICTIM,)) and first[2].endswith(SAYS.format(name))
        for at_fault, ranks, message in found[1:]:
            assert at_fault in RANKS and ranks == (at_fault,)
            assert f"of ranks 1, 3, 4 of the job; its rank {RANKS.index(at_fault)} is rank {at_fault})" in message


def test_what_is_told():
    ranks = JobRanks("some", [2, 5])
    error = TransportError("rank 1 is lost", rank=1, operation="barrier", bucket="bucket 3")
    told = ranks.told(error)
    assert (told.rank, told.ranks, told.operation, told.bucket) == (5, (5,), "barrier", "bucket 3")
    assert str(told) == (
        "rank 1 is lost (ranks count within the group 'some', of ranks 2, 5 of the job; its rank 1 is rank 5)"
    )
    assert ranks.told(told) is told and in_group(told) is error and in_group(error) is error
    assert (pickle.loads(pickle.dumps(told)).rank, str(pickle.loads(pickle.dumps(told)))) == (5, str(told))
    both = ranks.told(RemoteError("both", ranks=(0, 1)))
    assert both.rank is None and both.ranks == (2, 5) and str(both).endswith("of ranks 2, 5 of the job)")
    again = told.reworded("other words", "bucket 4")
    assert (again.rank, in_group(again).rank, str(in_group(again)), again.bucket) == (5, 1, "other words", "bucket 4")
    assert JobRanks("all", [0, 1]).told(error) is error
    many = JobRanks("many", range(1, 100)).told(TransportError("x"))
    assert str(many).endswith("of ranks " + ", ".join(map(str, range(1, 17))) + ", ... of the job)")
