"""Differentiable federated programs: algorithms over many clients, written in verbs and differentiated as a whole."""

from bagua.federated.map_reduce import map_reduce
from bagua.federated.operators import record
from bagua.federated.placement import program
from bagua.federated.verbs import broadcast, map_fn, reduce_mean, reduce_sum, reduce_weighted_mean

__all__ = [
    "broadcast",
    "map_fn",
    "map_reduce",
    "program",
    "record",
    "reduce_mean",
    "reduce_sum",
    "reduce_weighted_mean",
]
