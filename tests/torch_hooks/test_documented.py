"""The blocks of docs/fsdp.md run, on the CPU and gloo."""

import re
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.torch_version import is_torch_at_least

PAGE = (Path(__file__).resolve().parents[2] / "docs/fsdp.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _run(rank, world_size):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    for block in BLOCKS:
        names = {"torch": torch, "bagua": bagua, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
        names |= {"MixedPrecisionPolicy": MixedPrecisionPolicy, "num_hosts": 2, "gpus_per_host": 1}
        names |= {"DistributedDataParallel": DistributedDataParallel, "model": Model()}
        names |= {"parallelize_module": parallelize_module, "x": torch.randn(4, 64), "num_microbatches": 1}
        names["plan"] = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        if "schedule" in block:
            model = bagua.with_bagua(names["model"])
            names["schedule"] = types.SimpleNamespace(step=lambda x, of=model: of(x).sum().backward())
        if block.startswith("bagua.fsdp"):
            fully_shard(names["model"])
        exec(compile(block.replace('"cuda"', '"cpu"'), "docs/fsdp.md", "exec"), names)
        names["model"](torch.randn(4, 64)).square().mean().backward()
    bagua.destroy_process_group()
    dist.destroy_process_group()


@pytest.mark.skipif(not is_torch_at_least(2, 9), reason="FSDP2's custom reduce-scatter is of torch 2.9")
def test_the_blocks(pool2):
    assert len(BLOCKS) == 6
    pool2.run(_run)
