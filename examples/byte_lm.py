"""Trains a byte-level transformer on the text of Python's standard library; one file in ten is held out for validation.

    bagua run --nproc-per-node 2 examples/byte_lm.py --algorithm bytegrad --loss-csv loss.csv
    torchrun --nproc-per-node 2 examples/byte_lm.py --algorithm ddp     # torch DDP over gloo, for comparison

The metric is the validation loss in nats per byte: ln 256 = 5.55 before training. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from report import Report

import bagua

CONTEXT = 64  # bytes of input
VALIDATION_WINDOWS = 256


class ByteTransformer(torch.nn.Module):
    """Predicts the next byte at every position: (batch, CONTEXT) uint8 codes -> (batch, CONTEXT, 256) logits."""

    def __init__(self, width: int = 128, depth: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.position = torch.nn.Parameter(torch.randn(CONTEXT, width) * 0.02)  # a parameter of the root module
        layer = torch.nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 256)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(codes) + self.position
        return self.head(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))


def load_text(max_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads train and validation bytes (1-D uint8) from the standard library's top-level modules, in order of name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train, validation = bytearray(), bytearray()
    for index, file in enumerate(files):
        (validation if index % 10 == 9 else train).extend(file.read_bytes())
    return tuple(torch.frombuffer(text[:max_bytes], dtype=torch.uint8) for text in (train, validation))


def windows(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets (len(starts), CONTEXT): the bytes from each start, and the bytes one further."""
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the mean cross entropy in nats per byte."""
    inputs, targets = data
    return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="gradient_allreduce", choices=[*bagua.algorithms.available(), "ddp"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="per epoch")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="of the text")
    parser.add_argument("--loss-csv", help="file for the loss curve: step, train_loss, validation_loss")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    is_ddp = args.algorithm == "ddp"
    dist.init_process_group("gloo") if is_ddp else bagua.init_process_group()
    rank, world_size = (
        (dist.get_rank(), dist.get_world_size()) if is_ddp else (bagua.get_rank(), bagua.get_world_size())
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.manual_seed(args.seed)

    train, validation = load_text(args.max_bytes)
    spread = torch.linspace(0, len(validation) - CONTEXT - 1, VALIDATION_WINDOWS).long()
    held_out = windows(validation, spread[rank::world_size])
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # every rank draws different windows

    model = ByteTransformer()
    needs_qadam = not is_ddp and bagua.algorithms.get(args.algorithm).optimizer_class is bagua.optim.QAdam
    optimizer = (bagua.optim.QAdam if needs_qadam else torch.optim.AdamW)(model.parameters(), lr=args.lr)
    if is_ddp:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        model = bagua.with_bagua(model, optimizer, algorithm=args.algorithm)

    def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values) if is_ddp else bagua.all_reduce(values)
        return values / world_size

    report = Report("byte_lm", args.algorithm, rank, world_size)
    curve = []
    validation_loss = 0.0
    for epoch in range(args.epochs):
        model.train()
        losses = torch.zeros(args.steps)
        for step in report.steps(range(args.steps), args.steps):
            starts = torch.randint(len(train) - CONTEXT, (args.batch_size,), generator=generator)
            optimizer.zero_grad()
            loss = loss_of(model, windows(train, starts))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[step] = loss.detach()
        model.eval()
        with torch.no_grad():
            local = loss_of(model.module if is_ddp else model, held_out) * len(held_out[0]) * world_size
        validation_loss = float(mean_over_ranks(local)) / VALIDATION_WINDOWS
        losses = mean_over_ranks(losses)
        curve += [(epoch * args.steps + step + 1, float(value), "") for step, value in enumerate(losses)]
        curve[-1] = (*curve[-1][:2], validation_loss)
        report.epoch(train_loss=float(losses[-10:].mean()), validation_loss=validation_loss)

    if args.loss_csv and rank == 0:
        with open(args.loss_csv, "w", newline="") as file:
            csv.writer(file).writerows([("step", "train_loss", "validation_loss"), *curve])
    report.result(model, validation_loss=validation_loss)
    dist.destroy_process_group() if is_ddp else bagua.destroy_process_group()


if __name__ == "__main__":
    main()
