"""The offset between the ranks' clocks: right to within what it says, for clocks that are wrong on purpose."""

import itertools
import time

from bagua.profiler import clock_sync
from bagua.testing import world
from tests.conformance.training import process_group
from tests.distributed.worlds import in_turns

HOUR_NS = 3_600_000_000_000


@in_turns("seed, offset_ns", range(4), [0, 1, -HOUR_NS, 5 * HOUR_NS])
def test_the_truth_is_within_the_uncertainty(seed, offset_ns):
    """Whatever the ways there and back take: here up to a millisecond each, unequal."""
    import random

    draw = random.Random(seed)
    now = 10**12

    def clock():
        return now

    def ask():
        nonlocal now
        now += draw.randrange(1_000_000)
        answer = now + offset_ns
        now += draw.randrange(1_000_000)
        return answer

    found = clock_sync.estimate(ask, clock, rounds=20)
    assert abs(found.offset_ns - offset_ns) <= found.uncertainty_ns <= 1_000_000


def test_the_shortest_round_counts():
    ticks = itertools.chain([0, 1000], [2000, 2010], [3000, 3900])
    answers = iter([999_000, 7005, 999_000])
    assert clock_sync.estimate(lambda: next(answers), lambda: next(ticks), 3) == clock_sync.ClockOffset(5000, 5, 7005)


def _measure(group, offsets_ns):
    return clock_sync.measure(group, lambda: time.monotonic_ns() + offsets_ns[group.rank])


def test_threads_on_imitated_nodes():
    """Nodes with clocks of their own: each rank has the offset of its node."""
    offsets_ns = [0, 0, HOUR_NS, HOUR_NS, -7_000_000]
    found = world(5, _measure, offsets_ns, nodes=[0, 0, 1, 1, 2])
    assert [(one.offset_ns, one.uncertainty_ns) for one in found[:2]] == [(0, 0), (0, 0)]
    assert found[2] == found[3]
    for one, offset_ns in zip(found[2:], offsets_ns[2:], strict=True):
        assert 0 < one.uncertainty_ns < 1_000_000_000
        assert abs(one.offset_ns + offset_ns) <= one.uncertainty_ns
    assert len({one.measurement for one in found}) == 1 and found[0].measurement


def test_measurements_are_told_apart():
    first, second = (world(2, _measure, [0, 0])[1].measurement for _ in range(2))
    assert first != second


def _over_tcp(rank, world_size):
    import bagua

    with process_group():
        group = bagua.get_default_group()
        behind_ns = HOUR_NS if rank >= 2 else 0
        before = group.bytes_sent
        found = clock_sync.measure(group, lambda: time.monotonic_ns() - behind_ns)
        assert group.bytes_sent - before < 10_000
        bagua.barrier()  # the group works on
        return found.offset_ns - behind_ns, found.uncertainty_ns


def test_over_tcp(pool_of_two_nodes):
    measured = pool_of_two_nodes.run(_over_tcp, env={"BAGUA_SOCKET_IFNAME": "lo"})
    assert measured[:2] == [(0, 0), (0, 0)]
    for error_ns, uncertainty_ns in measured[2:]:
        assert abs(error_ns) <= uncertainty_ns < 100_000_000


def _twice(rank, world_size):
    import bagua

    with process_group():
        return [clock_sync.measure(bagua.get_default_group()) for _ in range(2)]


def test_leaders_that_come_early_wait_their_turn(capfd):
    """Three nodes, one asked after the other, twice: no connection is refused on the way."""
    from bagua.testing import spawn

    measured = spawn(_twice, 3, nodes=3, env={"BAGUA_SOCKET_IFNAME": "lo"})
    for first, second in measured:
        assert first.measurement != second.measurement
        assert abs(first.offset_ns) <= first.uncertainty_ns and abs(second.offset_ns) <= second.uncertainty_ns
    assert "connection of rank" not in capfd.readouterr().err
