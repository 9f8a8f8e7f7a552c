"""Client functions that run as they are: one client after the other, on ordinary tensors, without derivatives.

They are what people have: a module, an optimizer of torch.optim, a loop over batches. torch.func does not see into it,
so a transform refuses them, and no gradient leads through. In a trace such a function is a name: a client that is
somewhere else runs what it has installed under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from bagua.distributed.devices import seeded
from bagua.errors import InvalidArgument
from bagua.federated.verbs.closures import current_level
from bagua.federated.verbs.placement import Frame, Placement, local_placement, run_in
from bagua.federated.verbs.randomness import as_if_not_drawn, seed_of
from bagua.federated.verbs.reduction import first_client
from bagua.federated.verbs.traced import OPERATORS, Spec, Trace, below_the_trace

Tree = Any  # a pytree of tensors


def check_as_it_is(verb: str, chunk_size: int | None, randomness: str) -> None:
    """Raises InvalidArgument where client functions cannot run as they are."""
    if chunk_size is not None or randomness != "error":
        raise InvalidArgument(
            f"{verb}(vectorize=False) with chunk_size={chunk_size!r} and randomness={randomness!r}, expected neither: "
            "clients run one after the other, and each draws from a seed of its own"
        )
    if current_level() > 0 or forward_ad._current_level >= 0:
        raise InvalidArgument(
            f"{verb}(vectorize=False) inside of a transform of torch.func or forward-mode derivative, which does not "
            "see into what runs as it is: vectorize it, or take the derivative inside of the client function"
        )


def at(path: tuple) -> str:
    """Returns the words for a place in a pytree."""
    return f" at {pytree.keystr(path)}" if path else ""


def check_result(result: Tree, verb: str) -> None:
    """Raises InvalidArgument unless what a client function returns is tensors."""
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if not isinstance(leaf, torch.Tensor):
            raise InvalidArgument(
                f"the client function of {verb} returns {leaf!r}{at(path)}, a {type(leaf).__name__}, expected "
                "tensors: return torch.tensor of a number, and nothing that is not a tensor"
            )


@torch.compiler.disable  # which cannot follow any code
def each(function: Callable, arguments: tuple, clients: Placement, verb: str) -> Iterator[Tree]:
    """Yields what the function returns for each client.

    Args:
        arguments: of placed values, with one client at least.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    drawn = int(torch.randint(2**62, (), device="cpu"))  # the same on all ranks
    devices = {leaf.device for leaf in leaves}
    if torch.accelerator.is_available():  # where code may train what it gets on the CPU
        devices.add(torch.empty(0, device=torch.accelerator.current_accelerator()).device)
    first, expected = first_client(clients), None
    for index in range(len(leaves[0])):
        with seeded(seed_of(drawn, first + index), devices):
            result = _run(function, [leaf[index] for leaf in leaves], structure, clients, verb)
        got = pytree.tree_map(Spec.of, result)
        expected = expected or got
        if got != expected:
            raise InvalidArgument(
                f"the client function of {verb} returns for client {first + index} of {clients.size} {got}, but for "
                f"the first one here {expected}: results have the same shapes at all clients"
            )
        yield result


def _run(function: Callable, leaves: Sequence[torch.Tensor], structure: Any, clients: Placement, verb: str) -> Tree:
    """One client's result: a copy, made from copies, for code may write into both."""
    with torch.inference_mode(False), torch.enable_grad():
        own = pytree.tree_unflatten([leaf.detach().clone() for leaf in leaves], structure)
        result = run_in(Frame(clients, is_mapping=True), function, own, {})
        check_result(result, verb)
        return pytree.tree_map(lambda leaf: leaf.detach().clone(), result)


# ---- in traces


def trace_code(trace: Trace, function: Callable, arguments: tuple, clients: Placement) -> Tree:
    """map_fn while federated.trace runs: an operator that names the function, which runs once, on zeros."""
    if trace.closure_checks:
        raise InvalidArgument(
            "map_fn(vectorize=False) inside of the client function of a traced program: make it all code, by "
            "vectorize=False outside"
        )
    leaves, structure = pytree.tree_flatten(arguments)
    specs = [Spec(tuple(leaf.shape[1:]), leaf.dtype, leaf.device) for leaf in leaves]
    with below_the_trace():
        zeros = [spec.zeros() for spec in specs]
        with as_if_not_drawn(zeros):
            result = _run(function, zeros, structure, clients, "map_fn")
    flat, out_structure = pytree.tree_flatten(result)
    made = trace.add_code(function, specs, list(map(Spec.of, flat)), (structure, out_structure), clients.key)
    with torch.no_grad():
        mapped = OPERATORS["map"](leaves, made.key)
    return pytree.tree_unflatten(list(mapped), out_structure)


def run_code(function: Callable, values: Sequence[torch.Tensor], structure: Any) -> Sequence[torch.Tensor]:
    """Returns the leaves of what code returns for one client's leaves, where no program runs."""
    return pytree.tree_leaves(_run(function, values, structure, local_placement("clients", 1), "map_fn"))
