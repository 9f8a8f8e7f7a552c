"""Where gradients stay local: when the ranks agree on steps that a GradScaler skips, and that it costs nothing else."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import OF_WEIGHTS, process_group
from tests.meeting import meet

ASKING = [name for name in OF_WEIGHTS if bagua.algorithms.get(name).is_lockstep]
# The codec of the weights cannot send NaN, so the ranks tell one another of it in each step.
ALWAYS = "low_precision_decentralized"


def _num_messages(model, label="finite gradients"):
    spans = model.bagua.timeline().coordination
    return sum(span.label == label for span in spans if span.kind == "operation")


def _wrapped(algorithm, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return bagua.with_bagua(model, optimizer, algorithm=algorithm, **options), optimizer


def _step(model, optimizer, scaler=None, value=1.0):
    optimizer.zero_grad()
    loss = model(torch.full((2, 8), value)).sum()
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _messages(rank, world_size, algorithm, with_scaler, skip_together):
    with process_group():
        model, optimizer = _wrapped(algorithm, skip_together=skip_together)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=with_scaler is True) if with_scaler else None
        for _ in range(6):
            _step(model, optimizer, scaler)
        return _num_messages(model, "scaled steps"), _num_messages(model)


@pytest.mark.parametrize("algorithm", ASKING)
@pytest.mark.parametrize(
    ("with_scaler", "skip_together", "expected"),
    [
        (False, None, (2, 1)),
        ("disabled", None, (2, 1)),
        (True, None, (2, 6)),
        (False, True, (0, 6)),
        (True, False, (0, 0)),
    ],
)
def test_messages_are_sent_while_a_scaler_is_in_use(pool2, algorithm, with_scaler, skip_together, expected):
    expected = (0, 6) if algorithm == ALWAYS and skip_together is not False else expected
    assert pool2.run(_messages, args=(algorithm, with_scaler, skip_together)) == [expected] * 2


def _first_step_is_skipped(rank, world_size, algorithm, both):
    """The rank whose scaler skips sees no step; the other one's shows that a scaler is in use."""
    with process_group():
        model, optimizer = _wrapped(algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        is_bad = both or rank == 1
        _step(model, optimizer, scaler, float("inf") if is_bad else 1.0)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert scaler.get_scale() == 2.0  # on all ranks
        for step in range(3):
            _step(model, optimizer, scaler, float("nan") if step == 1 and rank == 0 else 1.0)
        assert scaler.get_scale() == 1.0
        return _num_messages(model)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("algorithm", ASKING)
def test_the_first_step_may_be_skipped(pool2, algorithm, both):
    assert pool2.run(_first_step_is_skipped, args=(algorithm, both)) == [4, 4]


def _wrapped_before_the_step(rank, world_size, algorithm):
    """Its gradients come of a backward that nobody has agreed on."""
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.full((2, 8), float("inf") if rank else 1.0)).sum()).backward()
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, model.parameters(), before)) and scaler.get_scale() == 2.0  # on all ranks
        _step(model, optimizer, scaler)
        assert not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("algorithm", ASKING)
def test_a_step_right_behind_the_wrap_may_be_skipped(pool2, algorithm):
    pool2.run(_wrapped_before_the_step, args=(algorithm,))


def _late(rank, world_size, algorithm):
    with process_group():
        model, optimizer = _wrapped(algorithm)
        for _ in range(3):
            _step(model, optimizer)
        meet()  # the ranks of local_sgd may be at different steps
        with pytest.raises(
            BaguaError, match=r"a GradScaler makes a step of SGD after steps that none made.*pass skip_to"
        ):
            for _ in range(2):
                _step(model, optimizer, torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("algorithm", [name for name in ASKING if name != ALWAYS])
def test_a_scaler_that_comes_late_is_refused_on_all_ranks(pool2, algorithm):
    pool2.run(_late, args=(algorithm,))


def _one_of_two_is_scaled(rank, world_size, algorithm):
    """Its first steps are skipped on all ranks, so that nobody has seen that it is."""
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
        plain, scaled = (torch.optim.SGD(part.parameters(), lr=0.01) for part in model)
        bagua.with_bagua(model, [plain, scaled], algorithm=algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(5):
            for optimizer in (plain, scaled):
                optimizer.zero_grad()
            is_bad = step < 2 and rank == 1
            x = torch.full((2, 8), float("inf") if is_bad else 1.0)
            (model[0](torch.ones(2, 8)).sum() + scaler.scale(model[1](x).sum())).backward()
            plain.step()
            scaler.step(scaled)
            scaler.update()
        assert scaler.get_scale() == 2.0  # on all ranks
        return _num_messages(model)


@pytest.mark.parametrize("algorithm", ASKING)
def test_another_optimizers_plain_steps_tell_nothing_of_one_that_is_skipped(pool2, algorithm):
    assert pool2.run(_one_of_two_is_scaled, args=(algorithm,)) == [5, 5]


def test_options():
    with pytest.raises(InvalidArgument, match="skip_together is 1, expected True, False or None"):
        bagua.algorithms.LocalSGD(skip_together=1)
