"""A GradScaler whose scale changes: what is remembered in the unit of gradients changes with it, to the bit."""

from __future__ import annotations

import copy
import dataclasses
from typing import ClassVar

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.algorithms import Algorithm, ParameterState
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group


@dataclasses.dataclass(kw_only=True)
class Delays(Algorithm):
    """Each step sends half of what is due and keeps the rest, in two states of its own."""

    name: ClassVar[str] = "delays"

    def parameter_state(self):
        return {"kept": ParameterState(is_scaled=True), "steps": ParameterState(shape=lambda _: (1,))}

    def communicate(self, bucket, group):
        kept = bucket.state("kept")
        bucket.flat.add_(kept).mul_(0.5)
        kept.copy_(bucket.flat)
        for member in bucket.members:
            bucket.state("steps", member).add_(1)
        return group.all_reduce(bucket, ReduceOp.AVG)


REMEMBERING = {
    "onebit": ("bytegrad", {"codec": "onebit", "error_feedback": True, "min_compressed_bytes": 0}),
    "topk": ("bytegrad", {"codec": "topk", "error_feedback": True, "min_compressed_bytes": 0}),
    "bfloat16": ("bytegrad", {"error_feedback": True, "state_dtype": "bfloat16", "min_compressed_bytes": 0}),
    "qsgd": ("qsgd", {"bits": 4, "error_feedback": True, "min_compressed_bytes": 0}),
    "powersgd": ("powersgd", {"rank": 1}),
    "qadam": ("qadam", {"min_compressed_bytes": 0}),
    "qadam_onebit": ("qadam", {"codec": "onebit", "min_compressed_bytes": 0}),
    "own": (Delays(), {}),
}
remembering = pytest.mark.parametrize("name", REMEMBERING)
NUM_STEPS = 10


class Run:
    """A model under one of them. Its scale, if any, is halved by an overflow and doubles after each two good steps."""

    def __init__(self, name, scale=None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
        algorithm, options = REMEMBERING[name]
        if algorithm == "qadam":
            self.optimizer = bagua.optim.QAdam(self.model.parameters(), lr=1e-2, warmup_steps=3)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        bagua.with_bagua(self.model, self.optimizer, algorithm=copy.copy(algorithm), **options)
        self.scaler = None if scale is None else _scaler(scale)

    def step(self, rank, index, overflows=False):
        self.optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + index))
        loss = self.model(x).square().sum() * (float("inf") if overflows else 1)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def train(self, rank, steps):
        for index in steps:
            self.step(rank, index)

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self):
        """What a checkpoint has, of the scaler too."""
        parts = (self.model, self.optimizer, self.model.bagua, self.scaler)
        return [copy.deepcopy(part.state_dict()) for part in parts]

    def load(self, state, has_scaler=True):
        parts = (self.model, self.optimizer, self.model.bagua, self.scaler)
        for part, of_part in zip(parts[: 4 if has_scaler else 3], state, strict=False):
            part.load_state_dict(copy.deepcopy(of_part))


