"""DP-FedAvg against loops over clients and rounds; the accountant against its library and the exact mechanism."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, jvp

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.library import privacy, sampling
from bagua.federated.library.aggregators import Median, SecureSum, add_noise
from bagua.federated.library.privacy import PrivateMean
from bagua.federated.library.sampling import seed_of
from tests.conformance.training import process_group
from tests.distributed.worlds import SAME_TEST, fast_in

MASK = torch.tensor([True, True, False, True, True, True])
ROUNDS = 3


def updates(round):
    generator = torch.Generator().manual_seed(round)
    scale = torch.tensor([0.1, 0.5, 50.0, 1.0, 3.0, 0.0])
    return {
        "w": torch.randn(6, 3, generator=generator) * scale[:, None],
        "b": torch.randn(6, generator=generator) * scale,
    }


def private_mean(**options):
    return PrivateMean(
        **{"noise_multiplier": 0.8, "clip": 1.0, "quantile": 0.5, "count_stddev": 1.0, "seed": 3, **options}
    )


def in_loops(z, quantile, number=5):
    """Of the five clients that take part, divided by `number`."""
    norm, means = 1.0, []
    z_sum = z if quantile is None else (z**-2 - (2 * 1.0) ** -2) ** -0.5
    for round in range(ROUNDS):
        value, below, total = updates(round), 0, torch.zeros(4, dtype=torch.float64)
        for i in range(6):
            if MASK[i]:
                flat = torch.cat([value["w"][i], value["b"][i].reshape(1)]).double()
                length = flat.square().sum().sqrt().item()
                total += flat * min(1.0, norm / length if length else 1.0)
                below += length <= norm
        unit = add_noise({"w": torch.zeros(3), "b": torch.zeros(())}, 1.0, 3, torch.tensor(round))
        total = total + z_sum * norm * torch.cat([unit["w"], unit["b"].reshape(1)])
        means.append(total / number)
        if quantile is not None:
            noise = float(add_noise(torch.zeros(()), 1.0, seed_of(3, "quantile"), torch.tensor(round)))
            norm *= math.exp(-0.2 * (0.5 + (below - 5 / 2 + noise) / number - quantile))
    return torch.stack(means), norm


def on_ranks(rank, world_size, split):
    with process_group():
        own = federated.local_slice(6, num_local=split)
        for options in ({}, {"quantile": None}, {"reduction": SecureSum()}, {"denominator": 3.5}):
            mean = private_mean(**options)
            program = federated.program(mean, clients=6, num_local=split)
            state, found = mean.init(updates(0)), []
            for number in range(ROUNDS):
                mine = {name: leaf[own] for name, leaf in updates(number).items()}
                value, state = program(mine, state, mask=MASK[own])
                found.append(torch.cat([value["w"], value["b"].reshape(1)]))
            means, norm = in_loops(0.8, options.get("quantile", 0.5), options.get("denominator", 5))
            torch.testing.assert_close(torch.stack(found), means.float(), rtol=1e-4, atol=1e-5)
            assert float(state["clip"]) == pytest.approx(norm, rel=1e-4) and state["round"] == ROUNDS


@pytest.mark.parametrize("split", [pytest.param((4, 2), marks=SAME_TEST), (3, 0, 3)], ids=str)
def test_rounds_are_those_of_loops(pools, split):
    pools[len(split)].run(on_ranks, args=(split,))


def test_the_norm_finds_the_quantile():
    mean = PrivateMean(noise_multiplier=0.0, clip=0.1, quantile=0.7, learning_rate=0.5, seed=1)
    program, state = federated.program(mean, clients=101), mean.init(torch.zeros(1))
    norms = torch.linspace(0, 10, 101).unsqueeze(1)
    for _ in range(60):
        _, state = program(norms, state)
    assert abs(float(state["clip"]) - 7.0) < 0.3


def run(mean, values):
    return federated.program(mean, clients=len(values))(values, mean.init(values[0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_client_moves_the_sum_by_more_than_the_norm(bad):
    """Whatever it sends: what is not finite is zeros, and above the norm."""
    values = torch.tensor([[0.3, 0.4], [bad, 0.0], [0.3, bad]])
    mean = private_mean(noise_multiplier=0.0, count_stddev=0.0)
    found, state = run(mean, values)
    torch.testing.assert_close(found, torch.tensor([0.1, 0.4 / 3]))
    assert float(state["clip"]) == pytest.approx(math.exp(-0.2 * (1 / 3 - 0.5)))
    gradient = grad(lambda values: run(mean, values)[0].sum())(values)
    assert gradient.isfinite().all() and not gradient[1:].any()


def test_halves_are_clipped_and_added_up_in_float32():
    """Rounding each client to bfloat16 could lengthen it by 2^-9, and a sum of 1000 of them is no sum."""
    values = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).bfloat16() + 1
    mean = private_mean(quantile=None)
    found, expected = run(mean, values)[0], run(mean, values.float())[0]
    assert torch.equal(found, expected.bfloat16())


def test_the_noise_covers_the_rounding_to_fixed_point():
    """Each coordinate of a client's may be rounded up by half a step: here all are, and its norm doubles."""
    numel, fraction_bits = 4096, 6
    step = 2.0**-fraction_bits
    values = torch.full((1, numel), 0.51 * step)
    reduction = SecureSum(bits=40, fraction_bits=fraction_bits)
    moved = run(private_mean(noise_multiplier=0.0, quantile=None, reduction=reduction), values)[0].norm()
    assert moved > 1.9 * values.norm()
    options = {"noise_multiplier": 1.0, "clip": 0.51, "quantile": None}
    with_noise = run(private_mean(**options, reduction=reduction), values)[0] - step
    unit = add_noise(torch.zeros(numel), 1.0, 3, torch.tensor(0))
    torch.testing.assert_close(with_noise, unit * (0.51 + 64 * step / 2))
    assert 0.51 + 64 * step / 2 >= moved


