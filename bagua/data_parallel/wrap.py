"""with_bagua: the only file that installs hooks, all of them torch's public ones.

Data path: autograd, the module and the optimizers -> **hooks** -> ``reducer.py``. Invariants: a parameter's hook
carries its index, fixed at the wrap, so no name is looked up in training; hooks of parameters and optimizers hold the
reducer weakly, so that a dropped model is freed with its gradient memory; a copy or a pickle of the model carries no
working hooks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from bagua import algorithms
from bagua.algorithms import Algorithm
from bagua.buckets import DEFAULT_BUCKET_BYTES, SMALL_BUCKET_BYTES, BucketStorage
from bagua.data_parallel.buffers import BufferBroadcast
from bagua.data_parallel.checks import (
    check_exchanges,
    check_fully_sharded,
    check_is_model,
    check_model,
    check_types,
    describe_model,
    optimizers_in,
    optimizers_of_parameters,
)
from bagua.data_parallel.errors import fatal
from bagua.data_parallel.handle import BaguaHandle, check_names, check_unused, handle_of, other_parameter_ids
from bagua.data_parallel.initial_sync import OptimizerStates, broadcast_model
from bagua.data_parallel.reducer import Choosing, Reducer
from bagua.data_parallel.replica_check import ReplicaCheck, check_setting
from bagua.data_parallel.scope import IGNORED, Scope
from bagua.distributed.consensus import agree
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.world import GroupLike, resolve
from bagua.errors import InvalidArgument

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# bagua/choice, which stands on this package, puts here what chooses where algorithm is "auto".
make_chooser: Callable[[BaguaHandle, Callable[..., Any], str, int | None], Choosing] | None = None


def with_bagua(
    model: Model,
    optimizers: Optimizers = (),
    *,
    algorithm: str | Algorithm = "gradient_allreduce",
    group: GroupLike = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool | None = None,
    nonfinite: Literal["pass", "raise"] = "pass",
    check_replicas: str | int | bool = "auto",
    ignore: Sequence[str] = (),
    groups: Mapping[str, GroupLike] | None = None,
    risk: Literal["R0", "R1", "R2", "R3"] | None = None,
    **options: Any,
) -> Model:
    """Makes ``model`` train in step with the same model on the other ranks; collective.

    Parameters, buffers and optimizer state become equal to rank 0's. From then on gradients are synchronised when
    ``backward()`` returns, or, by algorithms that exchange weights instead (``Algorithm.exchanges``), weights around
    the optimizer's step. The module itself is returned, its state_dict keys are unchanged, and ``model.bagua`` is a
    :class:`bagua.data_parallel.handle.BaguaHandle`, whose ``no_sync`` is ``model.no_sync``, too. Calling it again on
    the same model changes the algorithm and its options. What is refused on one rank is refused on all and has changed
    nothing: they train on as before.

    Args:
        model: a module whose trainable parameters are on one device, the CPU or a GPU. Train it through ``model(...)``,
            the same number of forwards on each rank. What torch.compile has compiled so far is compiled anew at its
            next call.
        optimizers: those that step its parameters. Their state starts equal. Algorithms that exchange weights need all
            of them and work in their public step hooks; an optimizer that is made anew later is named at the next
            forward: call with_bagua again.
        algorithm: a name from ``bagua.algorithms.available()``, or an instance. "auto": what turns out to be the
            fastest of the class ``risk``. It begins as ``gradient_allreduce``, and has chosen after 50 to 200 steps,
            ``bucket_bytes`` too if that is left at its default; ``model.bagua.choice`` says what and why.
        group: the ranks to train with, all by default: a group of bagua or of torch.distributed, or a DeviceMesh with
            one dimension, such as ``mesh["dp_replicate"]``. Of a DTensor each rank synchronises its part, with ranks
            that hold the same one: the group crosses the parameter's mesh in one rank.
        bucket_bytes: gradients, or weights, travel in messages of at most this size, 25 MiB by default (a larger
            tensor is one message). Where gradients are exchanged the first message is smaller, 512 KiB at most, so that
            it leaves early; those after it grow, each up to what went before, and the last ones shrink, each to half of
            what is left.
        find_unused_parameters: a backward may leave parameters out, even all. Costs one small message per step. Then
            all that runs backward from the model's output counts, ``torch.autograd.grad`` too: do it on all ranks.
        broadcast_buffers: whether rank 0's buffers are sent at the end of each synchronising backward. By default they
            are while gradients are synchronised; while weights are exchanged each rank keeps its own.
        nonfinite: NaN and Inf of any rank reach all ranks. "pass": as gradients, which a GradScaler or the program
            sees; "raise": as an error, at the end of backward on the CPU, at the next forward on a device.
        check_replicas: ranks that should be equal and are not get an error that names the first parameter, buffer or
            option of an optimizer that differs. "auto": after the second step, and then as often as costs below 0.1% of
            the training. A number: every so many steps. "warn": as "auto", with a warning instead. False: never. While
            weights are exchanged only a number compares, and options only.
        ignore: patterns of fnmatch, such as ``["experts.*"]``. Parameters and buffers of these names are left alone:
            each rank keeps its own, with its own gradients and optimizer states, and they are not compared.
        groups: patterns, each with the group in which this rank has what it matches: experts that several ranks hold
            alike. Each rank passes the group that it belongs to. Parameters, buffers and optimizer states become equal
            to those of the group's first rank, and gradients their sum in the group divided by the number of *all*
            ranks, because the loss is the mean over all ranks and an expert's gradient has the contributions of all
            (``average=False``: the sum). They are not compared. Without error feedback, ``hierarchical`` and
            ``nonfinite="raise"``.
        risk: what "auto" may change; "R1" by default. "R0": when and in which messages gradients travel; "R1": their
            rounding, to 16 bits; "R2": codecs that are unbiased, or feed back their error; "R3": the optimisation, by
            exchanging weights, where ``weight``, ``accumulate`` and ``join`` of ``model.bagua`` are refused.
        options: the algorithm's own.

    Raises:
        InvalidArgument: ranks disagree about model or options (every rank raises it, with both sides); unknown
            algorithm or option; a parameter that cannot be synchronised; a pattern that matches nothing, or a name that
            matches two.

    Example:
        >>> bagua.init_process_group()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = bagua.with_bagua(model, optimizer, algorithm="bytegrad")
        >>> loss(model(x), y).backward(); optimizer.step()
    """
    group = resolve(group)
    if isinstance(algorithm, str) and algorithm == "auto":
        wrap = functools.partial(
            with_bagua,
            group=group,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            nonfinite=nonfinite,
            check_replicas=check_replicas,
            ignore=ignore,
        )
        _check_auto(group, risk, options, groups)
        wrap(model, optimizers, bucket_bytes=bucket_bytes)
        if make_chooser is not None:
            own = None if bucket_bytes == DEFAULT_BUCKET_BYTES else bucket_bytes
            model.bagua.reducer.choosing = make_chooser(model.bagua, wrap, risk or "R1", own)
        return model
    earlier: BaguaHandle | None = None
    settings = {
        "bucket_bytes": (bucket_bytes, int),
        "find_unused_parameters": (find_unused_parameters, bool),
        "broadcast_buffers": (broadcast_buffers, (bool, type(None))),
        "nonfinite": (nonfinite, str),
    }

    def prepare() -> tuple[tuple[Reducer, OptimizerStates], dict[str, Any]]:
        nonlocal earlier, optimizers
        check_is_model(model)
        if risk is not None:
            raise InvalidArgument(f'risk is {risk!r}, but it is for algorithm="auto"; leave it out')
        optimizers = optimizers_in(optimizers)
        earlier = handle_of(model)
        chosen = _make_algorithm(algorithm, options)
        check_exchanges(chosen)
        if earlier is not None and chosen is earlier.algorithm:
            chosen = copy.copy(chosen)  # the object itself stays in use until the wrap is certain
        check_unused(chosen, earlier)
        check_types(settings)
        check_setting(check_replicas)
        scope = Scope(model, group, ignore, groups)
        scope.check_algorithm(chosen, nonfinite)
        ignored = scope.ignored_names(model)
        check_fully_sharded(model, chosen)
        scope.check_meshes(model)
        check_model(model, optimizers, other_parameter_ids(earlier), ignored)
        check_names(model)
        chosen.check(optimizers)
        optimizer_of = {}
        if chosen.exchanges == "weights":
            optimizer_of = optimizers_of_parameters(model, optimizers, chosen.name)
        waits = f"check_replicas={check_replicas}" if type(check_replicas) is int else ""
        waits = "broadcast_buffers=True" if broadcast_buffers else waits
        if waits and not chosen.is_lockstep:
            raise InvalidArgument(
                f"{waits} makes the ranks wait for one another, which algorithm {chosen.name!r} avoids; leave it out"
            )
        if nonfinite not in ("pass", "raise") or (nonfinite == "raise" and chosen.exchanges == "weights"):
            expected = '"pass" or "raise"' if chosen.exchanges == "gradients" else f'"pass" for {chosen.name!r}'
            raise InvalidArgument(f"nonfinite is {nonfinite!r}, expected {expected}")
        reducer = Reducer(
            _make_storage(model, scope, chosen, optimizer_of, bucket_bytes, earlier),
            chosen,
            scope,
            optimizers=optimizers,
            buffers=BufferBroadcast(model, scope) if broadcast_buffers is not False else None,
            always_broadcasts=broadcast_buffers is True,
            find_unused_parameters=find_unused_parameters,
            raises_nonfinite=nonfinite == "raise",
            replica_check=ReplicaCheck(weakref.ref(model), optimizers, group, check_replicas, scope),
            earlier=earlier.reducer if earlier is not None else None,
        )
        return (reducer, OptimizerStates(optimizers, model, scope)), {
            "algorithm": chosen.name,
            "the number of with_bagua calls on this model": _num_wraps(earlier),
            **{f"option {name!r}": repr(value) for name, value in chosen.options().items()},
            **{name: value for name, (value, _) in settings.items()},
            "check_replicas": check_replicas,
            "ignore and the patterns of groups": scope.patterns,
            **describe_model(model, optimizers, ignored),
        }

    remedy = "pass the same model, optimizers, algorithm and options on all ranks"
    reducer, states = agree(group, prepare, remedy)
    # Each ends on all ranks before the next begins; until the last has, nothing is changed.
    with _closing_if_refused(group):
        reducer.scope.check_groups()
        agree(group, lambda: (states.receive(), {}), remedy)
        agree(group, lambda: (reducer.algorithm.attach(reducer.training), {}), remedy)
        agree(group, lambda: (reducer.enter_stage(), {}), remedy)
    with fatal(group, "with_bagua"):
        _take_over(model, states, reducer, earlier)
    return model


def _check_auto(
    group: ProcessGroup, risk: str | None, options: Mapping[str, Any], groups: Mapping[str, GroupLike] | None
) -> None:
    """Raises InvalidArgument on all ranks for arguments that "auto" does not know; collective."""

    def check() -> tuple[None, dict[str, Any]]:
        if risk not in (None, "R0", "R1", "R2", "R3"):
            raise InvalidArgument(f'risk is {risk!r}, expected "R0", "R1", "R2" or "R3"')
        if options:
            raise InvalidArgument(f'algorithm="auto" chooses options itself, but got {sorted(options)}; leave them out')
        if groups:
            raise InvalidArgument('algorithm="auto" is not for experts that some ranks share; name an algorithm')
        return None, {"algorithm": "auto", "risk": risk}

    agree(group, check, "pass the same algorithm and risk on all ranks")


@contextlib.contextmanager
def _closing_if_refused(group: ProcessGroup) -> Iterator[None]:
    """Closes the groups that an algorithm has made of ``group`` inside, where something is refused there."""
    before = list(group.subgroups)
    try:
        yield
    except BaseException:
        for child in [child for child in group.subgroups if child not in before]:
            child.before_close.clear()  # it would take part in what has never begun
            child.close()
        raise


def _take_over(model: torch.nn.Module, states: OptimizerStates, reducer: Reducer, earlier: BaguaHandle | None) -> None:
    """All ranks are prepared: makes them equal, and trains on with ``reducer``."""
    if earlier is not None:
        earlier.algorithm.detach()
    choosing = None if earlier is None else earlier.reducer.choosing
    if choosing is None or not choosing.ranks_are_equal:
        broadcast_model(model, reducer.scope)
        states.take_over()
    reducer.algorithm.begin(reducer.storage.buckets)
    # With rank 0's optimizer states the others may have come to its stage.
    if any(reducer.group.all_gather_plain(reducer.enters_stage())):
        reducer.enter_stage()
    if earlier is not None:
        earlier.reducer.move_gradients_to(reducer)
        earlier.remove_hooks()
    elif "torch._dynamo" in sys.modules and not reducer.group.is_rehearsal:
        torch.compiler.reset()  # what was compiled of a module without hooks never asks again whether it has some
    hooks = _install_hooks(model, reducer)
    if earlier is None:
        BaguaHandle(model, reducer, hooks)
    else:
        earlier.renew(model, reducer, hooks)


def _num_wraps(earlier: BaguaHandle | None) -> int:
    return 1 if earlier is None else earlier.num_wraps + 1


def _make_algorithm(algorithm: str | Algorithm, options: dict[str, Any]) -> Algorithm:
    if isinstance(algorithm, str):
        arguments = [name for name in inspect.signature(with_bagua).parameters if name != "options"]
        known = {field.name for field in dataclasses.fields(algorithms.get(algorithm))}
        for option in sorted(options.keys() - known):
            if close := difflib.get_close_matches(option, arguments, n=1, cutoff=0.8):
                raise InvalidArgument(f"with_bagua has no argument {option!r}; did you mean {close[0]!r}?")
        return algorithms.create(algorithm, options)
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(
            f"algorithm is a {type(algorithm).__name__}, expected a bagua.algorithms.Algorithm or one of the names "
            f"{', '.join(algorithms.available())}"
        )
    if options:
        raise InvalidArgument(
            f"options {sorted(options)} were given with an instance of {algorithm.name!r}, which has its own already"
        )
    return algorithm


def _make_storage(
    model: torch.nn.Module,
    scope: Scope,
    algorithm: Algorithm,
    optimizer_of: Mapping[int, int],
    bucket_bytes: int,
    earlier: BaguaHandle | None,
) -> BucketStorage:
    old = earlier.reducer.storage if earlier is not None else None
    trainable = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and scope.part_of(name) != IGNORED
    ]
    is_same_model = old is not None and [id(p) for _, p in trainable] == [id(p) for p in old.parameters]
    return BucketStorage(
        trainable,
        scope.group,
        bucket_bytes=bucket_bytes,
        small_bucket_bytes=SMALL_BUCKET_BYTES if algorithm.exchanges == "gradients" else bucket_bytes,
        bucket_class=algorithm.bucket_class,
        optimizer_of=optimizer_of,
        group_of=scope.part_of_parameters(model),
        fragment_of=algorithm.fragments_of([name for name, _ in trainable], [p.nbytes for _, p in trainable]),
        order=earlier.reducer.order if is_same_model else None,
    )


# --- hooks


def _install_hooks(model: torch.nn.Module, reducer: Reducer) -> list[Any]:
    hooks: list[Any] = []
    for called, hook in _called_modules(model):
        hooks.append(called.register_forward_pre_hook(hook(reducer, _before_forward)))
        hooks.append(called.register_forward_hook(hook(reducer, _after_forward)))
    reducer_ref = weakref.ref(reducer)
    for index, parameter in enumerate(reducer.storage.parameters):
        hooks.append(parameter.register_post_accumulate_grad_hook(_gradient_hook(reducer_ref, index)))
    if reducer.algorithm.exchanges == "weights":
        for optimizer in reducer.training.optimizers:
            hooks.append(optimizer.register_step_pre_hook(_step_hook(reducer_ref, "before_step")))
            hooks.append(optimizer.register_step_post_hook(_step_hook(reducer_ref, "after_step")))
    return hooks


def _gradient_hook(reducer_ref: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    @torch._disable_dynamo  # of a backward that runs in what torch.compile compiles
    def gradient_is_ready(parameter: torch.Tensor) -> None:
        reducer = reducer_ref()
        if reducer is not None:
            reducer.gradient_ready(index, parameter)

    return gradient_is_ready


def _step_hook(reducer_ref: weakref.ref[Reducer], name: str) -> Callable[..., None]:
    @torch._disable_dynamo  # a compiled step calls it between its graphs
    def around_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        reducer = reducer_ref()
        if reducer is not None:
            getattr(reducer, name)(optimizer)

    return around_step


def _called_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, type[_ModuleHook]]]:
    """The modules whose calls are the model's: of what torch.compile returns, the module inside."""
    inner = getattr(model, "_orig_mod", model)
    # Dynamo traces through the call of a container of torch's own, and a whole graph has no place for hooks.
    is_whole = getattr(getattr(model, "dynamo_ctx", None), "fullgraph", False)
    if is_whole and str(type(inner).forward.__module__).startswith("torch.nn."):
        return [(model, _ModuleHook), (inner, _InnerModuleHook)]
    return [(inner, _ModuleHook)]


