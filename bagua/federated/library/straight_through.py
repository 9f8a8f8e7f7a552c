"""The operators of aggregators, no verbs: code clients' values, add them up modulo 2^k, gather them, draw noise.

Coding and fixed point are steps, whose derivative is 0 nearly everywhere and of no use. In reverse mode cotangents go
straight through them, as if the values were sent as they are; in forward mode tangents are those of the values, and
are summed uncoded. So both modes agree: the derivative is that of the program without coding, at the coded values.
Gathering is linear and its derivatives are exact. All of it are operators that tracing and fake tensors know; graphs of
federated.trace have coding and noise in them. torch.compile runs sums and gathering outside of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy
import torch

from bagua import codecs
from bagua.errors import InvalidArgument
from bagua.federated.library.sampling import seed_of
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.verbs.linear import Linear, define
from bagua.federated.verbs.operators import NAMESPACE, call, count
from bagua.federated.verbs.placement import mapping, placement_of
from bagua.federated.verbs.reduction import first_client, gather_over_ranks
from bagua.federated.verbs.traced import tracing

Tensors = list[torch.Tensor]

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(schema: str, kernel: Callable, fake: Callable) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


# ---- coded client by client


def _code(
    value: torch.Tensor, round: torch.Tensor | None, client: torch.Tensor | None, codec: str, seed: int, num_local: int
) -> torch.Tensor:
    """Codes each row of ``[..., numel]`` as a message; round and client are of their axes, or of size 1 there.

    The rows are those of `num_local` clients in compiled code, where no client function runs, and else of its program;
    -1 where messages are not what is sent.
    """
    coding = codecs.get(codec)
    rows = value.contiguous().flatten(0, -2) if value.dim() > 1 else value.contiguous().unsqueeze(0)
    keys: list[int | None] = [None] * len(rows)
    if round is not None and client is not None:
        drawn = [numbers.expand(value.shape[:-1]).reshape(-1).tolist() for numbers in (round, client)]
        keys = [seed_of(seed, *numbers) for numbers in zip(*drawn, strict=True)]
    rows = rows.cpu()  # messages are made by the host, wherever the values are
    result = torch.empty_like(rows)
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        result[index] = coding.decode(coding.encode(row, key=key), row.numel(), row.dtype)
    # A verb counts the values that are decoded, which are sent as messages.
    saved = rows.shape[1] * rows.element_size() - coding.wire_bytes(rows.shape[1], rows.dtype)
    running = mapping()
    if num_local >= 0:
        num_local = placement_of(running[-1]).num_local if running else num_local
        count(up=-Fraction(saved * len(rows), max(1, num_local)))  # rows are of a chunk of the clients
    return result.to(value.device).view(value.shape)


_code_operator = _define(
    "code(Tensor value, Tensor? round, Tensor? client, str codec, int seed, int num_local) -> Tensor",
    _code,
    lambda value, round, client, codec, seed, num_local: torch.empty_like(value),
)


def _batch_of_code(info: Any, in_dims: tuple, value: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, int]:
    """Batches of clients, of models and of rounds are axes before that of a message, the latest one first."""
    moved: list[Any] = []
    for given, dim in zip((value, *arguments), in_dims, strict=True):
        if not isinstance(given, torch.Tensor):
            moved.append(given)
        else:  # that has the axis too where it is of no batch, so that all of them line up
            moved.append(given.unsqueeze(0) if dim is None else given.movedim(dim, 0))
    moved[0] = moved[0].expand(info.batch_size, *moved[0].shape[1:])
    return _code_operator(*moved), 0


torch.library.register_vmap(f"{NAMESPACE}::code", _batch_of_code, lib=_library)


def coded(
    values: Sequence[torch.Tensor],
    codec: str,
    seed: int,
    round: torch.Tensor | None,
    client: torch.Tensor | None,
    num_local: int,
) -> Tensors:
    """Returns what the server decodes of one client's values, inside of its function: one message for each dtype.

    Args:
        values: of dtypes that the codec encodes.
        codec: its spec, such as "qsgd:bits=4".
        seed: what a codec that rounds at random draws from, with the round and the number of the client.
        round, client: int64 ``[]``; None for a codec that does not.
        num_local: how many clients this rank has; -1 if messages are not what they send, as in masked sums.
    """
    results = list(values)
    if tracing() and num_local > 0:
        num_local = 0  # a graph is the same on all ranks, and is run by client functions
    for dtype in {value.dtype for value in values}:  # nothing crosses ranks here, so their order does not matter
        indices = [i for i, value in enumerate(values) if value.dtype == dtype]
        rows = [values[i].reshape(-1) for i in indices]
        message = torch.cat(rows)
        plain = message.detach()
        # The sum that is added is 0, and has the derivative: in every mode, and in graphs.
        message = _code_operator(plain, round, client, codec, seed, num_local) + (message - plain)
        for index, part in zip(indices, message.split([row.shape[0] for row in rows]), strict=True):
            results[index] = part.reshape(values[index].shape)
    return results


# ---- added up modulo 2^k, and gathered: [num_local, ...] -> [...] and [n, ...], which are equal on all ranks


def _modular_sum(values: Tensors, names: list[str], placement: str, options: list[int]) -> Tensors:
    clients, coding = placement_of(placement), FixedPoint(*options)
    group, failure = clients.group, None
    try:
        codes = coding.encode(values, clients.size)
    except InvalidArgument as error:  # reported to the others in the sum
        failure, codes = error, [torch.zeros_like(value, dtype=torch.int64) for value in values]
    has_failed = codes[0].new_zeros(1 if group is None else group.size)
    has_failed[0 if group is None else group.rank] = failure is not None
    names = [*names, "who is out of range"]
    values_summed = [*(code.sum(0) for code in codes), has_failed]
    sent = [coding.packed_bytes(sum(x.numel() for x in values_summed[:-1])), sum(x.nbytes for x in values_summed)]
    *sums, has_failed = call("reduce_sum", values_summed, clients.key, names, sent)
    with clients.everywhere():
        if failure is not None:
            raise failure
        if has_failed.any():
            rank = int(has_failed.argmax())
            error = InvalidArgument(f"rank {rank} has clients with values out of the range of fixed point", rank=rank)
            raise error if group is None else group.job_ranks.told(error)
    return coding.decode(sums, values)


def _cotangents_of_sum(cotangents: Tensors, names: list[str], key: str, options: list[int]) -> Tensors:
    number = placement_of(key).num_local
    return [one.expand(number, *one.shape) for one in call("broadcast", cotangents, key, names)]


def _gather(values: Tensors, names: list[str], key: str, options: list[int]) -> Tensors:
    count(up=_bytes_of_one(values))
    return gather_over_ranks(placement_of(key), values, names)


def _bytes_of_one(values: Tensors) -> int:
    return sum(value.shape[1:].numel() * value.element_size() for value in values)


def _own(values: Tensors, names: list[str], key: str, options: list[int]) -> Tensors:
    count(down=_bytes_of_one(values))
    clients = placement_of(key)
    begin = first_client(clients)
    return [value[begin : begin + clients.num_local].clone() for value in values]


def _sized(size: Callable) -> Callable:
    return lambda values, names, key, options: [x.new_empty((*size(placement_of(key)), *x.shape[1:])) for x in values]


_RULES = {
    "modular_sum": Linear(
        _modular_sum,
        _cotangents_of_sum,
        _sized(lambda clients: ()),
        lambda values, names, key, options: call("reduce_sum", [value.sum(0) for value in values], key, names),
        (1, 0),
    ),
    "gather": Linear(
        _gather,
        lambda *cotangents: _OPERATORS["own"](*cotangents),
        _sized(lambda clients: (clients.size,)),
        batch=(1, 1),
    ),
    # The transpose of that, of what is equal on all ranks.
    "own": Linear(
        _own,
        lambda *cotangents: _OPERATORS["gather"](*cotangents),
        _sized(lambda clients: (clients.num_local,)),
        batch=(1, 1),
    ),
}
_OPERATORS = {name: define(_library, name, rule) for name, rule in _RULES.items()}


@torch.compiler.disable
def modular_sum(values: Sequence[torch.Tensor], coding: FixedPoint, clients: str, names: Sequence[str]) -> Tensors:
    """The sums over all clients, each client's values in fixed point, in one collective of int64.

    Args:
        clients: their key.

    Raises:
        InvalidArgument: on all ranks, where a value is out of the range that `coding` has for so many clients.
    """
    return _OPERATORS["modular_sum"](list(values), list(names), clients, [coding.bits, coding.fraction_bits])


@torch.compiler.disable
def gathered(values: Sequence[torch.Tensor], clients: str, names: Sequence[str]) -> Tensors:
    """All clients' values on all ranks, ``[n, ...]``, in one collective.

    Args:
        clients: their key.
    """
    return _OPERATORS["gather"](list(values), list(names), clients, [])


# ---- noise


def _noise(round: torch.Tensor, seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # NumPy's generator: torch's operations on random numbers are not allowed under vmap.
    generator = numpy.random.default_rng(seed_of(seed, int(round)))
    return torch.from_numpy(numpy.asarray(generator.standard_normal(tuple(shape)))).to(dtype)


_noise_operator = _define(
    "noise(Tensor round, int seed, int[] shape, ScalarType dtype) -> Tensor",
    _noise,
    lambda round, seed, shape, dtype: torch.empty(shape, dtype=dtype),
)


def noise(round: torch.Tensor, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Draws from the standard normal distribution, like a server value; drawn by the host, the same on all ranks.

    Args:
        round: int64 ``[]``; with the seed it decides the numbers.
    """
    drawn = _noise_operator(round, seed, like.shape, like.dtype)
    return drawn if like.is_cpu else drawn.to(like.device)
