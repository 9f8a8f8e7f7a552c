"""A GradScaler whose scale changes: what is remembered in the unit of gradients changes with it, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import ClassVar

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.algorithms import Algorithm, ParameterState
from bagua.errors import BaguaError
from bagua.torch_version import is_torch_at_least
from tests.conformance.training import process_group
from tests.meeting import meet


@dataclasses.dataclass(kw_only=True)
class Delays(Algorithm):
    """Each step sends half of what is due and keeps the rest, and each parameter's mean, in states of its own."""

    name: ClassVar[str] = "delays"

    def parameter_state(self):
        return {
            "kept": ParameterState(is_scaled=True),
            "mean": ParameterState(shape=lambda _: (1,), is_scaled=True),
            "steps": ParameterState(shape=lambda _: (1,)),
        }

    def communicate(self, bucket, group):
        kept = bucket.state("kept")
        bucket.flat.add_(kept).mul_(0.5)
        kept.copy_(bucket.flat)
        for member in bucket.members:
            mean = bucket.state("mean", member)
            member.view.add_(mean)
            mean.copy_(member.view[0].sum() / 64)
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
    """A model under one of them, and a GradScaler or None."""

    def __init__(self, name, scaler=None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
        algorithm, options = REMEMBERING[name]
        if algorithm == "qadam":
            self.optimizer = bagua.optim.QAdam(self.model.parameters(), lr=1e-2, warmup_steps=3)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        bagua.with_bagua(self.model, self.optimizer, algorithm=copy.copy(algorithm), **options)
        self.scaler = scaler

    def step(self, rank, index, overflows=False, is_taken=True):
        self.optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + index))
        loss = self.model(x).square().sum() * (float("inf") if overflows else 1)
        scaler = self.scaler if self.scaler is not None else torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss).backward()
        if is_taken:
            scaler.step(self.optimizer)
            scaler.update()

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


def scaler_of(scale):
    """It is halved by an overflow and doubles after each two good steps."""
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def are_equal(run, other):
    return all(map(torch.equal, run.weights(), other.weights()))


