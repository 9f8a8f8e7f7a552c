"""Every registered algorithm on a device: the CPU's weights, bit for bit where the device is emulated.

Two ranks, whose sums do not depend on which of an all_reduce's algorithms runs: shared memory, which a device has not,
decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch

import bagua
import tests.emulated_device as emulated
from bagua.testing import world as thread_world
from tests import accelerator
from tests.conformance.training import batch, make_net, make_optimizer
from tests.conformance.variants import ONE_OF_EACH, VARIANTS, described
from tests.distributed.worlds import SAME_TEST, shm, tcp

_seeding = threading.Lock()  # ranks that are threads share torch's generator
NUM_STEPS = 3


def _train(group, variant, kind):
    """The weights, buffers and optimizer states that a rank ends with."""
    algorithm, options = variant
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        model = make_net()
    model.to(device)
    model.again.weight = model.wide.weight  # for a device of another kind than CUDA .to() makes new parameters
    # QAdam is fused on a device.
    how = {"fused": True} if bagua.algorithms.get(algorithm).optimizer_class is bagua.optim.QAdam else {}
    optimizer = make_optimizer(algorithm, model, lr=0.002, **how)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, group=group, **options)
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x, y = (tensor.to(device) for tensor in batch(group.rank, step))
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            (model(x) - y).square().mean().backward()
        if step == 1:
            (model(x) - y).square().mean().backward()
        optimizer.step()
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    tensors = [*model.state_dict().values(), *states]
    model.bagua.remove()
    return [tensor.detach().cpu().clone() for tensor in tensors]


def _compare_over_threads(rank, world_size, variants):
    different = []
    for variant in variants:
        results = {
            kind: thread_world(2, functools.partial(_train, variant=variant, kind=kind))
            for kind in ("cpu", accelerator.kind())
        }
        for of_cpu, of_device in zip(*results.values(), strict=True):
            if not accelerator.agree(of_device, of_cpu):
                different.append(described(variant))
    return different, emulated.counters()["launches"]


@pytest.mark.parametrize(
    "variants",
    [
        pytest.param([*ONE_OF_EACH, ("bytegrad", {})], id="one of each"),
        pytest.param(VARIANTS, id="all", marks=SAME_TEST),
    ],
)
def test_over_threads(alone_on_emulated, variants):
    """All algorithms; what is computed for communication is computed by kernels of the device."""
    [(different, launches)] = alone_on_emulated.run(_compare_over_threads, args=(variants,), timeout=120)
    assert different == []
    assert {f"{codec}_{kernel}" for codec in ("minmax_uint8", "qsgd") for kernel in ("encode", "decode")} <= {*launches}
    assert {"minmax_uint8_reduce_encode", "onebit_encode_with_residual", "reduce_many", "weighted_sum"} <= {*launches}


def _train_on_both(rank, world_size, variants, is_on_host=False):
    bagua.init_process_group(timeout=20)
    try:
        if accelerator.is_emulated():
            emulated.reset_counters()
        group = bagua.get_default_group()
        different = [
            described(variant)
            for variant in variants
            if not accelerator.agree(*(_train(group, variant, kind) for kind in (accelerator.kind(), "cpu")))
        ]
        if accelerator.is_emulated():
            assert ("reduce_many" in emulated.counters()["launches"]) != is_on_host
        return different
    finally:
        bagua.destroy_process_group()


@pytest.mark.slow("test_over_threads")
@pytest.mark.parametrize(
    "world, variants",
    [
        pytest.param(tcp(2), ONE_OF_EACH, id="tcp2-one of each"),
        *(pytest.param(world, VARIANTS, id=f"{world}-all") for world in (shm(2), tcp(2))),
    ],
)
def test_over_processes(pair_on_devices, world, variants):
    assert pair_on_devices.run(_train_on_both, args=(variants,), env=world.env, timeout=120) == [[], []]


def test_small_buckets_that_the_host_reduces(pair_on_devices):
    """The host reduces small ones by default; the other tests of this file have the device reduce everything."""
    env = {**shm(2).env, "BAGUA_THRESHOLDS": None}
    variants = [one for one in ONE_OF_EACH if one[0] in ("powersgd", "low_precision_decentralized")]
    assert pair_on_devices.run(_train_on_both, args=(variants, True), env=env, timeout=120) == [[], []]
