"""qadam: after a warm-up of plain Adam the ranks average their momentum under a codec, while Adam's v stands still.

Data path: policy, together with the optimizer ``bagua.optim.QAdam``. In backward each rank forms the momentum that its
own gradient would lead to, m_i = b1 m + (1 - b1) (g_i + weight_decay x), the compressed all_reduce averages these, and
what is left as the gradient is the one that leads from m to their mean. So clipping, unscaling and a skipped step mean
what they mean elsewhere, and the optimizer updates m once per step. Source: 1-bit Adam, arXiv 2102.02888.

Invariant: what is left as the gradient is linear in what the codec gives back, whatever the unit R below is.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bagua import codecs, optim
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._compressed import CompressedGradients
from bagua.algorithms._hooks import About, Stage, Training
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, Member
from bagua.distributed.devices import HostCopy, multiplied
from bagua.distributed.process_group import Work
from bagua.errors import InvalidArgument

_WARMUP, _COMPRESSED = "warm-up", "compressed"
# Times the learning rate. With b1 = 0.9 and b2 = 0.999 no step of Adam is longer than 3.2 times, and what is rounded to
# the mean of |m|, as by "onebit", is 1000 times at most over a v that optim's default floor has raised.
_FAR = 1000.0


@register
@dataclasses.dataclass(kw_only=True)
class QAdam(CompressedGradients):
    """Warm-up: g <- mean g, Adam. Then: m <- mean over ranks of C(m_i), and x <- x - lr m / (sqrt(v) + eps).

    The model's optimizers must be ``bagua.optim.QAdam``, and step all its parameters that train. The options of Adam
    may be given to either; given to both they must be equal.

    A GradScaler makes the gradients in backward larger than those that the optimizer steps with and its m is made of,
    and clipping makes the latter smaller. So what is encoded is b1 R m + (1 - b1) (g_i + R weight_decay x), R the power
    of two next to the largest gradient in backward by the largest one when the optimizer steps, as the step before had
    them; 1 at first. It grows with the scaler's scale, so a GradScaler alone, whose scales are powers of two, changes
    no bit of the training. Clipping divides R by its coefficient, so that m and g_i have in the code the proportion
    that they have in the m that the optimizer will make of them.

    A parameter that comes late has a warm-up of its own, and its bucket travels at full precision until that ends; with
    ``find_unused_parameters=True`` so does the bucket of a parameter that is never used: freeze it. The declaration
    of the bucket says so.

    A weight whose v is 0 when the warm-up ends has had no gradient and keeps its value; rank 0 then warns of it.
    Where v is tiny beside what the codec rounds of m, rounding moves a weight further than its gradients do. Inside a
    parameter ``variance_floor`` prevents that; it may remain where one with tiny gradients shares a block of the codec
    with one that has large ones. Rank 0 looks for it in the first step after the warm-up, and a RuntimeWarning names
    the parameters and an eps that ends it.

    Args:
        warmup_steps, betas, eps, weight_decay, variance_floor: as for QAdam.
        codec: of the momentum after the warm-up: "minmax_uint8"; "onebit", which is 1-bit Adam; or another one.
        error_feedback: by default where the codec needs it.
        average, hierarchical, state_dtype, seed, min_compressed_bytes: as in CompressedGradients.

    Example:
        >>> optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=200)
        >>> model = bagua.with_bagua(model, optimizer, algorithm="qadam", codec="onebit")
    """

    about = About(
        sends="gradients at full precision in the warm-up, then momentum, 8 bits or 1 bit per element",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="2 (n-1)/n G in the warm-up, then a quarter of it, with `onebit` a 32nd",
        memory="0; with error feedback, which `onebit` brings, 2 (1 + 1/n) G, in bfloat16 half",
        use_when="the model is trained with Adam, for long",
        paper="[2102.02888](https://arxiv.org/abs/2102.02888)",
    )

    optimizer_class = optim.QAdam
    warmup_steps: int | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    variance_floor: float | None = None
    codec: str = "minmax_uint8"
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        if self.error_feedback is None:
            self.error_feedback = codecs.get(self.codec).needs_error_feedback
        if not isinstance(self.error_feedback, bool):
            raise InvalidArgument(f"error_feedback is {self.error_feedback!r}, expected True, False or None")
        super().__post_init__()
        if not self.average:
            raise InvalidArgument("algorithm 'qadam' averages momentum; average=False would let it grow with the ranks")
        optim.check_options(self._adam_options())

    def _adam_options(self) -> dict[str, Any]:
        names = ("warmup_steps", "betas", "eps", "weight_decay", "variance_floor")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def codec_spec(self) -> str:
        return self.codec

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check(optimizers)
        for index, optimizer in enumerate(optimizers):
            optimizer.check_given(self._adam_options(), "algorithm 'qadam'", f"optimizers[{index}]")

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._take(training.optimizers)
        self._count_steps()
        # R when it was measured, and what it has grown by since then, which perhaps only the device knows.
        self._units = [1.0] * len(training.optimizers)
        self._growths: list[float | torch.Tensor] = [1.0] * len(training.optimizers)
        # The largest gradient of the last backward, until the optimizer steps; then with that of the step, and by what
        # that divides, until R is asked for.
        self._largest: list[_Largest | None] = [None] * len(training.optimizers)
        self._measured: list[tuple[_Largest, _Largest, _Largest | None] | None] = [None] * len(training.optimizers)
        # What rank 0 may warn of when the host hears it, behind the first step after the warm-up.
        self._looks: list[_Look | None] = [None] * len(training.optimizers)
        # In the present layout: those of each bucket, and those that a codec is for.
        self._members_of: dict[int, tuple[Member, ...]] = {}
        self._coded: list[Member] = []

    def begin(self, buckets: Sequence[Bucket]) -> None:
        for optimizer in self.training.optimizers:
            optimizer.set_options(self._adam_options())
        self._count_steps()

    def _count_steps(self) -> None:
        self._num_steps = [optimizer.num_steps() for optimizer in self.training.optimizers]
        self._num_undone = [optimizer.num_undone for optimizer in self.training.optimizers]

    def _undo_steps(self) -> None:
        """Those that a scaler has made nothing of do not count; on a device the host hears of them late."""
        for index, optimizer in enumerate(self.training.optimizers):
            optimizer.settle()
            self._num_steps[index] -= optimizer.num_undone - self._num_undone[index]
            self._num_undone[index] = optimizer.num_undone

    def detach(self) -> None:
        if any(look is not None for look in self._looks):
            self._undo_steps()
            for index in range(len(self._looks)):
                self._warn(index)
        super().detach()

    def adopt_optimizers(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Each one's warm-up is as far as its own state."""
        before = self.training.optimizers
        super().adopt_optimizers(optimizers)
        self._take(optimizers)
        for index, optimizer in enumerate(optimizers):
            if optimizer is not before[index]:
                optimizer.set_options(self._adam_options())
                self._num_steps[index], self._units[index] = optimizer.num_steps(), 1.0
                self._growths[index] = 1.0
                self._largest[index] = self._measured[index] = self._looks[index] = None
                self._num_undone[index] = optimizer.num_undone

    def _take(self, optimizers: Sequence[optim.QAdam]) -> None:
        self._place_of: dict[int, tuple[optim.QAdam, int]] = {}  # of a parameter: the optimizer, and which group there
        for optimizer in optimizers:
            for index, options in enumerate(optimizer.param_groups):
                self._place_of.update({id(parameter): (optimizer, index) for parameter in options["params"]})

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        members = sorted((m for bucket in buckets for m in bucket.members), key=lambda member: member.index)
        unknown = [member.name for member in members if id(member.parameter) not in self._place_of]
        if unknown:
            raise InvalidArgument(
                "algorithm 'qadam' sends the momentum of every parameter that trains, but no optimizer that was passed "
                f"to with_bagua steps {_told(unknown)}; pass all optimizers of the model, and freeze what none of them "
                "steps"
            )
        self._members_of = {bucket.index: bucket.members for bucket in buckets}
        coded = {m.index for bucket in buckets if not super(QAdam, self).exempt(bucket) for m in bucket.members}
        self._coded = [member for member in members if member.index in coded]  # in an order that all layouts have
        super().lay_out(buckets)

    def before_forward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        super().before_forward(buckets, group)
        # Here, where the host hears of other flags of the last step, too.
        self._undo_steps()
        for index in range(len(self._units)):
            self._unit(index)
            self._warn(index)

    def stage(self) -> Stage:
        if any(map(self._ends_warm_up, self.training.optimizers, self._num_steps)):
            self._undo_steps()
        if not self._is_warm():
            return Stage(_WARMUP)
        late = self._in_warm_up(self._coded)
        return Stage(f"{_COMPRESSED} but for {', '.join(late)}" if late else _COMPRESSED)

    def exempt(self, bucket: Bucket) -> str:
        reason = super().exempt(bucket)
        if reason or not self._is_warm():
            return reason or _WARMUP
        late = self._in_warm_up(self._members_of[bucket.index])
        return f"{_WARMUP} of {_told(late)}" if late else ""

    def _is_warm(self) -> bool:
        """Whether the warm-up of the model has ended; that of a parameter may not have."""
        return all(
            num_steps >= _num_warmup(optimizer)
            for optimizer, num_steps in zip(self.training.optimizers, self._num_steps, strict=True)
        )

    @staticmethod
    def _ends_warm_up(optimizer: optim.QAdam, num_steps: int) -> bool:
        """Whether the warm-up has ended only if the last step counts."""
        return num_steps == _num_warmup(optimizer)

    def _in_warm_up(self, members: Iterable[Member]) -> list[str]:
        """The names of those that are in a warm-up of their own; all ranks count the same steps."""
        names = []
        for member in members:
            optimizer, options = self._group_of(member)
            if optimizer is not None and not optimizer.is_warm(member.parameter, options):
                names.append(member.name)
        return names

    def _group_of(self, member: Member) -> tuple[optim.QAdam | None, dict[str, Any]]:
        """Its optimizer and the parameter group: looked up each time, because load_state_dict makes new groups."""
        optimizer, index = self._place_of.get(id(member.parameter), (None, 0))
        return optimizer, {} if optimizer is None else optimizer.param_groups[index]

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work:
        if self.exempt(bucket) or group.size == 1:
            return super().communicate(bucket, group)
        members = self._members_of[bucket.index]
        terms: list[_Terms] = []

        def form_momentum() -> None:
            terms.extend(map(self._terms, members))
            for member, of_member in zip(members, terms, strict=True):
                if of_member.decay:
                    member.view.add_(of_member.grown(member.parameter.detach()), alpha=of_member.decay)
                member.view.mul_(of_member.rest)
                if of_member.exp_avg is not None:
                    member.view.add_(of_member.grown(of_member.exp_avg), alpha=of_member.beta)

        def leave_gradients() -> None:
            for member, of_member in zip(members, terms, strict=True):
                if of_member.exp_avg is not None:
                    member.view.sub_(of_member.grown(of_member.exp_avg), alpha=of_member.beta)
                member.view.div_(of_member.rest)
                if of_member.decay:
                    member.view.sub_(of_member.grown(member.parameter.detach()), alpha=of_member.decay)

        work = super().communicate(bucket, group, form_momentum)
        work.finish_with(leave_gradients)
        return work

    def _terms(self, member: Member) -> _Terms:
        optimizer, options = self._group_of(member)
        exp_avg = optimizer.state.get(member.parameter, {}).get("exp_avg")
        index = self.training.optimizers.index(optimizer)
        unit, beta1 = self._unit(index), options["betas"][0]
        return _Terms(exp_avg, unit * beta1, unit * options["weight_decay"], 1 - beta1, self._growths[index])

    def after_backward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        super().after_backward(buckets, group)
        if group.size > 1:
            self._largest = [self._largest_gradient(optimizer, buckets) for optimizer in self.training.optimizers]

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        super().before_optimizer_step(optimizer, buckets, group)
        self._undo_steps()
        index = self.training.optimizers.index(optimizer)
        in_backward, self._largest[index] = self._largest[index], None
        if in_backward is not None:
            grad_scale = getattr(optimizer, "grad_scale", None)  # by which the step divides
            self._measured[index] = (
                in_backward,
                self._largest_gradient(optimizer, buckets),
                None if grad_scale is None else _Largest([grad_scale]),
            )

    def after_change_of_scale(self, ratio: float | torch.Tensor) -> None:
        super().after_change_of_scale(ratio)
        for index in range(len(self._units)):
            self._unit(index)
            self._growths[index] = self._growths[index] * ratio

    def _unit(self, index: int) -> float:
        """R but for its growth, by what was measured around the last step."""
        measured, self._measured[index] = self._measured[index], None
        if measured is not None:
            in_backward, in_step, grad_scale = measured
            step, scale = in_step.get(), 1.0 if grad_scale is None else grad_scale.get()
            backward = in_backward.get()
            if backward and step and scale:
                self._units[index], self._growths[index] = _power_of_two(backward / (step / scale)), 1.0
        return self._units[index]

    def _largest_gradient(self, optimizer: optim.QAdam, buckets: Sequence[Bucket]) -> _Largest:
        """By absolute value, equal on all ranks."""
        found = []
        for member in (member for bucket in buckets for member in bucket.members):
            grad = member.parameter.grad
            if grad is not None and grad.numel() and self._group_of(member)[0] is optimizer:
                low, high = torch.aminmax(grad.detach())
                found += [-low.double(), high.double()]
        return _Largest(found)

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        super().after_optimizer_step(optimizer, buckets, group)
        index = self.training.optimizers.index(optimizer)
        self._num_steps[index] += 1
        if group.rank == 0 and self._num_steps[index] == _num_warmup(optimizer) + 1:
            # Of this model; the optimizer may step others, too.
            name_of = {id(member.parameter): member.name for bucket in buckets for member in bucket.members}
            self._looks[index] = look = _Look(optimizer, name_of, group.size > 1)
            if look.is_on_host:
                self._warn(index)

    def after_skipped_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().after_skipped_step(optimizer, buckets)
        index = self.training.optimizers.index(optimizer)
        num_undone = optimizer.num_undone  # by now without this step, which has not been counted here
        optimizer.settle()
        self._num_undone[index] += optimizer.num_undone - num_undone

    def _warn(self, index: int) -> None:
        """Of what was seen in the first step after the warm-up, if that is what it was."""
        look, self._looks[index] = self._looks[index], None
        if look is None or self._num_steps[index] <= _num_warmup(self.training.optimizers[index]):
            return  # a scaler has skipped it
        self._warn_of_still_weights(look.still_weights())
        self._warn_of_far_steps(look.far_steps())

    @staticmethod
    def _warn_of_still_weights(counts: dict[str, int]) -> None:
        if not counts:
            return
        warnings.warn(
            f"algorithm 'qadam': {sum(counts.values())} weights of {_told([*counts])} had no gradient but 0 in the "
            "warm-up, so their v is 0 and they keep their values from now on. If they are to be trained, make "
            "warmup_steps so large that the warm-up meets them, as each row of an embedding",
            RuntimeWarning,
            stacklevel=2,
        )

    def _warn_of_far_steps(self, found: dict[str, tuple[int, float]]) -> None:
        if not found:
            return
        count, eps = sum(count for count, _ in found.values()), max(largest for _, largest in found.values())
        warnings.warn(
            f"algorithm 'qadam': the first step after the warm-up moved {count} weights of {_told([*found])} "
            f"by more than {_FAR:g} times the learning rate. Their gradients were close to 0 in the warm-up, and what "
            f"codec {self.codec!r} rounds is divided by sqrt(v) + eps. Training may diverge; raise variance_floor, or "
            f"with eps={eps:.0e} such a step is one learning rate at most. A longer warm-up does not help",
            RuntimeWarning,
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        self._undo_steps()
        units = [self._unit(index) for index in range(len(self._units))]
        grown = [unit * float(growth) for unit, growth in zip(units, self._growths, strict=True)]
        for index in range(len(self._looks)):
            self._warn(index)
        return {**super().state_dict(), "num_steps": list(self._num_steps), "units": grown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_steps, self._units = list(state["num_steps"]), list(state["units"])
        self._growths = [1.0] * len(self._units)
        self._measured, self._looks = [None] * len(self._units), [None] * len(self._units)
        super().load_state_dict(state)


@dataclasses.dataclass(frozen=True)
class _Terms:
    """What a parameter's momentum is made of, beside its gradient.

    Attributes:
        exp_avg: m; None where the parameter has not stepped yet.
        beta: R b1.
        decay: R times the weight decay.
        rest: 1 - b1.
        growth: by what R has to be multiplied in both.
    """

    exp_avg: torch.Tensor | None
    beta: float
    decay: float
    rest: float
    growth: float | torch.Tensor

    def grown(self, factor: torch.Tensor) -> torch.Tensor:
        """m or the parameter times what R has grown by: with the same bits on all ranks, whoever of them knows it."""
        return multiplied(factor, self.growth)


class _Look:
    """At the weights behind the first step after the warm-up. What a device knows is on its way to the host.

    Args:
        name_of: the parameters to look at, by id.
        has_codec: whether a codec has run.
    """

    def __init__(self, optimizer: optim.QAdam, name_of: dict[int, str], has_codec: bool) -> None:
        still = [(name_of[id(p)], count.double()) for p, count in optimizer.still_weights() if id(p) in name_of]
        beyond = optimizer.steps_beyond(_FAR) if has_codec else []
        far = [(name_of[id(p)], numbers) for p, numbers in beyond if id(p) in name_of]
        self._still, self._far = _Numbers(still), _Numbers(far)
        self.is_on_host = self._still.are_on_host and self._far.are_on_host

    def still_weights(self) -> dict[str, int]:
        """By parameter, how many do not move; waits for the device."""
        return {name: int(count) for name, count in self._still.get().items() if count > 0}

    def far_steps(self) -> dict[str, tuple[int, float]]:
        """By parameter, how many moved too far, and what eps would have held the furthest; waits for the device."""
        numbers = {name: of_parameter.tolist() for name, of_parameter in self._far.get().items()}
        return {name: (int(count), largest) for name, (count, largest) in numbers.items() if count}


class _Numbers:
    """Small tensors by name, all of one shape and dtype, of any devices: of each device one copy, on its way."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._places: dict[str, tuple[torch.device, int]] = {}
        found: dict[torch.device, list[torch.Tensor]] = {}
        for name, number in named:
            of_device = found.setdefault(number.device, [])
            self._places[name] = number.device, len(of_device)
            of_device.append(number)
        stacked = {device: torch.stack(numbers) for device, numbers in found.items()}
        self._of_devices = {device: one if one.is_cpu else HostCopy(one) for device, one in stacked.items()}
        self.are_on_host = all(device.type == "cpu" for device in stacked)

    def get(self) -> dict[str, torch.Tensor]:
        values = {device: one.get() if isinstance(one, HostCopy) else one for device, one in self._of_devices.items()}
        return {name: values[device][place] for name, (device, place) in self._places.items()}


class _Largest:
    """The largest of some numbers by absolute value. What a device is about to know is on its way to the host, which
    asks for it later.

    Args:
        numbers: scalars, on each device of one dtype; positive, or both signs of each.
    """

    def __init__(self, numbers: Sequence[torch.Tensor]) -> None:
        found: dict[torch.device, list[torch.Tensor]] = {}
        for number in numbers:
            found.setdefault(number.device, []).append(number)
        largest = [torch.stack(of_device).amax() for of_device in found.values()]
        self._of_devices = [one if one.is_cpu else HostCopy(one) for one in largest]

    def get(self) -> float:
        """0 where there is none, or one that is not finite."""
        numbers = [float(one.get() if isinstance(one, HostCopy) else one) for one in self._of_devices]
        return max(numbers, default=0.0) if all(map(math.isfinite, numbers)) else 0.0


def _num_warmup(optimizer: optim.QAdam) -> int:
    return max(options["warmup_steps"] for options in optimizer.param_groups)


def _power_of_two(ratio: float) -> float:
    """The one next to ``ratio``, by its logarithm; exactly 2^k times as large for a ratio 2^k times as large."""
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa from 1/2 to below 1
    return math.ldexp(1.0, exponent if mantissa > math.sqrt(0.5) else exponent - 1)


def _told(names: Sequence[str]) -> str:
    """Three of them by name."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
