"""The messages of run_on and its clients, as bytes from which nothing is run.

A message is the length of its head in 4 bytes, the head, and the bytes of its tensors and byte strings one after the
other. The head is text (distributed/plain_data.py), in which these are replaced by their types and shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua.distributed import plain_data
from bagua.errors import InvalidArgument
from bagua.federated.programs.coded import Coded
from bagua.federated.programs.fixed_point import FixedPoint

_LENGTH_BYTES = 4


class _Tensor(tuple):
    """dtype and shape of a tensor in a head."""

    __slots__ = ()


class _Bytes(tuple):
    """The length of a byte string in a head."""

    __slots__ = ()


_KINDS = (_Tensor, _Bytes)


def write(message: dict[str, Any]) -> bytes:
    """Returns the bytes of a message: of tensors, bytes, numbers, texts, and lists, tuples and dicts of them."""
    parts: list[bytes] = []

    def take_out(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            parts.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
            return _Tensor((leaf.dtype, list(leaf.shape)))
        if isinstance(leaf, bytes):
            parts.append(leaf)
            return _Bytes((len(leaf),))
        return leaf

    head = plain_data.dumps(pytree.tree_map(take_out, message), _KINDS)
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *parts])


def read(data: bytes) -> dict[str, Any]:
    """Returns the message.

    Raises:
        InvalidArgument: the bytes are none.
    """
    if not isinstance(data, bytes):
        raise InvalidArgument(f"a message that is a {type(data).__name__}, expected bytes, as Client.answer returns")
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")

    def put_back(leaf: Any) -> Any:
        nonlocal begin
        if isinstance(leaf, _Bytes):
            (length,) = leaf
            begin += length
            return data[begin - length : begin]
        if isinstance(leaf, _Tensor):
            dtype, shape = leaf
            length = math.prod(shape) * dtype.itemsize
            begin += length
            if length == 0:
                return torch.empty(shape, dtype=dtype, device="cpu")
            return torch.frombuffer(bytearray(data[begin - length : begin]), dtype=dtype).reshape(shape)
        return leaf

    try:
        head = plain_data.loads(data[_LENGTH_BYTES:begin], _KINDS)
        message = pytree.tree_map(put_back, head, is_leaf=lambda one: isinstance(one, _KINDS))
        is_whole = isinstance(message, dict) and begin == len(data)
    except Exception as error:  # of whatever the bytes are instead
        raise InvalidArgument(f"{len(data)} bytes that are no message of run_on: {error}") from None
    if not is_whole:
        raise InvalidArgument(f"{len(data)} bytes that are no message of run_on, or not all of one")
    return message


# ---- the messages of a run


Coding = FixedPoint | Coded


def opening(
    session: bytes,
    graph: bytes,
    turns: Sequence[tuple],
    coding: Coding,
    threshold: int | None = None,
    deltas: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The first request, which each client answers by its public key, or with a threshold its public keys.

    Where sums are in the clear it answers by a name that it draws, as ``key``.
    """
    of_sums = dataclasses.astuple(coding)
    request = {"what": "open", "session": session, "graph": graph, "turns": list(map(tuple, turns)), "coding": of_sums}
    if deltas is not None:
        request["deltas"] = deltas
    return request if threshold is None else {**request, "threshold": threshold}


def coding_of(request: dict[str, Any]) -> Coding:
    """The coding that an opening says."""
    fields = request["coding"]
    return Coded(*fields) if isinstance(fields[0], str) else FixedPoint(*fields)


def round_request(session: bytes, number: int, values: Sequence[torch.Tensor], keys: Sequence[bytes]) -> dict[str, Any]:
    """The request of a round, which each client answers by ``masked``; the keys come with the first."""
    request = {"what": "round", "session": session, "number": number, "values": list(values)}
    return request if number else {**request, "keys": list(keys)}


def key(public_key: bytes) -> dict[str, Any]:
    """A client's answer to the opening."""
    return {"key": public_key}


def keys(public_keys: Sequence[bytes]) -> dict[str, Any]:
    """A client's answer to the opening with a threshold."""
    return {"keys": list(public_keys)}


def masked(codes: torch.Tensor, coding: FixedPoint, index: int) -> dict[str, Any]:
    """A client's answer in a round, its codes in their bits."""
    return {"masked": coding.pack(codes), "index": index}


def in_the_clear(tensors: Sequence[torch.Tensor], index: int) -> dict[str, Any]:
    """A client's answer in a round of a run in a codec."""
    return {"coded": list(tensors), "index": index}


def share(session: bytes, keys: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    """The request for shares, with a threshold."""
    return {"what": "share", "session": session, "keys": [list(of_one) for of_one in keys]}


def shares(encrypted: Sequence[bytes], index: int) -> dict[str, Any]:
    """A client's answer to ``share``."""
    return {"index": index, "shares": list(encrypted)}


def reveal(session: bytes, number: int, survivors: Sequence[int]) -> dict[str, Any]:
    """The request after a round, with a threshold."""
    return {"what": "reveal", "session": session, "number": number, "survivors": list(survivors)}


def revealed(of_clients: dict[int, bytes], index: int) -> dict[str, Any]:
    """A client's answer to ``reveal``: a share of a secret of each client."""
    return {"index": index, "revealed": of_clients}
