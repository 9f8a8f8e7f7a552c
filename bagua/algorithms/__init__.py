"""Communication algorithms: ``bagua.algorithms.available()`` lists them, one file each."""

from bagua.algorithms.base import Algorithm, Declaration
from bagua.algorithms.registry import available, create, get, register

__all__ = ["Algorithm", "Declaration", "available", "create", "get", "register"]
