"""CodedReductions: gradient reductions under a codec for other libraries' hooks, with error feedback by key.

Data path: a hook of torch's DDP or FSDP2 -> **here** -> ProcessGroup. Invariant: a residual is renewed only where the
result is finite; so NaN and Inf of one step leave what is remembered as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bagua import _C, codecs
from bagua.distributed.arguments import ReduceOp
from bagua.distributed.checkpoints import check_writer, writer_of
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.tensors import Residuals
from bagua.distributed.work import Work
from bagua.errors import InvalidArgument

# A codec does not shorten the latency of a message: measured, coded becomes faster between 16 and 32 KB.
MIN_COMPRESSED_BYTES = 16 * 1024


class CodedReductions:
    """Averages or sums tensors under one codec, and remembers what the codes left out.

    Args:
        codec: the name of a codec, with its options; None: full precision.
        error_feedback: what the codes of one reduction leave out is added to the next one of the same key.
        record: called with each Work, its group and its codec, "" for full precision.

    Raises:
        InvalidArgument: the codec is unknown, or does not go with error feedback.
    """

    def __init__(
        self, codec: str | None, error_feedback: bool, record: Callable[[Work, ProcessGroup, str], None]
    ) -> None:
        self.codec = None if codec is None else codecs.get(codec)
        self.error_feedback, self._record = error_feedback, record
        if self.codec is not None:
            self.codec.check_error_feedback(error_feedback)
        elif error_feedback:
            raise InvalidArgument("error_feedback=True remembers what a codec leaves out; pass a codec too")
        self._num_calls: dict[int, int] = {}  # by key: the seed of random rounding
        # The committed residuals of worker and owner, and their successors, by key.
        self._residuals: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def all_reduce(self, group: ProcessGroup, tensor: torch.Tensor, key: int, op: ReduceOp, label: str) -> Work:
        """Starts ``tensor`` <- op over ranks of ``tensor``, in place; tensors of one ``key`` have one size."""
        codec = self._codec_for(group, tensor, key)
        residuals = None
        if codec is not None and self.error_feedback:
            _, owned = _C.owned_stripe(tensor.numel(), group.size, group.rank, codec.spec)
            residuals = self._residuals_of(key, tensor, owned)
        work = group.all_reduce(
            tensor, op, codec=codec, label=label, feedback=residuals, checks_result=residuals is not None
        )
        return self._started(work, group, codec, key, tensor, residuals)

    def reduce_scatter(
        self, group: ProcessGroup, output: torch.Tensor, input: torch.Tensor, key: int, op: ReduceOp, label: str
    ) -> Work:
        """Starts ``output`` <- op over ranks of this rank's block of their ``input``, of one size for each ``key``."""
        codec = self._codec_for(group, input, key)
        residuals = self._residuals_of(key, input, 0) if codec is not None and self.error_feedback else None
        work = group.reduce_scatter(
            output, input, op, codec=codec, feedback=residuals, checks_result=residuals is not None
        )
        work.label = label
        return self._started(work, group, codec, key, output, residuals)

    def _codec_for(self, group: ProcessGroup, tensor: torch.Tensor, key: int) -> codecs.SeededCodec | None:
        """Returns the codec of one reduction, which is the same on all ranks; None: full precision."""
        is_coded = self.codec is not None and group.size > 1 and tensor.dtype in self.codec.dtypes
        if not is_coded or tensor.nbytes < MIN_COMPRESSED_BYTES:
            return None
        self._num_calls[key] = num_calls = self._num_calls.get(key, 0) + 1
        return self.codec.with_seed(0, num_calls, key)

    def _residuals_of(self, key: int, tensor: torch.Tensor, num_owned: int) -> Residuals:
        wanted = [tensor.numel(), num_owned]
        pair = self._residuals.get(key)
        if pair is None:
            now = [torch.zeros(numel, dtype=torch.float32, device=tensor.device) for numel in wanted]
            pair = self._residuals[key] = now, [torch.zeros_like(one) for one in now]
        now, following = pair
        if [one.numel() for one in now] != wanted:
            raise InvalidArgument(
                f"reduction {key} has {wanted[0]} elements, and {now[0].numel()} are remembered of it: the model, its "
                "buckets or the number of ranks have changed; make the hook anew, without its state"
            )
        if now[0].device != tensor.device:  # of a checkpoint
            for some in pair:
                some[:] = [one.to(tensor.device) for one in some]
        return Residuals(now[0], following[0], now[1], following[1])

    def _started(
        self,
        work: Work,
        group: ProcessGroup,
        codec: codecs.SeededCodec | None,
        key: int,
        result: torch.Tensor,
        residuals: Residuals | None,
    ) -> Work:
        """Records ``work``, and has it commit its residuals when it is waited for."""
        self._record(work, group, "" if codec is None else codec.spec)
        if residuals is None:
            return work

        def commit() -> None:
            now, following = self._residuals[key]
            if result.is_cpu:
                # A rank sees its own block of a reduce-scatter only, and what it has sent for the others.
                if work.is_result_finite and not work.nonfinite_blocks:
                    self._residuals[key] = following, now
                return
            is_finite = torch.isfinite(result).all() & torch.isfinite(following[0]).all()
            for old, new in zip(now, following, strict=True):
                torch.where(is_finite, new, old, out=old)

        work.finish_with(commit)
        return work

    # --- checkpoints

    def state_dict(self, group: ProcessGroup) -> dict[str, Any]:
        """Returns what this rank remembers: plain data and tensors, no communication."""
        residuals = {str(key): [one.clone() for one in now] for key, (now, _) in self._residuals.items()}
        return {
            "writer": writer_of(group),
            "codec": None if self.codec is None else self.codec.spec,
            "error_feedback": self.error_feedback,
            "num_calls": {str(key): num for key, num in self._num_calls.items()},
            "residuals": residuals,
        }

    def load_state_dict(self, state: Mapping[str, Any], group: ProcessGroup) -> None:
        """Restores what ``state_dict`` returned on this rank.

        Raises:
            InvalidArgument: it is of another codec, rank or number of ranks.
        """
        ours = (None if self.codec is None else self.codec.spec, self.error_feedback)
        theirs = (state["codec"], state["error_feedback"])
        if theirs != ours:
            raise InvalidArgument(
                f"the state is of codec={theirs[0]!r}, error_feedback={theirs[1]}; here they are {ours[0]!r} and "
                f"{ours[1]}"
            )
        check_writer(state["writer"], group, "residuals")
        self._num_calls = {int(key): int(num) for key, num in state["num_calls"].items()}
        self._residuals = {
            int(key): ([one.clone() for one in now], [torch.zeros_like(one) for one in now])
            for key, now in state["residuals"].items()
        }
