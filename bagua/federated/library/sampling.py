"""The clients that take part in a round, and the random numbers of each client: by seed, on any number of ranks alike.

Every draw is made from a generator of its own, whose seed is a hash of what is drawn: of the job's seed, the round and
the client. So nothing depends on the order of the draws, on which rank makes them, or on how many ranks there are, and
a round that is computed again draws the same. The numbers are not those of a cryptographic generator.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from bagua.errors import InvalidArgument
from bagua.federated.verbs.randomness import seed_of


def generator_of(*parts: int | str) -> torch.Generator:
    """A generator of torch with that seed."""
    return torch.Generator().manual_seed(seed_of(*parts))


def cohort(population: int, size: int, *, seed: int, round: int) -> torch.Tensor:
    """The clients that take part in a round: `size` different ones of 0 to population - 1, all equally likely.

    Rank by rank they are ``cohort(...)[federated.local_slice(size)]``.

    Args:
        population: how many clients there are.
        size: how many take part, at most all.
        seed: of the job.
        round: its number.

    Returns:
        int64 ``[size]``, in random order, equal on all ranks.

    Raises:
        InvalidArgument: a size that is not from 1 to the population, or no integers.

    Example:
        >>> cohort(1000, 3, seed=1, round=0).tolist() == cohort(1000, 3, seed=1, round=0).tolist()
        True
        >>> sorted(cohort(4, 4, seed=1, round=0).tolist())
        [0, 1, 2, 3]
    """
    population, size = integer("population", population), integer("size", size)
    check_cohort(size, population)
    return torch.tensor(random.Random(seed_of(seed, "cohort", round)).sample(range(population), size))


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Cohorts of changing size: each client is drawn with probability `rate`, independently of the others.

    A cohort is filled up with clients that were not drawn, to one of the few sizes of ``padded_size``, so that a
    program that is compiled for each size is soon compiled for all of them.

    Args:
        rate: above 0, at most 1; a round has ``population * rate`` clients on average.

    Raises:
        InvalidArgument: a rate out of range.

    Example:
        >>> cohort, is_drawn = Poisson(rate=0.1).draw(100, seed=1, round=0)
        >>> len(cohort), int(is_drawn.sum())
        (12, 9)
    """

    rate: float

    def __post_init__(self) -> None:
        if not (isinstance(self.rate, numbers.Real) and 0 < self.rate <= 1):
            raise InvalidArgument(f"rate={self.rate!r}, expected a probability above 0, at most 1")

    def draw(self, population: int, *, seed: int, round: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The clients of a round: different ones of 0 to population - 1.

        Args:
            population: how many clients there are, at least 1.
            seed: of the job.
            round: its number.

        Returns:
            int64 ``[size]`` in random order, and bool ``[size]``: those that were drawn, which come first; maybe none.
            Both are equal on all ranks.
        """
        # A number that is binomial and a uniform choice of so many are the same as a draw for each client.
        generator = numpy.random.default_rng(seed_of(seed, "poisson", round))
        num_drawn = int(generator.binomial(population, self.rate))
        size = min(padded_size(num_drawn), population)
        return cohort(population, size, seed=seed, round=round), torch.arange(size, device="cpu") < num_drawn


def padded_size(number: int) -> int:
    """The next of a fixed ladder of sizes, to which a number of clients or of examples is filled up.

    Shapes that change from round to round are compiled anew; with these, few occur. They are the multiples of 4 up to
    32, and from there on eight for each doubling: 36, 40, ... 64, 72, 80, ... 128, 144. So up to 3 are added to a small
    number, and less than an eighth to a large one; a Poisson cohort has at most ten or so of them, whatever its mean.

    Example:
        >>> [padded_size(number) for number in (0, 4, 5, 33, 65, 1000)]
        [4, 4, 8, 36, 72, 1024]
    """
    step = max(4, 1 << max(0, (number - 1).bit_length() - 4))
    return max(step, -(-number // step) * step)


def check_cohort(cohort: Any, population: int) -> None:
    """Raises InvalidArgument unless the cohort is a Poisson, or a number of clients, of a population with clients."""
    least = 1 if isinstance(cohort, Poisson) else integer("cohort", cohort)
    if not 1 <= least <= integer("population", population):
        raise InvalidArgument(f"a cohort of {cohort} of {population} clients, expected 1 to all of them")


def participates(clients: Iterable[int] | torch.Tensor, rate: float, *, seed: int, round: int) -> torch.Tensor:
    """The clients that get through the round, each with probability `rate`: the mask of a reduction.

    Args:
        clients: their numbers, such as a part of a cohort.
        rate: from 0 to 1; 1 - rate drop out.

    Returns:
        bool ``[clients]``.

    Raises:
        InvalidArgument: a rate that is no probability.
    """
    if not 0 <= rate <= 1:
        raise InvalidArgument(f"rate={rate!r}, expected a probability, from 0 to 1")
    chances = [seed_of(seed, "participates", round, client) / 2**63 for client in numbers_of(clients)]
    return torch.tensor([chance < rate for chance in chances], dtype=torch.bool)


def per_client(
    draw: Callable[[torch.Generator], torch.Tensor],
    clients: Iterable[int] | torch.Tensor,
    *,
    seed: int,
    round: int = 0,
) -> torch.Tensor:
    """A placed value of random numbers, each client's from its own generator: made before the program, given to it.

    Args:
        draw: of one client, such as ``lambda generator: torch.randperm(100, generator=generator)`` for the order of its
            examples; always of the same shape.
        clients: their numbers, such as this rank's part of a cohort; may be none.
        seed: of the job; another one for every use.
        round: its number.

    Returns:
        ``[clients, ...]``.

    Example:
        >>> noise = per_client(lambda generator: torch.randn(2, generator=generator), [3, 8], seed=1, round=5)
        >>> torch.equal(noise[1:], per_client(lambda g: torch.randn(2, generator=g), [8], seed=1, round=5))
        True
    """
    drawn = [draw(generator_of(seed, "client", round, client)) for client in numbers_of(clients)]
    if not drawn:
        empty = draw(generator_of(seed))
        return empty.new_empty((0, *empty.shape))
    return torch.stack(drawn)


def numbers_of(clients: Iterable[int] | torch.Tensor) -> list[int]:
    """Returns Python's integers."""
    return clients.tolist() if isinstance(clients, torch.Tensor) else [operator.index(client) for client in clients]


def integer(name: str, number: Any) -> int:
    """Returns Python's integer, of NumPy's too.

    Raises:
        InvalidArgument: it is none.
    """
    if isinstance(number, bool) or not hasattr(type(number), "__index__"):
        raise InvalidArgument(f"{name}={number!r}, expected an integer")
    return operator.index(number)
