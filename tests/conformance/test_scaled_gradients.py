"""Every registered algorithm under AMP's GradScaler, and NaN or Inf without it."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import (
    ALGORITHMS,
    OF_GRADIENTS,
    assert_equal_on_all_ranks,
    batch,
    grads_of,
    loss_of,
    make_net,
    make_optimizer,
    process_group,
    slow_but,
    wrap,
)
from tests.distributed.worlds import in_turns

IN_LOCKSTEP = [name for name in ALGORITHMS if bagua.algorithms.get(name).is_lockstep]
in_lockstep = pytest.mark.parametrize("algorithm", IN_LOCKSTEP)
OF_CODECS = [name for name in OF_GRADIENTS if bagua.algorithms.get(name).refuses_nonfinite]
of_gradients = pytest.mark.parametrize("algorithm", OF_GRADIENTS)


def _poisoned_loss(model, rank, step, value):
    """Rank 1's gradients of ``wide`` are ``value``."""
    loss = loss_of(model, batch(rank, step))
    return loss + value * model.wide.weight.sum() if rank == 1 else loss


def _scaler(rank, world_size, algorithm, fused, unscale):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model, torch.optim.AdamW, fused=fused)
        model = bagua.with_bagua(model, optimizer, algorithm=algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(4):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            bad = step in (1, 2)
            scaler.scale(
                _poisoned_loss(model, rank, step, float("inf" if step == 1 else "nan") if bad else 0.0)
            ).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            is_unchanged = all(torch.equal(before[name], p) for name, p in model.named_parameters())
            assert is_unchanged == bad
            if algorithm in OF_GRADIENTS:
                assert_equal_on_all_ranks(dict(model.named_parameters()))
        assert scaler.get_scale() == 256.0


@in_turns("algorithm, how", IN_LOCKSTEP, ["unscale", "fused"])
def test_all_ranks_skip_the_step_that_a_scaler_skips(pool2, algorithm, how):
    pool2.run(_scaler, args=(algorithm, how == "fused", how == "unscale"))


def _refused(rank, world_size, algorithm, value):
    with process_group():
        model = make_net()
        mine = make_optimizer(algorithm, model)
        model = bagua.with_bagua(model, mine, algorithm=algorithm)
        for _ in range(2):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            mine.zero_grad()
            _poisoned_loss(model, rank, 0, value).backward()
            if algorithm not in OF_CODECS:  # as plain PyTorch: NaN goes into the weights
                mine.step()
                assert not model.wide.weight.isfinite().all()
                return "plain"
            # QAdam is in its warm-up, and PowerSGD sends factors.
            under = "" if algorithm in ("qadam", "powersgd") else "under codec"
            with pytest.raises(InvalidArgument, match=rf"NaN or Inf.*bucket \d+ \(.*wide\.weight.*{under}") as caught:
                mine.step()
            assert caught.value.bucket.startswith("bucket ")
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
            mine.zero_grad()  # the ranks go on
            loss_of(model, batch(rank, 1)).backward()
            mine.step()
            assert_equal_on_all_ranks(dict(model.named_parameters()))
        return "refused"


def _overflow(rank, world_size):
    """Every rank's float16 gradients are finite; what is decoded of their sum is not."""
    with process_group():
        model = torch.nn.Linear(64, 256, bias=False).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="bytegrad", average=False, min_compressed_bytes=0)
        before = model.weight.detach().clone()
        factor = torch.full((256, 64), 100.0)
        factor[3, 5] = 60_000.0
        (model.weight * factor.half()).sum().backward()
        with pytest.raises(InvalidArgument, match="NaN or Inf"):
            optimizer.step()
        assert torch.equal(model.weight, before)


def test_sums_that_overflow_float16_are_noticed(pool2):
    pool2.run(_overflow)


@in_turns("algorithm, value", OF_GRADIENTS, [float("nan"), float("inf")])
def test_a_step_with_nan_under_a_codec_is_refused_on_all_ranks(pool2, algorithm, value):
    assert pool2.run(_refused, args=(algorithm, value)) == ["refused" if algorithm in OF_CODECS else "plain"] * 2


class Tiny(torch.nn.Module):
    """Of ``num`` rows, and a bias."""

    def __init__(self, num, dtype):
        super().__init__()
        self.part = torch.nn.Linear(16, num, dtype=dtype)

    def forward(self, x):
        return self.part(x.to(self.part.weight.dtype)).float().sum(1)


# A model of which nothing is encoded: too small; on one node; of a type that codecs do not know; of biases.
UNCODED = {
    "small": (4, torch.float32, {}),
    "one node": (2048, torch.float32, {"hierarchical": True}),
    "float64": (2048, torch.float64, {}),
    "half": (4, torch.bfloat16, {}),
}


