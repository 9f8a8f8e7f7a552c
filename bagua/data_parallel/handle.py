"""``model.bagua``: the user's side of a wrapped model.

Beside the data path. Invariant: it is no Module, Parameter or buffer, so a wrapped model's state_dict is
the plain model's; a copy or a pickle of the model gets a handle that says that it is a copy.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from bagua.algorithms import Algorithm
from bagua.buckets import Bucket
from bagua.data_parallel.buffers import BufferBroadcast
from bagua.data_parallel.errors import fatal
from bagua.data_parallel.join import join
from bagua.data_parallel.reducer import Reducer
from bagua.data_parallel.replica_check import ReplicaCheck
from bagua.data_parallel.states import ParameterStates
from bagua.distributed.consensus import agree
from bagua.distributed.process_group import ProcessGroup, ReduceOp
from bagua.errors import InvalidArgument
from bagua.profiler.timeline import Timeline, save_all

_STATE_VERSION = 7
_STATE_KEYS = {
    "version",
    "algorithm",
    "choice",
    "num_steps",
    "layout",
    "ready_order",
    "loss_scale",
    "state",
    "parameters",
}

# The handles by id. A WeakSet would raise where one rank adds to it while another, a thread too, goes through it.
_attached: weakref.WeakValueDictionary[int, BaguaHandle] = weakref.WeakValueDictionary()


class BaguaHandle:
    """The user's handle of a model that ``with_bagua`` has wrapped.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="bytegrad")
        >>> model.bagua.algorithm.name, len(model.bagua.buckets)
        ('bytegrad', 2)
    """

    def __init__(self, model: torch.nn.Module, reducer: Reducer, hooks: Sequence[Any]) -> None:
        self.num_wraps = 0
        self._num_left, self._unit = 0.0, 1.0  # of ``weight`` in no_sync: what was counted, and the first number
        self.renew(model, reducer, hooks)

    def renew(self, model: torch.nn.Module, reducer: Reducer, hooks: Sequence[Any]) -> None:
        """The model is wrapped, or wrapped anew."""
        self.num_wraps += 1
        self.reducer = reducer
        self._model = weakref.ref(model)
        self._hooks = list(hooks)
        model.bagua, model.no_sync = self, _NoSync(self)  # until ``remove``
        _attached[id(self)] = self

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm, with its options as attributes."""
        return self.reducer.algorithm

    @property
    def choice(self) -> Any:
        """The choice of ``algorithm="auto"`` and why, a ``bagua.choice.Choice``; None until it is made."""
        return None if self.reducer.choosing is None else self.reducer.choosing.choice

    def choice_state(self) -> dict[str, Any] | None:
        """Returns what a checkpoint has of ``algorithm="auto"``."""
        return None if self.reducer.choosing is None else self.reducer.choosing.state()

    def choose_again(self) -> None:
        """Lets ``algorithm="auto"`` choose anew, from the next step on; call it on all ranks.

        It does so by itself where 200 steps, or more once it has chosen the same again, take 20% longer or less long.

        Raises:
            InvalidArgument: the model was wrapped with an algorithm.
        """
        if self.reducer.choosing is None:
            raise InvalidArgument(f'choose_again() is for algorithm="auto"; this model runs {self.algorithm.name!r}')
        self.reducer.choosing.choose_again()

    @property
    def module(self) -> torch.nn.Module:
        """The module that was wrapped.

        Raises:
            InvalidArgument: it was deleted.
        """
        model = self._model()
        if model is None:
            raise InvalidArgument("the wrapped model was deleted")
        return model

    @property
    def group(self) -> ProcessGroup:
        """The ranks that train together."""
        return self.reducer.group

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The gradient buckets in launch order. They are laid out anew once, after the first step."""
        return self.reducer.storage.buckets

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside stay local: their gradients add up until the first backward outside.

        It is where ``backward()`` is called that counts. A step on gradients that were left local lets the ranks part,
        as under DDP; ``check_replicas`` finds it.

        Example:
            >>> with model.bagua.no_sync():
            ...     loss(model(x1), y1).backward()
            >>> loss(model(x2), y2).backward()  # synchronises the sum of both
        """
        if not self._hooks:
            raise InvalidArgument("model.bagua.remove() was called: this model is no longer synchronised")
        before = self.reducer.synchronises
        self.reducer.synchronises = False
        try:
            yield
        finally:
            self.reducer.synchronises = before

    @contextlib.contextmanager
    def accumulate(self, num_backwards: int) -> Iterator[None]:
        """Runs a block with ``num_backwards`` backwards, of which the last one synchronises the sum of all.

        It is ``no_sync`` for code that runs all backwards of a step itself, such as a pipeline schedule of torch, whose
        stage is the wrapped model and whose micro-batches are the backwards.

        Args:
            num_backwards: 1 or more, the same on all ranks of the group.

        Raises:
            InvalidArgument: another number of backwards has run inside.

        Example:
            >>> with model.bagua.accumulate(2):
            ...     for x, y in [(x1, y1), (x2, y2)]:
            ...         loss(model(x), y).backward()
        """
        if type(num_backwards) is not int or num_backwards < 1:
            raise InvalidArgument(f"accumulate() got {num_backwards!r}, expected a number of backwards, 1 or more")
        reducer = self.reducer
        if reducer.algorithm.exchanges != "gradients":
            raise InvalidArgument(
                f"accumulate is for gradients; algorithm {reducer.algorithm.name!r} exchanges weights, whatever the "
                "number of backwards: leave it out"
            )
        before = reducer.num_steps
        with self.no_sync():
            reducer.skip_backwards(num_backwards - 1)
            reducer.is_accumulating = True
            try:
                yield
            finally:
                reducer.is_accumulating = False
                reducer.skip_backwards(0)
        num_steps = self.reducer.num_steps - before  # algorithm="auto" may have changed it
        if num_steps != 1:
            raise InvalidArgument(
                f"accumulate({num_backwards}): {num_steps} backwards inside have synchronised, "
                f"expected the last of {num_backwards}"
            )

    def join(self, divide_by_initial_world_size: bool = True) -> contextlib.AbstractContextManager[None]:
        """Lets ranks train on while others have no more batches: as ``DistributedDataParallel.join`` of torch.

        A rank that leaves the block early takes part in the backwards of the others with gradients of zero. When all
        have left it, every rank has the weights, the buffers, and the states of the optimizers that ``with_bagua`` got,
        of one that went on to the end. It costs a small message per forward, for which all ranks wait. A forward is
        followed by its backward; a GradScaler is not supported, since ranks that have left do not see its scale change.

        Args:
            divide_by_initial_world_size: gradients are the mean over all ranks, zeros included; False: over those that
                still have batches.

        Raises:
            InvalidArgument: the algorithm exchanges weights.

        Example:
            >>> with model.bagua.join():
            ...     for x, y in [(x1, y1), (x2, y2)]:
            ...         loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
        """
        return join(self.reducer, self.module, divide_by_initial_world_size)

    def weight(self, num: float) -> float:
        """Returns the factor for a loss that is a mean over ``num`` tokens (or samples); collective outside of no_sync.

        The gradient then is that of the mean over the tokens of all ranks and micro-batches, sum(num * gradient) /
        sum(num), where ranks without it count alike. Call it once for each backward, inside no_sync where the backward
        is. It costs a message of 8 bytes, and a pass over the gradients that micro-batches have left.

        Args:
            num: 0 or more. Where it is 0, the loss must be finite all the same, such as a sum.

        Raises:
            InvalidArgument: ``num`` is no such number, the algorithm exchanges weights, or it is called inside no_sync
                where ``ignore`` leaves parameters alone.

        Example:
            >>> with model.no_sync():
            ...     (loss(model(x1), y1) * model.bagua.weight(y1.numel())).backward()
            >>> (loss(model(x2), y2) * model.bagua.weight(y2.numel())).backward()
        """
        num = float(num)
        if self.reducer.joining is not None:
            raise InvalidArgument(
                "weight() inside join: ranks without inputs would not take part; give them batches that weigh 0 instead"
            )
        if self.reducer.is_accumulating:
            raise InvalidArgument(
                "weight() inside accumulate, where it cannot tell which loss is the last one: use it with no_sync()"
            )
        if not 0 <= num < math.inf:
            raise InvalidArgument(f"weight() got {num}, expected the number of tokens that the loss is a mean of")
        if self.algorithm.exchanges != "gradients":
            raise InvalidArgument(f"weight() is for gradients, but algorithm {self.algorithm.name!r} exchanges weights")
        grads = [member.local_grad() for member in self.reducer.storage.members]
        left = [grad for grad in grads if grad is not None]
        if not left:  # by zero_grad()
            self._num_left = 0.0
        if not self.reducer.synchronises:
            if self.reducer.scope.ignored:
                raise InvalidArgument(
                    "weight() inside no_sync with ignore=: what micro-batches leave in ignored parameters would keep "
                    "another scale; give these a group of this rank alone by groups= instead"
                )
            if self._num_left == 0:
                # The numbers themselves could overflow float16. Experts add up what losses of other ranks give them,
                # whose first numbers differ.
                self._unit = 1.0 if self.reducer.scope.others else num or 1.0
            self._num_left += num
            return num / self._unit
        total = torch.tensor([self._num_left + num], dtype=torch.float64, device="cpu")
        self.group.all_reduce(total, ReduceOp.SUM, label="weight", blocking=True).wait()
        num_ranks = self.group.size if getattr(self.algorithm, "average", True) else 1
        scale = num_ranks / float(total) if float(total) else 0.0
        if self._num_left:
            torch._foreach_mul_(left, scale * self._unit)
            self._num_left = 0.0
        return num * scale

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs besides the states of model and optimizers: plain data, no communication.

        The order of the gradients is part of it, because the offset of a gradient in its bucket decides
        how its sum is rounded; with it a resumed run continues bit for bit.
        """
        order = self.reducer.order
        names = self.reducer.storage.names
        return {
            "version": _STATE_VERSION,
            "algorithm": self.algorithm.name,
            "choice": self.choice_state(),
            "num_steps": self.reducer.num_steps,
            "layout": [names[index] for index in self.reducer.storage.order],
            "ready_order": None if order is None else [names[index] for index in order],
            "loss_scale": float(self.reducer.training.loss_scale),
            "state": self.algorithm.state_dict(),
            "parameters": self.reducer.states.state_dict(),
        }

    def state_of_all(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns what this rank loads from a checkpoint of another number of ranks; local.

        Residuals are shared out so that what is still to be sent stays the same; where weights are exchanged all ranks
        are taken to begin with equal ones, such as their mean.

        Args:
            states: what ``state_dict`` returned on all ranks, by rank, their tensors on the CPU.

        Raises:
            InvalidArgument: they are of another algorithm or model.
        """
        for state in states:
            check_state(state, self)
        algorithm, group = self.algorithm, self.group
        num_encoders = len(group.nodes.leaders) if getattr(algorithm, "hierarchical", False) else group.size
        parameters = [state["parameters"] for state in states]
        averages = getattr(algorithm, "average", True)
        return {
            **states[0],
            "state": algorithm.state_of_all([state["state"] for state in states]),
            "parameters": self.reducer.states.state_of_all(parameters, num_encoders, averages),
        }

    def training_of_all(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns what this rank loads of a whole checkpoint of another number of ranks; local.

        Args:
            states: of all ranks, by rank, their tensors on the CPU: under "bagua" what ``state_dict`` returned and, if
                weights are exchanged, under "model" and "optimizers" those states, whose mean is returned.

        Raises:
            InvalidArgument: they are of another algorithm or model, or ranks have experts of their own.
        """
        if not self.reducer.scope.is_whole:
            raise InvalidArgument(
                f"the checkpoint is of {len(states)} ranks with experts of their own, and here are {self.group.size}: "
                "load it on as many"
            )
        merged = {"bagua": self.state_of_all([state["bagua"] for state in states])}
        for key in {"model", "optimizers"} & states[0].keys():
            merged[key] = pytree.tree_map(_mean, *(state[key] for state in states))
        return merged

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict``, or ``state_of_all``, returned; collective.

        Raises:
            InvalidArgument: it belongs to another algorithm or model, or the ranks load different states; on all ranks,
                which then train on as before.
        """
        remedy = "load the checkpoint of one step on all ranks; where an algorithm remembers something, each its own"
        with self.adopted(lambda: state.get("choice") if isinstance(state, Mapping) else None):
            self._load(state, remedy)

    @contextlib.contextmanager
    def adopted(self, read: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
        """Trains with the choice of a checkpoint from here on, if it has one and algorithm is "auto"; collective.

        Args:
            read: returns that choice. Where it raises, or the block does, the earlier choice stays.
        """
        choosing = self.reducer.choosing
        if choosing is None:
            yield
            return

        def read_choice() -> tuple[Any, dict[str, Any]]:
            choice = read()
            return choice, {"the choice of the checkpoint": choice}

        before = choosing.state()
        choice = agree(self.group, read_choice, "load the checkpoint of one step on all ranks")
        try:
            if choice is not None:
                choosing.adopt(choice)
            yield
        except Exception:  # on all ranks, unless the group has failed
            if self.group.failure() is None:
                choosing.adopt(before)
            raise

    def _load(self, state: Mapping[str, Any], remedy: str) -> None:
        def prepare() -> tuple[None, dict[str, Any]]:
            check_state(state, self)
            index_of = {name: index for index, name in enumerate(self.reducer.storage.names)}
            layout, order = (
                None if names is None else [index_of[name] for name in names]
                for names in (state["layout"], state["ready_order"])
            )
            described = {key: state[key] for key in ("num_steps", "layout", "ready_order")}
            described["stripes"] = ParameterStates.stripes_in(state["parameters"])
            return self.reducer.successor(state, layout, order), described

        loaded = agree(self.group, prepare, remedy)
        # Each ends on all ranks before the next begins, so a rank that refuses its part leaves nobody waiting.
        agree(self.group, lambda: (loaded.algorithm.load_state_dict(state["state"]), {}), remedy)
        agree(self.group, lambda: (loaded.enter_stage(), {}), remedy)
        with fatal(self.group, "load_state_dict"):
            self.reducer.become(loaded, state["loss_scale"])

    def pause(self) -> None:
        """Stops what the algorithm does in the background; collective, idempotent.

        Raises:
            InvalidArgument: the algorithm does nothing in the background.
        """
        self.group.check()
        self._in_background("pause")()

    def resume(self) -> None:
        """Continues after ``pause``; collective, idempotent."""
        self.group.check()
        self._in_background("resume")()

    def _in_background(self, method: str) -> Callable[[], None]:
        if not hasattr(self.algorithm, method):
            raise InvalidArgument(f"algorithm {self.algorithm.name!r} does nothing in the background to {method}")
        return getattr(self.algorithm, method)

    def synchronize(self) -> None:
        """Gives all ranks rank 0's buffers, and the weights of the global model where there is one; collective.

        Under ``diloco`` that is an outer step now, with what is under way, so that the model can be evaluated or
        published. Algorithms that average gradients have equal weights at any time.
        """
        model = self._model()
        if model is not None:
            self.group.check()
            self.reducer.synchronize()
            buffers = BufferBroadcast(model, self.reducer.scope)
            buffers.start()
            buffers.finish(may_write=False)

    def check_replicas(self) -> None:
        """Compares parameters, buffers and optimizer options of all ranks now; collective.

        While weights are exchanged options alone are compared.

        Raises:
            InvalidArgument: naming the first that differs, the ranks, and by how much; on all ranks.
        """
        model = self._model()
        if model is not None:
            self.group.check()
            are_equal = self.reducer.sends_gradients
            check = ReplicaCheck(self._model, self.reducer.training.optimizers, self.group, scope=self.reducer.scope)
            check.check_now(parameters=are_equal, buffers=are_equal and self.reducer.buffers is not None)

    def timeline(self, parts: bool = True) -> Timeline:
        """Returns what happened when on this rank: steps, spans and a summary. Local, after a failure too.

        Takes up to half a second where a codec makes many spans, and a tenth of that without ``parts``, what
        operations consist of: encode, wire, decode and reduce.
        """
        return self.reducer.timeline(parts)

    def save_timeline(self, folder: str | Path) -> Path:
        """Writes this rank's trace to ``folder``/rank<rank>.json, its times on rank 0's clock; collective.

        `bagua timeline folder/rank*.json` merges the files and says who waited for whom. The offset of the clocks is
        measured here and not when the model is wrapped, because clocks of different hosts drift apart: so the steps
        that the file holds, the last ones, are the near past. It takes some milliseconds per node.

        Args:
            folder: made where it is missing; each host has its own unless they share a disk.

        Returns:
            The path of this rank's file.

        Raises:
            InvalidArgument: on every rank, where one cannot write its file.
            BaguaError: the group has failed, or was destroyed; ``timeline().save(path)`` works then too.

        Example:
            >>> model.bagua.save_timeline("timeline")
            PosixPath('timeline/rank0.json')
        """
        return save_all(self.group, folder, self.timeline, "model.bagua.timeline().save(path)")

    def remove(self) -> None:
        """Ends the synchronisation on this rank; weights and gradients stay as they are. Idempotent."""
        is_attached = bool(self._hooks)
        try:
            if is_attached:
                self.algorithm.detach()
        finally:  # of a group that has failed too
            self.remove_hooks()

    def remove_hooks(self) -> None:
        """The part of ``remove`` that is left when the algorithm has been detached already."""
        if self.reducer.choosing is not None:
            self.reducer.choosing.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _attached.pop(id(self), None)
        model = self._model()
        if model is not None and getattr(model, "bagua", None) is self:
            holder = model if "bagua" in vars(model) else model._orig_mod  # what torch.compile returns passes them on
            del holder.bagua, holder.no_sync

    def __reduce__(self) -> tuple[type, tuple]:
        return _CopiedHandle, ()


class _NoSync:
    """``model.no_sync``; in a copy or a pickle of the model, which is not synchronised, it does nothing."""

    def __init__(self, handle: BaguaHandle | None = None) -> None:
        self._handle = handle

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Enters ``model.bagua.no_sync()``, under the name that Accelerate and other trainers use."""
        return contextlib.nullcontext() if self._handle is None else self._handle.no_sync()

    def __reduce__(self) -> tuple[type, tuple]:
        return _NoSync, ()


class _CopiedHandle:
    """``bagua`` of a copied or unpickled model, which is an ordinary module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidArgument(
            f"model.bagua.{name}: this model is a copy of one that was wrapped and is not synchronised itself; "
            "call bagua.with_bagua on it"
        )


def handle_of(model: torch.nn.Module) -> BaguaHandle | None:
    """The handle of a wrapped model, None for one that is not wrapped.

    Raises:
        InvalidArgument: the model uses the name ``bagua`` for something else.
    """
    handle = getattr(model, "bagua", None)
    if handle is None or isinstance(handle, _CopiedHandle):
        return None
    if not isinstance(handle, BaguaHandle):
        raise InvalidArgument(f"the model has an attribute `bagua` of its own ({type(handle).__name__}); rename it")
    return handle


def check_names(model: torch.nn.Module) -> None:
    """Raises InvalidArgument for a model that cannot be given the attributes ``bagua`` and ``no_sync``."""
    if isinstance(getattr(type(model), "bagua", None), property):
        raise InvalidArgument(f"a {type(model).__name__} is synchronised already; pass its .module to with_bagua")
    own = getattr(model, "no_sync", None)
    if own is not None and not isinstance(own, _NoSync):
        raise InvalidArgument(
            f"{type(model).__name__} has a `no_sync` of its own. Where that means that it synchronises its gradients "
            "itself, wrap the module inside; otherwise rename it, because trainers that accumulate gradients call it"
        )


def _all_attached() -> list[BaguaHandle]:
    return [handle for handle in (reference() for reference in _attached.valuerefs()) if handle is not None]


def check_unused(algorithm: Algorithm, handle: BaguaHandle | None) -> None:
    """Raises InvalidArgument if a handle other than ``handle`` runs this very object, which remembers one training."""
    if any(other is not handle and other.algorithm is algorithm for other in _all_attached()):
        raise InvalidArgument(
            f"this instance of algorithm {algorithm.name!r} belongs to another model already; make one for each"
        )


def handles_stepped_by(optimizer: torch.optim.Optimizer) -> list[BaguaHandle]:
    """Returns the handles of the wrapped models of which ``optimizer`` steps a parameter, in its order of these."""
    handle_of_parameter = {
        id(p): handle
        for handle in _all_attached()
        for p in (*handle.reducer.storage.parameters, *handle.reducer.scope.ignored)
    }
    stepped = (id(parameter) for options in optimizer.param_groups for parameter in options["params"])
    return list(dict.fromkeys(handle_of_parameter[one] for one in stepped if one in handle_of_parameter))


def other_parameter_ids(handle: BaguaHandle | None) -> set[int]:
    """The ids of the parameters that are synchronised by handles other than ``handle``."""
    return {
        id(parameter)
        for other in _all_attached()
        if other is not handle
        for parameter in other.reducer.storage.parameters
    }


def check_state(state: Mapping[str, Any], handle: BaguaHandle) -> None:
    """Raises InvalidArgument unless ``state`` is one of the handle's algorithm and parameters."""
    if not isinstance(state, Mapping) or set(state) != _STATE_KEYS or state["version"] != _STATE_VERSION:
        raise InvalidArgument(f"this is no state of version {_STATE_VERSION} from model.bagua.state_dict()")
    if state["algorithm"] != handle.algorithm.name:
        raise InvalidArgument(
            f"the state is of algorithm {state['algorithm']!r}, the model runs {handle.algorithm.name!r}; "
            "wrap it with the algorithm of the checkpoint, load, and then change with with_bagua"
        )
    num_steps = state["num_steps"]
    if type(num_steps) is not int or num_steps < 0:
        raise InvalidArgument(f"num_steps of the state is {num_steps!r}, expected an integer of at least 0")
    scale = state["loss_scale"]
    if type(scale) is not float or not 0 < scale < math.inf:
        raise InvalidArgument(f"loss_scale of the state is {scale!r}, expected a number above 0")
    names = handle.reducer.storage.names
    difference = {name for order in (state["layout"], state["ready_order"] or names) for name in {*order} ^ {*names}}
    if difference:
        raise InvalidArgument(f"the state is of a model with other trainable parameters: {sorted(difference)[:4]}")


def _mean(first: Any, *others: Any) -> Any:
    """Returns the mean of floating tensors; anything else is the first."""
    if not isinstance(first, torch.Tensor) or not (first.is_floating_point() or first.is_complex()):
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for other in others:
        total += other
    return (total / (1 + len(others))).to(first.dtype)
