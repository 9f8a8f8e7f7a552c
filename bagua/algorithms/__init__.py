"""Communication algorithms: ``bagua.algorithms.available()`` lists them, one file each, and those of other packages.

The class of each is an attribute: ``bagua.with_bagua(model, algorithm=bagua.algorithms.QSGD(bits=4))``.
"""

from typing import Any

from bagua.algorithms._bucket_group import BucketGroup, Declaration
from bagua.algorithms._hooks import About, Stage, Training
from bagua.algorithms.base import Algorithm, ParameterState
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
    """The classes of this package's algorithms, whose files are imported when somebody asks for one."""
    cls = class_named(name)
    if cls is None:
        raise AttributeError(f"module 'bagua.algorithms' has no attribute {name!r}")
    return cls
