"""The verbs that federated programs are written in, over pytrees of tensors.

A placed value has one more axis than a server value, the first: this rank's clients. The verbs find their placement and
check what they are given; operators.py has what crosses ranks, and its derivatives.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from bagua.distributed import world
from bagua.errors import InvalidArgument
from bagua.federated.verbs import memory
from bagua.federated.verbs.as_it_is import at, check_as_it_is, check_result, each, trace_code
from bagua.federated.verbs.closures import check_closures, check_no_script, version_of
from bagua.federated.verbs.names import flatten_named
from bagua.federated.verbs.operators import call, sent_as
from bagua.federated.verbs.placement import Frame, Placement, current, run_in
from bagua.federated.verbs.randomness import draw_for_rank
from bagua.federated.verbs.recomputation import Calls
from bagua.federated.verbs.reduction import widened
from bagua.federated.verbs.traced import Spec, Trace, tracing
from bagua.federated.verbs.traced import call as traced_call

Tree = Any  # a pytree of tensors


def broadcast(value: Tree, *, placement: str | None = None) -> Tree:
    """Sends what the server has to every client.

    Args:
        value: server values, ``[...]`` each; numbers become tensors.
        placement: the name of the program whose clients are meant; by default the innermost that runs.

    Returns:
        ``[num_local, ...]`` of the same structure. The clients share the memory.
    """
    clients = current(placement, "broadcast")
    placed = across("broadcast", check_tensors(value, "broadcast"), clients)
    return placed if tracing() else pytree.tree_map(lambda leaf: _expand(leaf, clients), placed)


def reduce_sum(value: Tree, *, placement: str | None = None) -> Tree:
    """The sums over the clients of all ranks: one collective for all tensors of a dtype.

    Args:
        value: placed values, ``[num_local, ...]`` each.

    Returns:
        ``[...]`` of the same structure and dtypes, equal on all ranks.

    Raises:
        InvalidArgument: the first axis is not the clients' one, the values are of bools or of another dtype without
            sums (uint16, 8-bit floats, complex32), or, on all ranks, the ranks do not have the same program, names
            (keys of dictionaries in one order) and shapes, or clients that do not add up.
    """
    clients = current(placement, "reduce_sum")
    return _reduce("reduce_sum", check_summable(check_placed(value, clients, "reduce_sum"), "reduce_sum"), clients)


def reduce_mean(value: Tree, *, placement: str | None = None) -> Tree:
    """The means over the clients of all ranks, as ``reduce_sum``. Halves are sent as float32 and rounded once.

    Raises:
        InvalidArgument: as reduce_sum, and for integers, whose mean is none.
    """
    clients = current(placement, "reduce_mean")
    return _reduce("reduce_mean", check_floating(check_placed(value, clients, "reduce_mean"), "reduce_mean"), clients)


def reduce_weighted_mean(
    value: Tree, weights: torch.Tensor, *, mask: torch.Tensor | None = None, placement: str | None = None
) -> Tree:
    """sum of weight x value over sum of weights, over the clients of all ranks, in one collective.

    Args:
        value: placed values, ``[num_local, ...]`` each.
        weights: ``[num_local]``; the mean is differentiable in them.
        mask: ``[num_local]`` of bools: who takes part. What the others have does not count, whatever it is; their
            client functions get cotangents of 0, which become NaN where a derivative is NaN or infinite: replace their
            data (torch.where) before map_fn. Weights and mask may be tensors of the CPU where the values are on a
            device.

    Returns:
        ``[...]`` of the same structure and dtypes, equal on all ranks.

    Raises:
        InvalidArgument: as reduce_mean, and on all ranks where the weights of those who take part add up to 0.
    """
    verb = "reduce_weighted_mean"
    clients = current(placement, verb)
    leaves, structure = pytree.tree_flatten(check_floating(check_placed(value, clients, verb), verb))
    weights = check_weights(weights, leaves, verb)
    if tuple(weights.shape) != (clients.num_local,):
        raise InvalidArgument(f"{verb}: weights of shape {list(weights.shape)}, expected [{clients.num_local}]")
    masks = [] if mask is None else [check_mask(mask, leaves, clients, verb)]
    weights = beside(leaves, weights)
    *weighted, weights = map_fn(_weigh, (leaves, weights, masks), placement=placement)
    # In the caller's structure, whose names the ranks compare.
    value, total = reduce_sum((pytree.tree_unflatten(weighted, structure), weights), placement=placement)
    sums = pytree.tree_leaves(value)
    (total,) = call("check_total", [total], clients.key)
    means = [divided(one, total).to(leaf.dtype) for one, leaf in zip(sums, leaves, strict=True)]
    return pytree.tree_unflatten(means, structure)


def check_mask(mask: Any, leaves: list[torch.Tensor], clients: Placement, verb: str) -> torch.Tensor:
    """Returns a mask of this rank's clients, where the values are. Raises InvalidArgument for anything else."""
    mask = torch.as_tensor(mask)
    if tuple(mask.shape) != (clients.num_local,):
        raise InvalidArgument(f"{verb}: mask of shape {list(mask.shape)}, expected [{clients.num_local}]")
    if mask.dtype is not torch.bool:
        raise InvalidArgument(f"{verb}: mask of {mask.dtype}, expected torch.bool")
    return beside(leaves, mask)


