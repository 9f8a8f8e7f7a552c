"""One training step of a wrapped model, from the hooks of autograd to the optimizer's step."""

from bagua.data_parallel.api import DistributedDataParallel, with_bagua

__all__ = ["DistributedDataParallel", "with_bagua"]
