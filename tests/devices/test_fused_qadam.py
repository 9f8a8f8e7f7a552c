"""bagua.optim.QAdam on a device: the CPU's fused bits, one launch for many parameters, and no wait of the host."""

import math

import torch

import tests.emulated_device as emulated
from bagua import _C
from tests.algorithms.test_fused_qadam import OPTIONS, WARMUP, parameters_of, scaled_training, set_gradients, train
from tests.devices.device_process import on_the_emulated_device


@on_the_emulated_device
def test_has_the_cpus_bits_in_every_dtype():
    import bagua

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        here, there = parameters_of(dtype), parameters_of(dtype, "emulated")
        train(bagua.optim.QAdam(here, **OPTIONS, fused=True), here)
        train(bagua.optim.QAdam(there, **OPTIONS), there)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True)), dtype


@on_the_emulated_device
def test_launches_once_for_many_and_the_host_waits_for_nothing():
    import bagua

    for num in (1, _C.adam_max_tensors, _C.adam_max_tensors + 1):
        parameters = [torch.nn.Parameter(torch.ones(3, device="emulated")) for _ in range(num)]
        optimizer = bagua.optim.QAdam(parameters, **OPTIONS)
        for step in range(WARMUP + 2):
            set_gradients(parameters, step)
            emulated.reset_counters()
            optimizer.step()
            counted = emulated.counters()
            assert counted["launches"] == {"adam": math.ceil(num / _C.adam_max_tensors)}, (num, step)
            assert counted["num_host_waits"] == counted["bytes_to_host"] == 0, (num, step)
        plain = bagua.optim.QAdam(parameters, **OPTIONS, fused=False)
        emulated.reset_counters()
        plain.step()
        assert emulated.counters()["launches"] == {}


@on_the_emulated_device
def test_a_scaler_skips_a_step_of_which_the_host_hears_late():
    for bad_step in (1, WARMUP - 1, WARMUP):
        here, there = scaled_training("cpu", True, bad_step), scaled_training("emulated", None, bad_step)
        assert all(map(torch.equal, here, there)), bad_step


@on_the_emulated_device
def test_scaled_steps_do_not_wait_for_the_device():
    import bagua

    parameters = parameters_of(device="emulated")
    optimizer = bagua.optim.QAdam(parameters, **OPTIONS)
    scaler = torch.amp.GradScaler("emulated", init_scale=8.0)
    scaler.scale(torch.ones((), device="emulated"))
    for step in range(WARMUP + 2):
        set_gradients(parameters, step)
        optimizer.settle()  # what a forward of bagua's does
        emulated.reset_counters()
        scaler.step(optimizer)
        assert emulated.counters()["num_host_waits"] == 0, step
        scaler.update()


@on_the_emulated_device
def test_a_flag_that_is_used_again_is_seen_as_it_was():
    """A custom scaler writes its flag to one tensor every time; the flag is copied at once."""
    import bagua
    from bagua.distributed import devices

    parameters = parameters_of(device="emulated")
    optimizer = bagua.optim.QAdam(parameters, **OPTIONS)
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device="emulated")
    for number, found in enumerate((1.0, 1.0, 0.0, 1.0, 0.0)):
        set_gradients(parameters, number)
        optimizer.found_inf.fill_(found)
        optimizer.step()
        assert not devices._unsent
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2.0}
