"""Substitutes of torch's operators in client functions, against definitions in loops over clients.

The first part is about torch alone: each bug for which the table has an entry, as a strict xfail. Where one of them
passes, torch has mended it, and its entry can go.
"""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bagua import federated
from bagua.errors import InvalidArgument
from tests.distributed.worlds import SAME_TEST

CLIENTS, SAMPLES, CHANNELS, POINTS, EPS = 3, 2, 3, 4, 1e-2
torch.manual_seed(0)
Y = torch.randn(CLIENTS, SAMPLES, CHANNELS, POINTS, dtype=torch.float64)
W = torch.randn(12, dtype=torch.float64) * 0.4 + 1  # a factor of the input, a weight and a bias
T = torch.randn(12, dtype=torch.float64)
MEAN, VAR = torch.tensor([0.5, -1.0, 0.0]).double(), torch.tensor([2.0, 1.0, 0.5]).double()


def standardized(x, dims):
    centered = x - x.mean(dims, keepdim=True)
    return centered / (centered.square().mean(dims, keepdim=True) + EPS).sqrt()


def affine(x, w, b):
    return x * w[:, None] + b[:, None]


def select(x, w, b):
    return torch.select_scatter(x, (x * w[:, None])[0].sin(), 0, 1)


OPERATORS = {  # torch's, and its definition, of an input [SAMPLES, CHANNELS, POINTS]
    "layer norm": (
        lambda x, w, b: functional.layer_norm(x.mT, (CHANNELS,), w, b, EPS).mT,
        lambda x, w, b: affine(standardized(x, (1,)), w, b),
    ),
    "batch norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True, eps=EPS),
        lambda x, w, b: affine(standardized(x, (0, 2)), w, b),
    ),
    "batch norm, evaluated": (
        lambda x, w, b: torch.batch_norm(x, w, b, MEAN, VAR, False, 0.1, EPS, False),
        lambda x, w, b: affine((x - MEAN[:, None]) / (VAR[:, None] + EPS).sqrt(), w, b),
    ),
    "instance norm": (
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b, eps=EPS),
        lambda x, w, b: affine(standardized(x, (2,)), w, b),
    ),
    "prelu": (lambda x, w, b: functional.prelu(x, w), lambda x, w, b: torch.where(x > 0, x, x * w[:, None])),
    "index_fill": (
        lambda x, w, b: x * torch.zeros(4, dtype=x.dtype).index_fill(0, torch.tensor([0, 2]), w.sum()),
        lambda x, w, b: x * torch.tensor([1.0, 0, 1, 0]).double() * w.sum(),
    ),
    "roll": (lambda x, w, b: x * (x.sum() * w.sum()).roll(1), lambda x, w, b: x * (x.sum() * w.sum())),
    "select_scatter": (select, lambda x, w, b: torch.stack([x[0], (x * w[:, None])[0].sin()])),
}
NORMS = ["layer norm", "batch norm", "instance norm"]


def loss_of(operator):
    """Returns a loss of a client's rows ``y`` and 12 numbers, of which the operator has ten."""

    def loss(p, y):
        result = operator(y * p[:4], p[4:7], p[7:10])
        return (
            result * torch.linspace(-1, 2, result.numel(), dtype=p.dtype).reshape(result.shape)
        ).sin().sum() * y.sum()

    return loss


def through_a_step(loss):
    return lambda p, y: loss(p - 0.05 * grad(loss)(p, y), y)


def along(f):
    return lambda p: jvp(f, (p,), (T,))[1]


def reverse_twice(f):
    return grad(lambda p: grad(f)(p) @ T)


WAYS = {
    "value": lambda f: f,
    "grad": grad,
    "jvp": along,
    "grad of grad": reverse_twice,
    "grad of jvp": lambda f: grad(along(f)),
    "jvp of jvp": lambda f: along(along(f)),
    "models": lambda f: lambda p: vmap(grad(f))(torch.stack([p, 0.5 * p])),
}
PROGRAMS = {
    "two verbs": lambda loss, p, y: federated.reduce_mean(federated.map_fn(loss, (federated.broadcast(p), y))),
    "node": lambda loss, p, y: federated.map_reduce(loss, (federated.broadcast(p), y), chunk_size=2),
    "traced": lambda loss, p, y: federated.reduce_mean(federated.map_fn(loss, (federated.broadcast(p), y))),
}


