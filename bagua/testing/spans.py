"""Records spans as the engine does, without an engine, to measure the cost of recording."""

from __future__ import annotations

from bagua import _C

__all__ = ["record_spans"]


def record_spans(count: int) -> None:
    """Writes ``count`` spans, as an engine does, into a ring that this process keeps for later calls."""
    _C.record_spans(count)