def test_both_noises_together_are_as_much_as_one():
    """A client moves (sum / norm, number below it) by up to (1, 1/2), in units of the deviations by 1 / multiplier."""
    for multiplier in (0.3, 1.0, 3.0):
        z_sum, z_count = private_mean(noise_multiplier=multiplier, count_stddev=2.0).stddevs(6)
        assert math.hypot(1 / z_sum, 0.5 / z_count) == pytest.approx(1 / multiplier)
    assert PrivateMean(noise_multiplier=1.0, clip=1.0, quantile=0.5, seed=0).stddevs(100)[1] == 5.0
    assert PrivateMean(noise_multiplier=1.0, clip=1.0, seed=0).stddevs(100) == (1.0, 0.0)


def test_one_client_more_moves_the_sum_by_the_norm_and_the_number_below_it_by_a_half():
    """With a denominator, where no number of clients is in the result."""
    mean = private_mean(noise_multiplier=0.0, count_stddev=0.0, denominator=4.0)
    program, state = federated.program(mean, clients=6), mean.init(updates(1))

    def released(mask):
        value, after = program(updates(1), state, mask=mask)
        share = 0.5 - math.log(after["clip"]) / 0.2
        return torch.cat([value["w"], value["b"].reshape(1)]) * 4, share * 4

    (total, count), moved = released(MASK), []
    for i in range(6):
        other_total, other_count = released(MASK ^ (torch.arange(6) == i))
        moved.append(float((total - other_total).norm()))
        assert abs(count - other_count) == pytest.approx(0.5, abs=1e-4)
    assert max(moved) == pytest.approx(1.0, abs=1e-5) and min(moved) < 0.9
    assert mean.stddevs(4.0) == (0.0, 0.0)
    by_default = PrivateMean(noise_multiplier=1.0, clip=1.0, quantile=0.5, seed=0, denominator=60.0)
    assert federated.program(by_default, clients=2)(torch.zeros(2, 1), by_default.init(torch.zeros(1)))[0].isfinite()


