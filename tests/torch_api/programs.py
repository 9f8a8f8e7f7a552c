"""Runs programs on ranks, with bagua initialised as programs for the original project do it, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

import bagua
import bagua.torch_api
from tests.conformance.training import process_group

__all__ = ["original_process_group", "process_group"]


@contextlib.contextmanager
def original_process_group() -> Iterator[None]:
    """Initialises bagua for the block. The original has no function to end it, so programs leave that to the exit."""
    bagua.torch_api.init_process_group()
    try:
        yield
    finally:
        dist.destroy_process_group()
        bagua.destroy_process_group()
