"""DistributedDataParallel, where the original project has it."""

from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
