"""QAdam: Adam whose second moment is frozen after a warm-up, so that the ranks need agree on the first one only.

Beside the data path: an ordinary torch optimizer, which algorithm ``qadam`` needs. Source: arXiv 2102.02888.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.adam import adam

from bagua import _C
from bagua.distributed.arguments import dtype_code
from bagua.distributed.devices import current_stream, supported_types
from bagua.errors import InvalidArgument

_FUSED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
AUTO = "auto"
_LEAST_SETTLED = 0.96  # of the ratio of v's norms, and the most by its inverse (1-bit Adam, section 7)
DEFAULTS = {
    "warmup_steps": 100,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "variance_floor": 1e-6,
    "refresh_doubling": 0,
}


# A group before "auto" has found the step that ends its warm-up; with the norm of its v at the last look, and its step.
_UNSETTLED = {"settled_at": None, "last_norm": None, "last_look": 0}


def warmup_of(group: Mapping[str, Any]) -> float:
    """Returns the steps of a parameter group's warm-up; inf while "auto" has not found them yet."""
    if group["warmup_steps"] != AUTO:
        return group["warmup_steps"]
    return math.inf if group["settled_at"] is None else group["settled_at"]


def refreshes_v(step: int, group: Mapping[str, Any]) -> bool:
    """Returns whether step ``step`` of a parameter, which counts from 1, is one that v learns from."""
    if not group["refresh_doubling"]:
        return step <= warmup_of(group)
    return step <= warmup_of(group) and (step == 1 or num_refreshes(step, group) > num_refreshes(step - 1, group))