def beside(value: Tree, vector: torch.Tensor) -> torch.Tensor:
    """Weights or a mask, which are often made on the host, where the values are."""
    leaf = next(iter(pytree.tree_leaves(value)), vector)
    return vector if vector.device == leaf.device else vector.to(leaf.device)


def divided(value: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """value / total in float32 at least: a total need not be a number of float16 or bfloat16."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) / total.to(wide)).to(value.dtype)


def times_weight(leaf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    leaf = widened(leaf)
    return leaf * weight.to(leaf.dtype)


def _weigh(leaves: list[torch.Tensor], weight: torch.Tensor, mask: list[torch.Tensor]) -> list[torch.Tensor]:
    """One client's values times its weight, and the weight itself."""
    if mask:
        weight = torch.where(mask[0], weight, torch.zeros_like(weight))
        leaves = [torch.where(mask[0], leaf, torch.zeros_like(leaf)) for leaf in leaves]
    return [*(times_weight(leaf, weight) for leaf in leaves), weight]


def map_fn(
    function: Callable,
    arguments: Tree,
    *,
    vectorize: bool = True,
    chunk_size: int | None = None,
    randomness: str = "error",
    placement: str | None = None,
) -> Tree:
    """The function of every client, vectorised or one client after the other.

    Args:
        function: of one client's values, without their first axis, to a pytree of tensors. It sees the server's values
            through its arguments only: ``federated.broadcast`` them.
        arguments: placed values; a plain tuple is splatted, anything else, a NamedTuple too, is one argument.
        vectorize: False runs the function as it is, for one client after the other, on copies of its values: it may do
            what any code does, such as train a module with an optimizer of torch.optim, branch on values, or read a
            file. No derivative leads through it, as through ``detach``, and transforms of torch.func refuse it.
            torch's generators are seeded for each client, alike on any number of ranks. A traced program names the
            function, which clients elsewhere have installed (``federated.Client``) and run with generators of their
            own. A rank without clients, and federated.trace, call it once with zeros, to see what it returns.
        chunk_size: how many clients are computed at a time. None: as many as their arguments fit into a processor's
            caches, or 512 MiB after ``federated.keep_memory()``; all on a device, under torch.compile, and where other
            ranks may hold parts of the same clients.
        randomness: of the function: "error", "different" for each client or the "same" for those of a rank; see
            torch.func.vmap. What is different depends on how the clients are spread over the ranks. In graphs of
            torch.compile and make_fx ranks with one seed draw alike, and their generators may differ afterwards where
            they hold different numbers of clients. ``federated.sampling.per_client`` has none of this.

    Returns:
        What the function returns, with the clients' axis first.

    Raises:
        InvalidArgument: the first axis of an argument is not the clients' one; the function returns what is no tensor,
            uses a tensor from around it to which a gradient leads (torch.compile raises a RuntimeError that says so),
            writes into what was broadcast, communicates with ranks that hold other clients, or steps an optimizer of
            torch.optim, whose gradients are not there under torch.func. What code of torch.jit.script uses that it
            calls is not seen.
    """
    check_options(chunk_size, randomness)
    clients = current(placement, "map_fn")
    arguments = check_placed(arguments, clients, "map_fn")
    splatted = splat(arguments)
    if not pytree.tree_leaves(splatted):
        raise InvalidArgument("map_fn over no tensors: give the client function an argument")
    if not vectorize:
        check_as_it_is("map_fn", chunk_size, randomness)
        return _stacked(function, splatted, clients)
    check_no_script(function, "map_fn")
    if trace := tracing():
        return _trace_map(trace, function, splatted, clients, randomness)
    chunk_size = chunk_size or chosen_chunk(pytree.tree_leaves(splatted), clients)
    of_one = functools.partial(run_client, function, clients, "map_fn")
    of_all = torch.func.vmap(of_one, chunk_size=chunk_size, randomness=randomness)
    # Not every operation can be batched over nothing. One client that is dropped again keeps what is differentiated,
    # and so the collectives, as on ranks that have clients.
    given = splatted if clients.num_local else pytree.tree_map(stand_in, splatted)

    def compute() -> Tree:
        return draw_for_rank(clients, randomness, pytree.tree_leaves(given), lambda: of_all(*given))

    is_compiling = torch.compiler.is_compiling()
    results = compute() if is_compiling else without_writes(compute, pytree.tree_leaves(splatted), clients, "map_fn")
    return results if clients.num_local else pytree.tree_map(lambda leaf: leaf[:0], results)


# Measured (benchmarks/federated/widths.py): beyond so many bytes of arguments, batched operators wait for memory, more
# so where it is not kept, and below so many clients for torch's dispatch under vmap.
_CHUNK_BYTES, _KEPT_CHUNK_BYTES = 8 * 2**20, 512 * 2**20
_LEAST_CHUNK = 4


def chosen_chunk(leaves: Sequence[torch.Tensor], clients: Placement) -> int | None:
    """Returns how many of this rank's clients are computed at a time where the caller does not say; None: all."""
    num_local = clients.num_local
    if torch.compiler.is_compiling() or num_local <= _LEAST_CHUNK or not all(leaf.is_cpu for leaf in leaves):
        return None
    if world.is_initialized() and world.resolve(None).size > (clients.group.size if clients.is_distributed else 1):
        return None  # other ranks may share the clients, with parts of other sizes, and must compute as many at a time
    of_one = sum(leaf.numel() * leaf.element_size() for leaf in leaves) // num_local
    most = max(_LEAST_CHUNK, (_KEPT_CHUNK_BYTES if memory.is_kept() else _CHUNK_BYTES) // max(1, of_one))
    return -(-num_local // -(-num_local // most)) if most < num_local else None  # chunks of about one size


def _stacked(function: Callable, arguments: tuple, clients: Placement) -> Tree:
    """map_fn of a function that runs as it is."""
    if trace := tracing():
        return trace_code(trace, function, arguments, clients)
    results = list(each_of(function, arguments, clients, "map_fn"))
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *results)
    return stacked if clients.num_local else pytree.tree_map(lambda leaf: leaf[:0], stacked)


def each_of(function: Callable, arguments: tuple, clients: Placement, verb: str) -> Iterator[Tree]:
    """Yields what a function that runs as it is returns for each client, or for a stand-in where there is none."""
    return each(function, arguments if clients.num_local else pytree.tree_map(stand_in, arguments), clients, verb)


def stand_in(leaf: torch.Tensor) -> torch.Tensor:
    """One client's values where a rank has none, ``[0, ...]`` -> ``[1, ...]``: zeros, identities where they are square.

    torch.linalg refuses to invert zeros.
    """
    if 0 in leaf.shape[1:]:  # which torch 2.9 does not pad
        return torch.cat([leaf, leaf.new_empty(1, *leaf.shape[1:])])
    padded = pad(leaf, [0, 0] * (leaf.dim() - 1) + [0, 1])  # torch.cat loses tangents of what has no other axis
    if leaf.dim() > 2 and leaf.shape[-1] == leaf.shape[-2] and (leaf.is_floating_point() or leaf.is_complex()):
        padded = padded + torch.eye(leaf.shape[-1], dtype=leaf.dtype, device=leaf.device)
    return padded


def splat(arguments: Tree) -> tuple:
    """The arguments of a client function: a NamedTuple is a value of its own, as any other class."""
    return arguments if type(arguments) is tuple else (arguments,)


def _trace_map(trace: Trace, function: Callable, arguments: tuple, clients: Placement, randomness: str) -> Tree:
    """map_fn while federated.trace runs: one operator over this rank's clients."""
    leaves, structure = pytree.tree_flatten(arguments)
    structures: list[Any] = []

    def of_one(*values: torch.Tensor) -> list[torch.Tensor]:
        result = run_client(function, clients, "map_fn", *pytree.tree_unflatten(list(values), structure))
        flat, out_structure = pytree.tree_flatten(result)
        structures.append(out_structure)
        return flat

    specs = [Spec(tuple(leaf.shape[1:]), leaf.dtype, leaf.device) for leaf in leaves]
    name = getattr(function, "__name__", type(function).__name__).strip("<>_")
    made = trace.add(name, of_one, specs, randomness, clients.key)
    return pytree.tree_unflatten(traced_call("map", leaves, made.key), structures[0])


# Torch's messages about client functions under vmap.
_WRITES = (
    "writes into what was broadcast, whose memory the clients share, such as the running statistics of a module: "
    "clone it first, and return new values"
)
_VALUES = (
    "makes a number of a tensor, or branches on one, such as by .item(), float() or if: use torch.where and keep "
    "tensors, or run it as it is, by vectorize=False"
)
_SIZES = (
    "has a result whose size depends on values, such as x[x > 0]: use torch.where, or run it as it is, by "
    "vectorize=False"
)
_MEMORY = (
    "reads a tensor's memory, such as by .numpy() or .tolist(): write it in torch's operators, or run it as it is, by "
    "vectorize=False"
)
_BACKWARD = (
    "calls backward(), autograd.grad() or requires_grad_(), as for an optimizer of torch.optim: take "
    "torch.func.grad(loss)(parameters) and return new parameters, or run it as it is, by vectorize=False"
)
_EXPLAINED = {
    "It looks like you're calling .item() on a Tensor": _VALUES,
    "use a Tensor in some data-dependent control flow": _VALUES,
    "dynamic shape": _SIZES,
    "for each batch this would return a differently shaped Tensor": _SIZES,
    "Cannot access data pointer of Tensor that doesn't have storage": _MEMORY,
    "Cannot access storage of": _MEMORY,
    "backward() called inside a functorch transform": _BACKWARD,
    "You are attempting to call Tensor.requires_grad_()": _BACKWARD,
    "does not require grad and does not have a grad_fn": _BACKWARD,
    "called random operation while in randomness error mode": (
        'draws random numbers: say randomness="different" for others at each client, or "same"'
    ),
    "more than one element of the written-to tensor refers to": _WRITES,
    "Batch norm got a batched tensor as input while the running_mean or running_var": _WRITES,
    "(self, *extra_args) is not possible because": (
        "writes a client's values into a tensor that is not the client's own, such as torch.zeros or the running "
        "statistics of a module: return new values, or make it with zeros_like of what depends on an argument"
    ),
    "wrapper == nullptr INTERNAL ASSERT FAILED": (
        "uses a tensor that it made and kept in an earlier run, under a transform of torch.func: make it before, or "
        "anew in each run"
    ),
    "that would mutate a captured Tensor": (
        "writes into a tensor from around it, and runs again for its derivative: clone it first, and return new values"
    ),
    "Batching rule not implemented": (
        "runs what torch cannot batch, such as a recurrent layer: write it in other operators, call the graph of "
        "federated.trace, which takes such layers apart, or run it as it is, by vectorize=False"
    ),
}


def run_client(function: Callable, clients: Placement, verb: str, *arguments: Any, calls: Calls | None = None) -> Any:
    """Returns what the client function of the verb returns, which is checked; its operations are added to `calls`."""
    closures = check_closures(verb, arguments, calls)
    with closures:
        try:
            result = run_in(Frame(clients, is_mapping=True), function, arguments, {})
        except RuntimeError as error:
            message = str(error)  # of its own: torch.compile cannot trace how an error in a closure is deleted
            why = next((text for said, text in _EXPLAINED.items() if said in message), None)
            if why is None:
                raise
            raise InvalidArgument(f"the client function of {verb} {why}. torch says: {message}") from error
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                closures.check(leaf)
    check_result(result, verb)
    return result


# ---- what the clients share

_SHARED = "_bagua_shared"


class _Shared:
    """An attribute of what broadcast returned: whose it is, and what all of them have. Of copies and files it is not.

    ``{}`` stands for it there, which torch.load takes.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: Placement, value: torch.Tensor) -> None:
        self.owner, self.value = owner, value

    def __reduce__(self) -> tuple[type, tuple]:
        return OrderedDict, ()


def _expand(shared: torch.Tensor, clients: Placement) -> torch.Tensor:
    placed = shared.expand(clients.num_local, *shared.shape)
    if not torch.compiler.is_compiling():
        setattr(placed, _SHARED, _Shared(clients, shared))
    return placed


def shared_of(leaf: torch.Tensor, clients: Placement) -> torch.Tensor | None:
    """Returns what all clients have if `leaf` is as broadcast returned it, without hooks or a gradient of its own."""
    shared = getattr(leaf, _SHARED, None)
    if not isinstance(shared, _Shared) or shared.owner is not clients:
        return None
    if leaf.requires_grad != shared.value.requires_grad or leaf.retains_grad or leaf._backward_hooks:
        return None
    return shared.value


def without_writes(compute: Callable[[], Tree], leaves: Sequence[torch.Tensor], clients: Placement, verb: str) -> Tree:
    """Refuses a client function that writes into what of `leaves` is shared; torch lets one client alone do so.

    Not of inference tensors, which have no versions, nor in what torch.compile makes.
    """
    shared = [leaf for leaf in leaves if shared_of(leaf, clients) is not None or _is_expanded(leaf)]
    before = [version_of(value) for value in shared]
    results = compute()
    if before != [version_of(value) for value in shared]:
        raise InvalidArgument(f"the client function of {verb} {_WRITES}")
    return results


def _is_expanded(leaf: torch.Tensor) -> bool:
    """Returns True if all clients' values are in one place, such as those of a part of what was broadcast."""
    return leaf.layout is torch.strided and leaf.dim() > 0 and leaf.shape[0] > 1 and leaf.stride(0) == 0


# ---- checks


def check_options(chunk_size: Any, randomness: Any) -> None:
    is_number = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and (not is_number or chunk_size < 1):
        raise InvalidArgument(f"chunk_size={chunk_size!r}, expected None or an integer of at least 1")
    if randomness not in ("error", "different", "same"):
        raise InvalidArgument(f"randomness={randomness!r}, expected 'error', 'different' or 'same'")


def _reduce(verb: str, value: Tree, clients: Placement) -> Tree:
    names, leaves, structure = flatten_named(value)
    if tracing():
        return pytree.tree_unflatten(_across(verb, names, leaves, clients), structure)
    wide = [widened(leaf) if verb == "reduce_mean" else leaf for leaf in leaves]
    sums = [leaf.sum(0, dtype=leaf.dtype) for leaf in wide]
    results = _across(verb, names, sums, clients, sent_as([leaf.dtype for leaf in leaves], sums))
    return pytree.tree_unflatten([x.to(leaf.dtype) for x, leaf in zip(results, leaves, strict=True)], structure)


def across(verb: str, value: Tree, clients: Placement, sent: Sequence[int] = ()) -> Tree:
    """The operator on the leaves of a pytree, whose names the ranks compare; `sent` is of ``operators.sent_as``."""
    names, leaves, structure = flatten_named(value)
    return pytree.tree_unflatten(_across(verb, names, leaves, clients, sent), structure)


def _across(
    verb: str, names: Sequence[str], leaves: Sequence[torch.Tensor], clients: Placement, sent: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Applies the operator to leaves with derivatives and to those without, each by themselves."""
    results = list(leaves)
    for has_derivatives in (True, False):
        indices = [i for i, x in enumerate(leaves) if (x.is_floating_point() or x.is_complex()) == has_derivatives]
        if not indices:
            continue
        values = [leaves[i] for i in indices]
        if tracing():  # where nothing is sent
            found = traced_call(verb, values, clients.key)
        else:
            found = call(verb, values, clients.key, [names[i] for i in indices], sent)
        for index, result in zip(indices, found, strict=True):
            results[index] = result
    return results


_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SUMMABLE = _INTEGERS | _FLOATING | {torch.complex64, torch.complex128}


def check_tensors(value: Tree, verb: str) -> Tree:
    """Returns the value with tensors for numbers."""

    def check(path: tuple, leaf: Any) -> torch.Tensor:
        if isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, (int, float, complex)):
            return torch.as_tensor(leaf)
        raise InvalidArgument(f"{verb} of {leaf!r}{at(path)}, a {type(leaf).__name__}, expected tensors")

    return pytree.tree_map_with_path(check, value)


def check_placed(value: Tree, clients: Placement, verb: str) -> Tree:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        if not isinstance(leaf, torch.Tensor):
            raise InvalidArgument(f"{verb} of {leaf!r}{at(path)}, a {type(leaf).__name__}, expected tensors")
        if leaf.dim() == 0 or leaf.shape[0] != clients.num_local:
            held = "all of them" if clients.num_local == clients.size else f"of {clients.size} in all"
            raise InvalidArgument(
                f"{verb}: a tensor of shape {list(leaf.shape)}{at(path)}, expected {clients.num_local} as the first "
                f"axis, the {clients.name} that this rank holds, {held}; federated.broadcast values of the server, or "
                "give program(num_local=) what each rank holds"
            )
    return value


def check_summable(value: Tree, verb: str) -> Tree:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        if leaf.dtype is torch.bool:
            raise InvalidArgument(f"{verb} of bools{at(path)}: say what a sum is by .to(torch.int64) or another dtype")
        if leaf.dtype not in _SUMMABLE:
            raise InvalidArgument(
                f"{verb} of {leaf.dtype}{at(path)}, which is not added up: convert it to a dtype that is, "
                "such as by .to(torch.float32) or .to(torch.int64)"
            )
    return value


def check_weights(weights: Any, leaves: Sequence[torch.Tensor], verb: str) -> torch.Tensor:
    """Returns them as floating numbers, which add up, for a mean of these leaves."""
    if weights is None:
        raise InvalidArgument(f"{verb} with weights None, expected a number for each client: reduce_mean takes none")
    weights = torch.as_tensor(weights)
    if weights.is_complex():
        raise InvalidArgument(f"{verb}: weights of {weights.dtype}, expected real numbers")
    return as_weights(weights, leaves)


def as_weights(weights: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns them as wide as the widest leaf, and as float32 at least: their total is no less exact than the sums."""
    dtype = torch.promote_types(
        weights.dtype if weights.is_floating_point() else torch.get_default_dtype(), torch.float32
    )
    for leaf in leaves:
        dtype = torch.promote_types(dtype, leaf.dtype.to_real() if leaf.is_complex() else leaf.dtype)
    return weights.to(dtype)


def check_floating(value: Tree, verb: str) -> Tree:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        if not leaf.is_floating_point() and not leaf.is_complex():
            raise InvalidArgument(
                f"{verb} of {leaf.dtype}{at(path)}, whose mean is no integer: use .float() or reduce_sum"
            )
    return check_summable(value, verb)
