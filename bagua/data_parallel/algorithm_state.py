"""What an algorithm remembers of parameters from step to step, kept by the library: error feedback above all.

Beside the data path: policy -> **state** -> the operation that reads and renews it. Each value is kept twice: the one
that the last optimizer step left, and the one of the step under way, which takes its place when an optimizer steps and
is forgotten when a gradient is NaN or Inf, so that a step that is skipped changes nothing.

Error feedback: what the codes of one step leave out is added to what the next step encodes. Two residuals, as the paper
has them (C_LP_S, arXiv 2107.01499; arXiv 1901.09847): of what a rank contributes, which is a state of the shape of the
gradients, and of the stripe of the result that it encodes for everybody. Invariant, but for float rounding: what was
sent + residual = what was to be sent, added up over all steps. Residuals have the scale of the gradients as they come
and are multiplied when a GradScaler changes it.

Values of the shape of the gradients lie side by side as these do in their bucket. When buckets are laid out anew, or
from a checkpoint, they wait parameter by parameter until their bucket is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua import _C
from bagua.algorithms import ParameterState
from bagua.buckets import Bucket, Member
from bagua.distributed.arguments import ReduceOp
from bagua.distributed.checkpoints import check_writer, writer_of
from bagua.distributed.devices import keep_for_current_stream, multiplied
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.tensors import Residuals
from bagua.errors import InvalidArgument

Key = tuple[str, int]  # the name of a state, and a bucket's or a parameter's index
Stripe = tuple[int, int]  # first element and number of what this rank encodes for everybody


class _Side:
    """All values as they are after one optimizer step.

    Attributes:
        flats: by bucket: of the shape of the gradients.
        stripes: by bucket: of the stripe of the result that this rank encodes.
        shaped: by parameter: of another shape.
        parts: by parameter: what belongs into ``flats``, waiting.
        whole_parts: by parameter: all owners' values, of which this rank's belong into ``stripes``, waiting.
        loaded: by bucket: what belongs into ``stripes`` if they are still the same, waiting.
    """

    def __init__(self) -> None:
        self.flats: dict[Key, torch.Tensor] = {}
        self.stripes: dict[Key, torch.Tensor] = {}
        self.shaped: dict[Key, torch.Tensor] = {}
        self.parts: dict[Key, torch.Tensor] = {}
        self.whole_parts: dict[Key, torch.Tensor] = {}
        self.loaded: dict[Key, tuple[Stripe, torch.Tensor]] = {}


class ParameterStates:
    """The states of one model's parameters on this rank, as ``Algorithm.parameter_state`` describes them.

    Args:
        described: the states by name.
        group: the ranks that train together.
    """

    def __init__(self, described: Mapping[str, ParameterState], group: ProcessGroup) -> None:
        self._described, self._group = dict(described), group
        for name, one in self._described.items():
            if not isinstance(one, ParameterState):
                raise InvalidArgument(f"parameter_state() describes {name!r} by {one!r}, expected a ParameterState")
        self._buckets: tuple[Bucket, ...] = ()
        self._stripe_of: dict[Key, Stripe] = {}  # by bucket, since it was first asked for in this layout
        self._kept, self._next = _Side(), _Side()
        self._loading: Mapping[str, Any] = {}  # until the layout of the checkpoint is there
        self._is_under_way = False  # a backward has renewed them and no optimizer step has followed
        self._renewed: set[tuple[str, Key]] = set()  # since the last optimizer step: attribute of a side, and key
        self._renewed_now: set[tuple[str, Key]] = set()  # in this backward
        self._committed: set[tuple[str, Key]] = set()  # by the last optimizer step, until the next backward
        self._is_in_backward = False
        # Before the backward under way, where it is not the first one since the step.
        self._before: dict[tuple[str, Key], torch.Tensor] = {}

    def multiply(self, ratio: float | torch.Tensor) -> None:
        """All that counts in the unit of gradients, which are to be ``ratio`` times as large from now on."""
        for side in (self._kept, self._next) if self._is_under_way else (self._kept,):
            waiting = {key: value for key, (_, value) in side.loaded.items()}
            for values in (side.flats, side.stripes, side.shaped, side.parts, side.whole_parts, waiting):
                for (name, _), value in values.items():
                    if not self._described[name].is_scaled:
                        continue
                    if isinstance(ratio, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                        value.copy_(multiplied(value, ratio))
                    else:
                        value.mul_(ratio)

    @property
    def are_scaled(self) -> bool:
        """Whether any of them counts in the unit of gradients."""
        return any(one.is_scaled for one in self._described.values())

    @property
    def are_described(self) -> bool:
        """Whether the algorithm remembers anything."""
        return bool(self._described)

    # --- for algorithms, through their buckets

    def writable(self, name: str, bucket: Bucket, member: Member | None) -> torch.Tensor:
        """See ``Bucket.state``."""
        described = self._look_up(name, f"bucket.state({name!r})")
        if described.shape is not None and member is None:
            raise InvalidArgument(f"bucket.state({name!r}) has a shape of its own for each parameter; pass the member")
        kind, key = ("flats", (name, bucket.index)) if described.shape is None else ("shaped", (name, member.index))

        def value(side: _Side) -> torch.Tensor:
            return self._flat(side, name, bucket) if described.shape is None else self._shaped(side, name, member)

        into = value(self._next)
        if (kind, key) not in self._renewed_now:
            kept = value(self._kept)  # there in any case, to be swapped with ``into``
            if (kind, key) in self._renewed:
                self._before[kind, key] = into.clone()
            else:
                into.copy_(kept)
            self._renewed_now.add((kind, key))
        if described.shape is not None or member is None:
            return into
        begin, _ = bucket.place_of(member)
        return into.as_strided(member.values.shape, member.values.stride(), begin)

    def residuals(self, name: str, bucket: Bucket, codec: Any, hierarchical: bool) -> Residuals:
        """What the all_reduce of ``bucket`` under ``codec`` adds, and where it writes what it leaves out.

        Raises:
            InvalidArgument: ``name`` cannot hold it.
        """
        described = self._look_up(name, f"feedback={name!r}")
        is_alike = described.shape is None and described.dtype in (torch.float32, torch.bfloat16)
        if not (is_alike and described.is_scaled):
            raise InvalidArgument(
                f"feedback={name!r} is to be a state of the shape of the gradients, in float32 or bfloat16, with "
                f"is_scaled=True; parameter_state() describes it as {described}"
            )
        key = (name, bucket.index)
        stripe = self._stripe(name, bucket, getattr(codec, "spec", codec), hierarchical)
        pairs = []
        for kind in ("flats", "stripes"):
            values = []
            for side in (self._kept, self._next):
                if kind == "stripes":
                    values.append(self._owner(side, name, bucket, stripe))
                else:
                    values.append(self._flat(side, name, bucket, is_empty=self._encoder(hierarchical) is None))
            kept, following = values
            if (kind, key) in self._renewed or (kind, key) in self._renewed_now:
                if (kind, key) not in self._renewed_now:
                    self._before[kind, key] = following.clone()
                kept = following
            self._renewed_now.add((kind, key))
            pairs += [kept, following]
        return Residuals(*pairs)

    def _look_up(self, name: str, what: str) -> ParameterState:
        if name not in self._described:
            raise InvalidArgument(
                f"{what}: the algorithm's parameter_state() describes "
                f"{', '.join(map(repr, self._described)) or 'nothing'}"
            )
        if not self._is_in_backward:
            raise InvalidArgument(f"{what} is for communicate: what is written elsewhere would be forgotten")
        return self._described[name]

    # --- from the training step

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Takes over a new layout; collective."""
        self._forget_unfinished()
        if not self._is_under_way:
            self._next = _Side()
        for side in (self._kept, self._next):
            self._gather_owners(side)
            for (name, index), flat in side.flats.items():
                bucket = self._buckets[index]
                for member in bucket.members if flat.numel() else ():
                    begin, end = bucket.place_of(member)
                    side.parts[name, member.index] = flat[begin:end]
            side.flats = {}
        if self._is_under_way:  # all values of such a name, as each bucket is exchanged in each backward
            wanted = {(kind, name) for kind, (name, _) in self._renewed}
            self._renewed = {
                (kind, (name, bucket.index)) for kind, name in wanted if kind != "shaped" for bucket in buckets
            } | {(kind, key) for kind, key in self._renewed if kind == "shaped"}
        self._buckets, self._stripe_of = tuple(buckets), {}
        for bucket in buckets:
            bucket.remember_in(self)
        loading, self._loading = self._loading, {}
        self._load(loading, buckets)

    def _gather_owners(self, side: _Side) -> None:
        """Every rank gets what all owners have: in another layout other elements will be its own."""
        for bucket in self._buckets:
            for name in self._described:
                key = (name, bucket.index)
                if key in side.loaded:
                    (first, numel), stripe = side.loaded.pop(key)
                elif key in side.stripes:
                    (first, numel), stripe = self._stripe_of[key], side.stripes.pop(key)
                else:
                    continue
                whole = torch.zeros(bucket.numel, dtype=stripe.dtype, device=bucket.device)
                whole[first : first + numel] = stripe
                _leave_to_current_stream(stripe)
                self._group.all_reduce(whole, ReduceOp.SUM, label="residuals", blocking=True).wait()
                for member in bucket.members:
                    begin, end = bucket.place_of(member)
                    side.whole_parts[name, member.index] = whole[begin:end].clone()

    def begin_backward(self) -> None:
        """A backward begins that exchanges gradients."""
        self._forget_unfinished()
        self._committed = set()
        self._is_in_backward = True

    def _forget_unfinished(self) -> None:
        """What has been written since a backward last ended, by one that raised, is forgotten."""
        for (kind, key), value in self._before.items():
            getattr(self._next, kind)[key].copy_(value)
        self._renewed_now, self._before = set(), {}

    def end_backward(self, is_finite: bool) -> None:
        """All buckets are exchanged; where one holds NaN or Inf the step will be skipped, so all is as before it."""
        for kind, key in self._renewed_now if is_finite else ():
            if kind != "shaped":
                # Between gradients nothing is sent: what a codec leaves there would widen its blocks from step to step.
                first = self._stripe_of[key][0] if kind == "stripes" else 0
                self._buckets[key[1]].zero_padding(getattr(self._next, kind)[key], first)
        self._renewed = self._renewed | self._renewed_now if is_finite else set()
        self._is_under_way = bool(self._renewed)
        self._renewed_now, self._before, self._is_in_backward = set(), {}, False

    def leave_unused(self, indices: Iterable[int]) -> None:
        """No rank has used these parameters: what was exchanged for them is dropped, and their states stay as before.

        Called before ``end_backward``.
        """
        wanted = set(indices)
        for kind, key in self._renewed_now:
            into = getattr(self._next, kind)[key]
            source = self._before[kind, key] if (kind, key) in self._before else getattr(self._kept, kind)[key]
            if kind == "shaped":
                if key[1] in wanted:
                    into.copy_(source)
                continue
            bucket = self._buckets[key[1]]
            first = self._stripe_of[key][0] if kind == "stripes" else 0
            for member in (member for member in bucket.members if member.index in wanted):
                begin, end = bucket.place_of(member)
                begin, end = max(begin - first, 0), min(max(end - first, 0), into.numel())
                if begin < end:
                    into[begin:end] = source[begin:end]

    def commit(self) -> None:
        """An optimizer steps with the gradients that were exchanged."""
        if not self._is_under_way:
            return
        self._swap(self._renewed)
        for kind in ("parts", "whole_parts"):  # of a layout that came after the backward, not asked for since
            getattr(self._kept, kind).update(getattr(self._next, kind))
            getattr(self._next, kind).clear()
        self._committed, self._renewed, self._is_under_way = self._renewed, set(), False

    def _swap(self, values: Iterable[tuple[str, Key]]) -> None:
        for kind, key in values:
            kept, following = getattr(self._kept, kind), getattr(self._next, kind)
            if key in following and key in kept:
                kept[key], following[key] = following[key], kept[key]

    def undo_commit(self) -> None:
        """It has come out that the last step changed nothing; no backward and no layout has come since."""
        if self._committed:
            self._swap(self._committed)
            self._renewed, self._committed, self._is_under_way = self._committed, set(), True

    def forget_renewed(self) -> None:
        """It has come out that ``end_backward`` should have been told that a bucket is not finite."""
        self._renewed, self._is_under_way = set(), False

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As the last optimizer step left them, by name and parameter; no communication."""
        if not self._described:
            return {}
        states: dict[str, Any] = {}
        kept = self._kept
        for name, described in self._described.items():
            states[name] = own = {"dtype": str(described.dtype), "parameters": {}, "stripes": {}, "owners": {}}
            for bucket in self._buckets:
                key, flat = (name, bucket.index), kept.flats.get((name, bucket.index))
                of_bucket = str(bucket.index)  # formats of checkpoints make strings of other keys
                for member in bucket.members:
                    of_member = (name, member.index)
                    begin, end = bucket.place_of(member)
                    value = kept.shaped.get(of_member, kept.parts.get(of_member))
                    if value is None and flat is not None and flat.numel():
                        value = flat[begin:end]
                    if value is not None:
                        own["parameters"][member.name] = value.clone()
                    if of_member in kept.whole_parts:
                        own["owners"][member.name] = kept.whole_parts[of_member].clone()
                if key in kept.stripes:
                    own["stripes"][of_bucket] = (*self._stripe_of[key], bucket.numel, kept.stripes[key].clone())
                elif key in kept.loaded:
                    (first, numel), stripe = kept.loaded[key]
                    own["stripes"][of_bucket] = (first, numel, bucket.numel, stripe.clone())
            own["num_values"] = _num_values(own)
        return {"place": writer_of(self._group), "states": states}

    def load_state_dict(self, state: Mapping[str, Any], algorithm_name: str) -> None:
        """Takes back what ``state_dict`` returned on this rank, before ``lay_out`` of the same layout.

        Raises:
            InvalidArgument: it is of other options, parameters, or another number of ranks.
        """
        theirs = {name: own["dtype"] for name, own in state.get("states", {}).items()}
        ours = {name: str(described.dtype) for name, described in self._described.items()}
        if theirs != ours:
            raise InvalidArgument(
                f"the checkpoint has {_told(theirs)} of each parameter, the model runs algorithm {algorithm_name!r} "
                f"with {_told(ours)}; wrap it with the options of the checkpoint (error_feedback, state_dtype)"
            )
        if not ours:
            return
        check_writer(state["place"], self._group, "what this rank remembers of each parameter")
        for name, own in state["states"].items():
            if _num_values(own) != own["num_values"]:
                raise InvalidArgument(
                    f"the checkpoint has {_num_values(own)} of the {own['num_values']} tensors that {name!r} consisted "
                    "of. torch.distributed.checkpoint fills in the tensors of the state that it is given, and in that "
                    "of a model before its first step are none: keep model.bagua.state_dict() by torch.save, a file "
                    "per rank"
                )
        self._loading = state["states"]

    def _load(self, loading: Mapping[str, Any], buckets: Sequence[Bucket]) -> None:
        members = {member.name: member for bucket in buckets for member in bucket.members}
        for name, own in loading.items():
            shape = self._described[name].shape
            for part, into in (("parameters", self._kept.parts), ("owners", self._kept.whole_parts)):
                for of, value in own[part].items():
                    member = members.get(of)
                    wanted = None if member is None else member.values.numel()
                    if member is not None and shape is not None:
                        wanted = torch.Size(shape(member.parameter)).numel()
                    if value.numel() != wanted:
                        raise InvalidArgument(
                            f"{name!r} of {of!r} has {value.numel()} elements in the checkpoint and {wanted} here; "
                            "load it with the same model and the same options"
                        )
                    if shape is not None:
                        self._kept.shaped[name, member.index] = value.to(member.view.device, copy=True)
                    else:
                        into[name, member.index] = value.reshape(-1).to(member.view.device, copy=True)
            for of_bucket, (first, numel, bucket_numel, value) in own["stripes"].items():
                index = int(of_bucket)
                here = buckets[index].numel if index < len(buckets) else None
                if here != bucket_numel:
                    raise InvalidArgument(
                        f"bucket {index} has {bucket_numel} elements in the checkpoint and {here} here; load it "
                        "with the same model and bucket_bytes"
                    )
                sent = buckets[index].declaration
                if sent.codec is not None:
                    _check_stripe((first, numel), self._stripe(name, buckets[index], sent.codec, sent.hierarchical))
                self._kept.loaded[name, index] = ((first, numel), value.to(buckets[index].device, copy=True))

    # --- one value

    def _encoder(self, hierarchical: bool) -> int | None:
        """Which of those that encode this rank is; None: it does not."""
        encoders = self._group.nodes.leaders if hierarchical else range(self._group.size)
        return list(encoders).index(self._group.rank) if self._group.rank in encoders else None

    def _stripe(self, name: str, bucket: Bucket, codec: str, hierarchical: bool) -> Stripe:
        key = (name, bucket.index)
        if key not in self._stripe_of:
            encoder = self._encoder(hierarchical)
            num_encoders = len(self._group.nodes.leaders) if hierarchical else self._group.size
            self._stripe_of[key] = (0, 0)
            if encoder is not None:
                self._stripe_of[key] = tuple(_C.owned_stripe(bucket.numel, num_encoders, encoder, codec))
        return self._stripe_of[key]

    def _flat(self, side: _Side, name: str, bucket: Bucket, is_empty: bool = False) -> torch.Tensor:
        key = (name, bucket.index)
        if key not in side.flats:
            dtype = self._described[name].dtype
            flat = side.flats[key] = torch.zeros(0 if is_empty else bucket.numel, dtype=dtype, device=bucket.device)
            for member in bucket.members:
                part = side.parts.pop((name, member.index), None)
                if part is not None and not is_empty:
                    begin, end = bucket.place_of(member)
                    flat[begin:end] = part
                    _leave_to_current_stream(part)
        return side.flats[key]

    def _shaped(self, side: _Side, name: str, member: Member) -> torch.Tensor:
        key = (name, member.index)
        if key not in side.shaped:
            described = self._described[name]
            shape = described.shape(member.parameter)
            side.shaped[key] = torch.zeros(shape, dtype=described.dtype, device=member.view.device)
        return side.shaped[key]

    def _owner(self, side: _Side, name: str, bucket: Bucket, stripe: Stripe) -> torch.Tensor:
        key, (first, numel) = (name, bucket.index), stripe
        if key in side.stripes:
            return side.stripes[key]
        owned = side.stripes[key] = torch.zeros(numel, dtype=self._described[name].dtype, device=bucket.device)
        if key in side.loaded:
            loaded_stripe, value = side.loaded.pop(key)
            _check_stripe(loaded_stripe, stripe)
            owned.copy_(value)
            _leave_to_current_stream(value)
        for member in bucket.members:
            part = side.whole_parts.pop((name, member.index), None)
            if part is None:
                continue
            begin, end = bucket.place_of(member)
            low, high = max(begin, first), min(end, first + numel)
            if low < high:
                owned[low - first : high - first] = part[low - begin : high - begin]
                _leave_to_current_stream(part)
        return owned


def _leave_to_current_stream(value: torch.Tensor) -> None:
    """``value`` is read and dropped here; an earlier backward, which made it, may have been on another stream."""
    if not value.is_cpu:
        keep_for_current_stream(value)


def _check_stripe(loaded: Stripe, stripe: Stripe) -> None:
    if loaded != stripe:
        raise InvalidArgument(
            f"the checkpoint has what this rank encodes of a bucket as elements {loaded[0]} to {sum(loaded)}, here it "
            f"encodes {stripe[0]} to {sum(stripe)}; wrap the model with the codec of the checkpoint"
        )


def _num_values(own: Mapping[str, Any]) -> int:
    return sum(len(own[part]) for part in ("parameters", "stripes", "owners"))


def _told(states: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} in {dtype.removeprefix('torch.')}" for name, dtype in states.items()) or "no state"
