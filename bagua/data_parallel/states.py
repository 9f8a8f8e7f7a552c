"""The states of parameters that an algorithm remembers, kept by the library: error feedback above all.

Beside the data path: policy -> **state** -> the operation that reads and renews it. Each value exists twice: the
committed one, and the one that the backward under way writes. At the end of a backward whose results are finite the
second replaces the first; otherwise nothing changes. On a device that choice is made there, and the host does not wait.

Error feedback adds what the codes of one step leave out to what the next step encodes. There are two residuals, as in
the paper (C_LP_S, arXiv 2107.01499; arXiv 1901.09847): of what a rank contributes, a state of the shape of the
gradients, and of the stripe of the result that the rank encodes for all others. Invariant, but for float rounding: what
was sent + residual = what was to be sent, added up over all steps. Residuals have the scale of the gradients as they
come and are multiplied when a ``bagua.amp.GradScaler`` changes it.

Values of the shape of the gradients lie side by side as these do in their bucket. When buckets are laid out anew, or
loaded from a checkpoint, values wait parameter by parameter until their bucket first asks for them.
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
from bagua.distributed.tensors import Residuals, local_tensor
from bagua.errors import InvalidArgument

Key = tuple[str, int]  # the name of a state, and the index of a bucket or of a parameter
Stripe = tuple[int, int]  # first element and number of those that this rank encodes for all others
FLATS, STRIPES, SHAPED = "flats", "stripes", "shaped"


class ParameterStates:
    """The states of one model's parameters on this rank, as ``Algorithm.parameter_state`` describes them.

    Args:
        described: the states by name.
        group: the ranks that train together.
        is_direct: True where weights are exchanged: values are written at any time, and each exists once.
    """

    def __init__(self, described: Mapping[str, ParameterState], group: ProcessGroup, is_direct: bool = False) -> None:
        self._described, self._group, self._is_direct = dict(described), group, is_direct
        for name, one in self._described.items():
            if not isinstance(one, ParameterState):
                raise InvalidArgument(f"parameter_state() describes {name!r} by {one!r}, expected a ParameterState")
        self._buckets: tuple[Bucket, ...] = ()
        self._stripe_of: dict[Key, Stripe] = {}  # by bucket, since it was first asked for in this layout
        # Committed values, and those of the backward under way. By kind: FLATS (by bucket, of the shape of the
        # gradients), STRIPES (by bucket, of the stripe that this rank encodes), SHAPED (by parameter, of other shapes).
        self._values: dict[str, dict[Key, torch.Tensor]] = {FLATS: {}, STRIPES: {}, SHAPED: {}}
        self._next: dict[str, dict[Key, torch.Tensor]] = {FLATS: {}, STRIPES: {}, SHAPED: {}}
        # Committed values that wait for their bucket: by parameter, its part of a flat and of all owners' stripes.
        self._parts: dict[Key, torch.Tensor] = {}
        self._owners: dict[Key, torch.Tensor] = {}
        # Stripes of a checkpoint until they are shared: name, bucket, first element, values.
        self._stripes_to_share: list[tuple[str, int, int, torch.Tensor]] = []
        self._renewed: set[tuple[str, Key]] = set()  # what the backward under way has asked for
        self._is_in_backward = False

    @property
    def are_described(self) -> bool:
        """True if the algorithm remembers anything."""
        return bool(self._described)

    def multiply(self, ratio: float | torch.Tensor) -> None:
        """Rescales what counts in the unit of gradients, which are to be ``ratio`` times as large from now on."""
        for values in (*self._values.values(), self._parts, self._owners) if not self._is_direct else ():
            for (name, _), value in values.items():
                if self._described[name].is_scaled:
                    value.copy_(multiplied(value, ratio))

    # --- for algorithms, through their buckets

    def writable(self, name: str, bucket: Bucket, member: Member | None) -> torch.Tensor:
        """See ``Bucket.state``."""
        described = self._look_up(name, f"bucket.state({name!r})")
        if described.shape is not None and member is None:
            raise InvalidArgument(f"bucket.state({name!r}) has a shape of its own for each parameter; pass the member")
        if described.shape is None:
            kind, key = FLATS, (name, bucket.index)
            value = self._flat(name, bucket)
        else:
            kind, key = SHAPED, (name, member.index)
            value = self._shaped(name, member)
        into = value if self._is_direct else self._successor(kind, key, value)
        if (kind, key) not in self._renewed and not self._is_direct:
            into.copy_(value)
            self._renewed.add((kind, key))
        if described.shape is not None or member is None:
            return into
        begin, _ = bucket.place_of(member)
        return into.as_strided(member.values.shape, member.values.stride(), begin)

    def residuals(self, name: str, bucket: Bucket, codec: Any, hierarchical: bool) -> Residuals:
        """Returns what the all_reduce of ``bucket`` under ``codec`` adds, and where it writes what it leaves out.

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
        flat = self._flat(name, bucket, is_empty=self._encoder(hierarchical) is None)
        pairs = []
        for kind, value in ((FLATS, flat), (STRIPES, self._owned(name, bucket, stripe))):
            following = value if self._is_direct else self._successor(kind, key, value)
            if self._is_direct and value.numel():
                bucket.zero_padding(value, stripe[0] if kind == STRIPES else 0)  # as ``end_backward`` does
            # A second all_reduce of the bucket in one backward continues from what the first one has left.
            pairs += [following if (kind, key) in self._renewed else value, following]
            if not self._is_direct:
                self._renewed.add((kind, key))
        return Residuals(*pairs)

    def _look_up(self, name: str, what: str) -> ParameterState:
        if name not in self._described:
            raise InvalidArgument(
                f"{what}: the algorithm's parameter_state() describes "
                f"{', '.join(map(repr, self._described)) or 'nothing'}"
            )
        if not (self._is_in_backward or self._is_direct):
            raise InvalidArgument(f"{what} is for communicate: what is written elsewhere would be forgotten")
        return self._described[name]

    # --- from the reducer

    def begin_backward(self) -> None:
        """A backward begins that exchanges gradients; what one that raised has written is forgotten."""
        self._renewed.clear()
        self._is_in_backward = True

    def end_backward(self, is_finite: bool | torch.Tensor) -> None:
        """Commits what the backward has written if the results of all buckets are finite.

        Args:
            is_finite: a bool; on a device a tensor there, which the host does not read.
        """
        for kind, key in self._renewed if is_finite is not False else ():
            values, following = self._values[kind], self._next[kind]
            if kind != SHAPED:
                # Between gradients nothing is sent: what a codec leaves there would widen its blocks step by step.
                first = self._stripe_of[key][0] if kind == STRIPES else 0
                self._buckets[key[1]].zero_padding(following[key], first)
                beta = self._described[key[0]].moving_average
                if beta is not None:
                    following[key].mul_(1 - beta).add_(values[key], alpha=beta)
            if isinstance(is_finite, torch.Tensor):
                torch.where(is_finite, following[key], values[key], out=values[key])
            else:
                values[key], following[key] = following[key], values[key]
        self._renewed.clear()
        self._is_in_backward = False

    def leave_unused(self, indices: Iterable[int]) -> None:
        """Drops what was exchanged for parameters that no rank has used. Called before ``end_backward``."""
        wanted = set(indices)
        for kind, key in self._renewed:
            into, source = self._next[kind][key], self._values[kind][key]
            if kind == SHAPED:
                if key[1] in wanted:
                    into.copy_(source)
                continue
            bucket = self._buckets[key[1]]
            first = self._stripe_of[key][0] if kind == STRIPES else 0
            for member in (member for member in bucket.members if member.index in wanted):
                begin, end = bucket.place_of(member)
                begin, end = max(begin - first, 0), min(max(end - first, 0), into.numel())
                if begin < end:
                    into[begin:end] = source[begin:end]

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Takes over a new layout; collective."""
        self._gather_owners()
        for (name, index), flat in self._values[FLATS].items():
            bucket = self._buckets[index]
            for member in bucket.members if flat.numel() else ():
                begin, end = bucket.place_of(member)
                self._parts[name, member.index] = flat[begin:end]
        self._values[FLATS], self._next = {}, {FLATS: {}, STRIPES: {}, SHAPED: {}}
        self._renewed.clear()
        self._buckets, self._stripe_of = tuple(buckets), {}
        for bucket in buckets:
            bucket.remember_in(self)

    def _gather_owners(self) -> None:
        """Gives every rank what all owners have: in another layout each rank owns other elements."""
        for bucket in self._buckets:
            for name in self._described:
                stripe = self._values[STRIPES].pop((name, bucket.index), None)
                if stripe is not None:
                    self._share_stripe(name, bucket, self._stripe_of[name, bucket.index][0], stripe)

    def share_loaded_stripes(self) -> None:
        """Gives every rank what all owners have in a checkpoint, once all ranks have accepted theirs; collective."""
        stripes, self._stripes_to_share = self._stripes_to_share, []
        for name, index, first, stripe in stripes:
            bucket = self._buckets[index]
            self._share_stripe(name, bucket, first, stripe.to(bucket.device))

    def _share_stripe(self, name: str, bucket: Bucket, first: int, stripe: torch.Tensor) -> None:
        whole = torch.zeros(bucket.numel, dtype=stripe.dtype, device=bucket.device)
        whole[first : first + stripe.numel()] = stripe
        _leave_to_current_stream(stripe)
        self._group.all_reduce(whole, ReduceOp.SUM, label="residuals", blocking=True).wait()
        for member in bucket.members:
            begin, end = bucket.place_of(member)
            self._owners[name, member.index] = whole[begin:end].clone()

    # --- checkpoints

    @staticmethod
    def stripes_in(state: Mapping[str, Any]) -> str:
        """Describes the stripes of a state, which all ranks exchange when it is loaded."""
        stripes = {name: saved["stripes"] for name, saved in state.get("states", {}).items()}
        return repr({name: [(of, numel) for of, (_, numel, _) in of_name.items()] for name, of_name in stripes.items()})

    def state_dict(self) -> dict[str, Any]:
        """Returns the committed values, by name and parameter; no communication."""
        if not self._described:
            return {}
        states: dict[str, Any] = {}
        for name, described in self._described.items():
            # Formats of checkpoints make strings of other keys, so those of stripes are strings.
            states[name] = saved = {"dtype": str(described.dtype), "parameters": {}, "stripes": {}, "owners": {}}
            for bucket in self._buckets:
                key, flat = (name, bucket.index), self._values[FLATS].get((name, bucket.index))
                for member in bucket.members:
                    of_member = (name, member.index)
                    begin, end = bucket.place_of(member)
                    value = self._values[SHAPED].get(of_member, self._parts.get(of_member))
                    if value is None and flat is not None and flat.numel():
                        value = flat[begin:end]
                    if value is not None:
                        saved["parameters"][member.name] = value.clone()
                    if of_member in self._owners:
                        saved["owners"][member.name] = self._owners[of_member].clone()
                if key in self._values[STRIPES]:
                    stripe = self._values[STRIPES][key].clone()
                    saved["stripes"][str(bucket.index)] = (self._stripe_of[key][0], bucket.numel, stripe)
            saved["num_values"] = _num_values(saved)
        return {"place": writer_of(self._group), "states": states}

    def state_of_all(self, states: Sequence[Mapping[str, Any]], num_encoders: int, averages: bool) -> dict[str, Any]:
        """Returns this rank's ``state_dict`` in the place of those of all ranks of a checkpoint.

        What ranks contribute counts in the result as their sum, or as their mean: it is shared out among those that
        encode now. Owners' residuals count as they are, whoever owns them.

        Args:
            states: of all ranks of another number, by rank.
            num_encoders: the ranks that encode here.
            averages: the result is a mean over the ranks.
        """
        if any(state.get("states", {}).keys() != self._described.keys() for state in states):
            return dict(states[0])  # which load_state_dict refuses, and says why
        share = (self._group.size / len(states) if averages else 1.0) / num_encoders
        merged: dict[str, Any] = {}
        for name, described in self._described.items():
            saved = [state["states"][name] for state in states]
            parameters = dict(saved[0]["parameters"])
            if described.is_scaled or described.is_own:
                factor = share if described.is_scaled else 1 / len(states)
                held: dict[str, list[torch.Tensor]] = {}
                for of_rank in saved:
                    for parameter, value in of_rank["parameters"].items():
                        held.setdefault(parameter, []).append(value.to(torch.promote_types(value.dtype, torch.float32)))
                dtypes = {key: value.dtype for of_rank in saved for key, value in of_rank["parameters"].items()}
                parameters = {key: (sum(values) * factor).to(dtypes[key]) for key, values in held.items()}
            stripes = {}
            for index, (_, numel, stripe) in saved[0]["stripes"].items():
                whole = torch.zeros(numel, dtype=stripe.dtype, device="cpu")
                for of_rank in saved:
                    begin, _, part = of_rank["stripes"][index]
                    whole[begin : begin + part.numel()] = part
                stripes[index] = (0, numel, whole if self._group.rank == 0 else whole[:0])
            merged[name] = one = {
                "dtype": saved[0]["dtype"],
                "parameters": parameters,
                "stripes": stripes,
                "owners": saved[0]["owners"],
            }
            one["num_values"] = _num_values(one)
        return {"place": writer_of(self._group), "states": merged} if merged else {}

    def load_state_dict(self, state: Mapping[str, Any], algorithm_name: str, buckets: Sequence[Bucket]) -> None:
        """Restores what ``state_dict`` returned on this rank; ``lay_out`` of ``buckets``, as it had them, follows.

        Raises:
            InvalidArgument: it is of other options, parameters, or another number of ranks.
        """
        theirs = {name: saved["dtype"] for name, saved in state.get("states", {}).items()}
        ours = {name: str(described.dtype) for name, described in self._described.items()}
        if theirs != ours:
            raise InvalidArgument(
                f"the checkpoint has {_listed(theirs)} of each parameter, the model runs algorithm {algorithm_name!r} "
                f"with {_listed(ours)}; wrap it with the options of the checkpoint (error_feedback, state_dtype)"
            )
        if not ours:
            return
        check_writer(state["place"], self._group, "what this rank remembers of each parameter")
        members = {member.name: member for bucket in buckets for member in bucket.members}
        for name, saved in state["states"].items():
            if _num_values(saved) != saved["num_values"]:
                raise InvalidArgument(
                    f"the checkpoint has {_num_values(saved)} of the {saved['num_values']} tensors of {name!r}. "
                    "torch.distributed.checkpoint fills in the tensors of the state that it is given, and that of a "
                    "model before its first step has none: keep model.bagua.state_dict() by torch.save, a file per rank"
                )
            self._load_parameters(name, saved, members)
            for of_bucket, (first, bucket_numel, stripe) in saved["stripes"].items():
                index = int(of_bucket)
                here = buckets[index].numel if index < len(buckets) else None
                if here != bucket_numel:
                    raise InvalidArgument(
                        f"bucket {index} has {bucket_numel} elements in the checkpoint and {here} here; load it with "
                        "the same model and bucket_bytes"
                    )
                self._stripes_to_share.append((name, index, first, stripe))

    def _load_parameters(self, name: str, saved: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        shape = self._described[name].shape
        for part, into in (("parameters", self._parts), ("owners", self._owners)):
            for of, value in saved[part].items():
                member = members.get(of)
                wanted = None if member is None else member.values.numel()
                if member is not None and shape is not None:
                    wanted = torch.Size(shape(local_tensor(member.parameter))).numel()
                if value.numel() != wanted:
                    raise InvalidArgument(
                        f"{name!r} of {of!r} has {value.numel()} elements in the checkpoint and {wanted} here; load it "
                        "with the same model and the same options"
                    )
                device = torch.device("cpu") if self._described[name].on_host else member.view.device
                if shape is not None:
                    self._values[SHAPED][name, member.index] = value.to(device, copy=True)
                else:
                    into[name, member.index] = value.reshape(-1).to(device, copy=True)

    # --- one value

    def _encoder(self, hierarchical: bool) -> int | None:
        """Returns this rank's number among those that encode; None: it does not."""
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

    def _successor(self, kind: str, key: Key, value: torch.Tensor) -> torch.Tensor:
        if key not in self._next[kind]:
            self._next[kind][key] = torch.zeros_like(value)
        return self._next[kind][key]

    def _flat(self, name: str, bucket: Bucket, is_empty: bool = False) -> torch.Tensor:
        key, flats = (name, bucket.index), self._values[FLATS]
        if key not in flats:
            dtype, device = self._kind_of(name, bucket)
            flats[key] = torch.zeros(0 if is_empty else bucket.numel, dtype=dtype, device=device)
            for member in bucket.members:
                part = self._parts.pop((name, member.index), None)
                if part is not None and not is_empty:
                    begin, end = bucket.place_of(member)
                    flats[key][begin:end] = part
                    _leave_to_current_stream(part)
        return flats[key]

    def _shaped(self, name: str, member: Member) -> torch.Tensor:
        key, shaped = (name, member.index), self._values[SHAPED]
        if key not in shaped:
            described = self._described[name]
            shape = described.shape(local_tensor(member.parameter))
            shaped[key] = torch.zeros(shape, dtype=described.dtype, device=member.view.device)
        return shaped[key]

    def _kind_of(self, name: str, bucket: Bucket) -> tuple[torch.dtype, torch.device]:
        described = self._described[name]
        dtype = described.dtype or torch.promote_types(bucket.dtype, torch.float32)
        return dtype, torch.device("cpu") if described.on_host else bucket.device

    def _owned(self, name: str, bucket: Bucket, stripe: Stripe) -> torch.Tensor:
        key, (first, numel), stripes = (name, bucket.index), stripe, self._values[STRIPES]
        if key in stripes:
            return stripes[key]
        owned = stripes[key] = torch.zeros(numel, dtype=self._described[name].dtype, device=bucket.device)
        for member in bucket.members:
            part = self._owners.pop((name, member.index), None)
            if part is None:
                continue
            begin, end = bucket.place_of(member)
            low, high = max(begin, first), min(end, first + numel)
            if low < high:
                owned[low - first : high - first] = part[low - begin : high - begin]
                _leave_to_current_stream(part)
        return owned


def _leave_to_current_stream(value: torch.Tensor) -> None:
    """Keeps the memory of ``value``, which is read and dropped here; its backward may have used another stream."""
    if not value.is_cpu:
        keep_for_current_stream(value)


def _num_values(saved: Mapping[str, Any]) -> int:
    return sum(len(saved[part]) for part in ("parameters", "stripes", "owners"))


def _listed(states: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} in {dtype.removeprefix('torch.')}" for name, dtype in states.items()) or "no state"
