"""The backend "bagua" of torch.distributed: `dist.init_process_group("bagua")`, and unmodified programs run on it.

`lifecycle.py` creates and closes torch's groups, `group.py` translates torch's calls into ours, `work.py` our handles
into torch's. `import bagua` registers the backend in torch's public registry; torch 2.14 and later find it through the
entry point `torch.distributed.backends` without that.
"""

from __future__ import annotations

import torch.distributed as dist

from .group import TorchProcessGroup
from .lifecycle import create
from .work import TorchWork

__all__ = ["TorchProcessGroup", "TorchWork", "register"]


def register() -> None:
    """Make the name "bagua" known to torch.distributed. Idempotent."""
    if not hasattr(dist.Backend, "BAGUA"):
        dist.Backend.register_backend("bagua", create, extended_api=True, devices=["cpu", "cuda"])


register()
