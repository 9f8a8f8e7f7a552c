"""Differentiable federated programs: algorithms over many clients, written in verbs and differentiated as a whole."""

import sys

import torch

from bagua.torch_version import is_torch_at_least

if not is_torch_at_least(2, 9):  # older ones trace other operators, and fail under vmap of what is coded at random
    raise ImportError(f"bagua.federated needs torch 2.9 or later, but this is torch {torch.__version__}")

from bagua.federated.library import aggregators, metrics, optimizers, partition, privacy, sampling, simulation
from bagua.federated.library.aggregators import gather
from bagua.federated.library.clients import ClientStore
from bagua.federated.library.simulation import Availability, Simulation
from bagua.federated.programs.coded import Coded
from bagua.federated.programs.deltas import Deltas
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.programs.graph import Graph
from bagua.federated.programs.platform import Client, IsolatedClients, Platform, run_on
from bagua.federated.programs.rounds import Cost, cost_of
from bagua.federated.programs.trace import trace
from bagua.federated.verbs.map_reduce import map_reduce
from bagua.federated.verbs.memory import keep_memory
from bagua.federated.verbs.model_parallel import copy_to_group, reduce_from_group
from bagua.federated.verbs.operators import record
from bagua.federated.verbs.placement import local_slice, program
from bagua.federated.verbs.verbs import broadcast, map_fn, reduce_mean, reduce_sum, reduce_weighted_mean

# Their names as modules of this package, which programs import from.
for _module in (aggregators, metrics, optimizers, partition, privacy, sampling, simulation):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

__all__ = [
    "Availability",
    "Client",
    "ClientStore",
    "Coded",
    "Cost",
    "Deltas",
    "FixedPoint",
    "Graph",
    "IsolatedClients",
    "Platform",
    "Simulation",
    "aggregators",
    "broadcast",
    "copy_to_group",
    "cost_of",
    "gather",
    "keep_memory",
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
