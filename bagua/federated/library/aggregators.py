"""Aggregators: from what the clients have to what the server gets, as a chain of steps with state.

A chain reads in the order in which things happen:

    at the clients    Finite, NormBelow: who takes part; Clip, then the weights if any, then Quantize
    over all of them  Sum, SecureSum, or a robust one: Median, TrimmedMean
    at the server     Noise, then Mean

An aggregator is called inside of a ``federated.program``, on what all clients of a rank have at once, so it needs
memory for that. Its value does not depend on the number of ranks, but for the rounding of sums of floats. Steps keep
their state in pytrees that the caller carries from round to round, so that a program stays a function.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from bagua import codecs
from bagua.errors import InvalidArgument
from bagua.federated.library.sampling import seed_of
from bagua.federated.library.straight_through import coded, gathered, modular_sum, noise
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.verbs.names import flatten_named
from bagua.federated.verbs.operators import call
from bagua.federated.verbs.placement import Placement, current
from bagua.federated.verbs.reduction import HALVES, first_client, widened
from bagua.federated.verbs.traced import tracing
from bagua.federated.verbs.verbs import (
    beside,
    broadcast,
    check_floating,
    check_mask,
    check_placed,
    check_weights,
    divided,
    map_fn,
    reduce_sum,
    times_weight,
)

Tree = Any  # a pytree of tensors
State = Any  # a pytree of tensors

# The order of a chain.
FILTER, CLIP, QUANTIZE, REDUCE, NOISE, MEAN = range(6)


class Step:
    """One step of an aggregator. Write your own by deriving from it; ``stage`` says where it stands in the chain.

    Steps of FILTER have ``passes``, others up to QUANTIZE ``at_clients``, those of REDUCE ``reduce``, later ones
    ``at_server``.
    """

    stage: ClassVar[int]

    def init(self, like: Tree) -> State:
        """The state before the first round, for server values like these."""
        return ()

    def passes(self, value: Tree, clients: Placement) -> torch.Tensor:
        """Returns who takes part, bool ``[num_local]``; a filter's state is how many did not in the last round."""
        raise NotImplementedError

    def at_clients(self, value: Tree, state: State, clients: Placement) -> tuple[Tree, State]:
        """Turns placed values into placed values of the same shapes."""
        raise NotImplementedError

    def reduce(self, value: Tree, mask: torch.Tensor | None, clients: Placement) -> Tree:
        """Turns placed values ``[num_local, ...]`` into server values ``[...]``.

        Args:
            mask: ``[num_local]``, who takes part; the others' values are zeros. None: all.
        """
        raise NotImplementedError

    def at_server(self, value: Tree, state: State, total: torch.Tensor | int) -> tuple[Tree, State]:
        """Turns server values into server values.

        Args:
            total: the sum of the weights, or how many clients take part.
        """
        raise NotImplementedError


# ---- at the clients


class Filter(Step):
    """A step that leaves clients out, as if they were not in the mask. Derivatives take who takes part for a constant.

    State: how many clients it has left out in the last round, of those that the steps before it have not, int64 ``[]``.
    """

    stage: ClassVar[int] = FILTER

    def init(self, like: Tree) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Finite(Filter):
    """Leaves out clients whose value has NaN or an infinity anywhere, so that no such value reaches the server."""

    def passes(self, value: Tree, clients: Placement) -> torch.Tensor:
        def is_finite(value: Tree) -> torch.Tensor:
            return torch.stack([leaf.detach().isfinite().all() for leaf in pytree.tree_leaves(value)]).all()

        return map_fn(is_finite, (value,), placement=clients.name)


