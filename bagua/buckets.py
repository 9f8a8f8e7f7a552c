"""The memory of what is exchanged, gradients or weights, and the buckets that travel as one message each.

Data path: gradient ready -> **bucket** -> scheduler -> algorithm -> engine.

Where gradients are exchanged they lie in the buckets for good. Weights are copied in before an exchange and out after
it. Invariants: one allocation, shared with the ranks of this host or on the parameters' device, holds all buckets. Its
size depends on the parameters alone, because the planner pads every tensor by itself, so a new plan re-slices the
same memory and costs none. A view has the shape and dtype of its parameter, and its strides where
the parameter is dense; complex numbers are pairs of real ones to all but that view. Padding is zero whenever a bucket
is sent.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua import _C, codecs
from bagua.distributed.devices import check_supported, common_device
from bagua.distributed.process_group import ProcessGroup, Work, dtype_code
from bagua.distributed.tensors import local_tensor
from bagua.errors import InvalidArgument

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024  # of the largest
SMALL_BUCKET_BYTES = 512 * 1024  # of the first and the last
ALIGN_BYTES = 64
# dtype, Algorithm.bucket_class, index of the optimizer, of the group, and of the fragment
Kind = tuple[torch.dtype, Hashable, int | None, int, int]
GRADIENT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)


class Member:
    """One parameter in a bucket. Every gradient passes by here, so what does not change is looked up once.

    Attributes:
        index: of the parameter.
        name: of the parameter.
        parameter: the parameter.
        view: the part of ``bucket.flat`` that is its gradient, or weight; dense. Of a DTensor this rank's part.
        grad: ``view`` as the parameter's ``.grad``: itself, or a DTensor of it.
        is_spread: True if the parameter is a DTensor.
        dtype: of ``view`` as it was made.
        values: ``view`` as the numbers of ``bucket.flat``, a tensor of its own; of complex ones ``[..., 2]``, as
            torch.view_as_real.
        num_bytes: size of ``view`` in bytes.
    """

    __slots__ = (
        "_address",
        "_device",
        "_is_complex",
        "_stride",
        "dtype",
        "grad",
        "index",
        "is_spread",
        "name",
        "num_bytes",
        "parameter",
        "values",
        "view",
    )

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
        self.index, self.name, self.parameter, self.view = index, name, parameter, view
        self.values, self._is_complex, self.num_bytes = as_real(view.detach()), view.is_complex(), view.nbytes
        self._address, self.dtype, self._stride = view.data_ptr(), view.dtype, view.stride()
        self._device = None if view.is_cpu else view.device
        self.grad = view
        self.is_spread = hasattr(parameter, "to_local")
        if self.is_spread:
            mesh, placements = parameter.device_mesh, parameter.placements
            kind: Any = type(parameter)  # torch.distributed.tensor is slow to import
            self.grad = kind.from_local(view, mesh, placements, shape=parameter.shape, stride=parameter.stride())

    def local_grad(self) -> torch.Tensor | None:
        """Returns this rank's part of the parameter's ``.grad``; collective over its mesh if it is a partial sum."""
        grad = self.parameter.grad
        if grad is self.grad or not self.is_spread:
            return self.view if grad is self.grad else grad
        with torch.no_grad():
            return None if grad is None else grad.redistribute(placements=self.parameter.placements).to_local()

    def is_in_bucket(self) -> bool:
        """Returns True if ``view`` is still there: ``model.to()`` gives gradients other memory inside their tensors."""
        return self.view.data_ptr() == self._address and (
            not self.is_spread or local_tensor(self.grad).data_ptr() == self._address
        )

    def is_alike(self, grad: torch.Tensor) -> bool:
        """Returns True if ``grad``, of the parameter's shape, lies in memory byte for byte as ``view`` does."""
        if type(grad) is not torch.Tensor and grad.data_ptr() == 0:
            return False  # a wrapper: what it stands for is torch's to copy
        if self._is_complex and grad.is_conj():
            return False
        is_here = grad.is_cpu if self._device is None else grad.device == self._device
        return is_here and grad.dtype is self.dtype and grad.stride() == self._stride and not grad.is_neg()

    def fill(self, grad: torch.Tensor, is_alike: bool) -> None:
        """view <- grad, past the caches where it ``is_alike``: what reads the bucket next is communication, later."""
        if is_alike and self._device is None:
            _C.copy_to_cold(self._address, grad.data_ptr(), self.num_bytes)
        else:
            self.view.copy_(grad)


