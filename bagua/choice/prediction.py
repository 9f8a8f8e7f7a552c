"""Predicts what a step of a recorded training would take under each candidate: ``bagua.simulator``, on its ranks.

Beside the data path. One rank of each host rehearses its share of the candidates, in a thread of its own, so nothing of
the program's modes reaches it (autocast, default device); random numbers are drawn from a copy of the generator.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bagua.choice.candidates import Candidate
from bagua.choice.links import Network
from bagua.distributed.consensus import agree
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument
from bagua.replay.profiles import Layer, Profile

_NUM_COPIES = 5  # of the model, in memory of the host, while it is rehearsed
_NEAR = 1.05  # of compute alone: nothing else can gain more, so nothing else is rehearsed
_REMEDY = "let all ranks train the same model"


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate in a choice: seconds per step, None where it was not predicted or not tried; ``note`` says why."""

    candidate: str
    predicted_s: float | None = None
    measured_s: float | None = None
    note: str = ""


def predict(
    group: ProcessGroup,
    network: Network,
    profile: Profile,
    candidates: Sequence[Candidate],
    until_s: float,
) -> list[Row]:
    """Returns a row for each candidate; collective.

    Args:
        profile: the same on all ranks.
        until_s: of time.perf_counter: no rehearsal begins later, but for the first one of a rank.
    """
    leaders = group.nodes.leaders

    def rehearse_share() -> tuple[list[list[Any]], dict[str, Any]]:
        if group.rank not in leaders:
            return [], {}
        return _apart(_share, network, profile, candidates[leaders.index(group.rank) :: len(leaders)], until_s), {}

    mine = agree(group, rehearse_share, _REMEDY)
    found = {
        name: Row(name, predicted_s, note=note)
        for part in group.all_gather_plain(mine)
        for name, predicted_s, note in part
    }
    return [found[str(one)] for one in candidates]


def _share(network: Network, profile: Profile, candidates: Sequence[Candidate], until_s: float) -> list[list[Any]]:
    """Returns name, seconds and note of each."""
    from bagua import simulator

    found: list[list[Any]] = []
    near = ""
    for index, one in enumerate(candidates):
        if index and (near or time.perf_counter() > until_s):
            reason = f"{near} is near compute alone" if near else "there was no time"
            found.append([str(one), None, f"not rehearsed, as {reason}"])
            continue
        try:
            rehearsed = simulator.rehearse(
                profile, one.algorithm, hosts=network.hosts, ranks_per_host=network.ranks_per_host, **one.options
            )
            played = rehearsed.play(network.link, slowdown=network.slowdown)
            found.append([str(one), played.step_s, ""])
            near = str(one) if is_near_compute(played.step_s, profile) else ""
        except InvalidArgument as error:
            found.append([str(one), None, f"cannot be rehearsed: {error}"])
    return found


def is_near_compute(step_s: float, profile: Profile) -> bool:
    """Returns True for a step that takes little longer than compute alone."""
    return step_s < _NEAR * (profile.forward_ms + profile.backward_ms) / 1e3


def _apart(function: Any, *args: Any) -> Any:
    """Runs a function in a thread of its own and returns what it returns, or raises what it raises."""
    outcome: list[Any] = []
    num_threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(num_threads)  # a part of it is the process's, and a rehearsal puts back what it finds
        try:
            outcome.append((function(*args), None))
        except BaseException as error:  # raised in the thread that waits
            outcome.append((None, error))

    with torch.random.fork_rng(devices=[]):
        thread = threading.Thread(target=run, name="bagua-rehearsal")
        thread.start()
        thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def room(device: torch.device, num_ranks: int) -> int:
    """Returns the bytes that are free for each of ``num_ranks`` ranks of this host, on the device or in memory."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return _free_memory() // num_ranks


def check_room(num_bytes: int) -> None:
    """Raises InvalidArgument if a model of ``num_bytes`` cannot be rehearsed in the memory of this host."""
    if _NUM_COPIES * num_bytes > _free_memory():
        needed, free = (value >> 20 for value in (_NUM_COPIES * num_bytes, _free_memory()))
        raise InvalidArgument(f"a rehearsal needs {needed} MiB of the host's memory, of which {free} are free")


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0


def to_plain(profile: Profile) -> list[list[Any]]:
    """Returns the layers as plain data, for messages."""
    return [
        [one.name, [list(shape) for shape in one.parameters], one.forward_ms, one.backward_ms, one.dtype]
        for one in profile.layers
    ]


def of_plain(layers: Sequence[Sequence[Any]]) -> Profile:
    """Returns the profile that ``to_plain`` was made of."""
    return Profile(
        "training",
        "recorded while it ran",
        tuple(Layer(name, tuple(map(tuple, shapes)), *rest) for name, shapes, *rest in layers),
    )