@dataclasses.dataclass(frozen=True)
class NormBelow(Filter):
    """Leaves out clients whose value has a larger L2 norm, over its whole pytree, than `norm`, or none that is finite.

    Args:
        norm: above 0 and finite.
    """

    norm: float

    def __post_init__(self) -> None:
        if not (isinstance(self.norm, numbers.Real) and 0 < self.norm < math.inf):
            raise InvalidArgument(f"NormBelow(norm={self.norm!r}), expected a finite number above 0")

    def passes(self, value: Tree, clients: Placement) -> torch.Tensor:
        def is_below(value: Tree) -> torch.Tensor:
            return _norm([leaf.detach() for leaf in pytree.tree_leaves(value)]) <= self.norm  # not if it is NaN

        return map_fn(is_below, (value,), placement=clients.name)


@dataclasses.dataclass(frozen=True)
class Clip(Step):
    """Scales each client's value down to an L2 norm, over its whole pytree, of at most `norm`.

    Args:
        norm: above 0 and finite; a number or a tensor ``[]``, which counts as 0 below that.

    Norms are exact to the rounding of the values' dtype. What is not finite stays to be seen, as NaN.
    """

    stage: ClassVar[int] = CLIP
    norm: float | torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.norm, torch.Tensor) and not (
            isinstance(self.norm, numbers.Real) and 0 < self.norm < math.inf
        ):
            raise InvalidArgument(f"Clip(norm={self.norm!r}), expected a finite number above 0, or a tensor")

    def at_clients(self, value: Tree, state: State, clients: Placement) -> tuple[Tree, State]:
        return (clip(value, self.norm, clients)[0] if pytree.tree_leaves(value) else value), state


