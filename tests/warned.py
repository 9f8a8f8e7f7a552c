"""What a rank writes into the log "bagua": pytest's caplog is of its own process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings and errors of the log in the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("bagua")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
