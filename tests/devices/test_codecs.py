"""Codecs as functions, on tensors of a device: the CPU's bytes and values, computed there and in its order."""

import pytest
import torch

import tests.emulated_device as emulated
from tests import accelerator
from tests.codec_specs import SPECS
from tests.devices.device_process import on_each_device


def blocks_of_all_kinds(block_numel):
    """A block each, and a piece of one: normal, subnormal, near overflow, zeros of both signs, equal, with an Inf."""
    block_numel = max(block_numel, 64)
    normal = torch.randn(7, block_numel + 3)
    blocks = normal[:, :block_numel]
    blocks[1] *= 2.0**-140
    blocks[2] = blocks[2].clamp(-1, 1) * 3.0e38
    blocks[3] = torch.where(blocks[3] < 0, -0.0, 0.0)
    blocks[4] = -0.0
    blocks[5] = -3.25
    blocks[6, 5] = float("inf")
    return torch.cat([blocks.flatten(), normal[0, block_numel:]])


def same_numbers(found, expected):
    """To the bit, but for which NaN."""
    bits = {4: torch.int32, 2: torch.int16}[found.element_size()]
    return bool(((found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())).all())


@on_each_device
def test_they_compute_on_the_device_what_they_do_on_the_cpu():
    import bagua

    for spec in SPECS:
        codec = bagua.codecs.get(spec)
        for dtype in codec.dtypes:
            x = blocks_of_all_kinds(codec.block_numel).to(dtype)
            late = x.to(accelerator.kind()) * 1  # the streams are late: not there yet
            if accelerator.is_emulated():
                emulated.reset_counters()
            messages = torch.stack([codec.encode(late, key=r) for r in range(3)])
            decoded = codec.decode(messages[1], x.numel(), dtype)
            total = torch.ones(x.numel(), device=accelerator.kind())
            codec.decode_add(messages[2], total, dtype)
            mean = codec.reduce_encode(messages, x.numel(), dtype, average=True, key=9)
            if accelerator.is_emulated():
                counted = emulated.counters()
                assert sum(counted["launches"].values()) >= 3 + 3 and counted["bytes_to_host"] == 0, spec
            assert {found.device.type for found in (messages, decoded, total, mean)} == {accelerator.kind()}

            rows = torch.stack([codec.encode(x, key=r) for r in range(3)])
            sums = torch.ones(x.numel())
            codec.decode_add(rows[2], sums, dtype)
            assert torch.equal(messages.cpu(), rows), spec
            assert same_numbers(decoded.cpu(), codec.decode(rows[1], x.numel(), dtype)), spec
            assert same_numbers(total.cpu(), sums), spec
            assert torch.equal(mean.cpu(), codec.reduce_encode(rows, x.numel(), dtype, average=True, key=9)), spec


@on_each_device
def test_on_the_stream_and_the_device_that_the_tensor_asks_for():
    import bagua

    codec = bagua.codecs.get("minmax_uint8")
    device = accelerator.device_of(1)  # not the current one, where there are several
    side = torch.Stream(device)
    x = torch.arange(5000.0, device=device)
    side.wait_stream(torch.accelerator.current_stream(device.index))
    with side, accelerator.delayed(5e-3):
        x.mul_(2)
        message = codec.encode(x)
    side.synchronize()
    assert message.device == device
    assert torch.equal(message.cpu(), codec.encode(torch.arange(5000.0) * 2))


@on_each_device
def test_all_of_it_lies_on_one_device():
    import bagua

    codec = bagua.codecs.get("bf16")
    message = codec.encode(torch.ones(4, device=accelerator.kind()))
    with pytest.raises(bagua.InvalidArgument, match=f"encoded is on {accelerator.kind()}:0, but total is on cpu"):
        codec.decode_add(message, torch.zeros(4))
    with pytest.raises(bagua.InvalidArgument, match="encoded is on meta"):
        codec.decode(torch.empty(8, dtype=torch.uint8, device="meta"), 4, torch.float32)
