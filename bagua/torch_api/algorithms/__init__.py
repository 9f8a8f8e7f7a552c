"""The algorithms by the original project's names; each file says which of bagua's it runs."""

from . import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam, qadam
from .base import Algorithm

__all__ = [
    "Algorithm",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
    "qadam",
]
