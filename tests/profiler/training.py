"""Shared code of the tests of timelines and metrics: training of a model with several buckets."""

import time

import torch

import bagua


def train(algorithm="gradient_allreduce", steps=4, late_rank=None, late_s=0.05, **options):
    """Trains and returns a wrapped model; `late_rank` sleeps before each backward."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(128))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=70_000, **options)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + bagua.get_rank())
        loss = model(torch.randn(8, 128, generator=generator)).square().mean()
        if bagua.get_rank() == late_rank:
            time.sleep(late_s)
        loss.backward()
        optimizer.step()
    return model
