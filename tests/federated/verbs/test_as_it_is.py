"""Client functions that run as they are: modules, optimizers of torch, branches on values; the oracle is a loop.

On any number of ranks, in a traced program, and where clients are somewhere else.
"""

import functools

import pytest
import torch
from torch.nn import functional

from bagua import federated
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group

NUM = 5
INPUTS = torch.linspace(-2, 2, NUM * 6 * 4).sin().view(NUM, 6, 4)
LABELS = (torch.arange(NUM * 6) ** 2 % 3).view(NUM, 6)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0, 1.5])
MASK = torch.tensor([True, False, True, True, False])


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        )


STATE = dict(module().state_dict())


def train(state, inputs, labels):
    """What a user has: a module, an optimizer, batches, an end that depends on values."""
    model = module()
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in inputs.view(3, 2, 4), inputs.flip(0).view(3, 2, 4):
        for part, of_part in zip(batch, labels.view(3, 2), strict=True):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(part), of_part)
            loss.backward()
            optimizer.step()
        if loss.item() < 0.3:
            break
    return {name: leaf.float() for name, leaf in model.state_dict().items()}, loss


def of_clients(seed):
    """Each client's results, by a loop that draws as documented: seeds of a number drawn before and the client."""
    from bagua.federated.verbs.randomness import seed_of

    torch.manual_seed(seed)
    drawn = int(torch.randint(2**62, ()))
    results = []
    for client in range(NUM):
        torch.manual_seed(seed_of(drawn, client))
        results.append(train({name: leaf.clone() for name, leaf in STATE.items()}, INPUTS[client], LABELS[client]))
    return results


def averages(seed):
    """Means, weighted means over those that take part, and sums, by loops."""
    results = of_clients(seed)
    models, losses = [model for model, _ in results], [loss.detach() for _, loss in results]
    there = [client for client in range(NUM) if MASK[client]]
    total = sum(float(WEIGHTS[client]) for client in there)
    return {
        "mean": {name: sum(model[name] for model in models) / NUM for name in STATE},
        "weighted": {
            name: sum(float(WEIGHTS[client]) * models[client][name] for client in there) / total for name in STATE
        },
        "mean_of_some": {name: sum(models[client][name] for client in there) / len(there) for name in STATE},
        "sum_of_some": sum(losses[client] for client in there),
        "losses": torch.stack(losses),
    }


def programs(num_local=None):
    """The same by verbs, and by map_reduce."""
    mapped = {"vectorize": False}

    def by_verbs(state, inputs, labels, weights, mask):
        models, losses = federated.map_fn(train, (federated.broadcast(state), inputs, labels), **mapped)
        ones = torch.ones(len(weights))
        return {
            "mean": federated.reduce_mean(models),
            "weighted": federated.reduce_weighted_mean(models, weights, mask=mask),
            "mean_of_some": federated.reduce_weighted_mean(models, ones, mask=mask),
            "sum_of_some": federated.reduce_sum(losses * mask),
            "losses": losses,
        }

    def model_of(state, inputs, labels):
        return train(state, inputs, labels)[0]

    def loss_of(state, inputs, labels):
        return train(state, inputs, labels)[1]

    def weighted(state, inputs, labels, weight):
        return train(state, inputs, labels)[0], weight

    def by_nodes(kind):
        def run(state, inputs, labels, weights, mask):
            start = federated.broadcast(state)
            if kind == "mean":
                return federated.map_reduce(model_of, (start, inputs, labels), **mapped)
            if kind == "weighted":
                arguments = (start, inputs, labels, weights)
                return federated.map_reduce(weighted, arguments, reduce="weighted_mean", mask=mask, **mapped)
            if kind == "mean_of_some":
                return federated.map_reduce(model_of, (start, inputs, labels), mask=mask, **mapped)
            return federated.map_reduce(loss_of, (start, inputs, labels), reduce="sum", mask=mask, **mapped)

        return federated.program(run, clients=NUM, num_local=num_local)

    kinds = ("mean", "weighted", "mean_of_some", "sum_of_some")
    return federated.program(by_verbs, clients=NUM, num_local=num_local), {kind: by_nodes(kind) for kind in kinds}


def run_all(split=None, part=slice(0, NUM)):
    verbs, nodes = programs(split)
    local = (STATE, INPUTS[part], LABELS[part], WEIGHTS[part], MASK[part])
    torch.manual_seed(11)
    found = verbs(*local)
    by_nodes = {}
    for kind, node in nodes.items():
        torch.manual_seed(11)
        by_nodes[kind] = node(*local)
    return found, by_nodes


def on_ranks(rank, world_size, split):
    with process_group():
        return run_all(split, slice(sum(split[:rank]), sum(split[: rank + 1])))


