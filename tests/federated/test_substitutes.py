"""What client functions compute instead of torch's, against definitions in loops: attention, norms, losses, fills."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional

from bagua import federated
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group, slow_but
from tests.distributed.worlds import SAME_TEST

CLIENTS, BATCH, HEADS, LENGTH, WIDTH = 3, 2, 2, 4, 6


def draw(*shape):
    return torch.randn(CLIENTS, *shape, dtype=torch.float64)


def by_definition(query, key, value, bias, scale):
    """``[BATCH, HEADS, LENGTH, WIDTH]``, row by row."""
    result = torch.zeros_like(value)
    for *index, row in itertools.product(range(BATCH), range(HEADS), range(LENGTH)):
        q, keys, values = query[(*index, row)], key[tuple(index)], value[tuple(index)]
        weights = [torch.exp(q @ keys[column] * scale + bias[row, column]) for column in range(LENGTH)]
        if sum(weights) > 0:
            result[(*index, row)] = sum(weights[i] / sum(weights) * values[i] for i in range(LENGTH))
    return result


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ISOLATED = CAUSAL.clone()
ISOLATED[1] = False  # a row that sees nothing
BIAS = torch.linspace(-1, 1, LENGTH**2, dtype=torch.float64).view(LENGTH, LENGTH)
CASES = {
    "all": ({}, torch.zeros(LENGTH, LENGTH)),
    "causal": ({"is_causal": True}, torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, -math.inf)),
    "mask": ({"attn_mask": CAUSAL}, torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, -math.inf)),
    "isolated": ({"attn_mask": ISOLATED}, torch.zeros(LENGTH, LENGTH).masked_fill(~ISOLATED, -math.inf)),
    "bias": ({"attn_mask": BIAS}, BIAS),
    "scale": ({"scale": 0.2}, torch.zeros(LENGTH, LENGTH)),
}


@pytest.fixture
def no_loop_over_clients():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.mark.parametrize("name", CASES)
def test_attention_is_its_definition(name, no_loop_over_clients):
    options, bias = CASES[name]
    torch.manual_seed(0)
    values = [draw(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]

    @federated.program(clients=CLIENTS)
    def program(*values):
        return federated.map_fn(lambda *qkv: functional.scaled_dot_product_attention(*qkv, **options), values)

    scale = options.get("scale", WIDTH**-0.5)
    expected = torch.stack([by_definition(*of_one, bias, scale) for of_one in zip(*values, strict=True)])
    torch.testing.assert_close(program(*values), expected)


@pytest.mark.parametrize("kind", ["sdpa", "module"])
def test_local_steps_with_attention_have_all_derivatives(kind, no_loop_over_clients):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    model = {name: value.detach() for name, value in module.named_parameters()}
    inputs = draw(BATCH, LENGTH, WIDTH)

    def of_client(model, x):
        if kind == "module":
            return functional_call(module, model, (x, x, x), {"need_weights": False})[0].square().mean()
        q, k, v = (x @ model["in_proj_weight"].T + model["in_proj_bias"]).view(BATCH, LENGTH, 3, HEADS, -1).unbind(2)
        mixed = functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2)
        return (mixed.flatten(2) @ model["out_proj.weight"].T + model["out_proj.bias"]).square().mean()

    def train(model, x, rate):
        gradient = grad(of_client)(model, x)
        return of_client({name: value - rate * gradient[name] for name, value in model.items()}, x)

    @federated.program(clients=CLIENTS)
    def after_a_step(rate):
        arguments = (federated.broadcast(model), inputs, federated.broadcast(rate))
        return federated.reduce_mean(federated.map_fn(train, arguments))

    def oracle(rate):
        """Of autograd, client by client, on attention as it is outside of client functions."""
        losses = []
        for x in inputs:
            followed = {name: value.clone().requires_grad_() for name, value in model.items()}
            gradients = torch.autograd.grad(of_client(followed, x), list(followed.values()))
            stepped = {name: v.detach() - rate * g for (name, v), g in zip(followed.items(), gradients, strict=True)}
            losses.append(of_client(stepped, x))
        return torch.stack(losses).mean()

    rate, distance = torch.tensor(0.5, dtype=torch.float64), 1e-5
    torch.testing.assert_close(after_a_step(rate), oracle(rate))
    slope = (oracle(rate + distance) - oracle(rate - distance)) / (2 * distance)
    torch.testing.assert_close(grad(after_a_step)(rate), slope, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(jvp(after_a_step, (rate,), (torch.ones_like(rate),))[1], slope, rtol=1e-6, atol=1e-9)


def test_long_sequences_have_all_derivatives():
    torch.manual_seed(0)
    inputs, long = torch.randn(CLIENTS, 1, 1, 64, 2, dtype=torch.float64), {"is_causal": True}

    def of_client(scale, x):
        return functional.scaled_dot_product_attention(scale * x, x, x, **long).square().mean()

    @federated.program(clients=CLIENTS)
    def loss(scale):
        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(scale), inputs)))

    def oracle(scale):
        return sum(of_client(scale, x) for x in inputs) / CLIENTS

    scale, distance = torch.tensor(1.5, dtype=torch.float64), 1e-4
    slopes = [(oracle(scale + d + distance) - oracle(scale + d - distance)) / (2 * distance) for d in (-1e-3, 0, 1e-3)]
    torch.testing.assert_close(loss(scale), oracle(scale))
    torch.testing.assert_close(grad(loss)(scale), slopes[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(jvp(loss, (scale,), (torch.ones_like(scale),))[1], slopes[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(grad(grad(loss))(scale), (slopes[2] - slopes[0]) / 2e-3, rtol=1e-4, atol=1e-9)
    followed = scale.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(followed), followed, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, followed)
    torch.testing.assert_close(curvature, (slopes[2] - slopes[0]) / 2e-3, rtol=1e-4, atol=1e-9)


# ---- norms: of [SAMPLES, CHANNELS, POINTS]

SAMPLES, CHANNELS, POINTS, EPS = 2, 3, 4, 1e-2
EVERYWHERE = list(itertools.product(range(SAMPLES), range(CHANNELS), range(POINTS)))
MOVED = {"running_mean": torch.tensor([0.5, -1.0, 0.0]), "running_var": torch.tensor([2.0, 1.0, 0.5])}
NORMS = {
    "layer": lambda x, w, b: functional.layer_norm(x, (POINTS,), w, b, EPS),
    "layers": lambda x, w, b: torch.layer_norm(x, [CHANNELS, POINTS], w, b, EPS),
    "batch": lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True, eps=EPS),
    "batch, of before": lambda x, w, b: functional.batch_norm(x, **of_type(x), weight=w, bias=b, eps=EPS),
    "instance": lambda x, w, b: functional.instance_norm(x, weight=w, bias=b, eps=EPS),
    "instance, of before": lambda x, w, b: functional.instance_norm(
        x, **of_type(x), weight=w, bias=b, use_input_stats=False, eps=EPS
    ),
    "group": lambda x, w, b: functional.group_norm(x, 1, w, b, EPS),
    "rms": lambda x, w, b: functional.rms_norm(x, (POINTS,), w, EPS) + b,
    "prelu": lambda x, w, b: functional.prelu(x, w) + b[:, None],
}


def of_type(x):
    return {name: value.to(x.dtype) for name, value in MOVED.items()}


def shape_of_weight(kind):
    return {"layer": (POINTS,), "rms": (POINTS,), "layers": (CHANNELS, POINTS)}.get(kind, (CHANNELS,))


def norm_by_definition(kind, x, w, b):
    """Element by element: by the mean and the variance of those with which it shares a sample, a channel or both."""
    result = torch.zeros_like(x)
    for n, c, p in EVERYWHERE:
        here = (c, p) if kind == "layers" else (p,) if kind in ("layer", "rms") else (c,)
        if kind == "prelu":
            result[n, c, p] = (x[n, c, p] if x[n, c, p] > 0 else w[c] * x[n, c, p]) + b[c]
            continue
        if kind.endswith("of before"):
            mean, var = MOVED["running_mean"][c], MOVED["running_var"][c]
        else:
            together = [
                x[place]
                for place in EVERYWHERE
                if (kind == "batch" or place[0] == n) and (kind in ("layers", "group") or place[1] == c)
            ]
            mean = 0 if kind == "rms" else sum(together) / len(together)
            var = sum((one - mean) ** 2 for one in together) / len(together)
        result[n, c, p] = (x[n, c, p] - mean) / (var + EPS) ** 0.5 * w[here] + b[here]
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_their_definition(kind, dtype):
    """With one gradient, with tangents, and with what may be differentiated again."""
    torch.manual_seed(0)
    x, *affine = (draw(*shape).to(dtype) for shape in ((SAMPLES, CHANNELS, POINTS), *[shape_of_weight(kind)] * 2))

    def program(*values):
        return federated.map_fn(NORMS[kind], values)

    program = federated.program(program, clients=CLIENTS)
    expected = torch.stack(
        [norm_by_definition(kind, *(v.double() for v in of_one)) for of_one in zip(x, *affine, strict=True)]
    ).to(dtype)
    tolerance = {} if dtype is torch.float64 else {"rtol": 0.02, "atol": 0.02}
    values = (x, *affine)
    with_a_gradient = grad(lambda *values: (program(*values).sum(), program(*values)), has_aux=True)
    for found in (
        program(*values),
        with_a_gradient(*values)[1],
        jvp(program, values, values)[0],
        program(x.clone().requires_grad_(), *affine).detach(),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, **tolerance)


def eager_gradient(function):
    def gradient(x, y):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x, y), x)[0]

    return gradient


def gradient_of_a_graph(function):
    return lambda x, y: grad(federated.trace(function, x, y))(x, y)


def graph_of_a_gradient(function):
    return lambda x, y: federated.trace(grad(function), x, y)(x, y)


def program_with_steps(kind):
    """On the weight and the bias of a norm: a client function, the mean of what it returns, and their arguments."""
    torch.manual_seed(0)
    affine = [torch.randn(shape_of_weight(kind), dtype=torch.float64) for _ in range(2)]

    def of_client(x, y):
        def loss(affine):
            return ((NORMS[kind](x * y, *affine) - y) ** 2).mean()

        return loss([value - 0.1 * slope for value, slope in zip(affine, grad(loss)(affine), strict=True)])

    @federated.program(clients=CLIENTS)
    def program(x, y):
        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(x), y)))

    return of_client, program, torch.randn(POINTS, dtype=torch.float64), draw(SAMPLES, CHANNELS, POINTS)


WAYS_TO_GRADIENTS = [grad, jacfwd, eager_gradient, gradient_of_a_graph, graph_of_a_gradient]


def those_of(functions, ways, fast):
    """All pairs, of which those are slow that have neither the one nor the other among ``fast``."""
    pairs = itertools.product(functions, ways)
    return [pair if {*pair} & fast else pytest.param(*pair, marks=SAME_TEST) for pair in pairs]


@pytest.mark.parametrize(("kind", "way"), those_of(NORMS, WAYS_TO_GRADIENTS, {"batch", grad}))
def test_steps_on_the_weights_of_norms_can_be_differentiated(kind, way):
    of_client, program, x, y = program_with_steps(kind)
    expected = slopes(lambda x: sum(of_client(x, one) for one in y) / CLIENTS, x)
    torch.testing.assert_close(way(program)(x, y), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("first", [grad, jacfwd])
@pytest.mark.parametrize("second", [jacrev, jacfwd])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_have_second_derivatives(kind, second, first):
    torch.manual_seed(0)
    affine = [torch.randn(shape_of_weight(kind), dtype=torch.float64) for _ in range(2)]
    x, y = torch.randn(POINTS, dtype=torch.float64), draw(SAMPLES, CHANNELS, POINTS)

    def of_client(x, y):
        return (NORMS[kind](x * y, *affine) * y).sum() ** 2

    @federated.program(clients=CLIENTS)
    def program(x):
        return federated.map_reduce(of_client, (federated.broadcast(x), y), chunk_size=2)

    expected = slopes(grad(lambda x: sum(of_client(x, one) for one in y) / CLIENTS), x)
    torch.testing.assert_close(second(first(program))(x), expected, rtol=1e-5, atol=1e-7)


def slopes(function, x, distance=1e-5):
    """By central differences, ``[x, ...]``."""
    steps = distance * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(function(x + step) - function(x - step)) / (2 * distance) for step in steps])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: lambda *values: jvp(f, values, values)[0],
        lambda f: lambda x, before: f(x.requires_grad_(), before).detach(),
        lambda f: lambda *values: federated.trace(f, *values)(*values),
    ],
    ids=["plain", "tangents", "autograd", "graph"],
)
@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_norms_move_running_statistics(kind, transform):
    torch.manual_seed(0)
    x, before = draw(SAMPLES, CHANNELS, POINTS), draw(2, CHANNELS).square()
    norm = {
        "batch": functools.partial(functional.batch_norm, training=True, momentum=0.25),
        "instance": functools.partial(functional.instance_norm, momentum=0.25),
    }[kind]

    def of_client(x, before):
        mean, var = before[0].clone(), before[1].clone()
        norm(x, mean, var)
        return torch.stack([mean, var])

    program = federated.program(lambda *values: federated.map_fn(of_client, values), clients=CLIENTS)
    if kind == "batch":
        together = x.movedim(2, 1).flatten(2)
        now = torch.stack([together.mean(2), together.var(2)], 1)
    else:
        now = torch.stack([x.mean(3).mean(1), x.var(3).mean(1)], 1)
    torch.testing.assert_close(transform(program)(x, before), 0.75 * before + 0.25 * now)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: torch.batch_norm(x, w, None, None, None, True, 0.1, EPS, False),
        lambda x, w: torch.instance_norm(x, w, None, None, None, True, 0.1, EPS, False),
        lambda x, w: torch.layer_norm(x, (POINTS,), w.sum().expand(POINTS), eps=EPS, cudnn_enable=False),
    ],
    ids=["batch", "instance", "layer"],
)
def test_norms_by_other_names(call):
    torch.manual_seed(0)
    x, y = torch.randn(CHANNELS, dtype=torch.float64), draw(SAMPLES, CHANNELS, POINTS)

    def of_client(x, y):
        gradient = grad(lambda w: (call(x[:, None] * y, w) * y).square().sum())(x + 1)
        return gradient.square().sum()

    @federated.program(clients=CLIENTS)
    def program(x):
        return federated.reduce_sum(federated.map_fn(of_client, (federated.broadcast(x), y)))

    expected = slopes(lambda x: sum(of_client(x, one) for one in y), x)
    torch.testing.assert_close(grad(program)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["plain", "autograd", "tangents", "graph"])
def test_norms_of_halves_with_weights_of_float32_stay_halves(mode):
    x, w = draw(SAMPLES, CHANNELS, POINTS).bfloat16(), torch.ones(CHANNELS)

    def program(x, w):
        return federated.map_fn(
            lambda x, w: (functional.layer_norm(x, (POINTS,), w.sum().expand(POINTS)), NORMS["batch"](x, w, w)),
            (x, federated.broadcast(w)),
        )

    program = federated.program(program, clients=CLIENTS)
    if mode == "graph":
        results = federated.trace(program, x, w)(x, w)
    elif mode == "tangents":
        results = jvp(lambda w: program(x, w), (w,), (w,))[0]
    else:
        results = program(x, w.requires_grad_(mode == "autograd"))
    assert [result.dtype for result in results] == [torch.bfloat16] * 2


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4, dtype=x.dtype)),
        lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        lambda x: functional.prelu(x, torch.ones(4, dtype=x.dtype)),
        lambda x: functional.layer_norm(x, (3,)),
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: functional.instance_norm(x),
        lambda x: functional.embedding(torch.tensor([1]), x[0], padding_idx=0),
        lambda x: torch.select_scatter(x, x[0].bfloat16(), 0, 0),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), x.sigmoid(), x[0, 0]),
        lambda x: functional.soft_margin_loss(x, x),
        lambda x: torch.index_fill(x, 1, torch.tensor([0]), x[0, 0, 0].double()),
    ],
)
def test_dtypes_under_autocast_are_torchs(function, dtype, is_on):
    x = torch.randn(CLIENTS, 2, 4, 3).to(dtype)
    with torch.autocast("cpu", enabled=is_on):
        expected = function(x[0]).dtype
        program = federated.program(lambda x: federated.map_fn(function, x), clients=CLIENTS)
        assert program(x).dtype is jvp(program, (x,), (x,))[0].dtype is expected


@pytest.mark.parametrize("indices", [(1, None), (None, -1), (-3, 2), (1, 99), (2, 1), (-99, None, 2)])
def test_slices_are_written_with_any_indices(indices):
    start, end, step = (*indices, 1)[:3]
    torch.manual_seed(0)
    x, clients = torch.randn(5, dtype=torch.float64), draw(5)

    def of_client(x, y):
        part = y[slice(start, end, step)] * 3
        scattered = torch.slice_scatter(x * y, part, start=start, end=end, step=step)
        other = x * y
        other[slice(start, end, step)] = part.sin()
        return (scattered * y).sum() ** 2 + (x * y).slice_scatter(part, 0, start, end, step).sum() * other.sum()

    @federated.program(clients=CLIENTS)
    def program(x, y):
        return federated.reduce_sum(federated.map_fn(of_client, (federated.broadcast(x), y)))

    expected = grad(lambda x: sum(of_client(x, one) for one in clients))(x)
    for way in (grad, eager_gradient, gradient_of_a_graph, graph_of_a_gradient):
        torch.testing.assert_close(way(program)(x, clients), expected)


def test_graphs_of_batches_have_the_gradients_of_prelu():
    torch.manual_seed(0)

    @federated.program(clients=CLIENTS)
    def program(x, y):
        mapped = federated.map_fn(lambda x, y: functional.prelu(x[None], y[:1]).sum(), (federated.broadcast(x), y))
        return federated.reduce_sum(mapped)

    for models in (CLIENTS, CLIENTS - 1):
        x, y = torch.randn(models, 2), torch.randn(CLIENTS, 2)
        gradients = vmap(grad(program), (0, None))
        expected = torch.tensor([[sum(1.0 if v > 0 else float(row[0]) for row in y) for v in of] for of in x])
        torch.testing.assert_close(gradients(x, y), expected)
        torch.testing.assert_close(federated.trace(gradients, x, y)(x, y), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.int64)),
        lambda x: functional.scaled_dot_product_attention(x, x.double(), x),
        lambda x: torch.select_scatter(x[0], x[0, 0], 0, 4),
        lambda x: torch.select_scatter(x[0], x[0, 0], 2, 0),
        lambda x: functional.embedding(torch.tensor([1]), x[0], padding_idx=7),
        lambda x: functional.batch_norm(x, None, None),
        lambda x: functional.batch_norm(x, torch.zeros(1), torch.ones(1)),
        lambda x: functional.instance_norm(x, use_input_stats=False),
        lambda x: functional.instance_norm(x[:, :, :1], weight=torch.ones(4)),
        lambda x: functional.layer_norm(x, 3),
        lambda x: functional.layer_norm(x, (3,), torch.ones(4)),
        lambda x: functional.prelu(x, torch.ones(1, 4)),
        lambda x: functional.cross_entropy(x[0], torch.tensor([0, 1]), torch.ones(2)),
        lambda x: functional.cross_entropy(x[0, :2], torch.tensor([0, 1]), torch.ones(2)),
        lambda x: functional.cross_entropy(x[0, :2], torch.tensor([0, 1]), torch.ones(3), label_smoothing=2.0),
        lambda x: functional.nll_loss(x[0, :2], torch.tensor([0, 3]), torch.ones(3)),
        lambda x: functional.nll_loss(x[0, :2], torch.tensor([0, 1]), torch.ones(3), reduction="all"),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), x.sigmoid(), torch.ones(2)),
        lambda x: functional.soft_margin_loss(x, x, reduction="all"),
        lambda x: torch.index_fill(x, 3, torch.tensor([0]), x[0, 0, 0]),
        lambda x: torch.index_fill(x, 2, torch.tensor([3]), x[0, 0, 0]),
        lambda x: torch.index_fill(x, 2, torch.tensor([0]), x[0, 0, :1]),
        lambda x: torch.index_fill(x, 2, torch.tensor([0]), x[0, 0, 0] + 1j),
        lambda x: x[0, 0, 0].roll(1, 1),
        lambda x: x[0, 0, 0].roll((1, 2), 0),
    ],
)
def test_what_torch_refuses_is_refused(function):
    program = federated.program(lambda x: federated.map_fn(function, x), clients=CLIENTS)
    x = torch.randn(CLIENTS, 2, 4, 3)
    for call in (lambda: program(x), lambda: jvp(program, (x,), (x,)), lambda: program(x.clone().requires_grad_())):
        with pytest.raises((RuntimeError, IndexError, AssertionError, TypeError, ValueError)):
            call()


# ---- what torch takes for a constant, or mixes between clients: functions of x, which is the server's, and of one's y

POINTS_OF_CLASS = torch.tensor([[0, 2, -100, 1], [1, 1, 2, -100]])  # [SAMPLES, POINTS]
FACTORS = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
SMOOTHING = 0.3


def filled(x, y):
    return torch.zeros(3, dtype=x.dtype).index_fill(0, torch.tensor([0, -1]), (x * y).sum())


def filled_in_place(x, y):
    return (x * y).index_fill_(0, torch.tensor([1]), y[0] * x[0])


def filled_columns(x, y):
    return torch.index_fill(x.expand(2, 3), -1, y.argmax()[None], y.prod())[1]


def probability(x, y):
    return torch.sigmoid(y), (y > 0).to(y.dtype)


# By definition: the loss of a target that counts, given the logarithms of probabilities, and x as weights.
OF_A_TARGET = {
    "plain": lambda x, logs, target: -x[target] * logs[target],
    "smoothed": lambda x, logs, target: (
        -(1 - SMOOTHING) * x[target] * logs[target] - SMOOTHING * sum(x[i] * logs[i] for i in range(3)) / 3
    ),
}


def losses_by_definition(x, y, kind="plain", reduction="mean"):
    losses, total = [], 0
    for sample, point in itertools.product(range(SAMPLES), range(POINTS)):
        target = int(POINTS_OF_CLASS[sample, point])
        if target != -100:
            scores = y[sample, :, point]
            losses.append(OF_A_TARGET[kind](x, scores - sum(scores.exp()).log(), target))
            total = total + x[target]
    return sum(losses) / total if reduction == "mean" else sum(loss**2 for loss in losses)


def mean_by_definition(x, y, function):
    return sum(function(x[i], y[n, i]) for n, i in itertools.product(range(2), range(3))) / 6


def standardized_by_definition(x, y):
    return sum(((y[n, c, p] - x[c]) / (x[c].exp() + EPS) ** 0.5 * FACTORS[c]) ** 3 for n, c, p in EVERYWHERE)


LIKE_SCORES = (SAMPLES, CHANNELS, POINTS)
# By name: a function, what defines it, and the shape of y.
FUNCTIONS = {
    "index_fill": (
        lambda x, y: (filled(x, y) * FACTORS).square().sum(),
        lambda x, y: (FACTORS[0] ** 2 + FACTORS[2] ** 2) * sum(x[i] * y[i] for i in range(3)) ** 2,
        (3,),
    ),
    "index_fill_": (
        lambda x, y: (filled_in_place(x, y) * FACTORS).sum() ** 2,
        lambda x, y: sum(FACTORS[i] * (y[0] * x[0] if i == 1 else y[i] * x[i]) for i in range(3)) ** 2,
        (3,),
    ),
    "index_fill, columns": (
        lambda x, y: (filled_columns(x, y) * FACTORS).sum() ** 2,
        lambda x, y: sum(FACTORS[i] * (y[0] * y[1] * y[2] if y[i] == max(y) else x[i]) for i in range(3)) ** 2,
        (3,),
    ),
    "trace": (
        lambda x, y: torch.trace(x * y) ** 2,
        lambda x, y: sum(x[i] * y[i, i] for i in range(3)) ** 2,
        (3, 3),
    ),
    "roll": (
        lambda x, y: (x * y).sum().roll(1).square() * torch.roll(y[0], (2, 1), (0, -1)),
        lambda x, y: sum(x[i] * y[i] for i in range(3)) ** 2 * y[0],
        (3,),
    ),
    "cross entropy, smoothed": (
        lambda x, y: functional.cross_entropy(y, POINTS_OF_CLASS, x, label_smoothing=SMOOTHING),
        functools.partial(losses_by_definition, kind="smoothed"),
        LIKE_SCORES,
    ),
    "cross entropy, one sample": (
        lambda x, y: functional.cross_entropy(y, torch.tensor(2), x, reduction="sum"),
        lambda x, y: -x[2] * (y[2] - sum(y.exp()).log()),
        (3,),
    ),
    "nll": (
        lambda x, y: functional.nll_loss(y.movedim(1, 2).flatten(0, 1).log_softmax(1), POINTS_OF_CLASS.flatten(), x),
        losses_by_definition,
        LIKE_SCORES,
    ),
    "nll, points": (
        lambda x, y: torch.nn.NLLLoss(x, reduction="none")(y.log_softmax(1), POINTS_OF_CLASS).square().sum(),
        functools.partial(losses_by_definition, reduction="none"),
        LIKE_SCORES,
    ),
    "binary cross entropy": (
        lambda x, y: functional.binary_cross_entropy(*probability(x, y), x.exp()),
        functools.partial(mean_by_definition, function=lambda x, y: x.exp() * (1 + (-y.abs()).exp()).log()),
        (2, 3),
    ),
    "soft margin": (
        lambda x, y: functional.soft_margin_loss(y, x.expand(2, 3)),
        functools.partial(mean_by_definition, function=lambda x, y: (1 + (-x * y).exp()).log()),
        (2, 3),
    ),
    "batch norm": (
        lambda x, y: functional.batch_norm(y, x, x.exp(), FACTORS, eps=EPS).pow(3).sum(),
        standardized_by_definition,
        LIKE_SCORES,
    ),
    "instance norm": (
        lambda x, y: functional.instance_norm(y, x, x.exp(), FACTORS, use_input_stats=False, eps=EPS).pow(3).sum(),
        standardized_by_definition,
        LIKE_SCORES,
    ),
}


def test_clients_cannot_fill_what_is_not_theirs():
    def of_client(y):
        return torch.zeros(2, dtype=y.dtype).index_fill_(0, torch.tensor([0]), y)

    @federated.program(clients=CLIENTS)
    def program(y):
        return federated.map_fn(of_client, y)

    with pytest.raises(InvalidArgument, match="not the client's own"):
        program(draw())
    torch.testing.assert_close(graph_of(program)(y := draw()), torch.stack([y, torch.zeros_like(y)], 1))


def federated_mean(name):
    """A program, what it is by definition, and its arguments."""
    of_client, definition, shape = FUNCTIONS[name]
    torch.manual_seed(0)

    @federated.program(clients=CLIENTS)
    def program(x, y):
        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(x), y)))

    x, y = torch.tensor([0.5, 1.25, 0.75], dtype=torch.float64), draw(*shape)
    return program, lambda x: sum(definition(x, one) for one in y) / CLIENTS, x, y


def in_chunks(name):
    def program(x, y):
        return federated.map_reduce(FUNCTIONS[name][0], (federated.broadcast(x), y), chunk_size=2)

    return federated.program(program, clients=CLIENTS)


def where_clients_are(function):
    def run(x, y):
        platform = federated.IsolatedClients([federated.Client(y=one) for one in y])
        return federated.run_on(platform, federated.trace(function, x, y), x=x)

    return run


def graph_of(function):
    return lambda *arguments: federated.trace(function, *arguments)(*arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_their_definition(name):
    program, definition, x, y = federated_mean(name)
    for way in (lambda f: f, graph_of, lambda _: in_chunks(name)):
        torch.testing.assert_close(way(program)(x, y), definition(x))
    torch.testing.assert_close(where_clients_are(program)(x, y), definition(x), rtol=1e-7, atol=1e-7)
    models = torch.stack([x, x / 2])
    expected = torch.stack([definition(one) for one in models])
    torch.testing.assert_close(vmap(program, (0, None))(models, y), expected)


def tangent(function):
    # A copy, since torch writes tangents where what clients share has no memory of its own.
    return lambda x, y: jvp(lambda x: function(x, y), (x.clone(),), (FACTORS,))[1]


DERIVATIVES = {
    "grad": grad,
    "tangent": tangent,
    "autograd": eager_gradient,
    "graph of grad": lambda f: graph_of(grad(f)),
    "graph of a tangent": lambda f: graph_of(tangent(f)),
    "tangent of a graph": lambda f: lambda x, y: tangent(federated.trace(f, x, y))(x, y),
    "isolated": lambda f: where_clients_are(grad(f)),
    "isolated tangent": lambda f: where_clients_are(tangent(f)),
}


FAST = {"index_fill", "nll, points", "batch norm"}


@pytest.mark.parametrize(("name", "way"), those_of(FUNCTIONS, DERIVATIVES, FAST | {"grad", "graph of a tangent"}))
def test_derivatives_are_those_of_the_definition(name, way):
    program, definition, x, y = federated_mean(name)
    expected = grad(definition)(x) @ FACTORS if "tangent" in way else grad(definition)(x)
    derivative = DERIVATIVES[way]
    torch.testing.assert_close(derivative(program)(x, y), expected, rtol=1e-6, atol=1e-6)
    if way in ("grad", "tangent", "autograd"):
        torch.testing.assert_close(derivative(in_chunks(name))(x, y), expected)


@pytest.mark.parametrize("way", [grad, tangent])
@pytest.mark.parametrize("name", slow_but(FUNCTIONS, *FAST))
def test_derivatives_within_clients_are_those_of_the_definition(name, way):
    _, definition, x, y = federated_mean(name)

    @federated.program(clients=CLIENTS)
    def program(x, y):
        return federated.reduce_mean(federated.map_fn(way(FUNCTIONS[name][0]), (federated.broadcast(x), y)))

    expected = grad(definition)(x) @ FACTORS if way is tangent else grad(definition)(x)
    torch.testing.assert_close(program(x, y), expected)
    torch.testing.assert_close(graph_of(program)(x, y), expected)


@pytest.mark.parametrize("name", slow_but(FUNCTIONS, "nll, points"))
def test_second_derivatives_are_those_of_the_definition(name):
    program, definition, x, y = federated_mean(name)
    expected = hessian(definition)(x)
    torch.testing.assert_close(hessian(program)(x, y), expected)
    torch.testing.assert_close(jacrev(grad(program))(x, y), expected)
    torch.testing.assert_close(graph_of(hessian(program))(x, y), expected)


def on_ranks(rank, world_size):
    """Two clients on the first rank, one on the other."""
    found = {}
    with process_group():
        for name in FUNCTIONS:
            program, _, x, y = federated_mean(name)
            y = y[federated.local_slice(CLIENTS)]
            found[name] = program(x, y), grad(program)(x, y), tangent(program)(x, y)
    return found


def test_ranks_have_the_values_and_derivatives_of_the_definition(pool2):
    for found in pool2.run(on_ranks):
        for name, (value, gradient, along_factors) in found.items():
            _, definition, x, _ = federated_mean(name)
            torch.testing.assert_close(value, definition(x))
            torch.testing.assert_close(gradient, grad(definition)(x))
            torch.testing.assert_close(along_factors, grad(definition)(x) @ FACTORS)


@pytest.mark.slow("test_derivatives_are_those_of_the_definition")
@pytest.mark.parametrize("way", [lambda f: f, grad, tangent, hessian])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_constants_of_torch_compiled_as_one_graph(name, way):
    torch.compiler.reset()
    program, definition, x, y = federated_mean(name)
    compiled = torch.compile(way(program), backend="aot_eager", fullgraph=True)
    expected = grad(definition)(x) @ FACTORS if way is tangent else way(definition)(x)
    torch.testing.assert_close(compiled(x, y), expected)


@pytest.mark.parametrize("target", [0, -100])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4), (0, 3)])
def test_losses_with_weights_are_torchs(shape, target):
    """Where no target counts, too: of the mean that is NaN."""
    torch.manual_seed(0)
    x, y = torch.tensor([1.0, 2.0, 0.0]), torch.randn(CLIENTS, *shape)
    classes = torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), target)
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, SMOOTHING)):
        loss = functools.partial(
            functional.cross_entropy, target=classes, reduction=reduction, label_smoothing=smoothing
        )

        def program(x, loss=loss):
            return federated.map_fn(lambda x, y: loss(y, weight=x), (federated.broadcast(x), y))

        found, _ = jvp(federated.program(program, clients=CLIENTS), (x,), (x,))
        torch.testing.assert_close(found, torch.stack([loss(one, weight=x) for one in y]), equal_nan=True)


@pytest.mark.slow("test_attention_is_its_definition")
@pytest.mark.parametrize("kind", ["sdpa", "module"])
def test_compiled_as_one_graph(kind):
    torch.compiler.reset()
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    model = {name: value.detach() for name, value in module.named_parameters()}

    def of_client(model, x):
        if kind == "module":
            return functional_call(module, model, (x, x, x), {"need_weights": False})[0].square().mean()
        heads = x.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
        return (functional.scaled_dot_product_attention(heads, heads, heads).sum() * model["out_proj.weight"]).mean()

    @federated.program(clients=CLIENTS)
    def program(model, x):
        return federated.reduce_mean(federated.map_fn(grad(of_client), (federated.broadcast(model), x)))

    inputs = draw(BATCH, LENGTH, WIDTH)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(model, inputs), program(model, inputs))


@pytest.mark.slow("test_steps_on_the_weights_of_norms_can_be_differentiated")
@pytest.mark.parametrize("kind", NORMS)
def test_norms_compiled_as_one_graph(kind):
    torch.compiler.reset()
    _, program, x, y = program_with_steps(kind)
    gradient = grad(program)
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), gradient(x, y))
