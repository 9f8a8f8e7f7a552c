"""Random programs of the verbs beside DrJAX: values, gradients, tangents and Hessian-vector products, in float64.

drjax_programs.json has the programs and DrJAX's numbers; write_drjax_programs.py writes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from bagua import federated
from tests.conformance.training import process_group
from tests.federated.random_programs import NUM_PROGRAMS, VERSION, Language, draw, generate, run, steps_of

FILE = Path(__file__).with_name("drjax_programs.json")
KINDS = ("values", "tangents", "gradient", "product")
RELATIVE = 1e-9  # to the largest number of what is compared

OPERATIONS = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "root": lambda x: torch.sqrt(1 + x**2),
    "bell": lambda x: torch.exp(-(x**2)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "weight": lambda x: 0.5 + torch.sigmoid(x),
    "scale": lambda x, factor: factor * x,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "ratio": lambda x, y: x / (1 + y**2),
    "matmul": torch.matmul,
    "outer": torch.outer,
    "total": torch.sum,
    "sum_last": lambda x: x.sum(-1),
    "mean_last": lambda x: x.mean(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "flat": lambda x: x.reshape(-1),
    "transpose": lambda x: x.transpose(0, -1),
    "first": lambda x: x[0],
    "softmax": lambda x: x.softmax(-1),
    "cumulate": lambda x: x.cumsum(0),
    "join": lambda x, y: torch.cat([x, y]),
}


def language(mine):
    """`mine`: which clients this rank holds."""

    def weighted(tree, weights, mask):
        return federated.reduce_weighted_mean(tree, weights, mask=None if mask is None else torch.tensor(mask)[mine])

    def fused(reduce):
        return lambda function, arguments, chunk_size: federated.map_reduce(
            function, arguments, reduce=reduce, chunk_size=chunk_size
        )

    verbs = {
        "broadcast": federated.broadcast,
        "map": federated.map_fn,
        "sum": federated.reduce_sum,
        "mean": federated.reduce_mean,
        "weighted": weighted,
        "map_sum": fused("sum"),
        "map_mean": fused("mean"),
    }
    return Language(OPERATIONS, verbs, grad, vmap)


@cache
def fixture():
    found = json.loads(FILE.read_text())
    assert found["version"] == VERSION
    return found["programs"]


class Case:
    """A program with its inputs, and what DrJAX gives."""

    def __init__(self, number, split=None, rank=0):
        self.number = number
        entry = fixture()[number]
        self.program = entry["program"]
        drawn = draw(number, self.program)
        num_local = split or [self.program["clients"]]
        end = list(accumulate(num_local))[rank]
        self.mine = slice(end - num_local[rank], end)
        self.names = list(drawn.inputs)
        self.inputs = [self.part(name, drawn.inputs[name]) for name in self.names]
        self.tangents = [self.part(name, drawn.tangents[name]) for name in self.names]
        self.cotangents = [torch.from_numpy(c) for c in drawn.cotangents]
        self.federated = federated.program(self.body, clients=self.program["clients"], num_local=split)
        self.expected = {
            **{kind: [torch.tensor(x, dtype=torch.float64) for x in entry[kind]] for kind in ("values", "tangents")},
            **{kind: self.parts(entry[kind]) for kind in ("gradient", "product")},
        }

        # Of all clients: those of one rank may have tiny numbers.
        self.scales = {kind: max(float(np.abs(x).max()) for x in entry[kind]) for kind in KINDS}

    def part(self, name, array):
        """Of what the clients have, this rank's."""
        tensor = torch.as_tensor(array, dtype=torch.float64)
        return tensor[self.mine] if name in self.program["placed"] else tensor

    def parts(self, arrays):
        return [self.part(name, array) for name, array in zip(self.names, arrays, strict=True)]

    def body(self, *inputs):
        return run(self.program, dict(zip(self.names, inputs, strict=True)), language(self.mine))

    def loss(self, *inputs):
        return sum((c * y).sum() for c, y in zip(self.cotangents, self.federated(*inputs), strict=True))

    def gradient(self, *inputs):
        return grad(self.loss, tuple(range(len(inputs))))(*inputs)

    def check(self, found):
        for kind, arrays in zip(KINDS, found, strict=True):
            expected = self.expected[kind]
            scale = max(1e-3, self.scales[kind])
            for one, other in zip(arrays, expected, strict=True):
                assert one.shape == other.shape and one.dtype is torch.float64
                off = float((one.detach() - other).abs().max()) if one.numel() else 0.0
                where = f"{kind} of program {self.number}: {arrays}, DrJAX has {expected}"
                assert off <= RELATIVE * scale, where


# ---- ways to the same derivatives


