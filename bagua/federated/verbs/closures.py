"""The trap of closures: a client function may see a value of the server only through its arguments.

A tensor that a client function takes from around it, and to which a gradient leads, has the right value and a wrong
derivative in reverse mode: each rank would add up its own clients only. While a client function runs, or torch.compile
traces it, every operation on such a tensor raises. Constants are free to be used. In federated.trace nothing but
constants is: a client that is somewhere else has only what was sent to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.verbs.recomputation import Calls
from bagua.federated.verbs.substitutes import in_clients
from bagua.federated.verbs.traced import Trace, tracing

_LEVEL = "_bagua_level"  # an attribute: the level of the innermost client function that made the tensor
# They give something other than a value that a gradient flows through.
_READ = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}
_DETACH = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}
# They give a tensor that was there before, which is checked when it is used.
_FIND = {torch.Tensor.grad.__get__, torch.Tensor._grad.__get__, torch.Tensor._base.__get__}
_COMMUNICATION = {
    "torch.distributed.distributed_c10d",
    *(f"torch._ops.{name}" for name in ("c10d", "_c10d_functional", "_c10d_functional_autograd")),
}
_functorch = torch._C._functorch
_is_wrapped = _functorch.is_functorch_wrapped_tensor


@torch.compiler.assume_constant_result
def current_level() -> int:
    """The level of torch.func's transforms; 0 without one. torch.compile runs this, too, under those that it traces."""
    return _functorch.maybe_current_level() or 0


