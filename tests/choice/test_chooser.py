"""What algorithm="auto" decides, with steps that take what a table says: tests/choice/clockwork.py."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests import accelerator
from tests.choice.clockwork import BASE, COMPUTE_S, Training
from tests.conformance.training import process_group

TABLE = {BASE: 1.0, "bytegrad": 0.5, "qsgd": 0.4}  # seconds of a step
R2 = {"risk": "R2"}


def _chosen(rank, world_size, seconds, predicted, options):
    with process_group():
        training = Training(rank, seconds, predicted, **options)
        try:
            choice = training.until_chosen()
            assert training.candidate == str(choice.candidate)
            weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
            threads = torch.get_num_threads()
            return choice, training.ran, training.asked_for, weights, threads
        finally:
            training.end()


def _choice(pool, seconds, predicted, **options):
    """The choice, the same on all ranks, and the candidates that it has tried, in their order."""
    found = pool.run(_chosen, args=(seconds, predicted, options))
    first, ran = found[0][0], found[0][1]
    for choice, also_ran, _, weights, _ in found[1:]:
        assert (choice.algorithm, choice.options, choice.rows) == (first.algorithm, first.options, first.rows)
        assert also_ran == ran
        if "R3" not in options.values():
            assert torch.equal(weights, found[0][3])
    return first, list(dict.fromkeys(ran))


def test_the_fastest_that_holds_what_was_predicted(pool2):
    choice, tried = _choice(pool2, TABLE, TABLE, risk="R2")
    assert (choice.algorithm, choice.options) == ("qsgd", {"bits": 4})
    assert tried == [BASE, "qsgd:bits=4"]
    assert choice.step_s == pytest.approx(0.4, rel=0.02)
    rows = {row.candidate: row for row in choice.rows}
    assert rows[BASE].measured_s == pytest.approx(1.0, rel=0.02)
    assert rows["bytegrad"].predicted_s == 0.5
    assert rows["bytegrad"].measured_s is None
    assert "2.50 times as fast" in choice.why or "2.49 times as fast" in choice.why


def test_a_class_has_no_candidates_of_riskier_ones(pool2):
    for risk, expected in (("R0", {BASE}), ("R1", {BASE, "bytegrad:codec=bf16"})):
        _, _, asked_for, *_ = pool2.run(_chosen, args=(TABLE, {}, {"risk": risk}))[0]
        assert {one for part in asked_for for one in part if "bucket_bytes" not in one} == expected


def test_what_contradicts_its_prediction_is_rolled_back_and_the_next_is_tried(pool2):
    choice, tried = _choice(pool2, {**TABLE, "qsgd": 1.2, "bytegrad:codec=bf16": 0.7}, TABLE, risk="R2")
    assert tried[:2] == [BASE, "qsgd:bits=4"]
    assert choice.algorithm == "bytegrad"
    rows = {row.candidate: row for row in choice.rows}
    assert rows["qsgd:bits=4"].measured_s == pytest.approx(1.2, rel=0.02)


def test_where_nothing_holds_the_base_stays(pool2):
    seconds = {BASE: 1.0, "qsgd": 0.97, "bytegrad": 1.1}
    choice, tried = _choice(pool2, seconds, TABLE, risk="R2")
    assert (choice.algorithm, choice.options) == (BASE, {})
    assert len(tried) > 2
    assert "nothing that was tried is 5% faster" in choice.why
    assert choice.step_s == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("predicted", "why"),
    [
        ({BASE: 1.0, "bytegrad": 0.96}, "nothing is predicted to gain 5%"),
        ({BASE: 0.7, "bytegrad": 0.8}, "30% by which"),
        ({}, "nothing is predicted"),
    ],
    ids=["a small gain", "a prediction that is off", "no prediction"],
)
def test_nothing_is_tried_that_does_not_promise_enough(pool2, predicted, why):
    choice, tried = _choice(pool2, TABLE, predicted, risk="R2")
    assert choice.algorithm == BASE
    assert tried == [BASE]
    assert why in choice.why


def test_nothing_is_predicted_where_nothing_can_be_gained(pool2):
    choice, ran, asked_for, *_ = pool2.run(_chosen, args=({BASE: 0.26}, TABLE, R2))[0]
    assert choice.algorithm == BASE
    assert "there is nothing to gain" in choice.why
    assert set(ran) == {BASE}
    assert asked_for == []


def test_of_candidates_alike_the_least_risky_is_tried(pool2):
    seconds = {BASE: 1.0, "bytegrad": 0.5, "qsgd": 0.5}
    choice, tried = _choice(pool2, seconds, {**seconds, "qsgd": 0.495}, risk="R2")
    assert tried == [BASE, "bytegrad:codec=bf16"]
    assert choice.options == {"codec": "bf16"}


def test_buckets_are_chosen_unless_the_program_has(pool2):
    sizes = {
        f"bytegrad:codec=bf16,bucket_bytes={size}": seconds for size, seconds in ((5 << 20, 0.3), (100 << 20, 0.6))
    }
    table = {BASE: 1.0, "bytegrad": 0.5, **sizes}
    choice, _ = _choice(pool2, table, table)
    assert choice.options == {"codec": "bf16", "bucket_bytes": 5 << 20}
    choice, _ = _choice(pool2, table, table, bucket_bytes=1 << 20)
    assert choice.options == {"bucket_bytes": 1 << 20, "codec": "bf16"}


def test_weights_that_part_must_make_up_for_it(pool2):
    """Two ranks that train apart need 2^0.122 = 1.088 times as many steps."""
    table = {BASE: 1.0, "bytegrad": 0.5, "qsgd": 0.5, "local_sgd": 0.46, "diloco": 0.5, "powersgd": 0.6}
    choice, _ = _choice(pool2, table, table, risk="R3")
    assert choice.algorithm == "bytegrad"
    choice, _ = _choice(pool2, {**table, "local_sgd": 0.3}, {**table, "local_sgd": 0.3}, risk="R3")
    assert choice.algorithm == "local_sgd"


def test_what_with_bagua_refuses_is_left_out(pool2):
    """Without an optimizer nothing can exchange weights."""
    table = {BASE: 1.0, "bytegrad": 0.5, "local_sgd": 0.26}
    choice, _ = _choice(pool2, table, table, risk="R3", optimizer=False)
    assert choice.algorithm == "bytegrad"
    refused = [row.note for row in choice.rows if row.candidate.startswith("local_sgd")]
    assert any("refused: " in note for note in refused)


def _hierarchical(rank, world_size, seconds):
    return _chosen(rank, world_size, seconds, {BASE: 1.0}, {"risk": "R0"})


def test_hierarchy_is_tried_where_hosts_have_several_ranks(pool_of_two_nodes):
    env = {"BAGUA_SOCKET_IFNAME": "lo"}
    seconds = {BASE: 1.0, f"{BASE}:hierarchical=True": 0.5}
    choice = pool_of_two_nodes.run(_hierarchical, args=(seconds,), env=env)[3][0]
    assert choice.options == {"hierarchical": True}
    choice = pool_of_two_nodes.run(_hierarchical, args=({BASE: 1.0},), env=env)[3][0]
    assert choice.options == {}


def _watched(rank, world_size, now):
    """The algorithms of the 600 steps after the first choice, once steps take what ``now`` says."""
    with process_group():
        training = Training(rank, TABLE, TABLE, **R2)
        try:
            training.until_chosen()
            before = len(training.ran)
            training.seconds.update(now)
            training.steps(600)
            return training.ran[before:], training.handle.choice
        finally:
            training.end()


@pytest.mark.parametrize(
    ("now", "is_off"), [({"qsgd": 0.44}, False), ({"qsgd": 0.6}, True), ({"qsgd": 0.3}, True)],
    ids=["10% slower", "50% slower", "25% faster"],
)  # fmt: skip
def test_it_chooses_again_where_steps_take_another_time(pool2, now, is_off):
    for ran, choice in pool2.run(_watched, args=(now,)):
        assert (BASE in ran) == is_off
        assert ran[:200] == ["qsgd:bits=4"] * 200
        assert choice is not None
        assert choice.algorithm == ("bytegrad" if now["qsgd"] == 0.6 else "qsgd")


def _changing(rank, world_size):
    """Steps that change twice, while the same is the fastest; the algorithms from each change on."""
    with process_group():
        training = Training(rank, TABLE, TABLE, **R2)
        try:
            training.until_chosen()
            found = []
            for seconds in (0.3, 0.4):
                training.seconds["qsgd"] = seconds
                before = len(training.ran)
                training.steps(480)
                found.append(BASE in training.ran[before:])
            training.steps(600)
            return [*found, BASE in training.ran[before + 480 :]]
        finally:
            training.end()


def test_it_watches_longer_where_it_has_chosen_the_same_again(pool2):
    """800 steps, so the second change is not noticed within 480, but later."""
    assert pool2.run(_changing) == [[True, False, True]] * 2


def _asked(rank, world_size):
    with process_group():
        training = Training(rank, TABLE, TABLE, **R2)
        try:
            training.until_chosen()
            training.handle.choose_again()
            training.steps(3)
            assert training.handle.choice is None
            return training.candidate, training.until_chosen().algorithm
        finally:
            training.end()


def test_it_chooses_again_when_it_is_asked_to(pool2):
    assert pool2.run(_asked) == [(BASE, "qsgd")] * 2


# --- what else a program does


def _accumulating(rank, world_size):
    with process_group():
        training = Training(rank, TABLE, TABLE, **R2)
        try:
            return training.until_chosen(micro_batches=2)
        finally:
            training.end()


def test_micro_batches_are_not_taken_for_the_step(pool2):
    for choice in pool2.run(_accumulating):
        assert choice.algorithm == "qsgd"


R0 = {BASE: 1.0, f"{BASE}:bucket_bytes={5 << 20}": 0.5, f"{BASE}:bucket_bytes={100 << 20}": 0.6}


def _trained(rank, world_size, how, options):
    """The weights after 80 steps of micro-batches; and what they were trained under."""
    with process_group():
        training = Training(rank, R0, R0, **options)
        model, generator = training.model, torch.Generator().manual_seed(rank)
        try:
            for step in range(80):
                training.optimizer.zero_grad()
                sizes, inputs = [1 + (rank + step) % 3, 2], []
                inputs = [torch.randn(size, 8, generator=generator) for size in sizes]
                training.ran.append(training.candidate)
                training.clock.now_s += COMPUTE_S
                if how == "weight":
                    with model.no_sync():
                        (model(inputs[0]).square().mean() * model.bagua.weight(sizes[0])).backward()
                    (model(inputs[1]).square().mean() * model.bagua.weight(sizes[1])).backward()
                else:
                    with model.bagua.accumulate(2):
                        for batch in inputs:
                            model(batch).square().mean().backward()
                training.optimizer.step()
            return [p.detach().clone() for p in model.parameters()], list(dict.fromkeys(training.ran))
        finally:
            training.end()


@pytest.mark.parametrize("how", ["weight", "accumulate"])
def test_a_change_of_algorithm_loses_nothing_of_a_step(pool2, how):
    weights, ran = pool2.run(_trained, args=(how, {"risk": "R0"}))[0]
    assert ran == [BASE, f"{BASE}:bucket_bytes={5 << 20}"]
    expected, _ = pool2.run(_trained, args=(how, {"algorithm": BASE}))[0]
    for value, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7)


def _changed(rank, world_size):
    with process_group():
        training = Training(rank, TABLE, TABLE, **R2)
        handle = training.handle
        try:
            training.steps(10)  # it records
            bagua.with_bagua(training.model, training.optimizer, algorithm="bytegrad")
            assert training.model.bagua is handle
            training.steps(100)
            hooks = [len(p._post_accumulate_grad_hooks) for p in training.model.parameters()]
            return handle.choice, handle.algorithm.name, set(hooks)
        finally:
            training.end()


def test_naming_an_algorithm_ends_it(pool2):
    assert pool2.run(_changed) == [(None, "bytegrad", {1})] * 2


def _real(rank, world_size, on_device):
    """With the machine's own time, links and predictions."""
    with process_group():
        torch.manual_seed(rank)
        device = accelerator.use_device_of(rank) if on_device else torch.device("cpu")
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        bagua.with_bagua(model, optimizer, algorithm="auto", risk="R2")
        reference, num_steps = weakref.ref(model), 0
        while model.bagua.choice is None:
            optimizer.zero_grad()
            model(torch.randn(8, 64).to(device)).square().mean().backward()
            optimizer.step()
            num_steps += 1
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
        choice = dataclasses.asdict(model.bagua.choice)
        del model, optimizer
        gc.collect()
        assert reference() is None
        return weights, choice, num_steps


