"""The way of a gradient, from top to bottom: from autograd through its bucket to the end of backward.

    before_forward        counts the forward; the algorithm's hook
    backward_begins       autograd has reached the model's output: the end of this backward is awaited
    gradient_ready        the gradient moves into its bucket, or stays where it is (zero_copy.py)
    _launch, _resume      the algorithm starts a bucket's communication, and continues it; backward goes on meanwhile
    _finish               backward's computation is over: late buckets, rank 0's buffers, then wait for all of them

The order of these decisions is made in Rust (``rust_core/src/step.rs``): events go in, decisions come out, the same on
all ranks; here they are carried out. While the algorithm exchanges weights, gradients stay where autograd puts them,
and ``before_step`` and ``after_step``, the public hooks of the optimizers, call the algorithm.

Invariants: gradients, where they are exchanged, are synchronised when ``backward()`` returns. All ranks launch the same
buckets in the same order. Gradients of different steps are never averaged: the first message of a backward carries the
number of forwards, and ranks with different numbers raise. A step that cannot be completed poisons the group, so that
the other ranks raise this cause too instead of waiting. A backward inside no_sync stays local.
"""

from __future__ import annotations

import copy
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua import _C
from bagua.algorithms import Algorithm, BucketGroup, Declaration, Stage, Training
from bagua.buckets import Bucket, BucketStorage, Member
from bagua.data_parallel import errors
from bagua.data_parallel.buffers import BufferBroadcast
from bagua.data_parallel.errors import fatal, poisoned
from bagua.data_parallel.replica_check import ReplicaCheck
from bagua.data_parallel.scope import Scope
from bagua.data_parallel.states import ParameterStates
from bagua.data_parallel.zero_copy import ZeroCopy
from bagua.distributed.devices import BackwardStream, HostCopy, check_not_capturing
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.errors import Aborted, BaguaError, InvalidArgument
from bagua.profiler.recorder import Recorder
from bagua.profiler.timeline import Timeline, snapshot


class Joining(Protocol):
    """The state of a ``join``, which the reducer calls."""

    first_active: int

    def before_forward(self, is_training: bool) -> None: ...

    def after_backward(self) -> None: ...


