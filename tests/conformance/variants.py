"""Every registered algorithm with the options under which a few steps show all that it does."""

from __future__ import annotations

from typing import Any

from tests.conformance.training import ALGORITHMS

_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "bytegrad": [{}, {"codec": "onebit", "error_feedback": True}, {"error_feedback": True, "state_dtype": "bfloat16"}],
    "qsgd": [{"bits": 8}, {"bits": 4, "error_feedback": True}],
    "powersgd": [{}, {"rank": 2, "state_dtype": "bfloat16"}],
    "qadam": [{"warmup_steps": 2}, {"warmup_steps": 2, "codec": "onebit"}],
    "decentralized": [{"topology": "shift_one"}, {"topology": "ring", "interval": 2}],
    "low_precision_decentralized": [{}, {"codec": "qsgd:bits=4"}],
    "choco": [{}, {"codec": "qsgd:bits=4"}],
    "dgc": [{"k": 64}],
    "diloco": [
        {"sync_every": 2},
        {"sync_every": 4, "fragments": 2, "overlap_steps": 1, "merge": 0.25, "codec": "minmax_uint8"},
    ],
    "sparseloco": [{"sync_every": 2}],
    "slowmo": [{"sync_every": 2}],
    "noloco": [{"sync_every": 2}],
    "local_sgd": [{"sync_every": 1, "momentum": "reset"}, {"sync_every": 3, "post_local_after": 2}],
    "zero_one_adam": [
        {"warmup_steps": 4, "refresh_doubling": 1, "interval_doubling": 1, "variance_floor": 1.0},
        {"warmup_steps": 2, "interval_doubling": 1, "variance_floor": 1.0},
    ],
    "async_averaging": [{"warmup_steps": 1000}],  # what comes after depends on time
}
VARIANTS = [(name, options) for name in ALGORITHMS for options in _OPTIONS.get(name, [{}])]
# The last variant of each algorithm, which keeps most.
ONE_OF_EACH = list(dict(VARIANTS).items())


def described(variant: Any) -> str:
    """Returns the name of a variant in tests."""
    name, options = variant
    return name + "".join(f"-{key}={value}" for key, value in options.items())
