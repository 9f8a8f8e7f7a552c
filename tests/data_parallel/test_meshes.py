"""with_bagua among the replicas of torch's parallel models: tensor parallel, fully_shard and pipelines; 4 ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import bagua
from bagua import algorithms
from bagua.errors import InvalidArgument
from bagua.torch_version import is_torch_at_least

pytestmark = pytest.mark.skipif(not is_torch_at_least(2, 6), reason="fully_shard is public since torch 2.6")
with contextlib.suppress(ImportError):
    from torch.distributed.fsdp import fully_shard

ROWS, WIDTH = 8, 24


@contextlib.contextmanager
def mesh_of(*names):
    bagua.init_process_group()
    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    finally:
        bagua.destroy_process_group()
        dist.destroy_process_group()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 50)
        self.down = torch.nn.Linear(50, WIDTH)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))  # a plain tensor under tensor parallelism
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)

    def forward(self, x):
        return self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def inputs(replica, step):
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model, replica, step):
    x, y = inputs(replica, step)
    return (model(x) - y).square().mean()


def step_of(model, optimizer, replica, step):
    loss_of(model, replica, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)


def whole(model):
    """The parameters, those of DTensors put together; collective over their meshes."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def assert_close(ours, expected, tolerance):
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: n + text
        )


# ---- tensor parallel


def tensor_parallel(mesh):
    """Gradients of the norm are partial sums over the mesh."""
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    model = parallelize_module(Net(), mesh, plan)
    return parallelize_module(
        model, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    )


