"""torch.no_grad, writes into detached tensors, and functions with derivatives of their own, in graphs.

The oracle is torch itself: the client functions one after another, without any of ours.
"""

import random

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.torch_version import is_torch_at_least
from tests.distributed.worlds import SAME_TEST

W = torch.tensor([0.5, -1.5, 2.0, 0.25], dtype=torch.float64)
X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 1.5, -1.0, 2.0], [-0.75, 0.5, 2.5, 1.0]], dtype=torch.float64)


class Rounded(torch.autograd.Function):
    """Its derivative is 7."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 7


rounded = Rounded.apply


class Reversed(Rounded):
    @staticmethod
    def forward(x):
        return x.view_as(x)


class Same(Rounded):
    @staticmethod
    def forward(x):
        return x


class Dirty(Rounded):
    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])


class Enabled(Rounded):
    @staticmethod
    def forward(x):
        with torch.enable_grad():
            return x * 2


class Filled(Rounded):
    @staticmethod
    def forward(x):
        return torch.empty_like(x).copy_(x)


def constant(w, x):
    with torch.no_grad():
        c = w**2
    return (w * c * x).sum()


@torch.no_grad()
def target(w, x):
    return (w * x).tanh() + w.exp()


def by_decorator(w, x):
    return ((w * x - target(w, x)) ** 2).sum()


def enabled_again(w, x):
    with torch.no_grad():
        a = w * 3
        with torch.enable_grad():
            b = w * x * a
        c = b * w
    return (w * (a + b * 2 + c)).sum()


def inference(w, x):
    with torch.inference_mode():
        y = w.sin() * x
    return (w * y.clone()).sum()


def a_view(w, x):
    y = w * x
    with torch.no_grad():
        v = y.view(2, 2)
        rows = y.split(2)
    return (y * v.reshape(-1) * torch.cat([rows[1], rows[0] * 2])).sum() + (v.t() * w.view(2, 2)).sum()


def write(w, x):
    y = w * 2
    with torch.no_grad():
        y.clamp_(max=1.5)
    return (y * y * x).sum()


def write_into_a_view(w, x):
    y = w * x
    with torch.no_grad():
        y[1:].mul_(3)
        y.view(2, 2)[0] = x[:2] * w[2:]
    return (y * y).sum() + y[2] * w[0]


def write_into_a_view_from_before(w, x):
    y = w * x
    v = y[:2]
    with torch.no_grad():
        v.add_(w[2:])
    return (y**3).sum() + (v * v).sum()


def writes_twice(w, x):
    y = w * x
    with torch.no_grad():
        y.add_(w)
        y.mul_(0.5)
    y = y * w
    with torch.no_grad():
        y.sub_(x)
    return (y * y).sum()


def write_among_writes(w, x):
    y = w.clone()
    y.mul_(x)
    with torch.no_grad():
        y.add_(w.exp())
    y.mul_(w)
    return y.sum() + (y * y).sum()


def infinite(w, x):
    y = w * x
    with torch.no_grad():
        y.masked_fill_(x < 0, float("-inf"))
        y.mul_(0.5)
    return (torch.where(y.isinf(), torch.zeros_like(y), y) ** 2).sum()


def own_steps(w, x):
    p = w.clone()
    for _ in range(3):
        g = grad(lambda p: ((p * x).sum() - 1) ** 2)(p)
        with torch.no_grad():
            p.sub_(g, alpha=0.1)
    return (p * p * w).sum()


def out_argument(w, x):
    y, z = w * x, torch.empty_like(w)
    with torch.no_grad():
        torch.add(w, x, out=y)
        torch.mul(w, x, out=z)
    return (y * y * w).sum() + (z * w).sum()


def made_without(w, x):
    with torch.no_grad():
        t = torch.zeros_like(w)
        t[0] = w[0] * 5
        t += w * x
    return (w * t).sum()


def filled_with(w, x):
    with torch.no_grad():
        t = torch.zeros_like(w)
    t.add_(w * x)
    t[1] = w[2]
    return (t * t).sum()


def made_of_constants(w, x):
    t = torch.ones_like(w).cumsum(0)
    with torch.no_grad():
        t.mul_(w)
        t.detach().add_(1)
    t.add_(w)
    return (t * w * x).sum()


def detached_write(w, x):
    y = w * x
    y.detach().clamp_(max=1.0)
    return (y * y).sum()


def detached_write_of_values(w, x):
    y = w * x
    y.detach()[1:].add_(w[1:])
    return (y * y).sum()


def detached_under_no_grad(w, x):
    y = w * x
    with torch.no_grad():
        y.detach().view(2, 2)[1].mul_(w[:2])
    return (y * y * w).sum()


def detached_after_a_view_under_no_grad(w, x):
    y = w * x
    with torch.no_grad():
        d = y[:2].detach()
        d.mul_(2.0)
    return (y * y * w).sum() + (d * w[:2]).sum()


def detached_buffers(w, x):
    target = (w * x).detach()
    target.mul_(torch.tensor([2.0, 0.5, 1.0, -1.0], dtype=torch.float64))
    target.sub_(target.mean())
    target /= target.norm()
    total = torch.zeros_like(w)
    for part in (w, x, w * x):
        total += part.detach()
    return ((w - target) ** 2).sum() + (total * w).sum()


def values_with_derivatives_into_what_detach_gave(w, x):
    y = w * x
    d, v = y.detach(), y[:2].detach()
    d[2] = w[0] * 3
    v.add_(w[2:])
    e = d.view(2, 2).detach()
    e[0] *= w[:2]
    return (y * w).sum() + (d**2).sum() + (v * x[:2]).sum() + (e * w.view(2, 2)).sum()


def written_beside_what_detach_gave(w, x):
    y = w * x
    d = y.detach()
    y[1:].mul_(w[1:])
    e = d.detach()
    y.add_(1.0)
    return (y * d).sum() + (e * w).sum()


def own_parameter(w, x):
    p = torch.nn.Parameter(w.detach().clone())
    with torch.no_grad():
        p -= 0.1 * w * x
        p.view(2, 2)[0].mul_(w[:2])
    return (p.detach() * w).sum() + (p.detach() ** 2).sum()


def residuals(w, x):
    with torch.inference_mode():
        h = w * x
        h += x
        h *= w
    return (w * h.clone()).sum()


def function_without(w, x):
    with torch.no_grad():
        y = rounded(w * 1.3)
    return (y * w * x).sum() + (rounded(w).detach() * w).sum()


def as_integers(w, x):
    y = w * x
    with torch.no_grad():
        y.view(torch.int64).bitwise_and_(-(1 << 40))
    return (y * y).sum()


def renormalised(w, x):
    table = (w * x).view(2, 2)
    rows = functional.embedding(torch.tensor([1, 0, 1]), table, max_norm=1.0)
    return (rows**2 * rows.new_tensor([1.0, 2.0])).sum() + (table * w.view(2, 2)).sum()


def inner_derivative(w, x):
    def loss(p):
        with torch.no_grad():
            c = p.exp()
        return (p * c * x).sum()

    return (grad(loss)(w) * w).sum()


def derivative_without(w, x):
    with torch.no_grad():
        g = grad(lambda p: (p**3 * x).sum())(w)
    return (g * w).sum()


def in_forward_mode(w, x):
    with torch.no_grad():
        value, tangent = jvp(lambda p: p**3 * x, (w,), (x,))
    return (value * w + tangent * w * w).sum()


def integers(w, x):
    with torch.no_grad():
        order = (w * x).argsort()
        is_large = (w * x) > 0.5
        is_large[0] = True
    return (w[order] * x * is_large).sum()


def with_dropout_off(w, x):
    with torch.no_grad():
        y = functional.layer_norm(w * x, (4,))
        mean, var = torch.var_mean(w * x)[::-1]
    return (w * y).sum() + mean * w[0] + var * w[1]


def complex_numbers(w, x):
    with torch.no_grad():
        z = torch.complex(w, x)
    return (z * torch.complex(x, w)).abs().sum()


CLIENTS = [
    *(constant, by_decorator, enabled_again, inference, a_view, write, write_into_a_view, own_steps, infinite),
    *(write_into_a_view_from_before, writes_twice, write_among_writes, out_argument, made_without, filled_with),
    *(made_of_constants, detached_write, detached_write_of_values, detached_under_no_grad, renormalised, integers),
    *(detached_after_a_view_under_no_grad, detached_buffers, values_with_derivatives_into_what_detach_gave),
    *(written_beside_what_detach_gave, own_parameter, residuals, function_without, as_integers),
    *(inner_derivative, derivative_without, in_forward_mode, with_dropout_off, complex_numbers),
]
# Torch's vmap writes no client's values into what all clients share.
NOT_UNDER_VMAP = (
    *(out_argument, write_among_writes, own_steps, made_without, filled_with, detached_buffers, own_parameter),
    values_with_derivatives_into_what_detach_gave,
)
# Torch has no forward mode for out=, nor for a Function without jvp.
NOT_IN_FORWARD_MODE = (out_argument, function_without)
TANGENT = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)


def but_for(some):
    return [client for client in CLIENTS if client not in some]


def every_second(clients, first):
    """The others are slow; of two tests with another ``first`` one has each of them."""
    return [
        client if index % 2 == first else pytest.param(client, marks=SAME_TEST) for index, client in enumerate(clients)
    ]


def _oracle(client):
    return lambda w: sum(client(w, x) for x in X) / len(X)


def _program(client):
    @federated.program(clients=3)
    def loss(w, x):
        return federated.reduce_mean(federated.map_fn(client, (federated.broadcast(w), x)))

    return loss


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _gradient_by_autograd(function):
    w = W.clone().requires_grad_()
    return torch.autograd.grad(function(w), w)[0]


@pytest.mark.parametrize("client", every_second(CLIENTS, 0), ids=lambda client: client.__name__)
def test_a_graph_has_the_derivatives_of_torch(client):
    oracle, loss = _oracle(client), _program(client)
    graph = federated.trace(loss, W, X)
    of_graph = lambda w: graph(w, X)  # noqa: E731
    _close(of_graph(W), oracle(W))
    expected = _gradient_by_autograd(oracle)
    _close(_gradient_by_autograd(of_graph), expected)
    _close(grad(of_graph)(W), expected)
    _close(federated.trace(grad(loss), W, X)(W, X), expected)
    again = federated.trace(lambda w, x: graph(w, x), W, X)
    _close(grad(lambda w: again(w, X))(W), expected)


@pytest.mark.parametrize("client", every_second(but_for(NOT_IN_FORWARD_MODE), 1), ids=lambda client: client.__name__)
def test_and_those_of_forward_mode(client):
    oracle, loss = _oracle(client), _program(client)
    graph = federated.trace(loss, W, X)
    _, expected = jvp(oracle, (W,), (TANGENT,))
    _close(jvp(lambda w: graph(w, X), (W,), (TANGENT,))[1], expected)
    pushed = federated.trace(lambda w, x, t: jvp(lambda w: loss(w, x), (w,), (t,))[1], W, X, TANGENT)
    _close(pushed(W, X, TANGENT), expected)
    of_tangent = grad(lambda w: jvp(oracle, (w,), (TANGENT,))[1])(W)
    _close(grad(lambda w: pushed(w, X, TANGENT))(W), of_tangent)
    _close(grad(lambda w: jvp(lambda w: graph(w, X), (w,), (TANGENT,))[1])(W), of_tangent)


@pytest.mark.slow("test_some_random_programs")
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_and_the_second_ones(client):
    oracle, loss = _oracle(client), _program(client)
    graph, gradient = federated.trace(loss, W, X), federated.trace(grad(loss), W, X)
    expected = jacrev(grad(oracle))(W)
    _close(jacrev(lambda w: gradient(w, X))(W), expected)
    _close(jacrev(grad(lambda w: graph(w, X)))(W), expected)
    if client not in NOT_IN_FORWARD_MODE:
        _close(hessian(lambda w: graph(w, X))(W), hessian(oracle)(W))


@pytest.mark.parametrize("client", but_for(NOT_UNDER_VMAP), ids=lambda client: client.__name__)
def test_programs_that_are_run_agree(client):
    oracle, loss = _oracle(client), _program(client)
    expected = _gradient_by_autograd(oracle)
    _close(grad(loss)(W, X), expected)

    @federated.program(clients=3)
    def in_chunks(w, x):
        return federated.map_reduce(client, (federated.broadcast(w), x), reduce="mean", chunk_size=2)

    _close(grad(in_chunks)(W, X), expected)


def test_the_server_computes_without_a_gradient_too():
    def loss(w, x):
        with torch.no_grad():
            target = federated.reduce_mean(federated.map_fn(lambda w, x: w * x, (federated.broadcast(w), x)))
            shift = target * w
        moved = w.clone()
        with torch.no_grad():
            moved.mul_(shift)
        return ((w - target) ** 2 * moved).sum() + federated.reduce_sum(x * federated.broadcast(shift)).sum()

    def oracle(w):
        with torch.no_grad():
            target = sum(w * x for x in X) / 3
            shift = target * w
        moved = w.clone()
        with torch.no_grad():
            moved.mul_(shift)
        return ((w - target) ** 2 * moved).sum() + sum(x * shift for x in X).sum()

    program = federated.program(loss, clients=3)
    expected = _gradient_by_autograd(oracle)
    graph = federated.trace(program, W, X)
    for found in (grad(program)(W, X), grad(graph)(W, X), federated.trace(grad(program), W, X)(W, X)):
        _close(found, expected)


def test_clients_values_outside_of_maps():
    @federated.program(clients=3)
    def loss(w, x):
        values = federated.map_fn(lambda w, x: w * x, (federated.broadcast(w), x))
        with torch.no_grad():
            scale = values.abs() + 1
            values.mul_(2)
        return federated.reduce_sum(values * scale).sum()

    def oracle(w):
        total = 0
        for x in X:
            value = w * x
            with torch.no_grad():
                scale = value.abs() + 1
                value.mul_(2)
            total = total + (value * scale).sum()
        return total

    _close(grad(federated.trace(loss, W, X))(W, X), _gradient_by_autograd(oracle))


def test_a_batch_of_models():
    loss = _program(write_into_a_view)
    models = torch.stack([W, W * 0.5, -W])
    graph = federated.trace(loss, W, X)
    expected = torch.stack([grad(_oracle(write_into_a_view))(w) for w in models])
    _close(vmap(grad(lambda w: graph(w, X)))(models), expected)
    batched = federated.trace(vmap(grad(loss), (0, None)), models, X)
    _close(batched(models, X), expected)


def test_a_graph_with_them_is_saved_and_runs_where_clients_are_isolated(tmp_path):
    loss = _program(own_steps)
    graph = federated.trace(grad(loss), W, X)
    assert "bagua_federated.written" in str(federated.trace(loss, W, X))
    graph.save(tmp_path / "graph")
    loaded = federated.Graph.load(tmp_path / "graph")
    _close(loaded(W, X), graph(W, X))
    clients = [federated.Client(x=x) for x in X]
    found = federated.run_on(federated.IsolatedClients(clients), loaded, w=W)
    torch.testing.assert_close(found, graph(W, X), rtol=0, atol=1e-8)


def test_what_is_only_evaluated_has_one_node_for_it():
    def client(w, x):
        with torch.no_grad():
            y = w
            for _ in range(10):
                y = (y * x).tanh()
        return (y * w).sum()

    graph = str(federated.trace(_program(client), W, X))
    assert graph.count("bagua_federated.no_grad") == 1


@pytest.mark.skipif(not is_torch_at_least(2, 13), reason="Dynamo of torch 2.9 fails in its own frames")
def test_code_with_a_graph_in_it_is_compiled_around_it():
    torch.compiler.reset()
    graph = federated.trace(_program(write), W, X)
    compiled = torch.compile(lambda w, x: w - grad(graph)(w * 2, x), backend="eager")
    _close(compiled(W, X), W - grad(_oracle(write))(W * 2))


@pytest.mark.parametrize("function", [Rounded, Reversed, Same, Dirty, Enabled, Filled])
def test_functions_with_derivatives_of_their_own_are_refused_where_they_would_be_wrong(function):
    def client(w, x):
        return (function.apply(w * x) * x).sum()

    loss = _program(client)
    graph = federated.trace(loss, W, X)
    _close(graph(W, X), _oracle(client)(W))
    of_function = f"a derivative of what {function.__name__}, a torch.autograd.Function, computes"
    for derive in (lambda: grad(graph)(W, X), lambda: federated.trace(grad(loss), W, X)):
        with pytest.raises(InvalidArgument, match=of_function):
            derive()
    with pytest.raises(InvalidArgument, match=of_function):
        jvp(lambda w: graph(w, X), (W,), (TANGENT,))


def test_the_servers_functions_have_their_derivatives_where_torch_takes_them():
    def loss(w, x):
        return federated.reduce_sum(x * federated.broadcast(rounded(w * 1.3))).sum()

    program = federated.program(loss, clients=3)
    _close(federated.trace(grad(program), W, X)(W, X), X.sum(0) * 7 * 1.3)

    def by_autograd(w, x):
        v = w.detach().requires_grad_()
        (slope,) = torch.autograd.grad((rounded(v) * w).sum(), v)
        return (slope * federated.reduce_sum(x)).sum()

    program = federated.program(by_autograd, clients=3)
    _close(federated.trace(program, W, X)(W, X), (7 * W * X.sum(0)).sum())


def test_reentrant_checkpoints_have_the_derivatives_of_their_operators():
    def client(w, x):
        return (checkpoint(lambda w: (w * x).tanh() ** 2, w, use_reentrant=True) * w).sum()

    plain = _oracle(lambda w, x: ((w * x).tanh() ** 2 * w).sum())
    _close(grad(federated.trace(_program(client), W, X))(W, X), _gradient_by_autograd(plain))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_graphs_that_are_traced_under_no_grad_have_derivatives(mode):
    with mode():
        graph = federated.trace(_program(write), W, X)
    _close(grad(lambda w: graph(w, X))(W), _gradient_by_autograd(_oracle(write)))


def test_what_has_no_derivative_requires_none():
    def client(w, x):
        with torch.no_grad():
            return (w * x).sum()

    value = federated.trace(_program(client), W, X)(W.clone().requires_grad_(), X)
    assert not value.requires_grad


def test_writes_in_a_row_take_a_node_each():
    def client(w, x):
        y = w * x
        with torch.no_grad():
            for _ in range(10):
                y.mul_(0.9)
        return (y * y).sum()

    graph = str(federated.trace(_program(client), W, X))
    assert graph.count("bagua_federated.written") == 1 and graph.count("aten.clone") == 0, graph
    assert graph.count("aten.mul.Tensor") == 12


def test_a_helper_under_no_grad_is_no_function_with_a_derivative():
    class Decorated(torch.autograd.Function):
        @staticmethod
        @torch.no_grad()
        def forward(ctx, x):
            return x * 2

    graph = federated.trace(_program(by_decorator), W, X)
    _close(grad(lambda w: graph(w, X))(W), _gradient_by_autograd(_oracle(by_decorator)))
    assert issubclass(Decorated, torch.autograd.Function)


def test_setting_data_is_refused():
    def client(w, x):
        y = w * 2
        y.data = y.detach().clamp(max=1.0)
        return (y * x).sum()

    with pytest.raises(InvalidArgument, match=r"sets .data of a tensor of shape \[4\], which graphs do not have"):
        federated.trace(_program(client), W, X)
    with pytest.raises(
        InvalidArgument, match=r"calls detach_\(\) of a tensor of shape \[4\], which graphs do not have"
    ):
        federated.trace(_program(lambda w, x: ((w * x).detach_() * w).sum()), W, X)


MODES = {"followed": torch.enable_grad, "no_grad": torch.no_grad}
NEW = (
    lambda a, b: a * b,
    lambda a, b: (a + b).sin(),
    lambda a, b: a.exp().clamp(max=3.0) + b,
    lambda a, b: torch.cat([a, b])[1 : 1 + len(a)],
    lambda a, b: grad(lambda v: (v**2 * b.detach()).sum())(a),
    lambda a, b: torch.zeros_like(a),
    lambda a, b: torch.linspace(0.5, 1.5, len(a), dtype=a.dtype),
)
WRITES = (
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(0.5),
    lambda a, b: a.mul_(b),
    lambda a, b: a.copy_(b),
    lambda a, b: a.clamp_(max=1.0),
    lambda a, b: a.detach().clamp_(max=0.8),
    lambda a, b: a.detach()[:1].mul_(b[:1]),
)
VIEWS = (
    lambda a, half: a[:half],
    lambda a, half: a[half - 1 :],
    lambda a, half: a.view(-1),
    lambda a, half: a.detach(),
    lambda a, half: a[:half].detach(),
)


def random_client(seed):
    """Of steps that make tensors, views of them, and write into them, each with or without derivatives."""
    draw = random.Random(seed)
    steps = []
    for _ in range(draw.randint(3, 10)):
        step = draw.choice([NEW, NEW, WRITES, WRITES, VIEWS])
        steps.append(
            (draw.choice(["followed", "followed", "no_grad"]), draw.choice(step), step, draw.random(), draw.random())
        )

    def client(w, x):
        made = [w * 1.0, x * w]
        for mode, function, kind, first, second in steps:
            a, b = made[int(first * len(made))], made[int(second * len(made))]
            with MODES[mode]():
                if kind is VIEWS:
                    result = function(a, 1 + len(a) // 2)
                else:
                    result = function(a, torch.cat([b] * 4)[: len(a)])
            if kind is not WRITES:
                made.append(result)
        return sum((one * (index + 1) * 0.3).sin().sum() for index, one in enumerate(made)) * w.sum()

    return client


def check_random_client(seed):
    """Whether torch itself takes the program; some write into what a derivative needs."""
    client = random_client(seed)
    oracle, loss = _oracle(client), _program(client)

    def of_tangent(function):
        return grad(lambda w: jvp(function, (w,), (TANGENT,))[1])

    derivatives = {
        "reverse": lambda function: grad(function)(W),
        "forward": lambda function: jvp(function, (W,), (TANGENT,))[1],
        "second": lambda function: jacrev(grad(function))(W),
        "forward over reverse": lambda function: jvp(grad(function), (W,), (TANGENT,))[1],
        "reverse over forward": lambda function: of_tangent(function)(W),
    }
    graph, num_taken = federated.trace(loss, W, X), 0
    for name, derivative in derivatives.items():
        try:
            expected = derivative(oracle)
        except RuntimeError:
            continue
        found = derivative(lambda w: graph(w, X))
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9), f"seed {seed}, {name}: {found}, not {expected}"
        num_taken += 1
        if name == "reverse":
            _close(federated.trace(grad(loss), W, X)(W, X), expected)
    _close(graph(W, X), oracle(W))
    return num_taken > 0


def test_some_random_programs():
    assert sum(map(check_random_client, range(3))) >= 2


@pytest.mark.slow("test_some_random_programs")
@pytest.mark.parametrize("part", range(12))
def test_random_programs(part):
    assert sum(map(check_random_client, range(1000 + 25 * part, 1025 + 25 * part))) >= 18
