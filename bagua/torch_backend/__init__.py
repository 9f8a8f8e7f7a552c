"""The backend "bagua" of torch.distributed: unmodified programs use it after `dist.init_process_group("bagua")`.

`lifecycle.py` creates and closes torch's groups, `group.py` translates torch's calls into ours, `work.py` our handles
into torch's. `import bagua` registers the backend in torch's public registry; torch 2.14 and later also find it through
the entry point `torch.distributed.backends`.
"""

from __future__ import annotations

import torch.distributed as dist

from .group import TorchProcessGroup
from .lifecycle import create
from .work import TorchWork

__all__ = ["TorchProcessGroup", "TorchWork", "register"]


def register() -> None:
    """Registers the name "bagua" with torch.distributed. Idempotent."""
    if not hasattr(dist.Backend, "BAGUA"):
        dist.Backend.register_backend("bagua", create, extended_api=True, devices=["cpu", "cuda"])


register()
