"""The classes of ``q_adam``, by the name that the algorithm has everywhere else."""

from .q_adam import QAdamAlgorithm, QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]
