"""Every algorithm that exchanges gradients: what a gradient is when backward() returns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from typing import Any

import pytest
import torch

import bagua
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import (
    OF_GRADIENTS,
    assert_equal_on_all_ranks,
    assert_near,
    batch,
    grads_of,
    loss_of,
    make_net,
    mean_in_loops,
    plain_grads,
    process_group,
    wrap,
)
from tests.distributed.worlds import fast_in, in_turns

LINEAR = [name for name in OF_GRADIENTS if bagua.algorithms.get(name).is_linear]


def _mean_of_ranks(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(seed=rank), algorithm=algorithm, bucket_bytes=64 * 1024)
        plain = make_net(seed=0)
        for step in range(3):  # the second step runs in the layout of the observed order
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            expected = mean_in_loops([plain_grads(plain, batch(r, step)) for r in range(world_size)])
            actual = grads_of(model)
            assert_near(model, actual, expected)
            assert_equal_on_all_ranks(actual)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    assert parameter.grad.stride() == parameter.stride()
            plain.load_state_dict(model.state_dict())
        return {bucket.declaration.codec for bucket in model.bagua.buckets}, model.bagua.algorithm.stage().name


@in_turns("algorithm, backend", OF_GRADIENTS, ["native", "torch"])
def test_gradient_is_the_mean_over_ranks(pool2, algorithm, backend):
    codecs, stage = pool2.run(_mean_of_ranks, args=(algorithm,), env={"BAGUA_BACKEND": backend})[0]
    assert (codecs == {None}) == (algorithm in ("gradient_allreduce", "powersgd") or stage == "warm-up")


@fast_in("algorithm", ["gradient_allreduce"], OF_GRADIENTS)
def test_gradient_is_the_mean_over_four_ranks(pool4, algorithm):
    pool4.run(_mean_of_ranks, args=(algorithm,))


def _weighted(rank, world_size, algorithm):
    """Ranks and micro-batches of different sizes, one of them empty: the mean over all samples."""
    with process_group():
        model = wrap(make_net(), algorithm=algorithm, broadcast_buffers=False)
        plain = make_net()
        for step, sizes in enumerate([((3, 8), (5, 2)), ((2, 9), (0, 4)), ((7, 7), (7, 7))]):
            model.zero_grad()
            for micro in range(2):
                x, y = batch(rank, 10 * step + micro, sizes[rank % 2][micro] or 2)
                num = sizes[rank % 2][micro]
                with model.no_sync() if micro == 0 else contextlib.nullcontext():
                    ((model(x) - y).square().mean() * model.bagua.weight(num)).backward()
            total, mean = sum(sum(sizes[r % 2]) for r in range(world_size)), {}
            for r, micro in itertools.product(range(world_size), range(2)):
                num = sizes[r % 2][micro]
                for name, grad in plain_grads(plain, batch(r, 10 * step + micro, num or 2)).items():
                    mean[name] = mean.get(name, 0) + grad.double() * num / total
            actual = grads_of(model)
            assert_near(model, actual, mean)
            assert_equal_on_all_ranks(actual)
        for num in (-1, float("nan"), float("inf")):
            with pytest.raises(InvalidArgument, match="expected the number of tokens"):
                model.bagua.weight(num)


@fast_in("algorithm", ["gradient_allreduce", "bytegrad"], OF_GRADIENTS)
def test_a_weight_makes_it_the_mean_over_all_tokens(pool2, algorithm):
    pool2.run(_weighted, args=(algorithm,))


def _weighted_sum(rank, world_size):
    """average=False leaves no factor of the number of ranks; weights that are exchanged have no such mean."""
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(1, 1, bias=False), average=False)
        (model(torch.full((1,), float(rank))).sum() * model.bagua.weight(1 + 2 * rank)).backward()
        assert float(model.weight.grad) == 3 / 4
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="local_sgd")
        with pytest.raises(InvalidArgument, match="'local_sgd' exchanges weights"):
            model.bagua.weight(1)


def test_a_weight_of_sums_and_of_weights(pool2):
    pool2.run(_weighted_sum)


def _accumulate(rank, world_size, algorithm, set_to_none):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm, broadcast_buffers=False)
        plain = make_net()
        for step in range(3):
            model.zero_grad(set_to_none=set_to_none)
            with model.bagua.no_sync():
                (loss_of(model, batch(rank, 10 * step)) / 3).backward()
                (loss_of(model, batch(rank, 10 * step + 1)) / 3).backward()
            (loss_of(model, batch(rank, 10 * step + 2)) / 3).backward()
            per_rank = [
                mean_in_loops([plain_grads(plain, batch(r, 10 * step + k)) for k in range(3)])
                for r in range(world_size)
            ]
            actual = grads_of(model)
            assert_near(model, actual, mean_in_loops(per_rank))
            assert_equal_on_all_ranks(actual)


@fast_in(
    "algorithm, set_to_none",
    [("gradient_allreduce", True), ("bytegrad", False), ("powersgd", True)],
    list(itertools.product(OF_GRADIENTS, [True, False])),
)
def test_accumulation_equals_the_mean_of_the_batches(pool2, algorithm, set_to_none):
    pool2.run(_accumulate, args=(algorithm, set_to_none))


def _live_gradients_survive_the_new_layout(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm, bucket_bytes=64 * 1024, broadcast_buffers=False)
        before = model.bagua.buckets
        loss_of(model, batch(rank, 0)).backward()
        first = grads_of(model)
        with model.bagua.no_sync():
            loss = loss_of(model, batch(rank, 1))  # the new layout takes effect here
        assert model.bagua.buckets is not before
        moved = grads_of(model)
        assert all(torch.equal(first[name], moved[name]) for name in first)
        assert first.keys() == moved.keys()
        with model.bagua.no_sync():
            loss.backward()
        for bucket in model.bagua.buckets:
            for member in bucket.members:
                assert member.parameter.grad is member.view
        local = plain_grads(make_net(), batch(rank, 1))
        for name, grad in grads_of(model).items():
            torch.testing.assert_close(grad, first[name] + local[name])
        loss_of(model, batch(rank, 2)).backward()
        assert_equal_on_all_ranks(grads_of(model))


@fast_in("algorithm", ["gradient_allreduce", "powersgd"], LINEAR)
def test_live_gradients_survive_the_new_layout(pool2, algorithm):
    pool2.run(_live_gradients_survive_the_new_layout, args=(algorithm,))


def _repeated_backwards(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        plain = make_net()
        for step in range(2):
            loss = loss_of(model, batch(rank, step))
            loss.backward(retain_graph=True)
            once = grads_of(model)
            loss.backward()  # mean(mean g + g) = 2 mean g
            expected = mean_in_loops([plain_grads(plain, batch(r, step)) for r in range(world_size)])
            assert_near(model, once, expected)
            assert_near(model, grads_of(model), {name: 2 * grad for name, grad in expected.items()}, times=2)
            assert_equal_on_all_ranks(grads_of(model))
            model.zero_grad()


@fast_in("algorithm", ["gradient_allreduce", "bytegrad"], LINEAR)
def test_retain_graph_and_two_backwards(pool2, algorithm):
    pool2.run(_repeated_backwards, args=(algorithm,))


def _momenta_are_not_added_to(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        loss_of(model, batch(rank, 0)).backward()
        bagua.barrier()  # a rank may hear of the other's error in its first backward
        with pytest.raises(BaguaError, match=f"what algorithm '{algorithm}' has made of an earlier backward"):
            loss_of(model, batch(rank, 1)).backward()


@pytest.mark.parametrize("algorithm", [name for name in OF_GRADIENTS if name not in LINEAR])
def test_what_has_a_momentum_is_not_exchanged_again(pool2, algorithm):
    pool2.run(_momenta_are_not_added_to, args=(algorithm,))


def _two_forwards(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        plain = make_net()
        for step in range(2):
            model.zero_grad()
            first = loss_of(model, batch(rank, 2 * step))
            model.eval()
            with torch.no_grad():
                model(batch(rank, 99)[0])
            model.train()
            second = loss_of(model, batch(rank, 2 * step + 1))
            (first + second).backward()
            per_rank = []
            for r in range(world_size):
                total = plain_grads(plain, batch(r, 2 * step))
                for name, grad in plain_grads(plain, batch(r, 2 * step + 1)).items():
                    total[name] += grad
                per_rank.append(total)
            assert_near(model, grads_of(model), mean_in_loops(per_rank), times=2)
            assert_equal_on_all_ranks(grads_of(model))


@fast_in("algorithm", ["gradient_allreduce", "qadam"], OF_GRADIENTS)
def test_two_forwards_before_a_backward_and_eval_in_between(pool2, algorithm):
    pool2.run(_two_forwards, args=(algorithm,))


def _clipping(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        loss_of(model, batch(rank, 0)).backward()
        grads = grads_of(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        by_hand = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
        assert abs(float(norm) - by_hand) < 1e-4 * by_hand
        assert_equal_on_all_ranks({"norm": norm.reshape(1), **grads_of(model)})
        return float(norm)


@fast_in("algorithm", ["gradient_allreduce", "qsgd"], OF_GRADIENTS)
def test_clipping_sees_the_synchronised_gradients(pool2, algorithm):
    first, second = pool2.run(_clipping, args=(algorithm,))
    assert first == second


class Dtypes(torch.nn.Module):
    """One parameter of every dtype that can be reduced."""

    def __init__(self):
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            self.register_parameter("of_" + str(dtype)[6:], torch.nn.Parameter(torch.ones(130, 100, dtype=dtype)))

    def forward(self, factor):
        return sum((parameter.float() * factor).sum() for parameter in self.parameters())


def _several_dtypes(rank, world_size, algorithm):
    with process_group():
        model = wrap(Dtypes(), algorithm=algorithm)
        factor = torch.arange(13000.0).reshape(130, 100) / 13000 + rank
        model(factor).backward()
        assert all(len({m.parameter.dtype for m in bucket.members}) == 1 for bucket in model.bagua.buckets)
        expected = factor - rank + (world_size - 1) / 2
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == parameter.dtype
            step = max(torch.finfo(parameter.dtype).eps, 3 / 255)
            assert float((parameter.grad.double() - expected).abs().max()) <= 4 * step, name
        assert_equal_on_all_ranks(grads_of(model))
        return {str(bucket.dtype): bucket.declaration.codec for bucket in model.bagua.buckets}


# dgc sends a part of them.
@fast_in("algorithm", ["bytegrad", "powersgd"], [name for name in OF_GRADIENTS if name != "dgc"])
def test_several_dtypes(pool2, algorithm):
    codecs = pool2.run(_several_dtypes, args=(algorithm,))[0]
    assert len(codecs) == 4
    assert codecs["torch.float64"] is None


class Shapes(torch.nn.Module):
    """A scalar, one without elements, a transposed one, one with holes, and many that leave padding."""

    def __init__(self):
        super().__init__()
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.transposed = torch.nn.Parameter(torch.ones(5, 7, 3).permute(2, 0, 1))
        self.holes = torch.nn.Parameter(torch.ones(6, 8)[:, ::2])
        self.odd = torch.nn.ParameterList([torch.ones(i) for i in (1, 15, 16, 17, 31)])

    def forward(self, factor):
        return sum((parameter * factor).sum() for parameter in self.parameters())


def _shapes(rank, world_size, algorithm):
    with process_group():
        model = wrap(Shapes(), algorithm=algorithm, bucket_bytes=256)
        plain = Shapes()
        plain(1.0).backward()
        for factor in (1.0, 10.0):
            model.zero_grad()
            model(factor * (1 + 2 * rank)).backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad.stride() == theirs.grad.stride()
                torch.testing.assert_close(ours.grad, factor * world_size * theirs.grad)
        assert_equal_on_all_ranks(grads_of(model))


@fast_in("algorithm", ["gradient_allreduce", "qadam"], OF_GRADIENTS)
def test_odd_shapes_and_strides(pool2, algorithm):
    pool2.run(_shapes, args=(algorithm,))


def _checkpointed(rank, world_size, algorithm, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=use_reentrant)
            return x.sum(1)

    with process_group():
        model = wrap(make_net(0, Checkpointed), algorithm=algorithm)
        plain = make_net(0, Checkpointed)
        for step in range(2):
            model.zero_grad()
            data = [(x.requires_grad_(), y) for x, y in (batch(r, step) for r in range(world_size))]
            loss_of(model, data[rank]).backward()
            assert_near(model, grads_of(model), mean_in_loops([plain_grads(plain, d) for d in data]))
            assert_equal_on_all_ranks(grads_of(model))


@fast_in(
    "algorithm, use_reentrant",
    [("gradient_allreduce", True), ("bytegrad", False)],
    list(itertools.product(OF_GRADIENTS, [True, False])),
)
def test_activation_checkpoints(pool2, algorithm, use_reentrant):
    pool2.run(_checkpointed, args=(algorithm, use_reentrant))


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    other: Any = dataclasses.field(default_factory=list)


def _holding_one_another(y):
    output = Output(y)
    output.other = [output]
    for _ in range(2000):
        output = Output(y, output)
    return output


class _Reentrant(torch.nn.Module):
    """Returns an output behind a checkpoint, with a parameter before it."""

    def __init__(self):
        super().__init__()
        self.first, self.block = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        self.pack = Output

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return self.pack(checkpoint(self.block, self.first(x), use_reentrant=True))


def _packed(rank, world_size):
    with process_group():
        model, plain = wrap(make_net(0, _Reentrant), algorithm="gradient_allreduce"), make_net(0, _Reentrant)
        for pack in (Output, lambda y: [{"y": (Output(y),)}], _holding_one_another):
            model.pack = pack
            for step in range(2):
                model.zero_grad()
                packed = model(batch(rank, step)[0])
                (packed if isinstance(packed, Output) else packed[0]["y"][0]).y.sum().backward()
                expected = []
                for other in range(world_size):
                    plain.zero_grad()
                    plain(batch(other, step)[0]).y.sum().backward()
                    expected.append(grads_of(plain))
                assert_near(model, grads_of(model), mean_in_loops(expected))
        model.pack = lambda y: types.SimpleNamespace(y=y)
        with pytest.raises(BaguaError, match=r"'first\.weight', 'first\.bias'.* use_reentrant=True .* dataclasses"):
            model(batch(rank, 0)[0]).y.sum().backward()


def test_outputs_behind_a_checkpoint_are_found_in_what_holds_them(pool2):
    pool2.run(_packed)


def _gradient_penalty(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm, find_unused_parameters=True)
        x, _ = batch(rank, 0)
        x.requires_grad_()
        # autograd.grad() reaches the model's output, but no parameter's gradient: none changes.
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        slope.square().sum().backward()
        assert_equal_on_all_ranks(grads_of(model))
        wrap(model, algorithm=algorithm)  # where no parameter may be left out, it does not even communicate
        model.zero_grad()
        torch.autograd.grad(model(x).sum(), x)
        assert model.bagua.timeline().summary()["steps"] == 0
        loss_of(model, batch(rank, 0)).backward()
        assert model.bagua.timeline().summary()["steps"] == 1
        assert_equal_on_all_ranks(grads_of(model))


@fast_in("algorithm", ["gradient_allreduce", "powersgd"], OF_GRADIENTS)
def test_gradient_penalty(pool2, algorithm):
    pool2.run(_gradient_penalty, args=(algorithm,))
