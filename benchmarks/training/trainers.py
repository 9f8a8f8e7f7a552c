"""Measures trainers on torch's DDP, through bagua's integrations, and under FSDP2: final loss, bytes and time per step.

A network of 0.3 million parameters trains on scikit-learn's digits, with the same first weights, batches and number of
steps for all systems of one trainer, which take turns in the same two processes, once for each seed. They are connected
by TCP over loopback. The bytes are the kernel's count of what a rank's own TCP connections have sent, so gloo's are
counted as bagua's are. Before a time counts, the ranks' weights are compared with one another, and the loss on held-out
images with that of DDP, or of FSDP2 in bf16.

    .venv/bin/python -m benchmarks.training.trainers [--steps 300] [--seeds 2] [--quick]
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import statistics
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib import ranks, report, timing

DDP, PLAIN, CODED = "DDP gloo", "gradient_allreduce", "bytegrad"
FSDP, FSDP_CODED = "FSDP2 gloo, bf16", "FSDP2 compress, 8 bits"
REPLICATED, SHARDED = (DDP, PLAIN, CODED), (FSDP, FSDP_CODED)
# The trainers by title: the package, the function below, and the systems that it can train with on the CPU.
TRAINERS = {
    "Lightning": ("lightning", "lightning", (*REPLICATED, *SHARDED)),
    "Accelerate": ("accelerate", "accelerate", REPLICATED),
    "Transformers' Trainer": ("transformers", "transformers", REPLICATED),
    "plain torch": ("torch", "plain", SHARDED),
}
# The largest difference of a final loss from the baseline's, and the largest loss of a network that has learnt.
ALLOWED = {DDP: 0.0, PLAIN: 0.01, CODED: 0.05, FSDP: 0.0, FSDP_CODED: 0.05}
LEARNT = 0.5
BATCH, LR, WARM_STEPS = 32, 0.05, 10
_BYTES_ACKED = 120  # the offset of tcpi_bytes_acked in struct tcp_info of linux/tcp.h


def measure(trainer: str, systems: list[str], num_steps: int, num_seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Trains on a rank; returns for each system and seed what `_train` does."""
    import torch.distributed as dist

    import bagua

    dist.init_process_group("gloo")  # which the trainers take, and bagua beside it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainers' advice
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
        for seed, system in itertools.product(range(num_seeds), systems):
            found[system].append(_train(trainer, system, num_steps, seed))
    bagua.destroy_process_group()
    dist.destroy_process_group()
    return found


def _train(trainer: str, system: str, num_steps: int, seed: int) -> dict[str, Any]:
    """Trains once; returns seconds of the steps, bytes per step, the loss on held-out images, and sums of weights."""
    import torch

    torch.manual_seed(seed)
    clock, network = _Clock(num_steps), _network()
    trained = _TRAIN[trainer](system, network, clock)
    _, _, x, y = _digits()
    fresh = _network()
    fresh.load_state_dict(trained)
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(fresh(x), y))
    sums = [float(value.double().sum()) for value in trained.values()]
    return {"seconds": clock.seconds(), "bytes": clock.bytes_per_step(), "loss": loss, "sums": sums}


class _Clock:
    """The end of each step, and the bytes that this process has sent since the first ones."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._times: list[float] = []
        self._sent: list[int] = []

    def tick(self) -> None:
        """Ends a step."""
        self._times.append(time.perf_counter())
        if len(self._times) in (WARM_STEPS, self.num_steps):
            self._sent.append(_sent_bytes())

    def seconds(self) -> list[float]:
        """Returns the duration of each step but the first ones; the step after these counts bytes, and is none."""
        if len(self._times) != self.num_steps:
            raise RuntimeError(f"the trainer made {len(self._times)} steps, expected {self.num_steps}")
        times = self._times[WARM_STEPS:]
        return [end - begin for begin, end in itertools.pairwise(times)]

    def bytes_per_step(self) -> float:
        """Returns the mean over the same steps."""
        return (self._sent[1] - self._sent[0]) / (self.num_steps - WARM_STEPS)


def _sent_bytes() -> int:
    """Returns the bytes that the peers of this process's TCP connections have acknowledged."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        # A descriptor may be closed meanwhile, and sockets of other kinds have no such option.
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
    return total


# --- the model and its data


