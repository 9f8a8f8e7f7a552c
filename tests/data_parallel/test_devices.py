"""Training on a device: nothing in backward or step waits for it, and what is not finite comes out late, or in time."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import bagua
import tests.emulated_device as emulated
from bagua.distributed.work import Work
from bagua.testing import world as thread_world
from tests import accelerator

_seeding = threading.Lock()  # ranks that are threads share torch's generator


def _in_group(rank, world_size, check, args):
    """Ranks that share a device are processes: autograd has one thread for all that a process has on one."""
    bagua.init_process_group(timeout=20)
    try:
        return check(bagua.get_default_group(), *args)
    finally:
        bagua.destroy_process_group()


def _make(group, kind, **options):
    """A model with several buckets, and its optimizer."""
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    model.to(device)
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, bucket_bytes=64 << 10, **options)
    assert len(model.bagua.buckets) > 1
    return model, optimizer, device


def _inputs(rank, step, device):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def _weights(model):
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


ALGORITHMS = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "qsgd": {"error_feedback": True},
}


# ---- nothing waits


_waits_of_work = []  # by the core, which the device's own counter does not see


def _counting(is_found_finite):
    def count(work):
        _waits_of_work.append(work.label)
        return is_found_finite(work)

    return count


def _check_waits(group, nonfinite_check, algorithms):
    barrier = group.barrier
    for algorithm in algorithms:
        options = {**ALGORITHMS[algorithm], "nonfinite_check": nonfinite_check}
        model, optimizer, device = _make(group, emulated.NAME, algorithm=algorithm, **options)
        for step in range(3):
            loss = model(_inputs(group.rank, step, device)).square().mean()
            optimizer.zero_grad()
            barrier().wait()
            if group.rank == 0:
                emulated.reset_counters()
                _waits_of_work.clear()
            barrier().wait()
            loss.backward()
            optimizer.step()
            barrier().wait()
            waits = emulated.counters()["num_host_waits"] + len(_waits_of_work)
            if step > 0:
                assert (waits > 0) == (nonfinite_check == "sync"), (
                    f"{algorithm}, step {step}: the host waited {waits} times"
                )
            barrier().wait()
        model.bagua.remove()


def test_neither_backward_nor_step_waits_for_the_device(alone_on_emulated):
    """Unless it is asked to: the same counter sees it."""
    alone_on_emulated.run(_count_waits)


def _count_waits(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "is_found_finite", _counting(Work.is_found_finite))
        thread_world(2, _check_waits, "late", tuple(ALGORITHMS))
        thread_world(2, _check_waits, "sync", ("bytegrad", "qsgd"))


# ---- NaN and infinity


def _train_through(group, kind, algorithm, options, scaled, bad_step=1, num_steps=4, **more):
    """Weights after each step; the gradient of rank 1 is infinite in one of them."""
    model, optimizer, device = _make(group, kind, algorithm=algorithm, **options, **more)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=100) if scaled else None
    seen = []
    for step in range(num_steps):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        if step == bad_step and group.rank == 1:
            x = x * float("inf")
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append(_weights(model))
    model.bagua.remove()
    return seen


class _Fused(torch.optim.SGD):
    """As torch's fused optimizers: GradScaler always calls step, which looks at found_inf where the weights are."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for options in self.param_groups:
            for parameter in options["params"]:
                change = parameter.grad if scale is None else parameter.grad / scale
                change = options["lr"] * change
                if found_inf is not None:
                    change = torch.where(found_inf.to(parameter.device) > 0, torch.zeros_like(change), change)
                parameter.sub_(change)


def _skipped_steps(group, optimizer):
    different = []
    for algorithm, options in {**ALGORITHMS, "powersgd": {}}.items():
        of_cpu, of_device = (
            _train_through(group, kind, algorithm, options, scaled=True, optimizer=optimizer)
            for kind in ("cpu", accelerator.kind())
        )
        assert all(map(torch.equal, of_cpu[0], of_cpu[1])), "the step was not skipped on the CPU"
        assert not all(map(torch.equal, of_cpu[1], of_cpu[2]))
        if not all(map(accelerator.agree, of_device, of_cpu)):
            different.append(algorithm)
    return different


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, _Fused], ids=["plain", "fused"])
def test_a_step_that_a_scaler_skips_is_skipped_as_on_the_cpu(pair_on_devices, optimizer):
    """The states of error feedback too: the steps behind it show them."""
    assert pair_on_devices.run(_in_group, args=[_skipped_steps, [optimizer]]) == [[], []]


