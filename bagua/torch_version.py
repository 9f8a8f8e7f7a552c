"""Which torch this is."""

from __future__ import annotations

import re

import torch


def is_torch_at_least(major: int, minor: int) -> bool:
    """By the release: 2.9.0a0, as in containers with a torch from before the release of 2.9, counts as 2.9."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (major, minor)
