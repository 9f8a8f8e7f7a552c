"""Communication algorithms: ``bagua.algorithms.available()`` lists them, one file each, and those of other packages.

The class of each is an attribute: ``bagua.with_bagua(model, algorithm=bagua.algorithms.QSGD(bits=4))``.
"""

from typing import Any

from bagua.algorithms._bucket_group import BucketGroup, Declaration
from bagua.algorithms.base import About, Algorithm, ParameterState, Stage, Training
from bagua.algorithms.registry import available, class_named, create, get, register

__all__ = [
    "About",
    "Algorithm",
    "BucketGroup",
    "Declaration",
    "ParameterState",
    "Stage",
    "Training",
    "available",
    "create",
    "get",
    "register",
]


def __getattr__(name: str) -> Any:
    """Imports this package's algorithms when one of their classes is asked for."""
    cls = class_named(name)
    if cls is None:
        raise AttributeError(f"module 'bagua.algorithms' has no attribute {name!r}")
    return cls
