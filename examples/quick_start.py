"""Trains a small model on several ranks, and prints the loss of each.

    bagua run --nproc-per-node 2 examples/quick_start.py

README.md shows what two ranks print. It takes a second, besides the start of two processes.
"""

from __future__ import annotations

import torch

import bagua

NUM_STEPS = 50


def main() -> None:
    bagua.init_process_group()  # reads the environment set by `bagua run` or torchrun
    rank = bagua.get_rank()

    torch.manual_seed(rank)  # different models and data on each rank; with_bagua makes the models equal to rank 0's
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = bagua.with_bagua(model, optimizer, algorithm="bytegrad")  # sends gradients in 8 bits instead of 32

    x = torch.randn(512, 64)
    y = x[:, :10].argmax(1)
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()  # afterwards gradients are the mean over all ranks
        optimizer.step()
        if step == 1 or step % 10 == 0:
            show(f"step {step:2}, loss:", loss)

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    show("sum of the weights:", weights.double().sum())
    if rank == 0:
        sent_kb = model.bagua.timeline().summary()["bytes_sent"] / NUM_STEPS / 1e3
        print(f"{sent_kb:.0f} kB sent per rank and step, for {weights.nbytes / 1e3:.0f} kB of gradients")
    bagua.destroy_process_group()


def show(what: str, value: torch.Tensor) -> None:
    """Prints every rank's value in one line, on rank 0."""
    of_ranks = torch.empty(bagua.get_world_size())
    bagua.all_gather(of_ranks, value.detach().float().reshape(1))
    if bagua.get_rank() == 0:
        print(f"{what:<19}", "   ".join(f"rank {rank} {one:.3f}" for rank, one in enumerate(of_ranks.tolist())))


if __name__ == "__main__":
    main()
