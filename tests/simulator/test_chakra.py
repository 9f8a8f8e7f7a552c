"""Chakra traces, read back by the rules of protobuf's wire format."""

from __future__ import annotations

import itertools

import pytest

from bagua.replay.profiles import Layer, Profile
from bagua.simulator import rehearse

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
WIDE = Profile("wide", "made up", tuple(Layer(f"l{i}", ((300, 300),), 5.0, 10.0) for i in range(3)))


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields(data):
    """Returns field number and value of a message, in their order."""
    found, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        else:
            assert key & 7 == 0
        found.append((key >> 3, value))
    return found


def nodes_of(path):
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        length, at = varint(data, at)
        messages.append(fields(data[at : at + length]))
        at += length
    assert messages[0] == [(1, b"0.0.4")]
    nodes = []
    for message in messages[1:]:
        attributes = {}
        for name, (_, value) in (fields(one) for number, one in message if number == 10):
            attributes[name[1].decode()] = value
        plain = {number: value for number, value in message if number not in (5, 10)}
        after = [value for number, value in message if number == 5]
        nodes.append({"id": plain[1], "kind": plain[3], "micros": plain.get(7), "after": after, **attributes})
    return nodes


def test_collectives_come_after_the_compute_that_they_wait_for(tmp_path):
    rehearsed = rehearse(WIDE, "bytegrad", hosts=3, bucket_bytes=2**18)
    paths = rehearsed.save_chakra(tmp_path / "trace")
    assert [path.name for path in paths] == ["trace.0.et", "trace.1.et", "trace.2.et"]
    nodes = nodes_of(paths[0])
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    assert all(earlier < node["id"] for node in nodes for earlier in node["after"])
    collectives = [node for node in nodes if node["kind"] == COLLECTIVE]
    assert [node["comm_type"] for node in collectives] == [0, 0, 0]
    assert [node["comm_size"] for node in collectives] == pytest.approx([90000] * 3, rel=0.02)  # 8 bits each
    computed_us = sum(node["micros"] for node in nodes if node["kind"] == COMPUTE)
    assert computed_us > 45_000
    for previous, following in itertools.pairwise(collectives):
        assert previous["id"] in following["after"]  # the worker's order
    assert nodes[-1]["kind"] == COMPUTE or collectives[-1]["id"] in nodes[-1]["after"]


@pytest.mark.parametrize("topology", ["ring", "shift_one", "exponential"])
def test_what_one_rank_sends_another_receives(tmp_path, topology):
    rehearsed = rehearse(WIDE, "decentralized", hosts=4, topology=topology)
    ends = {SEND: [], RECEIVE: []}
    for rank, path in enumerate(rehearsed.save_chakra(tmp_path / "trace")):
        for node in nodes_of(path):
            if node["kind"] in ends:
                ends[node["kind"]].append(tuple(node[f"comm_{name}"] for name in ("src", "dst", "tag", "size")))
                assert node["comm_src" if node["kind"] == SEND else "comm_dst"] == rank
    assert sorted(ends[SEND]) == sorted(ends[RECEIVE]) and len(set(ends[SEND])) == len(ends[SEND]) > 0
    assert sum(size for *_, size in ends[SEND]) == (2 if topology == "ring" else 1) * 4 * 3 * 360_000
