"""Server optimizers: functions from values, gradients and a state to new ones, on pytrees, and so differentiable.

torch.optim changes parameters in place by their ``.grad``, which does nothing under torch.func; these change nothing.
As gradient give the mean gradient of the clients, or the server's model minus the mean of the clients' models (FedOpt's
pseudo-gradient, Reddi et al., arXiv 2003.00295). Hyperparameters may be tensors, and have derivatives then; of whatever
dtype they are, values and states keep theirs.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument

Tree = Any  # a pytree of tensors
State = Any  # a pytree of tensors
Number = float | torch.Tensor


class Optimizer:
    """``init`` gives the state, ``apply`` a step."""

    def init(self, value: Tree) -> State:
        """The state before the first step, for values like these."""
        raise NotImplementedError

    def apply(self, value: Tree, gradient: Tree, state: State) -> tuple[Tree, State]:
        """The values and the state after a step that descends along the gradient.

        Raises:
            InvalidArgument: the gradient does not have the keys and shapes of the values (in any order) or has a leaf
                that is None, the state is of another optimizer or of other values, or values are not floating tensors.
        """
        raise NotImplementedError


def _zeros(value: Tree) -> Tree:
    return pytree.tree_map(torch.zeros_like, value)


def _map(function: Callable, value: Tree, gradient: Tree, *states: Tree) -> Tree:
    """The function of leaves that belong together, the gradient's in the values' dtypes."""
    like = _by_path("values", value)
    for leaf in like.values():
        if not leaf.is_floating_point() and not leaf.is_complex():
            raise InvalidArgument(f"an optimizer's step of {leaf.dtype}, expected floating values: optimize only those")
    gradients = _matched("gradient", "give a tensor of its shape for each value", like, gradient)
    gradients = [one.to(leaf.dtype) for one, leaf in zip(gradients, like.values(), strict=True)]
    of_states = [_matched("state", "use this optimizer's init", like, state) for state in states]
    results = map(function, like.values(), gradients, *of_states)
    return pytree.tree_unflatten(list(results), pytree.tree_structure(value))


def _by_path(what: str, tree: Tree) -> dict[tuple, torch.Tensor]:
    leaves = dict(pytree.tree_flatten_with_path(tree)[0])
    for path, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            where = f" at {pytree.keystr(path)}" if path else ""
            why = ", as of a parameter that the loss does not depend on: give zeros" if leaf is None else ""
            raise InvalidArgument(f"{what} with {leaf!r}{where}, a {type(leaf).__name__}, expected tensors{why}")
    return leaves


def _matched(what: str, remedy: str, like: dict[tuple, torch.Tensor], tree: Tree) -> list[torch.Tensor]:
    """The tree's leaves in the order of the values': by their keys, which dictionaries may have in any order."""
    leaves = _by_path(f"a {what}", tree)
    found, expected = ({pytree.keystr(path): tuple(leaf.shape) for path, leaf in one.items()} for one in (leaves, like))
    if leaves.keys() != like.keys() or found != expected:
        raise InvalidArgument(f"a {what} of shapes {found}, expected those of the values, {expected}: {remedy}")
    return [leaves[path] for path in like]


def _check(name: str, value: Number, low: float, high: float) -> None:
    if not isinstance(value, torch.Tensor) and not (isinstance(value, numbers.Real) and low <= value < high):
        raise InvalidArgument(f"{name}={value!r}, expected {low} to below {high}, a number or a tensor")


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """value - learning_rate * gradient, or with momentum m of the momentum's buffer b.

    b = momentum * b + gradient, as torch.optim.SGD; nesterov steps along gradient + momentum * b.

    Args:
        learning_rate: at least 0.
        momentum: 0 to below 1.

    State: the buffer, like the values; nothing without momentum.

    Example:
        >>> import torch
        >>> optimizer = SGD(0.1)
        >>> value = torch.tensor([1.0, 2.0])
        >>> optimizer.apply(value, torch.tensor([10.0, 0.0]), optimizer.init(value))
        (tensor([0., 2.]), ())
    """

    learning_rate: Number
    momentum: Number = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate, 0, float("inf"))
        _check("momentum", self.momentum, 0, 1)
        if self.nesterov and not self._has_momentum:
            raise InvalidArgument("nesterov=True without momentum")

    @property
    def _has_momentum(self) -> bool:
        return isinstance(self.momentum, torch.Tensor) or self.momentum != 0

    def init(self, value: Tree) -> State:
        return _zeros(value) if self._has_momentum else ()

    def apply(self, value: Tree, gradient: Tree, state: State) -> tuple[Tree, State]:
        direction = gradient
        if self._has_momentum:
            state = direction = _map(lambda _, g, b: (self.momentum * b + g).to(b.dtype), value, gradient, state)
            if self.nesterov:
                direction = _map(lambda _, g, b: g + self.momentum * b, value, gradient, state)
        return _map(lambda x, d: (x - self.learning_rate * d).to(x.dtype), value, direction), state


@dataclasses.dataclass(frozen=True)
class Adaptive(Optimizer):
    """value - learning_rate * m / (sqrt(v) + epsilon), where m and v begin at 0 and are corrected for that.

    The defaults are FedOpt's, whose steps are small in number and large in size: an epsilon of 1e-3, a second moment
    that forgets sooner. (The paper leaves the correction out and begins v at epsilon squared.)

    Args:
        learning_rate: at least 0.
        betas: of the first and the second moment, 0 to below 1.
        epsilon: above 0.

    State: {"step": how many were taken, int64 ``[]``, "first": m, "second": v}.
    """

    learning_rate: Number
    betas: tuple[Number, Number] = (0.9, 0.99)
    epsilon: Number = 1e-3

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate, 0, float("inf"))
        if not isinstance(self.betas, Sequence | torch.Tensor | numpy.ndarray) or len(self.betas) != 2:
            raise InvalidArgument(
                f"betas={self.betas!r}, expected two: of the first and the second moment, such as (0.9, 0.99)"
            )
        for index, beta in enumerate(self.betas):
            _check(f"betas[{index}]", beta, 0, 1)
        _check("epsilon", self.epsilon, 0, float("inf"))
        if not isinstance(self.epsilon, torch.Tensor) and self.epsilon == 0:
            raise InvalidArgument(f"epsilon={self.epsilon!r}, expected a finite number above 0")

    def init(self, value: Tree) -> State:
        return {"step": torch.zeros((), dtype=torch.int64), "first": _zeros(value), "second": _zeros(value)}

    def apply(self, value: Tree, gradient: Tree, state: State) -> tuple[Tree, State]:
        if not isinstance(state, dict) or set(state) != {"step", "first", "second"}:
            raise InvalidArgument(f"a state {state!r} for {type(self).__name__}: use this optimizer's init")
        for leaf in _by_path("values", value).values():
            if leaf.is_complex():
                raise InvalidArgument(f"{type(self).__name__} of {leaf.dtype}, expected real values: use view_as_real")
        beta_1, beta_2 = self.betas
        step = state["step"] + 1
        # Here and in move, tensors as hyperparameters would promote leaves without axes.
        first = _map(lambda _, g, m: (beta_1 * m + (1 - beta_1) * g).to(m.dtype), value, gradient, state["first"])
        second = _map(lambda _, g, v: self._second(v, g * g, beta_2).to(v.dtype), value, gradient, state["second"])

        def move(x: torch.Tensor, _: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            m, v = (one / (1 - beta ** step.double()).to(x.dtype) for one, beta in ((m, beta_1), (v, beta_2)))
            is_zero = v == 0  # where the root has no derivative
            root = torch.where(is_zero, v, torch.where(is_zero, torch.ones_like(v), v).sqrt())
            return (self._decayed(x) - self.learning_rate * m / (root + self.epsilon)).to(x.dtype)

        return _map(move, value, gradient, first, second), {"step": step, "first": first, "second": second}

    def _second(self, v: torch.Tensor, square: torch.Tensor, beta: Number) -> torch.Tensor:
        raise NotImplementedError

    def _decayed(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclasses.dataclass(frozen=True)
class Adam(Adaptive):
    """FedAdam: v = beta_2 * v + (1 - beta_2) * gradient^2. Arguments and state as of ``Adaptive``.

    With betas (0.9, 0.999) and epsilon 1e-8 it is torch.optim.Adam.
    """

    def _second(self, v: torch.Tensor, square: torch.Tensor, beta: Number) -> torch.Tensor:
        return beta * v + (1 - beta) * square


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose step first takes learning_rate * weight_decay of the values away from them, whatever the gradient is.

    With betas (0.9, 0.999) and epsilon 1e-8 it is torch.optim.AdamW. Source: Loshchilov and Hutter, arXiv 1711.05101.

    Args:
        weight_decay: at least 0.
    """

    weight_decay: Number = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("weight_decay", self.weight_decay, 0, float("inf"))

    def _decayed(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 - self.learning_rate * self.weight_decay)


@dataclasses.dataclass(frozen=True)
class Yogi(Adaptive):
    """FedYogi: v = v - (1 - beta_2) * gradient^2 * sign(v - gradient^2). Arguments and state as of ``Adaptive``.

    So v, where it is large, falls slowly. Source: Zaheer et al., Adaptive Methods for Nonconvex Optimization.
    """

    def _second(self, v: torch.Tensor, square: torch.Tensor, beta: Number) -> torch.Tensor:
        return v - (1 - beta) * square * torch.sign(v - square)
