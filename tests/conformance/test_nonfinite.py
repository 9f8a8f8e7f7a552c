"""NaN and Inf under every algorithm and codec: they reach all ranks, and leave alone what algorithms remember."""

from __future__ import annotations

import contextlib

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import Pool
from tests.codec_specs import SPECS
from tests.conformance.training import (
    OF_GRADIENTS,
    OF_WEIGHTS,
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
from tests.conformance.variants import ONE_OF_EACH, VARIANTS, described
from tests.distributed.worlds import SAME_TEST

VALUES = (float("nan"), float("inf"), -float("inf"))
FAST_CODECS = ("fp16", "onebit", "topk")


def _with_every_codec():
    for variant in VARIANTS:
        if variant[0] in OF_GRADIENTS:
            yield pytest.param(variant, id=described(variant))
    for codec in SPECS:
        for error_feedback in (False, True):
            options = {"codec": codec, "error_feedback": error_feedback}
            with contextlib.suppress(InvalidArgument):  # combinations that bytegrad refuses
                bagua.algorithms.create("bytegrad", options)
                marks = () if codec in FAST_CODECS else SAME_TEST
                yield pytest.param(("bytegrad", options), id=described(("bytegrad", options)), marks=marks)


def _with_all_that_remembers():
    """Fast are the last variant of each algorithm, which remembers most, and one contraction."""
    fast = {described(variant) for variant in ONE_OF_EACH} | {"bytegrad-codec=topk-error_feedback=True"}
    for one in _with_every_codec():
        if "qsgd" not in one.id:
            yield pytest.param(*one.values, id=one.id, marks=() if one.id in fast else SAME_TEST)


def _poison(model, value):
    """A loss that adds ``value`` to the gradient of one element of ``wide.weight``, and changes no other gradient."""
    return value * model.wide.weight[3, 5]


def _start(variant, seed=0, **more):
    algorithm, options = variant
    model = make_net(seed)
    optimizer = make_optimizer(algorithm, model)
    return bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=70_000, **options, **more), optimizer


def _train(model, optimizer, rank, steps, bad=()):
    """Takes ``steps``; before each of ``bad``, a backward with NaN or Inf on rank 1 whose gradients are cleared."""
    for step in steps:
        if step in bad:
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, 100 + step))
            (loss + _poison(model, VALUES[step % 3]) if rank == 1 else loss).backward()
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def _remembered(model):
    """Copies of what the algorithm keeps of parameters, and of a rank's stripe."""
    tensors = {}
    for name, saved in model.bagua.state_dict()["parameters"].get("states", {}).items():
        for part in ("parameters", "owners"):
            tensors.update({f"{name} {part} {of}": value.clone() for of, value in saved[part].items()})
        tensors.update({f"{name} stripe {of}": stripe[2].clone() for of, stripe in saved["stripes"].items()})
    return tensors


def _reaches_all(rank, world_size, variant):
    with process_group():
        model, optimizer = _start(variant)
        _train(model, optimizer, rank, range(3))
        before = _remembered(model)
        others = {name for bucket in model.bagua.buckets if "wide.weight" not in bucket.names for name in bucket.names}
        for number, value in enumerate(VALUES):
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, 10 + number))
            (loss + _poison(model, value) if rank == 1 else loss).backward()
            grads = grads_of(model)
            assert not grads["wide.weight"][3, 5].isfinite()
            assert all(bool(grads[name].isfinite().all()) for name in others)
            assert_equal_on_all_ranks({name: grad.isfinite() for name, grad in grads.items()})
            after = _remembered(model)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("variant", [*_with_every_codec()])
def test_they_reach_all_ranks_and_leave_residuals_alone(pool2, variant):
    pool2.run(_reaches_all, args=(variant,))


def _as_without_the_batch(rank, world_size, variant):
    with process_group():
        found = []
        for bad in ((), (1, 3, 5)):
            model, optimizer = _start(variant)
            _train(model, optimizer, rank, range(7), bad)
            found.append([p.detach().clone() for p in model.parameters()])
            model.bagua.remove()
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("variant", [*_with_all_that_remembers()])
def test_weights_are_those_of_a_run_without_the_bad_batch(pool2, variant):
    """Not of qsgd, which draws other numbers after one more backward."""
    pool2.run(_as_without_the_batch, args=(variant,))


def _raises(rank, world_size, variant):
    with process_group():
        model, optimizer = _start(variant, nonfinite="raise")
        _train(model, optimizer, rank, range(3))
        for value in VALUES:
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, 10))
            with pytest.raises(
                InvalidArgument, match=r"NaN or Inf on some rank.*bucket \d+ \(.*wide\.weight"
            ) as caught:
                (loss + _poison(model, value) if rank == world_size - 1 else loss).backward()
            assert caught.value.bucket.startswith("bucket ")
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
            _train(model, optimizer, rank, range(3, 5))  # the ranks go on
            assert not torch.equal(before["scale"], model.scale)
        assert_equal_on_all_ranks(dict(model.named_parameters()))


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce", "powersgd"))
def test_an_error_on_all_ranks_on_request(pool2, algorithm):
    pool2.run(_raises, args=((algorithm, {}),))


def test_an_error_of_a_single_rank():
    with Pool(1) as pool:
        pool.run(_raises, args=(("gradient_allreduce", {}),))


def _overflow(rank, world_size):
    """Every rank's float16 gradients are finite; what is decoded of their sum is not."""
    with process_group():
        model = torch.nn.Linear(64, 256, bias=False).half()
        bagua.with_bagua(model, algorithm="bytegrad", average=False, min_compressed_bytes=0, nonfinite="raise")
        factor = torch.full((256, 64), 100.0)
        factor[3, 5] = 60_000.0
        with pytest.raises(InvalidArgument, match="NaN or Inf"):
            (model.weight * factor.half()).sum().backward()
        assert not model.weight.grad[3, 5].isfinite()


def test_sums_that_overflow_float16_are_inf(pool2):
    pool2.run(_overflow)


def _weights_have_none(rank, world_size, algorithm):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        with pytest.raises(InvalidArgument, match=f"nonfinite is 'raise', expected \"pass\" for '{algorithm}'"):
            bagua.with_bagua(model, optimizer, algorithm=algorithm, nonfinite="raise")
        wrap(model, optimizer, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", slow_but(OF_WEIGHTS, "decentralized"))
def test_where_weights_are_exchanged_gradients_are_not_looked_at(pool2, algorithm):
    pool2.run(_weights_have_none, args=(algorithm,))