def test_on_this_machine_all_ranks_choose_alike(pool2):
    _check_alike(pool2.run(_real, args=(False,)))


def test_on_devices_all_ranks_choose_alike(pair_on_devices):
    _check_alike(pair_on_devices.run(_real, args=(True,)))


def _check_alike(found):
    (weights, choice, num_steps), (others, other_choice, other_steps) = found
    assert torch.equal(weights, others)
    assert (choice, num_steps) == (other_choice, other_steps)
    assert 25 <= num_steps <= 200
    assert choice["rows"][0]["measured_s"] > 0


# --- checkpoints


def _resumed(rank, world_size, folder, num_before, num_after, how, risk, table):
    """Trains on from a checkpoint in a new training; returns the ends of both, and what the second ran."""
    with process_group():
        first = Training(rank, table, table, risk=risk)
        first.steps(num_before)
        if how == "bagua.save":
            bagua.save(folder, first.model, first.optimizer)
        else:
            states = [first.model.state_dict(), first.optimizer.state_dict(), first.handle.state_dict()]
            torch.save(states, folder / f"{rank}.pt")
        chosen = first.handle.choice
        first.steps(num_after if chosen is not None else 0)
        end = [p.detach().clone() for p in first.model.parameters()]
        first.end()
        second = Training(rank, table, table, risk=risk)
        second.steps(2)
        second.num_steps = num_before
        if how == "bagua.save":
            bagua.load(folder, second.model, second.optimizer)
        else:
            states = torch.load(folder / f"{rank}.pt")
            second.model.load_state_dict(states[0])
            second.optimizer.load_state_dict(states[1])
            second.handle.load_state_dict(states[2])
        assert second.handle.choice == chosen
        second.ran = []
        second.steps(num_after)
        same = all(torch.equal(a, b) for a, b in zip(end, second.model.parameters(), strict=True))
        later = second.handle.choice
        second.end()
        return same, second.ran, later


