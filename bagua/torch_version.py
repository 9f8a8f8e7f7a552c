"""The version of the torch that is installed."""

from __future__ import annotations

import re

import torch


def is_torch_at_least(major: int, minor: int) -> bool:
    """Returns True for torch major.minor or later; a pre-release, such as 2.9.0a0 in containers, counts as 2.9."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (major, minor)