class Choosing(Protocol):
    """``algorithm="auto"`` of a model, which the reducer and the handle call; see bagua/choice/chooser.py."""

    choice: Any
    ranks_are_equal: bool  # and stay so when it wraps the model anew now

    def before_forward(self) -> Reducer: ...

    def after_backward(self) -> None: ...

    def choose_again(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def adopt(self, state: Mapping[str, Any]) -> None: ...

    def stop(self) -> None: ...


class Reducer:
    """The state of the step under way, kept from step to step without allocating.

    Args:
        storage: the gradients' buckets.
        algorithm: decides what a bucket sends.
        scope: the ranks that train together, and those of parameters that are not of all.
        optimizers: those that were passed to with_bagua; not kept alive but by the algorithm.
        buffers: broadcasts at the end of a synchronising backward, or None.
        always_broadcasts: True to broadcast while weights are exchanged as well.
        find_unused_parameters: True if a backward may leave parameters out.
        raises_nonfinite: True if NaN and Inf in the result of a backward are an error.
        replica_check: compares the ranks now and then.
        earlier: the reducer of an earlier wrap of the same model, whose step count and ready order continue.
    """

    def __init__(
        self,
        storage: BucketStorage,
        algorithm: Algorithm,
        scope: Scope,
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: BufferBroadcast | None,
        always_broadcasts: bool,
        find_unused_parameters: bool,
        raises_nonfinite: bool,
        replica_check: ReplicaCheck,
        earlier: Reducer | None = None,
    ) -> None:
        self.storage, self.algorithm, self.scope = storage, algorithm, scope
        self.group = group = scope.group
        self.groups = list(scope.groups)  # and those that the algorithm has made
        self.num_steps = 0 if earlier is None else earlier.num_steps  # synchronising backwards
        self.synchronises = True  # False inside no_sync
        self.is_accumulating = False  # inside ``accumulate``
        self._num_skipped = 0  # in ``accumulate``: the backwards to come that stay local
        self._adds_locally = False  # a backward that stays local has reached a parameter
        self.sends_gradients = True  # now: an algorithm may begin with gradients and change over to weights
        self.recorder = Recorder()
        self.recorder.job_ranks = group.job_ranks
        self.states = ParameterStates(algorithm.parameter_state(), group, algorithm.exchanges == "weights")
        self.buffers, self._always_broadcasts, self.replica_check = buffers, always_broadcasts, replica_check
        self.finds_unused, self._raises_nonfinite = find_unused_parameters, raises_nonfinite
        self.joining: Joining | None = None  # inside ``join``
        self.choosing: Choosing | None = None  # of algorithm="auto"
        self._is_used = bytearray(len(storage.parameters))  # since the last synchronisation, in no_sync too
        self._stream = BackwardStream(storage.memory.device)
        self._bucket_group = BucketGroup(group, _Record(self.recorder, self.groups))
        commits = self.states.are_described and algorithm.exchanges == "gradients"
        self._bucket_group.checks_results = raises_nonfinite or commits
        # Buckets find theirs by ``group_index``.
        others = [BucketGroup(one, _Record(self.recorder, self.groups), self._bucket_group) for one in scope.others]
        self._bucket_groups = (self._bucket_group, *others)
        self.training = Training(self._bucket_group, tuple(optimizers))
        if earlier is not None:
            self.training.loss_scale = earlier.training.loss_scale
        is_order_known = earlier is not None and earlier.order == storage.order
        self.new_machine(storage.order if is_order_known else None)
        self._generators: dict[int, tuple[Generator[Any, None, None], Any]] = {}  # by bucket, and what each waits for
        self._begin_ns = self._forward_ns = 0
        self._began_at_output = True  # the backward under way; else with the first gradient
        self._local_ns: int | None = None  # when a backward inside no_sync began
        self._nonfinite: bool | HostCopy | None = None  # whether the last result is finite, until that is looked at
        self._sums = ""  # "held": gradients may be sums of all ranks, or momenta; "added to": by a local backward
        # A weight of each optimizer: its version and the number of backwards at the last look, or at a step.
        self._seen: dict[int, tuple[int, int]] = {}

    def new_machine(self, order: Sequence[int] | None) -> None:
        """Decides from now on, from no layout and no stage on, with the ready order that is agreed on, if it is."""
        self._machine = machine = _C.StepMachine(len(self.storage.parameters), self.finds_unused)
        self._stages: list[str] = []
        self._num_forwards = [0, 0]  # synchronising ones since here, of which all ranks are: in eval(), in train()
        self._is_training = True  # the mode of the last one, or of the one whose backward runs
        self._num_open_forwards = 0  # those without a backward so far: their graphs may be alive
        self._is_stepping = False  # a step of an optimizer is under way, of an algorithm that exchanges weights
        if order is not None:
            machine.agree(order)

    # --- forward -------------------------------------------------------------------------------

    def before_forward(self, is_training: bool, is_shadow: bool = False) -> None:
        """A forward of the model begins. Without gradients (evaluation) it concerns no other rank.

        Args:
            is_training: the mode of the model.
            is_shadow: True for a rank without inputs that follows the others.
        """
        # An open step means that a checkpoint recomputes the forward inside backward.
        if not torch.is_grad_enabled() or self._machine.is_open:
            return
        self.recorder.check(self.group)
        self._raise_if_nonfinite()
        if self.choosing is not None and self.synchronises and self.joining is None:
            with fatal(self.group, 'algorithm="auto"'):
                now = self.choosing.before_forward()
            if now is not self:
                now.before_forward(is_training)
                return
        if self.joining is not None and not is_shadow:
            self.joining.before_forward(is_training)
        self._lay_out_if_agreed()
        self._local_ns = None
        if self.synchronises:
            self._check_unseen_steps()
            if not self._is_stepping:
                with self.recorder.hook("before_forward"), self._algorithm("before_forward"):
                    self.algorithm.before_forward(self.storage.buckets, self._bucket_group)
        self._forward_ns = time.monotonic_ns()

    def after_forward(self, is_training: bool) -> None:
        """A forward with gradients has returned."""
        if self._machine.is_open:
            return
        self.recorder.add_compute("forward", self._forward_ns, time.monotonic_ns())
        self._num_open_forwards += 1
        if self.synchronises:
            self._is_training = is_training
            self._num_forwards[is_training] += 1

    # --- backward ------------------------------------------------------------------------------

    @torch._disable_dynamo
    def backward_begins(self, is_training: bool, output_grad: torch.Tensor) -> None:
        """Autograd has reached an output of the model. Parameters may stay out: it can be autograd.grad().

        Args:
            is_training: the mode of the forward that has made the output.
        """
        if not self.synchronises:
            if self._local_ns is None:
                self._local_ns = time.monotonic_ns()
                self._num_open_forwards -= self._num_open_forwards > 0
                torch.autograd.Variable._execution_engine.queue_callback(self._local_ends)
        elif not self._machine.is_open:
            self._is_training = is_training
            self._open(-1)
            self._began_at_output = True

    def skip_backwards(self, num: int) -> None:
        """The next ``num`` backwards stay local, and those behind them synchronise."""
        self._num_skipped, self.synchronises = num, num == 0

    @torch._disable_dynamo
    def _local_ends(self) -> None:
        if self._local_ns is not None:  # else a forward has begun in between
            self.recorder.add_compute("local backward", self._local_ns, time.monotonic_ns())
            self._local_ns = None
        if self._num_skipped and self._adds_locally:  # not torch.autograd.grad()
            self.skip_backwards(self._num_skipped - 1)
        self._adds_locally = False

    def gradient_ready(self, index: int, parameter: torch.nn.Parameter) -> None:
        """``parameter.grad`` is complete. Called by autograd, once per parameter and backward."""
        if self.synchronises and not self._machine.is_open:
            self._open(index)
        elif self._sums == "held":
            self._look_at_sums(index)
        is_open = self._machine.is_open
        self._adds_locally = not is_open
        may_stay = is_open and self._stream.is_current()
        grad = parameter.grad
        if grad is None:
            if self.finds_unused or not is_open:
                return
            raise self._poisoned(errors.no_gradient(self.storage.names[index], self.group.rank))
        if self.sends_gradients:
            member = self._members[index]
            if not member.is_in_bucket():
                raise self._poisoned(errors.moved(member.name, self.group.rank))
            if grad is not member.grad:
                self._move_into_bucket(member, grad, may_stay)
        self._is_used[index] = 1
        if is_open:
            try:
                is_due = self._machine.ready(index)
            except BaguaError as error:
                raise self._poisoned(errors.ready_twice(self.storage.names[index])) from error
            if is_due:
                self._zero_copy.release_completed()
                with self._stream.entered():
                    self._carry_out()

    def _open(self, first: int) -> None:
        """A synchronising backward begins, with the gradient ``first`` or before any."""
        instead = "leave it out of torch.cuda.graph(), or pass the model to make_graphed_callables before with_bagua"
        check_not_capturing(self.storage.memory.device, "a backward of the wrapped model began", instead)
        if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
            raise self._poisoned(errors.in_compiled_autograd(self.group.rank))
        self._raise_if_nonfinite()
        if self.algorithm.exchanges == "gradients":
            self._enter_next_stage()
        self._lay_out_if_agreed()
        if self._sums:
            self._look_at_sums(first)
            if self._sums and not self.algorithm.is_linear:
                raise self._poisoned(errors.exchanged_twice(self.group.rank, self.algorithm.name))
            if self._sums:
                are_means = bool(self.scope.others) and getattr(self.algorithm, "average", True)
                raise self._poisoned(errors.summed_twice(self.group.rank, are_means))
        self._machine.begin()
        self._began_at_output = False
        self._stream.begin()
        self._generators.clear()
        self._zero_copy.begin()
        if self.sends_gradients:
            self.states.begin_backward()
            self._bucket_group.begin_backward(self._num_forwards[self._is_training], self._is_training)
        self._begin_ns = time.monotonic_ns()
        # The one place that asks the engine for the end of a backward. The engine drops the callback without calling it
        # when backward raises, and EndOfBackward notices.
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self._finish, self._abort))

    def _look_at_sums(self, first: int) -> None:
        """A backward begins, and has added to the gradient ``first``: are others the sums of all ranks' still?

        Adding to them and summing again would count them once for each rank.
        """
        if self._sums == "held":
            grads = (m.local_grad() for m in self._members if m.index != first)
            self._sums = "added to" if any(grad is not None and bool(grad.any()) for grad in grads) else ""

    def _move_into_bucket(self, member: Member, grad: torch.Tensor, may_stay: bool) -> None:
        if grad.requires_grad or grad.layout is not torch.strided:
            if grad.requires_grad and not self.synchronises:
                return  # local, so the graph that create_graph=True asked for stays whole
            raise self._poisoned(errors.refused_gradient(member.name, grad))
        if member.is_spread:
            grad, may_stay = member.local_grad(), False
        is_alike = member.is_alike(grad)
        if not is_alike and member.parameter.dtype is not member.view.dtype:
            raise self._poisoned(errors.moved(member.name, self.group.rank))
        if not (is_alike and may_stay and self._zero_copy.keep(member, grad)):
            member.fill(grad, is_alike)
            member.parameter.grad = member.grad

    # --- what the state machine decides

    def _carry_out(self) -> None:
        """Does what is to be done now."""
        for kind, bucket in iter(self._machine.next, None):
            self._ACTIONS[kind](self, bucket)

    def _launch(self, index: int) -> None:
        bucket = self.storage.buckets[index]
        self._zero_copy.launch(bucket)
        self._bucket_group.begin(bucket)
        group = self._bucket_groups[bucket.group_index]
        self._communicate(bucket, lambda: self.algorithm.communicate(bucket, group))

    def _resume(self, index: int) -> None:
        bucket = self.storage.buckets[index]
        generator, awaited = self._generators.pop(index)
        self._bucket_group.begin(bucket)

        def resume() -> Generator[Any, None, None]:
            if awaited is not None:
                awaited.wait()
                self._zero_copy.resume(bucket)
            bucket.is_result = False  # it may be changed now
            return generator

        self._communicate(bucket, resume, awaited)

    def _communicate(self, bucket: Bucket, start: Callable[[], Any], earlier: Work | None = None) -> None:
        try:
            with self._algorithm("communicate"):
                started = start()
                if isinstance(started, types.GeneratorType):
                    for awaited in started:
                        if awaited is not None and awaited is earlier:
                            raise InvalidArgument(
                                "communicate yields a Work again that it has yielded before; yield the next one, or end"
                            )
                        self._generators[bucket.index] = (started, awaited)
                        self._machine.suspended(bucket.index)
                        started = awaited
                        break
                    else:
                        started = None
                if started is not None and not hasattr(started, "wait"):
                    raise InvalidArgument(
                        f"communicate gave a {type(started).__name__}; expected a Work, None, or a generator of these"
                    )
                if started is not None and started not in bucket.works:  # of a group of its own
                    bucket.works.append(started)
        except BaguaError as error:
            self.recorder.add_failure("backward", self._begin_ns, time.monotonic_ns(), error)
            raise
        finally:
            self._bucket_group.pause()

    def _wait(self, index: int) -> None:
        bucket = self.storage.buckets[index]
        for work in bucket.works:
            work.wait()
        self._zero_copy.finalize(bucket)
        factor = self._factor_of(bucket)
        if factor != 1.0:
            bucket.flat.mul_(factor)

    def _factor_of(self, bucket: Bucket) -> float:
        """Returns what the mean over the bucket's group is multiplied by.

        The loss is the mean over all ranks, and the gradient of an expert has the contributions of all of them: their
        sum in its group is to be divided by the number of all.
        """
        size = self.scope.groups[bucket.group_index].size
        return size / self.group.size if getattr(self.algorithm, "average", True) else 1.0

    def _send_buffers(self, _: int) -> None:
        if self.buffers is not None and (self.sends_gradients or self._always_broadcasts):
            for group, work in self.buffers.start(0 if self.joining is None else self.joining.first_active):
                self._name(work, group)

    def _agree_on_use(self, _: int) -> None:
        """Sends which parameters this rank has used, behind the last bucket."""
        self._used = torch.frombuffer(bytearray(self._is_used), dtype=torch.uint8)
        self._is_used[:] = bytes(len(self._is_used))
        self._agreeing = self.group.all_reduce(self._used, ReduceOp.MAX, label="used parameters")
        self._name(self._agreeing)

    def _finalize_use(self, _: int) -> None:
        """Parameters that no rank has used keep the gradients that they had."""
        self._agreeing.wait()
        is_used_anywhere, unused = self._used.tolist(), []
        for index, kept in self._missing.items():
            member = self._members[index]
            if is_used_anywhere[index]:
                member.parameter.grad = member.grad
                continue
            unused.append(index)
            if kept is not None:
                member.view.copy_(kept)
        self._missing = {}
        if unused:
            self.states.leave_unused(unused)

    def _fill_in_missing(self) -> None:
        """Fills the buckets of the parameters that this backward has not used.

        A gradient that an earlier no_sync backward left still counts; otherwise zeros do.
        """
        self._missing: dict[int, torch.Tensor | None] = {}  # and what the views of their gradients held
        for index in self._machine.missing():
            member = self._members[index]
            if not member.is_in_bucket():
                raise self._poisoned(errors.moved(member.name, self.group.rank))
            grad = member.local_grad()
            self._missing[index] = member.view.clone() if grad is member.view else None
            if grad is None:
                member.view.zero_()
            elif grad is not member.view:
                member.view.copy_(grad)

    def _agree_on_order(self, _: int) -> None:
        """All ranks take the order in which rank 0's gradients became ready."""
        order = torch.tensor(self._machine.observed_order(), dtype=torch.int64, device="cpu")
        work = self.group.broadcast(order, 0, label="ready order", blocking=True)
        self._name(work)
        work.wait()
        self._machine.agree(order.tolist())

    _ACTIONS = {
        _C.StepMachine.LAUNCH: _launch,
        _C.StepMachine.RESUME: _resume,
        _C.StepMachine.WAIT: _wait,
        _C.StepMachine.SEND_BUFFERS: _send_buffers,
        _C.StepMachine.AGREE_ON_USE: _agree_on_use,
        _C.StepMachine.FINALIZE_USE: _finalize_use,
        _C.StepMachine.AGREE_ON_ORDER: _agree_on_order,
    }

    def _name(self, work: Work, group: ProcessGroup | None = None) -> None:
        self.recorder.add_work((group or self.group).name, work.core, work.label, is_bucket=False)

    # --- end of backward

    def _finish(self) -> None:
        wait_ns = time.monotonic_ns()
        outcome = self._machine.finish()
        if outcome == _C.StepMachine.UNTOUCHED:
            return  # autograd.grad() passed through the model: no parameter took part
        if outcome == _C.StepMachine.INCOMPLETE:
            names, missing = self.storage.names, self._machine.missing()
            error = errors.never_ready(names, missing, self.group.rank, self._began_at_output)
            raise self._poisoned(error)
        try:
            with self._stream.at_the_end():
                self._complete()
        except BaguaError as error:
            self.recorder.add_failure("backward", self._begin_ns, wait_ns, error)
            raise
        self.num_steps += 1
        self.recorder.add_step(self._begin_ns, wait_ns, time.monotonic_ns(), len(self.storage.buckets))
        if self.joining is not None:
            self.joining.after_backward()  # ranks without inputs make no steps, so their replicas differ
        elif self.sends_gradients or self.replica_check.is_asked_for:
            self.replica_check.finish()
            has_buffers = self.sends_gradients and self.buffers is not None
            work = self.replica_check.begin(parameters=self.sends_gradients, buffers=has_buffers)
            if work is not None:
                self._name(work)
        if self.choosing is not None:
            self.choosing.after_backward()
        if self.storage.memory.is_cpu:
            self._raise_if_nonfinite()

    def _complete(self) -> None:
        if self.finds_unused and self.sends_gradients:
            self._fill_in_missing()
        with self._algorithm("communicate"):  # its Work may end in code of the algorithm
            self._carry_out()
        if self.buffers is not None:
            self.buffers.finish(may_write=self._num_open_forwards <= 1)
        self._num_open_forwards -= self._num_open_forwards > 0
        if self.sends_gradients:
            buckets = self.storage.buckets
            is_sum = any(b.declaration.is_sum or self._factor_of(b) != 1.0 for b in buckets)
            self._sums = "held" if self.group.size > 1 and (is_sum or not self.algorithm.is_linear) else ""
            if self._bucket_group.checks_results:
                self._commit()
        with self._algorithm("after_backward"):
            self.algorithm.after_backward(self.storage.buckets, self._bucket_group)

    def _commit(self) -> None:
        """Commits what the algorithm remembers where the result is finite, on all ranks or on none."""
        if self.storage.memory.is_cpu:
            is_finite: bool | torch.Tensor = all(bucket.is_finite() for bucket in self.storage.buckets)
        else:
            is_finite = torch.stack([bucket.finite_flag() for bucket in self.storage.buckets]).all()
        self.states.end_backward(is_finite)
        if self._raises_nonfinite:
            self._nonfinite = is_finite if isinstance(is_finite, bool) else HostCopy(is_finite)

    def _raise_if_nonfinite(self) -> None:
        """All ranks raise alike, as they look at the same result; so the group stays whole."""
        flag, self._nonfinite = self._nonfinite, None
        if flag is None:
            return
        is_on_host = isinstance(flag, bool)
        if not (flag if is_on_host else bool(flag.get())):
            bad = [] if not is_on_host else [bucket for bucket in self.storage.buckets if not bucket.is_finite()]
            raise errors.nonfinite(bad)

    def _abort(self) -> None:
        """Backward raised before its end: other ranks must not wait for what will never be sent."""
        self._machine.abort()
        self._poisoned(
            Aborted(
                f"backward of rank {self.group.rank} raised after it had started {self._machine.num_launched} of "
                f"{len(self.storage.buckets)} buckets, so the ranks are no longer in the same step; start the "
                "process group anew",
                rank=self.group.rank,
            )
        )

    # --- weights: from the public step hooks of the optimizers --------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step`` begins, while weights are exchanged; it may evaluate a closure first."""
        self.recorder.check(self.group)
        self._is_stepping = True
        hook = "before_optimizer_step"
        with self.recorder.hook(hook), self._algorithm(hook):
            self.algorithm.before_optimizer_step(optimizer, self._buckets_of(optimizer), self._bucket_group)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step`` has returned."""
        self._is_stepping = False
        hook = "after_optimizer_step"
        with self.recorder.hook(hook), self._algorithm(hook):
            self.algorithm.after_optimizer_step(optimizer, self._buckets_of(optimizer), self._bucket_group)
        self._enter_next_stage()
        self._seen.pop(self.training.optimizers.index(optimizer), None)

    def synchronize(self) -> None:
        """Makes the weights those of the global model, if the algorithm has one; collective."""
        with self.recorder.hook("synchronize"), self._algorithm("synchronize"):
            self.algorithm.synchronize(self.storage.buckets, self._bucket_group)

    def _buckets_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Bucket]:
        index = self.training.optimizers.index(optimizer)
        return [bucket for bucket in self.storage.buckets if bucket.optimizer_index == index]

    def _check_unseen_steps(self) -> None:
        """Warns if weights have changed since the last forward, and its backward, but no optimizer of with_bagua has
        stepped. A program may change them by itself, as a step that a GradScaler skips and an average of weights do."""
        if self.algorithm.exchanges != "weights" or self.group.size == 1 or self._is_stepping:
            return
        for index, optimizer in enumerate(self.training.optimizers):
            now = (self._version_of(index), self.num_steps)
            version, num_steps = self._seen.setdefault(index, now)
            if version != now[0] and num_steps != now[1]:
                text = errors.unseen_step(index, type(optimizer).__name__, self.algorithm.name)
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            self._seen[index] = now

    def _version_of(self, index: int) -> int:
        """Returns torch's count of the changes of one weight of an optimizer."""
        bucket = next(bucket for bucket in self.storage.buckets if bucket.optimizer_index == index)
        return bucket.members[0].parameter._version

    def change_loss_scale(self, before: float | torch.Tensor, now: float | torch.Tensor) -> None:
        """A ``bagua.amp.GradScaler`` has changed its scale: what is remembered in the unit of gradients follows."""
        if isinstance(now, torch.Tensor) and self.storage.memory.is_cpu:
            before, now = float(before), float(now)
        self.training.loss_scale = now
        if isinstance(now, torch.Tensor) or before != now:
            self.states.multiply(now / before)

    # --- layout --------------------------------------------------------------------------------

    @property
    def order(self) -> list[int] | None:
        """The agreed ready order; None before the first step, while the order is that of registration, reversed."""
        return self._machine.order

    def _lay_out_if_agreed(self) -> None:
        order = self._machine.layout_due()
        if order is not None:
            self.storage.lay_out(order)
            with self._algorithm("lay_out"):
                self._adopt_layout()

    def _adopt_layout(self) -> None:
        buckets = self.storage.buckets
        self._members = self.storage.members
        self._machine.lay_out(self.storage.bucket_of, self.storage.order)
        for bucket in buckets:
            bucket.declaration = Declaration()
        self.algorithm.lay_out(buckets)
        self.states.lay_out(buckets)
        self._zero_copy = ZeroCopy(buckets if self.sends_gradients else ())

    def enters_stage(self) -> bool:
        """Asks the algorithm for its stage; returns True if the buckets are to be laid out anew for it."""
        stage = self.algorithm.stage()
        if not isinstance(stage, Stage):
            raise InvalidArgument(f"stage() gave a {type(stage).__name__}, expected a bagua.algorithms.Stage")
        if stage.name not in self._stages:
            self._stages.append(stage.name)
        return self._machine.set_stage(self._stages.index(stage.name), stage.synchronises_gradients)

    def enter_stage(self) -> None:
        """Lays out the buckets for what the algorithm does now; collective."""
        self.enters_stage()
        self.sends_gradients = self.algorithm.stage().synchronises_gradients
        if not self.sends_gradients:
            self.storage.release_gradients()
        self._adopt_layout()

    def _enter_next_stage(self) -> None:
        with self._algorithm("lay_out"):
            if self.enters_stage():
                self.enter_stage()

    # --- another reducer in its place: prepared beside it, in memory of its own, until all ranks have prepared theirs

    def successor(self, state: Mapping[str, Any], layout: Sequence[int], order: Sequence[int] | None) -> Reducer:
        """Returns a reducer that continues from ``BaguaHandle.state_dict``, with its layout and ready order.

        Its algorithm is a copy, which is to load its state; ``enter_stage`` and ``become`` are to follow.
        """
        new = copy.copy(self)
        new.algorithm = copy.copy(self.algorithm)
        new.storage = self.storage.anew(layout)
        is_direct = new.algorithm.exchanges == "weights"
        new.states = ParameterStates(new.algorithm.parameter_state(), self.group, is_direct)
        new.states.load_state_dict(state["parameters"], new.algorithm.name, new.storage.buckets)
        new.num_steps, new._nonfinite, new._seen = state["num_steps"], None, {}
        new.new_machine(order)
        return new

    def become(self, new: Reducer, loss_scale: float) -> None:
        """Takes over all of ``new``, since hooks hold this object and groups its algorithm. Collective."""
        self.move_gradients_to(new)
        algorithm = self.algorithm
        vars(algorithm).update(vars(new.algorithm))
        vars(self).update({**vars(new), "algorithm": algorithm})
        self.training.loss_scale = loss_scale
        self.states.share_loaded_stripes()

    def move_gradients_to(self, new: Reducer) -> None:
        """Moves the gradients in these buckets to those of ``new``, or out of both."""
        if new.sends_gradients:
            self.storage.hand_over_gradients(new.storage)
        self.storage.release_gradients()
        new._sums = self._sums

    # --- around it -----------------------------------------------------------------------------

    def timeline(self, parts: bool = True) -> Timeline:
        """Returns what happened when on this rank; without ``parts`` operations as a whole only."""
        buckets = {bucket.label: str(bucket.declaration) for bucket in self.storage.buckets}
        return snapshot(self.recorder, self.group, self.groups, self.algorithm.name, buckets, parts)

    def _algorithm(self, hook: str) -> fatal:
        return fatal(self.group, hook, self.algorithm.name, self.scope.others)

    def _poisoned(self, error: BaguaError) -> BaguaError:
        return poisoned(self.group, error, self.scope.others)


