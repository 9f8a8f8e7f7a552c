"""Verification that a played system computes the right values, on every rank, before its times count.

Gradients must be the same bits on all ranks, and the mean over ranks within the system's precision. Algorithms that
exchange weights start from different values on every rank: the weights must have come closer, and their mean must not
have moved, except by outer steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

import bagua
from bagua.replay.profiles import SleepingModel

_SAMPLES = 256  # of each tensor, at least, where it has as many
# The allowed distance of gradients from their mean, an L2 norm over the mean's, beyond rounding to their dtype.
_ALLOWED = {
    "ddp": 0.0,
    "gradient_allreduce": 0.0,
    "ddp_fp16": 0.01,
    "ddp_bf16": 0.02,
    "ddp_minmax_uint8": 0.1,
    "bytegrad": 0.1,
}
_ALLOWED_OF_BITS = {8: 0.1, 4: 0.6, 2: 3.0}  # qsgd: a step is 1/127, 1/7 or all of the largest value
_ANY_CODEC = 3.0
_PROJECTED = 1.1  # a projection leaves out at most 1, its samples by chance a little more
_MOST_MOVED = 0.2  # of the distance between the weights before
_CLOSER = 0.5


class Verification:
    """A verification of one system on a wrapped model: create it before the steps, call `end` after them, on all ranks.

    Args:
        name: the system's name, without options.
        options: the system's options.
        exchanges: "gradients" or "weights".
    """

    def __init__(self, name: str, options: dict[str, Any], model: SleepingModel, exchanges: str) -> None:
        self._name, self._options, self._model = name, options, model
        self._end = {"gradients": self._end_of_gradients, "weights": self._end_of_weights}[exchanges]
        if exchanges == "weights":
            _pause(model, True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            self._begin = _of_ranks(model.parameters())
            _pause(model, False)

    def end(self) -> None:
        """Raises RuntimeError on every rank if values are wrong on any; sets weights to zero."""
        self._end()

    def _end_of_gradients(self) -> None:
        if self._name == "qadam":  # exchanges momentum, so only weights are equal on all ranks
            self._expect_equal(self._model.parameters())
        else:
            gradients = [parameter.grad for parameter in self._model.parameters()]
            self._expect_equal(gradients)
            of_ranks = _of_ranks(gradient for layer in self._model.layers for gradient in layer.gradients)
            mean = of_ranks.mean(0)
            off = float((_sampled(gradients) - mean).norm() / mean.norm())
            rounding = 8 * max(torch.finfo(gradient.dtype).eps for gradient in gradients)
            self._expect(off <= self._allowed() + rounding, f"gradients are {off:.3g} off the mean")
        _zero(self._model)

    def _end_of_weights(self) -> None:
        _pause(self._model, True)
        end = _of_ranks(self._model.parameters())
        distance, moved = _distance(end), float((end.mean(0) - self._begin.mean(0)).norm())
        before = _distance(self._begin)
        self._expect(distance <= _CLOSER * before, f"weights are {distance:.3g} apart, {before:.3g} before")
        if self._model.bagua.algorithm.keeps_mean:
            self._expect(moved <= _MOST_MOVED * before, f"the weights' mean has moved by {moved:.3g} of {before:.3g}")
        _zero(self._model)

    def _allowed(self) -> float:
        if self._name == "powersgd":
            # A projection. With error feedback it includes the residuals of all steps before.
            has_feedback = self._options.get("error_feedback", True)
            return 1.0 + bagua.metrics.values(self._model)["steps"] if has_feedback else _PROJECTED
        if "codec" in self._options or self._options.get("error_feedback"):
            return _ANY_CODEC
        if self._name == "qsgd":
            return _ALLOWED_OF_BITS[self._options.get("bits", 8)]
        return _ALLOWED.get(self._name, _ANY_CODEC)  # a plug-in may use a codec too

    def _expect_equal(self, tensors: Iterable[torch.Tensor]) -> None:
        checksum = 0
        for tensor in tensors:
            checksum = zlib.crc32(tensor.detach().view(torch.uint8).numpy(), checksum)
        self._expect(len(set(bagua.get_default_group().all_gather_plain(checksum))) == 1, "the ranks' results differ")

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not all(bagua.get_default_group().all_gather_plain(holds)):
            raise RuntimeError(f"{self._name} {self._options} does not do what it should: {otherwise}")


def _sampled(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten()[:: max(1, t.numel() // _SAMPLES)].float() for t in tensors])


def _of_ranks(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns samples of the tensors, one row per rank."""
    mine = _sampled(tensors)
    rows = mine.new_empty(bagua.get_world_size(), mine.numel())
    bagua.all_gather(rows, mine)
    return rows


def _distance(of_ranks: torch.Tensor) -> float:
    """Returns the mean over ranks of the L2 distance to the mean of all."""
    return float((of_ranks - of_ranks.mean(0)).norm(dim=1).mean())


def _pause(model: SleepingModel, is_paused: bool) -> None:
    """Pauses or resumes an algorithm such as `async`, which must not exchange weights while they are set or read."""
    if not model.bagua.algorithm.is_lockstep:
        (model.bagua.pause if is_paused else model.bagua.resume)()


def _zero(model: SleepingModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
