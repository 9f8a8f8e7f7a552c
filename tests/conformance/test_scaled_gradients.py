"""Every algorithm under a GradScaler: bagua.amp's, which skips on all ranks together and rescales residuals."""

from __future__ import annotations

import copy
import dataclasses
from typing import ClassVar

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.algorithms import Algorithm, ParameterState
from tests.conformance.training import (
    ALGORITHMS,
    OF_GRADIENTS,
    OF_WEIGHTS,
    assert_equal_on_all_ranks,
    batch,
    loss_of,
    make_net,
    make_optimizer,
    process_group,
    slow_but,
)
from tests.distributed.worlds import in_turns

IN_LOCKSTEP = [name for name in ALGORITHMS if bagua.algorithms.get(name).is_lockstep]


def _poisoned_loss(model, rank, step, value):
    """Rank 1's gradients of ``wide`` are ``value``."""
    loss = loss_of(model, batch(rank, step))
    return loss + value * model.wide.weight.sum() if rank == 1 else loss


def _scaler(rank, world_size, algorithm, fused, unscale):
    """A fused optimizer skips by itself, in a step like any other; then weights that are exchanged may move."""
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model, torch.optim.AdamW, fused=fused)
        model = bagua.with_bagua(model, optimizer, algorithm=algorithm)
        scaler = bagua.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(4):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            bad = {1: float("inf"), 2: float("nan")}.get(step, 0.0)
            scaler.scale(_poisoned_loss(model, rank, step, bad)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            is_unchanged = all(torch.equal(before[name], p) for name, p in model.named_parameters())
            assert is_unchanged == (bad != 0.0) or (fused and algorithm in OF_WEIGHTS)
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            if algorithm not in OF_WEIGHTS:
                assert_equal_on_all_ranks(dict(model.named_parameters()))
        assert scaler.get_scale() == 256.0


@in_turns("algorithm, how", IN_LOCKSTEP, ["unscale", "fused", "plain"])
def test_all_ranks_skip_the_step_that_one_would_skip(pool2, algorithm, how):
    pool2.run(_scaler, args=(algorithm, how == "fused", how == "unscale"))


def _as_torchs(rank, world_size, algorithm):
    with process_group():
        found, sent = [], []
        for kind in (bagua.amp.GradScaler, torch.amp.GradScaler):
            model = make_net()
            optimizer = make_optimizer(algorithm, model)
            bagua.with_bagua(model, optimizer, algorithm=algorithm, check_replicas=False)
            scaler = kind("cpu", init_scale=1024.0, growth_interval=1000)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(_poisoned_loss(model, rank, step, float("inf") if step == 0 else 0.0)).backward()
                before = bagua.get_default_group().bytes_sent
                scaler.step(optimizer)
                sent.append(bagua.get_default_group().bytes_sent - before)
                scaler.update()
            found.append([p.detach().clone() for p in model.parameters()] + [torch.tensor(scaler.get_scale())])
            model.bagua.remove()
        assert all(map(torch.equal, *found))
        assert sent == [0] * 8


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce", "qadam"))
def test_gradients_of_all_ranks_need_no_message(pool2, algorithm):
    """The scale changes once, before anything is remembered, so torch's scaler does the same."""
    pool2.run(_as_torchs, args=(algorithm,))


def _of_another(rank, world_size, algorithm):
    """An optimizer also steps a parameter that the model has not: its Inf skips the step of all ranks too."""
    with process_group():
        torch.manual_seed(0)
        model, foreign = torch.nn.Linear(16, 1), torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([*model.parameters(), foreign], lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        scaler = bagua.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            extra = (foreign * (float("inf") if step == 1 and rank == 0 else 1.0)).sum()
            scaler.scale((model(x).squeeze(1) - y).square().mean() + extra).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model.weight, before) == (step == 1)
        bagua.barrier()


# Without those that do not step by SGD.
@pytest.mark.parametrize(
    "algorithm",
    slow_but(
        [name for name in IN_LOCKSTEP if name not in ("qadam", "zero_one_adam")], "decentralized", "gradient_allreduce"
    ),
)
def test_a_parameter_of_no_wrapped_model_counts_too(pool2, algorithm):
    pool2.run(_of_another, args=(algorithm,))


def _in_groups_of_their_own(rank, world_size):
    """Two models with a rank each, and another number of steps; and a parameter that rank 0 trains alone."""
    with process_group():
        groups = [bagua.new_group([one]) for one in range(world_size)]
        models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
        scaler = bagua.amp.GradScaler("cpu", init_scale=4.0)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        bagua.with_bagua(models[0], optimizers[0], algorithm="local_sgd", group=groups[rank])
        for optimizer, model in zip(optimizers, models, strict=True):
            for _ in range(2 + rank):
                scaler.scale(model(torch.ones(4)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()


def test_only_the_ranks_of_a_model_skip_together(pool2):
    pool2.run(_in_groups_of_their_own)


def _at_its_own_pace(rank, world_size):
    """An infinity of rank 1 skips its step alone, and no rank waits for the other's steps."""
    with process_group():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model = bagua.with_bagua(model, optimizer, algorithm="async_averaging", warmup_steps=0)
        scaler = bagua.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(3 * (1 + rank)):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4)).sum() * (float("inf") if rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        model.bagua.remove()
        return scaler.get_scale()


def test_ranks_that_do_not_wait_skip_by_themselves(pool2):
    assert pool2.run(_at_its_own_pace) == [4.0, 4.0 / 2**6]


def _hooks_of_an_algorithm(rank, world_size, algorithm):
    with process_group():
        calls = []
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        model = bagua.with_bagua(model, optimizer, algorithm=algorithm)
        of_step = ["before_optimizer_step", "after_optimizer_step"]
        for name in ("before_forward", "after_backward", *of_step):
            setattr(model.bagua.algorithm, name, lambda *args, name=name: calls.append(name))
        scaler = bagua.amp.GradScaler("cpu", init_scale=4.0)
        with model.bagua.no_sync():
            scaler.scale(loss_of(model, batch(rank, 0))).backward()
        assert calls == []
        scaler.scale(loss_of(model, batch(rank, 0))).backward()
        assert calls == ["before_forward", "after_backward"]
        scaler.step(optimizer)
        scaler.update()
        assert calls[2:] == (of_step if algorithm in OF_WEIGHTS else [])
        del calls[2:]
        optimizer.zero_grad()
        scaler.scale(_poisoned_loss(model, rank, 0, float("inf"))).backward()
        scaler.step(optimizer)
        assert calls[2:] == ["before_forward", "after_backward"]  # a skipped step is none


@pytest.mark.parametrize("algorithm", slow_but(IN_LOCKSTEP, "gradient_allreduce", "qadam", "local_sgd"))
def test_hooks_are_called_in_order_and_not_for_skipped_steps(pool2, algorithm):
    pool2.run(_hooks_of_an_algorithm, args=(algorithm,))


# ---- residuals follow the scale


@dataclasses.dataclass(kw_only=True)
class Delays(Algorithm):
    """Sends half of the gradients in each step and keeps the rest, and each parameter's mean, in states of its own."""

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
    "minmax": ("bytegrad", {"error_feedback": True, "min_compressed_bytes": 0}),
    "bfloat16": ("bytegrad", {"error_feedback": True, "state_dtype": "bfloat16", "min_compressed_bytes": 0}),
    "qsgd": ("qsgd", {"bits": 4, "error_feedback": True, "min_compressed_bytes": 0}),
    "powersgd": ("powersgd", {"rank": 1}),
    "demo": ("demo", {"momentum_decay": 0.5}),
    "dgc": ("dgc", {"momentum": 0.5}),
    "qadam": ("qadam", {"min_compressed_bytes": 0}),
    "qadam_onebit": ("qadam", {"codec": "onebit", "min_compressed_bytes": 0}),
    "own": (Delays(), {}),
}
# The others differ in the codec only, which has no part in the scale.
remembering = pytest.mark.parametrize(
    "name", slow_but(REMEMBERING, "onebit", "bfloat16", "qsgd", "powersgd", "demo", "dgc", "qadam_onebit", "own")
)
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

    def step(self, rank, index, overflows=False):
        self.optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + index))
        loss = self.model(x).square().sum() * (float("inf") if overflows else 1)
        scaler = self.scaler if self.scaler is not None else torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def parts(self):
        return self.model, self.optimizer, self.model.bagua, self.scaler


