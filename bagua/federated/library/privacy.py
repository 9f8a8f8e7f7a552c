"""DP-FedAvg: a mean over clients that differs little whoever takes part, and what that guarantees.

Each client's value is clipped to an L2 norm over its whole pytree, the sum gets Gaussian noise of that scale once, and
an accountant says what epsilon and delta come of all rounds. The norm follows a quantile of the clients' norms, which
is itself estimated with noise; the split of the noise between both keeps the guarantee that of `noise_multiplier`
alone.
Sources: McMahan et al., arXiv 1710.06963; Andrew et al., arXiv 1905.03871.

The guarantee is of a client's whole data (not of an example), against whoever sees the models and not the updates: for
protection from the server too, use ``SecureSum`` as the reduction, on a platform that masks. It holds as far as the
seed is secret, and in exact arithmetic: the noise is drawn from an ordinary generator, in floating point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.library import sampling
from bagua.federated.library.aggregators import Robust, SecureSum, Step, Sum, add_noise, clip, first_round, only_of
from bagua.federated.library.sampling import integer, seed_of
from bagua.federated.verbs.operators import call
from bagua.federated.verbs.placement import current
from bagua.federated.verbs.verbs import beside, check_floating, check_placed

Tree = Any  # a pytree of tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateMean:
    """The mean of clipped values with Gaussian noise, called as an ``Aggregator``, without weights.

    Args:
        noise_multiplier: deviation of the noise of the sum in units of the clipping norm, at least 0; what the
            accountant is given.
        clip: the norm, or the one of the first round, above 0.
        quantile: 0 to 1: the share of clients whose norms are to be below the clipping norm, which follows it; None: it
            stays as it is.
        learning_rate: of the norm's logarithm, for each round, by the difference of the shares.
        count_stddev: deviation of the noise of the number of clients below the norm; by default a 20th of the clients,
            or of the denominator.
        denominator: the number by which the noisy sum is divided, above 0, whatever the number of clients; None: by
            those that take part. For Poisson cohorts, whose number is private, give the expected one,
            ``population * rate``.
        seed: decides all noise, with the round: keep it secret, and give every PrivateMean and every training one of
            its own, for the difference of two results with the same noise has none. The graph of a traced program
            holds it; run_on sends clients none of it.
        reduction: ``Sum()`` or ``SecureSum(...)``. What the rounding to fixed point may add to a client's norm, the
            noise is scaled up by: half a step times the root of the number of coordinates. Let its bits be those of the
            platform, if the program runs on one.

    State: {"round": its number, int64 ``[]``, "clip": the norm, ``[]``}.

    Raises:
        InvalidArgument: a number out of range; a noise for the number of clients that is too small for the multiplier;
            a robust reduction; a quantile with fixed point without a bit behind the point.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> private_mean = PrivateMean(noise_multiplier=0.0, clip=5.0, seed=1)
        >>> program = federated.program(private_mean, clients=2)
        >>> program(torch.tensor([[3.0, 4.0], [30.0, 40.0]]), private_mean.init(torch.zeros(2)))[0]
        tensor([3., 4.])
    """

    noise_multiplier: float
    clip: float
    quantile: float | None = None
    learning_rate: float = 0.2
    count_stddev: float | None = None
    denominator: float | None = None
    seed: int
    reduction: Step = dataclasses.field(default_factory=Sum)

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise InvalidArgument(f"noise_multiplier={self.noise_multiplier!r}, expected a number of at least 0")
        if not 0 < self.clip < math.inf:
            raise InvalidArgument(f"clip={self.clip!r}, expected a norm above 0")
        if self.quantile is not None and not 0 <= self.quantile <= 1:
            raise InvalidArgument(f"quantile={self.quantile!r}, expected None or a share, from 0 to 1")
        if not 0 <= self.learning_rate < math.inf:
            raise InvalidArgument(f"learning_rate={self.learning_rate!r}, expected a finite number of at least 0")
        if self.count_stddev is not None and not 0 <= self.count_stddev < math.inf:
            raise InvalidArgument(f"count_stddev={self.count_stddev!r}, expected None or a finite number of at least 0")
        if self.denominator is not None and not 0 < self.denominator < math.inf:
            raise InvalidArgument(f"denominator={self.denominator!r}, expected None or a number of clients above 0")
        if isinstance(self.reduction, Robust) or not isinstance(self.reduction, Step):
            raise InvalidArgument(f"reduction={self.reduction!r}, expected Sum() or SecureSum(...)")
        if self.quantile is not None and isinstance(self.reduction, SecureSum) and self.reduction.fraction_bits < 1:
            raise InvalidArgument(
                f"reduction={self.reduction!r} with quantile={self.quantile!r}, expected fraction_bits of at least 1: "
                "clients count halves"
            )

    def init(self, like: Tree) -> dict[str, Any]:
        """The state before the first round."""
        leaf = next(iter(pytree.tree_leaves(like)), None)
        device = leaf.device if isinstance(leaf, torch.Tensor) else None
        return {"round": first_round(), "clip": torch.tensor(float(self.clip), device=device)}

    def stddevs(self, clients: float) -> tuple[float, float]:
        """Deviations of the noise of the sum, in units of the norm, and of that of the number of clients below it.

        Args:
            clients: how many there are, or the denominator.

        With z_b = 2 * count_stddev the two together reveal as much as noise of ``noise_multiplier`` alone: z^-2 of the
        sum is noise_multiplier^-2 - z_b^-2.
        """
        if self.quantile is None or self.noise_multiplier == 0:
            return self.noise_multiplier, self.count_stddev or 0.0
        count_stddev = clients / 20 if self.count_stddev is None else self.count_stddev
        if not 2 * count_stddev > self.noise_multiplier:
            raise InvalidArgument(
                f"count_stddev={count_stddev} reveals more than noise_multiplier={self.noise_multiplier} allows in "
                "all; expected more than half of that: give count_stddev, or take more clients"
            )
        return (self.noise_multiplier**-2 - (2 * count_stddev) ** -2) ** -0.5, count_stddev

    def __call__(
        self,
        value: Tree,
        state: dict[str, Any],
        *,
        mask: torch.Tensor | None = None,
        placement: str | None = None,
    ) -> tuple[Tree, dict[str, Any]]:
        """The mean with noise, and the state after the round; one collective for each dtype.

        Args:
            value: placed values, ``[num_local, ...]`` each, floating: the changes of the clients' models. A client's
                count as zeros, with a norm above the bound, where one of them is NaN or infinite.
            state: of ``init`` or of the round before.
            mask: ``[num_local]`` of bools: who takes part, which must not depend on what the clients have.
            placement: the name of the program whose clients are meant; by default the innermost that runs.

        Returns:
            ``[...]`` of the same structure and dtypes, equal on all ranks.

        Raises:
            InvalidArgument: as an ``Aggregator``.
        """
        clients = current(placement, "PrivateMean")
        value = check_floating(check_placed(value, clients, "PrivateMean"), "PrivateMean")
        if mask is None:
            mask = torch.ones(clients.num_local, dtype=torch.bool)
        mask = torch.as_tensor(mask)
        if mask.dtype is not torch.bool or tuple(mask.shape) != (clients.num_local,):
            raise InvalidArgument(
                f"mask of {mask.dtype} and shape {list(mask.shape)}, expected bools [{clients.num_local}]"
            )
        stddev, count_stddev = self.stddevs(clients.size if self.denominator is None else self.denominator)
        mask, norm, round = beside(value, mask), beside(value, state["clip"]), state["round"]
        # In float32 at least: rounding to fewer bits would move a clipped norm, and make the noise coarse.
        dtypes = [leaf.dtype for leaf in pytree.tree_leaves(value)]
        value = pytree.tree_map(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), value)
        clipped, is_within = clip(only_of(mask, value), norm, clients, is_bounded=True)
        # Moved by a half, the most that a client can add or take away is a half too. So the share comes out right with
        # a denominator as well: those above the norm count against those below it, and their number is nowhere.
        is_below = only_of(mask, is_within.to(norm.dtype) - 0.5)
        counted = mask.to(norm.dtype)
        total, below, number = self.reduction.reduce((clipped, is_below, counted), mask, clients)
        if self.denominator is None:
            (number,) = call("check_total", [number], clients.key)
        else:
            number = torch.full_like(number, self.denominator)
        noisy, structure = pytree.tree_flatten(
            add_noise(total, stddev * (norm.detach() + self._rounding(total)), self.seed, round)
        )
        means = [(leaf / number.to(leaf.dtype)).to(dtype) for leaf, dtype in zip(noisy, dtypes, strict=True)]
        if self.quantile is not None:
            share = add_noise(below, count_stddev, seed_of(self.seed, "quantile"), round) / number + 0.5
            norm = norm * torch.exp(-self.learning_rate * (share - self.quantile))
            numbers = torch.finfo(norm.dtype)
            norm = norm.clamp(numbers.tiny, numbers.max)  # however many rounds all clients are on one side
        return pytree.tree_unflatten(means, structure), {"round": round + 1, "clip": norm}

    def _rounding(self, total: Tree) -> float:
        """A bound on how far fixed point may move the norm of one client's values."""
        if not isinstance(self.reduction, SecureSum):
            return 0.0
        numel = sum(leaf.numel() for leaf in pytree.tree_leaves(total))
        return math.ldexp(math.sqrt(numel), -self.reduction.fraction_bits - 1)


