"""Codecs: ``bagua.codecs.available()`` lists them, ``bagua.codecs.get(name)`` returns one."""

from bagua.codecs.base import Codec, SeededCodec
from bagua.codecs.registry import available, get, register

__all__ = ["Codec", "SeededCodec", "available", "get", "register"]
