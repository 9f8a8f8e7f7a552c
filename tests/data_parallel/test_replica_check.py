"""The check of replicas: after a loop written by hand, whatever makes ranks differ is named on all of them.

The loop averages gradients and sends rank 0's buffers as a wrapped model's step does, so that a fault is all that is
in the way of equal ranks.
"""

from __future__ import annotations

import copy
import re
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import bagua
import tests.emulated_device as emulated
from bagua import InvalidArgument
from bagua.data_parallel.replica_check import ReplicaCheck
from bagua.distributed.process_group import ReduceOp
from bagua.testing import world
from tests import accelerator
from tests.conformance.training import batch, loss_of, make_net, make_optimizer, process_group
from tests.distributed.worlds import fast_in, in_turns
from tests.warned import warned

NUMEL = 4 * 8


def _model():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    for index, tensor in enumerate([*model.parameters(), *model.buffers()]):
        with torch.no_grad():
            numbers = torch.arange(tensor.numel()).reshape(tensor.shape) + 7 * index
            tensor.copy_(numbers.float().cos().abs())
    return model


class Training:
    """The loop of one rank, with what faults change."""

    def __init__(self, group, setting="auto", device="cpu", optimizer=torch.optim.SGD):
        self.group, self.device = group, torch.device(device)
        self.model = _model().to(device)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.check = ReplicaCheck(weakref.ref(self.model), [self.optimizer], group, setting)
        self.steps_seen = 0
        self.after_step = lambda step: None

    def backward(self, step):
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + self.group.rank))
        self.model(inputs.to(self.device)).square().mean().backward()

    def run(self, num_steps):
        for step in range(num_steps):
            self.check.begin()
            self.optimizer.zero_grad()
            self.backward(step)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    self.group.all_reduce(parameter.grad, ReduceOp.AVG).wait()
            for buffer in self.model.buffers():
                self.group.broadcast(buffer, 0).wait()
            self.check.finish()
            self.optimizer.step()
            self.after_step(step)
            self.steps_seen += 1
        return self


def steps_on_gradients_of_no_sync(training, rank):
    """The odd rank makes one more step, on its own gradients."""

    def after(step):
        if step == 2 and training.group.rank == rank:
            training.optimizer.zero_grad()
            training.backward(100)
            training.optimizer.step()

    training.after_step = after


def steps_in_backward(training, rank):
    """On all ranks, each on its own gradients."""
    for parameter in training.model.parameters():
        if parameter.requires_grad:
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())


def runs_a_schedule(training, rank):
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)

    def after(step):
        if training.group.rank == rank and step == 2:
            schedule.step()

    training.after_step = after


def restores(training, rank):
    state = copy.deepcopy(training.model.state_dict())

    def after(step):
        if training.group.rank == rank and step == 2:
            training.model.load_state_dict(state)

    training.after_step = after


def changes_a_buffer(training, rank):
    def after(step):
        if training.group.rank == rank and step == 2:
            training.model[1].running_var[1] += 0.25

    training.after_step = after


WEIGHTS_DIFFER = (
    rf"parameter '0\.weight' \(and \d more\) differs from rank 0's in \d+ of {NUMEL} elements by at most 0\.\d+"
)
# The first difference that each fault makes.
FAULTS = {
    steps_on_gradients_of_no_sync: WEIGHTS_DIFFER,
    steps_in_backward: WEIGHTS_DIFFER,
    runs_a_schedule: r"lr of parameter group 0 of optimizer 0 is 0\.1 on ranks? [0, 1]+ and 0\.05 on",
    restores: WEIGHTS_DIFFER,
    # Rank 0's have come meanwhile.
    changes_a_buffer: r"buffer '1\.running_var' differs from rank 0's in no value by now on",
}


def _with_fault(group, fault, device, setting=1):
    training = Training(group, setting, device)
    fault(training, group.size - 1)
    try:
        training.run(8)
    except InvalidArgument as error:
        return training.steps_seen, str(error), error.rank, error.ranks
    return None


def _check_fault(found, fault, size, delay):
    """``found``: of all ranks, which raised at the same step, with the same message."""
    assert found[0] is not None and all(one == found[0] for one in found), found
    step, message, rank, ranks = found[0]
    first = 0 if fault is steps_in_backward else 2  # the step in which it happens
    assert step == first + 1 + delay, (step, message)
    assert re.search(FAULTS[fault], message), message
    if fault is steps_in_backward:
        assert (rank, ranks) == (1, tuple(range(1, size)))
    else:
        assert (rank, ranks) == (size - 1, (size - 1,))
    assert f"on rank {size - 1}" in message or (fault is steps_in_backward and size == 3)


@in_turns("fault, size", FAULTS, [3, 2])
def test_names_what_differs(fault, size):
    _check_fault(world(size, _with_fault, fault, "cpu"), fault, size, delay=0)


