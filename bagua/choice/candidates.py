"""The candidates of ``algorithm="auto"``, by class of risk, and what a step of each is worth.

The classes are said in docs/choose.md. Members are what ends within the range of DDP's seeds in docs/convergence.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bagua.algorithms import get

BASE = "gradient_allreduce"
RISKS = ("R0", "R1", "R2", "R3")
BUCKET_BYTES = (5 << 20, 100 << 20)  # besides the default
# The loss of n replicas that train apart grows as n^0.0116 (arXiv 2503.09799), and falls with the number of steps as
# steps^-0.095 (arXiv 2001.08361): so they need n^(0.0116 / 0.095) times as many.
_APART = 0.0116 / 0.095


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        algorithm: its registered name.
        options: the algorithm's, and ``bucket_bytes``.
        memory: bytes that it needs beside plain training, as a multiple of the gradients' (docs/memory.md).
    """

    algorithm: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: float = 0.0

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.algorithm}:{options}" if options else self.algorithm

    @property
    def known_options(self) -> dict[str, Any]:
        """The algorithm's options by name, with those that are left at their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(get(self.algorithm))}
        return {**defaults, **self.options}

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return max(self.known_options.get(name, 1) for name in ("sync_every", "interval"))

    def steps_needed(self, num_ranks: int) -> float:
        """Returns how many steps it needs to come to the loss of one step of the base."""
        return num_ranks**_APART if self.exchanges_weights else 1.0

    @property
    def exchanges_weights(self) -> bool:
        """True if ranks train apart, and meet in their weights."""
        return get(self.algorithm).exchanges == "weights"

    def is_variant_of(self, other: Candidate) -> bool:
        """Returns True if nothing else differs than the size of buckets and the hierarchy."""
        ours, theirs = ({**one.options, "bucket_bytes": 0, "hierarchical": False} for one in (self, other))
        return self.algorithm == other.algorithm and ours == theirs

    def with_option(self, name: str, value: Any) -> Candidate:
        return dataclasses.replace(self, options={**self.options, name: value})


_MEMBERS = {
    "R0": (Candidate(BASE),),
    "R1": (Candidate("bytegrad", {"codec": "bf16"}, 0.5),),
    "R2": (Candidate("bytegrad", {}, 0.25), Candidate("qsgd", {"bits": 4}, 0.25), Candidate("powersgd", {}, 2.1)),
    "R3": (
        Candidate("local_sgd", {}, 1.05),
        Candidate("local_sgd", {"sync_every": 16}, 1.05),
        Candidate("diloco", {}, 3.1),
        Candidate("decentralized", {}, 1.05),
        Candidate("low_precision_decentralized", {}, 3.2),
    ),
}


def candidates(risk: str, bucket_bytes: int | None = None) -> tuple[Candidate, ...]:
    """Returns those of a class and of the classes below it, the base first.

    Args:
        risk: one of ``RISKS``.
        bucket_bytes: of all of them; None: that is chosen, too.
    """
    found = [member for of in RISKS[: RISKS.index(risk) + 1] for member in _MEMBERS[of]]
    if bucket_bytes is not None:
        return tuple(member.with_option("bucket_bytes", bucket_bytes) for member in found)
    return tuple(found)
