"""What algorithms that average gradients under a codec share: which buckets are encoded, error feedback, seeds.

Data path: policy. No algorithm by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from bagua import codecs
from bagua.algorithms._error_feedback import STATE_DTYPES, ErrorFeedback
from bagua.algorithms.base import Algorithm, Declaration, Training
from bagua.buckets import Bucket
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.errors import InvalidArgument

_COMPRESSED, _ONE_DIMENSIONAL, _NO_CODEC = "compressed", "1-D", "dtype"
_LARGEST_BIAS_NUMEL = 65_536  # of a vector that is a bias or a norm's scale; a longer one is weights laid out flat


@dataclasses.dataclass(kw_only=True)
class CompressedGradients(Algorithm):
    """g <- Q(sum over ranks of Q(g)) / n; a subclass names Q by ``codec_spec``.

    Biases, norms and other parameters with at most one dimension are few bytes and sensitive: up to 65,536 elements
    they travel at full precision, and so do buckets below ``min_compressed_bytes`` and dtypes that the
    codec does not know (float64). ``model.bagua.buckets`` and the timeline say so, bucket by bucket.

    Args:
        average: divide the sum by the number of ranks, see gradient_allreduce.
        hierarchical: reduce inside each node at full precision first; only what travels between nodes is encoded.
        error_feedback: what the codes of a step leave out is added to what the next step encodes, at both ends. Several
            optimizers are then to step together: the step of one counts for what all of them were sent.
        state_dtype: "float32" or "bfloat16", of what error feedback remembers.
        seed: what a codec that rounds at random draws from, with the step and the place of an element.
        min_compressed_bytes: buckets below it cost the latency of a message, which a codec cannot shorten. Measured
            (benchmarks/micro/tcp_hosts.py, 1 Gbit/s between hosts): coded becomes faster between 16 and 32 KB.
    """

    takes_parts: ClassVar[bool] = True
    refuses_nonfinite: ClassVar[bool] = True

    average: bool = True
    hierarchical: bool = False
    error_feedback: bool = False
    state_dtype: str = "float32"
    seed: int = 0
    min_compressed_bytes: int = 16 * 1024

    def codec_spec(self) -> str:
        """The codec, with its options."""
        raise NotImplementedError(f"{type(self).__name__}.codec_spec")

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = codecs.get(self.codec_spec())  # raises for an unknown one
        if codec.needs_error_feedback and not self.error_feedback:
            raise InvalidArgument(
                f"codec {codec.name!r} loses as much as it sends and is of use with error feedback only; pass "
                "error_feedback=True to an algorithm that has it, or another codec"
            )
        if codec.is_expansive and self.error_feedback:
            raise InvalidArgument(
                f"codec {codec.spec!r} with error_feedback=True diverges: it is off by more than it says, so residuals "
                "grow; take more bits, or no error feedback"
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

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._num_exchanges = 0
        self._loading: dict[str, Any] | None = None
        self._feedback = self._new_feedback()

    def _new_feedback(self) -> ErrorFeedback | None:
        if not self.error_feedback:
            return None
        return ErrorFeedback(STATE_DTYPES[self.state_dtype], self.training.group, self.hierarchical)

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        if self._feedback is not None:
            self._feedback.lay_out(buckets)
            if self._loading is not None:
                self._feedback.load_state_dict(self._loading)
                self._loading = None

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        if parameter.dtype not in codecs.get(self.codec_spec()).dtypes:
            return _NO_CODEC
        is_bias = parameter.dim() <= 1 and parameter.numel() <= _LARGEST_BIAS_NUMEL
        return _ONE_DIMENSIONAL if is_bias else _COMPRESSED

    def declare(self, bucket: Bucket) -> Declaration:
        spec = self.codec_spec()
        if bucket.kind == _NO_CODEC:
            codec, reason = None, f"codec {spec} does not encode {bucket.dtype}"
        elif bucket.kind == _ONE_DIMENSIONAL:
            codec, reason = None, "1-D parameters"
        elif bucket.num_bytes < self.min_compressed_bytes:
            codec, reason = None, f"{bucket.num_bytes} bytes, below {self.min_compressed_bytes}"
        else:
            codec, reason = spec, ""
        return Declaration("all_reduce", codec, reason, self.hierarchical)

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        spec = bucket.declaration.codec
        codec = codecs.get(spec) if spec is not None else None
        if codec is not None and codec.is_random:
            codec = codec.with_seed(self.seed, self._num_exchanges, bucket.index)
        return group.all_reduce(
            bucket.flat,
            ReduceOp.AVG if self.average else ReduceOp.SUM,
            codec=codec,
            hierarchical=self.hierarchical,
            label=bucket.label,
            feedback=self._feedback.residuals_of(bucket) if self._feedback is not None else None,
            parts=bucket.parts,
            checks_result=True,
        )

    def left_out(self, indices: Sequence[int]) -> None:
        if self._feedback is not None:
            self._feedback.leave_out(indices)

    def after_backward(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        self._num_exchanges += 1
        if self._feedback is not None:
            self._feedback.end_backward(buckets)
            if not self.training.optimizers:  # no step will be seen
                self._feedback.commit()

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        if self._feedback is not None:
            self._feedback.commit()

    def state_dict(self) -> dict[str, Any]:
        feedback = {} if self._feedback is None else {"residuals": self._feedback.state_dict()}
        return {"num_exchanges": self._num_exchanges, **feedback}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if ("residuals" in state) != (self._feedback is not None):
            raise InvalidArgument(
                f"the checkpoint was written with error_feedback={'residuals' in state}, the model runs with "
                f"error_feedback={self.error_feedback}; wrap it as it was"
            )
        self._num_exchanges = state["num_exchanges"]
        # For the layout that follows: the stage decides what is encoded.
        self._feedback, self._loading = self._new_feedback(), state.get("residuals")
