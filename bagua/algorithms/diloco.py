"""diloco: H local steps of any optimizer, and then a step of Nesterov's SGD on the mean of what the ranks have moved.

Data path: policy, on the engine of ``_outer.py``. Per exchange of a fragment one all_reduce per bucket, 2 (n-1)/n of
its bytes. Sources: arXiv 2311.08105; in fragments, overlapped and in few bits (Streaming DiLoCo): arXiv 2501.18512.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from bagua import codecs
from bagua.algorithms._outer import MOMENTUM, REFERENCE, RESIDUAL, Mean, OuterSGD, OuterSteps, Schedule
from bagua.algorithms.base import About, ParameterState
from bagua.algorithms.registry import register
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class DiLoCo(OuterSteps):
    """D = reference - weights; b <- mu b + mean D; reference <- reference - lr (mean D + mu b); weights <- reference.

    The states of the optimizer stay each rank's own. Each rank needs 1/n of the tokens that one process would train on.

    Args:
        sync_every: H, the local steps of each optimizer between two exchanges of a weight.
        outer_lr: lr of the formula.
        outer_momentum: mu of it; 0 for plain SGD. With a small H 0.9 is too much.
        fragments: P. The model is exchanged in so many parts, at different steps: layers in strides, and the rest.
        overlap_steps: tau. An exchange goes on for so many steps, below sync_every / fragments, before its result
            takes effect; without, the step waits for it.
        merge: alpha, with overlap: weights <- alpha weights + (1 - alpha) reference. 0 drops what the steps meanwhile
            have changed, 1 never takes the global value.
        codec: of what travels, such as "fp4_e3m0" or "minmax_uint8"; "": full precision.
        error_feedback: what a codec leaves out is added to the next exchange.
        feedback_decay: beta, the share of it that is.
        warmup_steps: so many steps of every optimizer first average gradients.
        state_dtype: "float32" or "bfloat16", of b and of what error feedback keeps.
        state_device: "cpu" keeps reference and b in host memory.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="diloco", sync_every=30)
    """

    about = About(
        sends="how far the weights have moved since the last exchange, full precision or in a codec",
        to="all ranks",
        when="after every k-th optimizer step, which waits; with `overlap_steps` during the steps that follow",
        bytes_per_step="2 (n-1)/n G / k",
        memory="3 G, without outer momentum 2 G; with error feedback (1 + 1/n) G more, in bfloat16 half of that "
        "and of b",
        use_when="the ranks are far apart (the internet): one exchange in tens or hundreds of steps",
        paper="[2311.08105](https://arxiv.org/abs/2311.08105), streaming [2501.18512](https://arxiv.org/abs/2501.18512)",
    )

    sync_every: int = 30
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap_steps: int = 0
    merge: float = 0.0
    codec: str = ""
    error_feedback: bool = False
    feedback_decay: float = 1.0
    warmup_steps: int = 0
    state_dtype: str = "float32"
    state_device: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = Schedule(self.sync_every, self.fragments, self.overlap_steps, self.merge, self.warmup_steps)
        if not 0 < self.outer_lr < math.inf:
            raise InvalidArgument(f"outer_lr is {self.outer_lr}, expected a number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise InvalidArgument(f"outer_momentum is {self.outer_momentum}, expected 0 or more, and below 1")
        if not 0 < self.feedback_decay <= 1:
            raise InvalidArgument(f"feedback_decay is {self.feedback_decay}, expected a number above 0, at most 1")
        if self.state_dtype not in ("float32", "bfloat16"):
            raise InvalidArgument(f"state_dtype is {self.state_dtype!r}, expected 'float32' or 'bfloat16'")
        if self.state_device not in ("", "cpu"):
            raise InvalidArgument(f"state_device is {self.state_device!r}, expected '' (the parameters') or 'cpu'")
        if self.error_feedback and not self.codec:
            raise InvalidArgument("error_feedback=True without a codec, where nothing is left out; pass a codec too")
        codec = codecs.get(self.codec) if self.codec else None  # raises for an unknown one
        if codec is not None:
            codec.check_error_feedback(self.error_feedback)
        dtype, on_host = getattr(torch, self.state_dtype), self.state_device == "cpu"
        states = {REFERENCE: ParameterState(None, on_host=on_host)}
        if self.outer_momentum:
            states[MOMENTUM] = ParameterState(None if dtype is torch.float32 else dtype, on_host=on_host)
        if self.error_feedback:
            states[RESIDUAL] = ParameterState(dtype, is_scaled=True)
        aggregate = Mean(codec, self.feedback_decay if self.error_feedback else None)
        self.set_parts(schedule, aggregate, OuterSGD(self.outer_lr, self.outer_momentum), states, codec)
