"""The module path of DistributedDataParallel in the original project."""

from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
