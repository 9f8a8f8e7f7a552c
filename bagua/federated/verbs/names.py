"""The names of the leaves of pytrees, by which ranks see that they reduce the same: not one's a and another's b.

Operators take them beside their values, also in derivatives, which reduce some of the leaves. Ranks compare them when
they agree on a reduction. Leaves keep the order of their tree: that of a Jacobian's axis over them, which must be the
same on all ranks, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


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