def derivative(how, way, loss):
    program = federated.program(lambda p, y: PROGRAMS[how](loss, p, y), clients=CLIENTS)
    function = lambda p, y: WAYS[way](lambda p: program(p, y))(p)  # noqa: E731
    return federated.trace(function, W, Y)(W, Y) if how == "traced" else function(W, Y)


def expected(name, way, local=through_a_step):
    loss = local(loss_of(OPERATORS[name][1]))
    return WAYS[way](lambda p: sum(loss(p, y) for y in Y) / CLIENTS)(W)


# ---- torch's bugs


def mean_under_vmap(name):
    loss = through_a_step(loss_of(OPERATORS[name][0]))
    return lambda p: vmap(loss, (None, 0))(p, Y).mean(0)


def sum_of_embeddings(rows):
    """Row 0 is the padding, so it has no gradient."""
    indices = torch.tensor([[0, 1], [1, 0]])
    return vmap(lambda w, i: functional.embedding(i, w, 0).sum())(rows.expand(2, *rows.shape), indices).sum()


BUGS = {
    **{
        f"{name}, {way}": lambda name=name, way=way: (WAYS[way](mean_under_vmap(name))(W), expected(name, way))
        for name in ("layer norm", "batch norm", "instance norm")
        for way in ("grad", "jvp", "grad of grad")
    },
    "statistics": lambda: (  # which it writes into
        torch.tensor(torch.ops.aten.native_batch_norm.default._schema.is_mutable),
        torch.tensor(True),
    ),
    "prelu": lambda: (WAYS["models"](mean_under_vmap("prelu"))(W), expected("prelu", "models")),
    "embedding": lambda: (grad(sum_of_embeddings)(MEAN[:, None])[0], torch.zeros_like(MEAN[:1])),
    "index_fill": lambda: (mean_under_vmap("index_fill")(W), expected("index_fill", "value")),
    "roll": lambda: (vmap(torch.roll, (0, None))(Y[:, 0, 0, 0], 1), Y[:, 0, 0, 0]),
    "select_scatter": lambda: (grad(mean_under_vmap("select_scatter"))(W), expected("select_scatter", "grad")),
    "data": lambda: (grad(lambda p: grad(lambda q: (q.data * q).sum())(p).sum())(MEAN), torch.zeros_like(MEAN)),
    "weights of classes": lambda: (
        jvp(lambda w: functional.cross_entropy(Y[0], torch.tensor([[0, 2, 1, 1], [1, 1, 2, 0]]), w), (VAR,), (MEAN,))[
            1
        ],
        weighted_slope(),
    ),
}


def weighted_slope():
    targets = torch.tensor([[0, 2, 1, 1], [1, 1, 2, 0]])
    logs = -Y[0].log_softmax(1).gather(1, targets[:, None])[:, 0]
    return jvp(lambda w: (logs * w[targets]).sum() / w[targets].sum(), (VAR,), (MEAN,))[1]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.xfail(strict=True, reason="a bug of torch: once it passes, the entry of the table can go")
def test_a_bug_of_torch(bug):
    found, right = BUGS[bug]()
    torch.testing.assert_close(found, right)


# ---- what client functions compute


@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_local_gradients(name):
    for local in (lambda loss: loss, through_a_step):
        loss = local(loss_of(OPERATORS[name][0]))
        torch.testing.assert_close(derivative("two verbs", "value", loss), expected(name, "value", local))


MODES = [(way, how) for way in WAYS if way != "value" for how in PROGRAMS]
FAST = {
    "layer norm": [("grad", "two verbs"), ("grad of grad", "node"), ("grad of jvp", "two verbs"), ("models", "node")],
    "batch norm": [("grad", "node"), ("jvp of jvp", "two verbs")],
    "instance norm": [("jvp", "node")],
    "prelu": [("models", "two verbs")],
    "select_scatter": [],
    "index_fill": [],
}


