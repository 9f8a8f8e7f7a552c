"""Who came last: by an oracle in plain loops, and the rules for whom to name."""

import random

import pytest

from bagua.stragglers import Arrival, Latecomer, caused_ns, latecomers, straggler


@pytest.mark.parametrize("seed", range(5))
def test_against_plain_loops(seed):
    draw = random.Random(seed)
    times = {(operation, rank): draw.randrange(10**6) for operation in range(20) for rank in range(4)}
    arrivals = [Arrival(operation, rank, begin_ns) for (operation, rank), begin_ns in times.items()]
    draw.shuffle(arrivals)
    expected = []
    for operation in range(20):
        by_rank = [times[operation, rank] for rank in range(4)]
        last = by_rank.index(max(by_rank))
        expected.append(Latecomer(operation, last, max(by_rank), max(by_rank) - min(by_rank)))
    found = latecomers(arrivals)
    assert found == sorted(expected, key=lambda latecomer: latecomer.begin_ns)
    caused = caused_ns(found, range(5))
    assert caused[4] == 0 and sum(caused.values()) == sum(one.late_ns for one in expected)


def test_what_the_clocks_cannot_tell_is_left_out():
    close = [Arrival("a", 0, 100, 10), Arrival("a", 1, 125, 15)]
    assert latecomers(close) == []
    assert latecomers([close[0], Arrival("a", 1, 126, 15)]) == [Latecomer("a", 1, 126, 26)]
    assert latecomers([close[0]]) == []


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
    assert straggler(caused, elapsed_ns) == named
