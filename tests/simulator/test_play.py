"""Simulated times beside what bandwidth, latency and compute allow, computed by hand."""

from __future__ import annotations

import math

import pytest

from bagua.errors import InvalidArgument
from bagua.replay.profiles import Layer, Profile
from bagua.simulator import Link, Stragglers, rehearse

# Four layers of a million elements, whose backward takes 10 ms each, and forward 5.
WIDE = Profile("wide", "made up", tuple(Layer(f"l{i}", ((1000, 1000),), 5.0, 10.0) for i in range(4)))
TINY = Profile("tiny", "made up", (Layer("a", ((8, 8),), 5.0, 10.0),))
COMPUTE_S, BITS = 0.06, 32 * 4e6


@pytest.mark.parametrize(
    ("algorithm", "options", "share"),
    [
        ("gradient_allreduce", {}, 2 * 3 / 4),
        ("bytegrad", {}, 2 * 3 / 4 / 4),
        ("decentralized", {"topology": "shift_one"}, 1.0),
        ("local_sgd", {"sync_every": 2}, 2 * 3 / 4 / 2),
    ],
)
def test_bytes_over_a_slow_link_decide(algorithm, options, share):
    """At 100 Mbit/s a step takes what its bytes take, and what nothing hides: the first compute, and codecs."""
    rehearsed = rehearse(WIDE, algorithm, hosts=4, bucket_bytes=2**20, **options)
    simulated = rehearsed.play(Link.parse("100mbit"))
    wire_s = share * BITS / 100e6
    assert simulated.link_bytes == pytest.approx(share * BITS / 8, rel=0.01)
    assert wire_s < simulated.step_s < 1.02 * wire_s + COMPUTE_S + 0.02
    assert simulated.waited_s == pytest.approx(simulated.step_s - COMPUTE_S, abs=0.02)
    slower = rehearsed.play(Link.parse("50mbit"))
    assert slower.step_s - simulated.step_s == pytest.approx(wire_s, rel=0.05)


def test_compute_hides_a_fast_link():
    simulated = rehearse(WIDE, "gradient_allreduce", hosts=4, bucket_bytes=2**20).play(Link.parse("10gbit"))
    assert COMPUTE_S < simulated.step_s < COMPUTE_S + 0.02
    assert 0 <= simulated.waited_s < 0.02


@pytest.mark.parametrize("hosts", [2, 4, 16, 64])
def test_small_messages_take_a_latency_per_doubling(hosts):
    rehearsed = rehearse(TINY, "gradient_allreduce", hosts=hosts)
    assert [operation.what for operation in rehearsed.operations] == ["all_reduce"]
    times = [rehearsed.play(Link.parse("10gbit", latency)).step_s for latency in ("10ms", "20ms")]
    assert times[1] - times[0] == pytest.approx(math.log2(hosts) * 0.01, rel=1e-6)


def test_ranks_of_a_host_share_its_link():
    alone, crowded = (
        rehearse(WIDE, "bytegrad", hosts=4 // n, ranks_per_host=n).play(Link.parse("100mbit")) for n in (1, 2)
    )
    # Two ranks of a host each send half of what they send to the two others: 2 of 3 parts, and not 3 of 3.
    assert crowded.link_bytes / alone.link_bytes == pytest.approx(2 * 2 / 3, rel=0.05)


def test_a_straggler_is_waited_for():
    rehearsed = rehearse(WIDE, "gradient_allreduce", hosts=4)
    link = Link.parse("100gbit")
    alike, late = (rehearsed.play(link, stragglers=one) for one in (None, Stragglers(slow_rank=2, slow_factor=3.0)))
    assert late.step_s - alike.step_s == pytest.approx(2 * COMPUTE_S, rel=0.1)
    drawn = rehearsed.play(link, stragglers=Stragglers(sigma=0.2), repetitions=200)
    # The slowest of four factors of that spread is 1.23 times the usual one in the mean.
    assert 1.15 * COMPUTE_S < drawn.step_s < 1.4 * COMPUTE_S + 0.01


def test_spans_are_in_order_and_within_the_step():
    simulated = rehearse(WIDE, "gradient_allreduce", hosts=3, bucket_bytes=2**20).play(Link.parse("1gbit"))
    begins = [begin for _, begin, _ in simulated.spans]
    assert begins == sorted(begins) and len({operation.label for operation, *_ in simulated.spans}) == 4
    assert all(begin < end <= simulated.step_s for _, begin, end in simulated.spans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 1}, "hosts is 1, expected an integer of at least 2"),
        ({"hosts": 2, "steps": -1}, "steps is -1, expected an integer of at least 0"),
        ({"hosts": 2, "ranks_per_host": 0}, "ranks_per_host is 0"),
        ({"hosts": 2, "ranks_per_host": 2, "hierarchical": True}, "hierarchical=True cannot be rehearsed"),
    ],
)
def test_rehearsals_that_are_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        rehearse(TINY, "gradient_allreduce", **arguments)
    with pytest.raises(InvalidArgument, match="a group of its own, such as 'async_averaging', cannot be rehearsed"):
        rehearse(TINY, "async_averaging", hosts=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(up=0), "up is 0, expected bits per second"),
        (lambda: Link(up=1e9, latency=-1.0), "latency is -1.0, expected seconds, 0 or more"),
        (lambda: Link.parse("1gbps"), "'1gbps' is not a rate; write a number and one of kbit, mbit, gbit"),
        (lambda: Link.parse("1gbit", "5"), "'5' is not a latency"),
        (lambda: Stragglers(sigma=float("nan")), "sigma is nan"),
        (lambda: Stragglers(slow_factor=0), "slow_factor is 0"),
    ],
)
def test_networks_out_of_range(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