def test_it_is_differentiable():
    mean = private_mean()
    program, state = federated.program(mean, clients=6), mean.init(torch.zeros(3))

    def loss(x):
        return program({name: x * leaf for name, leaf in updates(1).items()}, state)[0]["w"].square().sum()

    x, step = torch.tensor(0.7), 1e-2
    difference = (loss(x + step) - loss(x - step)) / (2 * step)
    torch.testing.assert_close(grad(loss)(x), difference, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(jvp(loss, (x,), (torch.ones(()),))[1], grad(loss)(x))


def test_isolated_clients():
    """What the server gets of clients on other machines, by sums of masked vectors, is the private mean."""
    mean = private_mean(reduction=SecureSum())
    program, state = federated.program(mean, clients=6), mean.init(updates(1))
    graph = federated.trace(lambda values, mask, state: program(values, state, mask=mask), updates(1), MASK, state)
    own = [{name: leaf[i] for name, leaf in updates(1).items()} for i in range(6)]
    clients = [federated.Client(values=own[i], mask=MASK[i]) for i in range(6)]
    found = federated.run_on(federated.IsolatedClients(clients), graph, state=state)
    torch.testing.assert_close(found, program(updates(1), state, mask=MASK), rtol=1e-5, atol=1e-6)


# ---- the accountant


ALL_ROUNDS = {"rounds": 300, "cohort": 50, "population": 10_000, "delta": 1e-6}


@pytest.mark.needs("dp_accounting")
def test_epsilon_is_the_librarys():
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(1.2 / 2)  # of the sum's movement, up to twice the norm
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(10_000, 50, gaussian), 300)
    found = privacy.epsilon(noise_multiplier=1.2, **ALL_ROUNDS)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-12)
    assert privacy.epsilon(noise_multiplier=0.0, **ALL_ROUNDS) == math.inf
    budget = privacy.Budget(noise_multiplier=1.2, cohort=50, population=10_000, delta=1e-6, epsilon=found)
    assert (budget.spent(0), budget.spent(300), budget.rounds()) == (0.0, found, 300)


@pytest.mark.needs("dp_accounting")
@pytest.mark.parametrize("rate, multiplier", [(0.005, 1.2), (1.0, 3.0)])
def test_epsilon_of_poisson_cohorts_is_the_librarys(rate, multiplier):
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), 300)
    job = {"cohort": sampling.Poisson(rate), "population": 10_000, "delta": 1e-6}
    found = privacy.epsilon(noise_multiplier=multiplier, rounds=300, **job)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3 if rate == 1 else 1e-12)
    least = privacy.noise_multiplier(epsilon=found, rounds=300, **job)
    assert multiplier - 1e-4 <= least <= multiplier + 1e-4


@pytest.mark.needs("dp_accounting")
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_epsilon_of_poisson_cohorts_is_no_less_than_that_of_the_exact_mechanism(rate):
    """One round: noise alone, and the mixture of it with noise around the norm; numerically, in both directions."""
    multiplier, delta, step = 0.8, 1e-5, 1e-3
    x = torch.arange(-12, 12, step, dtype=torch.float64)
    density = lambda mean: torch.exp(-(((x - mean) / multiplier) ** 2) / 2) / (multiplier * math.tau**0.5)  # noqa: E731
    one, other = density(0.0), (1 - rate) * density(0.0) + rate * density(1.0)

    def delta_of(epsilon):
        excesses = [(a - math.exp(epsilon) * b).clamp(min=0).sum() * step for a, b in ((one, other), (other, one))]
        return float(max(excesses))

    found = privacy.epsilon(
        noise_multiplier=multiplier, rounds=1, cohort=sampling.Poisson(rate), population=100, delta=delta
    )
    assert delta_of(found) <= delta <= delta_of(0.7 * found)


@pytest.mark.needs("dp_accounting")
def test_orders_without_a_divergence_are_no_warnings(caplog):
    accounting = privacy._Accounting(sampling.Poisson(0.1), 1000)
    *_, (_, divergences) = accounting.divergences(1.0)
    assert not caplog.records and (divergences == math.inf).any()
    accounting.new().compose(
        accounting.library.PoissonSampledDpEvent(0.1, accounting.library.GaussianDpEvent(1.0))
    )  # of the library alone
    assert caplog.records and all("failed to converge" in record.getMessage() for record in caplog.records)


