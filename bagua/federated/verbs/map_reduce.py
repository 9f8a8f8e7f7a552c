"""map_reduce: a map and the reduction of its results as one node, which holds a chunk of clients at a time.

The node is a function of this rank's clients alone. Its inputs are shared by the clients (what was broadcast) or placed
(the clients' axis first); its outputs are sums over the clients or placed. Such functions are closed under derivatives:
of what is shared the cotangent is a sum, of what is placed it is placed. So every derivative is a node again, that
computes chunk by chunk, the forward anew where it needs it; what crosses ranks stands around it as for the other verbs.
Where autograd calls a node, torch has gradients disabled. Derivatives within enable them, since torch has for some
functions (silu, linalg.det) another derivative then, which has no derivative itself, or a wrong one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.verbs.as_it_is import check_as_it_is
from bagua.federated.verbs.closures import check_no_script, current_level
from bagua.federated.verbs.operators import call, sent_as
from bagua.federated.verbs.placement import Placement, current
from bagua.federated.verbs.randomness import Draws, as_if_not_drawn, rewind
from bagua.federated.verbs.recomputation import HAS_CHANGED, Calls, as_called_now
from bagua.federated.verbs.reduction import widened
from bagua.federated.verbs.traced import tracing
from bagua.federated.verbs.verbs import (
    Tree,
    across,
    as_weights,
    check_floating,
    check_mask,
    check_options,
    check_placed,
    check_summable,
    check_tensors,
    chosen_chunk,
    divided,
    each_of,
    map_fn,
    reduce_mean,
    reduce_sum,
    reduce_weighted_mean,
    run_client,
    shared_of,
    splat,
    stand_in,
    times_weight,
    without_writes,
)

Tensors = tuple[torch.Tensor, ...]


def map_reduce(
    function: Callable,
    arguments: Tree,
    *,
    reduce: str = "mean",
    mask: torch.Tensor | None = None,
    vectorize: bool = True,
    chunk_size: int | None = None,
    randomness: str = "error",
    placement: str | None = None,
) -> Tree:
    """``reduce_mean(map_fn(function, arguments))`` without holding what each client returns, nor its gradients.

    Forward adds up the results of `chunk_size` clients at a time; backward computes each chunk again. What
    ``federated.broadcast`` returned is shared by the clients when it is an argument as it is: neither it nor its
    cotangent is ever held once per client. The result equals that of the two verbs to rounding. Under torch.compile
    and federated.trace it is the two verbs.

    Args:
        function: as of ``map_fn``; where the result is differentiated it is called once more, for one client.
        arguments: as of ``map_fn``.
        reduce: "mean", "sum", or "weighted_mean" of a function that returns a pair: a value, and its weight ``[]``;
            that is ``reduce_weighted_mean`` of the two.
        mask: ``[num_local]`` of bools: who takes part; None: all. As of ``reduce_weighted_mean``, the derivative of a
            client that does not must be finite.
        vectorize: as of ``map_fn``: False runs the function as it is, without derivatives.
        chunk_size: as of ``map_fn``: how many clients are computed at a time.
        randomness: as of ``map_fn``; backward draws the same numbers again.
        placement: the name of the program whose clients are meant; by default the innermost that runs.

    Returns:
        What the function returns, reduced over the clients of all ranks.

    Raises:
        InvalidArgument: as map_fn and the reduction, for another `reduce` or a `chunk_size` below 1, and for what is
            no value and weight where a weighted mean is wanted; in a derivative, where the function has changed since,
            by what it uses from around it, such as a loop's variable.
    """
    if reduce not in ("mean", "sum", "weighted_mean"):
        raise InvalidArgument(f"reduce={reduce!r}, expected 'mean', 'sum' or 'weighted_mean'")
    check_options(chunk_size, randomness)
    if vectorize:
        check_no_script(function, "map_reduce")
    else:
        check_as_it_is("map_reduce", chunk_size, randomness)
    options = {"vectorize": vectorize, "chunk_size": chunk_size, "randomness": randomness, "placement": placement}
    if mask is not None:
        mask = check_mask(mask, pytree.tree_leaves(arguments), current(placement, "map_reduce"), "map_reduce")
    if not vectorize and tracing():
        return _by_verbs(function, arguments, reduce, mask, placement)
    if mask is not None:
        masked = functools.partial(_masked, function, reduce)
        if not torch.compiler.is_compiling():
            functools.update_wrapper(masked, function)
        reduce = "sum" if reduce == "sum" else "weighted_mean"
        return map_reduce(masked, (*splat(arguments), mask), reduce=reduce, **options)
    if reduce == "weighted_mean":
        clients = current(placement, "map_reduce")
        dtypes: list[torch.dtype] = []

        def weighted(*args: Any) -> tuple[Tree, torch.Tensor]:
            return _weighted(function, dtypes, *args)

        if not torch.compiler.is_compiling():
            functools.update_wrapper(weighted, function)
        value, total = map_reduce(weighted, arguments, reduce="sum", **options)
        (total,) = call("check_total", [total], clients.key)
        leaves, structure = pytree.tree_flatten(value)
        means = [divided(leaf, total).to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return pytree.tree_unflatten(means, structure)
    verb = f"reduce_{reduce}"
    if vectorize and (torch.compiler.is_compiling() or tracing()):
        mapped = map_fn(function, arguments, chunk_size=chunk_size, randomness=randomness, placement=placement)
        return (reduce_mean if reduce == "mean" else reduce_sum)(mapped, placement=placement)
    clients = current(placement, "map_reduce")
    arguments = check_placed(arguments, clients, "map_reduce")
    leaves, structure = pytree.tree_flatten(splat(arguments))
    if not leaves:
        raise InvalidArgument("map_reduce over no tensors: give the client function an argument")
    check = check_floating if reduce == "mean" else check_summable
    seen: list[Any] = []
    if vectorize:
        chunk_size = chunk_size or chosen_chunk(leaves, clients)
        results = _sums(function, leaves, structure, clients, lambda x: check(x, verb), seen, chunk_size, randomness)
    else:
        results = _sums_of_each(function, splat(arguments), clients, lambda x: check(x, verb), seen)
    if reduce == "sum":  # rounded once on each rank, as by the two verbs
        results = [leaf.to(dtype) for leaf, dtype in zip(results, seen[1], strict=True)]
    reduced = across(verb, pytree.tree_unflatten(list(results), seen[0]), clients, sent_as(seen[1], results))
    results = [leaf.to(dtype) for leaf, dtype in zip(pytree.tree_leaves(reduced), seen[1], strict=True)]
    return pytree.tree_unflatten(results, seen[0])


def _sums(
    function: Callable,
    leaves: Sequence[torch.Tensor],
    structure: Any,
    clients: Placement,
    check: Callable,
    seen: list,
    chunk_size: int | None,
    randomness: str,
) -> Sequence[torch.Tensor]:
    """The sums over this rank's clients, halves as float32; structure and dtypes of the results go into `seen`."""
    shared = [shared_of(leaf, clients) for leaf in leaves]
    inputs = [leaf if value is None else value for leaf, value in zip(leaves, shared, strict=True)]
    if all(value is not None for value in shared):  # nothing has the clients' axis, which vmap wants
        inputs.append(torch.empty(clients.num_local, 0, device=inputs[0].device))
        shared.append(None)
    is_shared = tuple(value is not None for value in shared)
    calls = Calls() if _is_differentiated(inputs) else None
    dims = tuple(None if is_one else 0 for is_one in is_shared)

    def of_all(chunk: Sequence[torch.Tensor], randomness: str, calls: Calls | None) -> Tensors:
        of_one = functools.partial(_flat, function, clients, structure, check, calls, seen)
        return torch.func.vmap(of_one, dims, randomness=randomness)(*chunk)

    def of_chunk(*chunk: torch.Tensor) -> Tensors:
        with calls.run() if calls else nullcontext():
            mapped = of_all(chunk, randomness, calls)
        wide = [widened(leaf) for leaf in mapped]
        return tuple(leaf.sum(0, dtype=leaf.dtype) for leaf in wide)

    draws = Draws(clients, randomness)
    node = Node(as_called_now(of_chunk), is_shared, None, chunk_size, clients, randomness, draws, calls)
    if calls:
        # One client, outside of the node: tensors from around the function are found at the level they come from. The
        # run is not compared with later ones: modules make what they cache, such as positions, the first time.
        probe = [x if is_one else first_of(x) for x, is_one in zip(inputs, is_shared, strict=True)]
        with as_if_not_drawn(inputs) if randomness != "error" else nullcontext():
            results = without_writes(lambda: of_all(probe, "same", None), leaves, clients, "map_reduce")
        results = node._replace(is_sum=(True,) * len(results))(*inputs)
    else:
        results = without_writes(lambda: node.compute(inputs), leaves, clients, "map_reduce")
    return results


