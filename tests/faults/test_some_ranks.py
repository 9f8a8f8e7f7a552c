"""A group of some ranks of the job: errors name the rank of the job, and say what the group's own numbers mean."""

import copy
import os
import pickle
import signal
import time

import pytest
import torch

import bagua
from bagua.distributed.job_ranks import JobRanks, reworded
from bagua.errors import InvalidArgument, RemoteError, TransportError
from bagua.testing import Pool
from tests.distributed.worlds import in_turns, shm, tcp
from tests.faults.scenarios import NOTICED_S, process_group, spawn_in, watch
from tests.meeting import meet, wait_until

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
@in_turns("world, is_wrapped", [shm(5), tcp(5)], [True, False])
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


MEMBERS = [(1, 3, 4), (3, 4), (0, 1)]


def hand_over(rank, world_size):
    """What one group has raised ends others, of other ranks."""
    with process_group() as world:
        groups = {ranks: world.subgroup(str(ranks), ranks, 20.0) for ranks in MEMBERS if rank in ranks}
        for group in groups.values():
            group.barrier().wait()
        meet()
        if rank == VICTIM:
            groups[1, 3, 4].poison(InvalidArgument("on purpose", rank=1))  # of the group
            groups[3, 4].poison(groups[1, 3, 4].failure())
        if rank == 1:
            wait_until(groups[1, 3, 4].failure, "the first group has failed")
            groups[0, 1].poison(groups[1, 3, 4].failure())
        for ranks, group in groups.items():
            wait_until(group.failure, f"the group of {ranks} has failed")
        found = {ranks: group.failure() for ranks, group in groups.items()}
        meet()
    return {ranks: (error.rank, str(error)) for ranks, error in found.items()}


def test_what_one_group_raised_may_end_another():
    """Who is at fault is named wherever the group has that rank, and nobody else is."""
    with Pool(5) as pool:
        results = pool.run(hand_over)
    for found in results:
        for ranks, (at_fault, message) in found.items():
            assert at_fault == (VICTIM if VICTIM in ranks else None), (ranks, message)
            assert "on purpose" in message, message


def test_what_is_told():
    ranks = JobRanks("some", [2, 5])
    error = TransportError("rank 1 is lost", rank=1, operation="barrier", bucket="bucket 3")
    told = ranks.told(error)
    assert (told.rank, told.ranks, told.operation, told.bucket) == (5, (5,), "barrier", "bucket 3")
    note = "(ranks count within the group 'some', of ranks 2, 5 of the job; its rank 1 is rank 5)"
    assert str(told) == f"rank 1 is lost {note}"
    assert ranks.told(told) is told and ranks.own(told) is error and ranks.own(error) is error
    for copied in (pickle.loads(pickle.dumps(told)), copy.copy(told)):
        assert (copied.rank, str(copied), ranks.told(copied)) == (5, str(told), copied)
    both = ranks.told(RemoteError("both", ranks=(0, 1)))
    assert both.rank is None and both.ranks == (2, 5) and str(both).endswith("of ranks 2, 5 of the job)")
    again = reworded(told, "bucket 4: ", "; wait", "bucket 4")
    assert (again.rank, again.bucket, str(again)) == (5, "bucket 4", f"bucket 4: rank 1 is lost; wait {note}")
    assert (ranks.own(again).rank, str(ranks.own(again))) == (1, "bucket 4: rank 1 is lost; wait")
    many = JobRanks("many", range(1, 100)).told(TransportError("x"))
    assert str(many).endswith("of ranks " + ", ".join(map(str, range(1, 17))) + ", ... of the job)")


def test_what_is_told_of_other_groups():
    error = TransportError("rank 1 is lost", rank=1)
    every, some, others = JobRanks("all", range(6)), JobRanks("some", [2, 5]), JobRanks("others", [5, 1])
    assert every.told(error) is error
    of_all = others.own(error)
    assert (of_all.rank, str(of_all)) == (1, "in group 'all': rank 1 is lost") and every.own(error) is error
    assert some.own(error).rank is None and some.own(error).ranks == ()
    told = some.told(TransportError("rank 1 is lost", rank=1))
    assert (others.own(told).rank, every.own(told).rank) == (0, 5)
    assert some.told(TransportError("", rank=7)).rank == 7  # of which the group knows nothing


class Mine(InvalidArgument):
    def __init__(self, number):
        super().__init__(f"number {number}", rank=0)


def test_an_error_of_the_programs_own_class_stays_what_it_is():
    some, mine = JobRanks("some", [2, 5]), Mine(3)
    assert some.told(mine) is mine and some.own(mine) is mine
    assert type(JobRanks("others", [0]).own(mine)) is InvalidArgument
    assert str(reworded(mine, "before ")) == "before number 3"