def _with_faults_on_device(rank, world_size, faults, setting):
    device = accelerator.use_device_of(rank)
    found = []
    for fault in faults:
        bagua.init_process_group(timeout=20)
        found.append(_with_fault(bagua.get_default_group(), fault, device, setting))
        bagua.destroy_process_group()
    return found


def test_names_what_differs_on_a_device_a_step_later(pair_on_devices):
    found = pair_on_devices.run(_with_faults_on_device, args=(list(FAULTS), 1))
    for fault, *of_ranks in zip(FAULTS, *found, strict=True):
        _check_fault(of_ranks, fault, 2, delay=1)
    few = [steps_in_backward, restores]
    found = pair_on_devices.run(_with_faults_on_device, args=(few, 3))  # at step 3, read at the end of step 4
    for fault, *of_ranks in zip(few, *found, strict=True):
        _check_fault(of_ranks, fault, 2, delay=3 if fault is steps_in_backward else 1)


def _in_processes(rank, world_size):
    bagua.init_process_group(timeout=20)
    found = _with_fault(bagua.get_default_group(), runs_a_schedule, "cpu")
    bagua.destroy_process_group()
    return found


def test_ranks_that_are_processes(pool2):
    _check_fault(pool2.run(_in_processes), runs_a_schedule, 2, delay=0)


def _without_fault(group, optimizer):
    training = Training(group, setting=1, optimizer=optimizer).run(8)
    training.check.check_now()
    return training.steps_seen


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_finds_nothing_where_nothing_differs(optimizer):
    assert world(3, _without_fault, optimizer) == [8, 8, 8]


# ---- distances, ranks, kinds


def _found_now(group, change, **flags):
    """The message of ``check_now`` after ``change(training, rank)``; "" where nothing was found."""
    training = Training(group, setting=False)
    change(training, group.rank)
    try:
        training.check.check_now(**flags)
    except InvalidArgument as error:
        return str(error)
    return ""


def _changed(change, size=2, **flags):
    found = world(size, lambda group: _found_now(group, change, **flags))
    assert len({*found}) == 1
    return found[0]


def _set(position, value):
    """A NaN and an infinity that all ranks have beside it are no differences."""

    def change(training, rank):
        with torch.no_grad():
            training.model[0].weight.view(-1)[:2] = torch.tensor([float("nan"), float("inf")])
            if rank == 1:
                training.model[0].weight.view(-1)[position] = value

    return change


def test_tells_how_far_values_are_from_those_of_rank_0():
    def change(training, rank):
        with torch.no_grad():
            training.model[0].weight[:, 0] += {0: 0.0, 1: 0.5, 2: 0.0, 3: -0.25}[rank] * torch.tensor([0, 1, 0.5, 0])
            training.model[2].weight += (rank == 3) * 1.0  # frozen

    message = _changed(change, size=4)
    first = f"in 2 of {NUMEL} elements by at most 0.5 on rank 1"
    second = f"in 2 of {NUMEL} elements by at most 0.25 on rank 3"
    assert f"parameter '0.weight' (and 1 more) differs from rank 0's {first} and {second};" in message
    assert "rank 2" not in message and "rank 0 " not in message


@pytest.mark.parametrize(
    "value, text",
    [(float("nan"), "in 1 of 32 elements by at most nan"), (float("-inf"), "in 1 of 32 elements by at most inf")],
)
def test_values_that_are_not_finite(value, text):
    assert text in _changed(_set(5, value))


def test_equal_bits_are_equal_whatever_they_mean():
    def change(training, rank):
        with torch.no_grad():
            training.model[0].weight[0] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0] * 2)

    assert _changed(change) == ""


def test_the_sign_of_0_counts():
    def change(training, rank):
        with torch.no_grad():
            training.model[0].weight[0] = -0.0 if rank else 0.0

    assert "parameter '0.weight' differs from rank 0's in no value by now on rank 1" in _changed(change)


@fast_in("dtype", [torch.bool, torch.float16, torch.complex64], [torch.uint8, torch.int64, torch.float64])
def test_every_dtype_and_layout(dtype):
    def register(training, values):
        training.model.register_buffer("whole", values)
        training.model.register_buffer("transposed", values.clone().t())
        training.model.register_buffer("scalar", values[0, 0].clone())
        training.model.register_buffer("empty", values[:0].clone())
        between = torch.full_like(values, training.group.rank)  # in memory, not in the buffer
        training.model.register_buffer("strided", torch.stack([values, between], -1)[..., 0])

    def change(training, rank):
        register(training, torch.arange(6).reshape(2, 3).to(dtype))
        training.model.transposed[2, 0] = rank

    message = _changed(change)
    assert "buffer 'transposed' differs from rank 0's in 1 of 6 elements" in message
    assert _changed(lambda training, rank: register(training, torch.arange(6).reshape(2, 3).to(dtype))) == ""