def _network() -> Any:
    from torch import nn

    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def _digits() -> tuple[Any, Any, Any, Any]:
    """Returns images and labels to train on, and those held out."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(one) for one in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]
    return images[360:], labels[360:], images[:360], labels[:360]


def _loader() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    x, y, _, _ = _digits()
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, drop_last=True)


def _optimizer(network: Any) -> Any:
    import torch

    return torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9)


def _shard(network: Any, mesh: Any, system: str) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import bagua

    reduce_dtype = torch.bfloat16 if system == FSDP else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    for part in (*(layer for layer in network if isinstance(layer, torch.nn.Linear)), network):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if system == FSDP_CODED:
        bagua.fsdp.compress(network, "minmax_uint8")


def _whole(network: Any) -> Any:
    """Returns the state_dict, whose tensors may be sharded."""
    return {
        name: getattr(value, "full_tensor", lambda one=value: one)() for name, value in network.state_dict().items()
    }


# --- the trainers; each returns the state_dict of the trained network


def _lightning(system: str, network: Any, clock: _Clock) -> Any:
    import lightning
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy

    import bagua.integrations.lightning  # registers the strategy

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return _optimizer(self.network)

        def configure_model(self) -> None:
            if system in SHARDED:
                _shard(self.network, self.device_mesh["data_parallel"], system)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    if system in SHARDED:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    else:
        strategy = "ddp" if system == DDP else bagua.integrations.lightning.BaguaStrategy(system)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=clock.num_steps,
        max_epochs=-1,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(Classifier(), _loader())
    return _whole(network)


def _accelerate(system: str, network: Any, clock: _Clock) -> Any:
    import accelerate
    import torch

    from bagua.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    objects = (network, _optimizer(network), _loader())
    if system == DDP:
        model, optimizer, loader = accelerator.prepare(*objects)
    else:
        model, optimizer, loader = prepare(accelerator, *objects, algorithm=system)
    for x, y in _first(loader, clock.num_steps):
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        clock.tick()
    return network.state_dict()


def _transformers(system: str, network: Any, clock: _Clock) -> Any:
    import torch
    import transformers

    from bagua.integrations.transformers import BaguaTrainer

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            logits = self.network(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    optimizer = _optimizer(network)
    x, y, _, _ = _digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=clock.num_steps,
            max_grad_norm=0.0,
            dataloader_drop_last=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        made = {
            "model": Classifier(),
            "args": arguments,
            "train_dataset": [{"x": image, "labels": label} for image, label in zip(x, y, strict=True)],
            "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
            "callbacks": [Ticks()],
        }
        trainer = transformers.Trainer(**made) if system == DDP else BaguaTrainer(**made, algorithm=system)
        trainer.train()
    return network.state_dict()


def _plain(system: str, network: Any, clock: _Clock) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    _shard(network, init_device_mesh("cpu", (dist.get_world_size(),)), system)
    optimizer = _optimizer(network)
    x, y, _, _ = _digits()
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for _ in range(clock.num_steps):
        # All ranks draw the same images, and each takes its own.
        mine = torch.randint(len(y), (dist.get_world_size(), BATCH), generator=generator)[dist.get_rank()]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x[mine]), y[mine]).backward()
        optimizer.step()
        clock.tick()
    return _whole(network)


_TRAIN: dict[str, Callable[[str, Any, _Clock], Any]] = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "transformers": _transformers,
    "plain": _plain,
}


def _first(loader: Any, num: int) -> Iterator[Any]:
    """Yields so many batches, over as many epochs as that takes."""
    while num > 0:
        for batch in loader:
            yield batch
            num -= 1
            if num == 0:
                return


# --- the report


def _verify(title: str, system: str, runs: list[dict], others: list[dict], baseline: list[dict], learns: bool) -> None:
    """Checks the runs of a rank, by seed, against those of the other rank and of the baseline."""
    for run, other, first in zip(runs, others, baseline, strict=True):
        if run["sums"] != other["sums"]:
            raise RuntimeError(f"{title}, {system}: the ranks have trained different weights")
        if learns and not (run["loss"] < LEARNT and abs(run["loss"] - first["loss"]) <= ALLOWED[system]):
            allowed = f"less than {LEARNT} and within {ALLOWED[system]} of {first['loss']:.4f}"
            raise RuntimeError(
                f"{title}, {system}: the loss on held-out images is {run['loss']:.4f}, expected {allowed}"
            )


def _row(system: str, per_rank: list[list[dict]], baseline: report.Row | None) -> report.Row:
    """Returns the row of a system, from the runs of each rank."""
    runs = [run for of_rank in per_rank for run in of_rank]
    sent = statistics.mean(run["bytes"] for run in runs)
    losses = ", ".join(f"{run['loss']:.4f}" for run in per_rank[0])
    cells = {"loss": losses, "sent KB/step": report.three_digits(sent / 1e3)}
    seconds = timing.slowest([[one for run in of_rank for one in run["seconds"]] for of_rank in per_rank])
    return report.Row(system, seconds, baseline, cells)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    num_steps, num_seeds = (30, 1) if args.quick else (args.steps, args.seeds)
    if num_steps < WARM_STEPS + 2 or num_seeds < 1:
        parser.error(f"--steps is {num_steps} and --seeds {num_seeds}, expected {WARM_STEPS + 2} and 1 or more")
    setup = {"transport": "tcp over loopback", "ranks": 2, "batch": f"{BATCH} images per rank", "steps": num_steps}
    result = report.Report(__file__, "trainers on DDP, through bagua, and under FSDP2", args, setup)
    tables = {}
    for title, (package, trainer, systems) in TRAINERS.items():
        if importlib.util.find_spec(package) is None:
            result.say(f"{title}: skipped, since {package} is not installed.")
            continue
        options = {"trainer": trainer, "systems": systems, "num_steps": num_steps, "num_seeds": num_seeds}
        mine, others = ranks.run(2, options, env={"BAGUA_SHARED_MEMORY": "0"}, timeout_s=300)
        rows: list[report.Row] = []
        for system in systems:
            first = DDP if system in REPLICATED else FSDP
            _verify(title, system, mine[system], others[system], mine[first], learns=not args.quick)
            baseline = next((row for row in rows if row.case == first), None)
            rows.append(_row(system, [mine[system], others[system]], baseline))
        tables[title] = rows
        result.add(report.Table(f"Step under {title}", rows))
    result.say(
        "ratio: the median of DDP, or of FSDP2 in bf16, over the case's. loss: on 360 held-out images after the "
        "last step, by seed. sent: by each rank's TCP connections, the mean of both ranks."
    )
    result.say("Ray Train is not measured: its workers train as plain torch does with `with_bagua`.")
    figure, axes = report.subplots(len(tables))
    for axis, (title, rows) in zip(axes, tables.items(), strict=True):
        report.bars(axis, rows, title, "ms", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
