"""Closes a rank's sockets in forked children; the Python half of csrc/common/fork_guard.h.

A DataLoader worker inherits every socket of its rank. While it holds one open, the peers cannot see that the rank died.
"""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["close_in_child"]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(sock: socket.socket) -> socket.socket:
    """Have `sock` closed in every forked child, until it is detached from Python; returns it."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_all)
