"""Every public name of the original project is there, with its parameters and defaults, or documented as not there."""

from __future__ import annotations

import inspect
import re
import socket
from pathlib import Path

import pytest
import torch

import bagua
import bagua.torch_api
from bagua.testing import spawn
from bagua.torch_api import algorithms, communication, data_parallel, env
from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam, qadam
from bagua.torch_api.data_parallel import bagua_distributed, distributed, functional

ROOT = Path(__file__).parents[2]

# The signatures of release 0.9.2 of the original; a default follows `=`.
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
ENVIRONMENT_ONLY = ("get_node_rank", "get_master_addr", "get_default_bucket_size", "find_free_network_port")
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
# Members of classes and modules besides the functions and classes above.
MEMBERS = {
    torch.nn.Module: "with_bagua bagua_module_name bagua_ddp bagua_algorithm bagua_optimizers bagua_buckets",
    bagua_distributed.BaguaDistributedDataParallel: (
        "module bagua_module_name bagua_buckets bagua_train_step_counter require_backward_grad_sync"
    ),
    data_parallel.DistributedDataParallel: (
        "inner require_backward_grad_sync parameters_to_ignore no_sync bagua_algorithm bagua_optimizers bagua_buckets"
    ),
    communication.BaguaProcessGroup: (
        "ranks intra_ranks inter_ranks stream group_name "
        "get_global_communicator get_inter_node_communicator get_intra_node_communicator"
    ),
    communication.comm: "WORLD",
    communication.CommMember: "WORLD NON_COMM_MEMBER",
    communication: "_get_default_group _rank_not_in_group _rank_not_in_comm",
    distributed: "DistributedDataParallel DistributedDataParallel_V1_9_0 to_bagua_process_group",
    functional: "all_reduce",
    gradient_allreduce.GradientAllReduceAlgorithm: "hierarchical average",
    bytegrad.ByteGradAlgorithm: "hierarchical average",
    decentralized.DecentralizedAlgorithm: "hierarchical peer_selection_mode communication_interval",
    decentralized.LowPrecisionDecentralizedAlgorithm: "hierarchical communication_interval",
    q_adam.QAdamOptimizer: "warmup_steps",
    q_adam.QAdamAlgorithm: "hierarchical optimizer",
    async_model_average.AsyncModelAverageAlgorithm: "peer_selection_mode sync_interval_ms warmup_steps abort resume",
    algorithms.Algorithm: "init",
}
# Public names of the original that do not exist here, by module.
ABSENT = {
    bagua.torch_api: "contrib checkpoint model_parallel moe BaguaTensor get_backend tensor bucket utils",
    bagua: "script service bagua_define",
    bagua.distributed: "launch run",
    algorithms: "AlgorithmImpl GlobalAlgorithmRegistry",
    communication: (
        "get_communicator get_backend broadcast_nccl_unique_id run_flask_app start_autotune_server "
        "get_hyperparameters_service_client"
    ),
    env: (
        "get_bagua_service_port is_report_metrics_switch_on get_autotune_level get_autotune_max_samples "
        "get_autotune_sampling_confidence_time_s get_autotune_warmup_time_s get_is_output_autotune_log "
        "get_autotune_server_wait_time"
    ),
    functional: "torch_reduce_op_to_bagua ReduceOp",
    torch.distributed.ProcessGroup: (
        "bagua_patch bagua_pg bagua_get_global_communicator bagua_get_inter_node_communicator "
        "bagua_get_intra_node_communicator"
    ),
    bagua_distributed.BaguaDistributedDataParallel: (
        "bagua_build_params autograd_graph_params params_in_use find_unused_parameters gradient_as_bucket_view"
    ),
    distributed: "DistributedDataParallel_V1_9_0_Interface",
    data_parallel.DistributedDataParallel: (
        "register_comm_hook scatter gather to_kwargs will_sync_module_buffers device device_type dim "
        "is_multi_device_module static_graph broadcast_buffers find_unused_parameters"
    ),
}


def spelt(function) -> str:
    """Returns the parameters in the form of the tables above."""
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


@pytest.mark.parametrize("name", ENVIRONMENT_ONLY)
def test_environment_of_its_module_only(name):
    assert spelt(getattr(env, name)) == "" and name in env.__all__


@pytest.mark.parametrize("place", MEMBERS, ids=lambda place: place.__name__)
def test_members(place):
    fields = getattr(place, "__dataclass_fields__", {})  # those without a default are on instances only
    names = MEMBERS[place].split()
    assert [name for name in names if not hasattr(place, name) and name not in fields] == []


@pytest.mark.parametrize("place", ABSENT, ids=lambda place: place.__name__)
def test_what_is_not_there_is_documented(place):
    names = ABSENT[place].split()
    assert [name for name in names if hasattr(place, name)] == []
    text = (ROOT / "docs/torch_api.md").read_text().partition("## What is not there")[2]
    assert [name for name in names if not re.search(rf"[`.]{name}`", text)] == []


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_classes(kind):
    assert spelt(kind) == CLASSES[kind]


