"""preemption: whether a scheduler has asked the job to end, the same answer on all ranks at the same step.

Beside the data path. A signal comes to some ranks only, or to each at another moment; a checkpoint is a collective. So
the ranks exchange what they have got: one element per call, whose answer the next call reads, so that none waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any

import torch

from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.distributed.world import GroupLike, resolve
from bagua.errors import BaguaError, InvalidArgument

__all__ = ["preemption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LAST_EXCHANGE_S = 5.0  # no longer: a rank that ends by an error must not keep the others waiting for it

_has_come = threading.Event()  # a signal has, on this rank
_installed = False
_earlier: dict[int, Any] = {}  # the handlers that were there before
# The exchange that the last call has started, by group.
_under_way: weakref.WeakKeyDictionary[ProcessGroup, tuple[Work, torch.Tensor]] = weakref.WeakKeyDictionary()


def preemption(group: GroupLike = None) -> bool:
    """Returns True on all ranks, at the same call, when one of them has got SIGTERM or SIGUSR1; collective.

    Call it once per step: each call returns what ranks had got at the one before. The first call takes over the two
    signals, which then end nothing by themselves: save and leave the program. `bagua run` passes them on to its ranks
    and gives them `--grace` seconds.

    Args:
        group: the ranks, all by default.

    Raises:
        InvalidArgument: the first call is not on the main thread, where alone Python handles signals.

    Example:
        >>> for step in range(num_steps):  # doctest: +SKIP
        ...     train(step)
        ...     if bagua.preemption():
        ...         bagua.save("checkpoint", model, optimizer, step=step)
        ...         break
    """
    _install()
    group = resolve(group)
    has_ended = False
    if group in _under_way:
        work, flag = _under_way[group]
        work.wait()
        has_ended = bool(flag.item())
    else:
        group.before_close.append(functools.partial(_finish, weakref.ref(group)))
    flag = torch.tensor([_has_come.is_set()], dtype=torch.uint8, device="cpu")
    _under_way[group] = group.all_reduce(flag, ReduceOp.MAX, label="preemption"), flag
    return has_ended


def _finish(group_ref: weakref.ref[ProcessGroup]) -> None:
    """Waits for the exchange of the last call before a group is closed: slower ranks take part in it then."""
    _has_come.clear()
    work, _ = _under_way.pop(group_ref(), (None, None))
    if work is not None:
        with contextlib.suppress(BaguaError):  # the others are late, or the group has failed
            work.wait(_LAST_EXCHANGE_S)


def _in_child() -> None:
    global _installed
    for number, earlier in _earlier.items():  # a forked child is no rank: signals end it as before
        signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
    _earlier.clear()
    _installed = False


os.register_at_fork(after_in_child=_in_child)


def _install() -> None:
    global _installed
    if _installed:
        return
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgument("bagua.preemption() handles signals, so call it on the main thread first")
    for number in SIGNALS:
        earlier = _earlier[number] = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, earlier=earlier) -> None:
            _has_come.set()
            if callable(earlier):  # of the program, or of its trainer
                earlier(number, frame)

        signal.signal(number, handle)
    _installed = True