def _fused_qadam(parameters, lr):
    return bagua.optim.QAdam(parameters, lr, warmup_steps=2, fused=True)


def _train_qadam(group, kind, bad_step):
    more = {"bad_step": bad_step, "num_steps": 6, "optimizer": _fused_qadam, "min_compressed_bytes": 0}
    return _train_through(group, kind, "qadam", {}, scaled=True, **more)


def _skipped_steps_of_qadam(rank, world_size):
    emulated.load()
    for bad_step in (1, 2, 3):
        results = [thread_world(2, _train_qadam, kind, bad_step) for kind in ("cpu", emulated.NAME)]
        for of_cpu, of_device in zip(*results, strict=True):
            assert all(map(torch.equal, of_cpu[bad_step - 1], of_cpu[bad_step])), "the step was not skipped on the CPU"
            assert all(all(map(torch.equal, *pair)) for pair in zip(of_cpu, of_device, strict=True)), bad_step


def test_a_skipped_step_is_none_of_the_warm_up_of_qadam(alone_on_devices):
    """Though on a device the host hears of it late; also where it would have been the last one of the warm-up."""
    alone_on_devices.run(_skipped_steps_of_qadam)


def _check_late(group, algorithm, options):
    with pytest.raises(bagua.InvalidArgument, match=r"in the last step a gradient was NaN or Inf .*load a checkpoint"):
        _train_through(group, accelerator.kind(), algorithm, options, scaled=False)
    x = torch.ones(3)
    group.all_reduce(x).wait()  # the group is whole
    assert x.tolist() == [2.0] * 3


def test_without_a_scaler_it_is_an_error_of_the_next_step(pair_on_devices):
    for algorithm in ("bytegrad", "qsgd"):
        pair_on_devices.run(_in_group, args=[_check_late, (algorithm, ALGORITHMS[algorithm])])


def _check_in_time(group):
    model, optimizer, device = _make(group, accelerator.kind(), algorithm="bytegrad", nonfinite_check="sync")
    before = _weights(model)
    (model(_inputs(group.rank, 0, device) * float("inf"))).square().mean().backward()
    with pytest.raises(bagua.InvalidArgument, match="No rank has changed a weight"):
        optimizer.step()
    assert all(map(torch.equal, before, _weights(model)))
    model.bagua.remove()


def test_or_it_is_refused_before_a_weight_has_changed(pair_on_devices):
    pair_on_devices.run(_in_group, args=[_check_in_time, ()])


# ---- mistakes


def _check_mistakes(group):
    device = accelerator.use_device_of(group.rank)
    kind = device.type
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(bagua.InvalidArgument, match=r'nonfinite_check is .late.*expected "sync"'):
        bagua.with_bagua(copy.deepcopy(model), group=group, nonfinite_check="late")
    model[0].to(device)
    with pytest.raises(bagua.InvalidArgument, match=rf"parameter '0.weight' is on {kind}:\d, but parameter '1.weight'"):
        bagua.with_bagua(copy.deepcopy(model), group=group)
    model.to(device if group.rank == 0 else "cpu")
    with pytest.raises(bagua.InvalidArgument, match=rf"on {kind} .* on cpu|on cpu .* on {kind}"):
        bagua.with_bagua(copy.deepcopy(model), group=group)
    model.to(device)
    with pytest.raises(bagua.InvalidArgument, match=rf"device_ids is \[3\], but the module is on {kind}:\d"):
        bagua.DistributedDataParallel(copy.deepcopy(model), device_ids=[3], process_group=group)
    wrapped = bagua.DistributedDataParallel(model, device_ids=[device.index], process_group=group)
    wrapped(torch.ones(2, 4, device=device)).sum().backward()


def test_mistakes(pair_on_devices):
    pair_on_devices.run(_in_group, args=[_check_mistakes, ()])
