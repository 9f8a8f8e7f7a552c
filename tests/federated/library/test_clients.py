"""Rows of clients against a dictionary in a loop; on any number of ranks, after kills, and what is refused."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from torch.utils import _pytree as pytree

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated import Availability, ClientStore, Simulation, sampling
from bagua.testing import spawn
from tests.conformance.training import process_group

POPULATION, COHORT, SEED = 23, 6, 5
AVAILABILITY = Availability(dropout=0.3)
INITIAL = {
    "head": torch.arange(6.0).view(2, 3).to(torch.bfloat16),
    "rounds": torch.tensor(0),
    "none": torch.zeros(0, 2),
    "is_new": torch.tensor([True]),
}


def step(state, round):
    """Clients' rows change by the round and their number; the server's state by a sum over those that take part."""
    rows = round.client_state
    assert {name: (leaf.shape[1:], leaf.dtype) for name, leaf in rows.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in INITIAL.items()
    }
    total = federated.program(federated.reduce_weighted_mean, clients=COHORT, num_local=NUM_LOCAL)
    mean = total(rows["rounds"].float(), torch.ones(len(round.clients)), mask=round.mask)
    rows = {
        "head": rows["head"] + (round.clients * (round.number + 1)).view(-1, 1, 1).to(torch.bfloat16),
        "rounds": rows["rounds"] + 1,
        "none": rows["none"],
        "is_new": torch.zeros_like(rows["is_new"]),
    }
    return state + mean, {}, rows


NUM_LOCAL = None


def simulation(folder, num_local=None):
    global NUM_LOCAL
    NUM_LOCAL = num_local
    store = ClientStore(INITIAL, folder)
    job = {"population": POPULATION, "cohort": COHORT, "seed": SEED, "availability": AVAILABILITY}
    return Simulation(step, torch.zeros(()), clients=store, num_local=num_local, **job), store


def in_loops(rounds):
    """State and rows after so many rounds."""
    rows, state = {}, 0.0
    for number in range(rounds):
        cohort = sampling.cohort(POPULATION, COHORT, seed=SEED, round=number)
        mask = AVAILABILITY.mask(cohort, seed=SEED, round=number).tolist()
        there = [client for client, is_there in zip(cohort.tolist(), mask, strict=True) if is_there]
        if there:
            state += sum(float(rows.get(client, INITIAL)["rounds"]) for client in there) / len(there)
        for client in there:
            row = rows.get(client, INITIAL)
            head = row["head"] + torch.tensor(client * (number + 1)).to(torch.bfloat16)
            rows[client] = {**row, "head": head, "rounds": row["rounds"] + 1, "is_new": torch.tensor([False])}
    return state, rows


def check(run, store, rounds, rank=0, num_ranks=1):
    state, rows = in_loops(rounds)
    assert float(run.state) == pytest.approx(state, rel=1e-6)
    for client in range(rank, POPULATION, num_ranks):
        row = pytree.tree_map(lambda leaf: leaf[0], store.rows([client]))
        for name, expected in rows.get(client, INITIAL).items():
            assert torch.equal(row[name], expected), (client, name)


def test_rows_are_those_of_a_dictionary():
    run, store = simulation(None)
    run.run(9)
    check(run, store, 9)


def on_ranks(rank, world_size, num_local, folder):
    with process_group():
        run, store = simulation(folder, num_local)
        run.run(4, checkpoint=folder / "run")
        check(run, store, 4, rank, world_size)
        run.run(7)  # which no checkpoint has
        check(run, store, 7, rank, world_size)


def resumed(rank, world_size, folder):
    with process_group():
        run, store = simulation(folder)
        run.load(folder / "run")
        check(run, store, 4, rank, world_size)
        run.run(9, checkpoint=folder / "run", every=2)
        check(run, store, 9, rank, world_size)


def test_rows_follow_clients_between_ranks_and_numbers_of_ranks(pools, pool4, tmp_path):
    pools[3].run(on_ranks, args=((4, 0, 2), tmp_path))
    pools[3].run(resumed_and_left, args=(tmp_path,))
    pool4.run(resumed, args=(tmp_path,))
    assert sorted(path.name for path in tmp_path.glob("*.sqlite")) == [
        f"clients.{rank}.of.4.sqlite" for rank in range(4)
    ]
    run, store = simulation(tmp_path)
    run.load(tmp_path / "run")
    check(run, store, 9)
    run.run(12, checkpoint=tmp_path / "run")
    check(run, store, 12)
    assert [path.name for path in tmp_path.glob("*.sqlite")] == ["clients.0.of.1.sqlite"]


def resumed_and_left(rank, world_size, folder):
    """Without a checkpoint of its own."""
    with process_group():
        run, store = simulation(folder)
        run.load(folder / "run")
        run.run(6)
        check(run, store, 6, rank, world_size)


def killed(rank, world_size, folder):
    run, store = simulation(folder)

    def forget(round):
        if round == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        ClientStore.forget(store, round)

    store.forget = forget  # the checkpoint is written by then, and older versions are not deleted
    run.run(9, checkpoint=folder / "run", every=3)


def test_a_kill_at_the_worst_time_loses_nothing(tmp_path):
    spawn(killed, 1, args=(tmp_path,), expect_exit={0: signal.SIGKILL})
    run, store = simulation(tmp_path)
    run.load(tmp_path / "run")
    assert run.round == 6
    check(run, store, 6)
    run.run(9, checkpoint=tmp_path / "run")
    check(run, store, 9)


JOB = {"population": 4, "cohort": 2, "seed": 1}


def row_of(result):
    Simulation(lambda state, round: result, 0, clients=ClientStore(torch.zeros(3)), **JOB).run(1)


MISTAKES = {
    "no row": (lambda folder: row_of((0, {})), "with clients= a step returns (state, figures, the clients' rows)"),
    "shape": (
        lambda folder: row_of((0, {}, torch.zeros(2, 4))),
        "have torch.float32 and shape [2, 4], expected torch.float32 and shape [2, 3]",
    ),
    "dtype": (lambda folder: row_of((0, {}, torch.zeros(2, 3).double())), "have torch.float64 and shape [2, 3]"),
    "structure": (lambda folder: row_of((0, {}, [torch.zeros(2, 3)])), "the clients' rows have the structure"),
    "no tensor": (lambda folder: ClientStore({"a": 1.0}), "a client's row has 1.0, expected a pytree of dense tensors"),
    "empty": (lambda folder: ClientStore({}), "a client's row has no tensor"),
    "in memory": (lambda folder: simulation(None)[0].run(1, checkpoint=folder / "run"), "give ClientStore a folder"),
    "not run": (lambda folder: ClientStore(torch.zeros(3)).rows([0]), "the store has no rows yet"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what, tmp_path):
    make, message = MISTAKES[what]
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        make(tmp_path)


def test_rows_and_checkpoints_that_do_not_belong_together(tmp_path):
    run, _ = simulation(tmp_path)
    run.run(2, checkpoint=tmp_path / "run")
    with pytest.raises(InvalidArgument, match=r"clients.0.of.1.sqlite has clients' rows of another run: load its"):
        simulation(tmp_path)[0].run(1)
    without = Simulation(
        lambda state, round: (state, {}),
        torch.zeros(()),
        population=POPULATION,
        cohort=COHORT,
        seed=SEED,
        availability=AVAILABILITY,
    )
    with pytest.raises(InvalidArgument, match="run has of clients rows of .*bfloat16 .*, expected no rows"):
        without.load(tmp_path / "run")
    without.run(2, checkpoint=tmp_path / "without")
    with pytest.raises(InvalidArgument, match="without has of clients no rows, expected rows of "):
        simulation(tmp_path)[0].load(tmp_path / "without")
    (tmp_path / "clients.0.of.1.sqlite").write_bytes(b"no database, but longer than its header would be" * 100)
    with pytest.raises(InvalidArgument, match="cannot be read .*give those of the checkpoint"):
        simulation(tmp_path)[0].load(tmp_path / "run")
    (tmp_path / "clients.0.of.1.sqlite").unlink()
    with pytest.raises(InvalidArgument, match="clients.0.of.1.sqlite is missing: copy it to this host"):
        simulation(tmp_path)[0].load(tmp_path / "run")


def test_rows_of_another_kind_are_refused(tmp_path):
    run, _ = simulation(tmp_path)
    run.run(2, checkpoint=tmp_path / "run")
    for name, leaf in (("rounds", torch.tensor(0.0)), ("head", torch.zeros(3, 2, dtype=torch.bfloat16))):
        other, _ = simulation(tmp_path)
        other._clients = ClientStore({**INITIAL, name: leaf}, tmp_path)
        with pytest.raises(InvalidArgument, match="run has of clients rows of"):
            other.load(tmp_path / "run")
    with pytest.raises(InvalidArgument, match="give ClientStore a folder"):
        simulation(None)[0].load(tmp_path / "run")


def test_rows_that_have_gone_on_are_not_those_of_an_earlier_checkpoint(tmp_path):
    run, _ = simulation(tmp_path)
    run.run(3, checkpoint=tmp_path / "early")
    run.run(6, checkpoint=tmp_path / "late", every=3)
    with pytest.raises(
        InvalidArgument, match="have gone on to a checkpoint after 6 rounds, and those after 3 are gone"
    ):
        simulation(tmp_path)[0].load(tmp_path / "early")
    again, store = simulation(tmp_path)
    again.load(tmp_path / "late")
    check(again, store, 6)


def test_a_checkpoint_before_anybody_took_part(tmp_path):
    job = {"population": POPULATION, "cohort": COHORT, "seed": SEED, "availability": Availability(dropout=1.0)}
    run = Simulation(step, torch.zeros(()), clients=ClientStore(INITIAL, tmp_path), **job)
    run.run(1, checkpoint=tmp_path / "run")
    other = Simulation(step, torch.zeros(()), clients=ClientStore(INITIAL, tmp_path), **job)
    other.load(tmp_path / "run")
    assert other.round == 1


def keeps_placed(rank, world_size):
    """What clients have, in the server's state."""
    with process_group():
        values = torch.arange(8.0)

        def put(state, round):
            state = state.clone()
            state[round.clients] = values[round.clients]
            return state, {}

        run = Simulation(put, torch.zeros(8), population=8, cohort=4, seed=1)
        with pytest.raises(InvalidArgument) as raised:
            run.run(3)
        assert run.round == 0
        return str(raised.value)


def test_placed_values_in_the_servers_state_are_an_error_in_the_first_round(pool2):
    for message in pool2.run(keeps_placed):
        assert "the ranks disagree about the state after a round" in message
        assert "keep what clients have in clients=ClientStore(...)" in message