@pytest.mark.parametrize(
    ("name", "way", "how"),
    [
        pytest.param(name, *mode, marks=() if mode in FAST.get(name, ()) else SAME_TEST)
        for name in FAST
        for mode in MODES
    ],
)
def test_derivatives_through_a_local_step(name, way, how):
    """In every mix of modes: those of the second order through a step are the operator's third ones."""
    found = derivative(how, way, through_a_step(loss_of(OPERATORS[name][0])))
    torch.testing.assert_close(found, expected(name, way), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_halves_stay_halves(name):
    norm, definition = OPERATORS[name]
    x = Y.bfloat16()
    w, b = W[4:7].bfloat16(), W[7:10].bfloat16()

    @federated.program(clients=CLIENTS)
    def program(w, b, x):
        return federated.map_fn(lambda x, w, b: norm(x, w, b), (x, federated.broadcast(w), federated.broadcast(b)))

    found = program(w, b, x)
    assert found.dtype is torch.bfloat16
    right = torch.stack([definition(one, w.double(), b.double()) for one in x.double()])
    torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("how", ["run", "traced"])
def test_batch_norm_moves_running_statistics(how):
    def client(mean, var, x):
        mean, var = mean.clone(), var.clone()
        functional.batch_norm(x, mean, var, training=True, momentum=0.3)
        return mean, var

    @federated.program(clients=CLIENTS)
    def program(mean, var, x):
        return federated.map_fn(client, (federated.broadcast(mean), federated.broadcast(var), x))

    run = federated.trace(program, MEAN, VAR, Y) if how == "traced" else program
    for index, (mean, var) in enumerate(zip(*run(MEAN, VAR, Y), strict=True)):
        torch.testing.assert_close(mean, 0.7 * MEAN + 0.3 * Y[index].mean((0, 2)))
        torch.testing.assert_close(var, 0.7 * VAR + 0.3 * Y[index].var((0, 2)))


TARGETS = torch.tensor([0, 2])


def test_what_torch_takes_for_a_constant_is_refused_in_forward_mode():
    def client(w, y):
        return functional.cross_entropy(y[:, :, 0], TARGETS, w.exp())

    @federated.program(clients=CLIENTS)
    def program(w, y):
        return federated.reduce_mean(federated.map_fn(client, (federated.broadcast(w), y)))

    torch.testing.assert_close(program(MEAN, Y), sum(client(MEAN, y) for y in Y) / CLIENTS)
    with pytest.raises(InvalidArgument, match="cross_entropy in forward mode, where torch takes its .* for a constant"):
        jvp(lambda w: program(w, Y), (MEAN,), (VAR,))


def test_weights_of_classes_from_around_the_function_are_constants():
    def client(w, y):
        return functional.cross_entropy(y[:, :, 0] * w, TARGETS, VAR)

    @federated.program(clients=CLIENTS)
    def program(w, y):
        return federated.reduce_mean(federated.map_fn(client, (federated.broadcast(w), y)))

    _, found = jvp(lambda w: program(w, Y), (MEAN,), (VAR,))
    torch.testing.assert_close(found, grad(program)(MEAN, Y) @ VAR)


# ---- attention is torch's


def attend(module, model, x):
    return functional_call(module, model, (x, x, x), {"need_weights": False})[0].square().mean()


def test_attention_has_all_derivatives_by_torchs_switch():
    """The fused kernel has one gradient, and torch raises for others; docs/federated.md names the switch."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    model = {name: value.detach() for name, value in module.named_parameters()}

    def loss(rate, x):
        gradient = grad(lambda model: attend(module, model, x))(model)
        return attend(module, {name: value - rate * gradient[name] for name, value in model.items()}, x)

    @federated.program(clients=CLIENTS)
    def after_a_step(rate):
        return federated.reduce_mean(federated.map_fn(loss, (federated.broadcast(rate), Y)))

    rate = torch.tensor(0.5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="not implemented|not support"):
        hessian(after_a_step)(rate)
    with sdpa_kernel(SDPBackend.MATH):
        slope = [sum(loss(rate + d, y) for y in Y) / CLIENTS for d in (-1e-5, 1e-5)]
        expected = (slope[1] - slope[0]) / 2e-5
        torch.testing.assert_close(grad(after_a_step)(rate), expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(jvp(after_a_step, (rate,), (rate,))[1], expected * rate, rtol=1e-6, atol=1e-9)


@pytest.mark.slow("test_derivatives_through_a_local_step")
@pytest.mark.parametrize("name", NORMS)
def test_compiled_as_one_graph(name):
    torch.compiler.reset()
    loss = through_a_step(loss_of(OPERATORS[name][0]))
    program = federated.program(lambda p, y: PROGRAMS["two verbs"](loss, p, y), clients=CLIENTS)
    compiled = torch.compile(grad(program), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(W, Y), expected(name, "grad"), rtol=1e-6, atol=1e-6)