def clip(
    value: Tree, norm: float | torch.Tensor, clients: Placement, *, is_bounded: bool = False
) -> tuple[Tree, torch.Tensor]:
    """The clipped values, and whose norms were not above the bound before, bool ``[num_local]``.

    Args:
        is_bounded: whether what is not finite is bounded too: all zeros for a client that has NaN or an infinity.
    """

    def clip_one(value: Tree, bound: float | torch.Tensor = norm) -> tuple[Tree, torch.Tensor]:
        leaves, structure = pytree.tree_flatten(value)
        is_finite = torch.ones((), dtype=torch.bool, device=leaves[0].device)
        if is_bounded:
            is_finite = sum((leaf.detach() * 0).sum().abs() for leaf in leaves) == 0  # or NaN
            zeros = [torch.zeros((), dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
            leaves = [torch.where(is_finite, leaf, zero) for leaf, zero in zip(leaves, zeros, strict=True)]
        length = _norm(leaves)
        bound = torch.ones_like(length) * bound
        bound = torch.where(bound < 0, torch.zeros_like(bound), bound)  # or values would change their signs
        is_within, one = length <= bound, torch.ones_like(length)
        factor = torch.where(is_within, one, bound / torch.where(is_within, one, length))
        power = torch.where(factor < 2.0**-126, 2.0**-126 * one, one)  # or float32 would have no such factor
        factor = factor / power
        clipped = []
        for leaf in leaves:
            wide = torch.promote_types(leaf.dtype, torch.float32)
            clipped.append((leaf.to(wide) * power.to(wide) * factor.to(wide)).to(leaf.dtype))
        return pytree.tree_unflatten(clipped, structure), is_within & is_finite

    bounds = (broadcast(beside(value, norm), placement=clients.name),) if isinstance(norm, torch.Tensor) else ()
    return map_fn(clip_one, (value, *bounds), placement=clients.name)


def _norm(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all together, float64 ``[]``; its derivative at 0 is 0."""
    # In float64: squares of float16 and float32 overflow where the values do not.
    values = [(leaf.abs() if leaf.is_complex() else leaf).double() for leaf in leaves]
    scale = torch.ones((), dtype=torch.float64, device=leaves[0].device)
    if any(leaf.dtype in (torch.float64, torch.complex128) and leaf.numel() for leaf in leaves):
        largest = torch.stack([one.detach().abs().amax() for one in values if one.numel()]).amax()
        scale = torch.where(largest.isfinite() & (largest > 0), largest, scale)
        values = [one / scale for one in values]
    square = sum(one.square().sum() for one in values)
    is_zero = square == 0
    root = torch.where(is_zero, square, torch.where(is_zero, torch.ones_like(square), square).sqrt())
    return root * scale


@dataclasses.dataclass(frozen=True)
class Quantize(Step):
    """Replaces each client's value by what the server would decode: one message per client, over its whole pytree.

    What is coded depends on the client alone, so results do not depend on the number of ranks. (The collective that
    adds up what is decoded carries full precision.) Derivatives go straight through: in reverse mode cotangents, in
    forward mode tangents are not coded. On a platform messages are made by the coding of ``federated.run_on``: trace
    the program without this step, and run it with ``Coded(codec)``.

    Args:
        codec: its name with options, such as "minmax_uint8" or "qsgd:bits=4"; see bagua.codecs.
        seed: what codecs that round at random draw from, with the round and the number of the client in its program.

    State: the number of the round, int64 ``[]``.

    Raises:
        InvalidArgument: no such codec, or values of a dtype that it does not encode.
    """

    stage: ClassVar[int] = QUANTIZE
    codec: str
    seed: int = 0

    def __post_init__(self) -> None:
        codecs.get(self.codec)

    def init(self, like: Tree) -> torch.Tensor:
        return first_round()

    def at_clients(
        self, value: Tree, state: torch.Tensor, clients: Placement, *, is_masked: bool = False
    ) -> tuple[Tree, torch.Tensor]:
        """Replaces the values; see ``Step``.

        Args:
            is_masked: whether a secure sum follows, to which codes of fixed point are sent, not messages.
        """
        codec = codecs.get(self.codec)
        _check_encodes(codec, pytree.tree_leaves(value), f"Quantize({self.codec!r})")
        seed, placed = seed_of(self.seed, "quantize"), [value]
        if codec.is_random:
            placed += [broadcast(state, placement=clients.name), _numbers_of(clients, f"Quantize({self.codec!r})")]

        def quantize(value: Tree, round: torch.Tensor | None = None, client: torch.Tensor | None = None) -> Tree:
            leaves, structure = pytree.tree_flatten(value)
            sent = coded(leaves, codec.spec, seed, round, client, -1 if is_masked else clients.num_local)
            return pytree.tree_unflatten(sent, structure)

        if not pytree.tree_leaves(value):
            return value, state + 1
        return map_fn(quantize, tuple(placed), placement=clients.name), state + 1

    def wire_bytes(self, like: Tree) -> int:
        """Bytes of one client's messages for a server value like this."""
        leaves, codec = pytree.tree_leaves(like), codecs.get(self.codec)
        numels = {leaf.dtype: 0 for leaf in leaves}
        for leaf in leaves:
            numels[leaf.dtype] += leaf.numel()
        return sum(codec.wire_bytes(numel, dtype) for dtype, numel in numels.items())


def quantize(
    value: Tree, residual: Tree, codec: str, *, seed: int | None = None, placement: str | None = None
) -> tuple[Tree, Tree]:
    """``Quantize`` with error feedback: a client adds to its value what its last message has lost.

    What is lost belongs to the client: keep it in a ``ClientStore``. Then rounds are those of clients that
    ``federated.run_on`` asks with ``Coded(codec)``, for which it is the whole pytree of one reduction. As there, a
    number of each client, ``[num_local]``, stays as it is.

    Args:
        value: placed values, ``[num_local, ...]`` each, floating.
        residual: of the same structure and shapes, float32, what the last message has lost; at first zeros.
        codec: its name with options, such as "topk:k=8"; see bagua.codecs.
        seed: what codecs that round at random draw from, with the number of the client in its program: another one
            for each round, such as ``Round.seed``. None for other codecs.
        placement: the name of the program whose clients are meant; by default the innermost that runs.

    Returns:
        What the server decodes, with derivatives straight through as of ``Quantize``, and the new residual, which is
        the old one at clients whose message has what is not finite.

    Raises:
        InvalidArgument: no such codec, or one whose residuals would grow, or one that rounds at random without a seed
            or in a traced program; values of a dtype that it does not encode, or residuals that are not of the values.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> @federated.program(clients=2)
        ... def mean(values, residual):
        ...     sent, residual = federated.aggregators.quantize(values, residual, "topk:k=8")
        ...     return federated.reduce_mean(sent), residual
        >>> values = torch.arange(20.0).expand(2, 20)
        >>> first, residual = mean(values, torch.zeros(2, 20))
        >>> second, residual = mean(values, residual)
        >>> first[:12].any(), second[10:12]
        (tensor(False), tensor([20., 22.]))
    """
    clients, verb = current(placement, "quantize"), f"quantize by {codec!r}"
    coding = codecs.get(codec)
    coding.check_error_feedback(True)
    value = check_floating(check_placed(value, clients, verb), verb)
    leaves, structure = pytree.tree_flatten(value)
    expected = pytree.tree_map(lambda leaf: (torch.float32, leaf.shape), value)
    given = pytree.tree_map(lambda leaf: (leaf.dtype, leaf.shape), check_placed(residual, clients, verb))
    if given != expected:
        raise InvalidArgument(f"{verb} with residuals {given}, expected {expected}: zeros before the first round")
    kept = pytree.tree_leaves(residual)
    chosen = [i for i, leaf in enumerate(leaves) if leaf.dim() > 1 and leaf.shape[1:].numel()]
    if not chosen:
        return value, residual
    placed = [[leaves[i] for i in chosen], [kept[i] for i in chosen]]
    _check_encodes(coding, placed[0], verb)
    if coding.is_random:
        if seed is None:
            raise InvalidArgument(f"{verb}, which rounds at random: give a seed, another one for each round")
        placed.append(_numbers_of(clients, verb))

    def client(values: list, kept: list, number: torch.Tensor | None = None) -> tuple[list, list]:
        wide = [widened(one) + old.detach() for one, old in zip(values, kept, strict=True)]
        rounded = [one.to(like.dtype) for one, like in zip(wide, values, strict=True)]
        round = None if number is None else torch.zeros_like(number)
        key = seed_of(seed or 0, "quantize")
        sent = coded(rounded, coding.spec, key, round, number, clients.num_local)
        lost = [(one - message).detach() for one, message in zip(wide, sent, strict=True)]
        is_finite = torch.stack([one.isfinite().all() for one in lost]).all()
        return sent, [torch.where(is_finite, new, old) for new, old in zip(lost, kept, strict=True)]

    sent, lost = map_fn(client, tuple(placed), placement=clients.name)
    for index, message, new in zip(chosen, sent, lost, strict=True):
        leaves[index], kept[index] = message, new
    return pytree.tree_unflatten(leaves, structure), pytree.tree_unflatten(kept, structure)


def _check_encodes(codec: codecs.Codec, leaves: list[torch.Tensor], title: str) -> None:
    for leaf in leaves:
        if leaf.dtype not in codec.dtypes:
            raise InvalidArgument(f"{title} of {leaf.dtype}, expected one of {', '.join(map(str, codec.dtypes))}")


def _numbers_of(clients: Placement, title: str) -> torch.Tensor:
    """Returns the numbers of this rank's clients, from which codecs that round at random draw."""
    if tracing():
        raise InvalidArgument(
            f"{title} in a traced program, whose clients do not know their numbers, from which it draws: use a codec "
            "that does not round at random"
        )
    begin = first_client(clients)
    return torch.arange(begin, begin + clients.num_local)


# ---- over all clients


@dataclasses.dataclass(frozen=True)
class Sum(Step):
    """The sum, as ``reduce_sum``; the reduction of a chain that names none."""

    stage: ClassVar[int] = REDUCE

    def reduce(self, value: Tree, mask: torch.Tensor | None, clients: Placement) -> Tree:
        return reduce_sum(value, placement=clients.name)


@dataclasses.dataclass(frozen=True)
class SecureSum(Step):
    """The sum as secure aggregation computes it: each client's values in fixed point, integers added up modulo 2^bits.

    A platform adds to each client's integers masks that cancel out in the sum; the result is the same. So in
    ``federated.trace`` it is ``reduce_sum``, which ``federated.run_on`` computes in that way. Sums of integers do not
    depend on the order, so results are equal to the bit on any number of ranks.

    Of n clients each value has to be below 2^(bits - 1 - fraction_bits) / n in magnitude; the result differs from the
    sum by at most n / 2^(fraction_bits + 1), and its rounding to its dtype. By default that is 262,144 and 2.4e-7 for
    2,048 clients. The total of weights differs by as much: let it be far above that. In reverse mode cotangents, in
    forward mode tangents are those of the plain sum.

    Args:
        bits: 2 to 62.
        fraction_bits: 0 to bits - 2.

    Raises:
        InvalidArgument: on all ranks, where a value is out of range or not finite.
    """

    stage: ClassVar[int] = REDUCE
    bits: int = 62
    fraction_bits: int = 32

    def __post_init__(self) -> None:
        FixedPoint(self.bits, self.fraction_bits)

    def reduce(self, value: Tree, mask: torch.Tensor | None, clients: Placement) -> Tree:
        if tracing():
            return reduce_sum(value, placement=clients.name)
        names, leaves, structure = flatten_named(check_floating(check_placed(value, clients, "SecureSum"), "SecureSum"))
        if not leaves:  # here and in other steps, as reduce_sum
            return value
        coding = FixedPoint(self.bits, self.fraction_bits)
        return pytree.tree_unflatten(modular_sum(leaves, coding, clients.key, names), structure)


class Robust(Step):
    """A reduction that a minority of clients cannot move far: of each coordinate by itself, over the clients.

    It is not compatible with secure aggregation: it needs every client's values, which all ranks gather, n times as
    much as a sum. Every client that takes part counts alike: there are no weights. NaN counts as the largest value.
    """

    stage: ClassVar[int] = REDUCE

    def reduce(self, value: Tree, mask: torch.Tensor | None, clients: Placement) -> Tree:
        name = type(self).__name__
        if tracing():
            raise InvalidArgument(f"{name} in a traced program, whose clients' values stay with them: use a sum")
        names, leaves, structure = flatten_named(check_floating(check_placed(value, clients, name), name))
        if not leaves:
            return value
        for leaf in leaves:
            if leaf.is_complex():
                raise InvalidArgument(f"{name} of {leaf.dtype}: complex numbers have no order")
        if mask is None:
            everyone = gathered(leaves, clients.key, names)
            number = torch.tensor(clients.size, device=leaves[0].device)
        else:
            *everyone, taking_part = gathered(
                [*leaves, mask.to(leaves[0].dtype)], clients.key, [*names, "who takes part"]
            )
            taking_part = taking_part > 0
            (number,) = call("check_total", [taking_part.sum()], clients.key)
            # The others are sorted behind all that take part.
            nothing = torch.tensor(float("nan"), device=taking_part.device)
            everyone = [torch.where(along(taking_part, leaf), leaf, nothing.to(leaf.dtype)) for leaf in everyone]
        ordered = [leaf.sort(0).values for leaf in everyone]
        return pytree.tree_unflatten([self._middle(leaf, number) for leaf in ordered], structure)

    def _middle(self, ordered: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Reduces ``[n, ...]``, of which the first `number` count."""
        begin, end = self._kept(number)
        positions = torch.arange(ordered.shape[0], device=ordered.device)
        is_kept = (positions >= begin) & (positions < end)
        kept = torch.where(along(is_kept, ordered), ordered, torch.zeros_like(ordered))
        # In float32 at least: neither a sum nor a number of clients needs to be one of float16 or bfloat16.
        wide = torch.promote_types(ordered.dtype, torch.float32)
        return (kept.sum(0, dtype=wide) / (end - begin).to(wide)).to(ordered.dtype)

    def _kept(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Median(Robust):
    """The median of each coordinate, of an even number of clients the mean of the two in the middle.

    Not compatible with secure aggregation. Source: Yin et al., arXiv 1803.01498.
    """

    def _kept(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (number - 1) // 2, number // 2 + 1


@dataclasses.dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of each coordinate without its largest and its smallest values.

    Not compatible with secure aggregation. Source: Yin et al., arXiv 1803.01498.

    Args:
        fraction: of the clients that are left out at each end, from 0 to below 0.5; their number is rounded down.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, numbers.Real) and 0 <= self.fraction < 0.5):
            raise InvalidArgument(f"TrimmedMean(fraction={self.fraction!r}), expected 0 to below 0.5")

    def _kept(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        trimmed = (number.to(torch.float64) * self.fraction).floor().to(torch.int64)
        return trimmed, number - trimmed


# ---- at the server


@dataclasses.dataclass(frozen=True)
class Noise(Step):
    """Adds Gaussian noise to the sum, once, the same on all ranks; it is a constant for derivatives.

    For differential privacy there is more to do: see ``federated.privacy``.

    Args:
        stddev: of each coordinate of the sum (not of the mean), at least 0.
        seed: with the round it decides the noise: who knows it can take the noise away again. The graph of a traced
            program holds it.

    State: the number of the round, int64 ``[]``.
    """

    stage: ClassVar[int] = NOISE
    stddev: float
    seed: int

    def __post_init__(self) -> None:
        if not (isinstance(self.stddev, numbers.Real) and 0 <= self.stddev < math.inf):
            raise InvalidArgument(f"Noise(stddev={self.stddev!r}), expected a finite number of at least 0")

    def init(self, like: Tree) -> torch.Tensor:
        return first_round()

    def at_server(self, value: Tree, state: torch.Tensor, total: torch.Tensor | int) -> tuple[Tree, torch.Tensor]:
        return add_noise(value, self.stddev, self.seed, state), state + 1


def add_noise(value: Tree, stddev: float | torch.Tensor, seed: int, round: torch.Tensor) -> Tree:
    """Server values with Gaussian noise that depends on seed, round and the index of the leaf alone."""
    leaves, structure = pytree.tree_flatten(value)
    for index, leaf in enumerate(leaves):
        if not leaf.is_floating_point():
            raise InvalidArgument(f"noise for {leaf.dtype}, expected real floating values")
        drawn = noise(round, seed_of(seed, "noise", index), leaf)
        leaves[index] = leaf + (stddev * drawn).to(leaf.dtype)
    return pytree.tree_unflatten(leaves, structure)


def first_round() -> torch.Tensor:
    """The number of the round as steps keep it, so that a program is a function of tensors alone: int64 ``[]``.

    On the CPU, where random numbers are drawn, wherever the values are.
    """
    return torch.zeros((), dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Mean(Step):
    """Divides the sum by the total weight of the clients that take part: by their number where there are no weights."""

    stage: ClassVar[int] = MEAN

    def at_server(self, value: Tree, state: State, total: torch.Tensor | int) -> tuple[Tree, State]:
        if isinstance(total, int):
            return pytree.tree_map(lambda leaf: leaf / total, value), state
        return pytree.tree_map(lambda leaf: divided(leaf, total), value), state


# ---- all of them


def gather(value: Tree, *, placement: str | None = None) -> Tree:
    """All clients' values as the server's: for figures of each client, or a reduction of your own.

    It is not compatible with secure aggregation, and sends n times as much as a sum, in a collective for integers and
    one for what has derivatives, which are exact.

    Args:
        value: placed values, ``[num_local, ...]`` each.
        placement: the name of the program whose clients are meant; by default the innermost that runs.

    Returns:
        ``[n, ...]`` of the same structure and dtypes, in the order of the clients, equal on all ranks.

    Raises:
        InvalidArgument: a value is not placed, or the program is traced: its clients' values stay with them.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> program = federated.program(lambda x: federated.gather(x), clients=3)
        >>> program(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
    """
    clients = current(placement, "gather")
    if tracing():
        raise InvalidArgument("gather in a traced program, whose clients' values stay with them: use a sum")
    names, leaves, structure = flatten_named(check_placed(value, clients, "gather"))
    for has_derivatives in (True, False):
        chosen = [
            i for i, leaf in enumerate(leaves) if (leaf.is_floating_point() or leaf.is_complex()) == has_derivatives
        ]
        found = gathered([leaves[i] for i in chosen], clients.key, [names[i] for i in chosen]) if chosen else []
        for index, everyone in zip(chosen, found, strict=True):
            leaves[index] = everyone
    return pytree.tree_unflatten(leaves, structure)


# ---- the chain


class Aggregator:
    """A chain of steps: filters, clip, quantize, one reduction over the clients, noise, mean; those that are named.

    Args:
        steps: in their order. Without a reduction among them it is ``Sum()``.

    Raises:
        InvalidArgument: steps in another order, two reductions or means, or steps after a robust reduction.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> from bagua.federated.aggregators import Aggregator, Clip, Mean, SecureSum
        >>> aggregate = Aggregator(Clip(5.0), SecureSum(), Mean())
        >>> @federated.program(clients=2)
        ... def mean_of_clipped(updates, state):
        ...     return aggregate(updates, state)
        >>> state = aggregate.init(torch.zeros(2))
        >>> mean, state = mean_of_clipped(torch.tensor([[1.0, 2.0], [6.0, 8.0]]), state)
        >>> mean
        tensor([2., 3.])
    """

    def __init__(self, *steps: Step) -> None:
        for step in steps:
            if not isinstance(step, Step):
                raise InvalidArgument(
                    f"an aggregator with the step {step!r}, expected instances of Step: such as Clip(1.0) or Mean()"
                )
        chain = list(steps)
        reductions = [step for step in chain if step.stage == REDUCE]
        names = [type(step).__name__ for step in chain]
        if len(reductions) > 1:
            robust = [type(step).__name__ for step in reductions if isinstance(step, Robust)]
            why = f": {robust[0]} needs every client's values, which secure sums hide" if robust else ""
            raise InvalidArgument(f"{' and '.join(type(r).__name__ for r in reductions)} in one aggregator{why}")
        if not reductions:
            end = next((i for i, step in enumerate(chain) if step.stage > REDUCE), len(chain))
            reductions = [Sum()]
            chain[end:end] = reductions
        stages = [step.stage for step in chain]
        if stages != sorted(stages):
            raise InvalidArgument(
                f"steps in the order {', '.join(names)}, expected: filters, clip, quantize, a sum or a robust "
                "reduction, noise, mean"
            )
        if isinstance(reductions[0], Robust) and chain[-1] is not reductions[0]:
            raise InvalidArgument(
                f"{names[-1]} after {type(reductions[0]).__name__}, which is no sum but a mean itself"
            )
        if stages.count(MEAN) > 1:
            raise InvalidArgument(f"steps {', '.join(names)}, which divide by the total weight twice: drop one")
        self.steps = tuple(chain)
        self._reduction_index = chain.index(reductions[0])
        self._reduction = reductions[0]

    @property
    def is_secure(self) -> bool:
        """True if the server sees nothing but sums over the clients, so that masks may hide each one's values."""
        return not isinstance(self._reduction, Robust)

    def init(self, like: Tree) -> tuple[State, ...]:
        """The state before the first round.

        Args:
            like: a server value: what one client has, or the model.
        """
        return tuple(step.init(like) for step in self.steps)

    def __call__(
        self,
        value: Tree,
        state: tuple[State, ...],
        *,
        weights: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        placement: str | None = None,
    ) -> tuple[Tree, tuple[State, ...]]:
        """Returns what the server gets, and the state after the round.

        Args:
            value: placed values, ``[num_local, ...]`` each, floating.
            state: of ``init`` or of the round before.
            weights: ``[num_local]``; they multiply what is clipped, before it is quantized. None: all 1.
            mask: ``[num_local]`` of bools: who takes part. What the others have does not count, whatever it is. Weights
                and mask may be tensors of the CPU where the values are on a device.
            placement: the name of the program whose clients are meant; by default the innermost that runs.

        Returns:
            ``[...]`` of the same structure and dtypes, equal on all ranks.

        Raises:
            InvalidArgument: as the verbs; weights of a robust reduction; on all ranks: total weight 0, or a value out
                of the range of a secure sum.
        """
        clients = current(placement, "an aggregator")
        value = check_floating(check_placed(value, clients, "an aggregator"), "an aggregator")
        if len(state) != len(self.steps):
            raise InvalidArgument(f"a state of {len(state)} steps for an aggregator of {len(self.steps)}: use its init")
        weights = None if weights is None else check_weights(weights, pytree.tree_leaves(value), "an aggregator")
        if weights is not None and tuple(weights.shape) != (clients.num_local,):
            raise InvalidArgument(f"weights of shape {list(weights.shape)}, expected [{clients.num_local}]")
        if mask is not None:
            mask = check_mask(mask, pytree.tree_leaves(value), clients, "an aggregator")
            value = only_of(mask, value)
        states = list(state)
        left_out = []
        for step in self.steps:
            if step.stage == FILTER and pytree.tree_leaves(value):
                passes = step.passes(value, clients)
                took_part = torch.ones_like(passes) if mask is None else mask
                mask = took_part & passes
                value = only_of(mask, value)
                left_out.append((took_part & ~passes).to(torch.int64))
        numbers_left_out = reduce_sum(left_out, placement=clients.name) if left_out else []
        states[: len(left_out)] = [number.cpu() for number in numbers_left_out]
        weights = None if weights is None else beside(value, weights)
        counts = self._counts(weights, mask)
        dtypes = [leaf.dtype for leaf in pytree.tree_leaves(value)]
        after = range(self._reduction_index + 1, len(self.steps))
        is_weighted = weights is None
        for index, step in enumerate(self.steps[: self._reduction_index + 1]):
            if step.stage == FILTER:
                continue
            if index == self._reduction_index and after:
                value = pytree.tree_map(widened, value)
            if step.stage > CLIP and not is_weighted:
                value = pytree.tree_map(lambda leaf: times_weight(leaf, along(counts, leaf)), value)
                is_weighted = True
            if index < self._reduction_index:
                options = {"is_masked": isinstance(self._reduction, SecureSum)} if isinstance(step, Quantize) else {}
                value, states[index] = step.at_clients(value, states[index], clients, **options)
        total: torch.Tensor | int = clients.size
        if counts is None or not after:
            value = self._reduction.reduce(value, mask, clients)
        else:  # in the same collective
            value, total = self._reduction.reduce((value, counts), mask, clients)
            (total,) = call("check_total", [total], clients.key)
        for index in after:
            value, states[index] = self.steps[index].at_server(value, states[index], total)
        if not set(HALVES).isdisjoint(dtypes):
            leaves, structure = pytree.tree_flatten(value)
            value = pytree.tree_unflatten([x.to(d) for x, d in zip(leaves, dtypes, strict=True)], structure)
        return value, tuple(states)

    def _counts(self, weights: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the weight of each client, floating; None: 1 each."""
        if weights is None:
            return None if mask is None else mask.to(torch.get_default_dtype())
        if not self.is_secure:
            raise InvalidArgument(
                f"weights for {type(self._reduction).__name__}, where all clients count alike: use mask"
            )
        return weights if mask is None else only_of(mask, weights)


def along(vector: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """[clients] -> [clients, 1, ...] with as many axes as leaf."""
    return vector.reshape(-1, *[1] * (leaf.dim() - 1))


def only_of(mask: torch.Tensor, value: Tree) -> Tree:
    """Returns the values with zeros for the clients that do not take part."""
    return pytree.tree_map(
        lambda leaf: torch.where(along(beside(leaf, mask), leaf), leaf, torch.zeros_like(leaf)), value
    )
