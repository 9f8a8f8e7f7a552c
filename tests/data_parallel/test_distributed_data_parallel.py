"""bagua.DistributedDataParallel in the place of torch's, and gradients beside torch's."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import (
    assert_equal_on_all_ranks,
    assert_near,
    batch,
    grads_of,
    loss_of,
    make_net,
    mean_in_loops,
    plain_grads,
    process_group,
)

TorchDDP = torch.nn.parallel.DistributedDataParallel
OURS, OF_TORCH = (
    list(inspect.signature(kind.__init__).parameters) for kind in (bagua.DistributedDataParallel, TorchDDP)
)


def _beside_torch(rank, world_size, num_steps):
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    try:
        with process_group():
            models = [
                TorchDDP(make_net(seed=rank), bucket_cap_mb=0.05),
                bagua.DistributedDataParallel(make_net(seed=rank), bucket_cap_mb=0.05),
                bagua.with_bagua(make_net(seed=rank), bucket_bytes=50_000),
            ]
            optimizers = [
                torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.001, momentum=0.9) for m in models
            ]
            assert list(models[1].state_dict()) == list(models[0].state_dict())
            for step in range(num_steps):
                for model, optimizer in zip(models, optimizers, strict=True):
                    if step % 3 == 0 and model is not models[2]:
                        with model.no_sync():
                            loss_of(model, batch(rank, 1000 + step)).backward()
                    elif step % 3 == 0:
                        with model.bagua.no_sync():
                            loss_of(model, batch(rank, 1000 + step)).backward()
                    loss_of(model, batch(rank, step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for buffer in models[0].module.buffers():  # torch sends rank 0's before the next forward
                bagua.broadcast(buffer, 0)
            expected = list(models[0].module.state_dict().items())
            for model in (models[1].module, models[2]):
                for (name, theirs), ours in zip(expected, model.state_dict().values(), strict=True):
                    torch.testing.assert_close(
                        ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
                    )
                assert_equal_on_all_ranks(dict(model.named_parameters()))
    finally:
        torch.distributed.destroy_process_group()


def test_equals_torch_ddp_within_float_tolerance(pool2):
    pool2.run(_beside_torch, args=(8,))


@pytest.mark.slow("test_equals_torch_ddp_within_float_tolerance")
def test_four_ranks_equal_torch_ddp_within_float_tolerance(pool4):
    pool4.run(_beside_torch, args=(6,))


def _wrapper(rank, world_size):
    with process_group():
        net = make_net(seed=rank)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        model = bagua.DistributedDataParallel(net, algorithm="bytegrad", optimizers=[optimizer], codec="bf16")
        assert model.module is net
        assert model.bagua is net.bagua
        assert model.bagua.algorithm.codec == "bf16"
        assert "algorithm" not in dict(model.named_modules())
        batches = [[batch(r, step) for step in range(2)] for r in range(world_size)]
        per_rank = [[plain_grads(net, data) for data in of_rank] for of_rank in batches]
        with model.no_sync():
            loss_of(model, batches[rank][0]).backward()
        loss_of(model, batches[rank][1]).backward()
        assert_equal_on_all_ranks(grads_of(model))
        sums = [{name: first[name] + second[name] for name in first} for first, second in per_rank]
        assert_near(net, grads_of(net), mean_in_loops(sums))
        model.load_state_dict(model.state_dict())
        refused = {
            "dim": 1,
            "init_sync": False,
            "check_reduction": True,
        }
        for name, value in refused.items():
            with pytest.raises(InvalidArgument, match=f"{name}=.* cannot be honoured"):
                bagua.DistributedDataParallel(make_net(), **{name: value})
        for name, value in (("device_ids", [0]), ("device_ids", 0), ("device_ids", [None]), ("output_device", 0)):
            with pytest.raises(InvalidArgument, match=rf"{name} is \[?(0|None)\]?, but the module is on cpu"):
                bagua.DistributedDataParallel(make_net(), **{name: value})
        for name in set(OF_TORCH) - set(OURS):
            with pytest.raises(InvalidArgument, match=f"option '{name}'|argument '{name}'"):
                bagua.DistributedDataParallel(make_net(), **{name: True})
        with pytest.raises(InvalidArgument, match=r"synchronised already; pass its \.module"):
            bagua.with_bagua(model)
        with pytest.raises(InvalidArgument, match="group is of type str"):
            bagua.DistributedDataParallel(make_net(), process_group="gloo")
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
            bagua.DistributedDataParallel(make_net(), **{name: True})


def test_the_wrapper(pool2):
    pool2.run(_wrapper)


def _refuses_torchs_join(rank, world_size):
    with process_group():
        model = bagua.DistributedDataParallel(make_net())
        with pytest.raises(InvalidArgument, match=r"with model.join\(\)"):
            torch.distributed.algorithms.Join([model])
        with pytest.raises(InvalidArgument, match="throw_on_early_termination"):
            model.join(throw_on_early_termination=True)


def test_torchs_join_of_several_is_refused(pool2):
    pool2.run(_refuses_torchs_join)


def test_arguments_are_those_of_torch():
    assert OURS[:6] == OF_TORCH[:6]
    assert set(OURS[: OURS.index("algorithm")]) <= {*OF_TORCH, "init_sync"}  # torch 2.4 has no init_sync yet