class States(Protocol):
    """The states of parameters that an algorithm remembers: ``data_parallel/states.py``."""

    def writable(self, name: str, bucket: Bucket, member: Member | None) -> torch.Tensor: ...

    def residuals(self, name: str, bucket: Bucket, codec: Any, hierarchical: bool) -> Any: ...


class Bucket:
    """Gradients, or weights, of one dtype that lie side by side and are communicated as one message.

    Attributes:
        index: in the launch order, equal on all ranks.
        label: ``"bucket 3"``, the name in error messages and in the timeline.
        kind: what ``Algorithm.bucket_class`` returned for its parameters.
        optimizer_index: which optimizer steps all its parameters; None where gradients are exchanged.
        group_index: which ranks exchange it: 0 those of the model, n those of the n-th pattern of ``groups``.
        fragment: which part of the model it is of, where an algorithm exchanges parts at different times.
        declaration: what was sent for it last, a ``bagua.algorithms.Declaration``; empty before the first exchange.
        works: what was started for it in this backward.
        sent: in this backward, the Declarations of what was started for it so far.
        is_result: ``flat`` is what its one all_reduce leaves: the algorithm has not gone on behind it.
        is_read: in ``communicate``, whether ``flat`` or ``members`` have been asked for.
        before_read: called when they are asked for; None: nothing is.

    Example:
        >>> for bucket in model.bagua.buckets:
        ...     print(bucket.label, bucket.num_bytes, bucket.names, bucket.declaration)
        bucket 0 128 ('bias', 'weight') not sent yet
    """

    def __init__(
        self,
        index: int,
        kind: Hashable,
        optimizer_index: int | None,
        flat: torch.Tensor,
        members: Sequence[Member],
        gaps: Sequence[tuple[int, int]],
        group_index: int = 0,
        fragment: int = 0,
    ) -> None:
        self.index = index
        self.label = f"bucket {index}"
        self.kind = kind
        self.optimizer_index = optimizer_index
        self.group_index = group_index
        self.fragment = fragment
        self.declaration: Any = None  # set by the reducer
        self.works: list[Work] = []
        self.sent: list[Any] = []
        self.is_result = False
        self.is_read = False
        self.before_read: Callable[[], None] | None = None
        self._flat = flat
        self._members = tuple(members)
        self._gaps = gaps
        self._segments: list[tuple[int, torch.Tensor]] | None = None
        self._states: weakref.ref[States] | None = None  # they know the bucket

    @property
    def flat(self) -> torch.Tensor:
        """1-D tensor of ``numel`` elements in shared memory, or on the parameters' device; padding included."""
        if self.before_read is not None:
            self.before_read()
        return self._flat

    @property
    def members(self) -> tuple[Member, ...]:
        """Its parameters in the order in which they are expected to become ready."""
        if self.before_read is not None:
            self.before_read()
        return self._members

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all its gradients; of complex ones that of their parts."""
        return self._flat.dtype

    @property
    def device(self) -> torch.device:
        """The device of its gradients."""
        return self._flat.device

    @property
    def numel(self) -> int:
        """Number of elements of ``flat``, padding included."""
        return self._flat.numel()

    @property
    def num_bytes(self) -> int:
        """Size of ``flat`` in bytes."""
        return self._flat.nbytes

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(member.name for member in self._members)

    def zero_padding(self, flat: torch.Tensor | None = None, first: int = 0) -> None:
        """Clears the elements between gradients: a codec leaves its rounding there, and would widen later blocks.

        Args:
            flat: instead of the bucket's own, or a part of it.
            first: which element of the bucket that part begins with.
        """
        flat = self._flat if flat is None else flat
        for begin, end in self._gaps:
            begin, end = max(begin - first, 0), end - first
            if begin < min(end, flat.numel()):
                flat[begin:end].zero_()

    def load(self, tensors: Sequence[torch.Tensor] | None = None, flat: torch.Tensor | None = None) -> None:
        """flat <- the weights.

        Args:
            tensors: instead of the weights, one per member and of its shape.
            flat: instead of the bucket's own, of its size.
        """
        sources = [self._weight_of(member) for member in self.members] if tensors is None else tensors
        torch._foreach_copy_(self._views(flat), [local_tensor(source) for source in sources])
        self.zero_padding(flat)

    def _weight_of(self, member: Member) -> torch.Tensor:
        weight = local_tensor(member.parameter.detach())
        if weight.dtype is not member.dtype:  # _foreach_copy_ would round it
            raise InvalidArgument(
                f"the parameter {member.name!r} is {weight.dtype}, but was {member.dtype} when the model was "
                "wrapped; convert the model before with_bagua, or call it again"
            )
        return weight

    def weights(self) -> list[tuple[int, torch.Tensor]] | None:
        """Returns the weights as ``parts`` of a reduction, which copies them itself; they may not change meanwhile.

        None where one does not lie in memory as its view does: ``load`` then.
        """
        parts = []
        for member in self.members:
            weight = local_tensor(member.parameter.detach())
            if weight.shape != member.view.shape or not member.is_alike(weight):
                return None
            parts.append((self.place_of(member)[0], as_real(weight)))
        return parts

    @torch.no_grad()
    def store(self, tensors: Sequence[torch.Tensor] | None = None, flat: torch.Tensor | None = None) -> None:
        """The weights <- flat; arguments as for ``load``."""
        destinations = [member.parameter for member in self.members] if tensors is None else tensors
        torch._foreach_copy_([local_tensor(one) for one in destinations], self._views(flat))

    @torch.no_grad()
    def add_to_weights(self) -> None:
        """The weights += flat."""
        torch._foreach_add_([local_tensor(member.parameter) for member in self.members], self._views(None))

    def place_of(self, member: Member) -> tuple[int, int]:
        """The first element of ``member`` in ``flat``, and the one behind its last."""
        begin = member.values.storage_offset() - self._flat.storage_offset()
        return begin, begin + member.values.numel()

    def _views(self, flat: torch.Tensor | None) -> list[torch.Tensor]:
        if flat is None:
            return [member.view for member in self.members]
        return [_shaped(flat[slice(*self.place_of(m))], m.view) for m in self.members]

    # --- what an algorithm remembers

    def state(self, name: str, member: Member | None = None) -> torch.Tensor:
        """Returns the state ``name`` of ``Algorithm.parameter_state``, to be read and written.

        Of the shape of the gradients: a 1-D tensor as ``flat``, or with ``member`` its part, of the shape of
        ``member.values``, which is the gradient's where that is real.
        Of another shape: that of ``member``. In ``communicate`` it is what the last finite backward has left, and
        what is written counts if the results of this one are finite.
        """
        return self._states().writable(name, self, member)

    def residuals(self, name: str, codec: Any, hierarchical: bool) -> Any:
        """The Residuals under ``name`` for an all_reduce of the bucket."""
        return self._states().residuals(name, self, codec, hierarchical)

    def remember_in(self, states: States) -> None:
        """``states`` answer ``state`` and ``residuals`` from now on; not kept alive."""
        self._states = weakref.ref(states)

    # --- from the training step

    def begin(self, segments: list[tuple[int, torch.Tensor]] | None, before_read: Callable[[], None]) -> None:
        """Its communication begins.

        Args:
            segments: where the gradients are, if not all are in ``flat``: first element and tensor of every member.
            before_read: moves them there.
        """
        self.works, self.sent, self._segments = [], [], segments
        self.is_result = False
        self.is_read, self.before_read = False, before_read

    def take_segments(self) -> list[tuple[int, torch.Tensor]] | None:
        """Returns the gradients where autograd has put them, for an operation to read; None if they are in ``flat``."""
        segments, self._segments, self.before_read = self._segments, None, None
        return segments

    def is_memory(self, tensor: torch.Tensor) -> bool:
        """Returns True if it is ``flat``."""
        return tensor is self._flat

    def memory(self, with_gradients: bool) -> torch.Tensor:
        """``flat`` for an operation: its gradients, or memory for its result."""
        return self.flat if with_gradients else self._flat

    def is_finite(self) -> bool:
        """Returns True if it holds no NaN and no Inf, on the CPU; the same on all ranks where it is their result.

        A codec turns a block with NaN or Inf into NaN on all ranks, so one element of each block is looked at.
        """
        seen = self.works[0].is_result_finite if self.is_result else None
        if seen is not None and (seen is False or self.dtype != torch.float16):
            return seen
        return _C.all_finite(self._flat.data_ptr(), self.numel, dtype_code(self.dtype), self._stride())

    def finite_flag(self) -> torch.Tensor:
        """Returns ``is_finite`` on a device: a bool without dimensions there, for which nothing waits."""
        return self._flat[:: self._stride()].isfinite().all()

    def _stride(self) -> int:
        """Returns n where one element in n tells."""
        sent = self.declaration
        if sent.codec is None or not self.is_result or self.dtype == torch.float16:
            return 1  # float16 may overflow where it is decoded, in any element
        return codecs.get(sent.codec).block_numel

    def __repr__(self) -> str:
        return f"Bucket({self.label!r}, {self.dtype}, numel={self.numel}, names={list(self.names)})"


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raises InvalidArgument if the gradients of ``parameter`` cannot be reduced in this release."""
    check_supported(parameter.device, f"parameter {name!r}")
    dtypes = GRADIENT_DTYPES + _COMPLEX_DTYPES
    if parameter.dtype not in dtypes:
        raise InvalidArgument(
            f"parameter {name!r} has dtype {parameter.dtype}; gradients of {', '.join(map(str, dtypes))} can be reduced"
        )


