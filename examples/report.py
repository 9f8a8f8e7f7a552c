"""Prints the examples' output on rank 0: a bar and a line per epoch, the result, and the result as a line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tqdm import tqdm


class Report:
    """A report that times training and prints results on rank 0.

    Args:
        example, algorithm: the names in the result line.
        rank, world_size: the rank of this process, and the number of ranks.
    """

    def __init__(self, example: str, algorithm: str, rank: int, world_size: int) -> None:
        self._fixed = {"example": example, "algorithm": algorithm, "ranks": world_size}
        self._is_shown = rank == 0
        self._train_s = 0.0
        self._num_epochs = 0

    def steps(self, batches: Iterable[Any], num_steps: int) -> Iterator[Any]:
        """Yields ``batches`` with a progress bar; the time until the last one is done counts as training."""
        self._num_epochs += 1
        begin = time.perf_counter()
        name = f"epoch {self._num_epochs}"
        hidden = None if self._is_shown else True  # None: shown on a terminal only, not in a log file
        yield from tqdm(batches, total=num_steps, desc=name, unit="step", leave=False, disable=hidden)
        self._train_s += time.perf_counter() - begin

    def epoch(self, **values: float) -> None:
        """Prints the line of an epoch."""
        if self._is_shown:
            shown = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
            tqdm.write(f"epoch {self._num_epochs:3d}  {shown}  {self._train_s:.1f} s")

    def result(self, model: torch.nn.Module, **values: float) -> None:
        """Prints the metric, time and bytes of this rank, and all values as JSON.

        torch DDP does not report waiting times or bytes sent: they are n/a, and null in JSON.
        """
        measured: dict[str, float | int | None] = {
            "train_s": self._train_s,
            "compute_s": None,
            "exposed_communication_s": None,
            "sent_per_rank_mb": None,
        }
        if hasattr(model, "bagua"):
            summary = model.bagua.timeline().summary()
            measured["compute_s"] = self._train_s - summary["exposed_s"]
            measured["exposed_communication_s"] = summary["exposed_s"]
            measured["sent_per_rank_mb"] = summary["bytes_sent"] / 1e6
        result = {**self._fixed, "epochs": self._num_epochs, **values, **measured}
        if self._is_shown:
            for name, value in result.items():
                shown = "n/a" if value is None else f"{value:.4f}" if isinstance(value, float) else value
                print(f"{_spelled_out(name)}: {shown}")
            print(json.dumps(result), flush=True)


def _spelled_out(name: str) -> str:
    """Formats a name with its unit: 'train_s' becomes 'train [s]'."""
    for suffix, unit in (("_s", "s"), ("_mb", "MB")):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)} [{unit}]".replace("_", " ")
    return name.replace("_", " ")
