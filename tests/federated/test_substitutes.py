"""What client functions compute instead of torch's, against definitions in plain loops: attention."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.func import functional_call, grad, jvp
from torch.nn import functional

from bagua import federated

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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.int64)),
        lambda x: torch.select_scatter(x[0], x[0, 0], 0, 4),
        lambda x: torch.select_scatter(x[0], x[0, 0], 2, 0),
        lambda x: functional.embedding(torch.tensor([1]), x[0], padding_idx=7),
    ],
)
def test_what_torch_refuses_is_refused(function):
    program = federated.program(lambda x: federated.map_fn(function, x), clients=CLIENTS)
    with pytest.raises((RuntimeError, IndexError, AssertionError)):
        program(torch.randn(CLIENTS, 2, 4, 3))


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
