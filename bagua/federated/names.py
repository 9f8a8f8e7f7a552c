"""The names of the leaves of pytrees, by which ranks see that they reduce the same: not one's a and another's b.

They travel in the key that an operator is given, behind that of its placement: into derivatives, which reduce some of
the leaves, and into what torch.compile makes, which follows no context. Ranks compare them when they agree on a
reduction. Leaves keep the order of their tree: that of a Jacobian's axis over them, which must be the same on all
ranks, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_END = "\n"  # of the placement's key and of each name but the last; in no name, where it is "\\n"


def flatten_named(value: Any) -> tuple[list[str], list[torch.Tensor], pytree.TreeSpec]:
    """The leaves' names, such as "['weight'][0]" and "" of a tensor by itself, the leaves and the structure."""
    found, structure = pytree.tree_flatten_with_path(value)
    names = ["".join([_name_of(entry) for entry in path]) for path, _ in found]
    return names, [leaf for _, leaf in found], structure


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