def check(found, by_nodes, part=slice(0, NUM)):
    expected = averages(11)
    for kind in ("mean", "weighted", "mean_of_some", "sum_of_some"):
        torch.testing.assert_close(found[kind], expected[kind], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(by_nodes[kind], expected[kind], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["losses"], expected["losses"][part], rtol=1e-3, atol=1e-4)


def test_code_runs_as_in_a_loop():
    check(*run_all())


@pytest.mark.parametrize("split", [(3, 2), (2, 0, 3), (1, 2, 1, 1)], ids=str)
def test_code_on_ranks_runs_as_in_a_loop(pools, split):
    for rank, (found, by_nodes) in enumerate(pools[len(split)].run(on_ranks, args=(split,))):
        check(found, by_nodes, slice(sum(split[:rank]), sum(split[: rank + 1])))


def test_clients_write_into_copies():
    def client(shared, own):
        shared.add_(own.sum())
        return shared

    program = federated.program(
        lambda x, y: federated.map_fn(client, (federated.broadcast(x), y), vectorize=False), clients=NUM
    )
    x = torch.zeros(4)
    assert torch.equal(program(x, INPUTS)[:, 0], INPUTS.sum((1, 2)))
    assert not x.any()


def test_clients_own_data_and_results_are_copies_too():
    """Of a module, say, that all clients train in turn."""
    module = torch.nn.Linear(1, 1, bias=False)

    def client(y):
        y.mul_(2)
        with torch.no_grad():
            module.weight.copy_(y.sum().view(1, 1))
        return module.weight

    y = torch.tensor([1.0, 2.0, 4.0])
    mapped = federated.program(lambda y: federated.map_fn(client, y, vectorize=False), clients=3)
    summed = federated.program(lambda y: federated.map_reduce(client, y, reduce="sum", vectorize=False), clients=3)
    assert mapped(y).flatten().tolist() == [2.0, 4.0, 8.0]
    assert summed(y) == 14.0
    assert y.tolist() == [1.0, 2.0, 4.0]
    with torch.inference_mode():
        assert mapped(y).flatten().tolist() == [2.0, 4.0, 8.0]


def test_no_gradient_leads_through():
    w = torch.ones(4, requires_grad=True)
    dot = federated.program(
        lambda w, y: federated.map_reduce(lambda w, y: (w * y).sum(), (federated.broadcast(w), y), vectorize=False),
        clients=NUM,
    )
    assert not dot(w, INPUTS).requires_grad
    for transform in (torch.func.grad, torch.func.jacfwd, lambda f: torch.func.vmap(f, (0, None))):
        with pytest.raises(InvalidArgument, match=r"map_reduce\(vectorize=False\) inside of a transform"):
            transform(dot)(w.detach()[None] if transform not in (torch.func.grad, torch.func.jacfwd) else w, INPUTS)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InvalidArgument, match="forward-mode"):
        dot(torch.autograd.forward_ad.make_dual(w.detach(), torch.ones(4)), INPUTS)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (train, {"chunk_size": 2}, r"vectorize=False\) with chunk_size=2"),
        (train, {"randomness": "same"}, "randomness='same', expected neither"),
        (lambda state, *_: 1.0, {}, "returns 1.0, a float"),
        (lambda state, inputs, labels: inputs[: 1 + int(inputs[0, 0] > 0)], {}, r"for client \d of 5 .*same shapes"),
        (lambda *_: federated.reduce_sum(torch.ones(1)), {}, "reduce_sum inside a client function"),
    ],
    ids=["chunk_size", "randomness", "no tensor", "shapes", "verb"],
)
def test_what_code_may_not_do(function, options, message):
    program = federated.program(
        lambda *args: federated.map_fn(function, (federated.broadcast(args[0]), *args[1:]), vectorize=False, **options),
        clients=NUM,
    )
    with pytest.raises(InvalidArgument, match=message):
        program(STATE, INPUTS, LABELS)


# ---- traced, and somewhere else


def without_dropout(state, inputs, labels):
    """The same without draws, which clients elsewhere make for themselves."""
    model = module()
    model.load_state_dict(state)
    model[2].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return {name: leaf.float() for name, leaf in model.state_dict().items()}


@federated.program(clients=NUM)
def fedavg(state, inputs, labels, weights, mask):
    arguments = (federated.broadcast(state), inputs, labels)
    some = federated.map_reduce(without_dropout, arguments, mask=mask, vectorize=False)
    models = federated.map_fn(without_dropout, arguments, vectorize=False)
    return federated.reduce_weighted_mean(models, weights), some


