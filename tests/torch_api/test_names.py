"""Every name of the original project that is promised is there, with the original's parameters and defaults."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bagua
import bagua.torch_api
from bagua.torch_api import algorithms, communication, data_parallel, env
from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam, qadam

ROOT = Path(__file__).parents[2]

# As in release 0.9.2 of the original; `=` and what follows is the default.
COLLECTIVES = {
    "init_process_group": "store=None",
    "is_initialized": "",
    "new_group": "ranks=None stream=None",
    "from_torch_group": "group stream=None",
    "send": "tensor dst comm=None",
    "recv": "tensor src comm=None",
    "broadcast": "tensor src=0 comm=None",
    "broadcast_object": "obj src=0 comm=None",
    "reduce": "send_tensor recv_tensor dst op=SUM comm=None",
    "reduce_inplace": "tensor dst op=SUM comm=None",
    "allreduce": "send_tensor recv_tensor op=SUM comm=None",
    "allreduce_inplace": "tensor op=SUM comm=None",
    "allgather": "send_tensor recv_tensor comm=None",
    "allgather_inplace": "tensor comm=None",
    "gather": "send_tensor recv_tensor dst comm=None",
    "gather_inplace": "tensor count dst comm=None",
    "scatter": "send_tensor recv_tensor src comm=None",
    "scatter_inplace": "tensor count src comm=None",
    "reduce_scatter": "send_tensor recv_tensor op=SUM comm=None",
    "reduce_scatter_inplace": "tensor op=SUM comm=None",
    "alltoall": "send_tensor recv_tensor comm=None",
    "alltoall_inplace": "tensor comm=None",
    "alltoall_v": "send_tensor send_counts send_displs recv_tensor recv_counts recv_displs comm=None",
    "alltoall_v_inplace": "tensor counts displs comm=None",
    "barrier": "comm=None",
}
COALESCED = {
    "broadcast_coalesced": "tensors src=0 comm=None",
    "allreduce_coalesced_inplace": "tensors op=SUM comm=None",
}
ENVIRONMENT = ("get_rank", "get_world_size", "get_local_rank", "get_local_size")
ADAM = "params lr=0.001 warmup_steps=100 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.0"
CLASSES = {
    gradient_allreduce.GradientAllReduceAlgorithm: "hierarchical=False average=True",
    bytegrad.ByteGradAlgorithm: "hierarchical=True average=True",
    decentralized.DecentralizedAlgorithm: "hierarchical=True peer_selection_mode=all communication_interval=1",
    decentralized.LowPrecisionDecentralizedAlgorithm: "hierarchical=True communication_interval=1",
    q_adam.QAdamAlgorithm: "q_adam_optimizer hierarchical=True",
    q_adam.QAdamOptimizer: ADAM,
    async_model_average.AsyncModelAverageAlgorithm: "peer_selection_mode=all sync_interval_ms=500 warmup_steps=0",
    data_parallel.DistributedDataParallel: (
        "module device_ids=None output_device=None dim=0 broadcast_buffers=True process_group=None bucket_cap_mb=25 "
        "find_unused_parameters=False check_reduction=False gradient_as_bucket_view=True optimizers=() "
        "algorithm=GradientAllReduceAlgorithm(hierarchical=False, average=True)"
    ),
}


def spelt(function) -> str:
    """The parameters as the tables above have them."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        default = getattr(parameter.default, "name", parameter.default)
        words.append(parameter.name if default is parameter.empty else f"{parameter.name}={default}")
    return " ".join(words)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_functions(name):
    function = getattr(bagua.torch_api, name)
    assert spelt(function) == COLLECTIVES[name]
    assert function is getattr(communication, name)
    assert {name} <= set(communication.__all__) & set(bagua.torch_api.__all__)


def test_functions_of_the_module_communication_only():
    assert {name: spelt(getattr(communication, name)) for name in COALESCED} == COALESCED


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment(name):
    assert spelt(getattr(bagua.torch_api, name)) == ""
    assert getattr(bagua.torch_api, name) is getattr(env, name)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_classes(kind):
    assert spelt(kind) == CLASSES[kind]


def test_methods():
    assert spelt(torch.nn.Module.with_bagua) == "self optimizers algorithm process_group=None do_flatten=True"
    assert spelt(async_model_average.AsyncModelAverageAlgorithm.abort) == "self bagua_ddp"
    assert spelt(async_model_average.AsyncModelAverageAlgorithm.resume) == "self bagua_ddp"
    for name in ("bagua_algorithm", "bagua_optimizers", "bagua_buckets"):
        assert isinstance(vars(torch.nn.Module)[name], property)
        assert not hasattr(torch.nn.Linear(1, 1), name)


def test_other_places():
    from bagua.torch_api.data_parallel.distributed import DistributedDataParallel_V1_9_0
    from bagua.torch_api.distributed import BaguaModule

    assert BaguaModule is bagua.torch_api.BaguaModule
    assert DistributedDataParallel_V1_9_0 is data_parallel.DistributedDataParallel
    assert qadam.QAdamAlgorithm is q_adam.QAdamAlgorithm and qadam.QAdamOptimizer is q_adam.QAdamOptimizer
    assert algorithms.Algorithm.init("async", sync_interval_ms=7).sync_interval_ms == 7


def test_numbers_of_the_operators():
    numbers = {op.name: int(op) for op in bagua.torch_api.ReduceOp}
    assert numbers == {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10}


def test_torchscript_still_compiles_modules():
    assert torch.jit.script(torch.nn.Linear(2, 1))(torch.ones(2)).shape == (1,)


@pytest.mark.parametrize("name", ["contrib", "checkpoint", "moe", "BaguaTensor", "get_backend"])
def test_what_is_left_out_says_so(name):
    with pytest.raises(bagua.InvalidArgument, match=f"has no {name}: ."):
        getattr(bagua.torch_api, name)


def test_what_never_was_is_an_attribute_error():
    assert not hasattr(bagua.torch_api, "no_such_name")


def test_only_torch_api_changes_torch():
    """In a fresh process; and what is asked before init_process_group."""
    program = """if True:
        import torch, bagua, sys
        before = set(dir(torch.nn.Module))
        assert not [name for name in before if "bagua" in name] and "bagua.torch_api" not in sys.modules
        import bagua.torch_api as api
        assert set(dir(torch.nn.Module)) - before == {
            "with_bagua", "bagua_algorithm", "bagua_optimizers", "bagua_buckets"}
        def ask():
            assert not api.is_initialized()
            return api.get_rank(), api.get_world_size(), api.get_local_rank(), api.get_local_size()
        assert ask() == (0, 1, 0, 1)
        import os
        os.environ.update(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", GROUP_RANK="3")
        assert ask() == (5, 8, 1, 4) and api.env.get_node_rank() == 3
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_name_is_in_the_documentation():
    text = (ROOT / "docs/torch_api.md").read_text()
    names = [*COLLECTIVES, *COALESCED, *ENVIRONMENT, *(kind.__name__ for kind in CLASSES)]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