def _sums_of_each(
    function: Callable, arguments: tuple, clients: Placement, check: Callable, seen: list
) -> list[torch.Tensor]:
    """The same where the function runs as it is: what one client returns is held at a time."""
    totals: list[torch.Tensor] = []
    for result in each_of(function, arguments, clients, "map_reduce"):
        flat, structure = pytree.tree_flatten(check(result))
        seen[:] = [structure, [leaf.dtype for leaf in flat]]
        wide = [widened(leaf) for leaf in flat]
        if not clients.num_local:
            return list(map(torch.zeros_like, wide))
        totals = [total + leaf for total, leaf in zip(totals, wide, strict=True)] if totals else wide
    return totals


def _by_verbs(
    function: Callable, arguments: Tree, reduce: str, mask: torch.Tensor | None, placement: str | None
) -> Tree:
    """map_reduce of a function that runs as it is in a trace, where a map is of that function alone."""
    value = map_fn(function, arguments, vectorize=False, placement=placement)
    if reduce == "mean" and mask is not None:
        value, reduce = (value, mask.to(torch.get_default_dtype())), "weighted_mean"
    if reduce == "weighted_mean":
        return reduce_weighted_mean(*value, mask=mask, placement=placement)
    if mask is not None:
        value = map_fn(functools.partial(_masked, _same, reduce), (value, mask), placement=placement)
    return (reduce_mean if reduce == "mean" else reduce_sum)(value, placement=placement)


