"""compile_backend: a backend of torch.compile whose backward gives its gradients bucket by bucket.

Beside the data path. A compiled model is one node of autograd, so all its gradients are ready at the end of backward,
where nothing is left to overlap with. Torch cuts the graph of a model in its own DDP at the borders of buckets; this
has it do so for a model that bagua wraps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from bagua.buckets import DEFAULT_BUCKET_BYTES, SMALL_BUCKET_BYTES
from bagua.errors import InvalidArgument


def compile_backend(
    backend: str | Callable[..., Any] = "inductor", *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Callable[..., Any]:
    """Returns a backend for ``torch.compile`` that keeps communication and backward overlapping.

    The model's graph is cut where a bucket of gradients ends, and ``backend`` compiles the parts. The model may be
    compiled before or after ``with_bagua``.

    Args:
        backend: the name of a backend of torch.compile, or the backend itself.
        bucket_bytes: as in ``with_bagua``.

    Raises:
        InvalidArgument: ``bucket_bytes`` is not positive.
        torch._dynamo.exc.InvalidBackend: torch knows no backend of that name.

    Example:
        >>> model = torch.compile(model, backend=bagua.compile_backend("inductor"))
    """
    if bucket_bytes <= 0:
        raise InvalidArgument(f"bucket_bytes is {bucket_bytes}, expected a number of bytes above 0")
    from torch._dynamo.backends.registry import lookup_backend  # importing dynamo takes a second

    compiler = lookup_backend(backend)
    try:
        from torch._dynamo.backends.distributed import DDPOptimizer

        optimizer = DDPOptimizer(bucket_bytes, compiler, first_bucket_cap=min(SMALL_BUCKET_BYTES, bucket_bytes))
        return optimizer.compile_fn
    except (ImportError, AttributeError, TypeError) as error:  # torch's own, without a promise to stay
        warnings.warn(
            f"this torch cannot cut a graph into buckets ({error}): gradients are ready at the end of backward, and "
            "communication does not overlap with it",
            RuntimeWarning,
            stacklevel=2,
        )
        return compiler
