"""The codecs that the tests run: every registered one, and those options that take another path."""

from __future__ import annotations

import bagua

_CHUNKS = ("topk:chunk=4096", "topk:chunk=4096,k=64,bits=2", "topk:chunk=4096,dct=1")
_WITH_OPTIONS = ("qsgd:bits=4", "qsgd:bits=2", "topk:k=8", "topk:k=256", *_CHUNKS)
SPECS = (*bagua.codecs.available(), *_WITH_OPTIONS)
CONTRACTIONS = tuple(spec for spec in SPECS if bagua.codecs.get(spec).needs_error_feedback)
# The loss of these is small beside what is sent.
ROUNDINGS = tuple(spec for spec in SPECS if spec not in CONTRACTIONS)
