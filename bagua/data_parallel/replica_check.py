"""The check that ranks which should be equal are: one message now and then, in the place of a guard for each cause.

Beside the data path. ``begin``, at the end of a backward, takes a digest (csrc/kernels/digest.h) of parameters, buffers
and optimizer options and starts an all_gather of 32 bytes per rank; ``finish``, at the end of the next backward, reads
it. On a device the digest is taken there, and its comparison reaches the host one step later, so that neither waits
for the other. Only where digests differ a second, collective phase finds the first
tensor or option that does. Invariant: all ranks have the same schedule, because rank 0's measurement of its cost is in
the message.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.data_parallel.scope import Scope, synchronised_options
from bagua.distributed.devices import HostCopy, processor_of, timing_event
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.distributed.tensors import digests_of, local_tensor
from bagua.errors import BaguaError, InvalidArgument

__all__ = ["ReplicaCheck", "check_setting"]

logger = logging.getLogger("bagua")

_NUM_STEPS_BEFORE = 2  # the first check comes after them
_SHARE_OF_TIME = 0.001
_UNMEASURED_INTERVAL = 100  # steps until the second check where the first one's cost is not known yet
_LONGEST_INTERVAL = 1000
_NUM_NUMBERS = 4  # of a rank's message: digests of tensors, of options and of the processor, and the interval
_CHUNK_NUMEL = 1 << 20
_NUM_SHOWN = 8  # ranks of one value
_REMEDY = (
    "make the same steps with the same options on all ranks: look for an optimizer that steps on gradients which "
    "no_sync has left, or within backward, and for a schedule or a restore on some ranks only (check_replicas='warn' "
    "writes this to the log instead, False compares nothing)"
)


def check_setting(setting: Any) -> None:
    """Raises InvalidArgument unless ``setting`` is one of ReplicaCheck's.

    Example:
        >>> check_setting("sometimes")
        Traceback (most recent call last):
        bagua.errors.InvalidArgument: check_replicas is 'sometimes', expected "auto", "warn", a number of steps or False
    """
    is_word = isinstance(setting, str) and setting in ("auto", "warn")
    if not (is_word or setting is False or (type(setting) is int and setting > 0)):
        raise InvalidArgument(f'check_replicas is {setting!r}, expected "auto", "warn", a number of steps or False')


@dataclass
class _Check:
    """A comparison whose message is on its way."""

    step: int
    tensors: list[tuple[str, torch.Tensor]]
    digests: torch.Tensor  # one per tensor
    options: dict[str, str]
    gathered: torch.Tensor  # the messages of all ranks
    work: Work
    events: list[torch.Event]  # before and after the digest, on a device
    copy: HostCopy | None = None  # of gathered


class ReplicaCheck:
    """Compares parameters, buffers and the options of optimizers between ranks, bit for bit.

    Parameters and buffers are those that ``named_parameters`` and ``named_buffers`` give at the time, frozen ones too,
    of a DTensor the part that a rank holds; not those that have no values (meta, lazy) or are sparse. Options are the
    entries of ``param_groups`` that are numbers, texts, None, tensors, or tuples and lists of them. Ranks whose
    processors (or numbers of threads) differ may round differently: there unequal tensors are written to the log, with
    the distance, and only unequal options are an error.

    Args:
        model: returns the model, such as a weak reference; None where it is gone.
        optimizers: in the same order on all ranks.
        group: the ranks.
        scope: what is not of the model's own group is not compared, nor are options of ignored parameters alone.
        setting: equal on all ranks. "auto": after the second step, and from then on as seldom as it takes to cost less
            than 0.1% of the time (1 to 1000 steps); an error where ranks differ. "warn": a warning in the log instead.
            A number: every so many steps; an error. False: never.

    Attributes:
        is_asked_for: True if the setting is a number, which counts while weights are exchanged, too.
    """

    def __init__(
        self,
        model: Callable[[], torch.nn.Module | None],
        optimizers: Sequence[torch.optim.Optimizer],
        group: ProcessGroup,
        setting: str | int = "auto",
        scope: Scope | None = None,
    ) -> None:
        check_setting(setting)
        self._scope = scope
        self._model, self._optimizers, self._group = model, tuple(optimizers), group
        self._raises, self._is_on = setting != "warn", setting is not False and group.size > 1
        self._interval = setting if type(setting) is int else None
        self.is_asked_for = self._interval is not None
        self._num_steps = 0  # that have begun
        self._due: int | None = self._interval or _NUM_STEPS_BEFORE  # None: until the message has said it
        self._measured = (0, 0.0)  # the step and the time from which on steps are measured
        # The seconds that the last check took after its begin: on the device, and to find what differs.
        self._late_s: float | None = None
        self._pending: _Check | None = None
        self._before_close: Callable[[], None] | None = None  # of the pending one
        self._arriving: _Check | None = None  # its result is on its way from a device to the host

    def begin(self, parameters: bool = True, buffers: bool = True) -> Work | None:
        """Starts a check if one is due, and returns its message. Collective, at the end of a synchronising backward.

        Args:
            parameters: they should be equal now, as after every step of an algorithm that exchanges gradients.
            buffers: the same of buffers.

        Raises:
            InvalidArgument: an earlier check has found a difference, as in ``finish``.
        """
        if not self._is_on:
            return None
        step, now = self._num_steps, time.perf_counter()
        self._num_steps += 1
        if step == 1:
            self._measured = step, now  # without the first step, which sets up
        if step != self._due:
            return None
        self._due = None if self._interval is None else step + self._interval
        self._read_arrived()
        begun, began_at = self._measured
        self._pending = self._start(parameters, buffers, (now - began_at) / max(1, step - begun))
        # Training may end without the message, which a slower rank still needs.
        self._before_close = functools.partial(_wait_for, self._pending.work)
        self._group.before_close.append(self._before_close)
        self._measured = step, time.perf_counter()
        return self._pending.work

    def finish(self) -> None:
        """Reads the check that the last ``begin`` has started, if it did. Collective.

        Raises:
            InvalidArgument: on all ranks, where they differ and the setting is not "warn"; the message names the first
                tensor and option, the ranks and the distance.
        """
        self._read_arrived()
        check, self._pending = self._pending, None
        if check is None:
            return
        self._group.before_close.remove(self._before_close)
        check.work.wait()
        if not check.events:
            self._resolve(check, check.gathered)
        else:
            check.copy = HostCopy(check.gathered)
            self._arriving = check

    def check_now(self, parameters: bool = True, buffers: bool = True) -> None:
        """Compares at once, whatever the setting. Collective; waits for the device.

        Raises:
            InvalidArgument: on all ranks, where they differ.
        """
        if self._group.size == 1:
            return
        check = self._start(parameters, buffers, 0.0)
        check.work.wait()
        self._compare(check, check.gathered.cpu(), raises=True)

    def _read_arrived(self) -> None:
        check, self._arriving = self._arriving, None
        if check is not None:
            assert check.copy is not None
            self._resolve(check, check.copy.get())

    def _start(self, parameters: bool, buffers: bool, step_s: float) -> _Check:
        began_at = time.perf_counter()
        tensors, options = self._tensors_and_options(parameters, buffers)
        device = tensors[-1][1].device if tensors else torch.device("cpu")
        events = [] if device.type == "cpu" else [timing_event(device)]
        digests = digests_of([tensor for _, tensor in tensors], device)
        digest = digests_of([digests], device)
        if events:
            events.append(timing_event(device))
        interval = _UNMEASURED_INTERVAL
        if not events or self._late_s is not None:
            interval = _interval_for(time.perf_counter() - began_at + (self._late_s or 0.0), step_s)
        of_host = [_hash_of(sorted(options.items())), _hash_of(processor_of(device)), interval]
        message = torch.cat([digest, torch.tensor(of_host, device="cpu").to(device, non_blocking=True)])
        gathered = message.new_empty(self._group.size * _NUM_NUMBERS)
        work = self._group.all_gather(gathered, message)
        work.label = "replicas"
        return _Check(self._num_steps - 1, tensors, digests, options, gathered, work, events)

    def _tensors_and_options(
        self, parameters: bool, buffers: bool
    ) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
        """Returns the named tensors to compare, those of the CPU first, and the texts of the other options."""
        tensors: list[tuple[str, Any]] = []
        options: dict[str, str] = {}
        model, scope = self._model(), self._scope
        parts = {} if model is None or scope is None else scope.part_of_parameters(model)
        for index, optimizer in enumerate(self._optimizers):
            for number, of_group in enumerate(synchronised_options(optimizer, parts)):
                for key, value in of_group.items():
                    for part, leaf in _leaves(key, value) if key != "params" else ():
                        name = f"{part} of parameter group {number} of optimizer {index}"
                        if isinstance(leaf, torch.Tensor):
                            tensors.append((name, leaf))
                        else:
                            options[name] = leaf
        if model is not None:
            is_compared = (lambda name: True) if scope is None else (lambda name: scope.part_of(name) == 0)
            of_model = [("parameter", one) for one in model.named_parameters() if parameters]
            of_model += [("buffer", one) for one in model.named_buffers() if buffers]
            tensors += [(f"{kind} {name!r}", local_tensor(one)) for kind, (name, one) in of_model if is_compared(name)]
        tensors = [(name, tensor) for name, tensor in tensors if _has_values_here(tensor)]
        tensors.sort(key=lambda entry: (not entry[1].is_cpu, str(entry[1].device)))
        return tensors, options

    def _resolve(self, check: _Check, gathered: torch.Tensor) -> None:
        """Sets when the next check is due, and compares."""
        began_at = time.perf_counter()
        device_s = 1e-3 * check.events[0].elapsed_time(check.events[1]) if check.events else 0.0
        if self._interval is None:
            self._due = max(check.step + int(gathered[_NUM_NUMBERS - 1]), self._num_steps)
        self._compare(check, gathered, self._raises)
        self._late_s = device_s + time.perf_counter() - began_at

    def _compare(self, check: _Check, gathered: torch.Tensor, raises: bool) -> None:
        columns = zip(*gathered.view(-1, _NUM_NUMBERS).tolist(), strict=True)
        digests, of_options, processors, _ = ({*column} for column in columns)
        if len(digests) == len(of_options) == 1:
            return
        error, is_of_values = self._found(check)
        if raises and not (is_of_values and len(processors) > 1):
            raise self._group.job_ranks.told(error)
        logger.warning("%s", self._group.job_ranks.told(error))

    def _found(self, check: _Check) -> tuple[InvalidArgument, bool]:
        """The error that names what differs, and True if only values of tensors do. Collective."""
        described = {
            name: [f"{tuple(tensor.shape)} {tensor.dtype}", digest]
            for (name, tensor), digest in zip(check.tensors, check.digests.tolist(), strict=True)
        }
        processor = processor_of(check.digests.device)
        everyone = self._group.all_gather_plain((described, check.options, processor))
        of_tensors, of_options, processors = zip(*everyone, strict=True)
        parts, odd = [], set()
        if different := _different(of_options):
            values = [options.get(different[0], "missing") for options in of_options]
            parts.append(f"{different[0]} is {_by_rank(values)}")
            odd |= _unlike_first(values)
        is_of_values = not different
        if different := _different(of_tensors):
            name, more = different[0], f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            found = [tensors.get(name, ["missing", 0]) for tensors in of_tensors]
            kinds = [kind for kind, _ in found]
            odd |= _unlike_first(found)
            if _unlike_first(kinds):
                parts.append(f"{name}{more} is {_by_rank(kinds)}")
                is_of_values = False
            else:
                distances = self._distances(dict(check.tensors)[name])
                unlike = [text if rank in _unlike_first(found) else None for rank, text in enumerate(distances)]
                parts.append(f"{name}{more} differs from rank 0's {_by_rank(unlike)}")
        if _unlike_first(processors):
            parts.append(f"the processors, which may round differently, are {_by_rank(processors)}")
        text = "; ".join(parts) or "their parameters and buffers are registered in different orders"
        error = InvalidArgument(
            f"the ranks should be equal, but {text}; {_REMEDY}", rank=min(odd, default=None), ranks=tuple(sorted(odd))
        )
        return error, is_of_values

    def _distances(self, tensor: torch.Tensor) -> list[str]:
        """Returns how far the values of each rank are from rank 0's now. Collective."""
        own = tensor.detach().reshape(-1)
        original = own.clone()
        self._group.broadcast(original.view(torch.uint8), 0).wait()
        wide = torch.complex128 if own.is_complex() else torch.float64
        largest, num_different = [], 0
        for pair in zip(own.split(_CHUNK_NUMEL), original.split(_CHUNK_NUMEL), strict=True):
            ours, theirs = (values.to(wide) for values in pair)
            is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            largest.append((ours - theirs).abs().masked_fill(is_same, 0.0).max())
            num_different += int((~is_same).sum())
        everyone = self._group.all_gather_plain((float(torch.stack(largest).max()), num_different))
        return [
            f"in {num} of {own.numel()} elements by at most {distance:.3g}" if num else "in no value by now"
            for distance, num in everyone
        ]


