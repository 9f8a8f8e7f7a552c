"""Why a way of training of convergence.py ends outside DDP's seeds, and what mends it: text beside measured rows.

The numbers are the run's own: convergence.py puts them beside the text, so none stand here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """About one row of one task.

    Attributes:
        why: what was found to be the cause, in whole sentences.
        mends: the case, a row of the same table, whose setting mends it; "" where none is needed or known.
    """

    why: str
    mends: str = ""


FINDINGS: dict[tuple[str, str], Finding] = {}  # by task and case
