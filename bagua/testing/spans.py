"""What the engine writes down, without an engine: for measuring what that takes."""

from __future__ import annotations

from bagua import _C

__all__ = ["record_spans"]


def record_spans(count: int) -> None:
    """Writes ``count`` spans as an engine does, into a log of their own."""
    _C.record_spans(count)
