"""Candidates are predicted as the simulator plays them, each on one rank."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

import bagua
from bagua import simulator
from bagua.choice.candidates import BASE, RISKS, Candidate, candidates
from bagua.choice.links import Network
from bagua.choice.prediction import predict
from bagua.replay.profiles import Layer, Profile
from tests.conformance.training import process_group

PROFILE = Profile("two", "made up", (Layer("a", ((500, 200),), 2.0, 6.0), Layer("b", ((250, 8),), 1.0, 2.0)))
NETWORK = Network(4, 1, simulator.Link.parse("100mbit", "1ms"), slowdown=0.0)  # processor time is left out
ALL = candidates("R3")


def _predicted(rank, world_size, until_s, network, profile):
    with process_group():
        torch.manual_seed(rank)
        torch.set_num_threads(2)
        before = torch.random.get_rng_state()
        with torch.autocast("cpu"):
            rows = predict(bagua.get_default_group(), network, profile, ALL, until_s)
        assert torch.equal(before, torch.random.get_rng_state())
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        return rows


def test_predictions_are_those_of_the_simulator(pool2):
    expected = []
    for one in ALL:
        played = simulator.rehearse(PROFILE, one.algorithm, hosts=4, **one.options).play(NETWORK.link, slowdown=0.0)
        expected.append(played.step_s)
    for rows in pool2.run(_predicted, args=(math.inf, NETWORK, PROFILE)):
        assert [row.candidate for row in rows] == [str(one) for one in ALL]
        assert [row.predicted_s for row in rows] == pytest.approx(expected)


def test_the_hosts_share_the_candidates_and_end_in_time(pool_of_two_nodes):
    """Each of two hosts has time for its first one only."""
    env = {"BAGUA_SOCKET_IFNAME": "lo"}
    (first, *others) = pool_of_two_nodes.run(_predicted, args=(-math.inf, NETWORK, PROFILE), env=env)
    assert all(rows == first for rows in others)
    assert [row.predicted_s is not None for row in first] == [True, True] + [False] * (len(ALL) - 2)
    assert {row.note for row in first[2:]} == {"not rehearsed, as there was no time"}


def test_nothing_is_rehearsed_beyond_what_is_near_compute_alone(pool2):
    fast = Network(4, 1, simulator.Link.parse("100gbit"), slowdown=0.0)
    rows = pool2.run(_predicted, args=(math.inf, fast, PROFILE))[0]
    assert rows[0].predicted_s == pytest.approx(0.011, rel=0.05)
    assert {row.note for row in rows[1:]} == {f"not rehearsed, as {BASE} is near compute alone"}


def test_classes_contain_those_below_them():
    sets = [{str(one) for one in candidates(risk)} for risk in RISKS]
    assert all(below < above for below, above in itertools.pairwise(sets))
    assert sets[0] == {BASE}
    assert all(str(candidates(risk)[0]) == BASE for risk in RISKS)
    for one in ALL:
        weights = bagua.algorithms.get(one.algorithm).exchanges == "weights"
        assert weights == (str(one) not in sets[2])


def test_periods_are_those_of_the_algorithms():
    assert [Candidate(name).period for name in (BASE, "local_sgd", "diloco")] == [1, 4, 30]
    assert Candidate("local_sgd", {"sync_every": 16}).period == 16


def test_memory_is_what_the_measured_table_says():
    """docs/memory.md has the peak at four ranks; a candidate may need no more than it declares, in units of G."""
    table = (Path(__file__).parents[2] / "docs/memory.md").read_text().splitlines()
    for one in ALL:
        row = next((line.split("|") for line in table if line.startswith(f"| `{one.algorithm}` ")), None)
        assert row is not None, one
        peak = float(row[4].strip().removesuffix(" G"))
        assert peak <= one.memory + 0.1, one
