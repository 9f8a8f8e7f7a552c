"""torch.distributed.checkpoint beside a wrapped model: what it does to optimizers, and leaves out of a state."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import bagua
from tests.conformance.training import process_group

OF_WEIGHTS = {
    "local_sgd": {"sync_every": 2},
    "decentralized": {},
    "low_precision_decentralized": {},
}


def _make(algorithm, momentum=0.9, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return bagua.with_bagua(model, optimizer, algorithm=algorithm, **options), optimizer


def _train(model, optimizer, rank, steps):
    for step in steps:
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


def _ask_for_state(rank, world_size, algorithm, momentum, is_late):
    """Of an optimizer without a state torch makes one, by a step, here on one rank only."""
    with process_group():
        found = []
        for is_asked in (False, True):
            model, optimizer = _make(algorithm, momentum, **OF_WEIGHTS[algorithm])
            for step in range(5):
                if step == 0 and is_late:  # as a validation with gradients
                    model(torch.ones(1, 64)).sum().backward()
                    optimizer.zero_grad()
                if is_asked and rank == 0 and (step == 0 or not momentum):
                    get_optimizer_state_dict(model, optimizer)
                    assert momentum == 0 or optimizer.state  # there has been a step
                _train(model, optimizer, rank, [step])
            found.append(model.weight.detach().clone())
            model.bagua.remove()
        assert torch.equal(*found)


@pytest.mark.parametrize(
    "momentum",
    [0.9, pytest.param(0, marks=pytest.mark.slow("test_a_step_that_only_makes_an_optimizers_state_is_none"))],
)
@pytest.mark.parametrize("algorithm", OF_WEIGHTS)
def test_a_step_that_only_makes_an_optimizers_state_is_none(pool2, algorithm, momentum):
    for is_late in (False, True):  # behind a forward, since which an average may be under way
        pool2.run(_ask_for_state, args=[algorithm, momentum, is_late])


def _resume(rank, world_size, algorithm, is_bagua_first):
    with process_group():
        options = OF_WEIGHTS[algorithm]
        expected = _train(*_make(algorithm, **options), rank, range(7))
        model, optimizer = _make(algorithm, **options)
        _train(model, optimizer, rank, range(3))
        of_torch, of_bagua = copy.deepcopy((get_state_dict(model, optimizer), model.bagua.state_dict()))
        model.bagua.remove()
        model, optimizer = _make(algorithm, **options)
        if is_bagua_first:
            model.bagua.load_state_dict(of_bagua)
        set_state_dict(model, optimizer, model_state_dict=of_torch[0], optim_state_dict=of_torch[1])
        if not is_bagua_first:
            model.bagua.load_state_dict(of_bagua)
        assert torch.equal(_train(model, optimizer, rank, range(3, 7)), expected)


@pytest.mark.parametrize(
    "is_bagua_first",
    [True, pytest.param(False, marks=pytest.mark.slow("test_a_run_resumes_by_set_state_dict"))],
    ids=["bagua_first", "bagua_last"],
)
@pytest.mark.parametrize("algorithm", OF_WEIGHTS)
def test_a_run_resumes_by_set_state_dict(pool2, algorithm, is_bagua_first):
    pool2.run(_resume, args=[algorithm, is_bagua_first])


def _lose(rank, world_size, folder, algorithm, options):
    with process_group():
        model, optimizer = _make(algorithm, **options)
        _train(model, optimizer, rank, range(3))
        state = model.bagua.state_dict()
        dcp.save({"bagua": state}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
        again = model.bagua.state_dict()  # which has all that was saved
        dcp.load(loaded := {"bagua": again}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
        model.bagua.load_state_dict(loaded["bagua"])
        model.bagua.remove()
        model, optimizer = _make(algorithm, **options)
        fresh = {"bagua": model.bagua.state_dict()}
        dcp.load(fresh, checkpoint_id=f"{folder}/{rank}", no_dist=True)
        assert fresh["bagua"]["num_steps"] == 3
        with pytest.raises(bagua.InvalidArgument, match=r"has 0 of the \d+ tensors .*torch\.save, a file per rank"):
            model.bagua.load_state_dict(fresh["bagua"])
        model.bagua.load_state_dict(state)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("bytegrad", {"error_feedback": True, "min_compressed_bytes": 0}), ("powersgd", {"rank": 1})],
    ids=["bytegrad", "powersgd"],
)
def test_a_state_that_has_lost_its_tensors_is_refused(pool2, tmp_path, algorithm, options):
    pool2.run(_lose, args=[str(tmp_path), algorithm, options])