@pytest.mark.needs("dp_accounting")
def test_rounds_of_poisson_cohorts_with_a_budget_add_noise_also_where_nobody_is_drawn(tmp_path):
    """A round left out would say that nobody was drawn."""
    cohort, population, rounds = sampling.Poisson(rate=0.1), 10, 12
    mean = PrivateMean(noise_multiplier=2.0, clip=1.0, seed=3, denominator=population * cohort.rate)
    sizes = []

    def step(state, round):
        program = federated.program(mean, clients=len(round.cohort))
        value, of_mean = program(torch.ones(len(round.clients), 1), state["mean"], mask=round.mask)
        sizes.append(round.participants)
        return {"model": state["model"] + value, "mean": of_mean}, {}

    def simulation(budget):
        state = {"model": torch.zeros(1), "mean": mean.init(torch.zeros(1))}
        return federated.Simulation(step, state, population=population, cohort=cohort, seed=5, budget=budget)

    budget = privacy.Budget(noise_multiplier=2.0, cohort=cohort, population=population, delta=1e-3)
    run = simulation(budget)
    figures = run.run(rounds)
    drawn = [int(cohort.draw(population, seed=5, round=number)[1].sum()) for number in range(rounds)]
    assert sizes == drawn == [one["participants"] for one in figures] and 0 in drawn and max(drawn) > 1
    noise = [add_noise(torch.zeros(1), 2.0, 3, torch.tensor(number)) for number in range(rounds)]
    torch.testing.assert_close(run.state["model"], sum(noise) + sum(drawn))
    assert figures[-1]["epsilon"] == budget.spent(rounds)
    sizes.clear()
    unaccounted = simulation(None)
    unaccounted.save(tmp_path / "before")
    unaccounted.run(rounds, checkpoint=tmp_path / "after", every=rounds)
    assert sizes == [number for number in drawn if number]
    again = simulation(budget)
    again.load(tmp_path / "before")
    with pytest.raises(InvalidArgument, match="of 12 rounds of Poisson cohorts without a budget"):
        again.load(tmp_path / "after")
    assert again.round == 0


@pytest.mark.needs("dp_accounting")
def test_a_simulation_ends_where_its_budget_is_spent(tmp_path):
    job = {"cohort": 2, "population": 10}
    budget = privacy.Budget(noise_multiplier=3.0, delta=1e-5, epsilon=6.0, **job)
    run = federated.Simulation(lambda state, round: (state, {}), torch.zeros(()), seed=1, budget=budget, **job)
    figures = run.run(1000, checkpoint=tmp_path / "run", every=7)
    num_rounds = budget.rounds()
    assert 1 < num_rounds < 1000
    assert len(figures) == run.round == num_rounds
    assert [one["epsilon"] for one in figures] == [budget.spent(index + 1) for index in range(num_rounds)]
    assert figures[-1]["epsilon"] <= 6.0 < budget.spent(num_rounds + 1)
    assert run.run(2000) == []
    again = federated.Simulation(lambda state, round: (state, {}), torch.zeros(()), seed=1, budget=budget, **job)
    again.load(tmp_path / "run")
    assert again.round == num_rounds
    again._budget = privacy.Budget(noise_multiplier=4.0, delta=1e-5, **job)
    with pytest.raises(InvalidArgument, match="of rounds with noise_multiplier=3.0, expected 4.0"):
        again.load(tmp_path / "run")
    with pytest.raises(InvalidArgument, match="a budget of cohorts of 2 of 10 clients, but cohort=3"):
        federated.Simulation(
            lambda state, round: (state, {}), torch.zeros(()), seed=1, budget=budget, cohort=3, population=10
        )


@pytest.mark.needs("dp_accounting")
@pytest.mark.parametrize(
    "of_budget, options, message",
    [
        (
            0.2,
            {"cohort": 2},
            r"a budget of cohorts of Poisson\(rate=0.2\) of 10 clients, but cohort=2 and population=10",
        ),
        (0.2, {"cohort": sampling.Poisson(0.1)}, r"but cohort=Poisson\(rate=0.1\)"),
        (0.2, {"availability": federated.Availability(wait_for=1)}, "wait_for=1 with a budget of Poisson cohorts"),
        (None, {"num_local": [10]}, r"num_local=\[10\] with cohort=Poisson\(rate=0.2\), whose size changes"),
    ],
)
def test_simulations_that_are_no_fit(of_budget, options, message):
    job = {"cohort": sampling.Poisson(0.2), "population": 10}
    if of_budget is not None:
        budget = privacy.Budget(noise_multiplier=3.0, delta=1e-5, cohort=sampling.Poisson(of_budget), population=10)
        job["budget"] = budget
    with pytest.raises(InvalidArgument, match=message):
        federated.Simulation(lambda state, round: (state, {}), 0, seed=1, **{**job, **options})


