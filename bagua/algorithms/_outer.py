"""The outer engine: H local steps, and then one step of an outer rule on how far the ranks' weights have moved.

Data path: policy. Five independent parts: a ``Schedule`` (when which fragment of the model is exchanged), the delta D =
reference - weights, a codec with error feedback, an ``Aggregate`` (what all ranks make of their deltas), and an
outer rule. An algorithm picks them; this file has the order. A fragment's delta travels by the engine's worker while
the next steps compute, for ``overlap_steps`` of them; what has not arrived then is waited for. Without a rule the
weights themselves travel, and nothing is remembered. Invariants: the reference is the last global value, bit for bit
the same on all ranks, which a digest checks in every exchange; ``bucket.flat`` holds the delta while it is under way.
Formulas: arXiv 2311.08105 (DiLoCo), 2501.18512 (fragments, overlap and merging).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._weights import ExchangedWeights
from bagua.algorithms.base import ParameterState, Stage, Training
from bagua.buckets import Bucket, bucket_dtype
from bagua.distributed.process_group import ReduceOp, Work
from bagua.distributed.tensors import digests_of
from bagua.errors import BaguaError, InvalidArgument

REFERENCE, MOMENTUM, RESIDUAL = "reference", "momentum", "residual"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Chooses which fragment of the model is exchanged after a step, and when its result takes effect.

    Attributes:
        sync_every: H, the local steps between two exchanges of a fragment.
        fragments: P; fragment p is due after steps p H / P modulo H.
        overlap_steps: tau, the steps that an exchange may take, below H / P.
        merge: alpha, how much of its own weights a rank keeps then: weights <- alpha weights + (1 - alpha) reference.
        warmup_steps: steps before the first local one, in which gradients are averaged.

    Raises:
        InvalidArgument: a value that is out of range.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0
    merge: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("fragments", 1), ("overlap_steps", 0), ("warmup_steps", 0)):
            if getattr(self, name) < least:
                raise InvalidArgument(f"{name} is {getattr(self, name)}, expected {least} or more")
        if self.sync_every % self.fragments:
            raise InvalidArgument(
                f"sync_every is {self.sync_every}, expected a multiple of fragments={self.fragments}: one of them is "
                "exchanged after every (sync_every / fragments)-th step"
            )
        if self.overlap_steps >= self.distance:
            raise InvalidArgument(
                f"overlap_steps is {self.overlap_steps}, expected less than sync_every / fragments = {self.distance}: "
                "an exchange ends before the next one begins"
            )
        if not 0 <= self.merge <= 1:
            raise InvalidArgument(f"merge is {self.merge}, expected 0 (the global weights) to 1 (this rank's own)")
        if self.merge and not self.overlap_steps:
            raise InvalidArgument(
                f"merge is {self.merge} with overlap_steps=0, where no step is taken meanwhile that it could keep; "
                "leave one of them out"
            )

    @property
    def distance(self) -> int:
        """The steps from one exchange to the next."""
        return self.sync_every // self.fragments

    def due(self, step: int) -> int | None:
        """Returns the fragment that is due after local step ``step``, which counts from 1.

        Example:
            >>> [Schedule(6, 3).due(step) for step in range(1, 9)]
            [None, 1, None, 2, None, 0, None, 1]
        """
        return step // self.distance % self.fragments if step % self.distance == 0 else None


class Aggregate(Protocol):
    """The way from each rank's delta to one value that is the same on all ranks."""

    def start(self, bucket: Bucket, group: BucketGroup, step: int) -> Any:
        """Starts the exchange of the delta that ``bucket.flat`` holds; returns what ``finish`` gets."""

    def finish(self, bucket: Bucket, started: Any) -> None:
        """Waits, and leaves the aggregate in ``bucket.flat``."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean over all ranks, by an all_reduce.

    Attributes:
        codec: of what travels; None: full precision.
        decay: beta, of the residuals of error feedback: e <- beta e + D, what travels is C(e), and e <- e - C(e). 1 for
            classic error feedback; None for none.
    """

    codec: codecs.Codec | None = None
    decay: float | None = None

    def start(self, bucket: Bucket, group: BucketGroup, step: int) -> Work:
        """See ``Aggregate``."""
        if self.codec is None or not bucket.kind:
            is_coded = self.codec is None or bucket.dtype in self.codec.dtypes
            reason = "" if is_coded else f"codec {self.codec.spec} does not encode {bucket.dtype}"
            return group.all_reduce(bucket, ReduceOp.AVG, reason=reason)
        if self.decay is not None and self.decay != 1:
            residuals = bucket.residuals(RESIDUAL, self.codec, False)
            residuals.worker_in.mul_(self.decay)
            residuals.owner_in.mul_(self.decay)
        codec = self.codec.with_seed(0, step, bucket.index) if self.codec.is_random else self.codec
        feedback = None if self.decay is None else RESIDUAL
        return group.all_reduce(bucket, ReduceOp.AVG, codec=codec, feedback=feedback)

    def finish(self, bucket: Bucket, started: Work) -> None:
        """See ``Aggregate``."""
        started.wait()


