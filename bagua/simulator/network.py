"""Links and stragglers, as a simulation takes them."""

from __future__ import annotations

import dataclasses
import math
import re

from bagua.errors import InvalidArgument

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The link of each host, and what is between ranks of one host. Both ends of a message may be busy with others.

    Attributes:
        up, down: bits per second of payload that leave a host, and that come; ``down`` is ``up`` by default.
        latency: seconds from the last byte on the link to its arrival.
        local: bits per second between the ranks of one host, of all of them together.
        per_message: seconds of processor time that a message costs either end.
        burst: bytes that an idle link saves up at its rate, and carries at once later, as tc's token bucket does.
    """

    up: float
    down: float | None = None
    latency: float = 0.0
    local: float = 40e9
    per_message: float = 5e-6
    burst: float = 0.0

    def __post_init__(self) -> None:
        rates = {"up": self.up, "local": self.local, **({} if self.down is None else {"down": self.down})}
        for name, value in rates.items():
            if not 0 < value < math.inf:
                raise InvalidArgument(f"{name} is {value!r}, expected bits per second, such as 1e9")
        for name, unit in (("latency", "seconds"), ("per_message", "seconds"), ("burst", "bytes")):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}, expected {unit}, 0 or more")

    @staticmethod
    def parse(rate: str, latency: str = "0ms") -> Link:
        """Reads rate and latency as tc writes them, such as "1gbit" and "0.5ms". Raises InvalidArgument."""
        return Link(up=_parsed(rate, _RATES, "a rate"), latency=_parsed(latency, _TIMES, "a latency"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Factors by which ranks compute longer than the profile says.

    Attributes:
        sigma: each rank draws a factor per step, whose logarithm has this standard deviation and the mean 0.
        seed: decides what is drawn.
        slow_rank, slow_factor: one rank computes so many times as long in every step.
    """

    sigma: float = 0.0
    seed: int = 0
    slow_rank: int = 0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise InvalidArgument(f"sigma is {self.sigma!r}, expected a number, 0 or more")
        if not 0 < self.slow_factor < math.inf:
            raise InvalidArgument(f"slow_factor is {self.slow_factor!r}, expected a number above 0")


def _parsed(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d*)?)({'|'.join(units)})", text)
    if match is None:
        raise InvalidArgument(f"{text!r} is not {what}; write a number and one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]