def test_a_buffer_of_one_rank_and_another_shape():
    def register(training, rank):
        if rank == 1:
            training.model.register_buffer("late", torch.ones(3))

    assert "buffer 'late' is missing on rank 0 and (3,) torch.float32 on rank 1" in _changed(register)

    def resize(training, rank):
        training.model[1].running_var = torch.ones(4 + rank)

    assert "'1.running_var' is (4,) torch.float32 on rank 0 and (5,) torch.float32 on rank 1" in _changed(resize)


def test_what_ranks_do_not_hold_in_full_is_not_compared():
    def change(training, rank):
        training.model.register_buffer("meta", torch.empty(3 + rank, device="meta"))
        training.model.register_buffer("lazy", nn.UninitializedBuffer())
        training.model.register_buffer("sparse", torch.eye(2 + rank).to_sparse())

    assert _changed(change) == ""


def test_only_what_the_caller_says_is_compared():
    def change(training, rank):
        with torch.no_grad():
            training.model[0].weight += rank
            training.model[1].running_mean += rank

    assert "parameter '0.weight' (and 1 more) differs" in _changed(change)
    assert "parameter '0.weight' differs" in _changed(change, buffers=False)
    assert "buffer '1.running_mean' differs" in _changed(change, parameters=False)
    assert _changed(change, parameters=False, buffers=False) == ""


# ---- options


def _options(**values):
    def change(training, rank):
        for name, value in values.items():
            training.optimizer.param_groups[0][name] = value(rank)

    return change


@pytest.mark.parametrize(
    "values, text",
    [
        ({"lr": lambda rank: 0.1 - 0.05 * rank}, "lr of parameter group 0 of optimizer 0 is 0.1 on rank 0 and 0.05 on"),
        ({"betas": lambda rank: (0.9, 0.99 + rank)}, "betas[1] of parameter group 0 of optimizer 0 is 0.99 on rank 0"),
        (
            {"nesterov": lambda rank: rank == 1},
            "nesterov of parameter group 0 of optimizer 0 is False on rank 0 and True",
        ),
        ({"kind": lambda rank: "ab"[rank]}, "kind of parameter group 0 of optimizer 0 is 'a' on rank 0 and 'b' on"),
        (
            {"lr": lambda rank: torch.tensor(0.5 + rank)},
            "lr of parameter group 0 of optimizer 0 differs from rank 0's in 1 of 1",
        ),
        ({"lr": lambda rank: torch.tensor(0.5) if rank else 0.5}, "is 0.5 on rank 0 and missing on rank 1"),
    ],
)
def test_options_that_differ(values, text):
    assert text in _changed(_options(**values), parameters=False, buffers=False)


def test_options_that_are_equal():
    equal = {
        "lr": lambda rank: [0.1, np.float64(0.1)][rank],
        "momentum": lambda rank: [0, 0.0][rank],
        "weight_decay": lambda rank: torch.tensor([0.5, 0.25]),
        "names": lambda rank: ["a", ("b", None)],
        "object": lambda rank: object(),  # none of what is compared
    }
    assert _changed(_options(**equal)) == ""


def test_the_order_of_options_does_not_count():
    def change(training, rank):
        options = training.optimizer.param_groups[0]
        if rank == 1:
            options["lr"] = options.pop("lr")

    assert _changed(change) == ""


# ---- when, and what then


class Counting:
    """A group that notes after how many steps a check's message is sent."""

    def __init__(self, group):
        self.group, self.sent, self.training = group, [], None

    def __getattr__(self, name):
        return getattr(self.group, name)

    def all_gather(self, *args, **options):
        self.sent.append(self.training.steps_seen)
        return self.group.all_gather(*args, **options)


def _due(group, setting, num_steps):
    """The other ranks' steps take longer than rank 0's."""
    counting = Counting(group)
    counting.training = training = Training(counting, setting)
    training.after_step = lambda step: time.sleep(0.001 * group.rank)
    training.run(num_steps)
    return counting.sent


def test_a_number_is_every_so_many_steps():
    assert world(2, _due, 3, 11) == [[3, 6, 9]] * 2
    assert world(2, _due, 1, 4) == [[1, 2, 3]] * 2


def test_false_sends_nothing_and_neither_does_one_rank():
    assert world(2, _due, False, 4) == [[]] * 2
    assert world(1, _due, 1, 4) == [[]]
    assert world(1, _found_now, lambda training, rank: None) == [""]


def test_auto_checks_after_the_second_step_and_all_ranks_agree_on_the_rest():
    found = world(2, _due, "auto", 300)  # whose checks cost a good part of a step
    assert found[0] == found[1] and found[0][0] == 2
    assert len(found[0]) < 100


