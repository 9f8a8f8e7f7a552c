"""QAdam: Adam whose second moment stands still after a warm-up, so that what the ranks must agree on is the first.

Beside the data path: an ordinary torch optimizer, which algorithm ``qadam`` needs. Source: arXiv 2102.02888.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from bagua.errors import InvalidArgument

_DEFAULTS = {"warmup_steps": 100, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class QAdam(torch.optim.Optimizer):
    """Adam for ``warmup_steps`` steps of a parameter, then Adam with its v and v's bias correction as they are by then.

    In the warm-up it is torch.optim.Adam, bit for bit. After it::

        m <- b1 m + (1 - b1) (g + weight_decay x);  x <- x - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^warmup_steps)) + eps)

    Without algorithm ``qadam`` g is the gradient as it comes. A parameter's steps count, so one that is used for the
    first time late has its own warm-up. An element whose v is 0 when the warm-up ends, as behind an input that is
    always 0, keeps its value from there on: there is no scale to divide by, and a codec's rounding of its 0 momentum,
    divided by eps, would be all that moves it.

    Args:
        params: as for any optimizer.
        lr: learning rate, 1e-3 by default.
        warmup_steps: at least 1; 100 by default. A tenth to a fifth of the training is usual: v must have settled.
        betas, eps, weight_decay: those of Adam, with the same defaults. The decay is added to the gradient (L2).

    Raises:
        InvalidArgument: an option out of range.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = QAdam([weight], lr=0.1, warmup_steps=10)
        >>> weight.sum().backward(); optimizer.step()
        >>> weight.detach().tolist() == torch.full((3,), 0.9).tolist()
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
    ) -> None:
        options = {"warmup_steps": warmup_steps, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.given = {name: value for name, value in options.items() if value is not None}
        if not lr >= 0:
            raise InvalidArgument(f"lr is {lr!r}, expected 0 or more")
        check_options(self.given)
        super().__init__(params, {"lr": lr, **_DEFAULTS, **self.given})

    def set_options(self, options: dict[str, Any]) -> None:
        """Options that the constructor was not given; for all parameter groups."""
        check_options(options)
        for group in self.param_groups:
            group.update(options)

    def num_steps(self) -> int:
        """Steps of the parameter that has made the most."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

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
            is_warm = [int(self.state[parameter]["step"]) >= group["warmup_steps"] for parameter in parameters]
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
    """Raises InvalidArgument for an option of QAdam that is out of range."""
    steps = options.get("warmup_steps", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(
            f"warmup_steps is {steps!r}, expected an integer of at least 1: v is learnt in the warm-up"
        )
    betas = options.get("betas", (0, 0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InvalidArgument(f"betas is {betas!r}, expected two numbers from 0 to below 1")
    for name in ("eps", "weight_decay"):
        if not options.get(name, 0) >= 0:
            raise InvalidArgument(f"{name} is {options[name]!r}, expected 0 or more")
