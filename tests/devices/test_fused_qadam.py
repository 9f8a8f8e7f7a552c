"""bagua.optim.QAdam on a device: the CPU's fused bits, one launch for many parameters, and no wait of the host."""

import math

import torch

import tests.emulated_device as emulated
from bagua import _C
from tests.algorithms.test_fused_qadam import OPTIONS, WARMUP, parameters_of, set_gradients, train
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
