"""PowerSGD against its definition in plain loops; what is left out is kept; what it sends."""

from __future__ import annotations

import math

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in, in_turns

SHAPES = {"matrix": (12, 40), "kernel": (16, 4, 3, 5), "bias": (12,), "square": (3, 3)}
RANK = 2


def _gradient(rank, step, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + 10 * rank + len(shape)))


def _matmul(a, b):
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def _transposed(a):
    return [list(column) for column in zip(*a, strict=True)]


def _mean(matrices):
    return [[sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def _minus(a, b):
    return [[x - y for x, y in zip(row, other, strict=True)] for row, other in zip(a, b, strict=True)]


def _gram_schmidt(a):
    """Orthonormal columns."""
    basis = []
    for column in _transposed(a):
        for other in basis:
            along = sum(x * y for x, y in zip(column, other, strict=True))
            column = [x - along * y for x, y in zip(column, other, strict=True)]
        length = math.sqrt(sum(x * x for x in column))
        basis.append([x / length for x in column])
    return _transposed(basis)


class _Oracle:
    """The results of one matrix on all ranks, step by step."""

    def __init__(self, index, num_ranks, rows, columns, keeps_error):
        self.q = torch.randn(columns, RANK, generator=torch.Generator().manual_seed(index)).tolist()
        self.errors = [[[0.0] * columns for _ in range(rows)] for _ in range(num_ranks)]
        self.keeps_error = keeps_error

    def step(self, grads):
        pairs = zip(grads, self.errors, strict=True)
        matrices = [_minus(grad, [[-x for x in row] for row in error]) for grad, error in pairs]
        p = _gram_schmidt(_mean([_matmul(matrix, self.q) for matrix in matrices]))
        qs = [_matmul(_transposed(matrix), p) for matrix in matrices]
        if self.keeps_error:
            self.errors = [_minus(m, _matmul(p, _transposed(q))) for m, q in zip(matrices, qs, strict=True)]
        self.q = _mean(qs)
        return _matmul(p, _transposed(self.q))


def _like_the_oracle(rank, world_size, error_feedback, bucket_bytes):
    with process_group():
        model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        model["kernel"] = torch.nn.Parameter(torch.zeros(SHAPES["kernel"]).to(memory_format=torch.channels_last))
        options = {"rank": RANK, "error_feedback": error_feedback, "bucket_bytes": bucket_bytes}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, optimizer, algorithm="powersgd", **options)
        names = [name for name, _ in model.named_parameters()]
        sides = {"matrix": (12, 40), "kernel": (16, 60)}
        oracles = {n: _Oracle(names.index(n), world_size, *side, error_feedback) for n, side in sides.items()}
        for step in range(4):
            optimizer.zero_grad()
            sum((p * _gradient(rank, step, p.shape)).sum() for p in model.values()).backward()
            for name, parameter in model.items():
                grads = [_gradient(r, step, parameter.shape) for r in range(world_size)]
                expected = sum(grads) / world_size
                if name in oracles:
                    # The matrix of a kernel is as it lies in memory: channels last.
                    order = (0, 2, 3, 1) if name == "kernel" else (0, 1)
                    laid = [grad.permute(order).reshape(sides[name]).double().tolist() for grad in grads]
                    result = torch.tensor(oracles[name].step(laid))
                    expected = result.view([parameter.shape[d] for d in order])
                    expected = expected.permute(0, 3, 1, 2) if name == "kernel" else expected
                torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=2e-5)
            assert_equal_on_all_ranks({name: p.grad for name, p in model.items()})
            optimizer.step()


@in_turns("error_feedback, bucket_bytes", [True, False], [1, 1 << 20])
def test_equals_the_oracle(pool2, error_feedback, bucket_bytes):
    pool2.run(_like_the_oracle, args=(error_feedback, bucket_bytes))


def _nothing_is_lost(rank, world_size, state_dtype):
    """Adds up the values sent and the error that is kept, and compares them with the gradients."""
    with process_group():
        model = torch.nn.ParameterDict({"weight": torch.zeros(32, 64)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, optimizer, algorithm="powersgd", rank=RANK, state_dtype=state_dtype)
        total = torch.zeros(32, 64, dtype=torch.float64)
        for step in range(6):
            optimizer.zero_grad()
            (model["weight"] * _gradient(rank, step, (32, 64))).sum().backward()
            optimizer.step()
            total += sum(_gradient(r, step, (32, 64)).double() for r in range(world_size)) / world_size
        states = model.bagua.state_dict()["parameters"]["states"]
        error = states["error"]["parameters"]["weight"].double()
        bagua.all_reduce(error, bagua.ReduceOp.AVG)
        off = float((total + model["weight"].detach().double() - error.view(32, 64)).abs().max())
        assert float(error.abs().max()) > 0.1
        assert off < (1e-4 if state_dtype == "float32" else 0.1)


@fast_in("state_dtype", ["float32"], ["bfloat16"])
def test_nothing_is_lost(pool2, state_dtype):
    pool2.run(_nothing_is_lost, args=(state_dtype,))


def _low_rank_first(rank, world_size):
    """A single row of gradients, as of an embedding, gives one direction; later ones fill all that may be sent."""
    with process_group():
        model = torch.nn.ParameterDict({"weight": torch.zeros(64, 64)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, optimizer, algorithm="powersgd", rank=4)
        for step in range(8):
            optimizer.zero_grad()
            gradient = torch.zeros(64, 64)
            gradient[3] = 1.0
            if step == 7:
                gradient = _gradient(rank, step, (64, 64))
            (model["weight"] * gradient).sum().backward()
            if step < 7:
                torch.testing.assert_close(model["weight"].grad, gradient)
            optimizer.step()
        strengths = torch.linalg.svdvals(model["weight"].grad)
        assert float(strengths[3]) > 0.1 * float(strengths[0]) and float(strengths[4]) < 1e-4


def test_gradients_of_a_lower_rank_leave_no_direction_out_for_good(pool2):
    pool2.run(_low_rank_first)


def _sent(rank, world_size):
    with process_group():
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
        bagua.with_bagua(model, algorithm="powersgd", rank=4, bucket_bytes=512 * 512 * 4)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 512)).sum().backward()
        timeline = model.bagua.timeline()
        declared = {str(bucket.declaration) for bucket in model.bagua.buckets}
        assert declared == {"all_reduce + all_reduce, full precision"}
        operations = [span for span in timeline.spans if span.kind == "operation" and span.label.startswith("bucket")]
        labels = [span.label for span in sorted(operations, key=lambda span: span.begin_ns)][-8:]
        return timeline.steps[-1].bytes_sent, labels


def test_sends_thin_factors_and_others_between_them(pool2):
    for sent, labels in pool2.run(_sent):
        assert sent == pytest.approx(4 * 4 * 2 * 512 * 4, rel=0.05)  # 4 matrices, 4 columns of P and of Q, float32
        # The second factor of a bucket follows when two more buckets have been launched.
        assert labels == [f"bucket {index}" for index in (0, 1, 2, 0, 3, 1, 2, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0, expected 1 or more"),
        ({"state_dtype": "float64"}, "state_dtype is 'float64', expected 'float32' or 'bfloat16'"),
    ],
)
def test_options(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("powersgd", options)