def trained_on_both(steps, num_micro=1):
    """The weights of one process whose loss is the mean over both replicas, and the sum over micro-batches."""
    model = Net()
    optimizer = sgd(model)
    for step in range(0, steps * num_micro, num_micro):
        for micro in range(num_micro):
            for replica in range(2):
                (loss_of(model, replica, step + micro) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def _gradients_under_tensor_parallelism(rank, world_size):
    with mesh_of("dp", "tp") as mesh:
        replica = mesh["dp"].get_local_rank()
        model = tensor_parallel(mesh["tp"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + replica)  # with_bagua makes them those of replica 0
        optimizer = sgd(model)
        bagua.with_bagua(model, optimizer, group=mesh["dp"], bucket_bytes=4096, check_replicas=1)
        assert len(model.bagua.buckets) > 1
        for step in range(3):
            if step == 2:  # its optimizer has states by now
                bagua.with_bagua(model, optimizer, group=mesh["dp"], bucket_bytes=1 << 20, check_replicas=1)
            with model.no_sync():
                (loss_of(model, replica, 2 * step) * model.bagua.weight(1) * 2).backward()
            (loss_of(model, replica, 2 * step + 1) * model.bagua.weight(1) * 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        assert_close(whole(model), trained_on_both(3, num_micro=2), 1e-12)
        for parameter in model.parameters():
            assert (
                not hasattr(parameter, "placements")
                or parameter.grad is None
                or (parameter.grad.placements == parameter.placements)
            )


def test_gradients_under_tensor_parallelism(pool4):
    pool4.run(_gradients_under_tensor_parallelism)


def _codecs_under_tensor_parallelism(rank, world_size):
    """Every codec's error stays with the parts: replicas are equal, and the loss falls as without codec."""
    with mesh_of("dp", "tp") as mesh:
        replica = mesh["dp"].get_local_rank()
        for algorithm, options in (("bytegrad", {"error_feedback": True}), ("qsgd", {}), ("powersgd", {"rank": 2})):
            model = tensor_parallel(mesh["tp"])
            optimizer = sgd(model)
            bagua.with_bagua(model, optimizer, group=mesh["dp"], algorithm=algorithm, check_replicas=1, **options)
            for step in range(6):
                step_of(model, optimizer, replica, step)
            expected = trained_on_both(6)
            distance = sum((ours - expected[name]).square().sum() for name, ours in whole(model).items())
            moved = sum((value - expected[name]).square().sum() for name, value in whole(Net()).items())
            assert distance < (0.4 if algorithm == "powersgd" else 0.01) * moved, (algorithm, distance, moved)


def test_codecs_under_tensor_parallelism(pool4):
    pool4.run(_codecs_under_tensor_parallelism)


# ---- fully_shard: weights are exchanged among replicas


def averaged_by_hand(steps, sync_every):
    """local_sgd in plain loops: two replicas, whose weights and momentum are averaged after every k-th step."""
    models = [Net(), Net()]
    optimizers = [sgd(model) for model in models]
    for step in range(steps):
        for replica in range(2):
            step_of(models[replica], optimizers[replica], replica, step)
        if (step + 1) % sync_every == 0:
            for pair in zip(models[0].parameters(), models[1].parameters(), strict=True):
                momenta = [one.state[p]["momentum_buffer"] for one, p in zip(optimizers, pair, strict=True)]
                for values in ([p.data for p in pair], momenta):
                    mean = (values[0] + values[1]) / 2
                    values[0].copy_(mean)
                    values[1].copy_(mean)
    return [whole(model) for model in models]


def fully_sharded(mesh):
    model = Net()
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def _local_sgd_under_fully_shard(rank, world_size):
    with mesh_of("dp_replicate", "dp_shard") as mesh:
        replica = mesh["dp_replicate"].get_local_rank()
        model = fully_sharded(mesh["dp_shard"])
        optimizer = sgd(model)
        group = mesh["dp_replicate"]
        bagua.with_bagua(model, optimizer, algorithm="local_sgd", sync_every=2, group=group)
        for step in range(5):
            step_of(model, optimizer, replica, step)
        assert_close(whole(model), averaged_by_hand(5, 2)[replica], 1e-12)


def test_local_sgd_under_fully_shard(pool4):
    pool4.run(_local_sgd_under_fully_shard)


def _weights_under_fully_shard(rank, world_size):
    """Every algorithm that exchanges weights and steps DTensors does with parts what it does with whole parameters."""
    with mesh_of("dp_replicate", "dp_shard") as mesh:
        replica, tried = mesh["dp_replicate"].get_local_rank(), []
        for name in algorithms.available():
            kind = algorithms.get(name)
            if kind.exchanges != "weights" or not kind.is_lockstep or kind.optimizer_class is bagua.optim.QAdam:
                continue
            tried.append(name)
            results = []
            for model in (fully_sharded(mesh["dp_shard"]), Net()):
                optimizer = sgd(model)
                often = {"sync_every": 2} if hasattr(kind, "sync_every") else {}
                bagua.with_bagua(model, optimizer, algorithm=name, group=mesh["dp_replicate"], **often)
                for step in range(4):
                    step_of(model, optimizer, replica, step)
                results.append(whole(model))
                model.bagua.remove()
            # The blocks of a codec begin elsewhere in a part.
            assert_close(*results, 2e-2 if name in ("low_precision_decentralized", "sparseloco") else 1e-12)
        assert "decentralized" in tried


def test_weights_under_fully_shard(pool4):
    pool4.run(_weights_under_fully_shard)


# ---- refused by name


def _refused(rank, world_size):
    with mesh_of("dp", "tp") as mesh:
        spread, sharded = tensor_parallel(mesh["tp"]), fully_sharded(mesh["tp"])
        both = Net()
        fully_shard(both, mesh=mesh)
        diagonal = [bagua.new_group(ranks) for ranks in ((0, 3), (1, 2))][rank in (1, 2)]
        for model, group, message in (
            (spread, None, "'norm.weight' is a DTensor over the mesh dimension 'tp', in which the group has the ranks"),
            (spread, mesh["tp"], "over the mesh dimension 'tp'"),
            (
                spread,
                diagonal,
                r"the ranks disagree about parameter 'norm.weight'.*part \((0|1),\) of a mesh \('tp',\)",
            ),
            (sharded, mesh["dp"], r"the model is under fully_shard.*bagua\.fsdp\.compress.*'local_sgd'"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                bagua.with_bagua(model, group=group)
        with pytest.raises(InvalidArgument, match="over the mesh dimension 'dp', in which the group has the ranks"):
            bagua.with_bagua(both, sgd(both), algorithm="local_sgd", group=mesh["dp"])
        bagua.with_bagua(spread, group=mesh["dp"])
        with pytest.raises(InvalidArgument, match="'norm.weight' is a DTensor.*torch.distributed.checkpoint"):
            bagua.save("nowhere", spread)


def test_refused(pool4):
    pool4.run(_refused)


# ---- pipelines


def _pipelines(rank, world_size):
    with mesh_of("dp", "pp") as mesh:
        replica, stage = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        for kind in (ScheduleGPipe, Schedule1F1B):
            torch.manual_seed(5)
            layers = [torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
            chain = torch.nn.Sequential(*layers)
            half = torch.nn.Sequential(*layers[2 * stage : 2 * stage + 2])
            bagua.with_bagua(half, group=mesh["dp"], bucket_bytes=1 << 20)
            x = [torch.randn(4 * ROWS, WIDTH, dtype=torch.float64, generator=seeded(one)) for one in range(2)]
            y = [torch.randn(4 * ROWS, WIDTH, dtype=torch.float64, generator=seeded(one + 2)) for one in range(2)]
            part = PipelineStage(half, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
            schedule = kind(part, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
            for _ in range(2):
                half.zero_grad()
                with half.bagua.accumulate(4):
                    schedule.step(*([x[replica]] if stage == 0 else []), target=y[replica])
            reference = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH).double() for _ in layers))
            reference.load_state_dict({k: v.clone() for k, v in chain.state_dict().items()})
            for one in range(2):
                (torch.nn.functional.mse_loss(reference(x[one]), y[one]) / 2).backward()
            for ours, theirs in zip(half.parameters(), [*reference.parameters()][4 * stage :], strict=False):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
            assert half.bagua.state_dict()["num_steps"] == 2  # of eight backwards


def seeded(number):
    return torch.Generator().manual_seed(number)


def test_pipelines(pool4):
    pool4.run(_pipelines)