@pytest.mark.parametrize("how", ["bagua.save", "state_dict"])
@pytest.mark.parametrize(("risk", "name"), [("R2", "qsgd:bits=4"), ("R3", "decentralized")])
def test_a_choice_is_resumed_bit_for_bit(pool2, tmp_path, how, risk, name):
    table = {BASE: 1.0, "bytegrad": 0.5, "qsgd": 0.4, **({"decentralized": 0.3} if risk == "R3" else {})}
    for same, ran, later in pool2.run(_resumed, args=(tmp_path, 80, 8, how, risk, table)):
        assert same
        assert ran == [name] * 8
        assert later is not None


@pytest.mark.parametrize("num_before", [10, 40], ids=["recording", "in a trial"])
def test_what_had_not_chosen_yet_begins_to_choose_anew(pool2, tmp_path, num_before):
    for _, ran, later in pool2.run(_resumed, args=(tmp_path, num_before, 80, "bagua.save", "R2", TABLE)):
        assert BASE in ran
        assert later.algorithm == "qsgd"


def _saved(rank, world_size, folder):
    with process_group():
        training = Training(rank, TABLE, TABLE, **R2)
        training.until_chosen()
        bagua.save(folder, training.model, training.optimizer)
        training.end()


def _loaded(rank, world_size, folder, risk, is_broken):
    with process_group():
        training = Training(rank, TABLE, TABLE, risk=risk)
        training.steps(10)
        try:
            if is_broken and rank == 1:
                (folder / "rank1.1.pt").write_bytes(b"nothing")
            bagua.load(folder, training.model, training.optimizer)
            training.steps(3)
            return training.candidate, training.handle.choice.algorithm
        except Exception as error:
            return training.candidate, str(error), training.until_chosen().algorithm
        finally:
            training.end()