def forward_over_reverse(case):
    def with_gradient(*inputs):
        values, pull = vjp(case.federated, *inputs)
        return values, pull(case.cotangents)

    (values, gradient), (tangents, product) = jvp(with_gradient, tuple(case.inputs), tuple(case.tangents))
    return values, tangents, gradient, product


def reverse_over_reverse(case):
    gradient, pull = vjp(case.gradient, *case.inputs)
    return *pushed(case), gradient, pull(tuple(case.tangents))


def reverse_over_forward(case):
    def along(*inputs):
        return jvp(case.loss, inputs, tuple(case.tangents))[1]

    return *pushed(case), case.gradient(*case.inputs), grad(along, tuple(range(len(case.inputs))))(*case.inputs)


def backward_twice(case):
    """By autograd without torch.func."""
    inputs = [x.clone().requires_grad_() for x in case.inputs]
    values = case.federated(*inputs)
    gradient = torch.autograd.grad(values, inputs, case.cotangents, create_graph=True, materialize_grads=True)
    curved = [(g, t) for g, t in zip(gradient, case.tangents, strict=True) if g.requires_grad]
    product = [torch.zeros_like(x) for x in inputs]
    if curved:
        outputs, tangents = zip(*curved, strict=True)
        product = torch.autograd.grad(outputs, inputs, tangents, materialize_grads=True)
    return values, pushed(case)[1], gradient, product


def pushed(case):
    return jvp(case.federated, tuple(case.inputs), tuple(case.tangents))


WAYS = [forward_over_reverse, reverse_over_reverse, reverse_over_forward, backward_twice]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_programs_equal_those_of_drjax(way):
    """Every sixteenth program by one of the ways."""
    for number in range(WAYS.index(way), NUM_PROGRAMS, 16 * len(WAYS)):
        case = Case(number)
        case.check(way(case))


@pytest.mark.slow("test_programs_equal_those_of_drjax")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_program_by_every_way(way):
    for number in range(NUM_PROGRAMS):
        case = Case(number)
        case.check(way(case))


def on_ranks(rank, world_size, numbers):
    with process_group():
        for number in numbers:
            clients = fixture()[number]["program"]["clients"]
            split = [clients - clients // 3, clients // 3]  # of one or two clients, a rank has none
            if number % 2:
                split.reverse()
            case = Case(number, split, rank)
            case.check(WAYS[number % len(WAYS)](case))


@pytest.mark.slow("test_derivatives_on_ranks_are_those_of_loops")
def test_programs_on_two_ranks_equal_those_of_drjax(pool2):
    pool2.run(on_ranks, args=(range(0, NUM_PROGRAMS, 3),))


# ---- the fixture


def test_the_fixture_has_the_programs_that_are_generated():
    assert [entry["program"] for entry in fixture()] == [generate(number) for number in range(NUM_PROGRAMS)]
    assert NUM_PROGRAMS >= 200
    has = Counter()
    for program in (entry["program"] for entry in fixture()):
        steps = list(steps_of(program))
        kinds = Counter(step[0] for step in steps)
        reductions = [step for step in steps if step[0] not in ("broadcast", "map", "server", "repeat")]
        text = json.dumps(steps)
        has["maps of maps' results"] += kinds["map"] > 1
        has["several reductions"] += len(reductions) > 1
        has["several rounds"] += kinds["broadcast"] > 1 or kinds["repeat"] > 0
        has["trees"] += any(isinstance(step[-1], (dict, list)) for step in reductions)
        has["weighted means"] += kinds["weighted"] > 0
        has["weights that are computed"] += any(step[2] != "w0" for step in steps if step[0] == "weighted")
        has["masks"] += any(False in (step[3] or []) for step in steps if step[0] == "weighted")
        has["maps and reductions in one"] += kinds["map_sum"] + kinds["map_mean"] > 0
        has["gradients at a client"] += '"grad"' in text
        has["products of matrices"] += " matmul " in text
        has["curvature"] += np.abs(np.concatenate([np.ravel(x) for x in fixture()[has["all"]]["product"]])).max() > 1e-3
        has["all"] += 1
        for operation in OPERATIONS:
            has[operation] += f" {operation} " in text
    assert min(has.values()) >= 10, has
    assert min(has[what] for what in ("several reductions", "several rounds", "weighted means", "curvature")) > 100, has


@pytest.mark.needs("drjax", "jax")
def test_the_fixture_is_what_drjax_gives(tmp_path):
    file = tmp_path / "programs.json"
    command = [sys.executable, "-m", "tests.federated.write_drjax_programs", "--every", "30", "--output", str(file)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(file.read_text())["programs"]
    for number, entry in zip(range(0, NUM_PROGRAMS, 30), found, strict=True):
        assert entry["program"] == fixture()[number]["program"]
        case = Case(number)
        case.check([[torch.tensor(x, dtype=torch.float64) for x in entry[kind]] for kind in KINDS])