class ClosureCheck(TorchFunctionMode):
    """Objects to tensors from outside of the client function that a gradient leads to.

    Args:
        verb: that runs the function, for messages.
        arguments: what the function is given, under vmap.
        calls: to which its operations are added; None where it does not run again.
    """

    def __init__(self, verb: str, arguments: Any, calls: Calls | None = None) -> None:
        super().__init__()
        self._calls = calls
        self._verb = verb
        self._is_node = verb == "map_reduce"  # which computes below the transforms around it
        self._level = current_level()
        for tensor in pytree.tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                setattr(tensor, _LEVEL, self._level)

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") in _COMMUNICATION:
            raise InvalidArgument(
                f"{function.__name__} of torch.distributed inside a client function, where torch.func's transforms do "
                "not see through it: return the value, and call federated.reduce_sum after map_fn. The ranks that "
                "share a client communicate inside, by federated.copy_to_group and reduce_from_group"
            )
        given = _tensors_in([*args, *kwargs.values()])
        is_read = function in _READ or _reads_attribute(function)
        is_followed = torch.is_grad_enabled() and function not in _DETACH
        if not is_read:
            self._check_all(given, is_followed)
        result = in_clients(function)(*args, **kwargs)
        is_operation = not is_read and (given or isinstance(result, torch.Tensor))
        if self._calls is not None and is_operation and function is not torch.autograd.grad:  # of transforms within
            self._calls.add(function, (args, kwargs), [self._constant(tensor) for tensor in given])
        if function in _FIND:
            return result
        if is_read and isinstance(result, torch.Tensor):  # such as Tensor.T, which is a view
            self._check_all(given, is_followed)
        # torch.compile lets no one set an attribute of what is in a list; that is checked when it is used.
        for tensor in [result] if torch.compiler.is_compiling() else _tensors_in([result]):
            if isinstance(tensor, torch.Tensor):
                self._set_level(tensor, given)
        return result

    def _check_all(self, tensors: list[torch.Tensor], is_followed: bool) -> None:
        for tensor in tensors:
            self.check(tensor, is_followed)

    def check(self, tensor: torch.Tensor, is_followed: bool = True) -> None:
        """Checks what an operation uses or the client function returns; `is_followed`: by a gradient, through it."""
        if not self._is_inside(tensor):
            self._check(tensor, is_followed and torch.is_grad_enabled())

    def _constant(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """A tensor from around the function, with its version; None for others."""
        return None if self._is_inside(tensor) or _is_wrapped(tensor) else (tensor, version_of(tensor))

    def _set_level(self, tensor: torch.Tensor, given: list[torch.Tensor]) -> None:
        """Marks what a function of `given` returns, and what it wraps, which remains when a transform inside ends."""
        # An argument that is returned as it is, such as by Tensor.float, was not made inside.
        while not any(tensor is one for one in given):
            setattr(tensor, _LEVEL, self._level)
            if torch.compiler.is_compiling() or not _is_wrapped(tensor):
                return
            if _functorch.maybe_get_level(tensor) <= self._level:
                return
            tensor = _functorch.get_unwrapped(tensor)

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        """Returns True if it was made inside, under the transforms too that the client function calls."""
        while getattr(tensor, _LEVEL, -1) < self._level:
            if torch.compiler.is_compiling() or not _is_wrapped(tensor):
                return False
            if 0 <= _functorch.maybe_get_level(tensor) <= self._level:  # below 0 where its transform has ended
                return False
            tensor = _functorch.get_unwrapped(tensor)
        return True

    def _check(self, tensor: torch.Tensor, is_followed: bool) -> None:
        """Checks a tensor from outside; `is_followed` says whether a gradient follows through the function."""
        if torch.compiler.is_compiling():
            if is_followed or self._is_node:
                _check_constant(tensor, self._level, tensor.shape, self._verb)
        elif _is_wrapped(tensor) or tensor.requires_grad:
            if is_followed:
                _check_constant(tensor, self._level, tensor.shape, self._verb)
            if self._is_node:
                self._check_unwrapped(tensor)

    def _check_unwrapped(self, tensor: torch.Tensor) -> None:
        shape = list(tensor.shape)
        while _is_wrapped(tensor):
            level = _functorch.maybe_get_level(tensor)
            if level == self._level and _functorch.is_batchedtensor(tensor):
                return  # another for every client
            if level <= self._level:
                raise InvalidArgument(
                    f"the client function uses a tensor of shape {shape} from around it, over which a "
                    f"transform of torch.func runs: pass federated.broadcast(tensor) to {self._verb} as an argument"
                )
            tensor = _functorch.get_unwrapped(tensor)


# If torch.compile falls back to Python, torch 2.14 compiles this function by itself, and runs what it has made for
# one attribute of a tensor for another. Within what is compiled as a whole it is traced all the same.
torch._dynamo.eval_frame.skip_code(ClosureCheck.__torch_function__.__code__)


class TraceClosureCheck(ClosureCheck):
    """Objects to every value of the trace that the client function is not given, and to tensors that require gradients.

    While a map inside of the client function is traced, that map's check applies, not this one.
    """

    def __init__(self, trace: Trace, verb: str, arguments: Any) -> None:
        super().__init__(verb, arguments)
        self._trace = trace
        self._modes = {_innermost(tensor).fake_mode for tensor in pytree.tree_leaves(arguments)}

    def __enter__(self) -> TraceClosureCheck:
        self._trace.closure_checks.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._trace.closure_checks.pop()
        super().__exit__(*exception)

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        tensor = _innermost(tensor)
        return tensor.fake_mode in self._modes if isinstance(tensor, FakeTensor) else not tensor.requires_grad

    def _check(self, tensor: torch.Tensor, is_followed: bool) -> None:
        if self is self._trace.closure_checks[-1]:
            raise InvalidArgument(
                f"the client function uses a tensor of shape {list(tensor.shape)} from around it, "
                f"which clients do not have: pass federated.broadcast(tensor) to {self._verb} as an argument"
            )


def check_closures(verb: str, arguments: Any, calls: Calls | None = None) -> ClosureCheck:
    """Checks the tensors that the client function of the verb uses."""
    trace = tracing()
    return TraceClosureCheck(trace, verb, arguments) if trace else ClosureCheck(verb, arguments, calls)


def check_no_script(function: Any, verb: str) -> None:
    """Refuses a client function that is a module of torch.jit.script to whose parameters a gradient leads.

    No mode sees what it uses. One that the client function calls is not found.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, torch.jit.ScriptModule) or not torch.is_grad_enabled():
        return
    if any(parameter.requires_grad for parameter in function.parameters()):
        raise InvalidArgument(
            f"the client function of {verb} is what torch.jit.script has compiled, with parameters that require "
            "gradients, whose derivatives would be those of this rank's clients: use the module itself by "
            "torch.func.functional_call, or freeze it"
        )


def version_of(tensor: torch.Tensor) -> int:
    """Returns a number that a write into its memory changes; 0 of inference tensors, which have none."""
    with torch._C.DisableTorchFunction():  # around a program within a client function is the check of that one
        tensor = _innermost(tensor)
        return 0 if tensor.is_inference() else tensor._version


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without what torch.func has wrapped around it."""
    while _is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


# ---- whether a gradient leads to a tensor
#
# An operator, since every level of torch.func (and autograd, below them) dispatches it anew, with the tensor as it is
# there. It runs where torch.compile traces, too, where it is not known what a tensor is wrapped in.

_library = torch.library.Library("bagua_federated", "FRAGMENT")
_library.define("check_constant(Tensor value, int level, SymInt[] shape, str verb) -> Tensor")
_check_constant = torch.ops.bagua_federated.check_constant.default


def _nothing(value: torch.Tensor, level: int, shape: Sequence[int], verb: str) -> torch.Tensor:
    return value.new_empty(0)


def _check_here(keyset: Any, value: torch.Tensor, level: int, shape: Sequence[int], verb: str) -> torch.Tensor:
    """Checks one level: those above the client function's are the function's own."""
    if value.requires_grad and torch.is_grad_enabled() and current_level() <= level:
        raise InvalidArgument(
            f"the client function uses a tensor of shape {list(shape)} from around it, and a gradient "
            f"leads to it: its derivative would be wrong. Pass federated.broadcast(tensor) to {verb} as an argument, "
            "or use tensor.detach(); a module with an optimizer of torch.optim runs as it is, by vectorize=False"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _check_constant.redispatch(keyset & torch._C._after_autograd_keyset, value, level, shape, verb)


def _check_batched(
    info: Any, in_dims: tuple, value: torch.Tensor, level: int, shape: Sequence[int], verb: str
) -> tuple[torch.Tensor, None]:
    """Accepts what differs between clients, from inside; batches of programs and of the function do not count."""
    if current_level() == level:
        return value.new_empty(0), None
    return _check_constant(value, level, shape, verb), None


_library.impl("check_constant", _nothing, "CompositeExplicitAutograd")
_library.impl("check_constant", _check_here, "Autograd", with_keyset=True)
torch.library.register_fake("bagua_federated::check_constant", _nothing, lib=_library)
torch.library.register_vmap("bagua_federated::check_constant", _check_batched, lib=_library)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors that torch's functions take and return: by themselves, in lists, tuples and dictionaries."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
        elif isinstance(value, dict):
            found += _tensors_in(value.values())
    return found


def _reads_attribute(function: Callable) -> bool:
    """Such as Tensor.shape.__get__."""
    return getattr(function, "__name__", "") == "__get__"