def _same(value: Tree) -> Tree:
    return value


def _is_differentiated(inputs: Sequence[torch.Tensor]) -> bool:
    """Returns True under any transform, or if an input requires a gradient; other tangents pass through the node."""
    return current_level() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _masked(function: Callable, reduce: str, *arguments: Any) -> Any:
    """One client's result for a sum or a weighted mean, with nothing of a client that does not take part."""
    *own, is_there = arguments
    result = function(*own)
    if reduce == "mean":
        result = (result, torch.ones((), dtype=torch.get_default_dtype(), device=is_there.device))
    return pytree.tree_map(
        lambda leaf: torch.where(is_there, leaf, torch.zeros_like(leaf)) if isinstance(leaf, torch.Tensor) else leaf,
        result,
    )


def _weighted(function: Callable, dtypes: list, *arguments: Any) -> tuple[Tree, torch.Tensor]:
    """One client's value times its weight, and the weight; the value's dtypes go into `dtypes`."""
    result = function(*arguments)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise InvalidArgument(
            f"map_reduce(reduce='weighted_mean') of a function that returns a {type(result).__name__}, expected a "
            "pair: a value and its weight"
        )
    value, weight = result
    if not isinstance(weight, torch.Tensor) or weight.dim() or weight.is_complex():
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)
        raise InvalidArgument(
            f"map_reduce(reduce='weighted_mean') with a weight {got}, expected a real tensor []: of one client"
        )
    value = check_floating(check_tensors(value, "map_reduce"), "map_reduce")
    leaves = pytree.tree_leaves(value)
    weight = as_weights(weight, leaves)
    dtypes[:] = [leaf.dtype for leaf in leaves]
    return pytree.tree_map(lambda leaf: times_weight(leaf, weight), value), weight