class _EndOfBackward:
    """Called by the autograd engine when backward ends; dropped uncalled when it raises.

    Args:
        on_end, on_abort: bound methods of one object, which this does not keep alive.
    """

    __slots__ = ("_is_called", "_on_abort", "_on_end")

    def __init__(self, on_end: Callable[[], None], on_abort: Callable[[], None]) -> None:
        self._on_end, self._on_abort = weakref.WeakMethod(on_end), weakref.WeakMethod(on_abort)
        self._is_called = False

    @torch._disable_dynamo  # of a backward in what torch.compile compiles
    def __call__(self) -> None:
        self._is_called = True
        on_end = self._on_end()
        if on_end is not None:
            on_end()

    def __del__(self) -> None:
        on_abort = None if self._is_called else self._on_abort()
        if on_abort is not None:
            on_abort()


class _Record:
    """Puts operations into the timeline; does not hold the reducer, which holds the algorithm."""

    def __init__(self, recorder: Recorder, groups: list[ProcessGroup]) -> None:
        self._recorder, self._groups = recorder, groups

    def __call__(self, work: Work, group: ProcessGroup, is_bucket: bool, codec: str) -> None:
        if group not in self._groups:
            self._groups.append(group)
        self._recorder.add_work(group.name, work.core, work.label, is_bucket, codec)
