"""torch.distributed.checkpoint beside a wrapped model: its functions resume a run, and lost tensors are noticed."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bagua
from tests.conformance.training import process_group, slow_but
from tests.distributed.worlds import SAME_TEST

OF_WEIGHTS = {
    "local_sgd": {"sync_every": 2},
    "decentralized": {},
    "low_precision_decentralized": {},
}


def _make(algorithm, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return bagua.with_bagua(model, optimizer, algorithm=algorithm, **options), optimizer


def _train(model, optimizer, rank, steps):
    for step in steps:
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


def _resume(rank, world_size, algorithm):
    """``set_state_dict`` makes an optimizer's state by a step of it, so the algorithm's state is loaded last."""
    with process_group():
        options = OF_WEIGHTS[algorithm]
        expected = _train(*_make(algorithm, **options), rank, range(7))
        model, optimizer = _make(algorithm, **options)
        _train(model, optimizer, rank, range(3))
        of_torch, of_bagua = copy.deepcopy((get_state_dict(model, optimizer), model.bagua.state_dict()))
        model.bagua.remove()
        model, optimizer = _make(algorithm, **options)
        set_state_dict(model, optimizer, model_state_dict=of_torch[0], optim_state_dict=of_torch[1])
        model.bagua.load_state_dict(of_bagua)
        assert torch.equal(_train(model, optimizer, rank, range(3, 7)), expected)


@pytest.mark.parametrize("algorithm", slow_but(OF_WEIGHTS, "low_precision_decentralized"))
def test_a_run_resumes_by_set_state_dict(pool2, algorithm):
    pool2.run(_resume, args=[algorithm])


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
    [
        ("bytegrad", {"error_feedback": True, "min_compressed_bytes": 0}),
        pytest.param("powersgd", {"rank": 1}, marks=SAME_TEST),
    ],
    ids=["bytegrad", "powersgd"],
)
def test_a_state_that_has_lost_its_tensors_is_refused(pool2, tmp_path, algorithm, options):
    pool2.run(_lose, args=[str(tmp_path), algorithm, options])