def test_a_choice_is_resumed_on_another_number_of_ranks(pool2, pool4, tmp_path):
    from bagua.testing import spawn

    pool2.run(_saved, args=(tmp_path,))
    assert spawn(_loaded, 1, args=(tmp_path, "R2", False)) == [("qsgd:bits=4", "qsgd")]
    assert pool4.run(_loaded, args=(tmp_path, "R3", False)) == [("qsgd:bits=4", "qsgd")] * 4


def test_a_checkpoint_of_a_greater_risk_is_refused(pool2, tmp_path):
    pool2.run(_saved, args=(tmp_path,))
    for now, message, later in pool2.run(_loaded, args=(tmp_path, "R1", False)):
        assert "the state is of qsgd:bits=4, which is not of risk 'R1'" in message
        assert now == BASE
        assert later == "bytegrad"


def test_a_checkpoint_that_one_rank_cannot_read_changes_nothing(pool2, tmp_path):
    pool2.run(_saved, args=(tmp_path,))
    for now, _, later in pool2.run(_loaded, args=(tmp_path, "R2", True)):
        assert now == BASE
        assert later == "qsgd"


def _loads_another(rank, world_size, folder):
    with process_group():
        first = Training(rank, TABLE, TABLE, **R2)
        first.until_chosen()
        state = first.handle.state_dict()
        first.end()
        state["layout"] = ["of another model"]
        second = Training(rank, TABLE, TABLE, **R2)
        try:
            with pytest.raises(InvalidArgument, match="other trainable parameters"):
                second.handle.load_state_dict(state)
            assert second.candidate == BASE
            return second.until_chosen().algorithm
        finally:
            second.end()


