"""Every registered algorithm: save, kill, load, continue equals never having stopped, bit for bit."""

from __future__ import annotations

import functools
import io
import os
import signal

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import spawn
from tests.conformance.training import (
    OF_WEIGHTS,
    Net,
    batch,
    loss_of,
    make_net,
    make_optimizer,
    process_group,
    slow_but,
)
from tests.conformance.variants import ONE_OF_EACH, VARIANTS, described
from tests.distributed.worlds import SAME_TEST
from tests.meeting import meet


class Odd(torch.nn.Module):
    """Gradients come in another order than that of registration, and no size is a multiple of 64 bytes."""

    def __init__(self):
        super().__init__()
        self.second = torch.nn.Linear(131, 77)
        self.first = torch.nn.Linear(16, 131)
        self.third = torch.nn.Linear(77, 133)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).mean(1)


def start(variant, seed=0, kind=Net):
    algorithm, options = variant
    model = make_net(seed, kind)
    optimizer = make_optimizer(algorithm, model, torch.optim.AdamW)
    return bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=70_000, **options), optimizer


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def states_of(model, optimizer):
    return [model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()]


def load_states(model, optimizer, saved):
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model.bagua.load_state_dict(saved[2])


def assert_same(ours, theirs, place="state"):
    """Trees of dicts, lists, tensors and values, bit for bit."""
    assert type(ours) is type(theirs), place
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), place
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), place
        for key, value in ours.items():
            assert_same(value, theirs[key], f"{place}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), place
        for index, value in enumerate(ours):
            assert_same(value, theirs[index], f"{place}[{index}]")
    else:
        assert ours == theirs, place


def _resume(rank, world_size, variant, kind):
    with process_group():
        model, optimizer = start(variant, kind=kind)
        files = {}
        for step in range(6):
            if step in (1, 3):
                files[step] = io.BytesIO()
                torch.save(states_of(model, optimizer), files[step])
            train(model, optimizer, rank, [step])
        for stop, file in files.items():
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            resumed, resumed_optimizer = start(variant, seed=5, kind=kind)
            if stop == 3:
                train(resumed, resumed_optimizer, rank, range(2))  # it has a layout and a count of its own by now
            load_states(resumed, resumed_optimizer, saved)
            train(resumed, resumed_optimizer, rank, range(stop, 6))
            assert_same(states_of(resumed, resumed_optimizer), states_of(model, optimizer), f"stopped at {stop}")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=() if one in ONE_OF_EACH else SAME_TEST) for one in VARIANTS],
    ids=described,
)
def test_resuming_equals_never_having_stopped(pool2, variant):
    pool2.run(_resume, args=(variant, Net))


_REMEMBERING = [
    ("bytegrad", {"codec": "onebit", "error_feedback": True}),
    ("qadam", {"codec": "onebit", "warmup_steps": 3}),
    ("low_precision_decentralized", {}),
]


def _slow(variants):
    return [pytest.param(variant, marks=SAME_TEST) for variant in variants]


@pytest.mark.parametrize("variant", [_REMEMBERING[0], *_slow(_REMEMBERING[1:])], ids=described)
def test_resuming_where_buckets_are_laid_out_anew(pool2, variant):
    pool2.run(_resume, args=(variant, Odd))


def _state_of_rank_0(rank, world_size, variant):
    with process_group():
        model, optimizer = start(variant)
        train(model, optimizer, rank, range(2))
        of_rank_0 = bagua.get_default_group().all_gather_object(model.bagua.state_dict())[0]
        with pytest.raises(
            InvalidArgument, match="the checkpoint is of rank 0 of 2, this is rank 1 of 2.*on every rank"
        ):
            model.bagua.load_state_dict(of_rank_0)  # an error on rank 0 too, for which it is right
        model.bagua.load_state_dict(model.bagua.state_dict())


@pytest.mark.parametrize("variant", [_REMEMBERING[0], *_slow(_REMEMBERING[1:])], ids=described)
def test_state_of_another_rank_is_refused_on_all_ranks(pool2, variant):
    pool2.run(_state_of_rank_0, args=(variant,))


