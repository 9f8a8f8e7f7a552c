"""How ranks match the leaves of pytrees: by their names, whatever order each rank's dictionaries have them in.

The names travel in the key that an operator is given, behind that of its placement: into derivatives, which reduce some
of the leaves, and into what torch.compile makes, which follows no context. Ranks compare them when they agree on a
reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_END = "\n"  # of the placement's key and of each name but the last; in no name, where it is "\\n"


def flatten_by_name(value: Any) -> tuple[list[str], list[torch.Tensor], Callable[[Sequence[Any]], Any]]:
    """The leaves' names and the leaves, in an order that depends on the names alone, and what puts them in place again.

    Names are such as "['weight'][0]", and "" of a tensor by itself. Leaves whose names are equal, since keys of
    dictionaries that are neither numbers nor strings do not count, stay in the order in which they are.
    """
    found, structure = pytree.tree_flatten_with_path(value)
    names = ["".join([_name_of(entry) for entry in path]) for path, _ in found]
    # Shorter ones first: elements of a list by their numbers.
    order = sorted(range(len(names)), key=lambda index: (len(names[index]), names[index]))

    def rebuild(results: Sequence[Any]) -> Any:
        in_place: list[Any] = [None] * len(order)
        for index, result in zip(order, results, strict=True):
            in_place[index] = result
        return pytree.tree_unflatten(in_place, structure)

    return [names[index] for index in order], [found[index][1] for index in order], rebuild


def _name_of(entry: Any) -> str:
    is_told_apart = isinstance(entry, (pytree.SequenceKey, pytree.GetAttrKey)) or (
        isinstance(entry, pytree.MappingKey) and isinstance(entry.key, (str, int, float))
    )
    # Others may be written with where they are in memory, or what is in them.
    return str(entry).replace(_END, "\\n") if is_told_apart else "[]"


def named(key: str, names: Sequence[str]) -> str:
    """A placement's key, with the names of the values that an operator is given beside it."""
    return key + "".join([_END + name for name in names])


def without_names(key: str) -> str:
    """The placement's key alone."""
    return key.partition(_END)[0]


def names_in(key: str) -> list[str]:
    """The values' names; none where the key is the placement's alone."""
    return key.split(_END)[1:]


def selected(key: str, positions: Sequence[int]) -> str:
    """For the values at these positions."""
    names = names_in(key)
    return named(without_names(key), [names[position] for position in positions]) if names else key