def test_warn_writes_to_the_log_and_goes_on_but_check_now_raises():
    def run(group):
        training = Training(group, "warn")
        training.optimizer.param_groups[0]["lr"] = 0.1 + group.rank
        training.run(5)
        with pytest.raises(InvalidArgument, match=r"lr of parameter group 0 of optimizer 0 is 0\.1 on rank 0"):
            training.check.check_now()
        return training.steps_seen

    with warned() as messages:
        assert world(2, run) == [5, 5]
    assert len(messages) == 2  # one check, on each rank
    assert all("lr of parameter group 0 of optimizer 0 is 0.1 on rank 0 and 1.1 on rank 1" in text for text in messages)


def _other_processors(rank, world_size):
    """Ranks with other numbers of threads round differently; options must be equal all the same."""
    torch.set_num_threads(1 + rank)
    bagua.init_process_group(timeout=20)
    training = Training(bagua.get_default_group(), 1)
    with torch.no_grad():
        training.model[0].weight[0, 0] += rank * 2.0**-20
    with warned() as messages:
        training.check.check_now()
        training.run(3)
    assert len(messages) == 3 and training.steps_seen == 3
    assert re.search(rf"in 1 of {NUMEL} elements by at most 9\.54e-07 on rank 1", messages[0])
    assert "1 threads) on rank 0 and" in messages[0] and "2 threads) on rank 1" in messages[0]
    training.optimizer.param_groups[0]["lr"] = 0.1 + rank
    with pytest.raises(InvalidArgument, match="lr of parameter group 0"):
        training.check.check_now()
    bagua.destroy_process_group()


def test_processors_that_may_round_differently_get_a_warning(pool2):
    pool2.run(_other_processors)


@fast_in("setting", ["always", 0, True], ["always", 0, -1, True, None, 2.0])
def test_a_setting_that_is_none(setting):
    with pytest.raises(InvalidArgument, match=re.escape(f"check_replicas is {setting!r}, expected")):
        ReplicaCheck(lambda: None, [], None, setting)


def test_a_model_that_is_gone_leaves_the_options():
    def run(group):
        training = Training(group, 1)
        training.optimizer.param_groups[0]["lr"] = 0.1 + group.rank
        check = ReplicaCheck(lambda: None, [training.optimizer], group)
        with pytest.raises(InvalidArgument, match="lr of parameter group 0 of optimizer 0"):
            check.check_now()

    world(2, run)


def _end_behind_its_begin(rank, world_size):
    """Training ends with the step that has begun a check, whose message another rank may still need."""
    for _ in range(10):
        bagua.init_process_group(timeout=20)
        model = bagua.with_bagua(torch.nn.Linear(512, 512), check_replicas=2)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 512)).sum().backward()
        bagua.destroy_process_group()


def test_training_may_end_behind_the_step_that_begins_a_check(pool2):
    pool2.run(_end_behind_its_begin)


# ---- on a device


def _waits(rank, world_size):
    """Between begin and the next step's finish the host waits for nothing, however late the device is."""
    device = accelerator.use_device_of(rank)
    bagua.init_process_group(timeout=20)
    training = Training(bagua.get_default_group(), 3, device)
    training.model.register_buffer("of_host", torch.ones(3))
    check = training.check
    for step in range(5):
        with accelerator.delayed(0.02):
            training.model[0].weight.detach().mul_(1.0)
            emulated.reset_counters()
            check.begin()
            assert emulated.counters()["launches"].get("digest", 0) == 2 * (step == 3)
            assert emulated.counters()["num_host_waits"] == 0
            if step != 4:
                check.finish()
                assert emulated.counters()["num_host_waits"] == 0
    check.finish()
    assert emulated.counters()["num_host_waits"] > 0
    check.check_now()
    bagua.destroy_process_group()


def test_the_host_does_not_wait_for_a_device(pair_on_emulated):
    pair_on_emulated.run(_waits)


def _options_of_weights(rank, world_size, algorithm, message):
    with process_group(), pytest.raises(InvalidArgument, match=message):
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        model = bagua.with_bagua(model, optimizer, algorithm=algorithm, check_replicas=2)
        for step in range(6):
            loss_of(model, batch(rank, step)).backward()
            if step == 1 and rank == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            optimizer.step()
            optimizer.zero_grad()


def test_a_number_compares_options_while_weights_are_exchanged(pool2):
    """The weights may differ, and are not looked at."""
    message = r"lr of parameter group 0 of optimizer 0 is .* and 0.5 on rank 1"
    pool2.run(_options_of_weights, args=("local_sgd", message))


def test_a_number_is_refused_where_ranks_do_not_wait_for_one_another(pool2):
    message = "check_replicas=2 makes the ranks wait .* 'async_averaging' avoids"
    pool2.run(_options_of_weights, args=("async_averaging", message))
