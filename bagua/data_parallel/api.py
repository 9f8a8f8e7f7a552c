"""with_bagua and DistributedDataParallel: the only file that installs hooks, all of them torch's public ones.

Data path: autograd, the module and the optimizer -> **hooks** -> ``step.py``. Invariants: a parameter's
hook carries its index, fixed at wrap, so no name is looked up in training; hooks of parameters and
optimizers hold the step weakly, so that a dropped model is freed with its gradient memory; a copy or a
pickle of the model carries no working hooks.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from bagua import algorithms
from bagua.algorithms import Algorithm
from bagua.buckets import DEFAULT_BUCKET_BYTES, SMALL_BUCKET_BYTES, BucketStorage
from bagua.data_parallel.buffer_broadcast import BufferBroadcast
from bagua.data_parallel.failures import fatal
from bagua.data_parallel.gradient_hooks import hook_gradient
from bagua.data_parallel.handle import BaguaHandle, check_names, check_unused, handle_of, other_parameter_ids
from bagua.data_parallel.module_tree import compiled_from
from bagua.data_parallel.optimizer_hooks import Watch
from bagua.data_parallel.state_sync import OptimizerStates, broadcast_model
from bagua.data_parallel.step import Step
from bagua.data_parallel.takeover import begin, begin_gradients, closing_if_refused
from bagua.data_parallel.validation import (
    check_exchanges,
    check_is_model,
    check_model,
    check_types,
    describe_model,
    optimizers_in,
    optimizers_of_parameters,
)
from bagua.distributed.consensus import agree
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.world import resolve
from bagua.errors import InvalidArgument

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def with_bagua(
    model: Model,
    optimizers: Optimizers = (),
    *,
    algorithm: str | Algorithm = "gradient_allreduce",
    group: ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool | None = None,
    nonfinite_check: str | None = None,
    **options: Any,
) -> Model:
    """Makes ``model`` train in step with the same model on the other ranks; collective.

    Parameters, buffers and optimizer state become equal to rank 0's. From then on gradients are
    synchronised when ``backward()`` returns, or, by algorithms that exchange weights instead
    (``Algorithm.exchanges``), weights around the optimizer's step. The module itself is returned, its state_dict keys
    are unchanged, and ``model.bagua`` is a :class:`bagua.data_parallel.handle.BaguaHandle`, whose ``no_sync`` is
    ``model.no_sync``, too. Calling it again on the same model changes the algorithm and its options. What is refused on
    one rank is refused on all and has changed nothing: they train on as before.

    Args:
        model: a module whose trainable parameters are on one device, the CPU or a GPU. Train it through ``model(...)``:
            the forwards of the root module broadcast buffers. What a parameter's register_post_accumulate_grad_hook
            has added runs before its gradient is exchanged, also if it came after the wrap. What torch.compile has
            compiled so far is compiled anew at its next call.
        optimizers: those that step its parameters. Their state starts equal. One that is made anew later takes the
            place of the one that stepped the same parameters, as it is: make it alike and at the same step on all
            ranks. Among several ranks, where the algorithm uses a codec, a step is refused on all of them if a gradient
            of any is NaN or Inf, also of what travels without the codec; NaN in parameters that no optimizer is known
            to step raise in backward. Algorithms that exchange weights need all optimizers, and refuse others. So does
            every algorithm a step inside backward, or, where gradients are exchanged, one that uses gradients that
            no_sync has left.
        algorithm: a name from ``bagua.algorithms.available()``, or an instance.
        group: the ranks to train with; all by default.
        bucket_bytes: gradients, or weights, travel in messages of at most this size, 25 MiB by default (a larger
            tensor is one message). Where gradients are exchanged the first message is smaller, 512 KiB at most, so that
            it leaves early; those after it grow, each up to what went before, and the last ones shrink, each to half of
            what is left.
        find_unused_parameters: a backward may leave parameters out, even all. Costs one small message per step. Then
            whatever runs backward from the model's output takes part, ``torch.autograd.grad`` too: all ranks do it.
        broadcast_buffers: whether rank 0's buffers are sent before each training forward outside no_sync. By default
            they are while gradients are synchronised; while weights are exchanged each rank keeps its own.
        nonfinite_check: when a step with a gradient that is NaN or Inf is refused, where it is. "sync": before it has
            changed a weight; where the model is on a device, each backward waits for the device then. "late": when the
            next forward or backward begins, and the weights have changed; nothing waits. By default "late" on a device
            and "sync" on the CPU, where nothing has to wait; there "late" is not to be had.
        options: the algorithm's own.

    Raises:
        InvalidArgument: ranks disagree about model or options (every rank raises it, with both sides);
            unknown algorithm or option; a parameter that cannot be synchronised; the model is wrapped already, on a
            device, and its last step was one with NaN or Inf ("late", above).

    Example:
        >>> bagua.init_process_group()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = bagua.with_bagua(model, optimizer, algorithm="bytegrad")
        >>> loss(model(x), y).backward(); optimizer.step()
    """
    group = resolve(group)
    earlier: BaguaHandle | None = None
    settings = {
        "bucket_bytes": (bucket_bytes, int),
        "find_unused_parameters": (find_unused_parameters, bool),
        "broadcast_buffers": (broadcast_buffers, (bool, type(None))),
        "nonfinite_check": (nonfinite_check, (str, type(None))),
    }

    def prepare() -> tuple[tuple[Step, OptimizerStates], dict[str, Any]]:
        nonlocal earlier, optimizers
        check_is_model(model)
        optimizers = optimizers_in(optimizers)
        earlier = handle_of(model)
        if earlier is not None:
            earlier.step.optimizer_steps.settle()  # what its last step has done wrong would be forgotten
        chosen = _make_algorithm(algorithm, options)
        check_exchanges(chosen)
        if earlier is not None and chosen is earlier.algorithm:
            chosen = dataclasses.replace(chosen)  # the object itself goes on until the wrap is certain
        check_unused(chosen, earlier)
        check_types(settings)
        check_model(model, optimizers, other_parameter_ids(earlier))
        check_names(model)
        chosen.check(optimizers)
        optimizer_of = {}
        if chosen.exchanges == "weights":
            optimizer_of = optimizers_of_parameters(model, optimizers, chosen.name)
        if broadcast_buffers and not chosen.is_lockstep:
            raise InvalidArgument(
                f"broadcast_buffers=True makes the ranks wait for one another in every forward, which algorithm "
                f"{chosen.name!r} avoids; leave it out"
            )
        step = Step(
            model,
            _make_storage(model, group, chosen, optimizer_of, bucket_bytes, earlier),
            chosen,
            group,
            optimizers=optimizers,
            buffers=BufferBroadcast(model, group) if broadcast_buffers is not False else None,
            always_broadcasts=broadcast_buffers is True,
            find_unused_parameters=find_unused_parameters,
            is_late=_is_late(nonfinite_check, model),
            frozen=[(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad],
            earlier=earlier.step if earlier is not None else None,
        )
        return (step, OptimizerStates(optimizers, group)), {
            "the number of with_bagua calls on this model": _num_wraps(earlier),
            "algorithm": chosen.name,
            **{f"option {name!r}": repr(value) for name, value in chosen.options().items()},
            **{name: value for name, (value, _) in settings.items()},
            **describe_model(model, optimizers),
        }

    remedy = "pass the same model, optimizers, algorithm and options on all ranks"
    step, states = agree(group, prepare, remedy)
    # Each ends on all ranks before the next begins; until the last has, nothing is changed.
    with closing_if_refused(group):
        agree(group, lambda: (states.receive(), {}), remedy)
        agree(group, lambda: (step.attach(optimizers), {}), remedy)
        agree(group, lambda: (step.enter_stage(), {}), remedy)
    with fatal(group, "with_bagua"):
        _take_over(model, states, step, earlier)
    return model


def _is_late(nonfinite_check: str | None, model: torch.nn.Module) -> bool:
    is_on_cpu = next(parameter for parameter in model.parameters() if parameter.requires_grad).is_cpu
    if nonfinite_check not in (None, "late", "sync") or (nonfinite_check == "late" and is_on_cpu):
        raise InvalidArgument(
            f'nonfinite_check is {nonfinite_check!r}, expected "sync", "late" where the model is on a device, or None'
        )
    return not is_on_cpu and nonfinite_check != "sync"


class DistributedDataParallel(torch.nn.Module):
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel``: only the import changes.

    The wrapped module is ``.module``, state_dict keys begin with ``module.``, and ``no_sync()`` is a method.
    Unlike torch's, gradients are always views of the buckets (``gradient_as_bucket_view``), buffers are
    broadcast before training forwards only, and a parameter without gradient is an error at the end of
    that backward. An argument that cannot be honoured raises.

    Args:
        module: the module to train, with its parameters on one device.
        device_ids: None, or a list of the one device that the module is on, as in torch's: then what forward is given
            is moved there, where it is not.
        output_device: None, or the device that the module is on.
        broadcast_buffers: as in :func:`bagua.with_bagua`.
        process_group: a bagua group; all ranks by default.
        bucket_cap_mb: ``bucket_bytes`` of :func:`bagua.with_bagua` in MiB, 25 by default.
        find_unused_parameters: a backward may leave parameters out.
        gradient_as_bucket_view: either value; gradients are views in any case, which costs no copy.
        algorithm, optimizers, options: as in :func:`bagua.with_bagua`.

    Raises:
        InvalidArgument: as ``with_bagua``, and for arguments that bagua cannot honour.

    Example:
        >>> model = bagua.DistributedDataParallel(model, algorithm="bytegrad")
        >>> with model.no_sync():
        ...     loss(model(x), y).backward()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        algorithm: str | Algorithm = "gradient_allreduce",
        optimizers: Optimizers = (),
        **options: Any,
    ) -> None:
        super().__init__()
        _check_devices("device_ids", device_ids, module)
        self._moves_inputs = bool(device_ids)
        _check_devices("output_device", None if output_device is None else [output_device], module)
        _refuse("dim", dim, dim != 0, "inputs are not scattered, each rank brings its own")
        _refuse("init_sync", init_sync, not init_sync, "all ranks start equal to rank 0")
        _refuse("check_reduction", check_reduction, check_reduction, "it is always checked: leave it out")
        _refuse("static_graph", static_graph, static_graph, "the graph may change from step to step: leave it out")
        _refuse(
            "process_group",
            type(process_group).__name__,
            process_group is not None and not isinstance(process_group, ProcessGroup),
            "pass a group made by bagua.new_group",
        )
        for name, (default, instead) in _TORCH_ONLY.items():
            value = options.pop(name, default)
            _refuse(name, value, value is not default, instead)
        bucket_bytes = DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * 1024 * 1024)
        self.module = with_bagua(
            module,
            optimizers,
            algorithm=algorithm,
            group=process_group,
            bucket_bytes=bucket_bytes,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            **options,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._moves_inputs:
            device = next(self.module.parameters()).device
            inputs, kwargs = _moved(inputs, device), _moved(kwargs, device)
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """As ``model.bagua.no_sync()``: backwards inside stay local. Those of a copy always do."""
        return self.module.no_sync()

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Not supported: ranks whose inputs end earlier would leave the others waiting.

        Raises:
            InvalidArgument: always, with what to do.
        """
        raise InvalidArgument(_UNEVEN)

    def join_hook(self, **kwargs: Any) -> Any:
        """As ``join``, for torch.distributed.algorithms.Join."""
        raise InvalidArgument(_UNEVEN)

    @property
    def bagua(self) -> BaguaHandle:
        """The handle of the wrapped module."""
        return self.module.bagua


