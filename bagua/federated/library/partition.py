"""Partitions of a dataset over clients: lists of indices, every example at exactly one client, by seed.

Indices of a client are in random order. They are the same on all ranks; each rank takes those of its clients.
``padded`` makes placed values of them, with a mask.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.library.sampling import integer, seed_of

Partition = list[torch.Tensor]
Tree = Any  # a pytree of tensors


def iid(num_examples: int, clients: int, *, seed: int, allow_empty: bool = False) -> Partition:
    """Examples at random, as many for every client; where that does not go up, one more for the first ones.

    Args:
        num_examples: of the dataset.
        clients: how many.
        seed: another one gives another partition.
        allow_empty: whether clients may get none, where there are fewer examples than clients.

    Returns:
        int64 ``[examples of the client]`` for each.

    Raises:
        InvalidArgument: fewer examples than clients, unless allow_empty; no client.

    Example:
        >>> [len(indices) for indices in iid(10, 3, seed=0)]
        [4, 3, 3]
    """
    _check(num_examples, clients, allow_empty)
    shuffled = _generator(seed, "iid").permutation(num_examples)
    return [torch.from_numpy(part) for part in numpy.array_split(shuffled, clients)]


def dirichlet(labels: torch.Tensor, clients: int, *, alpha: float, seed: int, allow_empty: bool = False) -> Partition:
    """Labels that are unevenly spread: each label's examples over the clients by shares from a Dirichlet distribution.

    A small alpha, such as 0.1, gives clients of few labels and of very different sizes; a large one comes close to iid.
    A client that the draw leaves without an example gets one of the largest client's. Source: Yurochkin et al.,
    arXiv 1905.12022.

    Args:
        labels: ``[examples]``, integers.
        clients: how many.
        alpha: of the distribution, above 0.
        seed: another one gives another partition.
        allow_empty: whether clients may get no example.

    Returns:
        int64 ``[examples of the client]`` for each.

    Raises:
        InvalidArgument: alpha is not above 0; or as iid.

    Example:
        >>> import torch
        >>> partition = dirichlet(torch.arange(100) % 10, 5, alpha=0.5, seed=0)
        >>> sum(len(indices) for indices in partition)
        100
    """
    values = _labels(labels)
    _check(len(values), clients, allow_empty)
    if not 0 < alpha < float("inf"):
        raise InvalidArgument(f"alpha={alpha!r}, expected a number above 0")
    generator = _generator(seed, "dirichlet")
    client_of = numpy.empty(len(values), dtype=numpy.int64)
    for label in numpy.unique(values):
        (positions,) = numpy.nonzero(values == label)
        generator.shuffle(positions)
        shares = generator.dirichlet(numpy.full(clients, min(alpha, 1e100)))  # whose sums are finite; even by then
        ends = numpy.round(numpy.cumsum(shares) * len(positions)).astype(numpy.int64)
        ends[-1] = len(positions)
        client_of[positions] = numpy.searchsorted(ends, numpy.arange(len(positions)), side="right")
    counts = numpy.bincount(client_of, minlength=clients)
    for client in numpy.nonzero(counts == 0)[0] if not allow_empty else ():
        largest = counts.argmax()
        given = generator.choice(numpy.nonzero(client_of == largest)[0])
        client_of[given] = client
        counts[largest], counts[client] = counts[largest] - 1, 1
    return _by_client(client_of, clients, generator)


def by_label(
    labels: torch.Tensor, clients: int, *, shards_per_client: int = 2, seed: int, allow_empty: bool = False
) -> Partition:
    """Clients of few labels: examples sorted by label, cut into equal shards, of which each client gets some at random.

    Source: McMahan et al., arXiv 1602.05629, with two shards per client.

    Args:
        labels: ``[examples]``, integers.
        clients: how many.
        shards_per_client: at least 1; a client has about as many labels.
        seed: another one gives another partition.
        allow_empty: whether clients may get no example.

    Returns:
        int64 ``[examples of the client]`` for each.

    Raises:
        InvalidArgument: fewer examples than shards, unless allow_empty; no client, or no shard per client.

    Example:
        >>> import torch
        >>> labels = torch.arange(100) % 10
        >>> max(len(set(labels[indices].tolist())) for indices in by_label(labels, 5, seed=0)) <= 4
        True
    """
    values = _labels(labels)
    if shards_per_client < 1:
        raise InvalidArgument(f"shards_per_client={shards_per_client}, expected at least 1")
    _check(len(values), clients, allow_empty, shards_per_client)
    generator = _generator(seed, "by_label")
    order = generator.permutation(len(values))
    order = order[numpy.argsort(values[order], kind="stable")]
    shards = clients * shards_per_client
    owner_of = generator.permutation(shards) // shards_per_client  # of each shard
    sizes = [len(shard) for shard in numpy.array_split(order, shards)]
    client_of = numpy.empty(len(values), dtype=numpy.int64)
    client_of[order] = numpy.repeat(owner_of, sizes)
    return _by_client(client_of, clients, generator)


def padded(data: Tree, partition: Partition, *, length: int | None = None) -> tuple[Tree, torch.Tensor]:
    """The examples of each client one below the other, filled up with zeros to the same number: placed values.

    Args:
        data: a pytree of ``[examples, ...]``, of the whole dataset.
        partition: of the clients that are wanted, such as ``parts[federated.local_slice(len(parts))]``.
        length: of the result; by default the longest of these clients'. Give ``max(map(len, parts))`` of all clients
            where shapes are to be the same on all ranks; nothing needs that. Where a program is compiled, give
            ``sampling.padded_size`` of the longest of each round, so that its rounds are of few shapes.

    Returns:
        ``[clients, length, ...]`` of the same structure and dtypes; and bool ``[clients, length]``: what is an example,
        as the mask of ``metrics.mean``.

    Raises:
        InvalidArgument: a client has more than `length` examples, or an index that is not one of the dataset, or no
            integer.

    Example:
        >>> import torch
        >>> padded(torch.tensor([1.0, 2.0, 3.0]), [torch.tensor([2]), torch.tensor([1, 0])])
        (tensor([[3., 0.],
                [2., 1.]]), tensor([[ True, False],
                [ True,  True]]))
    """
    longest = max(map(len, partition), default=0)
    length = longest if length is None else length
    if length < longest:
        raise InvalidArgument(f"length={length} for a client with {longest} examples, expected at least as many")
    rows = torch.zeros(len(partition), length, dtype=torch.int64)
    mask = torch.zeros(len(partition), length, dtype=torch.bool)
    for client, indices in enumerate(partition):
        indices = torch.as_tensor(indices)
        if len(indices) and (indices.is_floating_point() or indices.dtype is torch.bool):
            raise InvalidArgument(
                f"indices of {indices.dtype} for client {client}, expected integers: examples by number"
            )
        rows[client, : len(indices)] = indices
        mask[client, : len(indices)] = True

    def take(leaf: torch.Tensor) -> torch.Tensor:
        wrong = rows[mask & ((rows < 0) | (rows >= leaf.shape[0]))]
        if len(wrong):
            raise InvalidArgument(f"index {int(wrong[0])} of an example, but the data have {leaf.shape[0]} of them")
        taken = leaf.new_zeros((*rows.shape, *leaf.shape[1:]))
        taken[mask] = leaf[rows[mask]]
        return taken

    return pytree.tree_map(take, data), mask


def _generator(seed: int, kind: str) -> numpy.random.Generator:
    return numpy.random.default_rng(seed_of(seed, "partition", kind))


def _labels(labels: torch.Tensor) -> numpy.ndarray:
    labels = torch.as_tensor(labels)
    if labels.dim() != 1 or labels.is_floating_point():
        raise InvalidArgument(f"labels of shape {list(labels.shape)} and {labels.dtype}, expected integers [examples]")
    return labels.cpu().numpy()


def _check(num_examples: int, clients: int, allow_empty: bool, shards: int = 1) -> None:
    for name, number in (("num_examples", num_examples), ("clients", clients), ("shards_per_client", shards)):
        integer(name, number)
    if clients < 1:
        raise InvalidArgument(f"clients={clients}, expected at least 1")
    if num_examples < 0:
        raise InvalidArgument(f"num_examples={num_examples}, expected at least 0")
    if num_examples < clients * shards and not allow_empty:
        what = f"{clients} clients" if shards == 1 else f"{clients} clients with {shards} shards each"
        raise InvalidArgument(f"{num_examples} examples for {what}: give allow_empty=True if some may have none")


def _by_client(client_of: numpy.ndarray, clients: int, generator: numpy.random.Generator) -> Partition:
    """Each client's examples, in random order."""
    shuffled = generator.permutation(len(client_of))
    order = shuffled[numpy.argsort(client_of[shuffled], kind="stable")]
    ends = numpy.cumsum(numpy.bincount(client_of, minlength=clients))[:-1]
    return [torch.from_numpy(part) for part in numpy.split(order, ends)]