# ---- the accountant


class Budget:
    """The epsilon that rounds of a ``PrivateMean`` spend, by dp-accounting's Renyi accountant.

    In each round a cohort is drawn and averaged by a ``PrivateMean``, adaptive or not. With cohorts of fixed size,
    which are drawn without replacement (``sampling.cohort``), neighbours are populations in which one client's data are
    replaced by others. Replacing a client moves the sum by up to twice the norm, which is counted here. With Poisson
    cohorts (``sampling.Poisson``), neighbours are populations of which one has a client more, which moves the sum by up
    to the norm; the PrivateMean needs a denominator then, for the number of clients would reveal that client.
    Divergences add up over rounds, so those of one round are computed once; what so many rounds have spent takes a
    fraction of a millisecond.

    Args:
        noise_multiplier: of the PrivateMean; 0 gives inf.
        cohort: clients of a round, those that drop out of it included; or a ``sampling.Poisson``.
        population: clients to draw from.
        delta: 0 to 1, both excluded; below 1 / population.
        epsilon: that all rounds together may spend: a ``Simulation`` with this budget ends before the round that would
            spend more.

    Raises:
        InvalidArgument: a number out of range, or dp-accounting is not installed.

    Example:
        >>> budget = Budget(noise_multiplier=1.0, cohort=100, population=100_000, delta=1e-6)     # doctest: +SKIP
        >>> budget.spent(100)                                                                     # doctest: +SKIP
        5.638042995574478
        >>> cohort = sampling.Poisson(rate=0.001)                                                 # doctest: +SKIP
        >>> budget = Budget(noise_multiplier=1.0, cohort=cohort, population=100_000, delta=1e-6)  # doctest: +SKIP
        >>> budget.spent(100)                                                                     # doctest: +SKIP
        0.8131744748521424
    """

    def __init__(
        self,
        *,
        noise_multiplier: float,
        cohort: int | sampling.Poisson,
        population: int,
        delta: float,
        epsilon: float = math.inf,
    ) -> None:
        _check_accounting(1, cohort, population, delta)
        if not 0 <= noise_multiplier < math.inf:
            raise InvalidArgument(f"noise_multiplier={noise_multiplier!r}, expected a finite number of at least 0")
        if not epsilon > 0:
            raise InvalidArgument(f"epsilon={epsilon!r}, expected a number above 0")
        self.noise_multiplier, self.cohort, self.population = noise_multiplier, cohort, population
        self.delta, self.epsilon = delta, epsilon
        self._accounting = _Accounting(cohort, population)
        self._of_a_round = self._accounting.divergences(noise_multiplier)

    def spent(self, rounds: int) -> float:
        """Returns the epsilon of (epsilon, delta) differential privacy of so many rounds together, 0 of none."""
        if integer("rounds", rounds) < 0:
            raise InvalidArgument(f"rounds={rounds!r}, expected at least 0")
        if rounds == 0:
            return 0.0
        return self._accounting.epsilon(self._of_a_round, rounds, self.delta)[0]

    def rounds(self) -> int:
        """Returns how many rounds ``epsilon`` is enough for.

        Raises:
            InvalidArgument: it is infinite.
        """
        if self.epsilon == math.inf:
            raise InvalidArgument("rounds() of a budget without an epsilon; give the epsilon that rounds may spend")
        low, high = 0, 1
        while self.spent(high) <= self.epsilon:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.spent(middle) <= self.epsilon else (low, middle)
        return low


