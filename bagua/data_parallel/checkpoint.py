"""save and load: a wrapped model, its optimizers and what its algorithm remembers, in one folder; both collective.

Beside the data path. Invariant: a folder holds a whole checkpoint at every moment. Files carry the number of their
save; ``checkpoint.json``, which names it, is replaced when all ranks have written theirs, and older files are deleted.

Where gradients are exchanged, model and optimizers are equal, and rank 0 writes them; otherwise, and where ranks have
experts of their own (``ignore``, ``groups``), every rank its own. A file per rank has what its algorithm remembers. On
another number of ranks weights and moments are the mean of all files', and residuals are shared out so that what is
still to be sent stays the same; experts are loaded on as many ranks as saved them.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua.data_parallel.checks import is_sharded, optimizers_in
from bagua.data_parallel.errors import fatal
from bagua.data_parallel.handle import BaguaHandle, check_state, handle_of
from bagua.data_parallel.initial_sync import OptimizerStates, broadcast_model
from bagua.data_parallel.wrap import Optimizers
from bagua.distributed.consensus import agree
from bagua.errors import InvalidArgument
from bagua.files import replace_file

__all__ = ["load", "save"]

_INDEX = "checkpoint.json"
_OURS = re.compile(r"(?:model|rank\d+)\.(\d+)\.pt")
_REMEDY = "pass the same optimizers and names on all ranks"


def save(path: str | Path, model: torch.nn.Module, optimizers: Optimizers = (), **others: Any) -> None:
    """Writes a checkpoint of a wrapped model into the folder ``path``, in place of an earlier one; collective.

    A process that is killed meanwhile leaves the earlier checkpoint whole. Hosts may share the disk or have their own.

    Args:
        path: a folder, made where it is missing.
        model: one that ``with_bagua`` has wrapped.
        optimizers: those that step it, in the order in which ``load`` gets them.
        others: what else each rank needs: objects with a ``state_dict``, such as a scheduler or a GradScaler, and plain
            data and tensors, such as ``step=100``.

    Raises:
        InvalidArgument: on all ranks: the model is not wrapped, an optimizer is spread over the ranks, a file cannot be
            written, or one of ``others`` is no plain data. The earlier checkpoint stays.

    Example:
        >>> bagua.save("checkpoint", model, optimizer, step=100)  # doctest: +SKIP
    """
    handle, _ = _wrapped(model)
    group, folder = handle.group, Path(path)

    def describe() -> tuple[tuple[int, dict[str, Any]], dict[str, Any]]:
        chosen = _checked(optimizers)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in others.items()}
        try:
            _loaded(io.BytesIO(_bytes_of(state)))
        except Exception as error:
            raise InvalidArgument(f"one of {sorted(others)} is not of plain data and tensors: {error}") from None
        return (_number_in(folder), state), {"optimizers": len(chosen), "names": sorted(others)}

    earlier, state = agree(group, describe, _REMEDY)
    number = max(group.all_gather_plain(earlier)) + 1
    with _paused(handle):
        _write(folder, handle, optimizers_in(optimizers), state, number)


def _write(
    folder: Path,
    handle: BaguaHandle,
    optimizers: Sequence[torch.optim.Optimizer],
    others: Mapping[str, Any],
    number: int,
) -> None:
    group, are_equal = handle.group, _are_equal(handle)

    def write() -> tuple[None, dict[str, Any]]:
        training = {
            "model": handle.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        own = {"bagua": handle.state_dict(), "others": others, **({} if are_equal else training)}
        try:
            replace_file(_file(folder, f"rank{group.rank}", number), _bytes_of(own))
            if are_equal and group.rank == 0:
                replace_file(_file(folder, "model", number), _bytes_of(training))
        except OSError as error:
            raise InvalidArgument(f"the checkpoint cannot be written: {error}; the earlier one is unchanged") from error
        return None, {}

    agree(group, write, _REMEDY)
    leads_node = group.rank in group.nodes.leaders

    def name_it() -> tuple[None, dict[str, Any]]:
        if leads_node:
            index = {"number": number, "num_ranks": group.size, "algorithm": handle.algorithm.name}
            index["experts"] = _experts_of(handle)
            index["choice"] = handle.choice_state()
            replace_file(folder / _INDEX, json.dumps(index).encode())
        return None, {}

    agree(group, name_it, _REMEDY)
    if leads_node:
        for file in folder.glob("*.pt"):
            written = _OURS.fullmatch(file.name)
            if written is not None and int(written[1]) != number:
                with contextlib.suppress(OSError):  # another host has deleted it, or its disk is read-only by now
                    file.unlink()


def load(path: str | Path, model: torch.nn.Module, optimizers: Optimizers = (), **others: Any) -> dict[str, Any]:
    """Restores what ``save`` wrote into a wrapped model and its optimizers; collective.

    On the same number of ranks training continues bit for bit. On another number, every host needs the files of all
    ranks. Gradient algorithms continue with the same model and optimizers; their residuals are shared out among the
    ranks. Where weights are exchanged, all ranks begin from the mean of the weights and of the optimizers' states, and
    what ranks know of their neighbours begins anew.

    Args:
        path: the folder.
        model: wrapped by ``with_bagua`` with the algorithm and the options of the checkpoint.
        optimizers: those that step it, in the order of ``save``.
        others: objects with a ``load_state_dict``, under the names that ``save`` got; on another number of ranks they
            get what rank 0 saved.

    Returns:
        The plain data that ``save`` got, by name.

    Raises:
        InvalidArgument: on all ranks: a file is missing, or of another model, algorithm or number of optimizers.

    Example:
        >>> step = bagua.load("checkpoint", model, optimizer)["step"]  # doctest: +SKIP
    """
    handle, inner = _wrapped(model)
    folder = Path(path)
    with handle.adopted(lambda: _index_in(folder).get("choice")):
        own = _load(folder, handle, inner, optimizers, others)
    for name, one in others.items():
        one.load_state_dict(own["others"][name])
    return {name: value for name, value in own["others"].items() if name not in others}


def _load(
    folder: Path, handle: BaguaHandle, inner: torch.nn.Module, optimizers: Optimizers, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Restores model, optimizers and algorithm; returns what the rank's file has."""
    group, are_equal = handle.group, _are_equal(handle)

    def read() -> tuple[tuple[dict[str, Any], dict[str, Any] | None], dict[str, Any]]:
        chosen, index = _checked(optimizers), _index_in(folder)
        number, num_ranks = index["number"], index["num_ranks"]
        if index["algorithm"] != handle.algorithm.name:
            raise InvalidArgument(
                f"{folder} is of algorithm {index['algorithm']!r}, the model runs {handle.algorithm.name!r}; wrap it "
                "with that of the checkpoint, load, and then change it with with_bagua"
            )
        saved, ours = index.get("experts", [[], []]), _experts_of(handle)
        if saved != ours:
            raise InvalidArgument(
                f"{folder} is of a model with ignore={saved[0]} and groups for {saved[1]}, this one has "
                f"ignore={ours[0]} and groups for {ours[1]}; wrap it with those of the checkpoint"
            )
        if num_ranks == group.size:
            own = _read(folder, f"rank{group.rank}", number)
        else:
            states = [_read(folder, f"rank{rank}", number) for rank in range(num_ranks)]
            own = {"others": states[0]["others"], **handle.training_of_all(states)}
        training = None if are_equal else own
        if are_equal and group.rank == 0:
            training = _read(folder, "model", number)
        check_state(own["bagua"], handle)
        if training is not None:
            _check_model(inner, training["model"])
            for optimizer, saved in zip(chosen, training["optimizers"], strict=False):
                sizes = [
                    [len(one["params"]) for one in groups] for groups in (saved["param_groups"], optimizer.param_groups)
                ]
                if sizes[0] != sizes[1]:
                    raise InvalidArgument(
                        f"{folder} has an optimizer with {sizes[0]} parameters in its groups, load got one with "
                        f"{sizes[1]}"
                    )
            if len(training["optimizers"]) != len(chosen):
                raise InvalidArgument(
                    f"{folder} holds {len(training['optimizers'])} optimizers, load got {len(chosen)}"
                )
        if missing := sorted(others.keys() - own["others"].keys()):
            raise InvalidArgument(f"{folder} holds {sorted(own['others'])}, but load got {missing}")
        return (own, training), {"the checkpoint": index, "names": sorted(others)}

    own, training = agree(group, read, "give all ranks the files of one save")
    chosen = optimizers_in(optimizers)
    with _paused(handle), fatal(group, "bagua.load"):
        if training is not None:
            inner.load_state_dict(training["model"])
            for optimizer, state in zip(chosen, training["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        if are_equal:
            scope = handle.reducer.scope
            states = OptimizerStates(chosen, inner, scope)
            states.receive()
            broadcast_model(inner, scope)
            states.take_over()
        handle.load_state_dict(own["bagua"])
    return own


def _are_equal(handle: BaguaHandle) -> bool:
    """Returns True if all ranks have the same model and optimizers."""
    return handle.algorithm.exchanges == "gradients" and handle.reducer.scope.is_whole


def _experts_of(handle: BaguaHandle) -> list[list[str]]:
    """Returns the patterns of ``ignore`` and ``groups``."""
    return [list(patterns) for patterns in handle.reducer.scope.patterns]


def _wrapped(model: torch.nn.Module) -> tuple[BaguaHandle, torch.nn.Module]:
    handle = handle_of(model)
    if handle is None:
        raise InvalidArgument("the model is not wrapped; call bagua.with_bagua(model, optimizers, algorithm=...) first")
    handle.group.check()
    if spread := next((name for name, one in handle.module.named_parameters() if hasattr(one, "to_local")), None):
        raise InvalidArgument(
            f"parameter {spread!r} is a DTensor, of which each rank has a part; keep model and optimizer by "
            "torch.distributed.checkpoint, and model.bagua.state_dict() in a file per rank"
        )
    return handle, handle.module


@contextlib.contextmanager
def _paused(handle: BaguaHandle) -> Iterator[None]:
    """Stops what the algorithm does in the background, unless the program has."""
    stops = hasattr(handle.algorithm, "pause") and not handle.algorithm.is_paused
    if stops:
        handle.pause()
    try:
        yield
    finally:
        if stops and handle.group.failure() is None:  # all ranks raise alike, or none
            handle.resume()


def _checked(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    chosen = optimizers_in(optimizers)
    if any(is_sharded(optimizer) for optimizer in chosen):
        raise InvalidArgument(
            "the states of a ZeroRedundancyOptimizer are spread over the ranks; save them by consolidate_state_dict"
        )
    return chosen


# --- files


def _file(folder: Path, stem: str, number: int) -> Path:
    return folder / f"{stem}.{number}.pt"


def _index_in(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{folder} holds no checkpoint of bagua.save: {error}") from None


def _number_in(folder: Path) -> int:
    return _index_in(folder)["number"] if (folder / _INDEX).exists() else 0


def _bytes_of(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _read(folder: Path, stem: str, number: int) -> dict[str, Any]:
    path = _file(folder, stem, number)
    if not path.exists():
        raise InvalidArgument(
            f"{path} is missing: every rank reads its own file, on another number of ranks those of all; copy it there"
        )
    return _loaded(path)


def _check_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    shapes = [
        {name: tuple(value.shape) for name, value in one.items() if isinstance(value, torch.Tensor)}
        for one in (state, model.state_dict())
    ]
    if different := [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]:
        name = different[0]
        raise InvalidArgument(
            f"the model of the checkpoint has {shapes[0].get(name, 'nothing')} as {name!r}, this one "
            f"{shapes[1].get(name, 'nothing')} (shapes)"
        )
