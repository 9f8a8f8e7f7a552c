"""Simulated times beside what bandwidth, latency and compute allow, computed by hand.

Without the processor's time (``slowdown=0``), which is measured, they are exact.
"""

from __future__ import annotations

import time

import pytest

from bagua.errors import InvalidArgument
from bagua.replay.cases import PROFILES
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
    simulated = rehearsed.play(Link.parse("100mbit"), slowdown=0)
    wire_s = share * BITS / 100e6
    assert simulated.link_bytes == pytest.approx(share * BITS / 8, rel=0.01)
    assert wire_s < simulated.step_s < 1.02 * wire_s + COMPUTE_S
    assert simulated.waited_s == pytest.approx(simulated.step_s - COMPUTE_S, rel=1e-6)
    slower = rehearsed.play(Link.parse("50mbit"), slowdown=0)
    assert slower.step_s - simulated.step_s == pytest.approx(wire_s, rel=0.01)
    assert rehearsed.play(Link.parse("100mbit")).step_s > simulated.step_s


def test_compute_hides_a_fast_link():
    rehearsed = rehearse(WIDE, "gradient_allreduce", hosts=4, bucket_bytes=2**20)
    simulated = rehearsed.play(Link.parse("10gbit"), slowdown=0)
    last_s = 1.5 * 32e6 / 10e9  # the bucket of the first layer, which is ready last
    assert simulated.step_s == pytest.approx(COMPUTE_S + last_s, rel=0.05)
    assert simulated.waited_s == pytest.approx(last_s, rel=0.5)


@pytest.mark.parametrize(("hosts", "latencies"), [(2, 1), (3, 3), (4, 2), (12, 5), (16, 4), (64, 6), (1000, 11)])
def test_small_messages_take_a_latency_per_doubling(hosts, latencies):
    """And two more where the ranks are no power of two: the first ones hand values to their neighbours, and back."""
    rehearsed = rehearse(TINY, "gradient_allreduce", hosts=hosts)
    assert [operation.what for operation in rehearsed.operations] == ["all_reduce"]
    times = [rehearsed.play(Link.parse("10gbit", latency), slowdown=0).step_s for latency in ("10ms", "20ms")]
    assert times[1] - times[0] == pytest.approx(latencies * 0.01, rel=1e-6)


def test_ranks_of_a_host_share_its_link():
    alone, crowded = (
        rehearse(WIDE, "bytegrad", hosts=4 // n, ranks_per_host=n).play(Link.parse("100mbit"), slowdown=0)
        for n in (1, 2)
    )
    # Two ranks of a host each send half of what they send to the two others: 2 of 3 parts, and not 3 of 3.
    assert crowded.link_bytes / alone.link_bytes == pytest.approx(2 * 2 / 3, rel=0.05)


def test_a_straggler_is_waited_for():
    rehearsed = rehearse(WIDE, "gradient_allreduce", hosts=4)
    link = Link.parse("100gbit")
    alike, late = (
        rehearsed.play(link, stragglers=one, slowdown=0) for one in (None, Stragglers(slow_rank=2, slow_factor=3.0))
    )
    assert late.step_s - alike.step_s == pytest.approx(2 * COMPUTE_S, rel=0.02)
    drawn = rehearsed.play(link, stragglers=Stragglers(sigma=0.2), repetitions=200, slowdown=0)
    # The slowest of four factors of that spread is 1.23 times the usual one in the mean.
    assert 1.15 * COMPUTE_S < drawn.step_s < 1.4 * COMPUTE_S


@pytest.mark.parametrize("overlap_steps", [0, 1, 5])
def test_an_exchange_that_overlaps_is_waited_for(overlap_steps):
    """Every tenth step 6 bytes per element leave; compute hides what fits into the steps that follow."""
    rehearsed = rehearse(WIDE, "diloco", hosts=4, sync_every=10, overlap_steps=overlap_steps)
    wire_s = 1.5 * BITS / 100e6
    hidden_s = min(wire_s, overlap_steps * COMPUTE_S)
    step_s = [rehearsed.play(Link.parse("100mbit"), repetitions=n, slowdown=0).step_s for n in (1, 3)]
    assert step_s[0] == pytest.approx(COMPUTE_S + (wire_s - hidden_s) / 10, rel=0.01)
    assert step_s[1] == pytest.approx(step_s[0], rel=1e-6)


@pytest.mark.parametrize("algorithm", ["choco", "low_precision_decentralized"])
def test_gossip_waits_for_neighbours_alone(algorithm):
    rehearsed = rehearse(WIDE, algorithm, hosts=8)
    assert {operation.topology for operation in rehearsed.operations} == {"ring"}
    late = rehearsed.play(Link.parse("100gbit"), stragglers=Stragglers(slow_rank=3, slow_factor=4.0), slowdown=0)
    # In a long run all come to its pace. In the second step four wait for what it takes longer, and not seven.
    assert late.waited_s == pytest.approx(4 / 8 * 3 * COMPUTE_S, rel=0.02)


def test_small_tensors_of_pairs_on_one_host_do_not_leave_it():
    link = Link.parse("10gbit", "10ms")
    one, two = (
        rehearse(TINY, "gradient_allreduce", hosts=2, ranks_per_host=n).play(link, slowdown=0).step_s for n in (1, 4)
    )
    assert two - one == pytest.approx(0, abs=1e-4)


def test_spans_are_in_order_and_within_the_step():
    simulated = rehearse(WIDE, "gradient_allreduce", hosts=3, bucket_bytes=2**20).play(Link.parse("1gbit"))
    begins = [begin for _, begin, _ in simulated.spans]
    assert begins == sorted(begins) and len({operation.label for operation, *_ in simulated.spans}) == 4
    assert all(begin < end <= simulated.step_s for _, begin, end in simulated.spans)


@pytest.mark.timed
def test_a_thousand_ranks_take_seconds():
    begin = time.perf_counter()
    profile = Profile.load(PROFILES / "vgg16.json")
    rehearse(profile, "gradient_allreduce", hosts=1000).play(Link.parse("10gbit", "0.1ms"))
    assert time.perf_counter() - begin < 10


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
    with pytest.raises(InvalidArgument, match="warmup_steps is 9, but what follows the warm-up is rehearsed"):
        rehearse(TINY, "diloco", hosts=2, warmup_steps=9)
    with pytest.raises(InvalidArgument, match="topology 'shift_one' leaves one of 3 ranks out in each step"):
        rehearse(TINY, "decentralized", hosts=3, topology="shift_one")
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