def _states_in_another_memory_format(rank, world_size, make):
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
        model.to(memory_format=torch.channels_last)
        model[2].weight = torch.nn.Parameter(torch.randn(4 * 36, 2).T)
        optimizer = make(model.parameters())

        def step():
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()

        if rank == 0:  # it alone has a checkpoint
            step()
            optimizer.zero_grad()
        bagua.with_bagua(model, optimizer)
        for _ in range(2):
            step()
        for parameter in model.parameters():
            states = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.dim()]
            assert states and all(state.stride() == parameter.stride() for state in states)
        weights = bagua.get_default_group().all_gather_object([value.detach() for value in model.parameters()])
        assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    "make",
    [functools.partial(torch.optim.AdamW, fused=True), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)],
    ids=["AdamW", "SGD"],
)
def test_states_of_rank_0_keep_their_memory_format(pool2, make):
    """Fused optimizers go through a weight and its states by their memory."""
    pool2.run(_states_in_another_memory_format, args=(make,))


def _two_optimizers(model):
    halves = [list(model.first.parameters()), [*model.second.parameters(), *model.third.parameters()]]
    return [torch.optim.SGD(half, lr=0.1) for half in halves]


def _another_number_of_optimizers(rank, world_size, algorithm):
    with process_group():
        model = Odd()
        needed = bagua.algorithms.get(algorithm).optimizer_class
        kind = torch.optim.SGD if needed is torch.optim.Optimizer else needed
        halves = [kind(options["params"], lr=0.1) for one in _two_optimizers(model) for options in one.param_groups]
        bagua.with_bagua(model, halves, algorithm=algorithm)
        state = model.bagua.state_dict()
        bagua.with_bagua(model, kind(model.parameters(), lr=0.1), algorithm=algorithm)
        with pytest.raises(InvalidArgument, match="2 optimizers, the model has 1"):
            model.bagua.load_state_dict(state)


@pytest.mark.parametrize("algorithm", slow_but(OF_WEIGHTS, "local_sgd"))
def test_state_of_another_number_of_optimizers_is_refused(pool2, algorithm):
    pool2.run(_another_number_of_optimizers, args=(algorithm,))


def _uninterrupted(rank, world_size, folder, variants):
    with process_group():
        for variant in variants:
            model, optimizer = start(variant)
            train(model, optimizer, rank, range(6))
            torch.save(states_of(model, optimizer), folder / f"{described(variant)}-{rank}-whole")
            model.bagua.remove()


def _killed(rank, world_size, folder, variants):
    bagua.init_process_group()
    for variant in variants:
        model, optimizer = start(variant)
        train(model, optimizer, rank, range(3))
        bagua.save(folder / described(variant), model, optimizer, steps=3)
        model.bagua.remove()
    meet()
    os.kill(os.getpid(), signal.SIGKILL)


def _continued(rank, world_size, folder, variants):
    with process_group():
        for variant in variants:
            model, optimizer = start(variant, seed=5)
            steps = bagua.load(folder / described(variant), model, optimizer)["steps"]
            train(model, optimizer, rank, range(steps, 6))
            whole = torch.load(folder / f"{described(variant)}-{rank}-whole", weights_only=True)
            assert_same(states_of(model, optimizer), whole, described(variant))
            model.bagua.remove()


@pytest.mark.parametrize(
    "variants, num_ranks",
    [
        pytest.param(_REMEMBERING[:1], 2, id="one that remembers"),
        pytest.param(VARIANTS, 4, id="all", marks=SAME_TEST),
    ],
)
def test_new_processes_continue_what_killed_ones_began(pool2, pool4, tmp_path, variants, num_ranks):
    pool = {2: pool2, 4: pool4}[num_ranks]
    pool.run(_uninterrupted, args=(tmp_path, variants))
    expect_exit = dict.fromkeys(range(num_ranks), -signal.SIGKILL)
    spawn(_killed, num_ranks, args=(tmp_path, variants), expect_exit=expect_exit)
    pool.run(_continued, args=(tmp_path, variants))


def _other_number_of_ranks(rank, world_size, folder, variant):
    with process_group():
        model, optimizer = start(variant)
        train(model, optimizer, rank, range(2))
        if world_size == 4:
            torch.save(model.bagua.state_dict(), folder / str(rank))
            return
        with pytest.raises(
            InvalidArgument, match="is of 4 ranks, this group has 2: .* skip model.bagua.load_state_dict"
        ):
            model.bagua.load_state_dict(torch.load(folder / str(rank), weights_only=True))


@pytest.mark.parametrize(
    "variant",
    [("bytegrad", {"error_feedback": True}), *_slow([("low_precision_decentralized", {})])],
    ids=described,
)
def test_state_of_another_number_of_ranks_is_refused(pool2, pool4, tmp_path, variant):
    pool4.run(_other_number_of_ranks, args=(tmp_path, variant))
    pool2.run(_other_number_of_ranks, args=(tmp_path, variant))
