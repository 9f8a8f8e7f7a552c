"""The link of a host, from messages whose times are those of a token bucket."""

from __future__ import annotations

import types

import pytest
import torch

import bagua
from bagua.choice import links
from tests.conformance.training import process_group


class _Bucket:
    """A ring whose messages take what a token bucket takes."""

    def __init__(self, rate, burst, latency):
        self.rate, self.burst, self.latency = rate, burst, latency
        self.tokens = burst

    def sleep(self, seconds):
        self.tokens = min(self.burst, self.tokens + seconds * self.rate)

    def agreed_seconds(self, num_bytes):
        from_burst = min(self.tokens, num_bytes)
        self.tokens -= from_burst
        return (num_bytes - from_burst) / self.rate + self.latency


@pytest.mark.parametrize(
    ("rate", "burst", "saved"),
    [
        (1e6, 512 << 10, 62_500),  # in a rest of a sixteenth of a second
        (12.5e6, 512 << 10, 512 << 10),
        (12.5e6, 4 << 20, 781_250),
        (125e6, 512 << 10, 0),  # it is less than a fifth of a message
        (10e9, 0, 0),
    ],
)
def test_rate_and_burst(monkeypatch, rate, burst, saved):
    ring = _Bucket(rate, burst, latency=1e-4)
    monkeypatch.setattr(links, "time", types.SimpleNamespace(sleep=ring.sleep))
    found, found_saved = links._rate(ring, 1e-4, 0.5)
    assert found == pytest.approx(rate, rel=0.01)
    assert found_saved == pytest.approx(saved, rel=0.01)


def _measured(rank, world_size):
    with process_group():
        group = bagua.get_default_group()
        network = links.measure_network(group, torch.device("cpu"), 0.2)
        pair = links.measure_pair(group, rank ^ 1, rank % 2 == 0)
        return network, pair


def test_ranks_of_one_host_count_as_hosts(pool2):
    first, second = pool2.run(_measured)
    assert first[0] == second[0]
    network, pair = first
    assert (network.hosts, network.ranks_per_host) == (2, 1)
    assert 1e8 < network.link.up < 1e13
    assert 0 < network.link.latency < 0.1
    assert 1 <= network.slowdown < 50
    assert pair.latency_p50_s <= pair.latency_p99_s
    assert pair.rate_least <= pair.rate_p50


def test_hosts_with_several_ranks(pool_of_two_nodes):
    for network, _ in pool_of_two_nodes.run(_measured, env={"BAGUA_SOCKET_IFNAME": "lo"}):
        assert (network.hosts, network.ranks_per_host) == (2, 2)
        assert network.link.local != network.link.up