def scaler_of(scale):
    """Returns one whose scale is halved by an overflow and doubled after each two good steps."""
    return bagua.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def _follows(rank, world_size, name, falls):
    with process_group():
        run, plain = Run(name, scaler_of(2.0**12)), Run(name)
        scales = set()
        for index in range(NUM_STEPS):
            if falls and index in (0, 4, 5, 8):
                before = run.weights()
                run.step(rank, 99, overflows=True)
                assert all(map(torch.equal, run.weights(), before))
            run.step(rank, index)
            plain.step(rank, index)
            assert all(map(torch.equal, run.weights(), plain.weights())), index
            scales.add(run.scaler.get_scale())
        assert len(scales) > 2 and (min(scales) < 2.0**12) == falls
        if name == "own":
            counts = run.model.bagua.state_dict()["parameters"]["states"]["steps"]["parameters"].values()
            assert [float(count) for count in counts] == [NUM_STEPS] * 4


@remembering
def test_a_scale_that_changes_changes_no_bit(pool2, name):
    """It grows after each two good steps, and falls too, but for qsgd, which draws for a skipped step too."""
    pool2.run(_follows, args=[name, name != "qsgd"])


def _resumes(rank, world_size, name):
    with process_group():
        whole = Run(name, scaler_of(2.0**10))
        states = []
        for index in range(NUM_STEPS):
            states.append([copy.deepcopy(part.state_dict()) for part in whole.parts()])
            whole.step(rank, index)
        for cut in (4, 5):  # the scale has just doubled, or is about to
            resumed = Run(name, scaler_of(1.0))
            resumed.step(rank, 50)  # at another scale
            for part, state in zip(resumed.parts(), states[cut], strict=True):
                part.load_state_dict(copy.deepcopy(state))
            for index in range(cut, NUM_STEPS):
                resumed.step(rank, index)
            assert all(map(torch.equal, resumed.weights(), whole.weights())), cut


@pytest.mark.parametrize("name", slow_but(REMEMBERING, "bfloat16", "powersgd"))
def test_a_run_resumes_at_any_scale(pool2, name):
    pool2.run(_resumes, args=[name])
