"""The one rule by which operators over lists of tensors have derivatives, under every nesting of transforms.

It stands on private names of torch: each torch that is supported must give these numbers.
"""

import itertools

import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from bagua.federated.verbs.linear import Linear, define
from bagua.federated.verbs.operators import call
from bagua.federated.verbs.placement import local_placement
from tests.distributed.worlds import fast_in

CLIENTS = local_placement("tried", 3)
Y = torch.tensor([1.0, -2.0, 3.0])
ONE = torch.ones(())


def loss(x):
    """mean of sin(x y) + the sum of x ** 3 over three clients, by the operators alone."""
    (shared,) = call("broadcast", [x], CLIENTS.key)
    values = shared.expand(3)
    (mean,) = call("reduce_mean", [torch.sin(values * Y).sum(0)], CLIENTS.key)
    (total,) = call("reduce_sum", [(values**3).sum(0)], CLIENTS.key)
    return mean + total


def first(x):
    return (Y * torch.cos(x * Y)).mean() + 9 * x**2


def second(x):
    return -(Y**2 * torch.sin(x * Y)).mean() + 18 * x


def third(x):
    return -(Y**3 * torch.cos(x * Y)).mean() + 18


def by_autograd(f):
    def derivative(x):
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    return derivative


def forward(f):
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]


def batched(f):
    return lambda x: vmap(f)(x.expand(2))[1]


WAYS = {"grad": grad, "jvp": forward, "jacfwd": jacfwd, "jacrev": jacrev}


@fast_in(
    "outer, inner",
    [*itertools.product(["grad", "jvp"], ["grad", "jvp"]), ("jacfwd", "jacrev"), ("jacrev", "jacfwd")],
    list(itertools.product(WAYS, WAYS)),
)
def test_derivatives_in_every_nesting(outer, inner):
    x = torch.tensor(0.5)
    once = WAYS[inner](loss)
    twice = WAYS[outer](once)
    torch.testing.assert_close(once(x), first(x))
    torch.testing.assert_close(twice(x), second(x))
    torch.testing.assert_close(batched(twice)(x), second(x))
    torch.testing.assert_close(grad(twice)(x), third(x))


def test_derivatives_of_autograd():
    x = torch.tensor(0.5)
    torch.testing.assert_close(by_autograd(loss)(x).detach(), first(x))
    torch.testing.assert_close(by_autograd(by_autograd(loss))(x.requires_grad_()).detach(), second(x.detach()))


def test_names_and_options_reach_every_kernel():
    """A value without a cotangent or a tangent is left out of what the transpose and the tangent are given."""
    library = torch.library.Library("bagua_tests", "DEF")
    seen = []

    def scaled(title):
        def compute(values, names, key, options):
            seen.append((title, names, key, options))
            return [value * options[0] for value in values]

        return compute

    operator = define(library, "scaled", Linear(scaled("forward"), scaled("transpose"), tangent=scaled("tangent")))
    name = 'a "quoted" \\ name | of\nlines'
    x, y = torch.tensor(2.0), torch.tensor(3.0)

    def of_second(y):
        return operator([x, y], [name, "b"], "key", [5])[1]

    assert grad(of_second)(y) == 5
    assert jvp(of_second, (y,), (ONE,))[1] == 5
    assert seen[:2] == [("forward", [name, "b"], "key", [5]), ("transpose", ["b"], "key", [5])]
    assert seen[-1] == ("tangent", ["b"], "key", [5])
    assert vmap(lambda y: operator([x, y], [], "", [2])[1])(torch.ones(3)).tolist() == [2.0] * 3