def _check_devices(name: str, given: Any, module: torch.nn.Module) -> None:
    """Raises InvalidArgument unless ``given`` is None, empty, or a list of the one device of the module."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return
    devices = {parameter.device for parameter in module.parameters()}
    if not isinstance(given, (list, tuple)) or {_device(each, devices) for each in given} != devices:
        where = ", ".join(sorted(map(str, devices)))
        raise InvalidArgument(
            f"DistributedDataParallel: {name} is {given!r}, but the module is on {where}; give the one device that it "
            f"is on, or its index, as torch does ({name} = local rank), or leave {name} out"
        )


def _device(given: Any, devices: set[torch.device]) -> torch.device | None:
    """What an index, a name or a device of a module's caller stands for; None: nothing."""
    try:
        return torch.device(next(iter(devices)).type, given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, TypeError, StopIteration):
        return None


def _moved(value: Any, device: torch.device) -> Any:
    """The arguments of a forward on the device, in the containers into which torch's class looks."""
    if isinstance(value, (torch.Tensor, torch.nn.utils.rnn.PackedSequence)):
        return value.to(device)
    if isinstance(value, dict):
        moved = {key: _moved(one, device) for key, one in value.items()}
        if type(value) is dict:  # of which torch.compile traces no copy
            return moved
        value = copy.copy(value)
        value.update(moved)
        return value
    if isinstance(value, (list, tuple)):
        parts = [_moved(one, device) for one in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


# Torch's arguments that nothing here answers to, which are no options of an algorithm: default, and what to do.
_TORCH_ONLY = {
    "delay_all_reduce_named_params": (None, "gradients travel in the order in which they become ready: leave it out"),
    "param_to_hook_all_reduce": (None, "gradients travel in the order in which they become ready: leave it out"),
    "mixed_precision": (None, "train under torch.autocast, and send fewer bits by algorithm='bytegrad', codec='bf16'"),
    "device_mesh": (None, "pass process_group=bagua.from_torch_group(device_mesh.get_group())"),
    "skip_all_reduce_unused_params": (False, "pass find_unused_parameters=True, and freeze what no rank ever uses"),
    "bucket_cap_mb_list": (None, "pass bucket_cap_mb: the first and the last buckets are smaller by themselves"),
    "batched_grad_copy": (False, "gradients move to their buckets one by one, during backward: leave it out"),
    "forward_sync_buffers": (None, "pass broadcast_buffers"),
}
_UNEVEN = (
    "uneven inputs cannot be joined; give all ranks the same number of batches, as DistributedSampler does together "
    "with drop_last=True, or train with torch's DistributedDataParallel on the backend 'bagua', which can join them"
)


def _take_over(model: torch.nn.Module, states: OptimizerStates, step: Step, earlier: BaguaHandle | None) -> None:
    """All ranks are prepared: they become equal, and train on with ``step``."""
    if earlier is not None:
        earlier.algorithm.detach()
    broadcast_model(model, step.group)
    states.take_over()
    begin(step)
    begin_gradients(earlier.step if earlier is not None else None, step)
    if earlier is not None:
        earlier.remove_hooks()
    elif "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what was compiled of a module without hooks never asks again whether it has some
    BaguaHandle(model, step, _install_hooks(model, step), _num_wraps(earlier))


def _num_wraps(earlier: BaguaHandle | None) -> int:
    return 1 if earlier is None else earlier.num_wraps + 1


def _make_algorithm(algorithm: str | Algorithm, options: dict[str, Any]) -> Algorithm:
    if isinstance(algorithm, str):
        own = [name for name in inspect.signature(with_bagua).parameters if name != "options"]
        known = {field.name for field in dataclasses.fields(algorithms.get(algorithm))}
        for option in sorted(options.keys() - known):
            if close := difflib.get_close_matches(option, own, n=1, cutoff=0.8):
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
    group: ProcessGroup,
    algorithm: Algorithm,
    optimizer_of: Mapping[int, int],
    bucket_bytes: int,
    earlier: BaguaHandle | None,
) -> BucketStorage:
    old = earlier.step.storage if earlier is not None else None
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_same_model = old is not None and [id(p) for _, p in trainable] == [id(p) for p in old.parameters]
    return BucketStorage(
        trainable,
        group,
        bucket_bytes=bucket_bytes,
        small_bucket_bytes=SMALL_BUCKET_BYTES if algorithm.exchanges == "gradients" else bucket_bytes,
        bucket_class=algorithm.bucket_class,
        optimizer_of=optimizer_of,
        order=earlier.step.order if is_same_model else None,
    )