def test_methods():
    assert spelt(torch.nn.Module.with_bagua) == "self optimizers algorithm process_group=None do_flatten=True"
    assert spelt(async_model_average.AsyncModelAverageAlgorithm.abort) == "self bagua_ddp"
    assert spelt(async_model_average.AsyncModelAverageAlgorithm.resume) == "self bagua_ddp"
    assert spelt(distributed.to_bagua_process_group) == "process_group=None"
    assert re.fullmatch(r"tensor op=\S*SUM\S* group=None", spelt(functional.all_reduce))
    for name in MEMBERS[torch.nn.Module].split()[1:]:
        assert isinstance(vars(torch.nn.Module)[name], property)


def test_other_places():
    from bagua.torch_api.data_parallel.distributed import DistributedDataParallel_V1_9_0
    from bagua.torch_api.distributed import BaguaModule

    assert BaguaModule is bagua.torch_api.BaguaModule
    assert DistributedDataParallel_V1_9_0 is data_parallel.DistributedDataParallel
    assert qadam.QAdamAlgorithm is q_adam.QAdamAlgorithm and qadam.QAdamOptimizer is q_adam.QAdamOptimizer
    assert algorithms.Algorithm.init("async", sync_interval_ms=7).sync_interval_ms == 7
    assert communication.CommMember.WORLD is communication.comm.WORLD


def test_what_the_optimizer_of_qadam_tells():
    optimizer = q_adam.QAdamOptimizer([torch.nn.Parameter(torch.ones(1))], warmup_steps=7)
    assert optimizer.warmup_steps == 7
    assert q_adam.QAdamAlgorithm(optimizer).optimizer is optimizer


def test_the_name_of_a_module_is_a_property():
    model = torch.nn.Linear(1, 1)
    model.bagua_module_name = "mine"
    assert model.bagua_module_name == "mine" and "bagua_module_name" not in vars(model)
    assert list(model.state_dict()) == ["weight", "bias"]


def test_a_free_port_can_be_listened_on():
    with socket.create_server(("127.0.0.1", env.find_free_network_port())):
        pass


def test_numbers_of_the_operators():
    numbers = {op.name: int(op) for op in bagua.torch_api.ReduceOp}
    assert numbers == {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10}


def test_torchscript_still_compiles_modules():
    assert torch.jit.script(torch.nn.Linear(2, 1))(torch.ones(2)).shape == (1,)


def test_torch_compile_still_compiles_modules():
    model = torch.nn.Linear(2, 1)
    x = torch.ones(1, 2)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_a_module_that_is_not_wrapped_has_every_attribute_that_it_lists():
    """torch.compile reads every name in dir(module) of its modules."""
    model = torch.nn.Linear(1, 1)
    for name in dir(model):
        getattr(model, name)
    assert model.bagua_module_name is model.bagua_ddp is model.bagua_algorithm is None
    assert model.bagua_optimizers == model.bagua_buckets == []


@pytest.mark.parametrize("name", ["contrib", "moe"])
def test_unsupported_names_say_so(name):
    with pytest.raises(bagua.InvalidArgument, match=f"has no {name}: .") as caught:
        getattr(bagua.torch_api, name)
    assert isinstance(caught.value, AttributeError) and not hasattr(bagua.torch_api, name)
    assert getattr(bagua.torch_api, name, "a default") == "a default"


@pytest.mark.parametrize(
    "statement",
    [
        "from bagua.torch_api import contrib",
        "from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer",
        "from bagua.torch_api.model_parallel.moe import MoE",
    ],
)
def test_unsupported_modules_say_so(statement):
    with pytest.raises(ImportError, match=r"bagua.torch_api has no (contrib|checkpoint|model_parallel): .") as caught:
        exec(statement, {})
    assert isinstance(caught.value, bagua.InvalidArgument)


def test_what_never_was_is_an_attribute_error():
    assert not hasattr(bagua.torch_api, "no_such_name")


def test_only_torch_api_changes_torch():
    """In a fresh process; and what is asked before init_process_group."""
    program = """if True:
        import os, torch, bagua, sys
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR"):
            os.environ.pop(name, None)
        before = set(dir(torch.nn.Module))
        assert not [name for name in before if "bagua" in name] and "bagua.torch_api" not in sys.modules
        import bagua.torch_api as api
        assert set(dir(torch.nn.Module)) - before == {
            "with_bagua", "bagua_module_name", "bagua_ddp", "bagua_algorithm", "bagua_optimizers", "bagua_buckets"}
        def ask():
            assert not api.is_initialized()
            return api.get_rank(), api.get_world_size(), api.get_local_rank(), api.get_local_size()
        assert ask() == (0, 1, 0, 1)
        assert (api.env.get_node_rank(), api.env.get_master_addr()) == (0, "127.0.0.1")
        os.environ.update(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", GROUP_RANK="3")
        assert ask() == (5, 8, 1, 4) and api.env.get_node_rank() == 3
        os.environ["NODE_RANK"] = "1"
        assert api.env.get_node_rank() == 3
        del os.environ["GROUP_RANK"]
        assert api.env.get_node_rank() == 1
        os.environ["MASTER_ADDR"] = "10.0.0.1"
        assert api.env.get_master_addr() == "10.0.0.1"
    """
    spawn(lambda rank, world_size: exec(program, {}), 1)


def test_every_name_is_in_the_documentation():
    text = (ROOT / "docs/torch_api.md").read_text()
    names = [*COLLECTIVES, *COALESCED, *ENVIRONMENT, *ENVIRONMENT_ONLY, *(kind.__name__ for kind in CLASSES)]
    names += [name for members in MEMBERS.values() for name in members.split()]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
