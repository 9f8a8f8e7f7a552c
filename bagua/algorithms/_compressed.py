"""The common part of algorithms that average gradients under a codec: what is encoded, error feedback, seeds.

Data path: policy. No algorithm by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms.base import Algorithm, ParameterState, Training
from bagua.buckets import Bucket, bucket_dtype
from bagua.distributed.process_group import ReduceOp, Work
from bagua.errors import InvalidArgument

MOVING_AVERAGE = "moving_average"
_BETA, _AVERAGED_STEPS = 0.8, 1024
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPRESSED, _ONE_DIMENSIONAL, _NO_CODEC = "compressed", "1-D", "dtype"
_LARGEST_BIAS_NUMEL = 65_536  # of a vector that is a bias or a norm's scale; a longer one is weights laid out flat


@dataclasses.dataclass(kw_only=True)
class CountedGradients(Algorithm):
    """Counts the backwards that have exchanged gradients."""

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._num_exchanges = 0

    def after_backward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        self._num_exchanges += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_exchanges": self._num_exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_exchanges = state["num_exchanges"]


@dataclasses.dataclass(kw_only=True)
class CompressedGradients(CountedGradients):
    """g <- Q(sum over ranks of Q(g)) / n; a subclass names Q by ``codec_spec``.

    Biases, norms and other parameters with at most one dimension are few bytes and sensitive: up to 65,536 elements
    they travel at full precision, and so do buckets below ``min_compressed_bytes`` and dtypes that the
    codec does not know (float64). ``model.bagua.buckets`` and the timeline say so, bucket by bucket.

    Args:
        average: divide the sum by the number of ranks, see gradient_allreduce.
        hierarchical: reduce inside each node at full precision first; only what travels between nodes is encoded.
        error_feedback: what the codes of a step leave out is added to what the next step encodes, at both ends.
            "moving_average" (LoCo, arXiv 2407.04480): a mean of what the last steps have left out is, e <- 0.8 e + 0.2
            r, which begins anew after 1024 steps; for 4 bits.
        state_dtype: "float32" or "bfloat16", of what error feedback remembers.
        seed: what a codec that rounds at random draws from, with the step and the offset of an element.
        min_compressed_bytes: buckets below it cost the latency of a message, which a codec cannot shorten. Measured
            (benchmarks/micro/tcp_hosts.py, 1 Gbit/s between hosts): coded becomes faster between 16 and 32 KB.
    """

    average: bool = True
    hierarchical: bool = False
    error_feedback: bool | str = dataclasses.field(default=False, metadata={"types": (bool, str)})
    state_dtype: str = "float32"
    seed: int = 0
    min_compressed_bytes: int = 16 * 1024

    def codec_spec(self) -> str:
        """The codec, with its options."""
        raise NotImplementedError(f"{type(self).__name__}.codec_spec")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._codec = codec = codecs.get(self.codec_spec())  # raises for an unknown one
        if isinstance(self.error_feedback, str) and self.error_feedback != MOVING_AVERAGE:
            raise InvalidArgument(
                f"error_feedback is {self.error_feedback!r}, expected True, False or {MOVING_AVERAGE!r}"
            )
        codec.check_error_feedback(bool(self.error_feedback))
        if codec.needs_error_feedback and self.error_feedback == MOVING_AVERAGE:
            raise InvalidArgument(
                f"codec {codec.spec!r} loses as much as it sends, and a moving average would lose most of that for "
                "good; pass error_feedback=True"
            )
        if self.state_dtype not in STATE_DTYPES:
            raise InvalidArgument(
                f"state_dtype is {self.state_dtype!r}, expected {' or '.join(map(repr, STATE_DTYPES))}"
            )
        if self.state_dtype != "float32" and not self.error_feedback:
            raise InvalidArgument(
                f"state_dtype is {self.state_dtype!r}, but without error_feedback=True there is no state"
            )
        if self.seed and not codec.is_random:
            raise InvalidArgument(
                f"seed is {self.seed}, but codec {codec.name!r} draws nothing at random; leave it out"
            )
        if self.min_compressed_bytes < 0:
            raise InvalidArgument(f"min_compressed_bytes is {self.min_compressed_bytes}, expected 0 or more")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed is {self.seed}, expected 0 to 2**64 - 1")

    def parameter_state(self) -> dict[str, ParameterState]:
        beta = _BETA if self.error_feedback == MOVING_AVERAGE else None
        state = ParameterState(STATE_DTYPES[self.state_dtype], is_scaled=True, moving_average=beta)
        return {"residual": state} if self.error_feedback else {}

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        if bucket_dtype(parameter) not in self._codec.dtypes:
            return _NO_CODEC
        return _ONE_DIMENSIONAL if is_bias(parameter) else _COMPRESSED

    def exempt(self, bucket: Bucket) -> str:
        """Returns the reason why ``bucket`` travels at full precision; "" if it does not."""
        if bucket.kind == _NO_CODEC:
            return f"codec {self.codec_spec()} does not encode {bucket.dtype}"
        if bucket.kind == _ONE_DIMENSIONAL:
            return "1-D parameters"
        if bucket.num_bytes < self.min_compressed_bytes:
            return f"{bucket.num_bytes} bytes, below {self.min_compressed_bytes}"
        return "one node" if self.hierarchical and len(self.training.group.nodes.members) == 1 else ""

    def communicate(self, bucket: Bucket, group: BucketGroup, prepare: Callable[[], None] | None = None) -> Work:
        reason, spec = self.exempt(bucket), self.codec_spec()
        codec = None if reason else spec
        if codec is not None and self._codec.is_random:
            codec = self._codec.with_seed(self.seed, self._num_exchanges, bucket.index)._replace(spec=spec)
        begins_anew = self._num_exchanges % _AVERAGED_STEPS == 0 and self._num_exchanges > 0
        if codec is not None and self.error_feedback == MOVING_AVERAGE and begins_anew and group.size > 1:
            residuals = bucket.residuals("residual", codec, self.hierarchical)
            for residual in (getattr(residuals, field.name) for field in dataclasses.fields(residuals)):
                residual.zero_()
        return group.all_reduce(
            bucket,
            ReduceOp.AVG if self.average else ReduceOp.SUM,
            codec=codec,
            hierarchical=self.hierarchical,
            feedback="residual" if self.error_feedback else None,
            prepare=prepare,
            reason=reason,
        )


def is_bias(parameter: torch.nn.Parameter) -> bool:
    """Returns True for what is few bytes and sensitive: a bias, or the scale of a norm."""
    return parameter.dim() <= 1 and parameter.numel() <= _LARGEST_BIAS_NUMEL
