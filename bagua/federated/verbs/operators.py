"""The part of the verbs that crosses ranks, with its derivatives and its rule under vmap: what makes programs closed.

A verb is a part that torch differentiates by itself (an expansion over this rank's clients, a sum over them) and one of
these operators over all tensors of a pytree, which are elementwise in this rank's view:

    operator      computes                     of a tangent     of a cotangent
    broadcast     the values themselves        broadcast        reduce_sum
    reduce_sum    their sums over ranks        reduce_sum       broadcast
    reduce_mean   those, by all clients        reduce_mean      broadcast(cotangent / clients)

So the cotangents of what the clients share add up first on each rank, then over the ranks.

linear.py makes each of them of one rule. An operator is given the names of its values, which the ranks compare.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch

from bagua.errors import InvalidArgument
from bagua.federated.verbs.linear import Linear, define
from bagua.federated.verbs.placement import placement_of
from bagua.federated.verbs.reduction import sum_over_ranks

NAMESPACE = "bagua_federated"
Tensors = list[torch.Tensor]

_library = torch.library.Library(NAMESPACE, "DEF")
_recorded: contextvars.ContextVar[Record | None] = contextvars.ContextVar("bagua_verbs", default=None)


class Record(list[str]):
    """The names of verbs that have run, and their bytes.

    Attributes:
        bytes_down: of what the server has sent to each client.
        bytes_up: of what each client has sent.
    """

    bytes_down = 0
    _up = Fraction()

    @property
    def bytes_up(self) -> int:
        return int(self._up)

    def add(self, *, down: int = 0, up: int | Fraction = 0) -> None:
        """Counts bytes; negative ones where a codec sends less than the values that a verb has counted.

        A part of the clients counts that part of a client's bytes.
        """
        self.bytes_down += down
        self._up += up


@contextmanager
def record() -> Iterator[Record]:
    """The names of the verbs that run inside, in their order, those of derivatives too, and the bytes of a client.

    Bytes do not depend on the number of ranks: they are those of the values in their own dtypes, of the messages of
    ``Quantize`` and of the fixed point numbers of ``SecureSum``. Every verb that runs counts; ``federated.run_on``
    sends a value once that is broadcast twice, and nothing for results that are not used, nor constants.

    Example:
        >>> from bagua import federated
        >>> @federated.program(clients=3)
        ... def loss(x, y):
        ...     return federated.reduce_mean(federated.broadcast(x) * y)
        >>> with federated.record() as verbs:
        ...     gradient = torch.func.grad(loss)(torch.tensor(1.0), torch.ones(3))
        >>> verbs
        ['broadcast', 'reduce_mean', 'broadcast', 'reduce_sum']
        >>> verbs.bytes_down, verbs.bytes_up
        (8, 8)
    """
    verbs, outer = Record(), _recorded.get()
    token = _recorded.set(verbs)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # or a device's backward would not see the list
            yield verbs
    finally:
        _recorded.reset(token)
        if outer is not None:
            outer += verbs
            outer.add(down=verbs.bytes_down, up=verbs._up)


def count(*, down: int = 0, up: int | Fraction = 0) -> None:
    """Adds bytes to and from each client to the record in force, if there is one."""
    verbs = _recorded.get()
    if verbs is not None:
        verbs.add(down=down, up=up)


def sent_as(dtypes: Sequence[torch.dtype], values: Sequence[torch.Tensor]) -> list[int]:
    """Returns the option of an operator on values that clients have in these dtypes: it says how many bytes count."""
    if all(dtype.itemsize == value.dtype.itemsize for dtype, value in zip(dtypes, values, strict=True)):
        return []
    numels = [value.numel() for value in values]
    return [
        sum(numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)),
        sum(numel * value.dtype.itemsize for numel, value in zip(numels, values, strict=True)),
    ]


NOT_SENT = [0, 1]  # the option of an operator of which nothing is between a client and the server


# ---- what they compute, and what their cotangents become


def _recording(name: str, compute: Callable) -> Callable:
    """A kernel that notes the verb. Options are none, or how many bytes are sent for how many of the values."""

    def kernel(values: Tensors, names: list[str], key: str, options: list[int]) -> Tensors:
        verbs = _recorded.get()
        if verbs is not None:
            verbs.append(name)
            num_bytes = sum(value.numel() * value.dtype.itemsize for value in values)
            if options:
                num_bytes = num_bytes * options[0] // max(1, options[1])
            verbs.add(**{"down" if name == "broadcast" else "up": num_bytes})
        return compute(values, names, key)

    return kernel


def _reduce_mean(values: Tensors, names: list[str], key: str) -> Tensors:
    placement = placement_of(key)
    return [total.div_(placement.size) for total in sum_over_ranks(placement, values, names, "reduce_mean")]


def _cotangents_of_mean(cotangents: Tensors, names: list[str], key: str, options: list[int]) -> Tensors:
    size = placement_of(key).size
    return _OPERATORS["broadcast"]([cotangent / size for cotangent in cotangents], names, key, options)


def _check_total(values: Tensors, names: list[str], key: str, options: list[int]) -> Tensors:
    placement = placement_of(key)
    if any(bool((value == 0).any()) for value in values):
        raise InvalidArgument(
            f"the weights of the {placement.size} {placement.name} that take part add up to 0, so there is no mean: "
            "give one at least a weight, or skip the round"
        )
    return [value.clone() for value in values]


def _same(values: Tensors, *_: Any) -> Tensors:
    return values


_RULES = {
    "broadcast": Linear(
        _recording("broadcast", lambda values, names, key: [value.clone() for value in values]),
        lambda *cotangents: _OPERATORS["reduce_sum"](*cotangents),
    ),
    "reduce_sum": Linear(
        _recording(
            "reduce_sum", lambda values, names, key: sum_over_ranks(placement_of(key), values, names, "reduce_sum")
        ),
        lambda *cotangents: _OPERATORS["broadcast"](*cotangents),
    ),
    "reduce_mean": Linear(_recording("reduce_mean", _reduce_mean), _cotangents_of_mean),
    # No verb: what a weighted mean divides by, equal on all ranks.
    "check_total": Linear(_check_total, _same, tangent=_same),
}
_OPERATORS = {name: define(_library, name, rule) for name, rule in _RULES.items()}


def call(name: str, values: Tensors, key: str, names: Sequence[str] = (), sent: Sequence[int] = ()) -> Tensors:
    """The operator on all tensors at once, whose names the ranks compare; `sent` is of ``sent_as``."""
    return _OPERATORS[name](values, list(names), key, list(sent))
