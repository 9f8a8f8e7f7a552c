"""Client functions that run again for their derivatives: with the same numbers, or not at all.

The oracle is a loop over clients that calls each function once.
"""

import itertools

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional

from bagua import federated
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group
from tests.distributed.worlds import SAME_TEST

W = torch.tensor([0.5, -1.5, 2.0, 0.25], dtype=torch.float64)
X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 1.5, -1.0, 2.0], [-0.75, 0.5, 2.5, 1.0]], dtype=torch.float64)
ROWS = list(torch.arange(12.0, dtype=torch.float64).reshape(3, 4).cos())


def in_a_loop(function, w, x):
    return sum(function(w, row) for row in x) / 3


def node(function, w, x):
    return federated.map_reduce(function, (federated.broadcast(w), x), chunk_size=2)


def two_verbs(function, w, x):
    return federated.reduce_mean(federated.map_fn(function, (federated.broadcast(w), x)))


def two_verbs_in_chunks(function, w, x):
    return federated.reduce_mean(federated.map_fn(function, (federated.broadcast(w), x), chunk_size=2))


def program_of(loss, mean):
    """The loss, which has `mean` for the mean of a function over clients."""
    return federated.program(lambda w, x: loss(lambda function, w: mean(function, w, x), w), clients=3)


MEANS = {"node": node, "two verbs": two_verbs, "in chunks": two_verbs_in_chunks}


def gradient_of(way, loss):
    if way == "traced":
        return federated.trace(grad(program_of(loss, two_verbs)), W, X)(W, X)
    w = W.clone().requires_grad_()
    return torch.autograd.grad(program_of(loss, MEANS[way])(w, X), w)[0]


def a_loops_number(reduced, w):
    total = 0
    for k in (1.0, 2.0, 3.0):
        total = total + reduced(lambda w, x: (w * x * k).sin().sum(), w)  # noqa: B023
    return total


def a_counter(reduced, w):
    calls = []

    def client(w, x):
        calls.append(1)
        return (w * x * len(calls)).sin().sum()

    return reduced(client, w)


def a_tensor_that_is_written(reduced, w):
    scale = torch.ones(4, dtype=torch.float64)
    result = reduced(lambda w, x: (w * x * scale).sin().sum(), w)
    scale.mul_(2)
    return result


def a_buffer_that_is_replaced(reduced, w):
    module = torch.nn.Module()
    module.register_buffer("scale", torch.ones(4, dtype=torch.float64))
    result = reduced(lambda w, x: (w * x * module.scale).sin().sum(), w)
    module.scale = module.scale * 2
    return result


CHANGED = (a_loops_number, a_counter, a_tensor_that_is_written, a_buffer_that_is_replaced)


