"""Communication algorithms: ``bagua.algorithms.available()`` lists them, one file each, and those of other packages."""

from bagua.algorithms.base import About, Algorithm, Declaration, Training
from bagua.algorithms.registry import available, create, get, register

__all__ = ["About", "Algorithm", "Declaration", "Training", "available", "create", "get", "register"]
