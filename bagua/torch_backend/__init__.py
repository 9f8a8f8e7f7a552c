"""The backend "bagua" of torch.distributed: `dist.init_process_group("bagua")`, and unmodified programs run on it.

`world.py` makes torch's groups on top of bagua's world, `group.py` translates torch's calls into ours, `work.py` our
handles into torch's. `import bagua` registers the backend in torch's public registry; torch 2.14 and later find it by
the entry point `torch.distributed.backends` without that.
"""

from __future__ import annotations

import torch.distributed as dist

from .group import TorchProcessGroup
from .work import TorchWork
from .world import create

__all__ = ["TorchProcessGroup", "TorchWork", "register"]


def register() -> None:
    """Make the name "bagua" known to torch.distributed. Idempotent."""
    if not hasattr(dist.Backend, "BAGUA"):
        dist.Backend.register_backend("bagua", create, extended_api=True, devices=["cpu"])


register()
