"""Gradients of different steps are never averaged: ranks with different numbers of forwards get an error, on all."""

from __future__ import annotations

import re
import types

import pytest
import torch

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import OF_GRADIENTS, make_optimizer, process_group
from tests.distributed.worlds import fast_in


class One(torch.nn.Module):
    """Has one weight, whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return types.SimpleNamespace(y=self.weight * x, free=x * 1.0)  # an object that is not searched for tensors


def _mean_of(step, world_size):
    return 10.0 * step + (world_size - 1) / 2


def _input_of(rank, step):
    return torch.tensor(10.0 * step + rank, requires_grad=True)


def _one_rank_is_ahead(rank, world_size, algorithm, how):
    """Rank 1 misses the exchange of batch 3; no gradient that arrives is of two batches. "in turns": each batch in the
    other mode."""
    with process_group():
        model = One()
        optimizer = make_optimizer(algorithm, model, lr=0.0)
        options = {"find_unused_parameters": how == "unseen"}
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
        seen = []
        with pytest.raises(BaguaError) as caught:
            for step in range(6):
                is_missed = rank == 1 and step == 3
                if is_missed and how == "forward":
                    continue
                optimizer.zero_grad()
                model.train(how != "in turns" or step % 2 == 1)
                output = model(_input_of(rank, step))
                if is_missed and how in ("backward", "in turns"):
                    continue
                (output.free if is_missed and how == "unseen" else output.y).sum().backward()
                if not is_missed:
                    seen.append((step, float(model.weight.grad[0, 0])))
                optimizer.step()
        if bagua.algorithms.get(algorithm).is_linear:  # else gradients are no means
            assert all(found == pytest.approx(_mean_of(step, world_size), rel=0.02) for step, found in seen)
        return [step for step, _ in seen], str(caught.value)


@fast_in(
    "algorithm, how",
    [("gradient_allreduce", "unseen"), ("gradient_allreduce", "backward"), ("bytegrad", "backward")],
    [(algorithm, how) for algorithm in OF_GRADIENTS for how in ("unseen", "backward")],
)
def test_a_missed_backward_is_an_error_that_names_both_counts(pool2, algorithm, how):
    behind, ahead = (
        rf"{who} called all_(?:reduce|gather) .* after {count} forwards of the model" for who, count in COUNTS
    )
    for steps, message in pool2.run(_one_rank_is_ahead, args=(algorithm, how)):
        assert steps == [0, 1, 2]
        # A rank that learns it from the other one reports that rank's words.
        assert re.search(f"{behind} while {ahead}|{ahead} while {behind}", message), message


COUNTS = (("(rank 0|this rank)", 4), ("(rank 1|this rank)", 5))


def _other_forwards(rank, world_size, algorithm):
    """Evaluation on one rank alone, a compared loss, a forward inside no_sync: none of them counts."""
    with process_group():
        model = One()
        optimizer = make_optimizer(algorithm, model, lr=0.0)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        for step in range(4):
            if rank == 1:
                model.eval()
                model(_input_of(rank, 99))  # with gradients enabled
                model.train()
                with torch.no_grad():
                    model(_input_of(rank, 98))
                with model.no_sync():
                    model(_input_of(rank, 97))
            optimizer.zero_grad()
            model(_input_of(rank, step)).y.sum().backward()
            assert float(model.weight.grad[0, 0]) == pytest.approx(_mean_of(step, world_size), rel=0.02)
            optimizer.step()


@fast_in("algorithm", ["bytegrad"], ["gradient_allreduce"])
def test_forwards_of_one_rank_that_are_no_training(pool2, algorithm):
    pool2.run(_other_forwards, args=(algorithm,))


def test_a_missed_backward_where_the_mode_alternates(pool2):
    for steps, message in pool2.run(_one_rank_is_ahead, args=("gradient_allreduce", "in turns")):
        assert steps == [0, 1, 2]
        assert "after 2 forwards of the model" in message and "after 3 forwards of the model in eval()" in message


class Raises(One):
    """Returns a tensor, or raises."""

    def forward(self, x):
        if x is None:
            raise ValueError("no batch")
        return super().forward(x).y


def _between_forward_and_backward(rank, world_size):
    """An evaluation between them on one rank alone, and a forward that raises: neither counts."""
    with process_group():
        model = bagua.with_bagua(Raises())
        for step in range(4):
            model.zero_grad()
            loss = model(_input_of(rank, step)).sum()
            if rank == 1:
                model.eval()
                model(_input_of(rank, 99))
                model.train()
                with pytest.raises(ValueError, match="no batch"):
                    model(None)
            loss.backward()
            assert float(model.weight.grad[0, 0]) == _mean_of(step, world_size)


def test_what_comes_between_a_forward_and_its_backward(pool2):
    pool2.run(_between_forward_and_backward)
