"""What the original project has and this package has not, and what to use instead.

Beside the data path. The attribute ``bagua.torch_api.NAME`` tells it, and so does the import of a file of this folder
that has nothing else to do: contrib.py, checkpoint.py, model_parallel.py. ``from bagua.torch_api import NAME`` tells it
for those files only: of other names Python says that they cannot be imported, whatever the attribute says.
"""

from __future__ import annotations

from bagua.errors import InvalidArgument

__all__ = ["INSTEAD", "NoSuchModule", "NoSuchName", "advice"]

_NO_EXPERTS = "experts that differ between the ranks are not supported"

INSTEAD = {
    "BaguaTensor": "collectives take torch tensors as they are",
    "checkpoint": "use torch.save with model.state_dict() and model.bagua.state_dict()",
    "contrib": "use torch's own fused optimizers (fused=True), samplers and SyncBatchNorm",
    "get_backend": "algorithms of your own are written with bagua.algorithms.Algorithm",
    "model_parallel": _NO_EXPERTS,
    "moe": _NO_EXPERTS,
}


class NoSuchName(InvalidArgument, AttributeError):
    """A name that is not here; an AttributeError, so that hasattr is False."""


class NoSuchModule(InvalidArgument, ImportError):
    """A module that is not here; an ImportError, so that a program can do without it."""


def advice(name: str) -> str:
    """That it is not here, and what to use instead."""
    return f"bagua.torch_api has no {name}: {INSTEAD[name]}"
