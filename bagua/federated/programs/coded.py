"""Clients' parts of sums by a codec: few bytes, in the clear, with error feedback at the client.

The values that one client gives to one reduction are one message for each dtype. Integers and numbers ``[]``, such as
counts, weights and losses, travel as they are. The server decodes each client's message and adds up in float64. There
are no masks: the server sees what every client sends.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bagua import codecs
from bagua.errors import InvalidArgument
from bagua.federated.verbs.reduction import widened

_NAME_BYTES = 32


@dataclass(frozen=True)
class Coded:
    """A coding of what clients send to ``run_on``, by one of our codecs, without masks.

    Each client adds to its values what its last message at this place of the program has lost, and keeps what the new
    one loses; see ``Client``. If a run ends with an error, what clients have sent in it is lost. Only clients that are
    made by ``Client.in_the_clear`` answer.

    Args:
        codec: its name with options, such as "minmax_uint8" or "topk:k=8"; see bagua.codecs.
        error_feedback: whether clients keep what is lost. Without it codecs that drop most of a value, such as topk
            and onebit, leave out for good what they do not send.
        seed: 0 to 2**64 - 1, what codecs that round at random draw from, with the number of the client and the place:
            another one for each run. None for other codecs.

    Raises:
        InvalidArgument: no such codec, one that rounds at random without a seed, or one whose residuals would grow.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> y = torch.linspace(-1, 1, 3000).expand(2, 3000)
        >>> graph = federated.trace(federated.program(lambda y: federated.reduce_mean(y), clients=2), y)
        >>> clients = federated.IsolatedClients([federated.Client.in_the_clear(y=row) for row in y])
        >>> mean = federated.run_on(clients, graph, coding=federated.Coded("minmax_uint8"))
        >>> bool((mean - y[0]).abs().max() < 0.005), clients.bytes_up < 3400
        (True, True)
    """

    codec: str
    error_feedback: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        codec = codecs.get(self.codec)
        if self.error_feedback:
            codec.check_error_feedback(True)
        if self.seed is not None:
            codec.with_seed(self.seed)
        elif codec.is_random:
            raise InvalidArgument(
                f"Coded({self.codec!r}) rounds at random: give it a seed, another one for each run, or take a codec "
                "that does not"
            )

    def messages_of(self, reductions: Sequence[Sequence[Any]]) -> list[Message]:
        """Returns the messages of a client in a round.

        Args:
            reductions: the values of each, with the shapes and dtypes that one client has.

        Raises:
            InvalidArgument: a value of a dtype that the codec does not encode.
        """
        codec, begin = codecs.get(self.codec), 0
        found: list[Message] = []
        for values in reductions:
            coded: dict[torch.dtype, list[int]] = {}
            rest = []
            for index, value in enumerate(values, begin):
                if is_coded(self.codec, value):
                    coded.setdefault(value.dtype, []).append(index)
                else:
                    rest.append(Message((index,), tuple(value.shape), value.dtype, False))
            for dtype, indices in coded.items():
                numel = sum(torch.Size(values[index - begin].shape).numel() for index in indices)
                size = (codec.wire_bytes(numel, dtype),)
                found.append(Message(tuple(indices), size, torch.uint8, True))
            found += rest
            begin += len(values)
        return found


def is_coded(codec: str, value: Any) -> bool:
    """Returns True for a value that the codec encodes, False for integers and numbers, which travel as they are.

    Raises:
        InvalidArgument: for a dtype that the codec does not encode.
    """
    is_number = not len(value.shape) or not torch.Size(value.shape).numel()
    if is_number or not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False
    dtypes = codecs.get(codec).dtypes
    if value.dtype not in dtypes:
        raise InvalidArgument(
            f"{value.dtype} of shape {list(value.shape)} by the codec {codec!r}, expected one of "
            f"{', '.join(map(str, dtypes))}: convert it in the program"
        )
    return True


class Message(NamedTuple):
    """A tensor that a client sends in a round.

    Attributes:
        indices: of the values in it, among those of the round's reductions.
        shape, dtype: of the tensor.
        is_coded: whether it is a codec's.
    """

    indices: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_coded: bool


class Sender:
    """One client's side of a run.

    Args:
        coding: of the values; equal at all clients and the server.
    """

    def __init__(self, coding: Coded) -> None:
        self.coding, self.index = coding, -1
        self.name = secrets.token_bytes(_NAME_BYTES)

    def state(self) -> dict[str, Any]:
        """Plain values for ``restore``."""
        return {"name": self.name, "index": self.index}

    @classmethod
    def restore(cls, coding: Coded, state: dict[str, Any]) -> Sender:
        """The same side again."""
        restored = cls(coding)
        restored.name, restored.index = state["name"], state["index"]
        return restored

    def join(self, names: Sequence[bytes]) -> None:
        """Takes the client's number from the names of all; it stays -1 if its own is not among them."""
        self.index = list(names).index(self.name) if self.name in names else -1

    def encode(
        self,
        values: Sequence[torch.Tensor],
        sizes: Sequence[int],
        number: int,
        residuals: MutableMapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Returns the messages of a round, on the CPU.

        Args:
            values: of all reductions, one after the other.
            sizes: how many of them each reduction has.
            number: of the round.
            residuals: float32, by round and message: read and written.

        Raises:
            InvalidArgument: a value is not finite, or its code is not.
        """
        codec, rest = codecs.get(self.coding.codec), list(values)
        reductions = [[rest.pop(0) for _ in range(size)] for size in sizes]
        sent = []
        for position, message in enumerate(self.coding.messages_of(reductions)):
            if not message.is_coded:
                sent.append(values[message.indices[0]].detach().cpu())
                self._check_finite(sent[-1])
                continue
            value = torch.cat([values[index].detach().reshape(-1).cpu() for index in message.indices])
            where = f"{number} {position}"
            wide = widened(value)
            if self.coding.error_feedback and where in residuals:
                wide = wide + residuals[where]
            rounded = wide.to(value.dtype)
            seed = self.coding.seed
            key = None if seed is None else codec.with_seed(seed, number, position, self.index).seed
            encoded = codec.encode(rounded, key=key)
            decoded = codec.decode(encoded, rounded.numel(), rounded.dtype)
            self._check_finite(decoded)
            if self.coding.error_feedback:
                residuals[where] = wide - decoded
            sent.append(encoded)
        return sent

    def _check_finite(self, value: torch.Tensor) -> None:
        if not value.isfinite().all():
            raise InvalidArgument(
                f"a client's value is not finite, or is not in the range of the codec {self.coding.codec!r}"
            )


def add_up(
    coding: Coded, sent: Mapping[int, Any], reductions: Sequence[Sequence[Any]], likes: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The server's side: the sums of what the clients sent.

    Args:
        sent: the messages of a round, by client.
        reductions: the values of each, as one client has them.
        likes: tensors of the shapes and dtypes of the sums.

    Raises:
        InvalidArgument: a client sent something else, or values that are not finite.
    """
    codec, values = codecs.get(coding.codec), [value for reduction in reductions for value in reduction]
    expected = coding.messages_of(reductions)
    totals = [torch.zeros(like.shape, dtype=_sum_dtype(like.dtype), device="cpu") for like in likes]
    for client, tensors in sorted(sent.items()):
        tensors = tensors if isinstance(tensors, list) else [tensors]
        got = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in tensors]
        if got != [(message.shape, message.dtype) for message in expected]:
            raise InvalidArgument(
                f"client {client} sent {got} for a sum, expected {[(one.shape, one.dtype) for one in expected]}"
            )
        for message, tensor in zip(expected, tensors, strict=True):
            numels = [totals[index].numel() for index in message.indices]
            decoded = tensor.reshape(-1)
            if message.is_coded:
                decoded = codec.decode(tensor, sum(numels), values[message.indices[0]].dtype)
            if not decoded.isfinite().all():
                raise InvalidArgument(f"client {client} sent values for a sum that are not finite, so there is no sum")
            for index, part in zip(message.indices, decoded.split(numels), strict=True):
                totals[index] += part.reshape(totals[index].shape)
    return [total.to(like.dtype) for total, like in zip(totals, likes, strict=True)]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
