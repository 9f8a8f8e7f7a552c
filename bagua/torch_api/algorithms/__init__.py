"""The algorithms under the original project's names; each file says which algorithm of bagua it runs."""

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