def test_a_traced_program_names_its_code(tmp_path):
    arguments = (STATE, INPUTS, LABELS, WEIGHTS, MASK)
    expected = fedavg(*arguments)
    graph = federated.trace(fedavg, *arguments)
    assert "client.without_dropout(" in str(graph)
    assert "sgd" not in str(graph).lower()
    torch.testing.assert_close(graph(*arguments), expected)
    graph.save(tmp_path / "graph")
    loaded = federated.Graph.load(tmp_path / "graph")
    with pytest.raises(InvalidArgument, match=r"calls the function 'without_dropout', which was not saved with it"):
        loaded(*arguments)
    loaded.install({"without_dropout": without_dropout})
    torch.testing.assert_close(loaded(*arguments), expected)

    functions = {"without_dropout": without_dropout, "train": train}
    clients = [
        federated.Client(functions, inputs=INPUTS[i], labels=LABELS[i], weights=WEIGHTS[i], mask=MASK[i])
        for i in range(NUM)
    ]
    found = federated.run_on(federated.IsolatedClients(clients), graph, state=STATE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_clients_call_no_code_but_their_own():
    graph = federated.trace(fedavg, STATE, INPUTS, LABELS, WEIGHTS, MASK)
    for functions, message in [
        ({"train": train}, r"'without_dropout', but this client has 'train'"),
        ({"without_dropout": lambda *_: torch.ones(2)}, "map without_dropout of fedavg raised InvalidArgument"),
    ]:
        clients = [
            federated.Client(functions, inputs=INPUTS[i], labels=LABELS[i], weights=WEIGHTS[i], mask=MASK[i])
            for i in range(NUM)
        ]
        with pytest.raises(InvalidArgument, match=message):
            federated.run_on(federated.IsolatedClients(clients), graph, state=STATE)


def test_a_graph_that_names_code_is_traced_again():
    def weigh(tree, by):
        return tree["own"] * 2 - tree["other"].sum() * by

    def total(own, other):
        tree = {"other": other, "own": own}
        return federated.reduce_sum(federated.map_fn(weigh, (tree, own), vectorize=False))

    own, other = torch.tensor([1.0, 2.0, 4.0]), torch.ones(3, 2)
    graph = federated.trace(federated.program(total, clients=3), own, other)
    twice = federated.trace(lambda own, other: graph(own, other) * 2, own, other)
    expected = 2 * sum(float(own[i] * 2 - other[i].sum() * own[i]) for i in range(3))
    clients = [federated.Client({"weigh": weigh}, own=own[i], other=other[i]) for i in range(3)]
    assert twice(own, other) == federated.run_on(federated.IsolatedClients(clients), twice) == expected


def test_code_that_has_no_name_or_a_shared_one_is_not_traced():
    def of(*functions):
        program = federated.program(
            lambda y: [federated.reduce_sum(federated.map_fn(f, y, vectorize=False)) for f in functions], clients=NUM
        )
        return lambda: federated.trace(program, INPUTS)

    def twice(function):
        def client(y):
            return function(y)

        return client

    with pytest.raises(InvalidArgument, match="finds? it by its name"):
        of(lambda y: y.sum())()
    with pytest.raises(InvalidArgument, match="finds? it by its name"):
        of(functools.partial(twice(torch.sum)))()
    with pytest.raises(InvalidArgument, match="with chunk_size=2"):
        program = federated.program(
            lambda y: federated.map_reduce(torch.sum, y, vectorize=False, chunk_size=2), clients=NUM
        )
        federated.trace(program, INPUTS)
    with pytest.raises(InvalidArgument, match="two client functions with the name client"):
        of(twice(torch.sum), twice(torch.mean))()
    assert of(torch.sum, torch.sum)().verbs() == ["reduce_sum", "reduce_sum"]
    with pytest.raises(InvalidArgument, match="inside of a transform"):
        federated.trace(
            torch.func.grad(
                federated.program(
                    lambda y: federated.reduce_sum(federated.map_fn(torch.sum, y, vectorize=False)), clients=NUM
                )
            ),
            INPUTS,
        )


# ---- what cannot be vectorised is told to run as it is


def steps_an_optimizer(y):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (y @ weight).square().sum().backward()
    optimizer.step()
    return weight.detach()


LSTM = torch.nn.LSTM(4, 3).requires_grad_(False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y * y.sum().item(), r"makes a number of a tensor, or branches on one"),
        (lambda y: y * float(y[0, 0]), r"makes a number of a tensor"),
        (lambda y: y if y.sum() > 0 else -y, r"branches on one"),
        (lambda y: y[y > 0].sum(), r"size depends on values"),
        (lambda y: torch.nonzero(y > 0).sum(), r"size depends on values"),
        (lambda y: y.masked_select(y > 0).sum(), r"size depends on values"),
        (lambda y: torch.from_numpy(y.numpy() * 2), r"reads a tensor's memory"),
        (lambda y: torch.tensor(y.tolist()), r"reads a tensor's memory"),
        (lambda y: y.clone().requires_grad_().detach(), r"calls backward\(\), autograd.grad\(\) or requires_grad_\(\)"),
        (steps_an_optimizer, r"uses a tensor of shape \[4\] from around it, and a gradient leads to it"),
        (lambda y: LSTM(y)[0], r"runs what torch cannot batch, such as a recurrent layer"),
    ],
    ids=["item", "float", "if", "mask", "nonzero", "masked_select", "numpy", "list", "leaf", "optimizer", "LSTM"],
)
def test_what_torch_cannot_batch_is_said_and_runs_as_it_is(function, message):
    def program(vectorize):
        return federated.program(lambda y: federated.map_fn(function, y, vectorize=vectorize), clients=NUM)

    with pytest.raises(InvalidArgument, match=f"the client function .*{message}.*vectorize=False"):
        program(True)(INPUTS)
    found = program(False)(INPUTS)
    for client in range(NUM):
        torch.testing.assert_close(found[client], function(INPUTS[client]), rtol=1e-6, atol=1e-6)
