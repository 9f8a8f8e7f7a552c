"""bagua.ddp: gradients of torch's DistributedDataParallel under a codec, by its communication hook.

Data path: DDP's reducer -> **the hook** -> CodedReductions -> ProcessGroup. The model stays wrapped by DDP; only what
its buckets send changes. Bytes travel over bagua's connections, whatever the backend of DDP's process group is.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from bagua.distributed.coded_reductions import CodedReductions
from bagua.distributed.process_group import ProcessGroup, ReduceOp
from bagua.distributed.world import GroupLike, init_beside_torch, resolve
from bagua.errors import DeadlineExceeded, InvalidArgument
from bagua.profiler.hook_timeline import HookTimeline
from bagua.torch_backend.callback_levels import Level, Levels
from bagua.torch_backend.futures import TorchFuture

__all__ = ["CommHook", "comm_hook"]

_LAST_STEPS_S = 2.0  # a group that is closed waits this long for steps of its hooks


class CommHook(HookTimeline):
    """A communication hook of one DistributedDataParallel; see ``comm_hook``.

    It has the timeline of the buckets' operations. A step there begins with its first bucket, waits from the end of
    backward's computation on, and ends when DDP has all gradients.
    """

    def __init__(self, codec: str | None, error_feedback: bool, group: GroupLike) -> None:
        self.__name__ = self.__qualname__ = "bagua.ddp.comm_hook"  # DDP logs them
        super().__init__("bagua.ddp.comm_hook")
        self._reductions = CodedReductions(codec, error_feedback, self._record)
        self._wanted_group = group
        self._joining = threading.Lock()  # guards the next one and _group
        self._level: Level | None = None
        # These times are of the current backward: its first bucket came, and its computation ended.
        self._begin_ns = self._wait_ns = self._num_buckets = 0
        self._first_of: dict[int, torch.Tensor] = {}  # the first parameter of each bucket
        self._is_laid_out = False  # True after the first backward, when DDP's buckets have their final layout
        self._loaded: Mapping[str, Any] | None = None  # a state, until the group is known

    # Without annotations that are strings, which DDP compares with its classes.
    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the mean of the bucket's gradients over all ranks; DDP calls it."""
        group, level = self._joined()
        tensor, index = bucket.buffer(), bucket.index()
        if self._is_laid_out:
            self._check_owner(index, bucket.parameters()[0])
        if index == 0:
            self._begin_ns = time.monotonic_ns()
        label = f"bucket {index}"
        if self._is_laid_out:
            work = self._reductions.all_reduce(group, tensor, index, ReduceOp.AVG, label)
        else:
            work = group.all_reduce(tensor, ReduceOp.AVG, label=label)
            self._record(work, group, "")
            self._is_laid_out = bucket.is_last()
        if bucket.is_last() and torch._C._current_graph_task_id() != -1:  # else for ranks that go on, in join()
            self._num_buckets = index + 1
            torch.autograd.Variable._execution_engine.queue_callback(self._computed)

        def result() -> torch.Tensor:
            work.wait()
            return tensor

        future = TorchFuture(level, result, work.device)
        level.thread.after_enqueued(work, future.take_turn)
        return future

    def _computed(self) -> None:
        """Notes the end of the computation, and queues the end of the step behind DDP's own callback, which waits."""
        self._wait_ns = time.monotonic_ns()
        torch.autograd.Variable._execution_engine.queue_callback(self._synchronised)

    def _synchronised(self) -> None:
        self._recorder.add_step(self._begin_ns, self._wait_ns, time.monotonic_ns(), self._num_buckets)

    def _check_owner(self, index: int, parameter: torch.Tensor) -> None:
        if self._first_of.setdefault(index, parameter) is not parameter:
            raise InvalidArgument("this hook serves another DistributedDataParallel already; make one for each model")

    def _joined(self) -> tuple[ProcessGroup, Level]:
        """Returns the ranks and the thread that completes futures; collective when it is first called."""
        with self._joining:
            if self._group is None or self._level is None:
                init_beside_torch()
                group = resolve(self._wanted_group)
                level = Levels(group).program

                def end() -> None:
                    try:
                        level.thread.close(_LAST_STEPS_S)
                    except DeadlineExceeded:  # it ends with the group
                        pass

                group.before_close.append(end)
                if self._loaded is not None:
                    self._reductions.load_state_dict(self._loaded, group)
                    self._loaded = None
                self._group, self._level = group, level
            return self._group, self._level

    def state_dict(self) -> dict[str, Any]:
        """Returns what error feedback remembers on this rank, for a checkpoint; every rank saves its own."""
        if self._group is None:
            if self._loaded is not None:
                return dict(self._loaded)
            raise InvalidArgument("state_dict() of a hook before the first backward: there is nothing to save yet")
        return self._reductions.state_dict(self._group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned on this rank, in the first backward at the latest.

        Raises:
            InvalidArgument: it is of another codec, rank or number of ranks; in the first backward where bagua is not
                initialised yet.
        """
        if self._group is None:
            self._loaded = state
        else:
            self._reductions.load_state_dict(state, self._group)


def comm_hook(codec: str | None = "minmax_uint8", *, error_feedback: bool = False, group: GroupLike = None) -> CommHook:
    """Returns a hook for ``DistributedDataParallel.register_comm_hook``: gradients are averaged under a codec.

    DDP may have any backend of torch.distributed, on the CPU and on CUDA devices: bagua has its own connections. Where
    bagua is not initialised, the first backward does so, with torch's ranks and store. That first backward is at full
    precision, because DDP lays its buckets out anew after it. So are buckets below 16 KB, and types that the codec does
    not encode.

    Args:
        codec: any of ``bagua.codecs.available()``, with its options, such as "qsgd:bits=4"; None: full precision.
        error_feedback: what the codes of a step leave out is added to what the next step encodes. It takes 2 (1 + 1/n)
            float32 copies of the gradients, and its ``state_dict`` belongs into checkpoints, one per rank.
        group: the ranks of DDP's ``process_group``; all by default.

    Raises:
        InvalidArgument: the codec is unknown, or does not go with ``error_feedback``.

    Example:
        >>> hook = bagua.ddp.comm_hook(codec="minmax_uint8", error_feedback=True)
        >>> ddp_model.register_comm_hook(None, hook)  # doctest: +SKIP
    """
    return CommHook(codec, error_feedback, group)
