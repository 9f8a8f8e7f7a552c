"""Helpers for testing code on top of bagua, plug-ins above all: real ranks, and injected faults.

The library itself does not import this package.
"""

from bagua.testing.failures import RankDied, RankError, RankTraceback, WorldTimeout
from bagua.testing.faults import FailAt, Garbage, InjectedFault, cont, fail_at, kill, send_garbage, stop
from bagua.testing.ranks import Pool, Run, free_port, spawn
from bagua.testing.thread_ranks import world

__all__ = [
    "FailAt",
    "Garbage",
    "InjectedFault",
    "Pool",
    "RankDied",
    "RankError",
    "RankTraceback",
    "Run",
    "WorldTimeout",
    "cont",
    "fail_at",
    "free_port",
    "kill",
    "send_garbage",
    "spawn",
    "stop",
    "world",
]
