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


_ONEBIT = "bytegrad codec=onebit, error_feedback=True"
_ONEBIT_LONGER = f"{_ONEBIT}, warm-up 20 %, epochs x 2"
_SMALL_V = (
    "With eps = 1e-8, Adam's default, a step is divided by almost nothing where a weight had no gradient in the "
    "warm-up: in one run 2909 of the 131072 weights behind the flattened ReLUs had v = 0 when v was frozen. Plain Adam "
    "has m = 0 there too, but these codecs decode a 0 as the rounding error of its block, and weights grow until "
    "gradients are NaN or Inf. With no codec, or with bf16 or qsgd, which keep zeros, one training "
    "with one seed ended like DDP's; so did all three seeds with eps = 1e-4. With eps = 1e-5 one of three seeds was "
    "lost, and a longer warm-up or a lower learning rate did not help."
)

FINDINGS: dict[tuple[str, str], Finding] = {  # by task and case
    ("digits", _ONEBIT): Finding(
        "A bit per element errs by as much as it sends, which error feedback repays over the steps that follow. The "
        "accuracy jumps up and down until the learning rate has fallen, and the run is too short to make up for it.",
        _ONEBIT_LONGER,
    ),
    ("byte_lm", _ONEBIT): Finding(
        "As on digits: the loss rises when the codec sets in, and falls with the learning rate. A warm-up alone closes "
        "half of the gap; a lower learning rate widens it, because the run is short.",
        _ONEBIT_LONGER,
    ),
    ("digits", "qadam"): Finding(_SMALL_V, "qadam eps=0.0001, warm-up 20 %"),
    ("digits", "qadam warm-up 20 %"): Finding("As with the default warm-up.", "qadam eps=0.0001, warm-up 20 %"),
    ("digits", "qadam codec=onebit, warm-up 20 %"): Finding(
        "As with the default codec.", "qadam codec=onebit, eps=0.0001, warm-up 20 %"
    ),
    ("byte_lm", "qadam warm-up 20 %"): Finding(
        "What makes digits diverge happens here out of sight: embeddings of bytes that the text hardly has grow to "
        "magnitudes above 100, and nothing that is evaluated reads them."
    ),
    ("byte_lm", "async"): Finding(
        "Rounds are too far apart: half a second was about six steps when this was found out. With 0.1 s, a round in "
        "two steps, training ended inside, and so with 0.02 s. An interval in seconds is so many steps as the machine "
        "makes in it, so the right one depends on the machine and how busy it is.",
        "async sync_interval=0.02",
    ),
}
