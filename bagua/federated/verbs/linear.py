"""Linear operators over lists of tensors, with derivatives under every transform: one rule defines each of them.

    tangents: the operator itself, or another;  cotangents: its transpose;  a batch: an axis where the rule puts it

torch.library knows no rule for forward mode. The derivatives are a kernel of the Autograd key, which runs a function of
a single level of torch.func: that way they hold under every transform, nested, and under torch.compile. The three
private names of torch that this takes are imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

Tensors = list[torch.Tensor]
Operator = Callable[..., Tensors]  # takes (values, names, key, options)


class Linear(NamedTuple):
    """The rule of an operator ``name(Tensor[] values, str[] names, str key, int[] options) -> Tensor[]``.

    Attributes:
        compute: the results, below all transforms.
        transpose: an operator on cotangents; the names are those of the results that have one.
        like: the results of fake tensors; by default they are shaped as the values.
        tangent: an operator on tangents; None: the operator itself.
        batch: the axis to which a batch is moved in values, and where it is in results.
    """

    compute: Operator
    transpose: Operator
    like: Operator = lambda values, names, key, options: [torch.empty_like(value) for value in values]
    tangent: Operator | None = None
    batch: tuple[int, int] = (0, 0)


def define(library: Any, name: str, rule: Linear, tags: tuple = ()) -> Operator:
    """Defines the operator in the library, with all its kernels, and returns it."""
    library.define(f"{name}(Tensor[] values, str[] names, str key, int[] options) -> Tensor[]", tags=tags)
    operator = getattr(getattr(torch.ops, library.ns), name).default
    tangent = rule.tangent or operator

    def batched(info: Any, dims: tuple, values: Tensors, *rest: Any) -> tuple[Tensors, list]:
        before, after = rule.batch
        moved = [x if dim is None else x.movedim(dim, before) for x, dim in zip(values, dims[0], strict=True)]
        return operator(moved, *rest), [None if dim is None else after for dim in dims[0]]

    def forward(keyset: Any, names: list[str], key: str, options: list[int], *values: torch.Tensor) -> tuple:
        # Enabled, or the levels of nested transforms above this one would see no derivative, only zeros.
        with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            below = keyset & torch._C._after_autograd_keyset
            return tuple(operator.redispatch(below, list(values), names, key, options))

    def setup_context(ctx: Any, inputs: tuple, outputs: tuple) -> None:
        ctx.rest, ctx.dtypes = inputs[1:4], [value.dtype for value in inputs[4:]]
        ctx.likes = [(x.shape, x.dtype, x.device) for x in outputs]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        return (None,) * 4 + tuple(_of_present(rule.transpose, cotangents, ctx.rest))

    def jvp(ctx: Any, *tangents: Any) -> tuple:
        # torch 2.13 makes float64 tangents of numbers without axes, whatever their primals are.
        cast = [t if t is None else t.to(dtype) for t, dtype in zip(tangents[4:], ctx.dtypes, strict=True)]
        results = zip(_of_present(tangent, cast, ctx.rest), ctx.likes, strict=True)
        # torch wants all or none.
        return tuple(torch.zeros(s, dtype=d, device=e) if x is None else x for x, (s, d, e) in results)

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp}
    # Torch runs them from C++ wherever code is compiled around a graph break, and would compile them there.
    methods = {title: staticmethod(torch.compiler.disable(method)) for title, method in methods.items()}
    function = type(name, (_SingleLevelFunction,), methods)

    def differentiated(keyset: Any, values: Tensors, *rest: Any) -> Tensors:
        with enable_single_level_autograd_function():
            return list(function.apply(keyset, *rest, *values))

    library.impl(name, rule.compute, "CompositeExplicitAutograd")
    library.impl(name, differentiated, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{library.ns}::{name}", rule.like, lib=library)
    torch.library.register_vmap(f"{library.ns}::{name}", batched, lib=library)
    return operator


def _of_present(function: Operator, tensors: Sequence[torch.Tensor | None], rest: tuple) -> list:
    """Returns the function of the tensors that are not None, with None where they are None."""
    names, key, options = rest
    there = [i for i, tensor in enumerate(tensors) if tensor is not None]
    given = [names[i] for i in there] if names else []
    found = iter(function([tensors[i] for i in there], given, key, options) if there else ())
    return [None if tensor is None else next(found) for tensor in tensors]
