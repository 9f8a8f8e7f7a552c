"""ProcessGroup: some ranks, their connections, and the collectives on tensors and Python objects as methods.

Tensors cross into the core as addresses: tensors.py checks them and stages those that the core cannot work on, this
file checks how they fit together, and the core's Work keeps them alive. cores.py holds the two cores of a group.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch

from bagua import _C
from bagua.distributed import objects, plain_data
from bagua.distributed.arguments import (
    ReduceOp,
    check_codec,
    check_op,
    check_topology,
    dtype_code,
    moved_dtype_code,
    moved_per_element,
)
from bagua.distributed.cores import GroupCores, Network
from bagua.distributed.devices import StreamKey, check_not_capturing, common_device, current_stream
from bagua.distributed.job_ranks import JobRanks, reworded
from bagua.distributed.nodes import Nodes
from bagua.distributed.tensors import Array, Residuals, check_pair, prepare, segments_of, split_numels
from bagua.distributed.work import Work, to_seconds
from bagua.errors import BaguaError, InvalidArgument, TransportError

__all__ = ["COUNTS_FORWARDS", "ProcessGroup", "ReduceOp", "Work", "dtype_code"]

logger = logging.getLogger("bagua")
COUNTS_FORWARDS = 1 << 29  # of the subject of a collective: kCountsForwards of csrc/common/operation.h

_OPEN_GROUPS = "; groups that are not used any more hold some until they are destroyed: dropping one does not close it"
_PLAIN = objects.Format(plain_data.dumps, plain_data.loads, can_loads_fail=False)
_PICKLED = objects.Format(pickle.dumps, pickle.loads, can_loads_fail=True)


def _message(data: torch.Tensor) -> tuple[int, int, int]:
    return data.data_ptr(), data.nbytes, moved_dtype_code(data.dtype)


_operation_check: ContextVar[Callable[[ProcessGroup], None] | None] = ContextVar("bagua_operation_check", default=None)


@contextlib.contextmanager
def operations_checked(check: Callable[[ProcessGroup], None]) -> Iterator[None]:
    """Calls `check` with the group before each operation of any group inside; it raises where one is not allowed."""
    token = _operation_check.set(check)
    try:
        yield
    finally:
        _operation_check.reset(token)


class ProcessGroup:
    """Ranks that communicate.

    Made by init_process_group and new_group, not by hand. Ranks in the arguments of the methods are ranks of the
    group; the functions of bagua.distributed.collectives translate from global ranks.

    Attributes:
        rank: this process's rank in the group, -1 when it is not a member.
        size, ranks: the number of ranks, and their global ranks.
        name: the same on all ranks.
        timeout: deadline of each operation.
        subgroups: the open ones that ``subgroup`` has made.
        is_rehearsal: True of ``bagua.simulator``, whose models no program has seen.
    """

    is_rehearsal: ClassVar[bool] = False

    def __init__(self, network: Network, name: str, ranks: Sequence[int], global_rank: int, timeout: timedelta | float):
        self.name = name
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.set_timeout(timeout)
        self._network = network
        self._global_rank = global_rank
        self.rank = self.ranks.index(global_rank) if global_rank in self.ranks else -1
        self.job_ranks = JobRanks(name, self.ranks)
        self._parent: ProcessGroup | None = None
        self.subgroups: dict[ProcessGroup, None] = {}  # in the order in which they were made
        self.before_close: list[Callable[[], None]] = []  # called when it is closed, while it can be used
        self._closed = self._has_told_path = False
        self._pid = os.getpid()
        if self.rank >= 0:
            shares_memory = [peer == global_rank or network.share_memory(global_rank, peer) for peer in self.ranks]
            self.local_ranks = [rank for rank in range(self.size) if shares_memory[rank]]
            try:
                self._cores = GroupCores(network, name, self.ranks, self.rank)
            except TransportError as error:  # this process has no descriptor, thread or memory left
                raise self.job_ranks.told(reworded(error, after=_OPEN_GROUPS)) from None
            except BaguaError as error:
                raise self.job_ranks.told(error) from None
            self._core, self._p2p_core = self._cores.collectives, self._cores.p2p

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name!r}, rank={self.rank}, size={self.size})"

    # ---- set-up

    @cached_property
    def nodes(self) -> Nodes:
        """The ranks of the group by node."""
        ranks, network = self.ranks, self._network
        return Nodes.of(self.size, lambda a, b: network.same_node(ranks[a], ranks[b]))

    def subgroup(self, name: str, ranks: Sequence[int], timeout: timedelta | float) -> ProcessGroup:
        """A group of some ranks of this one. Only its members call it; it is closed with this one at the latest.

        Args:
            name: the same on all members; no other group of the same ranks that is open or has failed may have it.
            ranks: ranks of this group, this process's among them; in the same order on all members.
        """
        self.check()
        name, own = f"{self.name}/{name}", [self.ranks[rank] for rank in ranks]
        child = self.adopt(ProcessGroup(self._network, name, own, self._global_rank, timeout))
        child.job_ranks = JobRanks(name, [self.job_ranks.ranks[rank] for rank in ranks])
        return child

    def adopt(self, child: ProcessGroup) -> ProcessGroup:
        """Close `child` with this group at the latest; returns it."""
        child._parent, self.subgroups[child] = self, None
        return child

    def close(self) -> None:
        """End the worker threads and announce the shutdown to the peers. Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with contextlib.ExitStack() as stack:  # it is closed, whatever the calls raise
            stack.callback(self._close)
            for call in [] if self._closed else list(self.before_close):
                call()

    def _close(self) -> None:
        for child in reversed(list(self.subgroups)):  # while this one can still report whether it has failed
            child.close()
        self._closed = True
        if self._parent is not None:
            self._parent.subgroups.pop(self, None)
        if self.rank >= 0:
            self._cores.close()

    # ---- state

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the deadline of operations that are started from now on; it may differ between ranks."""
        self._timeout_s = to_seconds(timeout)
        self.timeout = timedelta(seconds=self._timeout_s)

    def _check_member(self) -> None:
        if self.rank < 0:
            raise InvalidArgument(
                f"rank {self._global_rank} is not a member of the group '{self.name}' (ranks {self.ranks}); "
                "only members may call its operations"
            )

    def check(self) -> None:
        """Raise the first cause when an operation of the group has failed on any rank.

        Raises:
            InvalidArgument: this process is not a member, or a forked child of one, or the group was destroyed.
        """
        if self.rank < 0:
            self._check_member()
        if (is_allowed := _operation_check.get()) is not None:
            is_allowed(self)
        if self._pid != os.getpid():
            raise InvalidArgument(
                f"this process is a forked child of rank {self._global_rank} (process {self._pid}) and not a rank; "
                "call bagua in the parent"
            )
        if self._closed:
            raise InvalidArgument(f"the group '{self.name}' was destroyed; call init_process_group or new_group again")
        try:
            self._cores.check()
        except BaguaError as error:
            raise self.job_ranks.told(error) from None

    def failure(self) -> BaguaError | None:
        """Returns the error that ``check`` raises after an operation has failed on any rank; None if none has."""
        if self.rank < 0 or self._closed or self._pid != os.getpid():
            return None
        try:
            self._cores.check()
        except BaguaError as error:
            return self.job_ranks.told(error)
        return None

    def poison(self, exception: BaguaError) -> None:
        """Make every later call on every connected rank raise `exception` as the first cause."""
        if self.rank >= 0:
            self._cores.poison(self.job_ranks.own(exception))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent (through sockets, rings or shared memory) since the group was made."""
        return self._cores.total(lambda core: core.bytes_sent) if self.rank >= 0 else 0

    @property
    def bytes_received(self) -> int:
        """Payload bytes that this rank has received."""
        return self._cores.total(lambda core: core.bytes_received) if self.rank >= 0 else 0

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the group keeps between operations."""
        return self._cores.total(lambda core: core.workspace_bytes) if self.rank >= 0 else 0

    def events(self, clear: bool = False, parts: bool = True, after_ns: int = 0) -> list[_C.Event]:
        """The worker's spans that ended after `after_ns`, oldest first, with times on the steady clock."""
        self._check_member()
        return self._core.events(clear, parts, after_ns)

    def kept_since_ns(self) -> tuple[int, int]:
        """Times since when ``events`` has all operations, and all parts of operations; 0 if none was dropped."""
        return self._core.kept_since_ns()

    # ---- memory

    def empty(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        """A zeroed 1-D tensor; of the CPU in memory that the ranks of this host share.

        Collectives on it are copy-free: peers reduce straight from and into it. Private memory when no other rank of
        the group is on this host, and on devices.
        """
        self._check_member()
        item_bytes = dtype.itemsize
        if numel < 0:
            raise InvalidArgument(f"numel {numel} is negative")
        if numel * item_bytes > sys.maxsize:
            raise InvalidArgument(f"{numel} elements of {dtype} are more bytes than a process can address; make less")
        if numel == 0 or len(self.local_ranks) == 1 or torch.device(device).type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return torch.frombuffer(_C.SharedMemory(numel * item_bytes), dtype=dtype, count=numel)

    # ---- operations

    def _work(
        self, core_work: _C.Work, what: str, label: str = "", finish=None, on: torch.Tensor | None = None
    ) -> Work:
        # The deadline counts from the start of the operation, which may be queued behind others.
        device = None if on is None or on.is_cpu else on.device
        if device is not None and not self._has_told_path:
            self._has_told_path = True
            core_work.add_done_callback(self._tell_device_path)
        failed, job_ranks = self._cores.share_failure, self.job_ranks
        return Work(core_work, 1000.0 * self._timeout_s, what, label, finish, failed, job_ranks, device)

    def _tell_device_path(self) -> None:
        if self.device_path:
            logger.info("tensors of devices in the group '%s' move by %s", self.name, self.device_path)

    @property
    def device_path(self) -> str:
        """The path of tensors of a device: "NCCL 2.27.3", or "staged: ..." and why; "" before the first."""
        return self._core.device_path

    def _submission(
        self, data: torch.Tensor, blocking: bool, *others: object
    ) -> tuple[float, bool, StreamKey | None, object]:
        """Returns how the core is to start an operation on `data`, and what it keeps until the end."""
        if data.is_cpu:
            return self._timeout_s, blocking, None, (data, others)
        check_not_capturing(data.device, "a collective was called", "call it outside of torch.cuda.graph()")
        return self._timeout_s, blocking, current_stream(data.device), (data, others)

    def _check_root(self, root: int, name: str) -> int:
        if not 0 <= root < self.size:
            raise InvalidArgument(f"{name} {root} is not a rank of the group '{self.name}' (0..{self.size - 1})")
        return root

    def all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        codec: str | None = None,
        hierarchical: bool = False,
        label: str = "",
        blocking: bool = False,
        feedback: Residuals | None = None,
        parts: Sequence[tuple[int, torch.Tensor]] | None = None,
        checks_result: bool = False,  # for Work.is_result_finite, on the CPU
        subject: int = 0,
    ) -> Work:
        """tensor <- op over ranks of tensor, or of parts (segments_of); see bagua.all_reduce, and Residuals.

        ``subject`` is a number, to 2**30 - 1, for what it is about: ranks with different ones raise. From
        ``COUNTS_FORWARDS`` on it is twice the number of a model's forwards, plus 1 in train(); messages say so.
        """
        self.check()
        data, copy_back = prepare(tensor, "tensor")
        op = check_op(op, data.dtype)
        codec = check_codec(codec, data.dtype, op)
        arguments = (
            data.data_ptr(),
            data.numel(),
            dtype_code(data.dtype),
            int(op),
            codec,
            self._submission(data, blocking, tensor, feedback, parts),
        )
        residuals = None if feedback is None else feedback.addresses(data)
        segments = [] if parts is None else segments_of(parts, data)
        if hierarchical:
            nodes = (self.nodes.node_of(self.rank), self.nodes.leaders)
            work = self._core.hierarchical_all_reduce(*nodes, *arguments, residuals, segments, checks_result, subject)
        else:
            work = self._core.all_reduce(*arguments, residuals, segments, checks_result, subject)
        return self._work(work, "all_reduce", label, copy_back, data)

    def neighbor_average(
        self,
        tensor: Array,
        topology: str = "ring",
        step: int = 0,
        *,
        codec: str | None = None,
        hierarchical: bool = False,
        label: str = "",
        blocking: bool = False,
        parts: Sequence[tuple[int, torch.Tensor]] | None = None,
    ) -> Work:
        """tensor <- weighted average of the neighbours' tensors, or of parts; see bagua.neighbor_average."""
        self.check()
        data, copy_back = prepare(tensor, "tensor")
        number = check_topology(topology, step, data.dtype)
        codec = check_codec(codec, data.dtype)
        memory = (data.data_ptr(), data.numel(), dtype_code(data.dtype))
        arguments = (
            *memory,
            number,
            step,
            codec,
            self._submission(data, blocking, tensor, parts),
            segments_of(parts, data),
        )
        if hierarchical:
            nodes = (self.nodes.node_of(self.rank), self.nodes.leaders, self.nodes.smallest)
            work = self._core.hierarchical_neighbor_average(*nodes, *arguments)
        else:
            work = self._core.neighbor_average(*arguments)
        return self._work(work, "neighbor_average", label, copy_back, data)

    def difference_ring_average(
        self, tensor: Array, replicas: Sequence[torch.Tensor], *, codec: str, label: str = ""
    ) -> Work:
        """tensor <- own, where own += D(codec(tensor + left/3 + right/3 - 5/3 own)), and left and right likewise.

        `replicas` are own, left and right: float32, contiguous, of tensor's size, equal on all ranks at first; between
        two ranks left and right may be one tensor.
        """
        self.check()
        data, copy_back = prepare(tensor, "tensor")
        spec = check_codec(codec, data.dtype)
        common_device([("the tensor", data), *(("a replica", replica) for replica in replicas)])
        addresses = [replica.data_ptr() for replica in replicas]
        work = self._core.difference_ring_average(
            data.data_ptr(),
            data.numel(),
            dtype_code(data.dtype),
            *addresses,
            spec,
            self._submission(data, False, tensor, replicas),
        )
        return self._work(work, "difference_ring_average", label, copy_back, data)

    def reduce(self, tensor: Array, dst: int, op: ReduceOp = ReduceOp.SUM, *, blocking: bool = False) -> Work:
        """tensor of rank `dst` <- op over ranks of tensor; the other ranks' tensors are undefined afterwards."""
        self.check()
        self._check_root(dst, "dst")
        data, copy_back = prepare(tensor, "tensor", is_written=dst == self.rank)
        op = check_op(op, data.dtype)
        memory = (data.data_ptr(), data.numel(), dtype_code(data.dtype))
        work = self._core.reduce(*memory, int(op), dst, self._submission(data, blocking, tensor))
        return self._work(work, "reduce", finish=copy_back, on=data)

    def reduce_scatter(
        self,
        output: Array,
        input: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        codec: str | None = None,
        blocking: bool = False,
        feedback: Residuals | None = None,  # of a worker alone: of all of input
        checks_result: bool = False,  # for Work.is_result_finite, on the CPU
    ) -> Work:
        """output <- op over ranks of the rank-th block of their input; input is `size` blocks of output's size."""
        self.check()
        source, (into, copy_back) = prepare(input, "input", is_written=False).data, prepare(output, "output")
        op = check_op(op, into.dtype)
        codec = check_codec(codec, into.dtype, op)
        check_pair(source, into, source.numel(), into.numel() * self.size, "input", "size * output", self.size)
        kind = dtype_code(into.dtype)
        work = self._core.reduce_scatter(
            source.data_ptr(),
            into.data_ptr(),
            into.numel(),
            kind,
            int(op),
            codec,
            self._submission(into, blocking, source, feedback),
            None if feedback is None else feedback.addresses(source),
            checks_result,
        )
        return self._work(work, "reduce_scatter", finish=copy_back, on=into)

    def all_gather(
        self, output: Array, input: Array, *, codec: str | None = None, blocking: bool = False, subject: int = 0
    ) -> Work:
        """output[r] <- input of rank r; output is `size` blocks of input's size. ``subject``: as of all_reduce."""
        self.check()
        source = prepare(input, "input", is_written=False, is_moved=True).data
        into, copy_back = prepare(output, "output", is_moved=True)
        codec = check_codec(codec, source.dtype)
        check_pair(source, into, into.numel(), source.numel() * self.size, "output", "size * input", self.size)
        memory = (source.data_ptr(), into.data_ptr(), source.nbytes, moved_dtype_code(source.dtype))
        work = self._core.all_gather(*memory, codec, self._submission(into, blocking, source), subject)
        return self._work(work, "all_gather", finish=copy_back, on=into)

    def gather(self, output: Array | None, input: Array, dst: int, *, blocking: bool = False) -> Work:
        """output of rank `dst` [r] <- input of rank r; the other ranks pass output=None."""
        self.check()
        self._check_root(dst, "dst")
        source = prepare(input, "input", is_written=False, is_moved=True).data
        into, copy_back = None, None
        if self.rank == dst:
            into, copy_back = prepare(output, "output", is_moved=True)
            check_pair(source, into, into.numel(), source.numel() * self.size, "output", "size * input", self.size)
        address, kind = 0 if into is None else into.data_ptr(), moved_dtype_code(source.dtype)
        work = self._core.gather(
            source.data_ptr(), address, source.nbytes, kind, dst, self._submission(source, blocking, into)
        )
        return self._work(work, "gather", finish=copy_back, on=source)

    def scatter(self, output: Array, input: Array | None, src: int, *, blocking: bool = False) -> Work:
        """output <- input of rank `src` [rank]; the other ranks pass input=None."""
        self.check()
        self._check_root(src, "src")
        into, copy_back = prepare(output, "output", is_moved=True)
        source = None
        if self.rank == src:
            source = prepare(input, "input", is_written=False, is_moved=True).data
            check_pair(source, into, source.numel(), into.numel() * self.size, "input", "size * output", self.size)
        address, kind = 0 if source is None else source.data_ptr(), moved_dtype_code(into.dtype)
        work = self._core.scatter(
            address, into.data_ptr(), into.nbytes, kind, src, self._submission(into, blocking, source)
        )
        return self._work(work, "scatter", finish=copy_back, on=into)

    def all_to_all(
        self,
        output: Array,
        input: Array,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        codec: str | None = None,
        by_row: bool = False,
        blocking: bool = False,
    ) -> Work:
        """Block r of input goes to rank r, block r of output comes from rank r; splits count rows of dimension 0.

        `by_row` encodes each row by itself.
        """
        self.check()
        source = prepare(input, "input", is_written=False, is_moved=True).data
        into, copy_back = prepare(output, "output", is_moved=True)
        codec = check_codec(codec, source.dtype)
        common_device([("input", source), ("output", into)])
        if source.dtype != into.dtype:
            raise InvalidArgument(f"input is {source.dtype} but output is {into.dtype}; give them one type")
        unit = moved_per_element(source.dtype)
        work = self._core.all_to_all(
            source.data_ptr(),
            [unit * numel for numel in split_numels(source, input_splits, "input", self.size)],
            into.data_ptr(),
            [unit * numel for numel in split_numels(into, output_splits, "output", self.size)],
            moved_dtype_code(source.dtype),
            codec,
            math.prod(source.shape[1:]) if by_row else 0,
            self._submission(into, blocking, source),
        )
        return self._work(work, "all_to_all", finish=copy_back, on=into)

    def broadcast(
        self, tensor: Array, src: int, *, codec: str | None = None, label: str = "", blocking: bool = False
    ) -> Work:
        """tensor <- tensor of rank `src`, in place."""
        self.check()
        self._check_root(src, "src")
        # With a codec the source's own values become the decoded ones.
        data, copy_back = prepare(tensor, "tensor", is_written=src != self.rank or codec is not None, is_moved=True)
        codec = check_codec(codec, data.dtype)
        memory = (data.data_ptr(), data.nbytes, moved_dtype_code(data.dtype))
        work = self._core.broadcast(*memory, src, codec, self._submission(data, blocking, tensor))
        return self._work(work, "broadcast", label, copy_back, data)

    def barrier(self, *, timeout: timedelta | float | None = None, blocking: bool = False) -> Work:
        """Completes when every rank has called it; `timeout` overrides the group's."""
        self.check()
        timeout_s = self._timeout_s if timeout is None else to_seconds(timeout)
        return self._work(self._core.barrier((timeout_s, blocking, None, None)), "barrier")

    def send(self, tensor: Array, dst: int, *, tag: int = 0) -> Work:
        """Sends to rank `dst`, which must call recv with the same size, type and tag (which never reorders)."""
        self._check_peer(dst, "dst", tag)
        data = prepare(tensor, "tensor", is_written=False, is_moved=True).data
        work = self._p2p_core.send(*_message(data), dst, tag, self._submission(data, False, tensor))
        return self._work(work, f"send to rank {dst}", on=data)

    def recv(self, tensor: Array, src: int, *, tag: int = 0) -> Work:
        """tensor <- what rank `src` sends."""
        self._check_peer(src, "src", tag)
        data, copy_back = prepare(tensor, "tensor", is_moved=True)
        work = self._p2p_core.recv(*_message(data), src, tag, self._submission(data, False, tensor))
        return self._work(work, f"recv from rank {src}", finish=copy_back, on=data)

    def _check_peer(self, peer: int, name: str, tag: int) -> None:
        self.check()
        if self._check_root(peer, name) == self.rank:
            raise InvalidArgument(f"{name} {peer} is this rank itself; a rank cannot send to itself")
        if not 0 <= tag < 2**32:
            raise InvalidArgument(f"tag {tag} is not a number from 0 to {2**32 - 1}")

    # ---- bytes and Python values; all of these block

    def broadcast_bytes(self, payload: bytes | None, src: int) -> bytes:
        """Returns the bytes of rank `src` on all ranks; the others pass None."""
        size = torch.tensor([len(payload) if payload is not None else 0], device="cpu")
        self.broadcast(size, src, blocking=True).wait()
        memory = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if payload:
            memory.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(memory, src, blocking=True).wait()
        return memory.numpy().tobytes()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, by rank."""
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self.all_gather(sizes, torch.tensor([len(payload)], device="cpu"), blocking=True).wait()
        longest = int(sizes.max())
        if longest == 0:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = torch.empty(self.size * longest, dtype=torch.uint8, device="cpu")
        self.all_gather(gathered, mine, blocking=True).wait()
        rows = gathered.view(self.size, longest)
        return [rows[rank, : int(sizes[rank])].numpy().tobytes() for rank in range(self.size)]

    def broadcast_plain(self, value: object, src: int) -> Any:
        """The value of rank `src`, on all ranks: what plain_data.dumps takes; else InvalidArgument on all ranks."""
        return objects.broadcast(self, value, src, _PLAIN)

    def all_gather_plain(self, value: object) -> list[Any]:
        """The values of all ranks, by rank: what plain_data.dumps takes; else InvalidArgument on all ranks."""
        return objects.all_gather(self, value, _PLAIN)

    # These are for programs, as torch has them. Unpickling runs code, so bagua sends no messages of its own by them.

    def broadcast_object(self, obj: object, src: int = 0) -> Any:
        """The object of rank `src`, pickled, on all ranks."""
        return objects.broadcast(self, obj, src, _PICKLED)

    def all_gather_object(self, obj: object) -> list[Any]:
        """The objects of all ranks, pickled, by rank."""
        return objects.all_gather(self, obj, _PICKLED)