def _flat(
    function: Callable, clients: Any, structure: Any, check: Callable, calls: Any, seen: list, *leaves: torch.Tensor
) -> Tensors:
    """The client function from leaves to leaves; the structure and dtypes of what it returns go into `seen`.

    What follows the leaves of its arguments is there for its axis only.
    """
    arguments = pytree.tree_unflatten(list(leaves[: structure.num_leaves]), structure)
    result = run_client(function, clients, "map_reduce", *arguments, calls=calls)
    flat, out_structure = pytree.tree_flatten(check(result))
    seen[:] = [out_structure, [leaf.dtype for leaf in flat]]
    return tuple(flat)


def first_of(leaf: torch.Tensor) -> torch.Tensor:
    """The first client's, with the clients' axis, or what stands for it where there is none."""
    return leaf[:1] if leaf.shape[0] else stand_in(leaf)


class Node(NamedTuple):
    """A function over this rank's clients.

    Attributes:
        of_chunk: the function of a chunk of them: shared and placed inputs to sums and placed outputs.
        is_shared: by input.
        is_sum: by output; the others are placed. None: all of them are.
        chunk_size: None for all clients at once.
        clients: whose function it is.
        randomness: as of map_fn.
        draws: what it draws, in derivatives again.
        calls: what it computes, in derivatives again; None where there are none.
        num_given: of a derivative, how many of the inputs, the first ones, are the function's own.
    """

    of_chunk: Callable[..., Tensors]
    is_shared: tuple[bool, ...]
    is_sum: tuple[bool, ...] | None
    chunk_size: int | None
    clients: Placement
    randomness: str
    draws: Draws
    calls: Calls | None
    num_given: int | None = None

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        return _Function.apply(self, *inputs)

    def compute(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Chunk by chunk: sums add up, placed outputs follow one another."""
        results = self.draws.run(inputs, lambda: self._compute(inputs))
        if self.calls and self.calls.has_changed and self.num_given is not None:
            raise InvalidArgument(f"the client function of map_reduce {HAS_CHANGED}")
        return results

    def _compute(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        if not self.clients.num_local:
            # The results of one client, less its values: they have the structure that the other ranks have.
            results = self.of_chunk(*self._part(inputs, first_of))
            return tuple(torch.zeros_like(x) if one else x[:0] for x, one in self._with_kind(results))
        totals: list[Any] = []
        dtypes: list[torch.dtype] = []
        step = self.chunk_size or self.clients.num_local
        begin_draws = rewind(inputs) if self.randomness == "same" and step < self.clients.num_local else None
        for begin in range(0, self.clients.num_local, step):
            if begin and begin_draws is not None:
                begin_draws()
            chunk = self._part(inputs, lambda x, begin=begin: x[begin : begin + step])
            for index, (result, is_sum) in enumerate(self._with_kind(self.of_chunk(*chunk))):
                if not begin:
                    dtypes.append(result.dtype)
                    totals.append(widened(result) if is_sum else [result])  # as torch adds up within a sum
                elif is_sum:
                    totals[index] = totals[index] + result
                else:
                    totals[index].append(result)
        # It has its own memory: forward mode writes into tangents, and those of what nothing moves are expanded zeros.
        return tuple(
            total.to(dtype).contiguous() if is_sum else torch.cat(total)
            for (total, is_sum), dtype in zip(self._with_kind(totals), dtypes, strict=True)
        )

    def restricted(self, chunk: Sequence[torch.Tensor], inputs: Sequence[int], outputs: Sequence[int]) -> Callable:
        """`of_chunk` as a function of these inputs, the others as in `chunk`; it returns these outputs alone."""

        def of_parts(*parts: torch.Tensor) -> Tensors:
            arguments = list(chunk)
            for index, part in zip(inputs, parts, strict=True):
                arguments[index] = part
            results = self.of_chunk(*arguments)
            return tuple(results[i] for i in outputs)

        return of_parts

    def _with_kind(self, results: Sequence[Any]) -> list[tuple[Any, bool]]:
        """A flag for each of the outputs, whether it is a sum."""
        return [(x, self.is_sum is None or self.is_sum[index]) for index, x in enumerate(results)]

    def _part(self, inputs: Sequence[torch.Tensor], part_of: Callable) -> list[torch.Tensor]:
        return [x if one else part_of(x) for x, one in zip(inputs, self.is_shared, strict=True)]


class _Function(torch.autograd.Function):
    """A node and its derivatives, which are nodes."""

    @staticmethod
    def forward(node: Node, *inputs: torch.Tensor) -> Tensors:
        return node.compute(inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensors) -> None:
        ctx.node = inputs[0]
        ctx.following = [i for i, x in enumerate(output) if _has_tangents(x)]  # counts among the results have none
        ctx.mark_non_differentiable(*(x for x in output if not _has_tangents(x)))
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        node, inputs = ctx.node, ctx.saved_tensors
        given = [i for i in ctx.following if cotangents[i] is not None]
        wanted = [i for i, x in enumerate(inputs) if ctx.needs_input_grad[i + 1] and _has_tangents(x)]
        results: list = [None] * len(inputs)
        if given and wanted:

            def of_chunk(*values: torch.Tensor) -> Tensors:
                chunk, outer = values[: len(inputs)], values[len(inputs) :]
                _, pull = torch.func.vjp(node.restricted(chunk, wanted, given), *(chunk[i] for i in wanted))
                with torch.enable_grad():
                    return pull(outer)

            derivative = node._replace(
                of_chunk=of_chunk,
                is_shared=(*node.is_shared, *(node.is_sum[i] for i in given)),
                is_sum=tuple(node.is_shared[i] for i in wanted),
                num_given=node.num_given or len(inputs),
            )
            for index, result in zip(wanted, derivative(*inputs, *(cotangents[i] for i in given)), strict=True):
                results[index] = result
        return (None, *results)

    @staticmethod
    def jvp(ctx: Any, _node: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        node, inputs, following = ctx.node, ctx.saved_tensors, ctx.following
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None and _has_tangents(inputs[i])]

        def of_chunk(*values: torch.Tensor) -> Tensors:
            chunk, pushed = values[: len(inputs)], values[len(inputs) :]
            of_moving = node.restricted(chunk, moving, following)
            with torch.enable_grad():
                return torch.func.jvp(of_moving, tuple(chunk[i] for i in moving), pushed)[1]

        derivative = node._replace(
            of_chunk=of_chunk,
            is_shared=(*node.is_shared, *(node.is_shared[i] for i in moving)),
            is_sum=tuple(node.is_sum[i] for i in following),
            num_given=node.num_given or len(inputs),
        )
        cast = (tangents[i].to(inputs[i].dtype) for i in moving)  # torch 2.13 makes float64 of numbers without axes
        results: list[torch.Tensor | None] = [None] * len(node.is_sum)
        for index, result in zip(following, derivative(*inputs, *cast), strict=True):
            results[index] = result
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, node: Node, *inputs: torch.Tensor) -> tuple[Tensors, tuple]:
        # The clients' axis stays the first one, so the batch's is the second of what is placed.
        moved, dims = [], []
        for x, dim, one in zip(inputs, in_dims[1:], node.is_shared, strict=True):
            dims.append(None if dim is None else 0 if one else 1)
            moved.append(x if dim is None else x.movedim(dim, dims[-1]))
        # The function draws once for a batch that is none of its own inputs', as it did when it ran first.
        is_again = node.num_given is not None and all(dim is None for dim in dims[: node.num_given])
        randomness = "same" if is_again else info.randomness
        batched = torch.func.vmap(node.of_chunk, tuple(dims), randomness=randomness)

        def of_chunk(*chunk: torch.Tensor) -> Tensors:
            # Not by vmap's out_dims: torch 2.13 gives what is the same for the whole batch its axis at 0 only.
            return tuple(x if one else x.movedim(0, 1) for x, one in node._with_kind(batched(*chunk)))

        return node._replace(of_chunk=of_chunk)(*moved), tuple(0 if one else 1 for one in node.is_sum)


def _has_tangents(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