def _scaler(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def _are_equal(run, other):
    return all(map(torch.equal, run.weights(), other.weights()))


def _grows(rank, world_size, name):
    with process_group():
        run, plain = Run(name, 2.0**10), Run(name)
        for index in range(NUM_STEPS):
            run.step(rank, index)
            plain.step(rank, index)
            assert _are_equal(run, plain), index
        assert run.scaler.get_scale() == 2.0 ** (10 + NUM_STEPS // 2)


@remembering
def test_a_scale_that_grows_changes_no_bit(pool2, name):
    pool2.run(_grows, args=[name])


def _falls(rank, world_size, name):
    with process_group():
        run, plain = Run(name, 2.0**12), Run(name)
        for index in range(NUM_STEPS):
            if index in (0, 4, 5, 8):
                before = run.weights()
                run.step(rank, 99, overflows=True)
                assert all(map(torch.equal, run.weights(), before))
            run.step(rank, index)
            plain.step(rank, index)
            assert _are_equal(run, plain), index


@pytest.mark.parametrize("name", [name for name in REMEMBERING if name != "qsgd"])  # which draws for a skipped step too
def test_a_scale_that_falls_changes_no_bit(pool2, name):
    pool2.run(_falls, args=[name])


def _resumes(rank, world_size, name):
    with process_group():
        whole = Run(name, 2.0**10)
        states = []
        for index in range(NUM_STEPS):
            states.append(whole.state())
            whole.step(rank, index)
        for cut in (1, 4, 5, 6):  # the scale has just doubled, or is about to
            resumed = Run(name, 2.0**3)
            resumed.load(states[cut])
            resumed.train(rank, range(cut, NUM_STEPS))
            assert _are_equal(resumed, whole), cut


@remembering
def test_a_run_resumes_where_the_scale_has_just_grown(pool2, name):
    pool2.run(_resumes, args=[name])


def _without_scaler(rank, world_size, name):
    with process_group():
        whole = Run(name, 2.0**10)
        whole.train(rank, range(4))
        state = whole.state()
        whole.train(rank, range(4, NUM_STEPS))
        for scale in (2.0**3, None):
            resumed = Run(name, scale)
            resumed.load(state, has_scaler=False)
            with pytest.raises(InvalidArgument) as caught:
                resumed.train(rank, [4])
            assert "a scale of 4096" in str(caught.value) and "init_scale=4096" in str(caught.value)
            assert ("has a scale of 8" if scale else "no GradScaler makes this step") in str(caught.value)
            assert all(map(torch.equal, resumed.weights(), state[0].values()))
            resumed.scaler = _scaler(1.0)
            resumed.load(state)
            resumed.train(rank, range(4, NUM_STEPS))
            assert _are_equal(resumed, whole)


@pytest.mark.parametrize("name", ["onebit", "powersgd", "qadam_onebit"])
def test_a_checkpoint_without_its_scale_is_refused_at_the_first_step(pool2, name):
    """By all ranks, before a weight has changed, and they go on when they have loaded it."""
    pool2.run(_without_scaler, args=[name])


def _another_scaler(rank, world_size):
    with process_group():
        run = Run("onebit", 2.0**10)
        run.train(rank, range(4))
        run.scaler = _scaler(2.0**4)
        with pytest.raises(InvalidArgument, match="has a scale of 16, but .* at a scale of 2048"):
            run.train(rank, [4])
        run.scaler = _scaler(2.0**20)  # what is left of one step counts less
        run.train(rank, range(5, NUM_STEPS))


def test_a_new_scaler_with_a_smaller_scale_is_refused(pool2):
    pool2.run(_another_scaler)


def _loads_in_place(rank, world_size):
    with process_group():
        run = Run("onebit", 2.0**10)
        run.train(rank, range(4))
        state = run.state()
        run.train(rank, range(4, NUM_STEPS))
        expected = run.weights()
        run.load(state, has_scaler=False)  # the one that is there is known, and its scale is another one
        run.train(rank, range(4, NUM_STEPS))
        assert all(map(torch.equal, run.weights(), expected))


def test_a_checkpoint_is_loaded_into_a_run_whose_scale_has_grown(pool2):
    pool2.run(_loads_in_place)


def _own_states(rank, world_size):
    with process_group():
        run = Run("own", 2.0**10)
        run.train(rank, range(2))
        before = copy.deepcopy(run.model.bagua.state_dict())
        run.scaler.update(new_scale=2.0**14)
        after = run.model.bagua.state_dict()
        assert (before["loss_scale"], after["loss_scale"]) == (2.0**11, 2.0**14)
        for name, factor in (("kept", 8), ("steps", 1)):
            kept, grown = (state["parameters"]["states"][name]["parameters"] for state in (before, after))
            assert all(torch.equal(value * factor, grown[of]) for of, value in kept.items())


def test_states_that_are_not_in_the_unit_of_gradients_stay(pool2):
    pool2.run(_own_states)
