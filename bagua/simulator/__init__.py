"""The time that a training would take on a network that is not there.

One rank rehearses: production code runs a few training steps of a profile, with its planner, step machine, algorithm,
engine and collectives, on a group whose messages go nowhere. What that rank did, in its order, is then played for all
ranks in virtual time (``rust_core/src/simulator.rs``). So the simulated order of operations is the real one.

Example:
    >>> from bagua import simulator
    >>> from bagua.replay.profiles import Layer, Profile
    >>> profile = Profile("two", "made up", (Layer("a", ((1000, 250),), 2.0, 6.0), Layer("b", ((250, 8),), 1.0, 2.0)))
    >>> rehearsed = simulator.rehearse(profile, "gradient_allreduce", hosts=4)
    >>> slow = rehearsed.play(simulator.Link.parse("100mbit", "1ms"))
    >>> fast = rehearsed.play(simulator.Link.parse("10gbit", "50us"))
    >>> slow.step_s > 0.12 > fast.step_s  # 2 (n-1)/n of a megabyte at 100 Mbit/s
    True
"""

from bagua.simulator.network import Link, Stragglers
from bagua.simulator.rehearsal import Rehearsed, Simulated, available, rehearse

__all__ = ["Link", "Rehearsed", "Simulated", "Stragglers", "available", "rehearse"]