class _ModuleHook:
    """A module hook; in a copy or a pickle of the module it does nothing."""

    def __init__(self, reducer: Reducer | None = None, action: Callable[..., None] | None = None) -> None:
        self._reducer, self._action = reducer, action

    @torch._disable_dynamo  # torch.compile runs it between its graphs
    def __call__(self, module: torch.nn.Module, *call: Any) -> None:
        if self._action is not None:
            self._action(self._reducer, module, *call)

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()


class _InnerModuleHook(_ModuleHook):
    """A hook of the module inside one that has hooks of its own; when that one's call is traced it does nothing."""

    def __call__(self, module: torch.nn.Module, *call: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(module, *call)


def _before_forward(reducer: Reducer, module: torch.nn.Module, args: tuple) -> None:
    if not _trains_nothing():
        reducer.before_forward(module.training)


_MODES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def _trains_nothing() -> bool:
    """Returns True where values are fake, or for a graph or another's transform: no rank may be waited for then."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)
    )


def _after_forward(reducer: Reducer, module: torch.nn.Module, args: tuple, output: Any) -> None:
    """Has the outputs report when backward begins, so that its end is that of the outermost backward.

    A checkpoint with use_reentrant=True runs a backward inside backward, whose end is not the end.
    """
    if torch.is_grad_enabled() and not _trains_nothing():
        reducer.after_forward(module.training)
        begins = functools.partial(reducer.backward_begins, module.training)
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:  # a leaf would keep the hook for ever
                tensor.register_hook(begins)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings, lists, tuples and dataclasses, which may hold one another."""
    seen: dict[int, Any] = {}  # the objects too: the next one might take the place of one that is gone
    rest = [output]
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        if isinstance(value, Mapping):
            inside = list(value.values())
        elif isinstance(value, (list, tuple)):
            inside = list(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            continue
        if id(value) not in seen:
            seen[id(value)] = value
            rest += inside
