"""One training step, from top to bottom: the path of a gradient from autograd to the optimizer.

    before_forward        rank 0's buffers, the algorithm's hook, a new bucket layout if one is agreed
    backward_begins       autograd has reached the model's output: the end of this backward is awaited
    gradient_ready        the gradient moves into its bucket, or stays where it is (zero_copy.py)
    _launch, _resume      the algorithm starts a bucket's communication, and goes on with it; backward goes on meanwhile
    _finish               backward's computation is over: late buckets, then wait for all of them

When which of these happens is decided in Rust (``rust_core/src/step.rs``): events go in, decisions come out, the same
on all ranks; here they are carried out. The optimizer's steps, and what must hold before them, are
``optimizer_steps.py``. While the algorithm exchanges weights, gradients stay where autograd puts them: buckets are the
algorithm's business, in its hooks, and the end of backward only agrees whether the step must be skipped.

Invariants: gradients, where they are exchanged, are synchronised when ``backward()`` returns. All ranks launch
the same buckets in the same order. A step that cannot be completed poisons the group, so that the other ranks
raise this cause too instead of waiting.
A backward inside no_sync stays local; every other backward synchronises.
"""

from __future__ import annotations

import time
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from bagua import _C
from bagua.algorithms import Algorithm, BucketGroup, Declaration, Stage, Training
from bagua.buckets import Bucket, BucketStorage, Member
from bagua.data_parallel.algorithm_state import ParameterStates
from bagua.data_parallel.backward_stream import BackwardStream
from bagua.data_parallel.buffer_broadcast import BufferBroadcast
from bagua.data_parallel.end_of_backward import EndOfBackward, is_never_told
from bagua.data_parallel.failures import ending, fatal
from bagua.data_parallel.loss_scale import LossScale
from bagua.data_parallel.module_tree import ModuleTree
from bagua.data_parallel.optimizer_steps import OptimizerSteps
from bagua.data_parallel.parameter_errors import (
    added_parameters,
    changed_parameters,
    converted,
    moved,
    never_ready,
    ready_twice,
    refused_gradient,
    swapped,
    under_compiled_autograd,
    unfrozen,
)
from bagua.data_parallel.unused_parameters import UnusedParameters
from bagua.data_parallel.zero_copy import ZeroCopy
from bagua.distributed.devices import check_not_capturing
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
        is_late: as for ``OptimizerSteps``.
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
        is_late: bool,
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        earlier: Step | None = None,
    ) -> None:
        self.storage, self.algorithm, self.group = storage, algorithm, group
        self.groups = [group]  # and those that the algorithm has made
        self.num_steps = 0 if earlier is None else earlier.num_steps  # synchronising backwards
        self.synchronises = True  # False inside no_sync
        self.sends_gradients = True  # now: an algorithm may begin with gradients and go over to weights
        self.recorder = Recorder()
        self.recorder.job_ranks = group.job_ranks
        self.states = ParameterStates(algorithm.parameter_state(), group)
        self.unused = UnusedParameters(storage, group) if find_unused_parameters else None
        self._stream = BackwardStream(storage.memory.device)
        self._bucket_group = BucketGroup(group, _Record(self.recorder, self.groups))
        self._buffers, self._always_broadcasts, self._frozen = buffers, always_broadcasts, tuple(frozen)
        asks_for_it = type(algorithm).after_change_of_scale is not Algorithm.after_change_of_scale
        self.loss_scale = LossScale(group.size > 1 and (asks_for_it or self.states.are_scaled))
        steps = (optimizers, storage, algorithm, self._bucket_group, self.states, self.recorder)
        self.optimizer_steps = OptimizerSteps(*steps, self._enter_next_stage, self._check_new, is_late)
        is_order_known = earlier is not None and earlier.order == storage.order
        self.new_machine(storage.order if is_order_known else None)
        self._generators: dict[int, tuple[Generator[Any, None, None], Any]] = {}  # by bucket, and what each waits for
        # A gradient that may still change: its index, its parameter, and whether it may stay where it is.
        self._postponed: tuple[int, torch.nn.Parameter, bool] | None = None
        self._begin_ns = self._forward_ns = 0
        self._model = weakref.ref(model)
        self._is_stage_due = False
        # Of the model when it was last seen to have no parameters but those of the wrap, and others that stand still.
        self._tree: ModuleTree | None = None
        self._strangers: list[torch.nn.Parameter] = []
        self._began_at_output = True  # the backward under way; else with the first gradient
        self._local_ns: int | None = None  # when a backward inside no_sync began

    def new_machine(self, order: Sequence[int] | None) -> None:
        """Decides from now on, from no layout and no stage on, with the ready order that is agreed on, if it is."""
        self._machine = machine = _C.StepMachine(len(self.storage.parameters), self.unused is not None)
        self._stages: list[str] = []
        if order is not None:
            machine.agree(order)

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Tells the algorithm what it is to be part of; the step itself keeps no optimizer alive."""
        self.algorithm.attach(Training(self._bucket_group, tuple(optimizers)))

    # --- forward -------------------------------------------------------------------------------

    def before_forward(self, is_training: bool) -> None:
        """A forward of the model begins; without gradients (evaluation) it is none of our business."""
        # Open: a checkpoint computes it again in backward.
        if not torch.is_grad_enabled() or self._machine.is_open:
            return
        self._check_not_capturing("forward")
        self.optimizer_steps.swapped.revive()
        for name, parameter in self._frozen:
            if parameter.requires_grad:  # before the look at the group: where all have unfrozen it, each says so itself
                raise ending(self.group, unfrozen(name, self.group.rank))
        self.recorder.check(self.group)
        if getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise InvalidArgument("torch's DistributedDataParallel is around the wrapped model; leave one of them out")
        self.optimizer_steps.settle()
        self._lay_out_if_agreed()
        self.loss_scale.forward_begins()
        self._local_ns = None
        if self.synchronises:
            with self.recorder.hook("before_forward"):
                self._prepare_forward(is_training)
        self._forward_ns = time.monotonic_ns()

    def _prepare_forward(self, is_training: bool) -> None:
        if self.optimizer_steps.counts_forward():
            is_due = self.sends_gradients or self._always_broadcasts
            if is_training and is_due and self._buffers is not None:
                for work in self._buffers.run():
                    self._name(work)
            with self._algorithm("before_forward"):
                self.algorithm.before_forward(self.storage.buckets, self._bucket_group)

    def after_forward(self) -> None:
        """The forward has ended."""
        if not self._machine.is_open:
            self.recorder.add_compute("forward", self._forward_ns, time.monotonic_ns())

    # --- backward ------------------------------------------------------------------------------

    @torch._disable_dynamo
    def backward_begins(self, output_grad: torch.Tensor) -> None:
        """Autograd has reached an output of the model. Parameters may stay out: it can be autograd.grad()."""
        if not self.synchronises:
            if self._local_ns is None:
                self._local_ns = time.monotonic_ns()
                torch.autograd.Variable._execution_engine.queue_callback(self._local_ends)
        elif not self._machine.is_open:
            self._open()
            self._began_at_output = True

    @torch._disable_dynamo
    def _local_ends(self) -> None:
        if self._local_ns is not None:  # else a forward has begun in between
            self.recorder.add_compute("local backward", self._local_ns, time.monotonic_ns())
            self._local_ns = None

    def gradient_ready(
        self, index: int, parameter: torch.nn.Parameter, is_last: bool = True, may_stay: bool = True
    ) -> None:
        """``parameter.grad`` is complete. Called by autograd, once per parameter and backward.

        Args:
            is_last: no other hook of the parameter is to run, which may change its gradient.
            may_stay: False where it has to be copied, because it was made on another stream.
        """
        if not (self.synchronises and self.sends_gradients):
            self.optimizer_steps.local_gradients.add(index)
        if self.synchronises and not self._machine.is_open:
            self._open()
        is_open = self._machine.is_open
        if is_open and self._postponed is not None:
            self._take_postponed()
        may_stay = is_open and self._stream.is_current() and may_stay
        if not is_last and is_open and self.sends_gradients:
            self._postponed = (index, parameter, may_stay)
            return
        grad, member = parameter.grad, self._members[index]
        if grad is None:
            if not is_open or self.unused is not None:
                return  # autograd calls it undefined; as good as unused
            if self.sends_gradients:
                self._check_place(member)
                self._fill_with_zeros(member)
        elif self.sends_gradients:
            if not member.is_in_bucket():
                self._check_place(member)
            if grad is not member.view:
                self._move_into_bucket(member, grad, may_stay)
        if self.unused is not None:
            self.unused.is_used[index] = 1
        if is_open:
            try:
                is_due = self._machine.ready(index)
            except BaguaError as error:
                raise ending(self.group, ready_twice(self.storage.names[index])) from error
            if is_due:
                self._zero_copy.release_completed()
                with self._stream.entered():
                    self._carry_out()

    def _take_postponed(self) -> None:
        """The gradient whose other hooks have run meanwhile: autograd has come to another one, or to the end."""
        (index, parameter, may_stay), self._postponed = self._postponed, None
        with self._stream.entered():  # behind the stream on which those hooks were
            self.gradient_ready(index, parameter, may_stay=may_stay)

    def _check_not_capturing(self, what: str) -> None:
        instead = "leave it out of torch.cuda.graph(), or pass the model to make_graphed_callables before with_bagua"
        check_not_capturing(self.storage.memory.device, f"a {what} of the wrapped model began", instead)

    def _open(self) -> None:
        self._check_not_capturing("backward")
        if is_never_told():
            raise ending(self.group, under_compiled_autograd(self.group.rank))
        self.optimizer_steps.settle()
        self._lay_out_if_agreed()
        self._machine.begin()
        self._began_at_output = False
        self._stream.begin()
        self._generators.clear()
        self._postponed = None
        self._zero_copy.begin()
        if self.sends_gradients:
            self.states.begin_backward()
        self._follow_loss_scale()
        self._begin_ns = time.monotonic_ns()
        # The one place that asks the engine to tell when backward ends. The engine drops the callback
        # without calling it when backward raises, and EndOfBackward notices.
        torch.autograd.Variable._execution_engine.queue_callback(EndOfBackward(self._finish, self._abort))

    def _follow_loss_scale(self) -> None:
        """What is remembered in the unit of gradients is brought to the scale of the backward that begins."""
        if not self.loss_scale.is_followed:
            return
        with self._stream.entered():
            ratio = self.loss_scale.change(self.storage.memory.device)
            if isinstance(ratio, float) and ratio == 1.0:
                return
            self.states.multiply(ratio)
            with self._algorithm("after_change_of_scale"):
                self.algorithm.after_change_of_scale(ratio)

    def _fill_with_zeros(self, member: Member) -> None:
        member.view.zero_()
        if self.group.size > 1:  # another rank may have a gradient
            member.parameter.grad = member.view

    def _move_into_bucket(self, member: Member, grad: torch.Tensor, may_stay: bool) -> None:
        if grad.requires_grad or grad.layout is not torch.strided:
            if grad.requires_grad and not self.synchronises:
                return  # local, so the graph that create_graph=True asked for stays whole
            raise ending(self.group, refused_gradient(member.name, grad))
        is_alike = member.is_alike(grad)
        if not is_alike and member.is_converted(grad):
            raise self._converted(member, grad)
        if not (is_alike and may_stay and self._zero_copy.keep(member, grad)):
            member.fill(grad, is_alike)
            member.parameter.grad = member.view

    def _check_place(self, member: Member) -> None:
        """That the parameter has a place in its bucket for its gradient; a conversion and back has moved it away."""
        if not (member.is_in_bucket() or member.recover()):
            raise ending(self.group, moved(member.name, self.group.rank))
        if member.is_converted(member.parameter):
            raise self._converted(member, member.parameter)

    def _converted(self, member: Member, grad: torch.Tensor) -> InvalidArgument:
        bucket = self.storage.buckets[self.storage.bucket_of[member.index]]
        return ending(self.group, converted(member, grad, bucket.device, self.group.rank))

    # --- what the state machine decides

    def _carry_out(self) -> None:
        """Does what is to be done now."""
        for kind, bucket in iter(self._machine.next, None):
            self._ACTIONS[kind](self, bucket)

    def _launch(self, index: int) -> None:
        bucket = self.storage.buckets[index]
        self._zero_copy.launch(bucket)
        self._bucket_group.begin(bucket)
        self._communicate(bucket, lambda: self.algorithm.communicate(bucket, self._bucket_group))

    def _resume(self, index: int) -> None:
        bucket = self.storage.buckets[index]
        generator, awaited = self._generators.pop(index)
        self._bucket_group.begin(bucket)

        def go_on() -> Generator[Any, None, None]:
            if awaited is not None:
                awaited.wait()
                self._zero_copy.go_on(bucket)
            bucket.is_result = False  # it may be changed now
            return generator

        self._communicate(bucket, go_on, awaited)

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
        if bucket.is_result:
            if bucket.device.type != "cpu":
                if self._bucket_group.looks_at_results:
                    bucket.finds_finite(bucket.works[0])
            elif bucket.works[0].is_result_finite is not None:
                bucket.found_finite(bucket.works[0].is_result_finite)
        self._zero_copy.finalize(bucket)

    def _agree_on_use(self, _: int) -> None:
        self._name(self.unused.start_agreeing())

    def _finalize_use(self, _: int) -> None:
        unused = self.unused.finalize()
        if unused:
            self.states.leave_unused(unused)

    def _agree_on_skips(self, _: int) -> None:
        for work in self.optimizer_steps.agree_on_skips():
            self._name(work)

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
        _C.StepMachine.AGREE_ON_USE: _agree_on_use,
        _C.StepMachine.FINALIZE_USE: _finalize_use,
        _C.StepMachine.AGREE_ON_SKIPS: _agree_on_skips,
        _C.StepMachine.AGREE_ON_ORDER: _agree_on_order,
    }

    def _name(self, work: Work | None) -> None:
        if work is not None:
            self.recorder.add_work(self.group.name, work.core, work.label, is_bucket=False)

    def timeline(self, parts: bool = True) -> Timeline:
        """What happened when on this rank, in all groups that were used; without `parts` operations as a whole only."""
        events = [(group.name, event) for group in self.groups for event in group.events(parts=parts)]
        kept_since_ns = {group.name: group.kept_since_ns() for group in self.groups}  # later: what is lost until then
        context = {"rank": self.group.rank, "world_size": self.group.size, "group": self.group.name}
        context["algorithm"] = self.algorithm.name
        return snapshot(self.recorder, events, kept_since_ns, self.storage.buckets, context)

    # --- end of backward -----------------------------------------------------------------------

    def _finish(self) -> None:
        wait_ns = time.monotonic_ns()
        if self._postponed is not None:
            try:
                self._take_postponed()
            except BaseException:
                self._abort()
                raise
        outcome = self._machine.finish()
        self._check_parameters(is_complete=outcome == _C.StepMachine.COMPLETE)
        if outcome == _C.StepMachine.UNTOUCHED:
            return  # autograd.grad() passed through the model: no parameter took part
        if self.sends_gradients and (self.unused is not None or outcome == _C.StepMachine.INCOMPLETE):
            self._check_unheard()
        if outcome == _C.StepMachine.INCOMPLETE:
            missing = self._machine.missing()
            raise ending(self.group, never_ready(self.storage.names, missing, self.group.rank, self._began_at_output))
        try:
            with self._stream.at_the_end():
                self._complete()
        except BaguaError as error:
            self.recorder.add_failure("backward", self._begin_ns, wait_ns, error)
            raise
        self.num_steps += 1
        self.recorder.add_step(self._begin_ns, wait_ns, time.monotonic_ns(), len(self.storage.buckets))
        self.optimizer_steps.backward_ended()
        if self._is_stage_due:
            self._enter_next_stage()

    def _complete(self) -> None:
        if self.unused is not None and self.sends_gradients:
            missing = self._machine.missing()
            for index in missing:
                self._check_place(self._members[index])
            self.unused.fill_in(missing)
        with self._algorithm("communicate"):  # its Work may end in code of the algorithm
            self._carry_out()
        if self.sends_gradients:
            self.optimizer_steps.local_gradients.clear()
            if self.states.are_described:
                self.optimizer_steps.end_states()
                if not self.optimizer_steps.are_known:  # no step will be seen
                    self.states.commit()
        with self._algorithm("after_backward"):
            self.algorithm.after_backward(self.storage.buckets, self._bucket_group)

    def _abort(self) -> None:
        """Backward raised before its end: other ranks must not wait for what will never be sent."""
        self._machine.abort()
        self._postponed = None
        if self.group.size > 1:
            self.group.poison(
                Aborted(
                    f"backward of rank {self.group.rank} raised after it had started {self._machine.num_launched} of "
                    f"{len(self.storage.buckets)} buckets, so the ranks are no longer in the same step; start the "
                    "process group anew",
                    rank=self.group.rank,
                )
            )

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
        self.algorithm.lay_out(buckets)
        for bucket in buckets:
            plan = self._bucket_group.plan
            bucket.declaration = plan(self.algorithm, bucket) if self.sends_gradients else Declaration()
        self.states.lay_out(buckets)
        self._zero_copy = ZeroCopy(buckets if self.sends_gradients else ())
        self.optimizer_steps.adopt_layout(buckets, self.sends_gradients)

    def enters_stage(self) -> bool:
        """Looks at what the algorithm does now; whether the buckets are to be laid out anew for it."""
        stage = self.algorithm.stage()
        if not isinstance(stage, Stage):
            raise InvalidArgument(f"stage() gave a {type(stage).__name__}, expected a bagua.algorithms.Stage")
        if stage.name not in self._stages:
            self._stages.append(stage.name)
        agrees = self.algorithm.skips_together() is not False
        return self._machine.set_stage(self._stages.index(stage.name), stage.synchronises_gradients, agrees)

    def enter_stage(self) -> None:
        """Lays out the buckets for what the algorithm does now; collective."""
        self.enters_stage()
        self.sends_gradients = self.algorithm.stage().synchronises_gradients
        if not self.sends_gradients:
            self.storage.release_gradients()
        self._adopt_layout()

    def _enter_next_stage(self) -> None:
        """At an optimizer's step the algorithm may have changed what the buckets are for."""
        self._is_stage_due = self._machine.is_open  # of a single rank, whose optimizers may step in backward
        if self._is_stage_due:
            return
        with self._algorithm("lay_out"):
            if self.enters_stage():
                self.enter_stage()

    # --- errors --------------------------------------------------------------------------------

    def _check_parameters(self, is_complete: bool) -> None:
        """That all of the model's are in buckets; at the end of a backward, when nothing takes their place for a while,
        as torch.func.functional_call does."""
        is_same = self._tree is not None and self._tree.has_same_parameters()
        if is_complete and is_same and not any(parameter.requires_grad for parameter in self._strangers):
            return
        model = self._model()
        if model is None:
            return
        may_be_gone = self.unused is not None and self._tree is not None
        error = changed_parameters(model, self.storage, self.group.rank, may_be_gone)
        if error is not None:
            raise ending(self.group, error)
        known = {*self.optimizer_steps.parameter_ids, *(id(parameter) for _, parameter in self._frozen)}
        self._strangers = [parameter for parameter in model.parameters() if id(parameter) not in known]
        self._tree = ModuleTree(model)

    def _check_unheard(self) -> None:
        """That no parameter has a gradient of which its hook could not tell; a single rank has nothing to exchange."""
        missing = set(self._machine.missing()) if self.group.size > 1 else ()
        for index in self.optimizer_steps.swapped.revive() if missing else ():
            if index in missing and self.storage.parameters[index].grad is not None:
                raise ending(self.group, swapped(self.storage.names[index], self.group.rank))

    def _check_new(self, optimizer: torch.optim.Optimizer) -> None:
        """That it steps no parameter which the model has got since the wrap; a single rank has nothing to exchange."""
        known = self.optimizer_steps.parameter_ids
        parameters = (p for options in optimizer.param_groups for p in options["params"])
        others = {id(p) for p in parameters if id(p) not in known and p.requires_grad}
        model = self._model() if others and self.group.size > 1 else None
        added = [] if model is None else [name for name, p in model.named_parameters() if id(p) in others]
        if added:
            raise ending(self.group, added_parameters(added, self.group.rank))

    def _algorithm(self, hook: str) -> fatal:
        return fatal(self.group, hook, self.algorithm.name)


class _Record:
    """Puts operations into the timeline; does not hold the step, which holds the algorithm."""

    def __init__(self, recorder: Recorder, groups: list[ProcessGroup]) -> None:
        self._recorder, self._groups = recorder, groups

    def __call__(self, work: Work, group: ProcessGroup, is_bucket: bool) -> None:
        if group not in self._groups:
            self._groups.append(group)
        self._recorder.add_work(group.name, work.core, work.label, is_bucket=is_bucket)
