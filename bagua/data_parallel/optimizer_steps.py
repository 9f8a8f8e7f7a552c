"""The optimizers' part of a training step: what must hold before they change weights, and what the algorithm does then.

Data path: ``optimizer_hooks.py`` -> **here** -> the algorithm's hooks around the optimizer's step. Invariants: what
would let the ranks part is refused on all of them, because the rank that refuses poisons the group; what all ranks see
alike (NaN under a codec) leaves the group whole. A step that a GradScaler skips is none.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence

import torch

from bagua.algorithms import Algorithm, BucketGroup
from bagua.buckets import Bucket, BucketStorage
from bagua.data_parallel.algorithm_state import ParameterStates
from bagua.data_parallel.failures import ending, fatal
from bagua.data_parallel.followed_optimizers import FollowedOptimizers
from bagua.data_parallel.gradient_hooks import SwappedParameters
from bagua.data_parallel.local_gradients import LocalGradients
from bagua.data_parallel.nonfinite_guard import NonFiniteGuard, is_skipped_by_scaler
from bagua.data_parallel.optimizer_hooks import Call, Calls
from bagua.data_parallel.parameter_errors import closure_not_called, stepped_in_backward
from bagua.data_parallel.skipped_steps import SkippedSteps
from bagua.distributed.devices import send_host_copies
from bagua.distributed.process_group import Work
from bagua.errors import BaguaError, InvalidArgument
from bagua.profiler.recorder import Recorder


class OptimizerSteps:
    """What one model has to do with its optimizers' steps.

    Args:
        optimizers: those that were passed to with_bagua.
        storage: its parameters and their buckets.
        algorithm: whose hooks are called.
        group: the ranks that train together.
        states: of the parameters, which count once an optimizer steps.
        recorder: gets the times of the hooks.
        after_step: a bound method, not kept alive; called at the end of each step.
        check_new: as ``after_step``; called with an optimizer that is new, or steps other parameters than before.
        is_late: whether a gradient that is NaN or Inf comes out when the next forward or backward begins.

    Attributes:
        parameter_ids: of the parameters that it is about.
        calls: of ``optimizer.step``, under way.
        local_gradients: those that no backward has synchronised.
        are_known: whether steps of optimizers will be seen.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        storage: BucketStorage,
        algorithm: Algorithm,
        group: BucketGroup,
        states: ParameterStates,
        recorder: Recorder,
        after_step: Callable[[], None],
        check_new: Callable[[torch.optim.Optimizer], None],
        is_late: bool,
    ) -> None:
        self.parameter_ids = frozenset(map(id, storage.parameters))
        self.calls = Calls()
        self.exchanges_weights = algorithm.exchanges == "weights"
        self.are_known = bool(optimizers)
        self._bucket_group, group = group, group.process_group
        self.local_gradients, self.swapped = LocalGradients(storage, group), SwappedParameters(storage.parameters)
        self._buckets: Sequence[Bucket] = storage.buckets
        self._algorithm, self._group, self._states, self._recorder = algorithm, group, states, recorder
        self._after_step, self._check_new = weakref.WeakMethod(after_step), weakref.WeakMethod(check_new)
        self._optimizers = FollowedOptimizers(optimizers, storage, algorithm, group)
        self._guard = NonFiniteGuard(self._optimizers)
        self._skipped_steps = SkippedSteps(self._optimizers, algorithm, group, storage.memory.device, is_late)
        self._sends_gradients, self._is_late = True, is_late
        self._has_gradients = False  # of a backward outside any closure, which no step has followed yet

    # --- from forward and backward -------------------------------------------------------------

    def adopt_layout(self, buckets: Sequence[Bucket], sends_gradients: bool) -> None:
        """The buckets are new ones, for gradients or for weights."""
        self._buckets, self._sends_gradients = buckets, sends_gradients
        self._guard.watch(buckets if sends_gradients else (), self._group.size, self._algorithm.refuses_nonfinite)
        self._bucket_group.looks_at_results = self._guard.is_needed

    def draft(self, states: ParameterStates) -> OptimizerSteps:
        """A copy that can adopt a layout without changing this one, which is to ``become`` it or not."""
        new = copy.copy(self)
        new._states = states
        new._guard = copy.copy(self._guard)
        return new

    def become(self, draft: OptimizerSteps) -> None:
        """Takes over the layout of a ``draft``; the hooks go on to know this object."""
        vars(self).update(vars(draft))
        self._guard.forget_steps()
        self._skipped_steps.forget_steps()

    def begin_after(self, earlier: OptimizerSteps | None) -> None:
        """The model is wrapped, once more where there is an ``earlier`` one, with the gradients that are there.

        What the earlier one has refused to step with stays refused, unless there are ranks now that it was not on.
        Collective; ``earlier`` has settled.
        """
        if earlier is not None and not {*self._group.ranks} <= {*earlier._group.ranks}:
            earlier = None
        self.local_gradients.begin_after(None if earlier is None else earlier.local_gradients)
        if earlier is not None:
            self._guard.inherit(earlier._guard, earlier._skipped_steps.refused_ids())
            self._has_gradients = earlier._has_gradients
        if not self._sends_gradients and self._algorithm.skips_together() is not False:
            self.agree_on_skips()  # as at the end of a backward, which those gradients have not met

    def counts_forward(self) -> bool:
        """A synchronising forward begins; whether all ranks are at the same one.

        They are but for a closure whose first evaluation is over: with gradients of its own each rank evaluates it as
        often as it needs.
        """
        call = self.calls.evaluating()
        if call is None:
            return True
        call.num_forwards += 1
        return self._sends_gradients or (call.num_forwards == 1 and not call.is_prepared)

    def settle(self) -> None:
        """A forward or backward begins: what the last one has left open comes out.

        Raises:
            InvalidArgument: a step has changed weights by NaN.
        """
        call = self.calls.evaluating()
        if call is None or not (call.num_forwards or call.num_backwards):  # else the ranks may be at different ones
            error = self._skipped_steps.settle()
            if error is not None:
                raise error
        is_finite, was_skipped, error = self._guard.settle()
        self._settle_states(is_finite, was_skipped)
        if error is not None:
            raise error

    def error_of_last_step(self) -> InvalidArgument | None:
        """What ``settle`` would raise, where an optimizer has stepped since the last backward; None in a failed group.

        Waits for the device, and forgets it.
        """
        if self._group.failure() is not None or not (self._guard.has_steps or self._skipped_steps.has_steps):
            return None
        try:
            self.settle()
        except InvalidArgument as error:
            return error
        return None

    def settle_states(self) -> None:
        """The states of parameters are asked for: those of steps that were none do not count. Waits for the device."""
        self._settle_states(*self._guard.look_at_steps())

    def _settle_states(self, is_finite: bool, was_skipped: bool) -> None:
        if was_skipped or not is_finite:  # though another optimizer may have stepped with finite gradients
            self._states.undo_commit()
        if not is_finite:
            self._states.forget_renewed()

    def end_states(self) -> None:
        """All buckets are exchanged: the states as they are now count once an optimizer steps, if all is finite."""
        self._states.end_backward(self._is_late or all(bucket.is_finite() for bucket in self._buckets))

    def agree_on_skips(self) -> list[Work]:
        """Gradients stay local, and a backward has ended. Returns the completed messages."""
        return self._skipped_steps.agree(self.calls.evaluating())

    def backward_ended(self) -> None:
        """A synchronising backward has ended.

        Raises:
            InvalidArgument: a gradient is NaN, and no step that could be refused will be seen.
        """
        self._has_gradients |= self.calls.evaluating() is None
        if self._is_late and self._sends_gradients:
            self._guard.look_later(self._buckets if self._states.are_described else ())
        else:
            self._guard.check_backward()
        self._bucket_group.looks_at_results = self._guard.is_needed  # in the next one

    # --- from the optimizer --------------------------------------------------------------------

    def is_wrapper(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it wraps an optimizer of this model, of whose step inside its own we hear."""
        return self._optimizers.is_wrapper(optimizer)

    def pass_over(self, call: Call) -> None:
        """A step begins that is none of the training, perhaps on this rank only."""
        self._follow(call.optimizer)
        call.is_skipped = True

    def check_optimizer_step(self, call: Call, has_closure: bool) -> bool:
        """An optimizer is about to step parameters of the model; whether with the gradients that are there.

        Raises:
            InvalidArgument: the ranks would part, or it would write NaN into the weights.
        """
        self._recorder.check(self._group)
        # torch says in this way whether this thread runs a backward.
        if self._group.size > 1 and torch._C._current_graph_task_id() != -1:
            raise ending(self._group, stepped_in_backward(call.optimizer, self._group.rank))
        self._follow(call.optimizer)
        if not self._sends_gradients:
            self._skipped_steps.begin_step(call.optimizer)
        # With a closure they are those of its first evaluation, of which check_closure hears: before it, exchanged
        # weights would be others than its micro-batch was to see. But who looks at gradients before it has them due.
        # An algorithm that exchanges weights counts its steps, those before the first exchange too.
        # So does the host where it knows already what a scaler has found, and where a step would end the group.
        is_late = self._is_late and self._algorithm.exchanges == "gradients"
        waits = not is_late or self._guard.has_suspects or self.local_gradients.may_be_any()
        call.is_skipped = is_skipped_by_scaler(call.optimizer, waits)
        is_read_first = self._has_gradients and not _begins_with_closure(call.optimizer)
        is_due = (is_read_first or not has_closure) and not call.is_skipped
        if is_due:
            self._check_gradients(call, is_certain=not has_closure)
        return is_due

    def check_closure(self, call: Call) -> None:
        """An evaluation of the optimizer's closure has ended: its gradients are what the optimizer goes on with.

        Raises:
            InvalidArgument: as ``check_optimizer_step``.
        """
        self._follow(call.optimizer)  # another may have stepped in the closure
        self._check_gradients(call, is_certain=True)

    def before_optimizer_step(self, call: Call) -> None:
        """No model has refused the step with the gradients that are there now."""
        if not call.is_prepared:
            call.is_prepared = True
            hook, algorithm = "before_optimizer_step", self._algorithm
            with self._recorder.hook(hook), fatal(self._group, hook, algorithm.name):
                algorithm.before_optimizer_step(call.optimizer, self._buckets_of(call.optimizer), self._bucket_group)
            if not self.exchanges_weights:  # ahead of the step, for whose end the next forward is not to wait
                send_host_copies()

    def after_optimizer_step(self, call: Call) -> None:
        """``optimizer.step`` has returned."""
        self._has_gradients = False
        if call.is_skipped:
            hook = "after_skipped_step"
            with self._recorder.hook(hook), fatal(self._group, hook, self._algorithm.name):
                self._algorithm.after_skipped_step(call.optimizer, self._buckets_of(call.optimizer))
            return
        if not call.is_prepared:
            if self._group.size == 1:
                return  # as in plain torch
            raise ending(self._group, closure_not_called(call.optimizer, self._group.rank))
        hook, algorithm = "after_optimizer_step", self._algorithm
        with self._recorder.hook(hook), fatal(self._group, hook, algorithm.name):
            self._states.commit()
            algorithm.after_optimizer_step(call.optimizer, self._buckets_of(call.optimizer), self._bucket_group)
        send_host_copies()
        after_step = self._after_step()
        if after_step is not None:
            after_step()

    def failure(self) -> BaguaError | None:
        """What has ended the group, on whichever rank; None while it is whole."""
        return self._group.failure()

    def end(self, error: BaguaError) -> None:
        """Ends the group: another model that the same optimizer steps has failed."""
        ending(self._group, error)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        with fatal(self._group, f"following a {type(optimizer).__name__}"):
            if self._optimizers.is_new(optimizer):
                check_new = self._check_new()
                if check_new is not None:
                    check_new(optimizer)
                self._optimizers.follow(optimizer)

    def _check_gradients(self, call: Call, is_certain: bool) -> None:
        if self._sends_gradients:
            for index in self.swapped.revive():  # no forward of the model has come since, but perhaps a backward
                self.local_gradients.add(index)
            error = self.local_gradients.refusal(call.optimizer)
            if error is not None:
                raise ending(self._group, error)
        self._guard.check_step(call.optimizer, is_certain)
        self._skipped_steps.check_step(call.optimizer, is_certain)

    def _buckets_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Bucket]:
        index = self._optimizers.index_of(optimizer)
        return [bucket for bucket in self._buckets if bucket.optimizer_index in (None, index)]


def _begins_with_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is known to evaluate a closure before anything else, as those of torch.optim and bagua do."""
    module = type(optimizer).step.__module__
    return module == "bagua.optim" or module.startswith("torch.optim.")