def epsilon(
    *, noise_multiplier: float, rounds: int, cohort: int | sampling.Poisson, population: int, delta: float
) -> float:
    """The epsilon that ``rounds``, at least 1, spend in all: ``Budget(...).spent(rounds)``.

    All rounds are to add their noise, those of a Poisson cohort without clients too: they do so in a ``Simulation``
    that is given the ``Budget``.
    """
    _check_accounting(rounds, cohort, population, delta)
    budget = Budget(noise_multiplier=noise_multiplier, cohort=cohort, population=population, delta=delta)
    return budget.spent(rounds)


def noise_multiplier(
    *, epsilon: float, rounds: int, cohort: int | sampling.Poisson, population: int, delta: float
) -> float:
    """The smallest noise multiplier, to 1e-4 or a millionth of it above, whose ``epsilon`` is at most the given one."""
    _check_accounting(rounds, cohort, population, delta)
    if not 0 < epsilon < math.inf:
        raise InvalidArgument(f"epsilon={epsilon!r}, expected a finite number above 0")
    accounting = _Accounting(cohort, population)

    def spends(multiplier: float, orders: list[float] | None = None) -> tuple[float, float]:
        return accounting.epsilon(accounting.divergences(multiplier, orders), rounds, delta)

    def least(high: float, orders: list[float], precision: float) -> float:
        """Returns the smallest multiplier, to the precision, with which these orders spend the epsilon or less.

        With `high` they do.
        """
        low = 0.99 * high
        while low > 0 and spends(low, orders)[0] <= epsilon:
            high, low = low, low - 2 * (high - low)
        low = max(low, 0.0)
        while high - low > precision:
            middle = (low + high) / 2
            low, high = (middle, high) if spends(middle, orders)[0] > epsilon else (low, middle)
        return high

    # The epsilon is the least of those of all orders of divergence, and each order takes time. So the multiplier is
    # found for a few orders, and then for those around the best one there, until no order allows a smaller one.
    few, high = sorted({*_FEW_ORDERS} & {*accounting.orders}), 1.0
    while spends(high, few)[0] > epsilon:
        high *= 2
        if high > 1e12:
            raise InvalidArgument(f"epsilon={epsilon!r} is out of reach of {rounds} rounds: expected a larger one")
    high = below = least(high, few, high / 100)
    while True:
        found, best = spends(below)
        if found > epsilon:
            return high
        orders = sorted(accounting.orders, key=lambda order: abs(math.log(order / best)))[:7]
        high = least(below, sorted(orders), max(1e-5, 1e-7 * below))
        below = high - max(1e-4, 1e-6 * high)
        if below <= 0:
            return high


