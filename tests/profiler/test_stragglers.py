"""The last rank of each operation, against an oracle in plain loops, and the rules for naming a straggler."""

import random

import pytest

from bagua.profiler.stragglers import Arrival, Straggler, caused_ns, persistent_straggler, stragglers


@pytest.mark.parametrize("seed", range(2))
def test_against_plain_loops(seed):
    draw = random.Random(seed)
    begins = {(operation, rank): draw.randrange(10**6) for operation in range(20) for rank in range(4)}
    ends = {key: begin_ns + draw.randrange(10**6) for key, begin_ns in begins.items()}
    arrivals = [Arrival(*key, begins[key], ends[key]) for key in begins]
    draw.shuffle(arrivals)
    expected = []
    for operation in range(20):
        last = max(range(4), key=lambda rank: begins[operation, rank])
        came_ns, waited_ns = begins[operation, last], 0
        for rank in range(4):
            until_ns = ends[operation, rank] if ends[operation, rank] < came_ns else came_ns
            waited_ns = max(waited_ns, until_ns - begins[operation, rank])
        expected.append(Straggler(operation, last, came_ns, waited_ns))
    found = stragglers(arrivals)
    assert found == sorted(expected, key=lambda straggler: straggler.begin_ns)
    caused = caused_ns(found, range(5))
    assert caused[4] == 0 and sum(caused.values()) == sum(one.waited_ns for one in expected)


def test_what_the_clocks_cannot_tell_apart_has_no_straggler():
    first = Arrival("a", 0, 100, 200, 10)
    assert stragglers([first, Arrival("a", 1, 125, 200, 15)]) == []
    assert stragglers([first, Arrival("a", 1, 126, 200, 15)]) == [Straggler("a", 1, 126, 26)]
    assert stragglers([first]) == []
    one, other = (Arrival("a", rank, 100 + rank, 200, 10, clock="host") for rank in range(2))
    assert stragglers([one, other]) == [Straggler("a", 1, 101, 1)], "they read one clock"


def test_no_rank_is_named_if_ranks_wait_for_their_neighbours_only():
    """In two pairs rank 0 waits for 1, while 2 and 3 begin later together, so no rank waits for the last one."""
    times = {0: (0, 52), 1: (50, 52), 2: (59, 61), 3: (60, 61)}
    assert [one.rank for one in stragglers([Arrival("all", rank, *times[rank]) for rank in times])] == [3]
    for waiting in ({0, 1, 2, 3}, {2}):
        pairs = [Arrival("pairs", rank, *times[rank], waits_for_some=rank in waiting) for rank in times]
        assert stragglers(pairs) == []


@pytest.mark.parametrize(
    "caused, elapsed_ns, named",
    [
        ({}, 100, None),
        ({0: 0, 1: 0}, 0, None),
        ({0: 50, 1: 0}, 1000, 0),
        ({0: 9, 1: 0}, 1000, None),  # less than a hundredth of the time
        ({0: 50, 1: 26}, 1000, None),  # hardly more than another one
        ({0: 50, 1: 25, 2: 1}, 1000, 0),
    ],
)
def test_whom_to_name(caused, elapsed_ns, named):
    assert persistent_straggler(caused, elapsed_ns) == named
