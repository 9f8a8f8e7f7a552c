"""Names of the original project that this package does not support, with their replacements.

The attribute ``bagua.torch_api.NAME`` raises an error with that advice, and so does importing contrib.py, checkpoint.py
or model_parallel.py, which exist for that. ``from bagua.torch_api import NAME`` gives the advice for these three only:
for other names Python replaces the attribute's error by one of its own.
"""

from __future__ import annotations

from bagua.errors import InvalidArgument

__all__ = ["INSTEAD", "NoSuchModule", "NoSuchName", "advice"]

_NO_EXPERTS = "experts that differ between the ranks are not supported"

INSTEAD = {
    "BaguaTensor": "collectives take torch tensors as they are",
    "checkpoint": "use torch.save with model.state_dict() and model.bagua.state_dict()",
    "contrib": "use torch's own fused optimizers (fused=True), samplers and SyncBatchNorm",
    "get_backend": "write your own algorithms with bagua.algorithms.Algorithm",
    "model_parallel": _NO_EXPERTS,
    "moe": _NO_EXPERTS,
}


class NoSuchName(InvalidArgument, AttributeError):
    """The error for an unsupported name; an AttributeError, so that hasattr is False."""


class NoSuchModule(InvalidArgument, ImportError):
    """The error for an unsupported module; an ImportError, so that a program can do without it."""


def advice(name: str) -> str:
    """Returns the error message for an unsupported name, with its replacement."""
    return f"bagua.torch_api has no {name}: {INSTEAD[name]}"