_FEW_ORDERS = [1.3, 1.7, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 48.0, 63.0]


class _Accounting:
    """dp-accounting, imported when it is needed, for cohorts of one kind."""

    def __init__(self, cohort: int | sampling.Poisson, population: int) -> None:
        try:
            import dp_accounting
            from dp_accounting import rdp
        except ImportError as error:
            raise InvalidArgument(
                f"the accountant needs dp-accounting, which cannot be imported ({error}); pip install bagua[federated]"
            ) from error
        self.library, self.to_epsilon = dp_accounting, rdp.rdp_privacy_accountant.compute_epsilon
        self.cohort, self.population = cohort, population
        relations = dp_accounting.NeighboringRelation
        of_added = functools.partial(rdp.RdpAccountant, neighboring_relation=relations.ADD_OR_REMOVE_ONE)
        of_replaced = functools.partial(rdp.RdpAccountant, neighboring_relation=relations.REPLACE_ONE)
        self.new, self._scale = of_added, 1.0
        if not isinstance(cohort, sampling.Poisson):
            # Replacing a client moves the sum twice as far as adding one, which dp-accounting 0.6 does not count.
            one = dp_accounting.GaussianDpEvent(1.0)
            counts_twice = of_replaced().compose(one).get_epsilon(1e-5) > of_added().compose(one).get_epsilon(1e-5)
            self.new, self._scale = of_replaced, 1.0 if counts_twice else 0.5
        self.orders = [float(order) for order in self.new().orders]
        # The orders go far beyond the library's own, which end at an epsilon of log(1 / delta) / 1000 or so.
        self._unsampled_orders = [1 + 2 ** (exponent / 8) for exponent in range(-64, 241)]

    def divergences(self, multiplier: float, orders: list[float] | None = None) -> list[tuple[Any, Any]]:
        """Orders and Renyi divergences of one round: of a sampled cohort, and of one that an attacker knows.

        The library's bound for sampling without replacement loses its digits in cancellation where the noise is large:
        it stays at a third or so, however large, and raises from there on. The bound without sampling holds as well.

        Args:
            orders: of the sampled cohort; None: the library's own.
        """
        if multiplier == 0:
            return []
        gaussian = self.library.GaussianDpEvent(self._scale * multiplier)
        if isinstance(self.cohort, sampling.Poisson):
            sampled = self.library.PoissonSampledDpEvent(self.cohort.rate, gaussian)
        else:
            sampled = self.library.SampledWithoutReplacementDpEvent(self.population, self.cohort, gaussian)
        found, log = [], logging.getLogger("absl")
        log.addFilter(_is_not_of_one_order)
        try:
            for event, event_orders in ((gaussian, self._unsampled_orders), (sampled, orders)):
                with contextlib.suppress(ValueError, OverflowError):
                    accountant = self.new(event_orders).compose(event)
                    found.append((accountant.orders, accountant.rdp))
        finally:
            log.removeFilter(_is_not_of_one_order)
        return found

    def epsilon(self, of_a_round: list[tuple[Any, Any]], rounds: int, delta: float) -> tuple[float, float]:
        """The epsilon of all rounds and its order, of the divergences that give the least; inf by none."""
        found = []
        for orders, divergences in of_a_round:
            with contextlib.suppress(ValueError, OverflowError):
                epsilon, order = self.to_epsilon(orders, rounds * divergences, delta)
                found.append((float(epsilon), float(order)))
        return min((one for one in found if not math.isnan(one[0])), default=(math.inf, math.nan))


def _is_not_of_one_order(record: logging.LogRecord) -> bool:
    """Returns False for the warning that one of the small orders has no divergence, which is usual at high rates."""
    return not record.getMessage().startswith("_compute_log_a_frac failed to converge")


def _check_accounting(rounds: int, cohort: int | sampling.Poisson, population: int, delta: float) -> None:
    integer("rounds", rounds)
    if rounds < 1:
        raise InvalidArgument(f"rounds={rounds!r}, expected at least 1")
    sampling.check_cohort(cohort, population)
    if not 0 < delta < 1:
        raise InvalidArgument(f"delta={delta!r}, expected a number from 0 to 1, both excluded")
