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
_QADAM_ONEBIT = "qadam codec=onebit, warm-up 20 %"
_QADAM_ONEBIT_NO_FLOOR = "qadam codec=onebit, variance_floor=0.0, warm-up 20 %"

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
    ("byte_lm", "bytegrad codec=topk, error_feedback=True"): Finding(
        "Of 2048 elements 32 are sent per step; the others wait in the residual, tens of steps where a run has 300, "
        "and momentum that comes late points elsewhere. More elements and a warm-up close most of the gap.",
        "bytegrad codec=topk:k=256, error_feedback=True, warm-up 20 %",
    ),
    ("byte_lm", "bytegrad codec=topk:k=256, error_feedback=True, warm-up 20 %"): Finding(
        "Its seeds overlap with DDP's. What is still in the residuals when a run ends never reaches the weights; a "
        "longer run makes that less."
    ),
    ("byte_lm", "qsgd bits=2"): Finding(
        "One level besides 0 and the norm's sign: what is rounded at random is as large as the largest element of its "
        "block, which is noise like that of much smaller batches. 4 bits have a seventh of it, in twice the bytes.",
        "qsgd bits=4",
    ),
    ("byte_lm", "qsgd bits=2, warm-up 20 %"): Finding(
        "A warm-up closes a part of the gap; the noise stays.", "qsgd bits=4"
    ),
    ("digits", _QADAM_ONEBIT_NO_FLOOR): Finding(
        "1-bit Adam as published. Behind the flattened ReLUs some weights have gradients close to 0 in the warm-up, so "
        "v stops at almost nothing. What the codec rounds of their momentum, divided by sqrt(v) + eps with Adam's eps "
        "of 1e-8, is then a step of up to thousands of learning rates: training jumps, or ends in NaN. A longer "
        "warm-up does not help: such weights are as quiet later. `variance_floor` raises their v to a share of the "
        "mean; with 1e-7 training still jumped when the codec set in, with 1e-6 and more it did not.",
        _QADAM_ONEBIT,
    ),
    ("byte_lm", _QADAM_ONEBIT): Finding(
        "All of a block's momenta are taken for equally large, so that every weight steps by its block's mean momentum "
        "over its own sqrt(v); error feedback makes that right over several steps only. A longer warm-up helps here.",
        "qadam codec=onebit, warm-up 50 %",
    ),
    ("byte_lm", _QADAM_ONEBIT_NO_FLOOR): Finding(
        "As with the floor, which is there for other tasks: no weight moves far on this one.",
        "qadam codec=onebit, warm-up 50 %",
    ),
    ("byte_lm", "async"): Finding(
        "Rounds are too far apart: half a second was about six steps when this was found out. With 0.1 s, a round in "
        "two steps, training ended inside, and so with 0.02 s. An interval in seconds is so many steps as the machine "
        "makes in it, so the right one depends on the machine and how busy it is.",
        "async sync_interval=0.02",
    ),
    ("byte_lm", "local_sgd sync_every=16, warm-up 20 %"): Finding(
        "At the edge: what separates it from the row without warm-up is less than what separates two seeds.",
        "local_sgd",
    ),
}