def num_refreshes(step: int, group: Mapping[str, Any]) -> int:
    """Returns the number of the first ``step`` steps that v learns from.

    Example:
        >>> [num_refreshes(step, {"warmup_steps": 9, "refresh_doubling": 2}) for step in range(1, 11)]
        [1, 2, 3, 3, 4, 4, 5, 5, 5, 5]
    """
    step, per_doubling = min(step, warmup_of(group)), group["refresh_doubling"]
    if not per_doubling or not step:
        return step
    num_doublings = ((step - 1) // per_doubling + 1).bit_length() - 1
    begin = per_doubling * (2**num_doublings - 1) + 1  # the first step at this distance
    return num_doublings * per_doubling + (step - begin) // 2**num_doublings + 1


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
    is to be trained.

    Args:
        params: as for any optimizer; a parameter group may bring options of its own.
        lr: learning rate, a number, 1e-3 by default.
        warmup_steps: at least 1; 100 by default. A tenth to a fifth of the training is usual: v must be steady. "auto"
            ends the warm-up of a parameter group when it is: the sum of v / (1 - b2^t), which is looked at every 1 / (1
            - b2) steps, has changed by at most 4% since the last time. With b2 = 0.999 that is after 2000 steps at the
            earliest. What it has found is ``param_groups[...]["settled_at"]``.
        betas, eps, weight_decay: those of Adam, with the same defaults. The decay is added to the gradient (L2).
        variance_floor: 0 or more, a share of the mean of v; 1e-6 by default, the smallest power of ten with which the
            tasks of docs/convergence.md train under both codecs of the paper; 0 is the paper's algorithm.
        refresh_doubling: v is refreshed at steps of the warm-up whose distance is 1 and doubles after every so many
            (0/1 Adam, arXiv 2202.06009); in between it is as after the warm-up, with the floor, and its bias
            correction counts refreshes. 0: at all of them.
        fused: whether one kernel of bagua's makes the whole step of many parameters. None: for those on a device;
            for those on the CPU torch's operators, whose bits are torch.optim.Adam's. True: for all. The numbers are
            the same but for what operators round in between: float16 and bfloat16 round once. A state_dict fits either.

    A fused step does not wait for the device. A GradScaler unscales the gradients, and skips steps, itself.

    Raises:
        InvalidArgument: an option out of range; ``fused=True`` and a parameter that no kernel is for.

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
        warmup_steps: int | str | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        variance_floor: float | None = None,
        *,
        refresh_doubling: int | None = None,
        fused: bool | None = None,
    ) -> None:
        if fused is not None and not isinstance(fused, bool):
            raise InvalidArgument(f"fused is {fused!r}, expected True, False or None")
        values = (warmup_steps, betas, eps, weight_decay, variance_floor, refresh_doubling)
        given = {name: value for name, value in zip(DEFAULTS, values, strict=True) if value is not None}
        check_options({"lr": lr, **given})
        # "given", here and in each group, says which options the user chose; copies, pickles and checkpoints keep it.
        super().__init__(params, {"lr": lr, **DEFAULTS, **_UNSETTLED, **given, "given": given, "fused": fused})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as for any optimizer.

        Raises:
            InvalidArgument: an option of the group is out of range, a parameter is of complex numbers, or it is to be
                fused and cannot be.
        """
        if isinstance(param_group, dict):  # torch refuses others
            check_options({name: param_group[name] for name in ("lr", *DEFAULTS) if name in param_group})
            own = {name: param_group[name] for name in DEFAULTS if name in param_group}
            param_group["given"] = {**self.defaults["given"], **own}
            check_options(param_group["given"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        kind = next((parameter.dtype for parameter in group["params"] if parameter.is_complex()), None)
        if kind is not None:
            self.param_groups.pop()
            raise InvalidArgument(f"QAdam does not step parameters of {kind}; make them pairs by torch.view_as_real")
        reason = next(filter(None, map(_why_not_fused, group["params"])), None) if group["fused"] else None
        if reason is not None:
            self.param_groups.pop()
            raise InvalidArgument(f"fused=True, but a parameter is {reason}; leave fused out for such parameters")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; ``fused`` stays as it is, since a state fits either.

        A state of torch.optim.Adam within the warm-up is taken over, too: what it does not say (``warmup_steps``,
        ``variance_floor``) stays.

        Raises:
            InvalidArgument: the state is of an optimizer that steps in another way.
        """
        _check_is_adam(state_dict, self.param_groups)
        names = (*DEFAULTS, *_UNSETTLED, "given", "fused")
        options = [{name: group[name] for name in names} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, kept in zip(self.param_groups, options, strict=True):
            group.update({**kept, **group, "fused": kept["fused"]})
        for state in self.state.values():
            if "step" in state:  # torch moves it to where fused parameters are
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")

    def check_given(self, options: dict[str, Any], whose: str, name: str) -> None:
        """Raises InvalidArgument if the constructor or a parameter group was given one of ``options`` otherwise.

        Args:
            whose, name: the owner of the options, and the name of this optimizer there; for the message.
        """
        for index, group in enumerate(self.param_groups):
            for option, value in options.items():
                given = group["given"].get(option, value)
                if not _is_same(given, value):
                    raise InvalidArgument(
                        f"{option} is {value!r} for {whose} and {given!r} for {name}.param_groups[{index}]; give it to "
                        "one of them, to the optimizer where the groups differ"
                    )
            check_options({**options, **group["given"]})

    def set_options(self, options: dict[str, Any]) -> None:
        """Sets options of all parameter groups, later ones too, that neither they nor the constructor were given.

        Raises:
            InvalidArgument: an option out of range.
        """
        check_options(options)
        for group in (self.defaults, *self.param_groups):
            group.update({name: value for name, value in options.items() if name not in group["given"]})

    def num_steps(self) -> int:
        """Returns the steps of the parameter that has made the most."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def is_warm(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        """Returns True if the warm-up of ``parameter``, which is of ``group``, is over."""
        return int(self.state.get(parameter, {}).get("step", 0)) >= warmup_of(group)

    def denominator(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Returns what the last step of ``parameter``, which is of ``group``, divided m by; of its shape."""
        state, beta2 = self.state[parameter], group["betas"][1]
        correction = (1 - beta2 ** num_refreshes(int(state["step"]), group)) ** 0.5
        return state["exp_avg_sq"].sqrt().div_(correction).add_(group["eps"])

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
            fused: list[torch.Tensor] = []
            others: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._start(parameter)
                    (fused if _is_fused(parameter, group) else others).append(parameter)
            self._step_fused(fused, group)
            refreshed = [p for p in others if refreshes_v(int(self.state[p]["step"]) + 1, group)]
            fresh = set(map(id, refreshed))
            self._step_frozen([p for p in others if id(p) not in fresh], group)
            if group["refresh_doubling"]:
                self._step_frozen(refreshed, group, refreshes=True)
            else:
                self._step_adam(refreshed, group)
            self._raise_variances(self._about_to_freeze(refreshed, group), group["variance_floor"])
            if group["warmup_steps"] == AUTO and group["settled_at"] is None:
                self._look_whether_settled(group)
        return loss

    def _look_whether_settled(self, group: dict[str, Any]) -> None:
        """Ends the warm-up of ``group`` once its v is steady, which the host looks at every 1 / (1 - b2) steps."""
        stepped = [parameter for parameter in group["params"] if self.state.get(parameter)]
        step = max((int(self.state[parameter]["step"]) for parameter in stepped), default=0)
        beta2 = group["betas"][1]
        if step == group["last_look"] or step % round(1 / (1 - beta2)):
            return
        # In float64, where ranks that sum in another order agree.
        total = sum(float(exp_avg_sq.sum(dtype=torch.float64)) for exp_avg_sq in self._of_all(stepped, "exp_avg_sq"))
        norm, before = total / (1 - beta2**step), group["last_norm"]
        group["last_norm"], group["last_look"] = norm, step
        if before and _LEAST_SETTLED * before <= norm <= before / _LEAST_SETTLED:
            group["settled_at"] = step
            ended = [parameter for parameter in stepped if self.is_warm(parameter, group)]
            self._raise_variances(ended, group["variance_floor"])

    def _start(self, parameter: torch.Tensor) -> None:
        if parameter.grad.is_sparse:
            raise InvalidArgument("QAdam does not take sparse gradients; construct the module with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
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

    def _about_to_freeze(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        return [p for p in parameters if not refreshes_v(int(self.state[p]["step"]) + 1, group)]

    def _raise_variances(self, parameters: list[torch.Tensor], variance_floor: float) -> None:
        """v <- max(v, ``variance_floor`` times its mean) where v is not 0.

        The mean is taken in float64, where ranks that sum in another order agree. The host does not wait for it.
        """
        for exp_avg_sq in self._of_all(parameters, "exp_avg_sq"):
            least = variance_floor * exp_avg_sq.mean(dtype=torch.float64)
            was_met = exp_avg_sq.sign()
            exp_avg_sq.clamp_(min=least.to(exp_avg_sq.dtype)).mul_(was_met)

    def _step_fused(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        torch._foreach_add_(self._of_all(parameters, "step"), 1)
        beta1, beta2 = group["betas"]
        factors_of, is_fresh = {}, {}
        launches: dict[tuple[torch.device, torch.dtype, bool], _Launch] = {}
        refreshed = []
        for parameter in parameters:
            state = self.state[parameter]
            step = int(state["step"])
            if step not in factors_of:
                correction = (1 - beta2 ** num_refreshes(step, group)) ** 0.5
                factors_of[step] = (-group["lr"] / (1 - beta1**step), correction)
                is_fresh[step] = refreshes_v(step, group)
            if is_fresh[step]:
                refreshed.append(parameter)
            key = (parameter.device, parameter.dtype, not is_fresh[step])
            if key not in launches:
                launches[key] = _Launch(*key)
            launches[key].add(parameter, state, factors_of[step])
        options = (beta1, beta2, group["eps"], group["weight_decay"])
        for launch in launches.values():
            launch.run(options)
        self._raise_variances(self._about_to_freeze(refreshed, group), group["variance_floor"])

    def _step_frozen(self, parameters: list[torch.Tensor], group: dict[str, Any], refreshes: bool = False) -> None:
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        grads = [parameter.grad for parameter in parameters]
        if group["weight_decay"] != 0:
            grads = torch._foreach_add(grads, parameters, alpha=group["weight_decay"])
        exp_avgs, steps = self._of_all(parameters, "exp_avg"), self._of_all(parameters, "step")
        torch._foreach_add_(steps, 1)
        exp_avg_sqs = self._of_all(parameters, "exp_avg_sq")
        if refreshes:
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avgs, torch._foreach_sign(exp_avg_sqs))  # 1, and 0 where v is 0
        corrections = [(1 - beta2 ** num_refreshes(int(step), group)) ** 0.5 for step in steps]
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominators, corrections)
        torch._foreach_add_(denominators, group["eps"])
        step_sizes = [-group["lr"] / (1 - beta1 ** float(step)) for step in steps]
        torch._foreach_addcdiv_(parameters, exp_avgs, denominators, step_sizes)


class _Launch:
    """The fused step of parameters of one device and dtype that are all in the warm-up, or all behind it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, is_frozen: bool) -> None:
        self._device, self._dtype, self._is_frozen = device, dtype, is_frozen
        self._parameters: list[torch.Tensor] = []
        self._numels: list[int] = []
        self._factors: list[tuple[float, float]] = []
        self._addresses: tuple[list[int], ...] = ([], [], [], [])
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what they are copies of
        self._kept: list[tuple[torch.Tensor, ...]] = []  # until the launch

    def add(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], factors: tuple[float, float]) -> None:
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        if not _lie_alike(tensors):
            weight, _, exp_avg, exp_avg_sq = copies = tuple(map(self._copied, tensors))
            self._copies += [(weight, parameter), (exp_avg, tensors[2]), (exp_avg_sq, tensors[3])]
            self._kept.append(copies)
            tensors = copies
        self._parameters.append(parameter)
        self._numels.append(parameter.numel())
        self._factors.append(factors)
        for addresses, tensor in zip(self._addresses, tensors, strict=True):
            addresses.append(tensor.data_ptr())

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=self._dtype, device=self._device).copy_(tensor)

    def run(self, options: tuple[float, float, float, float]) -> None:
        """Enqueues it on the current stream, or on the CPU does it."""
        _C.adam(
            dtype_code(self._dtype),
            self._numels,
            *self._addresses,
            self._factors,
            options,
            self._is_frozen,
            current_stream(self._device),
            torch.get_num_threads(),
        )
        for copy, tensor in self._copies:
            tensor.copy_(copy)
        for parameter in self._parameters:
            increment_version(parameter)


def _is_fused(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    fused = group["fused"]
    if fused is None:
        return not parameter.is_cpu and _why_not_fused(parameter) is None
    return fused


def _why_not_fused(parameter: torch.Tensor) -> str | None:
    """Returns the kind of parameter that the kernel cannot step; None if it can."""
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(parameter).__name__}"  # may have no memory of its own
    if parameter.dtype not in _FUSED_DTYPES:
        return f"of {parameter.dtype}"
    if parameter.device.type not in supported_types():
        return f"on {parameter.device}"
    return None


def _lie_alike(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Returns True if tensors of one shape have one dtype, and lie in memory alike and without gaps."""
    first = tensors[0]
    if any(tensor.dtype is not first.dtype or tensor.is_neg() for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    if any(tensor.stride() != first.stride() for tensor in tensors):
        return False
    numel = 1
    for stride, size in sorted(zip(first.stride(), first.shape, strict=True)):
        if size != 1 and stride != numel:
            return False
        numel *= size
    return True


def _check_is_adam(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidArgument for options and states of an optimizer whose steps QAdam does not make."""
    for loaded, group in zip(state_dict["param_groups"], groups, strict=False):  # torch refuses another number of them
        states = [state_dict["state"].get(key, {}) for key in loaded["params"]]
        decays_apart = loaded.get("decoupled_weight_decay") and loaded.get("weight_decay")
        if (
            not all({"step", "exp_avg", "exp_avg_sq"} <= {*state} for state in states if state)
            or not ("warmup_steps" in loaded or "amsgrad" in loaded)
            or any((loaded.get("maximize"), loaded.get("amsgrad"), decays_apart))
        ):
            raise InvalidArgument(
                "the state to load is of neither a QAdam nor a plain Adam of torch.optim (without maximize, amsgrad "
                "and decoupled weight decay), whose steps QAdam could continue; start QAdam anew"
            )
        num_steps = max((int(state["step"]) for state in states if state), default=0)
        if "warmup_steps" not in loaded and num_steps >= warmup_of(group):
            raise InvalidArgument(
                f"the state to load is of an Adam that has made {num_steps} steps, and warmup_steps is "
                f"{warmup_of(group)}; give QAdam a warmup_steps above {num_steps}, by some hundreds"
            )


def check_options(options: dict[str, Any]) -> None:
    """Raises InvalidArgument for an option of QAdam that is no number or out of range."""
    steps = options.get("warmup_steps", 1)
    if steps != AUTO and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise InvalidArgument(
            f"warmup_steps is {steps!r}, expected an integer of at least 1, or {AUTO!r}: v is learnt in the warm-up"
        )
    doubling = options.get("refresh_doubling", 0)
    if isinstance(doubling, bool) or not isinstance(doubling, int) or doubling < 0:
        raise InvalidArgument(f"refresh_doubling is {doubling!r}, expected an integer of 0 or more")
    if doubling and steps == AUTO:
        raise InvalidArgument(
            f"refresh_doubling is {doubling} with warmup_steps={AUTO!r}, which looks at a v that is refreshed at every "
            "step; give the warm-up's steps, or leave refresh_doubling at 0"
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
    """Returns True if the values are equal, also where one is a tuple and the other a list."""
    return (list(value) == list(other)) if isinstance(value, (tuple, list)) else value == other
