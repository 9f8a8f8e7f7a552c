"""Simulations against loops over rounds and clients, and against themselves where they go on from a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import re

import pytest
import torch

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated import Availability, ClientStore, Simulation, partition, sampling
from bagua.federated.library.aggregators import Aggregator, Clip, Mean, Noise, Quantize, SecureSum
from bagua.federated.library.optimizers import SGD
from tests.conformance.training import process_group

POPULATION, COHORT, SEED = 40, 6, 11
TARGETS = torch.randn(POPULATION, 3, generator=torch.Generator().manual_seed(1))
AVAILABILITY = Availability(dropout=0.3, wait_for=4)
AGGREGATE = Aggregator(Clip(2.0), Quantize("qsgd", seed=5), SecureSum(), Noise(0.01, seed=6), Mean())
SERVER = SGD(0.5, momentum=0.9)


def first_state():
    model = torch.zeros(3)
    return {"model": model, "aggregator": AGGREGATE.init(model), "server": SERVER.init(model)}


def simulation(split=None, **options):
    """With every kind of state and of random numbers."""

    @federated.program(clients=COHORT, num_local=split)
    def change(model, targets, noise, state, mask):
        client = lambda model, target, noise: model - target + 0.1 * noise  # noqa: E731
        values = federated.map_fn(client, (federated.broadcast(model), targets, noise))
        return AGGREGATE(values, state, mask=mask)

    def step(state, round):
        noise = round.per_client(lambda generator: torch.randn(3, generator=generator))
        gradient, aggregator = change(state["model"], TARGETS[round.clients], noise, state["aggregator"], round.mask)
        gradient = gradient + 0.01 * torch.randn(3)  # of torch's own generator
        model, server = SERVER.apply(state["model"], gradient, state["server"])
        distance = (model - TARGETS.mean(0)).norm()
        return {"model": model, "aggregator": aggregator, "server": server}, {"distance": distance}

    arguments = {"population": POPULATION, "cohort": COHORT, "seed": SEED, "availability": AVAILABILITY, **options}
    return Simulation(step, first_state(), num_local=split, **arguments)


def test_rounds_are_those_of_loops():
    """Of a plain mean, where nothing is coded."""
    seen = []

    def step(state, round):
        mean = federated.program(federated.reduce_weighted_mean, clients=COHORT)
        seen.append(round)
        found = mean(TARGETS[round.clients], torch.ones(COHORT), mask=round.mask)
        return {"total": state["total"] + found}, {"first": found[0]}

    run = Simulation(
        step, {"total": torch.zeros(3)}, population=POPULATION, cohort=COHORT, seed=SEED, availability=AVAILABILITY
    )
    figures = run.run(5)
    total = torch.zeros(3)
    for number in range(5):
        cohort = sampling.cohort(POPULATION, COHORT, seed=SEED, round=number).tolist()
        mask = AVAILABILITY.mask(torch.tensor(cohort), seed=SEED, round=number).tolist()
        taking_part = [client for client, is_there in zip(cohort, mask, strict=True) if is_there]
        mean = sum(TARGETS[client] for client in taking_part) / len(taking_part)
        total = total + mean
        assert figures[number] == {
            "first": pytest.approx(float(mean[0]), rel=1e-5),
            "participants": len(taking_part),
            "bytes_down": 0,
            "bytes_up": 3 * 4 + 4,  # with the weight
        }
        assert seen[number].cohort.tolist() == seen[number].clients.tolist() == cohort
    torch.testing.assert_close(run.state["total"], total)
    assert run.round == 5 and run.run(5) == []


def leaves_of(run):
    return [
        leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in torch.utils._pytree.tree_leaves(run.state)
    ]


def interrupted(rank, world_size, split, path):
    """A run, and one that is saved in the middle."""
    with process_group():
        whole = simulation(split)
        figures = whole.run(6)
        half = simulation(split)
        torch.manual_seed(rank)  # what the process has drawn before does not matter, and goes on as it would
        expected = torch.rand(1, generator=torch.Generator().manual_seed(rank))
        assert half.run(3, checkpoint=path, every=2) == figures[:3] and torch.equal(torch.rand(1), expected)
        half.run(4)
        other = simulation(split)
        other.load(path)
        assert other.round == 3 and other.run(6) == figures[3:]
        assert leaves_of(other) == leaves_of(whole)
    return leaves_of(whole)


def test_a_run_goes_on_bit_for_bit_on_any_number_of_ranks(pools, tmp_path):
    results = pools[3].run(interrupted, args=((4, 0, 2), str(tmp_path / "three")))
    alone = simulation()
    alone.load(tmp_path / "three")
    alone.run(6)
    assert all(result == leaves_of(alone) for result in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["three"]


def differing(rank, world_size, path):
    with process_group():
        run = simulation()
        run.state["model"] = torch.full((3,), float(rank))
        with pytest.raises(InvalidArgument, match="disagree about leaf 0 of the state: rank 0 has .*, rank 1 has"):
            run.save(f"{path}/checkpoint")
        run = simulation()
        with pytest.raises(FileNotFoundError if rank == 0 else InvalidArgument, match="No such file"):
            run.save(f"{path}/nowhere/checkpoint")
        with pytest.raises(FileNotFoundError if rank == 0 else InvalidArgument, match="No such file"):
            run.load(f"{path}/checkpoint")
        bagua.barrier()


# ---- Poisson cohorts and ragged data

PARTS = [torch.arange(client * (client + 1) // 2, (client + 1) * (client + 2) // 2) for client in range(12)]
EXAMPLES = torch.randint(
    -9, 9, (78,), generator=torch.Generator().manual_seed(2)
).double()  # the last clients have more


def sum_of_examples(state, examples, is_example, mask):
    client = lambda state, examples, is_example: (examples * is_example).sum() + 0 * state  # noqa: E731
    sums = federated.map_fn(client, (federated.broadcast(state), examples, is_example))
    return federated.reduce_weighted_mean(sums, torch.ones(len(mask), dtype=torch.float64), mask=mask)


def poisson(folder, rate, population, program=federated.program):
    """Each client adds up its examples: in rounds of changing size, of data whose length changes by round and rank."""

    def step(state, round):
        parts = [PARTS[client] for client in round.clients]
        length = sampling.padded_size(max(map(len, parts), default=0))
        examples, is_example = partition.padded(EXAMPLES, parts, length=length)
        mean = program(sum_of_examples, clients=len(round.cohort))
        value = mean(state["value"], examples, is_example, round.mask)
        lengths.append(length)
        figures = {"value": value, "size": len(round.cohort)}
        return {"value": state["value"] + value}, figures, round.client_state + 1

    store, lengths = ClientStore(torch.tensor(0), folder), []
    job = {"population": population, "cohort": sampling.Poisson(rate), "seed": 4, "clients": store}
    start = {"value": torch.zeros((), dtype=torch.float64)}
    return Simulation(step, start, availability=Availability(dropout=0.2, wait_for=4), **job), store, lengths


def poisson_in_loops(rounds, rate, population):
    """Of the clients that are drawn, and nobody else."""
    total, numbers, taken_part = 0.0, [], [0] * population
    for number in range(rounds):
        cohort, is_drawn = sampling.Poisson(rate).draw(population, seed=4, round=number)
        drawn = [client for client, is_in in zip(cohort.tolist(), is_drawn.tolist(), strict=True) if is_in]
        stays = Availability(dropout=0.2, wait_for=4).mask(torch.tensor(drawn, dtype=torch.int64), seed=4, round=number)
        there = [client for client, is_in in zip(drawn, stays.tolist(), strict=True) if is_in]
        numbers.append(len(there))
        if there:
            total += sum(float(EXAMPLES[index]) for client in there for index in PARTS[client]) / len(there)
        for client in there:
            taken_part[client] += 1
    return total, numbers, taken_part


def on_poisson_rounds(rank, world_size, folder, rate, population):
    """A whole run, and the end of one from its checkpoint, which the first number of ranks writes."""
    with process_group() if world_size > 1 else contextlib.nullcontext():
        total, numbers, taken_part = poisson_in_loops(14, rate, population)
        run, store, lengths = poisson(None, rate, population)
        figures = run.run(14)
        assert [one["participants"] for one in figures] == numbers and 0 in numbers
        assert float(run.state["value"]) == pytest.approx(total, rel=1e-12)
        mine = range(rank, population, world_size)
        assert store.rows(mine).tolist() == taken_part[rank::world_size]
        if world_size == 3:
            poisson(folder, rate, population)[0].run(5, checkpoint=folder / "run")
        other, rows, _ = poisson(folder, rate, population)
        other.load(folder / "run")
        assert other.run(14) == figures[5:] and torch.equal(other.state["value"], run.state["value"])
        assert rows.rows(mine).tolist() == taken_part[rank::world_size]
        return run.state["value"].item(), {one["size"] for one in figures if "size" in one}, lengths


@pytest.mark.parametrize("rate, population, sizes", [(0.25, 12, {4, 8}), (0.4, 2, {2})])
def test_poisson_rounds_on_ranks_are_those_of_loops_over_the_drawn(pools, tmp_path, rate, population, sizes):
    """With two clients one of three ranks has none."""
    three = pools[3].run(on_poisson_rounds, args=(tmp_path, rate, population))
    two = pools[2].run(on_poisson_rounds, args=(tmp_path, rate, population))
    alone = on_poisson_rounds(0, 1, tmp_path, rate, population)
    assert all(one[:2] == (alone[0], sizes) for one in (*three, *two))
    assert population == 2 or two[0][2] != two[1][2], "ranks pad their data to lengths of their own"


def test_rounds_of_changing_shapes_are_compiled_once_for_each():
    shapes = []

    @functools.cache
    def compiled(clients):
        return torch.compile(federated.program(sum_of_examples, clients=clients), backend="eager", dynamic=False)

    def program(function, clients):
        def run(state, examples, is_example, mask):
            shapes.append(examples.shape)
            return compiled(clients)(state, examples, is_example, mask)

        return run

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64):
        run, _, _ = poisson(None, 0.5, 6, program)
        run.run(40)
    num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (
        num_compiled == len(set(shapes)) and 3 <= num_compiled <= 4 and not torch._dynamo.utils.counters["graph_break"]
    )
    assert float(run.state["value"]) == pytest.approx(poisson_in_loops(40, 0.5, 6)[0], rel=1e-12)


def test_checkpoints_that_fail_do_so_on_all_ranks(pool2, tmp_path):
    pool2.run(differing, args=(str(tmp_path),))
    assert list(tmp_path.iterdir()) == []


# ---- who takes part


def test_stragglers_are_dropped():
    clients, rounds = torch.arange(60), 40
    slow_rounds = torch.zeros(60)
    for number in range(rounds):
        dropped = ~sampling.participates(clients, 0.8, seed=1, round=number)
        mask = Availability(dropout=0.2, wait_for=30).mask(clients, seed=1, round=number)
        durations = Availability().durations(clients, seed=1, round=number)
        assert mask.sum() == 30 and not (mask & dropped).any()
        assert durations[mask].max() < durations[~mask & ~dropped].min()
        slow_rounds += durations > durations.median()
        few = Availability(dropout=0.2, wait_for=59).mask(clients, seed=1, round=number)
        assert torch.equal(few, ~dropped), "those who are there, where there are fewer"
    assert (slow_rounds > 0.8 * rounds).sum() > 5 and (slow_rounds < 0.2 * rounds).sum() > 5, "slow ones stay slow"
    logs = torch.cat([Availability(spread=0.5).durations(clients, seed=s, round=0) for s in range(30)]).log()
    assert abs(logs.std() - 0.5) < 0.05 and abs(logs.mean()) < 0.05


def test_a_round_without_anybody_changes_nothing():
    run = simulation(availability=Availability(dropout=1.0))
    nothing = {"participants": 0.0, "bytes_down": 0.0, "bytes_up": 0.0}
    assert run.run(2) == [nothing] * 2 and leaves_of(run) == leaves_of(simulation())


# ---- figures


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars.append((tag, scalar_value, global_step))


def test_figures_are_written_and_shown(capsys):
    writer = Writer()
    run = simulation(writer=writer, name="digits", progress=True)
    assert run.values() == {}
    figures = run.run(2)
    expected = [(f"digits/{name}", value, i) for i, one in enumerate(figures) for name, value in one.items()]
    assert writer.scalars == expected and len(expected) == 8
    assert {**run.values(), "round_seconds": 0} == {"rounds": 2, "round_seconds": 0, **figures[1]}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["digits: 1 of 2 rounds", "digits: 2 of 2 rounds"]
    assert re.search(rf"distance {figures[1]['distance']:.4g}  participants 4", lines[1])
    simulation(progress=False).run(1)
    assert capsys.readouterr().err == ""


@pytest.mark.needs("prometheus_client")
def test_prometheus():
    from prometheus_client import CollectorRegistry

    registry, run = CollectorRegistry(), simulation(name="my run")
    registry.register(run.collector())
    assert registry.get_sample_value("bagua_my_run_rounds", {"rank": "0"}) is None
    (figures,) = run.run(1)
    assert registry.get_sample_value("bagua_my_run_rounds", {"rank": "0"}) == 1
    assert registry.get_sample_value("bagua_my_run_distance", {"rank": "0"}) == figures["distance"]


# ---- mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seed": 12}, "has seed=11, expected 12"),
        ({"availability": Availability()}, r"has availability='Availability\(dropout=0.3, wait_for=4"),
    ],
)
def test_a_checkpoint_of_another_simulation_is_refused(tmp_path, options, message):
    simulation().save(tmp_path / "checkpoint")
    with pytest.raises(InvalidArgument, match=message):
        simulation(**options).load(tmp_path / "checkpoint")
    other = Simulation(lambda s, r: (s, {}), torch.zeros(1), population=POPULATION, cohort=COHORT, seed=SEED)
    other._job = simulation()._job
    with pytest.raises(InvalidArgument, match=r"(?s)has a state .*, expected"):
        other.load(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        {"weights": torch.zeros(2)},
        {"round": "3"},
    ],
    ids=["text", "another object", "word"],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, content):
    """Damaged ones have all fields, and one that is wrong."""
    path = tmp_path / "other"
    if isinstance(content, dict) and "weights" not in content:
        simulation().save(path)
        content = {**torch.load(path), **content}
    torch.save(content, path) if isinstance(content, dict) else path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"{path} is no checkpoint of a Simulation.*give a file that save wrote"):
        simulation().load(path)


@pytest.mark.parametrize(
    "leaf, expected",
    [(torch.zeros(3), r"torch.float32 and shape \[3\]"), (torch.zeros(2).double(), r"torch.float64 and shape \[2\]")],
    ids=["longer", "dtype"],
)
def test_a_checkpoint_with_other_tensors_is_refused(tmp_path, leaf, expected):
    """And nothing of it is taken."""

    def make(leaf):
        return Simulation(
            lambda state, round: (state, {}), {"n": 0, "w": [leaf]}, population=POPULATION, cohort=COHORT, seed=SEED
        )

    run = make(torch.ones(2))
    run.run(2, checkpoint=tmp_path / "checkpoint")
    other = make(leaf)
    message = r"began with a state at \['w'\]\[0\] of torch.float32 and shape \[2\], expected "
    with pytest.raises(InvalidArgument, match=message + expected):
        other.load(tmp_path / "checkpoint")
    assert other.round == 0 and other.state["w"][0] is leaf
    alike = make(torch.zeros(2))
    alike.load(tmp_path / "checkpoint")
    assert alike.round == 2 and alike.state["w"][0].tolist() == [1.0, 1.0]


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    run = Simulation(lambda state, round: (state, {}), {"a": torch.eye(2).to_sparse()}, population=3, cohort=2, seed=0)
    with pytest.raises(
        InvalidArgument, match="(?s)leaf 0 of the state is .* a checkpoint cannot hold, expected dense tens"
    ):
        run.run(1, checkpoint=tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_rounds_may_change_the_shapes_of_the_state(tmp_path):
    def make():
        def step(state, round):
            return {"history": torch.cat([state["history"], torch.tensor([round.number])]), "n": state["n"] + 1.0}, {}

        state = {"history": torch.empty(0, dtype=torch.int64), "n": torch.tensor(0.0)}
        return Simulation(step, state, population=POPULATION, cohort=COHORT, seed=SEED)

    make().run(3, checkpoint=tmp_path / "checkpoint")
    other = make()
    other.run(1)
    other.load(tmp_path / "checkpoint")
    other.run(5)
    assert other.state["history"].tolist() == [0, 1, 2, 3, 4] and float(other.state["n"]) == 5.0


def test_draws_for_another_use_are_others():
    round, other = simulation().sample(0), simulation().sample(1)

    def draw(generator):
        return torch.rand(4, generator=generator)

    found = [round.per_client(draw), round.per_client(draw, use="a"), round.per_client(draw, use="b")]
    found += [other.per_client(draw, use="a")]
    assert len({row for one in found for row in map(tuple, one.tolist())}) == 4 * COHORT
    assert torch.equal(found[1], round.per_client(draw, use="a"))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: simulation(cohort=41), "a cohort of 41 of 40 clients"),
        (lambda: simulation().run(1, every=0), "every=0"),
        (lambda: Availability(dropout=1.5), "dropout=1.5"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
