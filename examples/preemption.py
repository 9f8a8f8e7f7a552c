"""Trains until it is asked to stop, saves, and goes on from there when it is started again.

    bagua run --nproc-per-node 2 --grace 60 examples/preemption.py --checkpoint checkpoint

SIGTERM, as Slurm and Kubernetes send it, or SIGUSR1 to the launcher ends it within a step. Started again, on as many
ranks or on another number, it ends with the weights that an uninterrupted run has.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import bagua


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--seconds-per-step", type=float, default=0.0, help="to have time to stop it")
    args = parser.parse_args()

    bagua.init_process_group()
    rank = bagua.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.num_steps)
    model = bagua.with_bagua(model, optimizer, algorithm="bytegrad", codec="onebit", error_feedback=True)
    first = 0
    if (args.checkpoint / "checkpoint.json").exists():
        first = bagua.load(args.checkpoint, model, optimizer, scheduler=scheduler)["step"]
        print(f"rank {rank}: goes on at step {first}", flush=True)

    for step in range(first, args.num_steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)  # the same batch for the same step
        x = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(args.seconds_per_step)
        if bagua.preemption():
            bagua.save(args.checkpoint, model, optimizer, scheduler=scheduler, step=step + 1)
            print(f"rank {rank}: saved behind step {step}")
            break
        if step % 50 == 0:
            print(f"rank {rank}: step {step}", flush=True)
    else:
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"rank {rank}: done, sum of the weights {weights:.9f}")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
