"""Rehearsed steps as Chakra execution traces, which other simulators read: a file of protobuf messages for each rank.

Format: https://github.com/mlcommons/chakra, schema/protobuf/et_def.proto; each message behind its length as a varint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7  # NodeType
COLLECTIVES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}


@dataclasses.dataclass(frozen=True)
class Node:
    """An entry of a rank's program: what it computes, or an operation.

    Attributes:
        name: for people.
        after: the indices of the nodes that end before it begins.
        seconds: of computing; None for an operation.
        what: the collective; "" for messages to neighbours.
        num_bytes: of the collective, or of each message.
        targets, sources: the neighbours' ranks.
    """

    name: str
    after: Sequence[int]
    seconds: float | None = None
    what: str = ""
    num_bytes: int = 0
    targets: Sequence[int] = ()
    sources: Sequence[int] = ()


def encoded(nodes: Sequence[Node], rank: int) -> bytes:
    """Returns the trace of a rank; messages to and from neighbours become nodes of their own."""
    messages = [_text(1, "0.0.4")]
    ends: list[list[int]] = []  # the ids of each node
    next_id = 0
    for tag, node in enumerate(nodes):
        after = [one for index in node.after for one in ends[index]]
        about: list[tuple[int, bytes]] = []  # kind, attributes
        if node.seconds is not None:
            about = [(_COMPUTE, _attribute("is_cpu_op", 27, 0))]
        elif node.what in COLLECTIVES:
            size = _attribute("comm_type", 9, COLLECTIVES[node.what]) + _attribute("comm_size", 9, node.num_bytes)
            about = [(_COLLECTIVE, _attribute("is_cpu_op", 27, 0) + size)]
        else:
            ends_of = [(_SEND, rank, target) for target in node.targets]
            ends_of += [(_RECEIVE, source, rank) for source in node.sources]
            about = [
                (
                    kind,
                    _attribute("is_cpu_op", 27, 0)
                    + _attribute("comm_src", 7, source)
                    + _attribute("comm_dst", 7, target)
                    + _attribute("comm_tag", 7, tag)
                    + _attribute("comm_size", 9, node.num_bytes),
                )
                for kind, source, target in ends_of
            ]
        ends.append([])
        for kind, attributes in about:
            ids = b"".join(_number(5, one) for one in after)
            micros = b"" if node.seconds is None else _number(7, round(1e6 * node.seconds))
            messages.append(_number(1, next_id) + _text(2, node.name) + _number(3, kind) + ids + micros + attributes)
            ends[-1].append(next_id)
            next_id += 1
    return b"".join(_varint(len(message)) + message for message in messages)


def _varint(value: int) -> bytes:
    groups = [value & 127]
    while value := value >> 7:
        groups[-1] |= 128
        groups.append(value & 127)
    return bytes(groups)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(name: str, field: int, value: int) -> bytes:
    return _bytes(10, _text(1, name) + _number(field, value))