def _install_hooks(model: torch.nn.Module, step: Step) -> list[Any]:
    hooks: list[Any] = []
    for called, hook in _called_modules(model):
        hooks.append(called.register_forward_pre_hook(hook(step, _before_forward)))
        hooks.append(called.register_forward_hook(hook(step, _after_forward)))
    step_ref = weakref.ref(step)
    for index, parameter in enumerate(step.storage.parameters):
        hooks.append(hook_gradient(step_ref, index, parameter))
    hooks.append(Watch(step.optimizer_steps))
    return hooks


def _called_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, type[_ModuleHook]]]:
    """Whose calls are the model's: of what torch.compile returns the module inside, which somebody may call as well."""
    inner = compiled_from(model)
    # Dynamo traces through the call of a container of torch's own, and a whole graph has no place for hooks.
    is_whole = getattr(getattr(model, "dynamo_ctx", None), "fullgraph", False)
    if is_whole and str(type(inner).forward.__module__).startswith("torch.nn."):
        return [(model, _ModuleHook), (inner, _InnerModuleHook)]
    return [(inner, _ModuleHook)]


class _ModuleHook:
    """A module hook; in a copy or a pickle of the module it does nothing."""

    def __init__(self, step: Step | None = None, action: Callable[..., None] | None = None) -> None:
        self._step, self._action = step, action

    @torch._disable_dynamo  # torch.compile runs it between its graphs
    def __call__(self, module: torch.nn.Module, *call: Any) -> None:
        if self._action is not None:
            self._action(self._step, module, *call)

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()


class _InnerModuleHook(_ModuleHook):
    """Of the module inside one that has hooks of its own; when that one's call is traced this is nothing."""

    def __call__(self, module: torch.nn.Module, *call: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(module, *call)


def _before_forward(step: Step, module: torch.nn.Module, args: tuple) -> None:
    if not _is_looked_at():
        step.before_forward(module.training)


_MODES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def _is_looked_at() -> bool:
    """Whether a forward trains nothing, whatever else says: its values are fake, or for a graph or another's transform.

    No bucket may be touched then, nor a rank waited for.
    """
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)
    )


def _after_forward(step: Step, module: torch.nn.Module, args: tuple, output: Any) -> None:
    """Lets the outputs tell when backward begins, so that its end is that of the outermost backward.

    A checkpoint with use_reentrant=True runs a backward inside backward, whose end is not the end.
    """
    if torch.is_grad_enabled() and not _is_looked_at():
        step.after_forward()
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:  # a leaf would keep the hook for ever
                tensor.register_hook(step.backward_begins)


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


def _refuse(name: str, value: Any, is_refused: bool, reason: str) -> None:
    if is_refused:
        raise InvalidArgument(f"DistributedDataParallel: {name}={value!r} cannot be honoured; {reason}")
