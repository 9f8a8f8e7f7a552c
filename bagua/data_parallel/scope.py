"""Scope: the ranks that each parameter and buffer of a model is synchronised among, if it is at all.

Beside the data path: chosen when a model is wrapped, and asked by name from then on. Invariants: a part is 0 for the
model's own group, 1 for that of the first pattern of ``groups``, and so on; the parts of names are equal on all ranks,
while the groups behind them differ. Each group consists of ranks of the model's own.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.world import GroupLike, resolve
from bagua.errors import InvalidArgument

__all__ = ["IGNORED", "Scope", "synchronised_options"]

IGNORED = -1  # the part of what is not synchronised


class Scope:
    """The parts of one model, by name.

    Args:
        model: whose names the patterns are to match.
        group: the model's own.
        ignore: patterns of fnmatch, of names that are left alone.
        groups: patterns of fnmatch, and the group of this rank for what they match.

    Attributes:
        groups: by part.
        patterns: of ``ignore`` and of ``groups``, equal on all ranks.
        ignored: the parameters that are left alone.

    Raises:
        InvalidArgument: a pattern matches nothing, a name matches two that say different things, this rank is no member
            of a group, or nothing is left for the model's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        group: ProcessGroup,
        ignore: Sequence[str] = (),
        groups: Mapping[str, GroupLike] | None = None,
    ) -> None:
        _check_types(ignore, groups)
        groups = {} if groups is None else groups
        self.group = group
        self.patterns = (tuple(ignore), tuple(groups))
        self.groups = (group, *(_group_for(pattern, one, group) for pattern, one in groups.items()))
        self._parts = [
            *((pattern, IGNORED) for pattern in ignore),
            *zip(groups, range(1, len(self.groups)), strict=True),
        ]
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        self._check_matches(names if self._parts else [])
        own = [p for name, p in model.named_parameters() if p.requires_grad and self.part_of(name) == 0]
        if self._parts and not own:
            raise InvalidArgument(
                f"ignore={list(ignore)} and groups={list(groups)} leave no parameter that trains to the model's own "
                "group, whose first message tells the ranks that they are in one step; leave one to it"
            )
        self.ignored = [p for name, p in model.named_parameters() if self.part_of(name) == IGNORED]

    @property
    def is_whole(self) -> bool:
        """True if all ranks have the same parameters and buffers."""
        return not self._parts

    @property
    def others(self) -> tuple[ProcessGroup, ...]:
        """The groups beside the model's own."""
        return self.groups[1:]

    def part_of(self, name: str) -> int:
        """Returns the part of the parameter or buffer ``name``."""
        return next((part for pattern, part in self._parts if fnmatch.fnmatchcase(name, pattern)), 0)

    def part_of_parameters(self, model: torch.nn.Module) -> dict[int, int]:
        """Returns the part of each parameter by its id; {} where all are in the model's own."""
        return {id(p): self.part_of(name) for name, p in model.named_parameters()} if self._parts else {}

    def ignored_names(self, model: torch.nn.Module) -> set[str]:
        """Returns the names of parameters and buffers that are left alone."""
        named = (*model.named_parameters(), *model.named_buffers()) if self._parts else ()
        return {name for name, _ in named if self.part_of(name) == IGNORED}

    def check_algorithm(self, algorithm: Algorithm, nonfinite: str) -> None:
        """Raises InvalidArgument for an algorithm or a setting that needs all ranks for every parameter."""
        what = "groups=" if self.others else "ignore="
        if not self.is_whole and algorithm.exchanges != "gradients":
            raise InvalidArgument(
                f"{what} is for algorithms that exchange gradients, but {algorithm.name!r} exchanges weights; wrap the "
                "model with another one"
            )
        if not self.others:
            return
        if remembered := sorted(algorithm.parameter_state()):
            raise InvalidArgument(
                f"groups= with algorithm {algorithm.name!r}, which remembers {', '.join(remembered)} of each parameter "
                "for all ranks at once; leave its error feedback out, or take an algorithm that remembers nothing"
            )
        if getattr(algorithm, "hierarchical", False):
            raise InvalidArgument("groups= with hierarchical=True, whose nodes are those of all ranks; leave it out")
        if nonfinite == "raise":
            raise InvalidArgument(
                'groups= with nonfinite="raise", which needs the same gradients on all ranks; use bagua.amp.GradScaler'
            )

    def check_meshes(self, model: torch.nn.Module) -> None:
        """Raises InvalidArgument for a DTensor whose mesh has several ranks of its group, naming the mesh dimension."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            mesh, part = getattr(tensor, "device_mesh", None), self.part_of(name)
            if mesh is None or part == IGNORED:
                continue
            group = self.groups[part]
            own = group.ranks[group.rank]
            at = {rank: (mesh.mesh == rank).nonzero().tolist() for rank in group.ranks}
            other = next((rank for rank in group.ranks if rank != own and at[rank]), None)
            if other is None:
                continue
            pairs = zip(at[own][0] if at[own] else (), at[other][0], strict=False)
            axis = next((axis for axis, (ours, theirs) in enumerate(pairs) if ours != theirs), 0)
            dimension = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
            raise InvalidArgument(
                f"parameter or buffer {name!r} is a DTensor over the mesh dimension {dimension!r}, in which the group "
                f"has the ranks {own} and {other}: they hold parts that are not to be averaged, or torch reduces over "
                "them itself. Pass a group of ranks that hold the same part: another dimension of one mesh, such as "
                "group=mesh['dp']"
            )

    def check_groups(self) -> None:
        """Raises InvalidArgument on all ranks if those of a group have not passed that same group. Collective."""
        if not self.others:
            return
        table = self.group.all_gather_plain([(one.name, one.ranks) for one in self.others])
        for index, pattern in enumerate(self.patterns[1]):
            for rank, row in enumerate(table):
                name, members = row[index]
                for member in members:
                    other = table[self.group.ranks.index(member)][index][0]
                    if other != name:
                        raise self.group.job_ranks.told(
                            InvalidArgument(
                                f"the ranks disagree about the group of {pattern!r}: rank {rank} passes the group "
                                f"'{name}' of ranks {list(members)}, rank {self.group.ranks.index(member)} passes "
                                f"'{other}'; pass one group on all of its ranks"
                            )
                        )

    def _check_matches(self, names: Sequence[str]) -> None:
        for pattern, _ in self._parts:
            if not fnmatch.filter(names, pattern):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
                raise InvalidArgument(
                    f"the pattern {pattern!r} matches no parameter and no buffer of the model; it has names such as "
                    f"{', '.join(map(repr, close))}"
                )
        for name in names:
            matching = {part: pattern for pattern, part in self._parts if fnmatch.fnmatchcase(name, pattern)}
            if len(matching) > 1:
                first, second = list(matching.values())[:2]
                raise InvalidArgument(
                    f"{name!r} matches {first!r} and {second!r}, which say different things; give it to one of them"
                )


def synchronised_options(optimizer: torch.optim.Optimizer, parts: Mapping[int, int]) -> list[dict[str, Any]]:
    """Returns the parameter groups of ``optimizer`` but those whose parameters are all ignored.

    Args:
        parts: as ``Scope.part_of_parameters`` returns them.
    """
    ignored = [{parts.get(id(p), 0) for p in options["params"]} == {IGNORED} for options in optimizer.param_groups]
    return [options for options, is_ignored in zip(optimizer.param_groups, ignored, strict=True) if not is_ignored]


def _check_types(ignore: Sequence[str], groups: Mapping[str, GroupLike] | None) -> None:
    if not isinstance(ignore, (list, tuple)) or not all(isinstance(one, str) for one in ignore):
        raise InvalidArgument(f"ignore is {ignore!r}, expected a list of patterns such as ['experts.*']")
    if groups is not None and not (isinstance(groups, Mapping) and all(isinstance(one, str) for one in groups)):
        raise InvalidArgument(f"groups is {groups!r}, expected a dict of patterns and groups: {{'experts.*': group}}")


def _group_for(pattern: str, given: GroupLike, own: ProcessGroup) -> ProcessGroup:
    group = resolve(given)
    if group.rank < 0:
        raise InvalidArgument(
            f"this rank is no member of the group '{group.name}' for {pattern!r}; pass the one that it belongs to"
        )
    if not set(group.ranks) <= set(own.ranks):
        raise InvalidArgument(
            f"the group for {pattern!r} has the ranks {group.ranks}, which are not all in the model's ({own.ranks})"
        )
    return group
