"""The classes of ``q_adam``, under the name that bagua uses for the algorithm."""

from .q_adam import QAdamAlgorithm, QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]
