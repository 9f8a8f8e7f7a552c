"""The tasks of convergence.py: the models and data of two examples, and one training of them from start to end.

Every way of training gets the same first weights, batches and learning rates for a seed. The evaluated model is the
mean over ranks of weights and BatchNorm statistics. If ranks hold the same weights, it equals each rank's; if they
exchange weights, it is the result of the training.

Evaluation communicates through gloo, so that bagua counts only training's bytes, and does not affect training.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bagua

DDP, PLAIN = "ddp", "gradient_allreduce"
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_OWN_WARMUP = {
    "qadam": "warmup_steps",
    "zero_one_adam": "warmup_steps",
    "local_sgd": "post_local_after",
}  # options that count steps
_RAMP = 0.05  # share of the run in which the learning rate rises; then it falls linearly to 0 at the end


@dataclass(frozen=True)
class Setup:
    """A way of training.

    Attributes:
        algorithm: DDP, or a name from bagua.algorithms.available().
        optimizer: "sgd", with momentum 0.9, "adam" or "qadam".
        options: the algorithm's options.
        warmup: the share of the run in which gradients are averaged at full precision, by the algorithm's warm-up or
            by gradient_allreduce before it; None for the algorithm's default.
        lr_factor: a factor of the task's learning rate.
        length: a factor of the task's number of epochs.
    """

    algorithm: str
    optimizer: str
    options: Mapping[str, Any]
    warmup: float | None = None
    lr_factor: float = 1.0
    length: int = 1


@dataclass(frozen=True)
class Task:
    """A model, its data and the length of its training.

    Attributes:
        metric, is_loss: the metric on the test data; `is_loss` means that less is better.
        lr: learning rates at which DDP trains well, by optimizer, "sgd" or "adam".
        target: the metric whose first epoch is reported, by optimizer.
        load: returns a Data on a rank.
        clip: the norm to which the gradient is clipped before a step, as in the example; None for no clipping.
    """

    name: str
    metric: str
    is_loss: bool
    num_epochs: int
    steps_per_epoch: int
    batch_size: int
    lr: Mapping[str, float]
    target: Mapping[str, float]
    load: Callable[[Task], Data]
    clip: float | None = None

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch


@dataclass(frozen=True)
class Data:
    """The model and data of a task on a rank.

    Attributes:
        make_model: returns a model with random weights.
        losses: given model, seed and epoch, yields the loss of each of this rank's batches.
        score: given a model and a slice of the test data, returns the sum of the metric over it and its length.
    """

    make_model: Callable[[], torch.nn.Module]
    losses: Callable[[torch.nn.Module, int, int], Iterator[torch.Tensor]]
    score: Callable[[torch.nn.Module, slice], tuple[float, int]]


def _example(name: str) -> Any:
    """Imports a module of examples/, which imports others of that folder."""
    sys.path.insert(0, str(_EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(_EXAMPLES))


def _load_digits(task: Task) -> Data:
    digits = _example("digits")
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, train_y, test_x, test_y = digits.load_data()

    def losses(model: torch.nn.Module, seed: int, epoch: int) -> Iterator[torch.Tensor]:
        for indices in digits.batches(len(train_x), task.batch_size, 1000 * seed + epoch, rank, size):
            yield torch.nn.functional.cross_entropy(model(train_x[indices]), train_y[indices])

    def score(model: torch.nn.Module, part: slice) -> tuple[float, int]:
        return 100.0 * float((model(test_x[part]).argmax(1) == test_y[part]).sum()), len(test_y[part])

    return Data(digits.make_model, losses, score)


def _load_byte_lm(task: Task) -> Data:
    byte_lm = _example("byte_lm")
    rank, size = dist.get_rank(), dist.get_world_size()
    train, validation = byte_lm.load_text(4_000_000)
    spread = torch.linspace(0, len(validation) - byte_lm.CONTEXT - 1, byte_lm.VALIDATION_WINDOWS).long()

    def losses(model: torch.nn.Module, seed: int, epoch: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed((1000 * seed + epoch) * size + rank)
        for _ in range(task.steps_per_epoch):
            starts = torch.randint(len(train) - byte_lm.CONTEXT, (task.batch_size,), generator=generator)
            yield byte_lm.loss_of(model, byte_lm.windows(train, starts))

    def score(model: torch.nn.Module, part: slice) -> tuple[float, int]:
        starts = spread[part]
        return float(byte_lm.loss_of(model, byte_lm.windows(validation, starts))) * len(starts), len(starts)

    return Data(functools.partial(byte_lm.ByteTransformer, width=64), losses, score)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="digits",
            metric="test accuracy, %",
            is_loss=False,
            num_epochs=12,
            steps_per_epoch=22,
            batch_size=16,
            lr={"sgd": 0.03, "adam": 0.002},
            target={"sgd": 97.0, "adam": 97.0},
            load=_load_digits,
        ),
        Task(
            name="byte_lm",
            metric="validation loss, nats per byte",
            is_loss=True,
            num_epochs=12,
            steps_per_epoch=25,
            batch_size=8,
            lr={"sgd": 0.3, "adam": 0.008},
            target={"sgd": 2.5, "adam": 2.3},
            load=_load_byte_lm,
            clip=1.0,
        ),
    )
}


def train(task: Task, data: Data, setup: Setup, seed: int) -> dict[str, Any]:
    """Trains once, in a new process group; returns this rank's results, and the curve, which all ranks share.

    If training raises a BaguaError on any rank, the result is `error` instead.

    Raises:
        RuntimeError: ranks that exchange gradients ended with different weights.
    """
    bagua.init_process_group()
    try:
        return _Training(task, data, setup, seed).run()
    finally:
        bagua.destroy_process_group()


class _Training:
    def __init__(self, task: Task, data: Data, setup: Setup, seed: int) -> None:
        self.data, self.setup, self.seed = data, setup, seed
        self.task = task = dataclasses.replace(task, num_epochs=task.num_epochs * setup.length)
        torch.manual_seed(seed)
        self.module = data.make_model()
        self.probe = data.make_model()  # the evaluated model
        self.optimizer = self._make_optimizer()
        self.model: torch.nn.Module = self.module
        self.num_bytes_sent = 0  # by earlier wraps of the model
        own = _OWN_WARMUP.get(setup.algorithm)
        self.warmup_epochs = 0 if own else round((setup.warmup or 0) * task.num_epochs)
        self.options = dict(setup.options)
        if own and setup.warmup is not None:
            self.options[own] = round(setup.warmup * task.num_steps)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.module.parameters()
        if self.setup.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
        return {"adam": torch.optim.Adam, "qadam": bagua.optim.QAdam}[self.setup.optimizer](parameters, lr=0.0)

    def run(self) -> dict[str, Any]:
        curve, error = [], ""
        for epoch in range(self.task.num_epochs):
            try:
                self._wrap_at(epoch)
                self._train_epoch(epoch)
                # Only at the end, because pausing runs a round of averaging that training without evaluation does not.
                if epoch == self.task.num_epochs - 1 and self.setup.algorithm == "async_averaging":
                    self.module.bagua.pause()
            except bagua.BaguaError as raised:
                error = f"epoch {epoch + 1}: {raised}"
            if _over_ranks(torch.tensor(float(bool(error))), dist.ReduceOp.MAX):
                return {"error": error or "another rank failed"}
            _set_state(self.probe, _over_ranks(_state(self.module), dist.ReduceOp.SUM) / dist.get_world_size())
            curve.append(self._score())
        return {"curve": curve, **self._ranks_apart(), **self._bytes_sent()}

    def _wrap_at(self, epoch: int) -> None:
        if epoch == 0 and self.warmup_epochs:
            self.model = bagua.with_bagua(self.module, self.optimizer, algorithm=PLAIN)
        elif epoch == self.warmup_epochs and self.setup.algorithm == DDP:
            self.model = torch.nn.parallel.DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        elif epoch == self.warmup_epochs:
            self.num_bytes_sent = self._counted_bytes()
            self.model = bagua.with_bagua(
                self.module, self.optimizer, algorithm=self.setup.algorithm, **self.options
            )  # fmt: skip

    def _train_epoch(self, epoch: int) -> None:
        self.model.train()
        peak = self.task.lr["sgd" if self.setup.optimizer == "sgd" else "adam"] * self.setup.lr_factor
        first = epoch * self.task.steps_per_epoch
        for step, loss in enumerate(self.data.losses(self.model, self.seed, epoch), start=first):
            done = step / self.task.num_steps
            rising = (step + 1) / (_RAMP * self.task.num_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = peak * min(1.0, rising, (1 - done) / (1 - _RAMP))
            self.optimizer.zero_grad()
            loss.backward()
            if self.task.clip:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.task.clip)
            self.optimizer.step()

    @torch.no_grad()
    def _score(self) -> float:
        """Returns the metric of `probe` over the test data, of which each rank evaluates a part."""
        self.probe.eval()
        part = slice(dist.get_rank(), None, dist.get_world_size())
        total = _over_ranks(torch.tensor(self.data.score(self.probe, part), dtype=torch.float64), dist.ReduceOp.SUM)
        return float(total[0] / total[1])

    @torch.no_grad()
    def _ranks_apart(self) -> dict[str, float]:
        """Returns the relative distance of this rank's weights to the mean, and the metric of this rank's model."""
        weights = torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])
        is_equal = torch.equal(*(_over_ranks(weights.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)))
        exchanges = PLAIN if self.setup.algorithm == DDP else self.setup.algorithm
        if not is_equal and bool(weights.isfinite().all()) and bagua.algorithms.get(exchanges).exchanges == "gradients":
            raise RuntimeError(f"{self.setup}: the ranks exchange gradients and hold different weights")
        mean = _over_ranks(weights.clone(), dist.ReduceOp.SUM) / dist.get_world_size()
        self.module.eval()
        total, count = self.data.score(self.module, slice(None))
        distance = 0.0 if is_equal else float((weights - mean).norm() / mean.norm())
        return {"distance": distance, "alone": total / count}

    def _counted_bytes(self) -> int:
        handle = getattr(self.module, "bagua", None)
        return handle.timeline().summary()["bytes_sent"] if handle is not None else 0

    def _bytes_sent(self) -> dict[str, float]:
        """Returns the bytes sent per step. DDP does not count them, so its value is that of gradients on a ring."""
        size = dist.get_world_size()
        of_ddp = 2 * (size - 1) / size * sum(p.numel() * p.element_size() for p in self.module.parameters())
        counted = (self.num_bytes_sent + self._counted_bytes()) / self.task.num_steps
        return {"bytes": of_ddp if self.setup.algorithm == DDP else counted}


def _over_ranks(tensor: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
    dist.all_reduce(tensor, op)
    return tensor


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns weights, and buffers that can be averaged."""
    return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]


def _state(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in _tensors(module)])


@torch.no_grad()
def _set_state(module: torch.nn.Module, state: torch.Tensor) -> None:
    tensors = _tensors(module)
    for tensor, values in zip(tensors, state.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
