"""Data-parallel training: with_bagua, and the step of a wrapped model."""

from bagua.data_parallel.average import average_model
from bagua.data_parallel.checkpoint import load, save
from bagua.data_parallel.compiling import compile_backend
from bagua.data_parallel.ddp import DistributedDataParallel
from bagua.data_parallel.wrap import with_bagua

__all__ = ["DistributedDataParallel", "average_model", "compile_backend", "load", "save", "with_bagua"]
