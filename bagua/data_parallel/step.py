"""One training step, from top to bottom: the path of a gradient from autograd to the optimizer.

    before_forward        rank 0's buffers, the algorithm's hook, a new bucket layout if one is agreed
    backward_begins       autograd has reached the model's output: the end of this backward is awaited
    gradient_ready        the gradient moves into its bucket, or is lent; the scheduler says what may be launched
    _launch               the algorithm starts a bucket's communication; backward goes on meanwhile
    _finish               backward's computation is over: late buckets, then wait for all of them

The optimizer's steps, and what must hold before them, are ``optimizer_steps.py``.
While the algorithm exchanges weights, gradients stay where autograd puts them: buckets are the algorithm's business,
in its hooks, and the end of backward only agrees whether the step must be skipped.

Invariants: gradients, where they are exchanged, are synchronised when ``backward()`` returns. All ranks launch
the same buckets in the same order. A step that cannot be completed poisons the group, so that the other ranks
raise this cause too instead of waiting.
A backward inside no_sync stays local; every other backward synchronises.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Sequence

import torch

from bagua import _C
from bagua.algorithms.base import Algorithm, Declaration, Training
from bagua.buckets import Bucket, BucketStorage, Member
from bagua.data_parallel.end_of_backward import EndOfBackward
from bagua.data_parallel.failures import ending, fatal
from bagua.data_parallel.optimizer_steps import OptimizerSteps
from bagua.data_parallel.parameter_errors import (
    changed_parameters,
    never_ready,
    ready_twice,
    refused_gradient,
    unfrozen,
)
from bagua.data_parallel.state_sync import BufferBroadcast
from bagua.data_parallel.unused_parameters import UnusedParameters
from bagua.data_parallel.zero_copy import BorrowedGradients
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import Aborted, BaguaError, InvalidArgument
from bagua.profiler.recorder import Recorder
from bagua.profiler.timeline import Timeline, snapshot


class Step:
    """The state of the step under way, kept from step to step without allocating.

    Args:
        model: held weakly.
        storage: the gradients' buckets.
        algorithm: decides what a bucket sends.
        group: the ranks that train together.
        optimizers: those that were passed to with_bagua.
        buffers: what to broadcast before a training forward, or None.
        always_broadcasts: also while weights are exchanged.
        find_unused_parameters: whether a backward may leave parameters out.
        frozen: name and parameter of those that are not in ``storage``, and must not begin to train.
        earlier: the step of an earlier wrap of the same model, whose count and ready order go on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        storage: BucketStorage,
        algorithm: Algorithm,
        group: ProcessGroup,
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: BufferBroadcast | None,
        always_broadcasts: bool,
        find_unused_parameters: bool,
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        earlier: Step | None = None,
    ) -> None:
        self.storage, self.algorithm, self.group = storage, algorithm, group
        self.groups = [group]  # and those that the algorithm has made
        self.num_steps = 0 if earlier is None else earlier.num_steps  # synchronising backwards
        self._is_order_known = earlier is not None and earlier.order == storage.order
        self.synchronises = True  # False inside no_sync
        self.recorder = Recorder()
        self._buffers, self._always_broadcasts, self._frozen = buffers, always_broadcasts, tuple(frozen)
        steps = (optimizers, storage, algorithm, group, self.recorder, self._enter_next_stage)
        self.optimizer_steps = OptimizerSteps(*steps)
        self.sends_gradients = True  # now: an algorithm may begin with gradients and go over to weights
        self._stage = ""
        self._next_order: list[int] | None = None  # agreed at the end of the first step, applied before the next
        self._is_open = False  # between the first gradient of a synchronising backward and its end
        self._pending: list[tuple[Bucket, Work]] = []
        self._begin_ns = self._forward_ns = 0
        self._model = weakref.ref(model)
        self._is_checked = False  # after the first backward, that the model still has the parameters of the wrap
        self._local_ns: int | None = None  # when a backward inside no_sync began
        self._unused = UnusedParameters(storage, group) if find_unused_parameters else None

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Tells the algorithm what it is to be part of; the step itself keeps no optimizer alive."""
        record = functools.partial(_record, self.recorder, self.groups)
        self.algorithm.attach(Training(self.group, tuple(optimizers), record))

    # --- forward -------------------------------------------------------------------------------

    def before_forward(self, is_training: bool) -> None:
        """A forward of the model begins; without gradients (evaluation) it is none of our business."""
        if not torch.is_grad_enabled() or self._is_open:  # open: a checkpoint computes it again in backward
            return
        for name, parameter in self._frozen:
            if parameter.requires_grad:  # before the look at the group: where all have unfrozen it, each says so itself
                raise ending(self.group, unfrozen(name, self.group.rank))
        self.recorder.check(self.group)
        if getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise InvalidArgument("torch's DistributedDataParallel is around the wrapped model; leave one of them out")
        self._lay_out_if_agreed()
        self._local_ns = None
        if self.synchronises:
            with self.recorder.hook("before_forward"):
                self._prepare_forward(is_training)
        self._forward_ns = time.monotonic_ns()

    def _prepare_forward(self, is_training: bool) -> None:
        if self.optimizer_steps.counts_forward():
            is_due = self.sends_gradients or self._always_broadcasts
            if is_training and is_due and self._buffers is not None:
                self._name(self._buffers.run())
            with self._algorithm("before_forward"):
                self.algorithm.before_forward(self.storage.buckets, self.group)

    def after_forward(self) -> None:
        """The forward has ended."""
        if not self._is_open:
            self.recorder.add_compute("forward", self._forward_ns, time.monotonic_ns())

    # --- backward ------------------------------------------------------------------------------

    def backward_begins(self, output_grad: torch.Tensor) -> None:
        """Autograd has reached an output of the model. Parameters may stay out: it can be autograd.grad()."""
        if not self.synchronises:
            if self._local_ns is None:
                self._local_ns = time.monotonic_ns()
                torch.autograd.Variable._execution_engine.queue_callback(self._local_ends)
        elif not self._is_open:
            self._open()

    def _local_ends(self) -> None:
        if self._local_ns is not None:  # else a forward has begun in between
            self.recorder.add_compute("local backward", self._local_ns, time.monotonic_ns())
            self._local_ns = None

    def gradient_ready(self, index: int, parameter: torch.nn.Parameter) -> None:
        """``parameter.grad`` is complete. Called by autograd, once per parameter and backward."""
        if not self.synchronises:
            self.optimizer_steps.local_gradients.add(index)
        elif not self._is_open:
            self._open()
        grad, member = parameter.grad, self._members[index]
        if grad is None:
            if not self._is_open or self._unused is not None:
                return  # autograd calls it undefined; as good as unused
            if self.sends_gradients:
                self._fill_with_zeros(member)
        elif self.sends_gradients and grad is not member.view:
            self._move_into_bucket(member, grad)
        if self._unused is not None:
            self._unused.is_used[index] = 1
        if self._is_open:
            try:
                first, last = self._mark_ready(index)
            except BaguaError as error:
                raise ending(self.group, ready_twice(self.storage.names[index])) from error
            if first != last:
                self._launch(first, last)

    def _open(self) -> None:
        self._lay_out_if_agreed()
        self._scheduler.begin_step()
        self._pending.clear()
        self._borrowed.begin()
        self._begin_ns = time.monotonic_ns()
        self._is_open = True
        # The one place that asks the engine to tell when backward ends. The engine drops the callback
        # without calling it when backward raises, and EndOfBackward notices.
        torch.autograd.Variable._execution_engine.queue_callback(EndOfBackward(self._finish, self._abort))

    def _fill_with_zeros(self, member: Member) -> None:
        member.view.zero_()
        if self.group.size > 1:  # another rank may have a gradient
            member.parameter.grad = member.view

    def _move_into_bucket(self, member: Member, grad: torch.Tensor) -> None:
        if grad.requires_grad or grad.layout is not torch.strided:
            if grad.requires_grad and not self.synchronises:
                return  # local, so the graph that create_graph=True asked for stays whole
            raise ending(self.group, refused_gradient(member.name, grad))
        is_alike = member.is_alike(grad)
        if not (is_alike and self._is_open and self._borrowed.lend(member, grad, self._pending)):
            member.fill(grad, is_alike)
            member.parameter.grad = member.view

    def _launch(self, first: int, last: int) -> None:
        if not self.sends_gradients:
            return
        self._borrowed.give_back_completed(self._pending)
        for bucket in self.storage.buckets[first:last]:
            self._borrowed.gather(bucket)
            try:
                with self._algorithm("communicate"):
                    work = self.algorithm.communicate(bucket, self.group)
            except BaguaError as error:
                self.recorder.add_failure("backward", self._begin_ns, time.monotonic_ns(), error)
                raise
            if work is not None:
                self._pending.append((bucket, work))
                self.recorder.add_work(self.group.name, work.core, work.label)

    def _name(self, work: Work | None) -> None:
        if work is not None:
            self.recorder.add_work(self.group.name, work.core, work.label, is_bucket=False)

    def timeline(self, parts: bool = True) -> Timeline:
        """What happened when on this rank, in all groups that were used; without `parts` operations as a whole only."""
        events = [(group.name, event) for group in self.groups for event in group.events(parts=parts)]
        kept_since_ns = {group.name: group.kept_since_ns() for group in self.groups}  # later: what is lost until then
        place = {"rank": self.group.rank, "world_size": self.group.size, "group": self.group.name}
        place["algorithm"] = self.algorithm.name
        return snapshot(self.recorder, events, kept_since_ns, self.storage.buckets, place)

    # --- end of backward -----------------------------------------------------------------------

    def _finish(self) -> None:
        self._is_open = False
        wait_ns = time.monotonic_ns()
        missing = self._scheduler.missing()
        if missing or not self._is_checked:
            self._check_parameters()
        if self._unused is None:
            if len(missing) == len(self._members):
                return  # autograd.grad() passed through the model: no parameter took part
            if missing:
                raise ending(self.group, never_ready(self.storage.names, missing, self.group.rank))
        try:
            if self.sends_gradients:
                with self._algorithm("communicate"):  # its Work may end in code of the algorithm
                    self._finish_gradients(missing)
            elif self.algorithm.agrees_on_skips():
                self._name(self.optimizer_steps.agree_on_skips())
            with self._algorithm("after_backward"):
                self.algorithm.after_backward(self.storage.buckets, self.group)
        except BaguaError as error:
            self.recorder.add_failure("backward", self._begin_ns, wait_ns, error)
            raise
        self.num_steps += 1
        self.recorder.add_step(self._begin_ns, wait_ns, time.monotonic_ns(), len(self.storage.buckets))
        self.optimizer_steps.backward_ended(self._pending)
        self._pending.clear()

    def _finish_gradients(self, missing: Sequence[int]) -> None:
        if self._unused is not None:
            self._unused.fill_in(missing)
        self._launch(*self._scheduler.finish())
        agreeing = self._unused.start_agreeing() if self._unused is not None else None
        for bucket, work in self._pending:
            work.wait()
            self._borrowed.give_back(bucket)
        if agreeing is not None:
            self._name(agreeing)
            agreeing.wait()
            left_out = self._unused.settle()
            if left_out:
                self.algorithm.left_out(left_out)
        self.optimizer_steps.local_gradients.clear()
        if not self._is_order_known:
            self._agree_on_order()

    def _abort(self) -> None:
        """Backward raised before its end: other ranks must not wait for what will never be sent."""
        self._is_open = False
        if self.group.size > 1:
            self.group.poison(
                Aborted(
                    f"backward of rank {self.group.rank} raised after it had started {len(self._pending)} of "
                    f"{len(self.storage.buckets)} buckets, so the ranks are no longer in the same step; start the "
                    "process group anew",
                    rank=self.group.rank,
                )
            )

    def _agree_on_order(self) -> None:
        """All ranks take the order in which rank 0's gradients became ready."""
        order = torch.tensor(self._scheduler.observed_order(), dtype=torch.int64)
        work = self.group.broadcast(order, 0, label="ready order", blocking=True)
        self._name(work)
        work.wait()
        self._next_order = order.tolist()
        self._is_order_known = True

    # --- layout --------------------------------------------------------------------------------

    @property
    def order(self) -> list[int] | None:
        """The agreed ready order; None before the first step, while the order is that of registration, reversed."""
        return (self._next_order or self.storage.order) if self._is_order_known else None

    def _lay_out_if_agreed(self) -> None:
        order, self._next_order = self._next_order, None
        if order is not None and order != self.storage.order:
            self.storage.lay_out(order)
            with self._algorithm("lay_out"):
                self._adopt_layout()

    def _adopt_layout(self) -> None:
        self._members = self.storage.members
        self._scheduler = _C.ReadyOrderScheduler(self.storage.plan)
        self._mark_ready = self._scheduler.mark_ready
        for bucket in self.storage.buckets:
            bucket.declaration = self._declare(bucket)
        self.algorithm.lay_out(self.storage.buckets)
        self._borrowed = BorrowedGradients(self.algorithm, self.storage.buckets if self.sends_gradients else ())
        self.optimizer_steps.adopt_layout(self.storage.buckets, self.sends_gradients)

    def enter_stage(self) -> None:
        """Lays out the buckets for what the algorithm does now; collective."""
        self._stage, self.sends_gradients = self.algorithm.stage(), self.algorithm.synchronises_gradients()
        if not self.sends_gradients:
            self.storage.release_gradients()
        self._adopt_layout()

    def is_in_other_stage(self) -> bool:
        """Whether the algorithm has changed what the buckets are for."""
        return (self.algorithm.stage(), self.algorithm.synchronises_gradients()) != (self._stage, self.sends_gradients)

    def _enter_next_stage(self) -> None:
        """At an optimizer's step the algorithm may have changed what the buckets are for."""
        with self._algorithm("lay_out"):
            if self.is_in_other_stage():
                self.enter_stage()

    def _declare(self, bucket: Bucket) -> Declaration:
        """What the algorithm declares; where all ranks are on one node a hierarchical all_reduce is a plain one."""
        declared = self.algorithm.declare(bucket)
        is_one_node = len(self.group.nodes.members) == 1
        if declared.operation == "all_reduce" and declared.hierarchical and is_one_node:
            return dataclasses.replace(declared, codec=None, hierarchical=False, reason=declared.reason or "one node")
        return declared

    # --- errors --------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        self._is_checked, model = True, self._model()
        error = None if model is None else changed_parameters(model, self.storage, self.group.rank)
        if error is not None:
            raise ending(self.group, error)

    def _algorithm(self, hook: str) -> fatal:
        return fatal(self.group, hook, self.algorithm.name)


def _record(recorder: Recorder, groups: list[ProcessGroup], work: Work, group: ProcessGroup | None = None) -> None:
    """``Training.record``; does not hold the step, which holds the algorithm."""
    group = groups[0] if group is None else group
    if group not in groups:
        groups.append(group)
    recorder.add_work(group.name, work.core, work.label)