def bucket_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's bucket: its own, or that of the parts of complex numbers."""
    return parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs; a view, unless the tensor is the conjugate of what is in memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class BucketStorage:
    """The memory of one model's exchange, sliced into buckets by a plan.

    Args:
        named_parameters: (name, parameter), each once, all of them fit for ``check_parameter`` and on one device.
        group: allocates the memory; every rank makes the same call.
        bucket_bytes: cap of a bucket, in bytes.
        small_bucket_bytes: what no cap goes below, the first bucket's and the last one's. Caps double after the first
            and halve towards the last: it leaves early, and little is left to send when backward ends. Where all
            weights are ready at once, ``bucket_bytes``: then all caps are alike, and messages as few as can be.
        bucket_class: ``Algorithm.bucket_class``; parameters of different classes share no bucket.
        optimizer_of: which optimizer steps a parameter, by its id; parameters of different ones share no bucket.
        group_of: which group exchanges a parameter, by its id, 0 by default; the same.
        fragment_of: ``Algorithm.fragments_of``, by the order of ``named_parameters``; the same.
        order: expected ready order as indices into ``named_parameters``; the default is last to first.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_bytes: int,
        small_bucket_bytes: int,
        bucket_class: Callable[[torch.nn.Parameter], Hashable],
        optimizer_of: Mapping[int, int] | None = None,
        group_of: Mapping[int, int] | None = None,
        fragment_of: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.buckets: tuple[Bucket, ...] = ()
        self.members: list[Member] = []  # by index
        self.order: list[int] = []
        self.bucket_of: list[int] = []  # by parameter
        self._group, self._caps_bytes = group, (small_bucket_bytes, bucket_bytes)
        optimizer_of, group_of = optimizer_of or {}, group_of or {}
        fragment_of = [0] * len(self.parameters) if fragment_of is None else fragment_of
        kinds = [
            (bucket_dtype(p), bucket_class(local_tensor(p)), optimizer_of.get(id(p)), group_of.get(id(p), 0), fragment)
            for p, fragment in zip(self.parameters, fragment_of, strict=True)
        ]
        self._kinds, self._keys = _number(kinds)
        self._device = common_device((f"parameter {name!r}", parameter) for name, parameter in named_parameters)
        self.memory = self._allocate(sum(_padded_bytes(parameter) for parameter in self.parameters))
        self.lay_out(list(reversed(range(len(self.names)))) if order is None else order)

    def anew(self, order: Sequence[int]) -> BucketStorage:
        """The same in memory of its own, laid out for ``order``; gradients stay where they are."""
        new = copy.copy(self)
        new.memory = self._allocate(self.memory.numel())
        new.lay_out(order)
        return new

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return self._group.empty(num_bytes, torch.uint8, self._device)

    def lay_out(self, order: Sequence[int]) -> None:
        """Slices the memory anew for the ready order ``order``; gradients that lie in it move with their views.

        Only gradients that are live (``parameter.grad`` is not None) need memory while they move.
        """
        self.order = list(order)
        self.bucket_of, offsets, numels = self._plan(self.order)
        self.buckets = self._slice(offsets, numels)
        self.members = sorted((m for bucket in self.buckets for m in bucket.members), key=lambda member: member.index)
        live = [(member, member.parameter.grad) for member in self.members if self._holds(member.parameter.grad)]
        # All are parked before the first is written.
        live = [(member, _park(local_tensor(grad), member.view)) for member, grad in live]
        for member, grad in live:
            if grad is not None:
                member.view.copy_(grad)
            member.parameter.grad = member.grad
        for bucket in self.buckets:
            bucket.zero_padding()

    def release_gradients(self) -> None:
        """Moves the gradients out: from now on the memory is for weights, or for nothing."""
        for parameter in self.parameters:
            if self._holds(parameter.grad):
                parameter.grad = parameter.grad.clone()

    def hand_over_gradients(self, successor: BucketStorage) -> None:
        """Moves the gradients of the parameters that ``successor`` has, too, into its memory."""
        for member in successor.members:
            if self._holds(member.parameter.grad):
                member.view.copy_(local_tensor(member.parameter.grad))
                member.parameter.grad = member.grad

    def _plan(self, order: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The bucket and the first element there of each parameter, and the elements of each bucket."""
        item_bytes = [bucket_dtype(parameter).itemsize for parameter in self.parameters]
        return _C.plan_buckets(
            list(map(_numel, self.parameters)), item_bytes, self._keys, list(order), *self._caps_bytes, ALIGN_BYTES
        )

    def _slice(self, offsets: Sequence[int], numels: Sequence[int]) -> tuple[Bucket, ...]:
        members_of: list[list[int]] = [[] for _ in numels]
        for tensor in self.order:
            members_of[self.bucket_of[tensor]].append(tensor)
        buckets = []
        begin = 0
        for index, (tensors, numel) in enumerate(zip(members_of, numels, strict=True)):
            dtype, kind, optimizer_index, group_index, fragment = self._kinds[self._keys[tensors[0]]]
            end = begin + numel * dtype.itemsize
            flat = self.memory[begin:end].view(dtype)
            members = []
            gaps = []
            filled_numel = 0
            for tensor in tensors:
                if filled_numel < offsets[tensor]:
                    gaps.append((filled_numel, offsets[tensor]))
                filled_numel = offsets[tensor] + _numel(self.parameters[tensor])
                view = _shaped_like(flat[offsets[tensor] : filled_numel], local_tensor(self.parameters[tensor]))
                members.append(Member(tensor, self.names[tensor], self.parameters[tensor], view))
            if filled_numel < numel:
                gaps.append((filled_numel, numel))
            buckets.append(Bucket(index, kind, optimizer_index, flat, members, gaps, group_index, fragment))
            begin = end
        return tuple(buckets)

    def _holds(self, grad: torch.Tensor | None) -> bool:
        if grad is None or grad.layout is not torch.strided:
            return False
        return local_tensor(grad).untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()


