"""bagua.ddp.comm_hook under torch's DDP on gloo: the definition in plain loops, state, NaN, and what is refused."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.errors import InvalidArgument

NUMEL = 6000  # 24 KB, not a multiple of a codec's block


@contextlib.contextmanager
def torch_group():
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        bagua.destroy_process_group()
        dist.destroy_process_group()


class Sum(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self, numel=NUMEL):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel))

    def forward(self, x):
        return (self.weight * x).sum()


def wrapped(**options):
    model = DistributedDataParallel(Sum())
    hook = bagua.ddp.comm_hook(**options)
    model.register_comm_hook(None, hook)
    return model, hook


def gradient(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(NUMEL, generator=generator) * torch.linspace(0.1, 3, NUMEL)


def backward(model, x):
    model.zero_grad()
    model(x).backward()
    return model.module.weight.grad.clone()


def coded(codec, values):
    return codec.decode(codec.encode(values), values.numel(), values.dtype)


class Definition:
    """x <- Q(mean of Q(x_r + e_r) + f), and what each Q loses is the next e_r and f: of all ranks, by itself."""

    def __init__(self, world_size, codec, error_feedback):
        self.codec, self.error_feedback = bagua.codecs.get(codec), error_feedback
        self.of_ranks = [torch.zeros(NUMEL) for _ in range(world_size)]
        self.of_result = torch.zeros(NUMEL)

    def mean(self, gradients):
        total = torch.zeros(NUMEL)
        for rank, values in enumerate(gradients):
            values = values + self.of_ranks[rank]
            sent = coded(self.codec, values)
            if self.error_feedback:
                self.of_ranks[rank] = values - sent
            total += sent
        values = total * (1 / len(gradients)) + self.of_result
        result = coded(self.codec, values)
        if self.error_feedback:
            self.of_result = values - result
        return result


def follows_the_definition(rank, world_size, codec, error_feedback):
    with torch_group():
        model, _ = wrapped(codec=codec, error_feedback=error_feedback)
        definition = Definition(world_size, codec, error_feedback)
        for step in range(5):
            gradients = [gradient(step, one) for one in range(world_size)]
            found = backward(model, gradients[rank])
            if step == 0:  # at full precision
                torch.testing.assert_close(found, torch.stack(gradients).mean(0))
            else:
                assert torch.equal(found, definition.mean(gradients)), step


@pytest.mark.parametrize(
    ("codec", "error_feedback"),
    [
        ("minmax_uint8", False),
        ("minmax_uint8", True),
        ("onebit", True),
        ("bf16", True),
        ("fp8_e5m2", True),
        ("fp4_e3m0", True),
    ],
)
def test_the_definition(pool2, codec, error_feedback):
    pool2.run(follows_the_definition, args=(codec, error_feedback))


def trains_as_without(rank, world_size):
    """A model of several buckets, of types that no codec knows, of unused parameters, joined by uneven inputs."""
    with torch_group():
        trained = []
        for has_hook in (False, True):
            torch.manual_seed(0)
            layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64).double())
            model = torch.nn.ModuleDict({"used": layers, "unused": torch.nn.Linear(3, 3)})
            model.forward = lambda x, used=layers: used[2](used[1](used[0](x)).double())
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.03, find_unused_parameters=True)
            if has_hook:
                ddp.register_comm_hook(None, bagua.ddp.comm_hook(codec=None))
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            with ddp.join():
                for step in range(3 + rank):
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            trained.append([parameter.detach().clone() for parameter in layers.parameters()])
        torch.testing.assert_close(*trained)


def test_full_precision_trains_as_ddp_without_a_hook(pool2):
    pool2.run(trains_as_without)


def resumes(rank, world_size):
    with torch_group():
        model, hook = wrapped(codec="onebit", error_feedback=True)
        for step in range(4):
            backward(model, gradient(step, rank))
        state = hook.state_dict()
        expected = [backward(model, gradient(step, rank)) for step in range(4, 7)]
        again, resumed = wrapped(codec="onebit", error_feedback=True)
        resumed.load_state_dict(state)
        backward(again, gradient(99, rank))  # at full precision, before DDP's buckets are final
        for step, wanted in enumerate(expected, 4):
            assert torch.equal(backward(again, gradient(step, rank)), wanted)
        other, hook = wrapped(codec="minmax_uint8", error_feedback=True)
        hook.load_state_dict(state)
        with pytest.raises(InvalidArgument, match="codec='onebit'"):
            backward(other, gradient(0, rank))


def test_a_state_is_loaded_before_the_first_backward(pool2):
    pool2.run(resumes)


def bears_nan(rank, world_size):
    with torch_group():
        model, hook = wrapped(codec="minmax_uint8", error_feedback=True)
        for step in range(2):
            backward(model, gradient(step, rank))
        before = hook.state_dict()["residuals"]["0"]
        bad = gradient(2, rank)
        bad[17] = float("nan") if rank == 1 else 0.0
        assert backward(model, bad)[17].isnan()
        for one, other in zip(before, hook.state_dict()["residuals"]["0"], strict=True):
            assert torch.equal(one, other)


def test_nan_reaches_all_ranks_and_no_residual(pool2):
    pool2.run(bears_nan)


def test_a_codec_that_does_not_go_with_error_feedback_is_refused():
    with pytest.raises(InvalidArgument, match="error feedback only"):
        bagua.ddp.comm_hook(codec="onebit")
    with pytest.raises(InvalidArgument, match="pass a codec too"):
        bagua.ddp.comm_hook(codec=None, error_feedback=True)
    with pytest.raises(InvalidArgument, match="unknown codec 'int3'"):
        bagua.ddp.comm_hook(codec="int3")


def fails(rank, world_size):
    with torch_group():
        model, hook = wrapped()
        backward(model, gradient(0, rank))
        if rank == 1:
            hook._group.poison(bagua.RemoteError("injected"))
        with pytest.raises((RuntimeError, bagua.RemoteError), match="injected"):
            for step in range(1, 100):
                backward(model, gradient(step, rank))


def test_a_failure_is_raised_by_backward_on_all_ranks(pool2):
    pool2.run(fails)