class OuterRule(Protocol):
    """The outer optimizer.

    Attributes:
        needs_rate: True if it asks for the learning rate of the local steps, which ``step`` gets as 0 otherwise.
    """

    needs_rate: ClassVar[bool]

    def step(
        self, reference: torch.Tensor, delta: torch.Tensor, momentum: torch.Tensor | None, learning_rate: float
    ) -> None:
        """Changes ``reference`` and ``momentum`` in place.

        Args:
            reference, delta, momentum: flat tensors of one size; ``delta`` may be of a smaller dtype.
            learning_rate: of the local steps, now.
        """


@dataclasses.dataclass(frozen=True)
class OuterSGD:
    """The outer rule b <- mu b + D; reference <- reference - lr (D + mu b), torch.optim.SGD with Nesterov's momentum.

    Attributes:
        lr: the outer learning rate.
        momentum: mu; 0: plain SGD, which keeps no b.
        nesterov: False for heavy ball, reference <- reference - lr b.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = True

    needs_rate: ClassVar[bool] = False

    def step(
        self, reference: torch.Tensor, delta: torch.Tensor, momentum: torch.Tensor | None, learning_rate: float
    ) -> None:
        """See ``OuterRule``."""
        if momentum is None:
            reference.sub_(delta, alpha=self.lr)
            return
        momentum.mul_(self.momentum).add_(delta)
        if self.nesterov:
            reference.sub_(delta, alpha=self.lr).sub_(momentum, alpha=self.lr * self.momentum)
        else:
            reference.sub_(momentum, alpha=self.lr)


@dataclasses.dataclass
class _Exchange:
    """An exchange of one fragment.

    Attributes:
        fragment: which one.
        due: the local step after which its result takes effect.
        buckets: of the fragment.
        started: what ``Aggregate.start`` returned, by bucket; empty once it has arrived.
        digests: of all ranks' references, and the message that brings them; None once they are compared.
        before_close: takes part when the group is closed meanwhile, though the model may be gone.
    """

    fragment: int
    due: int
    buckets: list[Bucket]
    started: list[tuple[Bucket, Any]] = dataclasses.field(default_factory=list)
    digests: tuple[torch.Tensor, Work] | None = None
    before_close: Callable[[], None] | None = None

    def wait(self, aggregate: Aggregate) -> torch.Tensor | None:
        """Waits until the aggregates are in the buckets; returns the digests, unless they were returned before."""
        digests, self.digests = self.digests, None
        if digests is not None:
            digests[1].wait()
        while self.started:
            bucket, started = self.started.pop(0)
            aggregate.finish(bucket, started)
            bucket.zero_padding()  # a codec leaves its rounding there
        return None if digests is None else digests[0]


@dataclasses.dataclass(kw_only=True)
class OuterSteps(ExchangedWeights):
    """Local steps of any optimizer, and an outer step in between; the base of the methods.

    Each optimizer counts its own steps. A subclass defines ``__post_init__``, which calls ``set_parts``.
    """

    has_one_reference: ClassVar[bool] = True  # the same on all ranks
    keeps_mean = False

    def set_parts(
        self,
        schedule: Schedule,
        aggregate: Aggregate,
        rule: OuterRule | None,
        states: Mapping[str, ParameterState] | None = None,
        codec: codecs.Codec | None = None,
    ) -> None:
        """Chooses the parts.

        Args:
            rule: None: weights <- their aggregate.
            states: REFERENCE and MOMENTUM of the rule, RESIDUAL of the aggregate, if they have them.
            codec: a bucket has parameters of one dtype, which it encodes or not.
        """
        self.schedule, self.aggregate, self.rule = schedule, aggregate, rule
        self._states, self._codec = dict(states or {}), codec

    # --- what it remembers

    def parameter_state(self) -> dict[str, ParameterState]:
        return self._states

    def fragments_of(self, names: Sequence[str], sizes: Sequence[int]) -> Sequence[int]:
        return fragments_of(names, sizes, self.schedule.fragments)

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        return self._codec is None or bucket_dtype(parameter) in self._codec.dtypes

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._num_local_steps = [0] * len(training.optimizers)
        self._exchanges: list[list[_Exchange]] = [[] for _ in training.optimizers]  # under way, by optimizer
        self._loading: list[list[dict[str, Any]]] | None = None  # for the layout that follows
        # The local step, by optimizer and fragment, after which its weights were last set from the reference.
        self._merged_at = [[0] * self.schedule.fragments for _ in training.optimizers]

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        loading, self._loading = self._loading, None
        if loading is None:
            # A layout changes after the first backward and at the end of the warm-up, when nothing is under way yet.
            assert not any(self._exchanges), "buckets are laid out anew while their exchange is under way"
            return
        self._exchanges = [[] for _ in loading]
        for index, saved in enumerate(loading):
            for one in saved:
                mine = [b for b in buckets if b.optimizer_index == index and b.fragment == one["fragment"]]
                for member in (member for bucket in mine for member in bucket.members):
                    member.view.copy_(one["values"][member.name])
                self._exchanges[index].append(_Exchange(one["fragment"], one["due"], mine))

    def begin(self, buckets: Sequence[Bucket]) -> None:
        if not all(map(self.averages, range(len(self.num_steps)))):
            self._take_reference(buckets)

    def _take_reference(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets if self.rule is not None else ():
            bucket.load(flat=bucket.state(REFERENCE))

    # --- the warm-up: gradients are averaged

    def averages(self, index: int) -> bool:
        """Returns whether the next step of optimizer ``index`` is on averaged gradients; the same on all ranks."""
        return min(self.num_steps) < self.schedule.warmup_steps

    def due(self, index: int) -> int | None:
        """Returns the fragment that is due after the local step that optimizer ``index`` has just made, if one is."""
        return self.schedule.due(self._num_local_steps[index])

    def stage(self) -> Stage:
        return Stage(synchronises_gradients=any(map(self.averages, range(len(self.num_steps)))))

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work:
        return group.all_reduce(bucket, ReduceOp.AVG)

    # --- local steps

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        index = self.index_of(optimizer)
        was_averaged = self.averages(index)
        self.num_steps[index] += 1
        if was_averaged:
            if self.num_steps[index] >= self.schedule.warmup_steps:
                self._take_reference(buckets)
            return
        self._num_local_steps[index] += 1
        step, exchanges = self._num_local_steps[index], self._exchanges[index]
        if exchanges and exchanges[0].due <= step:
            self._finish(index, exchanges.pop(0), self.schedule.merge)
        fragment = self.due(index)
        if fragment is None:
            return
        exchange = self._start(fragment, step, buckets, group)
        if self.schedule.overlap_steps:
            exchanges.append(exchange)
        else:
            self._finish(index, exchange, 0.0)
        self.after_exchange(optimizer, buckets, group)

    def after_exchange(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """Runs after an exchange was started, and finished if none overlaps."""

    def to_sent(self, bucket: Bucket) -> None:
        """Makes of the delta that ``bucket.flat`` holds what travels; by default it does itself."""

    def from_sent(self, bucket: Bucket) -> None:
        """Makes a delta of the aggregate of what has travelled, in ``bucket.flat``."""

    def _start(self, fragment: int, step: int, buckets: Sequence[Bucket], group: BucketGroup) -> _Exchange:
        mine = [bucket for bucket in buckets if bucket.fragment == fragment]
        exchange = _Exchange(fragment, step + self.schedule.overlap_steps, mine)
        if mine and self.rule is not None and self.has_one_reference and group.size > 1:
            exchange.digests = self._exchange_digests(mine, group)
        for bucket in mine:
            bucket.load()
            if self.rule is not None:
                flat = bucket.flat
                # Local steps of smaller weights began with the reference rounded to their dtype.
                torch.sub(bucket.state(REFERENCE).to(flat.device, flat.dtype), flat, out=flat)
                self.to_sent(bucket)
            exchange.started.append((bucket, self.aggregate.start(bucket, group, step)))
        # A program may end while other ranks still need this one.
        exchange.before_close = functools.partial(_take_part, exchange, self.aggregate)
        group.before_close.append(exchange.before_close)
        return exchange

    def _arrive(self, exchange: _Exchange) -> None:
        """Waits until the aggregates are in the buckets, and compares the references."""
        callbacks, mine = self.training.group.before_close, exchange.before_close
        if mine is not None and mine in callbacks:
            callbacks.remove(mine)
        digests = exchange.wait(self.aggregate)
        if digests is not None:
            self._compare(digests, exchange.fragment)

    def _finish(self, index: int, exchange: _Exchange, merge: float) -> None:
        self._arrive(exchange)
        self._merged_at[index][exchange.fragment] = self._num_local_steps[index]
        for bucket in exchange.buckets:
            if self.rule is not None:
                self.from_sent(bucket)
                self._step(bucket, self.rule, merge)
            bucket.store()

    def _step(self, bucket: Bucket, rule: OuterRule, merge: float) -> None:
        """Takes the outer step of a bucket, whose ``flat`` holds the aggregate, and puts the new weights there."""
        flat = bucket.flat
        kept = [bucket.state(name) for name in (REFERENCE, MOMENTUM) if name in self._states]
        here = [state.to(flat.device) for state in kept]  # from host memory, if they are there
        for begin, end, learning_rate in self._stretches(bucket) if rule.needs_rate else [(0, len(flat), 0.0)]:
            reference, delta, *momentum = (one[begin:end] for one in (here[0], flat, *here[1:]))
            rule.step(reference, delta, momentum[0] if momentum else None, learning_rate)
        for state, value in zip(kept, here, strict=True):
            if value is not state:
                state.copy_(value)
        if merge:
            bucket.load()
            flat.mul_(merge).add_(here[0], alpha=1 - merge)
        else:
            flat.copy_(here[0])

    def _stretches(self, bucket: Bucket) -> list[tuple[int, int, float]]:
        """Returns the stretches of a bucket whose parameters have one learning rate: first element, end, and the rate.

        Padding between parameters is zero and belongs to either.
        """
        optimizer = self.training.optimizers[bucket.optimizer_index or 0]
        rate_of = {id(p): float(options["lr"]) for options in optimizer.param_groups for p in options["params"]}
        stretches: list[tuple[int, int, float]] = []
        for member in sorted(bucket.members, key=bucket.place_of):
            (begin, end), rate = bucket.place_of(member), rate_of[id(member.parameter)]
            if stretches and stretches[-1][2] == rate:
                begin = stretches.pop()[0]
            stretches.append((begin, end, rate))
        return stretches

    # --- a digest of the reference

    def _exchange_digests(self, buckets: Sequence[Bucket], group: BucketGroup) -> tuple[torch.Tensor, Work]:
        references = [bucket.state(REFERENCE) for bucket in buckets]
        own = digests_of(references, references[0].device)
        digests = own.new_empty(group.size * len(own))
        return digests, group.all_gather(digests, own, label="digest of the reference")

    def _compare(self, digests: torch.Tensor, fragment: int) -> None:
        table = digests.view(self.training.group.size, -1)
        odd = (table != table[0]).any(1).nonzero().flatten().tolist()
        if odd:
            raise InvalidArgument(
                f"rank {odd[0]} has another reference of fragment {fragment} than rank 0, so there is no one global "
                "model: resume all ranks from one checkpoint, and let nothing else write to what the algorithm keeps",
                rank=odd[0],
                ranks=tuple(odd),
            )

    # --- the global model

    def synchronize(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        for index, exchanges in enumerate(self._exchanges):
            if self.averages(index):
                continue
            mine = [bucket for bucket in buckets if bucket.optimizer_index == index]
            while exchanges:
                self._finish(index, exchanges.pop(0), 0.0)
            step, merged_at = self._num_local_steps[index], self._merged_at[index]
            # Without a local step since then another outer step would move the model by its momentum alone.
            changed = [fragment for fragment, merged in enumerate(merged_at) if merged != step]
            for exchange in [self._start(fragment, step, mine, group) for fragment in changed]:
                self._finish(index, exchange, 0.0)

    def detach(self) -> None:
        for exchange in (exchange for exchanges in self._exchanges for exchange in exchanges):
            self._arrive(exchange)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        self.detach()
        under_way = [
            [
                {
                    "fragment": exchange.fragment,
                    "due": exchange.due,
                    "values": {m.name: m.view.clone() for bucket in exchange.buckets for m in bucket.members},
                }
                for exchange in exchanges
            ]
            for exchanges in self._exchanges
        ]
        return {
            **super().state_dict(),
            "num_local_steps": list(self._num_local_steps),
            "merged_at": [list(merged) for merged in self._merged_at],
            "under_way": under_way,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detach()
        super().load_state_dict(state)
        self._num_local_steps, self._loading = list(state["num_local_steps"]), state["under_way"]
        self._merged_at = [list(merged) for merged in state["merged_at"]]

    def state_of_all(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        under_way = states[0]["under_way"]
        return {**states[0], "under_way": under_way if self.has_one_reference else [[] for _ in under_way]}


@dataclasses.dataclass(kw_only=True)
class StreamedSteps(OuterSteps):
    """The options of methods whose exchanges can be streamed, and whose states can be kept small.

    Args:
        sync_every: H, the local steps of each optimizer between two exchanges of a weight.
        fragments: P. The model is exchanged in so many parts, at different steps: layers in strides, and the rest.
        overlap_steps: tau. An exchange goes on for so many steps, below sync_every / fragments, before its result
            takes effect; without, the step waits for it.
        merge: alpha, with overlap: weights <- alpha weights + (1 - alpha) reference. 0 drops what the steps meanwhile
            have changed, 1 never takes the global value.
        warmup_steps: so many steps of every optimizer first average gradients.
        state_dtype: "float32" or "bfloat16", of the outer momentum and of what error feedback keeps.
        state_device: "cpu" keeps reference and outer momentum in host memory.
    """

    sync_every: int = 30
    fragments: int = 1
    overlap_steps: int = 0
    merge: float = 0.0
    warmup_steps: int = 0
    state_dtype: str = "float32"
    state_device: str = ""

    def make_schedule(self) -> Schedule:
        """Returns what the options say. Raises InvalidArgument."""
        return Schedule(self.sync_every, self.fragments, self.overlap_steps, self.merge, self.warmup_steps)

    def make_states(self, *names: str) -> dict[str, ParameterState]:
        """Describes the reference and the states ``names``, MOMENTUM or RESIDUAL. Raises InvalidArgument."""
        if self.state_dtype not in ("float32", "bfloat16"):
            raise InvalidArgument(f"state_dtype is {self.state_dtype!r}, expected 'float32' or 'bfloat16'")
        if self.state_device not in ("", "cpu"):
            raise InvalidArgument(f"state_device is {self.state_device!r}, expected '' (the parameters') or 'cpu'")
        on_host, dtype = self.state_device == "cpu", getattr(torch, self.state_dtype)
        own = not self.has_one_reference
        states = {REFERENCE: ParameterState(None, on_host=on_host, is_own=own)}
        if MOMENTUM in names:
            of_momentum = None if dtype is torch.float32 else dtype
            states[MOMENTUM] = ParameterState(of_momentum, on_host=on_host, is_own=own)
        if RESIDUAL in names:
            states[RESIDUAL] = ParameterState(dtype, is_scaled=True)
        return states


def check_range(name: str, value: float, least: float, below: float, is_least_allowed: bool = True) -> None:
    """Raises InvalidArgument unless ``value`` is from ``least`` to ``below``, which is too much itself."""
    if not (least <= value if is_least_allowed else least < value) or not value < below:
        start = f"{least:g} or more" if is_least_allowed else f"a number above {least:g}"
        end = "" if below == math.inf else f", and below {below:g}"
        raise InvalidArgument(f"{name} is {value}, expected {start}{end}")


def _take_part(exchange: _Exchange, aggregate: Aggregate) -> None:
    with contextlib.suppress(BaguaError):  # a failure of the group is raised by what it ends
        exchange.wait(aggregate)


_NUMBERED = re.compile(r"^(.*?\.)?(\d+)(?:\.|$)")


def fragments_of(names: Sequence[str], sizes: Sequence[int], num: int) -> list[int]:
    """Divides a model into ``num`` fragments; returns that of each parameter.

    Layers are the modules that stand in a list. As in Streaming DiLoCo they are dealt out in strides, and fragment 0 is
    what is no layer, such as embedding, head and norms. Where there are too few layers for that, fragments are
    stretches of about equal size.

    Args:
        names: of the parameters, in the order of their registration.
        sizes: their bytes.

    Raises:
        InvalidArgument: there are fewer parameters than fragments.

    Example:
        >>> fragments_of(["embed", "layers.0.w", "layers.0.b", "layers.1.w", "layers.2.w", "head"], [1] * 6, 3)
        [0, 1, 1, 2, 1, 0]
        >>> fragments_of(["a", "b", "c", "d"], [4, 1, 1, 2], 2)
        [0, 1, 1, 1]
    """
    if num > len(names):
        raise InvalidArgument(f"fragments is {num}, but the model has {len(names)} parameters; take fewer")
    if num == 1:
        return [0] * len(names)
    found = [_NUMBERED.match(name) for name in names]
    layers = {match[0]: None for match in found if match is not None}
    number = {layer: index for index, layer in enumerate(layers)}
    first = int(None in found)  # fragment 0 is for the rest, if there is one
    if len(layers) >= num - first:
        return [0 if match is None else first + number[match[0]] % (num - first) for match in found]
    total, begin, fragments = sum(sizes), 0, []
    for size in sizes:
        fragments.append(min(num - 1, (2 * begin + size) * num // (2 * total)) if total else 0)
        begin += size
    return fragments