def test_a_state_that_is_refused_leaves_the_training_as_it_was(pool2, tmp_path):
    assert pool2.run(_loads_another, args=(tmp_path,)) == ["qsgd", "qsgd"]


# --- what is passed


def _refused(rank, world_size, options, same):
    with process_group():
        model = torch.nn.Linear(4, 2)
        with pytest.raises(InvalidArgument) as raised:
            bagua.with_bagua(model, **(options if same or rank == 0 else {"algorithm": "auto"}))
        assert not hasattr(model, "bagua")
        return str(raised.value)


@pytest.mark.parametrize(
    ("options", "same", "expected"),
    [
        ({"algorithm": "auto", "risk": "R4"}, True, 'risk is \'R4\', expected "R0", "R1", "R2" or "R3"'),
        ({"algorithm": "auto", "bits": 4}, True, "chooses options itself, but got ['bits']"),
        ({"risk": "R1"}, True, "risk is 'R1', but it is for algorithm=\"auto\""),
        ({"algorithm": "auto", "risk": "R2"}, False, "disagree about risk"),
        ({"algorithm": "bytegrad"}, False, "disagree about algorithm"),
    ],
)
def test_what_is_refused(pool2, options, same, expected):
    assert all(expected in message for message in pool2.run(_refused, args=(options, same)))


def _alone(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(4, 2), algorithm="auto")
        for _ in range(30):
            model(torch.ones(1, 4)).sum().backward()
            model.bagua.choose_again()
        named = bagua.with_bagua(torch.nn.Linear(4, 2), algorithm="bytegrad")
        with pytest.raises(InvalidArgument, match="choose_again"):
            named.bagua.choose_again()
        return model.bagua.choice, model.bagua.algorithm.name


def test_one_rank_has_nothing_to_choose():
    from bagua.testing import spawn

    assert spawn(_alone, 1) == [(None, BASE)]


def _logged(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("bagua")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _chosen(rank, world_size, TABLE, TABLE, R2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "trains with" in line]


def test_rank_0_logs_what_was_measured_predicted_and_chosen(pool2):
    (line,), nothing = pool2.run(_logged)
    assert nothing == []
    assert "bagua trains with qsgd:bits=4 of R2, 40" in line
    assert f"  {BASE}: predicted 1000.0 ms, measured 10" in line
    assert "  bytegrad: predicted 500.0 ms" in line
