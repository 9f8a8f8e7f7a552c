"""Differentiable federated programs: algorithms over many clients, written in verbs and differentiated as a whole."""

import torch

from bagua.torch_version import is_torch_at_least

if not is_torch_at_least(2, 9):  # older ones trace other operators, and fail under vmap of what is coded at random
    raise ImportError(f"bagua.federated needs torch 2.9 or later, but this is torch {torch.__version__}")

from bagua.federated import aggregators, metrics, optimizers, partition, privacy, sampling
from bagua.federated.fixed_point import FixedPoint
from bagua.federated.graph import Graph
from bagua.federated.map_reduce import map_reduce
from bagua.federated.model_parallel import copy_to_group, reduce_from_group
from bagua.federated.operators import record
from bagua.federated.placement import local_slice, program
from bagua.federated.platform import Client, IsolatedClients, Platform, run_on
from bagua.federated.rounds import Cost, cost_of
from bagua.federated.simulation import Availability, Simulation
from bagua.federated.trace import trace
from bagua.federated.verbs import broadcast, map_fn, reduce_mean, reduce_sum, reduce_weighted_mean

__all__ = [
    "Availability",
    "Client",
    "Cost",
    "FixedPoint",
    "Graph",
    "IsolatedClients",
    "Platform",
    "Simulation",
    "aggregators",
    "broadcast",
    "copy_to_group",
    "cost_of",
    "local_slice",
    "map_fn",
    "map_reduce",
    "metrics",
    "optimizers",
    "partition",
    "privacy",
    "program",
    "record",
    "reduce_from_group",
    "reduce_mean",
    "reduce_sum",
    "reduce_weighted_mean",
    "run_on",
    "sampling",
    "trace",
]