@pytest.mark.needs("dp_accounting")
@pytest.mark.slow("test_epsilon_is_the_librarys")
def test_the_multiplier_for_an_epsilon():
    found = privacy.noise_multiplier(epsilon=4.0, **ALL_ROUNDS)
    assert privacy.epsilon(noise_multiplier=found, **ALL_ROUNDS) <= 4.0
    assert privacy.epsilon(noise_multiplier=found - 2e-4, **ALL_ROUNDS) > 4.0


@pytest.mark.needs("dp_accounting")
@pytest.mark.slow("test_epsilon_is_the_librarys")
def test_epsilon_where_the_noise_is_large():
    """At most that of concentrated privacy, which knows of no sampling: rho + 2 sqrt(rho log(1 / delta))."""
    multiplier = 1e4
    rho = 100 * 0.5 * (2 / multiplier) ** 2
    bound = rho + 2 * math.sqrt(rho * math.log(1e9))
    found = privacy.epsilon(noise_multiplier=multiplier, rounds=100, cohort=5, population=10, delta=1e-9)
    assert 0 <= found <= bound


@pytest.mark.needs("dp_accounting")
@pytest.mark.slow("test_epsilon_is_the_librarys")
def test_the_multiplier_for_a_small_epsilon():
    job = {"rounds": 100, "cohort": 5, "population": 10, "delta": 1e-9}
    found = privacy.noise_multiplier(epsilon=0.05, **job)
    assert 0.049 < privacy.epsilon(noise_multiplier=found, **job) <= 0.05


@pytest.mark.needs("dp_accounting")
@fast_in("multiplier", [1.0], [1.0, 4.0])
def test_epsilon_is_no_less_than_that_of_the_exact_mechanism(multiplier):
    """All clients in one round: two sums 2 norms apart, with noise of `multiplier` norms (Balle and Wang, 2018)."""

    def delta_of(epsilon):
        gap = 2 / multiplier
        below = lambda x: math.erfc(-x / math.sqrt(2)) / 2  # noqa: E731
        return below(gap / 2 - epsilon / gap) - math.exp(epsilon) * below(-gap / 2 - epsilon / gap)

    found = privacy.epsilon(noise_multiplier=multiplier, rounds=1, cohort=100, population=100, delta=1e-5)
    assert delta_of(found) <= 1e-5 <= delta_of(0.8 * found)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(InvalidArgument, match=r"needs dp-accounting, .*pip install bagua\[federated\]"):
        privacy.epsilon(noise_multiplier=1.0, rounds=1, cohort=1, population=2, delta=1e-5)


JOB = {"rounds": 3, "cohort": 5, "population": 10, "delta": 1e-5}
MISTAKES = {
    "multiplier": (lambda: private_mean(noise_multiplier=-1.0), "noise_multiplier=-1.0"),
    "clip": (lambda: private_mean(clip=0.0), "clip=0.0"),
    "robust": (lambda: private_mean(reduction=Median()), r"reduction=Median\(\), expected Sum"),
    "count": (lambda: private_mean(noise_multiplier=2.0).stddevs(6), "count_stddev=1.0 reveals more than noise_multip"),
    "budget": (
        lambda: privacy.Budget(noise_multiplier=1.0, cohort=1, population=2, delta=1e-5, epsilon=0.0),
        "epsilon=0",
    ),
    "denominator": (lambda: private_mean(denominator=0.0), "denominator=0.0, expected None or a number of clients"),
    "cohort": (lambda: privacy.epsilon(noise_multiplier=1.0, **{**JOB, "cohort": 11}), "a cohort of 11 of 10"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what):
    make, message = MISTAKES[what]
    with pytest.raises(InvalidArgument, match=message):
        make()
