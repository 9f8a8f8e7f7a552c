"""What ranks send each other of Python values: all of it comes back, and reading hostile texts runs no code."""

import collections
import enum
import json
import math
import random

import numpy as np
import pytest
import torch

from bagua.distributed.plain_data import dumps, loads
from bagua.errors import InvalidArgument


class Spec(tuple):
    __slots__ = ()


class Color(str, enum.Enum):
    RED = "red"


LEAVES = [
    *(None, True, False, 0, -1, 2**70, 0.1, -0.0, 5e-324, math.inf, "", "\N{GRINNING FACE}\0", b"", b"\0\xff", 1 - 2j),
    *(torch.float32, torch.uint8, torch.device("cpu"), torch.device("cuda", 1), np.float32(0.1), np.int64(-(2**63))),
    *(frozenset({1, (2, "x")}), {3, 4}, Spec((1, (2, 3), torch.bfloat16, "cpu")), Spec(), torch.Size((2, 3))),
]


def tree(source, depth):
    if depth == 0 or source.random() < 0.3:
        return source.choice(LEAVES)
    entries = [tree(source, depth - 1) for _ in range(source.randrange(4))]
    keys = [source.choice([key, str(key), (key, "x"), -key, b"k%d" % key]) for key in range(len(entries))]
    return source.choice([entries, tuple(entries), Spec(entries), dict(zip(keys, entries, strict=True))])


def same(ours, theirs):
    if isinstance(ours, torch.Size):
        return type(theirs) is tuple and ours == theirs
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return repr(ours) == repr(theirs)


def test_values_come_back_with_their_types():
    for seed in range(300):
        value = tree(random.Random(seed), 4)
        assert same(value, loads(dumps(value, [Spec]), [Spec])), seed
    assert math.isnan(loads(dumps(math.nan)))


def test_arrays():
    for array in (
        np.arange(6, dtype=">i2").reshape(2, 3).T,
        np.array(3.5),
        np.zeros((0, 2), bool),
        np.array(["a", "bc"]),
    ):
        got = loads(dumps(array))
        assert got.dtype == array.dtype and got.shape == array.shape and (got == array).all()
        got[...] = got  # can be written


def test_of_subclasses_the_base_comes():
    assert type(loads(dumps(Color.RED))) is str and loads(dumps(Color.RED)) == "red"
    assert loads(dumps(collections.OrderedDict(a=np.float64(1.5)))) == {"a": 1.5}


@pytest.mark.parametrize(
    "value",
    [print, object(), np.array([print]), torch.ones(1), range(3)],
    ids=["function", "object", "array of objects", "tensor", "range"],
)
def test_what_is_not_sent(value):
    with pytest.raises(InvalidArgument, match=r"at \['x'\]\[1\] is a \w+, which is not sent between ranks"):
        dumps({"x": [1, value]})


def test_hostile_texts_raise_and_make_nothing_else():
    texts = [b"", b"{", b"[" * 50_000, b'{"a": 1, "b": 2}', b"{}", b'{"eval": "1"}', b'{"Spec": 1}', b"9" * 5000]
    texts += [b'{"dtype": "load"}', b'{"dtype": 1}', b'{"device": []}', b'{"numpy": ["O", [1], false, "AAAAAAAAAAA="]}']
    texts += [b'{"numpy": ["<f4", [99], false, "AAAA"]}', b'{"bytes": "*"}', b'{"dict": [[[], 1]]}', b'{"set": [[]]}']
    for text in texts:
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError)):
            loads(text)
    source = random.Random(1)
    for _ in range(2000):
        text = bytearray(dumps(tree(source, 3), [Spec]))
        for _ in range(source.randrange(1, 4)):
            text[source.randrange(len(text))] = source.randrange(256)
        try:
            value = loads(bytes(text), [Spec])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
            continue
        json.dumps(repr(value))
