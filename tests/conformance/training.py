"""The model of the conformance tests, with every kind of parameter; its data, and the oracle in plain loops."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

import bagua
from tests.distributed.worlds import SAME_TEST

TIMEOUT_S = 15.0
# Only those of this package: to ask for others would import them.
ALGORITHMS = [name for name in bagua.algorithms.available() if importlib.util.find_spec(f"bagua.algorithms.{name}")]
# Each rank imports this file, and each question goes through all installed packages.
_EXCHANGES = {name: bagua.algorithms.get(name).exchanges for name in ALGORITHMS}
OF_GRADIENTS = [name for name in ALGORITHMS if _EXCHANGES[name] == "gradients"]
OF_WEIGHTS = [name for name in ALGORITHMS if _EXCHANGES[name] == "weights"]
ANY = torch.optim.Optimizer


def slow_but(names: Sequence[str], *fast: str) -> list[Any]:
    """Parameters of a test, those that are not ``fast`` marked slow."""
    return [name if name in fast else pytest.param(name, marks=SAME_TEST) for name in names]


def make_optimizer(
    algorithm: str,
    model: torch.nn.Module,
    otherwise: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> torch.optim.Optimizer:
    """One that the algorithm can work with, of all parameters that train: its own kind, or ``otherwise``."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = bagua.algorithms.get(algorithm).optimizer_class
    if own is ANY:
        return otherwise(parameters, **{"lr": 0.01, **options})
    known = {name: options[name] for name in ("lr", "fused") if name in options}
    return own(parameters, **{"lr": 0.01, **known})


# Of algorithms that have a momentum inside: none.
WITHOUT_MOMENTUM: dict[str, dict[str, Any]] = {
    "demo": {"momentum_decay": 0.0, "codec": "bf16"},
    "dgc": {"momentum": 0.0, "k": 256},
}


def wrap(model: torch.nn.Module, optimizers: Any = (), *, algorithm: str, **options: Any) -> torch.nn.Module:
    """with_bagua, with an optimizer of its own kind for an algorithm that needs one."""
    options = {**WITHOUT_MOMENTUM.get(algorithm, {}), **options}
    if not optimizers and bagua.algorithms.get(algorithm).optimizer_class is not ANY:
        optimizers = make_optimizer(algorithm, model)
    return bagua.with_bagua(model, optimizers, algorithm=algorithm, **options)


@contextlib.contextmanager
def process_group(timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """bagua initialised for the time of the block."""
    bagua.init_process_group(timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        bagua.destroy_process_group()


class Net(torch.nn.Module):
    """A parameter of the root, a tied one, a frozen one, a channels_last one, BatchNorm buffers, two dtypes.

    ``wide`` is large enough (128 KiB) for algorithms that leave small tensors alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.wide = torch.nn.Linear(16, 2048)
        self.norm = torch.nn.BatchNorm1d(2048)
        self.narrow = torch.nn.Linear(2048, 16)
        self.again = torch.nn.Linear(16, 2048)
        self.again.weight = self.wide.weight  # tied
        self.frozen = torch.nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.exact = torch.nn.Linear(16, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.wide(x * self.scale)) + self.again(x)
        y = self.narrow(torch.tanh(hidden)) + self.frozen
        image = self.conv(y.reshape(-1, 4, 2, 2)).mean(dim=(1, 2, 3))
        return self.exact(y.double()).float().sum(1) + image


def make_net(seed: int = 0, kind: type[torch.nn.Module] = Net) -> torch.nn.Module:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return kind()


def batch(rank: int, step: int, numel: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets that differ for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(numel, 16, generator=generator), torch.randn(numel, generator=generator)


def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    x, y = data
    return (model(x) - y).square().mean()


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients that are there."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_grads(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of one rank, by torch alone."""
    model = copy.deepcopy(model)
    loss_of(model, data).backward()
    return grads_of(model)


def mean_in_loops(per_rank: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The oracle: the mean over ranks, element by element rank after rank, in float64."""
    mean = {}
    for name in per_rank[0]:
        total = torch.zeros_like(per_rank[0][name], dtype=torch.float64)
        for grads in per_rank:
            total += grads[name].double()
        mean[name] = total / len(per_rank)
    return mean


def assert_near(
    model: torch.nn.Module, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], times: int = 1
) -> None:
    """Equal within float rounding, or within ``times`` two-shot quantisations where a bucket was sent under a codec.

    Two quantisations to 255 steps of a range of at most 2 M are off by at most 2 * (2 M / 510), M the
    largest gradient of the bucket; the f16 and bf16 codecs are finer. Where several operations made the result (two
    factors), or the codec selects, it is a projection of the mean and of what the steps before have left out: not much
    longer than the mean.
    """
    assert actual.keys() == expected.keys()
    for bucket in model.bagua.buckets:
        largest = max([float(expected[name].abs().max()) for name in bucket.names if expected[name].numel()], default=0)
        for name in bucket.names:
            tolerance = 1e-5 * max(largest, 1e-3)
            if bucket.declaration.codec is not None:
                tolerance = times * 6 * largest / 255  # M of a single rank exceeds that of the mean
            selects = (bucket.declaration.codec or "").startswith("topk")
            if selects or " + " in bucket.declaration.operation:
                length, largest = float(actual[name].norm()), float(expected[name].norm())
                assert length <= 3 * times * largest, f"{name}: {length}, {largest}"
                assert selects or (length > 0) == (largest > 0), f"{name}: {length}, {largest}"
                continue
            error = float((actual[name].double() - expected[name].double()).abs().max()) if actual[name].numel() else 0
            assert error <= tolerance, f"{name}: off by {error}, allowed {tolerance} ({bucket.declaration})"


def assert_equal_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    mine = {name: t.detach().contiguous().view(-1).view(torch.uint8) for name, t in tensors.items() if t.numel()}
    for name, value in mine.items():
        first = value.clone()
        bagua.broadcast(first, 0)
        assert torch.equal(first, value), f"{name} differs between rank 0 and rank {bagua.get_rank()}"
    bagua.barrier()
