"""QAdam: Adam whose second moment stands still after a warm-up, so that what the ranks must agree on is the first.

Beside the data path: an ordinary torch optimizer, which algorithm ``qadam`` needs. Source: arXiv 2102.02888.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from bagua.errors import InvalidArgument

_DEFAULTS = {"warmup_steps": 100, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "variance_floor": 1e-6}


class QAdam(torch.optim.Optimizer):
    """Adam for ``warmup_steps`` steps of a parameter, then Adam with its v and v's bias correction as they are by then.

    In the warm-up it is torch.optim.Adam, bit for bit. After it::

        m <- b1 m + (1 - b1) (g + weight_decay x);  x <- x - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^warmup_steps)) + eps)

    Without algorithm ``qadam`` g is the gradient as it comes. A parameter's steps count, so one that is used for the
    first time late has its own warm-up. When it ends, v <- max(v, ``variance_floor`` times the mean of v over the
    parameter) where v is not 0: where hardly any gradient came in the warm-up, as behind a ReLU that hardly ever fires,
    v would stop near 0, and what a codec rounds of m, divided by sqrt(v) + eps, would be a step of thousands of
    learning rates.

    An element whose v is 0 when the warm-up ends, as behind an input that is always 0 or in a row of an embedding that
    no batch has used, keeps its value for ever, whatever gradients it gets later: there is no scale to divide by, and
    its first gradient, divided by the floor, would be a step of hundreds of learning rates. The warm-up must use what
    is to be trained; algorithm ``qadam`` warns of what it has not used.

    Args:
        params: as for any optimizer; a parameter group may bring options of its own.
        lr: learning rate, a number, 1e-3 by default.
        warmup_steps: at least 1; 100 by default. A tenth to a fifth of the training is usual: v must be steady.
        betas, eps, weight_decay: those of Adam, with the same defaults. The decay is added to the gradient (L2).
        variance_floor: 0 or more, a share of the mean of v; 1e-6 by default, the smallest power of ten with which the
            tasks of docs/convergence.md train under both codecs of the paper; 0 is the paper's algorithm.

    Raises:
        InvalidArgument: an option out of range.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = QAdam([weight], lr=0.1, warmup_steps=10)
        >>> weight.sum().backward(); optimizer.step()
        >>> torch.allclose(weight, torch.full((3,), 0.9))
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        variance_floor: float | None = None,
    ) -> None:
        options = {
            "warmup_steps": warmup_steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "variance_floor": variance_floor,
        }
        given = {name: value for name, value in options.items() if value is not None}
        check_options({"lr": lr, **given})
        # "given", here and in each group, says which options the user chose; copies, pickles and checkpoints keep it.
        super().__init__(params, {"lr": lr, **_DEFAULTS, **given, "given": given})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer.

        Raises:
            InvalidArgument: an option of the group is out of range.
        """
        if isinstance(param_group, dict):  # torch refuses others
            check_options({name: param_group[name] for name in ("lr", *_DEFAULTS) if name in param_group})
            own = {name: param_group[name] for name in _DEFAULTS if name in param_group}
            param_group["given"] = {**self.defaults["given"], **own}
        super().add_param_group(param_group)

    def check_given(self, options: dict[str, Any], whose: str, name: str) -> None:
        """Raises InvalidArgument if the constructor or a parameter group was given one of ``options`` otherwise.

        Args:
            whose, name: of whom the options are, and what this optimizer is called there; for the message.
        """
        for index, group in enumerate(self.param_groups):
            for option, value in options.items():
                given = group["given"].get(option, value)
                if not _is_same(given, value):
                    raise InvalidArgument(
                        f"{option} is {value!r} for {whose} and {given!r} for {name}.param_groups[{index}]; give it to "
                        "one of them, to the optimizer where the groups differ"
                    )

    def set_options(self, options: dict[str, Any]) -> None:
        """Options of all parameter groups, later ones too, for which neither they nor the constructor were given one.

        Raises:
            InvalidArgument: an option out of range.
        """
        check_options(options)
        for group in (self.defaults, *self.param_groups):
            group.update({name: value for name, value in options.items() if name not in group["given"]})

    def num_steps(self) -> int:
        """Steps of the parameter that has made the most."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def is_warm(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether ``parameter``, which is of ``group``, has the warm-up behind it."""
        return int(self.state.get(parameter, {}).get("step", 0)) >= group["warmup_steps"]

    def still_weights(self) -> list[tuple[torch.Tensor, int]]:
        """Parameters that have elements whose v was 0 when their warm-up ended, which never move, and how many."""
        found = []
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if self.is_warm(parameter, group)):
                count = parameter.numel() - int(self.state[parameter]["exp_avg_sq"].count_nonzero())
                if count:
                    found.append((parameter, count))
        return found

    @torch.no_grad()
    def steps_beyond(self, limit: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where the last step, if it was after a parameter's warm-up, went further than ``limit`` learning rates.

        Returns:
            A parameter of which elements did, and for each of these |m| / (1 - b1^t), a vector.
        """
        found = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if int(state.get("step", 0)) <= group["warmup_steps"]:
                    continue
                moments = state["exp_avg"].abs() / (1 - beta1 ** float(state["step"]))
                scales = (state["exp_avg_sq"] / (1 - beta2 ** group["warmup_steps"])).sqrt_().add_(group["eps"])
                is_far = moments > limit * scales
                if bool(is_far.any()):
                    found.append((parameter, moments[is_far]))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have gradients.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            InvalidArgument: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self._start(parameter)
            is_warm = [self.is_warm(parameter, group) for parameter in parameters]
            self._step_adam([p for p, warm in zip(parameters, is_warm, strict=True) if not warm], group)
            self._step_frozen([p for p, warm in zip(parameters, is_warm, strict=True) if warm], group)
        return loss

    def _start(self, parameter: torch.Tensor) -> None:
        if parameter.grad.is_sparse:
            raise InvalidArgument("QAdam does not take sparse gradients; construct the module with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _of_all(self, parameters: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        return [self.state[parameter][name] for parameter in parameters]

    def _step_adam(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        adam(
            parameters,
            [parameter.grad for parameter in parameters],
            self._of_all(parameters, "exp_avg"),
            self._of_all(parameters, "exp_avg_sq"),
            [],
            self._of_all(parameters, "step"),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for parameter in parameters:
            if self.is_warm(parameter, group):
                self._raise_variances(parameter, group["variance_floor"])

    def _raise_variances(self, parameter: torch.Tensor, variance_floor: float) -> None:
        """v <- max(v, ``variance_floor`` times its mean) where v is not 0.

        The mean is taken in float64, where ranks that sum in another order agree.
        """
        exp_avg_sq = self.state[parameter]["exp_avg_sq"]
        was_met = exp_avg_sq.sign()
        exp_avg_sq.clamp_(min=variance_floor * float(exp_avg_sq.mean(dtype=torch.float64))).mul_(was_met)

    def _step_frozen(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        grads = [parameter.grad for parameter in parameters]
        if group["weight_decay"] != 0:
            grads = torch._foreach_add(grads, parameters, alpha=group["weight_decay"])
        exp_avgs, steps = self._of_all(parameters, "exp_avg"), self._of_all(parameters, "step")
        torch._foreach_add_(steps, 1)
        exp_avg_sqs = self._of_all(parameters, "exp_avg_sq")
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avgs, torch._foreach_sign(exp_avg_sqs))  # 1, and 0 where v is 0
        correction = (1 - beta2 ** group["warmup_steps"]) ** 0.5
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominators, correction)
        torch._foreach_add_(denominators, group["eps"])
        step_sizes = [-group["lr"] / (1 - beta1 ** float(step)) for step in steps]
        torch._foreach_addcdiv_(parameters, exp_avgs, denominators, step_sizes)


def check_options(options: dict[str, Any]) -> None:
    """Raises InvalidArgument for an option of QAdam that is no number or out of range."""
    steps = options.get("warmup_steps", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(
            f"warmup_steps is {steps!r}, expected an integer of at least 1: v is learnt in the warm-up"
        )
    betas = options.get("betas", (0, 0))
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not is_pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise InvalidArgument(f"betas is {betas!r}, expected two numbers from 0 to below 1")
    for name in ("lr", "eps", "weight_decay", "variance_floor"):
        value = options.get(name, 0)
        if not _is_number(value) or not value >= 0:  # NaN is not
            raise InvalidArgument(f"{name} is {value!r}, expected a number, 0 or more")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_same(value: Any, other: Any) -> bool:
    """Also where one is a tuple and the other a list."""
    return (list(value) == list(other)) if isinstance(value, (tuple, list)) else value == other