def _wait_for(work: Work) -> None:
    with contextlib.suppress(BaguaError):  # a failure of the group is raised by what it ends
        work.wait()


def _interval_for(cost_s: float, step_s: float) -> int:
    """Returns after how many steps of ``step_s`` a check that costs ``cost_s`` is due again.

    Example:
        >>> _interval_for(0.008, 0.5), _interval_for(0.008, 0.05), _interval_for(0.008, 0.0005)
        (16, 160, 1000)
    """
    return min(_LONGEST_INTERVAL, math.ceil(cost_s / max(_SHARE_OF_TIME * step_s, 1e-9)))


def _has_values_here(tensor: Any) -> bool:
    """Returns True for a tensor whose values this rank holds, all of them."""
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "to_local")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor | str]]:
    """The tensors in an option, and texts of its numbers, strings, booleans and None, each under its name."""
    if isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _leaves(f"{name}[{index}]", entry)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif value is None or isinstance(value, (bool, str)):
        yield name, repr(value)
    elif isinstance(value, numbers.Real):
        yield name, repr(float(value))  # NumPy's and Python's are equal


def _hash_of(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "little")


def _different(of_ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of which the ranks have different values, or some have none."""
    names = dict.fromkeys(itertools.chain.from_iterable(of_ranks))
    return [name for name in names if any(one.get(name) != of_ranks[0].get(name) for one in of_ranks)]


def _unlike_first(values: Sequence[Any]) -> set[int]:
    return {rank for rank, value in enumerate(values) if value != values[0]}


def _by_rank(values: Sequence[str | None]) -> str:
    """The values, but for None, with the ranks that have them.

    Example:
        >>> _by_rank(["0.1", "0.05", None, "0.1"])
        '0.1 on ranks 0, 3 and 0.05 on rank 1'
    """
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(str(rank))
    return " and ".join(
        f"{value} on rank{'s' * (len(of) > 1)} {', '.join([*of[:_NUM_SHOWN], *['...'] * (len(of) > _NUM_SHOWN)])}"
        for value, of in ranks.items()
    )
