"""The table of errors in docs/federated-clients.md: its code raises what it says, what it says to write computes."""

import re
from pathlib import Path

import pytest
import torch

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.verbs.verbs import _EXPLAINED

PAGE = Path(__file__).resolve().parents[3] / "docs" / "federated-clients.md"
TABLE = PAGE.read_text().partition("## What the errors mean")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]
NAMES = {
    "torch": torch,
    "grad": torch.func.grad,
    "dropout": torch.nn.functional.dropout,
    "batch_norm": torch.nn.BatchNorm1d(4).requires_grad_(False),
    "lstm": torch.nn.LSTM(4, 3).requires_grad_(False),
    "parameter": torch.nn.Parameter(torch.ones(4)),
}
OWN = torch.tensor([[1.0, -2.0, 3.0, 0.5], [-1.0, -2.0, 0.5, 0.25], [0.5, 4.0, -1.0, 2.0]])
SENT = torch.tensor([2.0, -1.0, 0.5, 3.0])
GRADIENTS = {"(w * x).sum().backward()", "torch.autograd.grad((w * x).sum(), w)[0]"}  # of w, which are x


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


@federated.program(clients=len(OWN))
def mapped(function, w, x):
    return federated.map_fn(function, (federated.broadcast(w), x))


def run(code):
    return mapped(eval(f"lambda w, x: {code}", dict(NAMES)), SENT.clone(), OWN)


def each_alone(code):
    return [eval(code, NAMES | {"w": SENT.clone(), "x": x}) for x in OWN]


def test_every_error_that_is_explained_has_a_row():
    assert set(_EXPLAINED) <= set(spans(TABLE))
    assert len(ROWS) == 15


@pytest.mark.parametrize(("code", "says", "write"), ROWS, ids=[spans(row[0])[0] for row in ROWS])
def test_the_row_is_true(code, says, write):
    (code,), messages = spans(code), spans(says)
    with pytest.raises(InvalidArgument, match="the client function .*(" + "|".join(map(re.escape, messages)) + ")"):
        run(code)
    if write.startswith("`"):
        expected = OWN if code in GRADIENTS else torch.stack([torch.as_tensor(value) for value in each_alone(code)])
        torch.testing.assert_close(run(spans(write)[0]), expected)