def _numel(parameter: torch.Tensor) -> int:
    """Elements in its bucket."""
    return local_tensor(parameter).numel() * (2 if parameter.is_complex() else 1)


def _padded_bytes(parameter: torch.Tensor) -> int:
    num_bytes = _numel(parameter) * bucket_dtype(parameter).itemsize
    return num_bytes + -num_bytes % ALIGN_BYTES


def _park(grad: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
    """A copy of ``grad``, or None where it already lies where ``view`` does."""
    return None if grad.data_ptr() == view.data_ptr() else grad.clone()


def _number(kinds: Sequence[Kind]) -> tuple[list[Kind], list[int]]:
    """The different kinds in order of appearance, so that all ranks number them alike, and each one's number."""
    numbers: dict[Kind, int] = {}
    keys = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    return list(numbers), keys


def _shaped_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``flat`` with the shape of ``parameter`` and, if that is dense, its strides: the layout autograd gives a grad."""
    return _shaped(flat, parameter if is_dense(parameter) else torch.empty_like(parameter, device="meta").contiguous())


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``flat``, the elements of a parameter in its bucket, with shape, strides and kind of number of ``like``."""
    flat = torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat
    return flat.as_strided(like.shape, like.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if it is a permutation of what is contiguous, which ``empty_like`` keeps."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
