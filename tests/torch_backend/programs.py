"""Shared code of this folder: running a program first on gloo and then on bagua, and the pools for it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.torch_version import is_torch_at_least

TIMEOUT = timedelta(seconds=30)
needs_torch = pytest.mark.skipif(not is_torch_at_least(2, 9), reason="the backend needs torch 2.9 or later")


def start(backend: str = "bagua", timeout: timedelta = TIMEOUT) -> None:
    dist.init_process_group(backend, timeout=timeout)


def values(rank: int, world_size: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns different values for every rank and element, as far as the type allows."""
    x = torch.arange(numel) * world_size + rank
    if dtype is torch.bool:
        return x % 3 == 0
    return (x % 50).to(dtype)


def on_both(rank, world_size, program, args):
    """Runs a program with torch.distributed initialised on each backend; returns its value by backend."""
    results = {}
    for backend in ("gloo", "bagua"):
        start(backend)
        assert bagua.is_initialized() == (backend == "bagua")
        torch.manual_seed(1234 + rank)
        results[backend] = program(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        assert not bagua.is_initialized()
    return results


def compare(pool, program, *args, **tolerance) -> list:
    """Runs a program on both backends, compares what each rank returns, and returns what it did on bagua."""
    results = pool.run(on_both, args=(program, args))
    for rank, result in enumerate(results):
        torch.testing.assert_close(
            result["bagua"], result["gloo"], msg=lambda text, rank=rank: f"rank {rank}: {text}", **tolerance
        )
    return [result["bagua"] for result in results]


def in_bagua(rank, world_size, program, args):
    start()
    try:
        return program(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def run(pool, program, *args, **options) -> list:
    """Runs `program(rank, world_size, *args)` with torch.distributed initialised on bagua."""
    return pool.run(in_bagua, args=(program, args), **options)