def _refused_uncoded(rank, world_size, algorithm, name, bad):
    num, dtype, options = UNCODED[name]
    with process_group():
        torch.manual_seed(0)
        model = Tiny(num, dtype)
        optimizer = make_optimizer(algorithm, model)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
        assert all(bucket.declaration.codec is None for bucket in model.bagua.buckets)
        x, y = batch(rank, 0)
        for step in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if rank == 1 and step:
                loss = loss + float("inf") * model.get_parameter(bad).reshape(-1)[-1].float()
            loss.backward()
            if not step:
                optimizer.step()
                assert not all(map(torch.equal, before, model.parameters()))
                continue
            with pytest.raises(InvalidArgument, match=rf"NaN or Inf.*bucket \d+ \(.*{bad}"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
        bagua.barrier()  # the group is whole


@pytest.mark.parametrize("bad", slow_but(["part.weight", "part.bias"], "part.weight"))
@pytest.mark.parametrize("name", UNCODED)
@pytest.mark.parametrize("algorithm", slow_but(OF_CODECS, "bytegrad"))
def test_nan_where_nothing_is_encoded(pool2, algorithm, name, bad):
    pool2.run(_refused_uncoded, args=(algorithm, name, bad))


def _refused_weights(rank, world_size, in_closure):
    """Where weights are exchanged the ranks ask one another at the end of backward."""
    with process_group():
        model = make_net()
        optimizer = make_optimizer("low_precision_decentralized", model)
        bagua.with_bagua(model, optimizer, algorithm="low_precision_decentralized")
        for step in range(4):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}

            def closure(step=step):
                optimizer.zero_grad()
                loss = _poisoned_loss(model, rank, step, float("nan") if step % 2 else 0.0)
                loss.backward()
                return loss

            if not in_closure:
                closure()
            if step % 2 == 0:
                optimizer.step(*[closure] * in_closure)
                continue
            with pytest.raises(InvalidArgument, match="NaN or Inf on some rank.*'low_precision_decentralized'"):
                optimizer.step(*[closure] * in_closure)
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        bagua.barrier()


@pytest.mark.parametrize("in_closure", [False, True])
def test_nan_where_weights_are_encoded(pool2, in_closure):
    pool2.run(_refused_weights, args=(in_closure,))


def _refused_bias(rank, world_size, algorithm):
    """Of a bias, which travels at full precision."""
    with process_group():
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        codecs = {name: b.declaration.codec for b in model.bagua.buckets for name in b.names}
        assert codecs["1.bias"] is None and codecs["0.weight"] is not None
        if rank == 1:
            model[1].bias.register_hook(lambda grad: grad * float("nan"))
        for _ in range(2):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            model(torch.randn(2, 64)).sum().backward()
            with pytest.raises(InvalidArgument, match=r"NaN or Inf.*bucket \d+ \(.*1\.bias.*\)\. No rank"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("algorithm", ["bytegrad", "qsgd"])
def test_nan_in_what_travels_at_full_precision_beside_a_codec(pool2, algorithm):
    pool2.run(_refused_bias, args=(algorithm,))


def _other_places(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        if not any(bucket.declaration.codec for bucket in model.bagua.buckets):
            return
        with pytest.raises(InvalidArgument, match="pass the optimizer to with_bagua"):  # nobody else would tell
            _poisoned_loss(model, rank, 0, float("nan")).backward()
        model.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        assert_equal_on_all_ranks(grads_of(model))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        before = model.scale.detach().clone()

        def closure():
            optimizer.zero_grad()
            loss = _poisoned_loss(model, rank, 0, float("nan"))
            loss.backward()
            return loss

        with pytest.raises(InvalidArgument, match="NaN or Inf"):
            optimizer.step(closure)
        assert torch.equal(before, model.scale)
        bystander = torch.optim.SGD([model.scale], lr=0.01)  # steps no parameter that is NaN
        bagua.with_bagua(model, [bystander, optimizer], algorithm=algorithm)
        _poisoned_loss(model, rank, 0, float("nan")).backward()
        bystander.step()
        with pytest.raises(InvalidArgument, match="NaN or Inf"):
            optimizer.step()


def _one_optimizer_not_passed(rank, world_size, algorithm):
    with process_group():
        model = make_net()
        others = [p for p in model.parameters() if p.requires_grad and p is not model.scale]
        if bagua.algorithms.get(algorithm).optimizer_class is not torch.optim.Optimizer:
            return
        bagua.with_bagua(model, torch.optim.SGD([model.scale], lr=0.01), algorithm=algorithm)
        if not any(bucket.declaration.codec for bucket in model.bagua.buckets):
            return
        forgotten = torch.optim.SGD(others, lr=0.01)
        with pytest.raises(InvalidArgument, match="NaN or Inf.*pass the optimizer to with_bagua"):
            _poisoned_loss(model, rank, 0, float("inf")).backward()
            forgotten.step()
        assert all(bool(p.isfinite().all()) for p in others)


@of_gradients
def test_nan_in_parameters_of_an_optimizer_that_was_not_passed(pool2, algorithm):
    pool2.run(_one_optimizer_not_passed, args=(algorithm,))


@of_gradients
def test_nan_without_an_optimizer_and_in_a_closure(pool2, algorithm):
    pool2.run(_other_places, args=(algorithm,))


def _hooks_of_an_algorithm(rank, world_size, algorithm):
    with process_group():
        calls = []
        model = make_net()
        optimizer = make_optimizer(algorithm, model, torch.optim.AdamW, fused=True)
        model = bagua.with_bagua(model, optimizer, algorithm=algorithm)
        for name in ("before_forward", "after_backward", "before_optimizer_step", "after_optimizer_step"):
            setattr(model.bagua.algorithm, name, lambda *args, name=name: calls.append(name))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with model.bagua.no_sync():
            scaler.scale(loss_of(model, batch(rank, 0))).backward()
        assert calls == []
        scaler.scale(loss_of(model, batch(rank, 0))).backward()
        assert calls == ["before_forward", "after_backward"]
        scaler.step(optimizer)
        scaler.update()
        assert calls[2:] == ["before_optimizer_step", "after_optimizer_step"]
        optimizer.zero_grad()
        scaler.scale(_poisoned_loss(model, rank, 0, float("inf"))).backward()
        scaler.step(optimizer)
        assert calls[4:] == ["before_forward", "after_backward"]  # a skipped step is none


@in_lockstep
def test_hooks_are_called_in_order_and_not_for_skipped_steps(pool2, algorithm):
    pool2.run(_hooks_of_an_algorithm, args=(algorithm,))