def _grows(rank, world_size, name):
    with process_group():
        run, plain = Run(name, scaler_of(2.0**10)), Run(name)
        for index in range(NUM_STEPS):
            run.step(rank, index)
            plain.step(rank, index)
            assert are_equal(run, plain), index
        assert run.scaler.get_scale() == 2.0 ** (10 + NUM_STEPS // 2)
        if name == "own":
            counts = run.model.bagua.state_dict()["parameters"]["states"]["steps"]["parameters"].values()
            assert [float(count) for count in counts] == [NUM_STEPS] * 4


@remembering
def test_a_scale_that_grows_changes_no_bit(pool2, name):
    pool2.run(_grows, args=[name])


def _falls(rank, world_size, name):
    with process_group():
        run, plain = Run(name, scaler_of(2.0**12)), Run(name)
        for index in range(NUM_STEPS):
            if index in (0, 4, 5, 8):
                before = run.weights()
                run.step(rank, 99, overflows=True)
                assert all(map(torch.equal, run.weights(), before))
            if index == 6:  # the program does without a step, and changes the scale
                for one in (run, plain):
                    one.step(rank, 98, is_taken=False)
                run.scaler.update(new_scale=2.0**7)
            run.step(rank, index)
            plain.step(rank, index)
            assert are_equal(run, plain), index


@pytest.mark.parametrize("name", [name for name in REMEMBERING if name != "qsgd"])  # which draws for a skipped step too
def test_a_scale_that_falls_changes_no_bit(pool2, name):
    pool2.run(_falls, args=[name])


def _other_scalers(rank, world_size, name):
    """One that is new in the middle, larger or smaller; none; one that is not enabled; and a dead one."""
    with process_group():
        run, plain = Run(name), Run(name)
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        scalers = [scaler_of(2.0**10), scaler_of(2.0**4), None, scaler_of(2.0**20), disabled, scaler_of(2.0**8)]
        for index in range(2 * len(scalers)):
            run.scaler = scalers[index // 2]
            run.step(rank, index)
            plain.step(rank, index)
            assert are_equal(run, plain), index


@remembering
def test_another_scaler_or_none_changes_no_bit(pool2, name):
    pool2.run(_other_scalers, args=[name])


def _resumes(rank, world_size, name):
    with process_group():
        whole = Run(name, scaler_of(2.0**10))
        states = []
        for index in range(NUM_STEPS):
            states.append(whole.state())
            whole.step(rank, index)
        for cut in (0, 1, 4, 5, 6):  # the scale has just doubled, or is about to
            for scaler, has_state in ((scaler_of(1.0), True), (scaler_of(2.0**3), False), (None, False)):
                resumed = Run(name, scaler)
                resumed.load(states[cut], has_scaler=has_state)
                if scaler is not None and name != "qsgd":
                    resumed.step(rank, 99, overflows=True)
                resumed.train(rank, range(cut, NUM_STEPS))
                assert are_equal(resumed, whole), (cut, has_state, scaler)


@remembering
def test_a_run_resumes_at_any_scale(pool2, name):
    """With the scaler's state, without it and without a scaler; the first batch may overflow."""
    pool2.run(_resumes, args=[name])


def _loads_in_place(rank, world_size):
    with process_group():
        run = Run("onebit", scaler_of(2.0**10))
        run.train(rank, range(4))
        state = run.state()
        run.train(rank, range(4, NUM_STEPS))
        expected = run.weights()
        run.load(state, has_scaler=False)
        with torch.inference_mode():
            run.model.bagua.load_state_dict(copy.deepcopy(state[2]))
        run.train(rank, range(4, NUM_STEPS))
        assert all(map(torch.equal, run.weights(), expected))


def test_a_checkpoint_is_loaded_into_a_run_whose_scale_has_grown(pool2):
    pool2.run(_loads_in_place)


def _two_losses(rank, world_size, name):
    """Of one model: each has a forward of its own, both are scaled before the backwards, and a third is not."""
    with process_group():
        run, plain = Run(name, scaler_of(2.0**10)), Run(name)
        for index in range(NUM_STEPS):
            for one in (run, plain):
                one.optimizer.zero_grad()
                x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + index))
                losses = [one.model(x).square().sum(), one.model(2 * x).square().sum()]
                if one.scaler is not None:
                    losses = [one.scaler.scale(loss) for loss in losses]
                one.model(3 * x)
                for loss in losses:
                    loss.backward()
                if one.scaler is not None:
                    one.scaler.step(one.optimizer)
                    one.scaler.update()
                else:
                    one.optimizer.step()
            assert are_equal(run, plain), index


@pytest.mark.parametrize("name", ["onebit", "powersgd", "qadam_onebit", "own"])
def test_several_losses_of_one_step(pool2, name):
    pool2.run(_two_losses, args=[name])


@dataclasses.dataclass(kw_only=True)
class Raises(Delays):
    name: ClassVar[str] = "raises"

    def after_change_of_scale(self, ratio):
        if self.training.group.rank == 1:
            raise ValueError(f"by {ratio:g}")


def _hook_raises(rank, world_size):
    with process_group(60.0):
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=Raises())
        meet()
        begin = time.monotonic()
        with pytest.raises(ValueError if rank else BaguaError, match="by 8" if rank else "after_change_of_scale"):
            scaler_of(8.0).scale(model(torch.ones(2, 3)).sum()).backward()
        assert time.monotonic() - begin < 30  # half of the deadline


@pytest.mark.timed
def test_a_hook_that_raises_on_one_rank_ends_the_backward_of_all(pool2):
    pool2.run(_hook_raises)


def _compiled(rank, world_size):
    with process_group():
        run, plain = Run("onebit", scaler_of(2.0**10)), Run("onebit")
        run.step = torch.compile(run.step, backend="eager")
        run.train(rank, range(NUM_STEPS))
        plain.train(rank, range(NUM_STEPS))
        if is_torch_at_least(2, 13):
            assert are_equal(run, plain)
        for found, expected in zip(run.weights(), plain.weights(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # dynamo of 2.9 rounds otherwise


def test_a_scale_that_changes_in_a_compiled_loop(pool2):
    pool2.run(_compiled)
