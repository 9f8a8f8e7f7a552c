"""The names of the leaves of pytrees, by which ranks see that they reduce the same: not one's a and another's b.

They travel in the key that an operator is given, behind that of its placement: into derivatives, which reduce some of
the leaves, and into what torch.compile makes, which follows no context. Ranks compare them when they agree on a
reduction. Leaves keep the order of their tree: that of a Jacobian's axis over them, which must be the same on all
ranks, too.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_BEFORE = "|"  # each name
# What may not be in a name within a key: also what ends a string of the C++ that torch.compile may make.
_ESCAPES = (("%", "%25"), (_BEFORE, "%7C"), ('"', "%22"), ("\\", "%5C"), ("\n", "%0A"))


def flatten_named(value: Any) -> tuple[list[str], list[torch.Tensor], pytree.TreeSpec]:
    """The leaves' names, such as "['weight'][0]" and "" of a tensor by itself, the leaves and the structure."""
    found, structure = pytree.tree_flatten_with_path(value)
    names = ["".join([_name_of(entry) for entry in path]) for path, _ in found]
    return names, [leaf for _, leaf in found], structure


def _name_of(entry: Any) -> str:
    """Equal on all ranks: "[]" for keys that are written with what is in them, or where they are in memory."""
    if isinstance(entry, pytree.MappingKey):
        if isinstance(entry.key, (torch.Tensor, torch.nn.Module)):
            return "[]"
        if isinstance(entry.key, frozenset):  # in another order in each process
            return f"[{sorted([repr(one) for one in entry.key])}]"
    name = str(entry)
    return "[]" if " at 0x" in name else name


def named(key: str, names: Sequence[str]) -> str:
    """A placement's key, with the names of the values that an operator is given beside it."""
    return key + "".join([_BEFORE + _escaped(name) for name in names])


def _escaped(name: str) -> str:
    for character, escape in _ESCAPES:
        name = name.replace(character, escape)
    return name


def without_names(key: str) -> str:
    """The placement's key alone."""
    return key.partition(_BEFORE)[0]


def names_in(key: str) -> list[str]:
    """The values' names; none where the key is the placement's alone."""
    return [urllib.parse.unquote(name) for name in key.split(_BEFORE)[1:]]


def selected(key: str, positions: Sequence[int]) -> str:
    """For the values at these positions."""
    names = names_in(key)
    return named(without_names(key), [names[position] for position in positions]) if names else key
