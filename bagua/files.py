"""Files that replace others: a disk that is full, or a process that ends, leaves the old one as it was."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: str | Path, content: bytes) -> None:
    """Writes ``content`` beside ``path`` and renames it; what is no regular file, such as a pipe, is written to.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    unfinished = target.with_name(f"{target.name[:200]}.{os.getpid()}.part")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk here only
        os.replace(unfinished, target)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
