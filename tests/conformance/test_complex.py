"""Complex parameters under every algorithm: what pairs of real ones do, to the bit.

Torch's gradient of a complex parameter is, as a pair, that of the pair, and so are SGD's steps by powers of two, which
complex products round as others.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests import accelerator
from tests.conformance.training import mean_in_loops, process_group
from tests.conformance.variants import ONE_OF_EACH, VARIANTS, described
from tests.distributed.worlds import SAME_TEST

NUM_STEPS = 5
# QAdam refuses complex parameters, and PowerSGD sends them in full.
_FAST = ("bytegrad", "powersgd", "decentralized", "low_precision_decentralized")
_WITH_SGD = [variant for variant in VARIANTS if variant[0] not in ("qadam", "zero_one_adam")]


class Waves(torch.nn.Module):
    """Complex numbers of two precisions, one transposed in memory, beside real ones; as pairs on request."""

    def __init__(self, are_pairs, rows=96, columns=24):
        super().__init__()
        torch.manual_seed(0)
        wide = torch.randn(columns, rows, dtype=torch.complex64).t()
        exact = torch.randn(5, 3, dtype=torch.complex128)
        self.are_pairs = are_pairs
        self.real = torch.nn.Parameter(torch.randn(columns, 64))
        self.wide, self.exact = (
            torch.nn.Parameter(torch.view_as_real(value) if are_pairs else value) for value in (wide, exact)
        )

    def numbers(self, parameter):
        return torch.view_as_complex(parameter) if self.are_pairs else parameter

    def forward(self, x):
        signal = (x @ self.numbers(self.wide)) @ self.real.to(torch.complex64)
        return signal.abs().square().mean() * 1e-3 + (self.numbers(self.exact).conj() * (1 + 2j)).abs().float().sum()


def batch_of(rank, step, rows=96):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, rows, generator=generator).to(torch.complex64)


def _start(variant, are_pairs, device="cpu", **more):
    algorithm, options = variant
    sides = (3, 8) if algorithm == "powersgd" else (96, 24)  # of which two factors would make no less
    model = Waves(are_pairs, *sides).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-7, momentum=0.5)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, **options, **more)
    return model, optimizer


def _train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = batch_of(rank, step, model.wide.shape[0]).to(model.wide.device)
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            model(x).backward()
        if step == 1:
            model(x).backward()
        optimizer.step()


def _pairs_of(tensors):
    return [torch.view_as_real(t).cpu() if t.is_complex() else t.detach().cpu().clone() for t in tensors]


def _weights(model, optimizer):
    moments = [moment for state in optimizer.state.values() for moment in state.values()]
    return _pairs_of([parameter.detach() for parameter in model.parameters()] + moments)


def _as_pairs(rank, world_size, variant):
    with process_group():
        results = []
        for are_pairs in (False, True):
            model, optimizer = _start(variant, are_pairs, bucket_bytes=20_000)
            _train(model, optimizer, rank, range(NUM_STEPS))
            results.append(_weights(model, optimizer))
        assert all(map(torch.equal, *results))
        file = io.BytesIO()  # the one with complex parameters goes on, and so does what is loaded
        model, optimizer = _start(variant, False, bucket_bytes=20_000)
        _train(model, optimizer, rank, range(NUM_STEPS - 2))
        torch.save([model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()], file)
        file.seek(0)
        model, optimizer = _start(variant, False, bucket_bytes=20_000)
        for part, state in zip((model, optimizer, model.bagua), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        _train(model, optimizer, rank, range(NUM_STEPS - 2, NUM_STEPS))
        assert all(map(torch.equal, _weights(model, optimizer), results[0]))


@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=() if one in ONE_OF_EACH and one[0] in _FAST else SAME_TEST) for one in _WITH_SGD],
    ids=described,
)
def test_complex_parameters_train_as_pairs(pool2, variant):
    pool2.run(_as_pairs, args=(variant,))


def _mean(rank, world_size):
    with process_group():
        model, _ = _start(("gradient_allreduce", {}), False)
        model(batch_of(rank, 0)).backward()
        per_rank = []
        for other in range(world_size):
            alone = Waves(True)
            alone(batch_of(other, 0)).backward()
            per_rank.append({name: parameter.grad for name, parameter in alone.named_parameters()})
        for name, expected in mean_in_loops(per_rank).items():
            found = model.get_parameter(name).grad
            assert found.stride() == model.get_parameter(name).stride()
            (found,) = _pairs_of([found])
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        model.zero_grad()
        model.exact.register_hook(lambda grad: (grad * 0).conj() + (3.0 + 1j if rank == 0 else 1.0 - 1j))
        model(batch_of(rank, 0)).backward()  # the hook's is conjugated by a bit, not in memory
        assert torch.equal(model.exact.grad, torch.full_like(model.exact, 2.0))


def test_their_gradients_are_means(pool2):
    pool2.run(_mean)


def _refusals(rank, world_size):
    with process_group():
        model = Waves(False)
        with pytest.raises(InvalidArgument, match="QAdam does not step parameters of torch.complex64"):
            bagua.optim.QAdam(model.parameters(), lr=0.1)
        model.wide = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex32))
        with pytest.raises(InvalidArgument, match=r"'wide' has dtype torch.complex32; .*torch.complex128 can be"):
            bagua.with_bagua(model)
        model, _ = _start(("bytegrad", {}), False, nonfinite="raise")
        model.wide.register_hook(lambda grad: grad * complex(0, float("nan")))
        with pytest.raises(InvalidArgument, match="NaN or Inf on some rank.*wide"):
            model(batch_of(rank, 0)).backward()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_is_refused(pool2):
    pool2.run(_refusals)


def _on_device(rank, world_size, variants):
    bagua.init_process_group(timeout=20)
    try:
        different = []
        for variant in variants:
            results = []
            for device in ("cpu", accelerator.use_device_of(rank)):
                model, optimizer = _start(variant, False, device)
                _train(model, optimizer, rank, range(NUM_STEPS))
                results.append(_weights(model, optimizer))
                model.bagua.remove()
            if not all(map(accelerator.agree, *results)):
                different.append(described(variant))
        return different
    finally:
        bagua.destroy_process_group()


def test_complex_parameters_on_devices(pair_on_devices):
    variants = [variant for variant in ONE_OF_EACH if variant[0] in ("bytegrad", "low_precision_decentralized")]
    assert pair_on_devices.run(_on_device, args=(variants,), timeout=120) == [[], []]