# But for a tensor that is written, which a trace holds as it is in the end, in the value as in the derivative.
@pytest.mark.parametrize(
    ("way", "loss"),
    [*itertools.product(["node"], CHANGED), *itertools.product(["traced"], CHANGED[:2])],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_function_that_has_changed_since_is_refused(way, loss):
    with pytest.raises(InvalidArgument, match="runs again for its derivative, and computes something else"):
        gradient_of(way, loss)


@pytest.mark.parametrize("loss", [a_loops_number, a_buffer_that_is_replaced], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("way", ["two verbs", "in chunks"])
def test_map_fn_has_run_already_when_its_function_changes(way, loss):
    """Torch itself refuses the tensor that is written into."""
    w = W.clone().requires_grad_()
    expected = torch.autograd.grad(loss(lambda function, w: in_a_loop(function, w, X), w), w)[0]
    torch.testing.assert_close(gradient_of(way, loss), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient_of(way, a_tensor_that_is_written)


def test_a_function_that_changes_between_its_derivatives_is_refused():
    scale = [1.0]
    w = W.clone().requires_grad_()
    value = program_of(lambda reduced, w: reduced(lambda w, x: (w * x * scale[0]).sin().sum(), w), node)(w, X)
    (gradient,) = torch.autograd.grad(value, w, create_graph=True)
    scale[0] = 2.0
    with pytest.raises(InvalidArgument, match="runs again for its derivative, and computes something else"):
        torch.autograd.grad(gradient.sum(), w)


def test_a_function_that_counts_its_runs_in_a_tensor_is_refused():
    def counts(reduced, w):
        num_runs = torch.zeros((), dtype=torch.int64)
        return reduced(lambda w, x: (w * x + 0 * num_runs.add_(1)).sin().sum(), w)

    with pytest.raises(InvalidArgument, match="writes into a tensor from around it, and runs again"):
        gradient_of("node", counts)


def a_tensor_that_is_kept(reduced, w):
    """Modules keep such tensors: positions, for example."""
    kept = []

    def client(w, x):
        if not kept:
            kept.append(torch.arange(4, dtype=w.dtype))
        return (w * x * kept[0]).sin().sum()

    return reduced(client, w)


def test_a_tensor_that_is_kept_under_a_transform_is_refused():
    with pytest.raises(InvalidArgument, match="a tensor that it made and kept in an earlier run"):
        grad(program_of(a_tensor_that_is_kept, node))(W, X)
    w = W.clone().requires_grad_()
    expected = torch.autograd.grad(a_tensor_that_is_kept(lambda function, w: in_a_loop(function, w, X), w), w)[0]
    torch.testing.assert_close(gradient_of("node", a_tensor_that_is_kept), expected)


def defaults(reduced, w):
    total = 0
    for k, row in zip((1.0, 2.0, 3.0), ROWS, strict=True):
        total = total + reduced(lambda w, x, k=k, row=row: (w * x * k * row).sin().sum(), w)
    return total


def derivatives_within(reduced, w):
    """Gradients are born within; those of what no client has differ as objects each time that they are computed."""

    def client(w, x):
        own = grad(lambda w: (w**3).sum())(w)
        step = grad(lambda w: (w * x).sin().sum())(w)
        return ((w - 0.1 * (own + step)) * x).cos().sum() * ROWS[0].sum()

    return reduced(client, w)


def autocast_around(reduced, w):
    """Without it, where the derivative is taken, dtypes would not match."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return reduced(
            lambda w, x: ((w.float().view(2, 2) @ x.float().view(2, 2)) @ ROWS[0].bfloat16().view(2, 2)).sum(), w
        ).double()


UNCHANGED = (defaults, derivatives_within, autocast_around)


@pytest.mark.parametrize("loss", UNCHANGED, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    "way", ["node", "two verbs", *(pytest.param(way, marks=SAME_TEST) for way in ("in chunks", "traced"))]
)
def test_a_function_that_has_not_changed_has_its_derivative(way, loss):
    def in_loops(w):
        return loss(lambda function, w: in_a_loop(function, w, X), w)

    rounding = 2**-6 if loss is autocast_around else 1e-7
    torch.testing.assert_close(gradient_of(way, loss), grad(in_loops)(W), rtol=rounding, atol=rounding)
    if way == "node":
        found = hessian(program_of(loss, node))(W, X)
        torch.testing.assert_close(found, hessian(in_loops)(W), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_data_is_a_constant_in_all_derivatives(mean):
    """As detach is, which is what torch computes where no transform is around another one."""
    program = program_of(lambda reduced, w: reduced(lambda w, x: (w.data * w * x).sin().sum(), w), mean)
    expected = hessian(lambda w: in_a_loop(lambda w, x: (w.detach() * w * x).sin().sum(), w, X))(W)
    torch.testing.assert_close(hessian(program)(W, X), expected)


# ---- random numbers


def dropped(w, x):
    """A third of its gradient times w is the value, and a sixth of its Hessian: where all draw the same."""
    return (functional.dropout(w * x, 0.5) ** 3).sum()


def cubic(randomness, w):
    return federated.map_reduce(dropped, (federated.broadcast(w), X), chunk_size=2, randomness=randomness)


def seeded(compute):
    torch.manual_seed(3)
    return compute()


def by_autograd(function):
    def derivative(w):
        w = w.detach().clone().requires_grad_()
        return torch.autograd.grad(function(w), w)[0]

    return derivative


SIX_TIMES_THE_VALUE = {
    "autograd": lambda f: by_autograd(f)(W) @ W * 2,
    "jvp": lambda f: jvp(f, (W,), (W,))[1] * 2,
    "hessian": lambda f: jacfwd(jacrev(f), randomness="same")(W) @ W @ W,
}


@pytest.mark.parametrize("way", SIX_TIMES_THE_VALUE)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_derivatives_draw_what_the_value_drew(randomness, way):
    function = federated.program(lambda w: cubic(randomness, w), clients=3)
    expected = seeded(lambda: function(W)) * 6
    torch.testing.assert_close(seeded(lambda: SIX_TIMES_THE_VALUE[way](function)), expected)
    assert expected != 0


def test_batches_of_models_draw_what_their_values_drew():
    randomness = "different"
    function = federated.program(lambda w: cubic(randomness, w), clients=3)
    models = torch.stack([W, 2 * W])
    values = seeded(lambda: vmap(function, randomness=randomness)(models))
    found = seeded(lambda: vmap(grad(function), randomness=randomness)(models))
    torch.testing.assert_close((found * models).sum(1), 3 * values)


def on_ranks(rank, size, randomness):
    with process_group():
        x = X[federated.local_slice(3)]
        function = federated.program(
            lambda w: federated.map_reduce(dropped, (federated.broadcast(w), x), randomness=randomness), clients=3
        )
        for _ in range(2):  # with other numbers each time
            w = W.clone().requires_grad_()
            value = function(w)
            torch.rand(3)  # what is drawn between is not drawn again
            state = torch.get_rng_state()
            (found,) = torch.autograd.grad(value, w)
            torch.testing.assert_close(found @ W, 3 * value.detach())
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_on_ranks_too(pool2, randomness):
    pool2.run(on_ranks, args=(randomness,))
