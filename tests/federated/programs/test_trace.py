"""Programs as data: what is in a graph, that it computes what the program does, and what it sends.

The oracle is the program itself, which test_verbs.py holds against loops.
"""

from __future__ import annotations

import enum
import functools
import io
import json
import re
import sys
from collections import OrderedDict, defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacrev, jvp

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.programs.graph import MAP
from bagua.federated.programs.graph_files import from_bytes, to_bytes
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in, in_turns
from tests.federated.verbs.test_verbs import SPLITS, X, Y, fax, sent_by

BROADCAST, MEAN, SUM = "broadcast", "reduce_mean", "reduce_sum"


def tangent(x, y):
    return jvp(lambda x: fax(x, y), (x,), (torch.ones_like(x),))


@federated.program(clients=3)
def weighted(x, y):
    losses = federated.map_fn(lambda x, y: (x @ y - 1) ** 2, (federated.broadcast(x), y))
    return federated.reduce_weighted_mean(losses, torch.ones(3) + losses.detach(), mask=y[:, 0] > -5)


@federated.program(clients=3)
def outside_of_maps(x, y):
    """Elementwise and along axes that are not the clients'."""
    shared = federated.broadcast(x)
    moved = (shared * y).unsqueeze(1).expand(3, 4, 2).transpose(1, 2)[:, :, 1:3]
    return federated.reduce_mean({"a": moved.sum(1), "b": (shared - y).view(3, 2, 1).mean((1, 2)) + torch.zeros(3)})


@federated.program(clients=3)
def of_constants(x, y):
    two, eye = torch.tensor(2.0), torch.eye(2)
    mapped = federated.map_fn(
        lambda x, y, two, eye: two * (eye @ x - y), tuple(map(federated.broadcast, (x, x, two, eye)))
    )
    return federated.reduce_sum(mapped), federated.reduce_mean(federated.broadcast(two) + torch.ones(3))


@federated.program(clients=3)
def within(x, y):
    """A program inside of a client function."""

    @federated.program(sensors=2)
    def of_sensors(x, y):
        return federated.reduce_sum(federated.map_fn(lambda x, v: torch.sin(x * v), (federated.broadcast(x.sum()), y)))

    return federated.reduce_mean(federated.map_fn(of_sensors, (federated.broadcast(x), y)))


@federated.program(clients=3)
def partly_moving(x, y):
    """Of a reduction and of a broadcast only some values have tangents; integers become floating outside of a map."""
    near = federated.map_fn(lambda x, y: (x * y > 0).long(), (federated.broadcast(x), y))
    means = federated.broadcast(federated.reduce_mean([federated.broadcast(x) * y, y + 1, near.to(y.dtype)]))
    mapped = federated.map_fn(lambda a, b, c, y: (a * b * y).sin() * c, (*means, y))
    return federated.reduce_sum(mapped)


def loss_of(parameters, images, labels):
    hidden = torch.relu(images @ parameters["w"] + parameters["b"])
    return F.cross_entropy(hidden @ parameters["out"], labels)


def local_steps(parameters, images, labels, rate):
    for _ in range(2):
        gradient = grad(loss_of)(parameters, images, labels)
        parameters = {name: value - rate * gradient[name] for name, value in parameters.items()}
    return parameters


@federated.program(clients=3)
def two_rounds(parameters, rate, images, labels):
    for _ in range(2):
        mapped = federated.map_fn(
            local_steps, (federated.broadcast(parameters), images, labels, federated.broadcast(rate))
        )
        parameters = federated.reduce_mean(mapped)
    return federated.reduce_mean(federated.map_fn(loss_of, (federated.broadcast(parameters), images, labels)))


def network():
    torch.manual_seed(0)
    parameters = {"w": torch.randn(8, 16) * 0.1, "b": torch.zeros(16), "out": torch.randn(16, 3) * 0.1}
    return parameters, torch.tensor(0.1), torch.randn(3, 5, 8), torch.randint(0, 3, (3, 5))


FUNCTIONS = {  # with the verbs that are left when unused ones are removed
    "value": (fax, [BROADCAST, MEAN]),
    "gradient": (grad(fax), [BROADCAST, BROADCAST, SUM]),
    "tangent": (tangent, [BROADCAST] * 2 + [MEAN] * 2),
    "Hessian": (hessian(fax), [BROADCAST] * 3 + [SUM]),
    "weighted": (weighted, [BROADCAST, SUM]),
    "gradient of weighted": (grad(weighted), [BROADCAST, SUM, BROADCAST, SUM]),
    "outside of maps": (outside_of_maps, [BROADCAST, MEAN]),
    "of constants": (of_constants, [BROADCAST] * 4 + [SUM, BROADCAST, MEAN]),
    "within": (within, [BROADCAST, MEAN]),
    "gradient of within": (grad(within), [BROADCAST, BROADCAST, SUM]),
    "tangent of some": (lambda x, y: jvp(lambda x: partly_moving(x, y), (x,), (X,)), None),
}


FAST = (
    "value", "gradient", "gradient of weighted", "outside of maps", "of constants", "within",
)  # fmt: skip


@functools.cache
def graph_of(name):
    return federated.trace(FUNCTIONS[name][0], X, Y)


@fast_in("name", FAST, list(FUNCTIONS))
def test_a_graph_is_the_program(name):
    function, expected = FUNCTIONS[name]
    graph = graph_of(name)
    assert expected is None or graph.verbs() == expected
    x, y = X + 0.3, Y - 0.2  # not what was traced
    torch.testing.assert_close(graph(x, y), function(x, y))
    loaded = from_bytes(to_bytes(graph))
    assert str(loaded) == str(graph)
    torch.testing.assert_close(loaded(x, y), graph(x, y), rtol=0, atol=0)


@pytest.mark.slow("test_a_graph_is_the_program")
def test_rounds_of_a_hypergradient():
    arguments = network()
    function = grad(two_rounds, (0, 1))
    graph = federated.trace(function, *arguments)
    torch.testing.assert_close(graph(*arguments), function(*arguments))
    assert federated.cost_of(graph).rounds == 5


@pytest.mark.slow("test_a_value_of_two_rounds_is_sent_once")
def test_rounds_of_local_steps():
    arguments = network()
    graph = federated.trace(two_rounds, *arguments)
    torch.testing.assert_close(graph(*arguments), two_rounds(*arguments))
    model = 4 * sum(value.numel() for value in arguments[0].values())
    cost = federated.cost_of(graph)
    assert cost.bytes_down == (model + 4, model, model)  # the learning rate stays at the clients
    assert cost.bytes_up == (model, model, 4)


class Convolutions(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(1, 4, 3, padding=1),
            torch.nn.GroupNorm(2, 4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 3),
        )


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.out = torch.nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(self.layer(self.embedding(tokens)).mean(1))


class Bag(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.EmbeddingBag(7, 8), torch.nn.Linear(8, 3))


MODELS = {
    "convolutions": (Convolutions, lambda: torch.randn(3, 5, 1, 4, 4)),
    "attention": (Attention, lambda: torch.randint(0, 7, (3, 5, 4))),
    "bag": (Bag, lambda: torch.randint(0, 7, (3, 5, 4))),
}


@pytest.mark.slow("test_a_graph_is_the_program")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_modules(name):
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model, inputs, labels = make(), draw(), torch.randint(0, 3, (3, 5))
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def of_client(parameters, inputs, labels):
        return F.cross_entropy(functional_call(model, parameters, (inputs,)), labels)

    def step(parameters, inputs, labels):
        gradient = grad(of_client)(parameters, inputs, labels)
        return {key: parameters[key] - 0.1 * gradient[key] for key in parameters}

    @federated.program(clients=3)
    def loss(parameters, inputs, labels):
        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(parameters), inputs, labels)))

    @federated.program(clients=3)
    def fedavg(parameters, inputs, labels):
        return federated.reduce_mean(federated.map_fn(step, (federated.broadcast(parameters), inputs, labels)))

    clients = [federated.Client(inputs=x, labels=y) for x, y in zip(inputs, labels, strict=True)]
    for function in (grad(loss), fedavg):
        expected = function(parameters, inputs, labels)
        graph = from_bytes(to_bytes(federated.trace(function, parameters, inputs, labels)))
        torch.testing.assert_close(graph(parameters, inputs, labels), expected)
        found = federated.run_on(federated.IsolatedClients(clients), graph, parameters=parameters)
        torch.testing.assert_close(found, expected)


def test_code_of_leaves_in_another_order_is_another_function():
    """Two maps of one function whose dictionaries have their keys in two orders, and so their leaves."""

    def client(values):
        return values["a"] - values["b"]

    @federated.program(clients=3)
    def differences(a, b):
        trees = {"a": a, "b": b}, {"b": b, "a": a}
        return [federated.reduce_sum(federated.map_fn(client, (tree,), vectorize=False)) for tree in trees]

    a, b = Y + 1, Y * Y
    expected = sum(one - other for one, other in zip(a, b, strict=True))
    graph = federated.trace(differences, a, b)
    loaded = from_bytes(to_bytes(graph))
    loaded.install({"client": client})
    clients = [federated.Client({"client": client}, a=one, b=other) for one, other in zip(a, b, strict=True)]
    for found in (graph(a, b), loaded(a, b), federated.run_on(federated.IsolatedClients(clients), graph)):
        torch.testing.assert_close(found, [expected, expected])


@pytest.mark.slow("test_a_graph_is_the_program")
@pytest.mark.parametrize("make", [torch.nn.GRU, torch.nn.LSTM])
def test_recurrent_networks_are_taken_apart(make):
    """torch cannot batch them, so the oracle is a loop."""
    torch.manual_seed(0)
    model, y = make(4, 3, batch_first=True), torch.randn(3, 5, 2, 4)
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def of_client(parameters, y):
        return functional_call(model, parameters, (y,))[0].square().mean()

    def loss(parameters, y):
        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(parameters), y)))

    def in_a_loop(parameters, y):
        return sum(of_client(parameters, one) for one in y) / 3

    program = federated.program(loss, clients=3)
    with pytest.raises(InvalidArgument, match=r"torch cannot batch, .* graph of federated.trace"):
        program(parameters, y)
    expected = grad(in_a_loop)(parameters, y)
    torch.testing.assert_close(federated.trace(grad(program), parameters, y)(parameters, y), expected)


def test_the_client_function_is_one_unbatched_node():
    for name in ("value", "gradient"):
        graph = graph_of(name)
        (mapped,) = [node for node in graph.nodes if node.verb == MAP]
        client = graph.functions[mapped.target]
        assert [value.shape for value in client.inputs][:2] == [(2,), (2,)]
        assert "aten.dot" in str(client) and "clients" not in str(client)


PRINTED = """\
fax over 3 clients:
    x                                     # float32[2] at server
    y                                     # float32[2] at clients
    broadcast = broadcast(x)              # float32[2] at clients
    square = map square(broadcast, y)     # float32[] at clients
    mean = reduce_mean(square)            # float32[] at server
    return mean

square, of one client:
    x0                                    # float32[2]
    x1                                    # float32[2]
    dot = aten.dot(x0, x1)                # float32[]
    sub = aten.sub.Tensor(dot, 1)         # float32[]
    pow = aten.pow.Tensor_Scalar(sub, 2)  # float32[]
    mul = aten.mul.Tensor(pow, 0.5)       # float32[]
    return mul"""


def test_a_graph_is_readable():
    def words(text):
        return [line.split() for line in text.splitlines()]

    assert words(str(graph_of("value"))) == words(PRINTED.replace("fax", "mean_loss"))
    dot = graph_of("value").to_dot()
    assert dot.startswith('digraph "mean_loss" {') and dot.count("style=bold") == 2
    assert 'label="server"' in dot and 'label="clients"' in dot and 'label="map square"' in dot


@fast_in("number", [1], range(len(SPLITS)))
def test_graphs_on_ranks(pools, number):
    split = SPLITS[number]
    results = pools[len(split)].run(on_ranks, args=(split,))
    for result in results:
        torch.testing.assert_close(result, results[0])
    sizes = sum(split)
    y = torch.linspace(-2, 2, sizes * 2).reshape(sizes, 2)
    program = federated.program(fax.__wrapped__, clients=sizes)
    torch.testing.assert_close(results[0][0], program(X, y))
    torch.testing.assert_close(results[0][1], grad(program)(X, y))


def on_ranks(rank, world_size, split):
    with process_group():
        sizes = sum(split)
        y = torch.linspace(-2, 2, sizes * 2).reshape(sizes, 2).split(split)[rank]
        program = federated.program(fax.__wrapped__, clients=sizes, num_local=split)
        graphs = []
        sent = sent_by(lambda: graphs.extend(federated.trace(f, X, y) for f in (program, grad(program))))
        assert sent == 0
        return [graph(X, y) for graph in graphs]


OTHER_GRAPHS = {
    "same": lambda w, y: {"a": w["a"] * y.sum(), "b": w["b"] - y.sum()},
    "function": lambda w, y: {"a": w["b"] - y.sum(), "b": w["a"] * y.sum()},
}


@pytest.mark.parametrize("way", OTHER_GRAPHS)
def test_ranks_run_one_graph(pool2, way):
    """What each has traced itself is one with what another has loaded."""
    if way == "same":
        first, second = pool2.run(with_a_graph_each, args=(way,))
        torch.testing.assert_close(first, {"a": torch.tensor(6.0), "b": torch.tensor(4.0)})
        torch.testing.assert_close(second, first)
    else:
        message = (
            r"(?s)graph mean_of_each, digest [0-9a-f]{12}, value 0.*graph mean_of_each, digest [0-9a-f]{12}, value 0"
        )
        assert all(re.search(message, text) for text in pool2.run(with_a_graph_each, args=(way,)))


def with_a_graph_each(rank, world_size, way):
    with process_group():
        function = OTHER_GRAPHS["same" if rank == 0 else way]

        def mean_of_each(w, y):
            return federated.reduce_mean(federated.map_fn(function, (federated.broadcast(w), y)))

        w, y = {"a": torch.tensor(3.0), "b": torch.tensor(6.0)}, torch.ones(2, 2)
        graph = federated.trace(federated.program(mean_of_each, clients=4), w, y)
        if rank == 1:
            graph = from_bytes(to_bytes(graph))
        if way == "same":
            return graph(w, y)
        with pytest.raises(InvalidArgument) as raised:
            graph(w, y)
        return str(raised.value)


def test_tracing_takes_the_same_for_any_number_of_clients():
    def trace(n):
        program = federated.program(fax.__wrapped__, clients=n)
        return federated.trace(grad(program), X, torch.zeros(n, 2))

    few, many = trace(2), trace(2048)
    assert len(few.nodes) == len(many.nodes)
    assert [str(value) for node in few.nodes for value in node.results] == [
        str(value) for node in many.nodes for value in node.results
    ]


def unbroadcast(x, y):
    return federated.reduce_mean(y * x)


def captured(x, y):
    return federated.reduce_mean(federated.map_fn(lambda y: (y * x).sum(), y))


def captured_data(x, y):
    return federated.reduce_mean(federated.map_fn(lambda x, y: x * y, (federated.broadcast(x), Y)))


def flipped(x, y):
    return federated.reduce_mean(y.flip(0))


def centred(x, y):
    return federated.reduce_mean(y - y.mean(0))


REFUSED = {
    unbroadcast: "aten.mul.* on x: float32\\[2\\], which is at the server, and on values of the clients",
    captured: "uses a tensor of shape \\[2\\] from around it, which clients do not have",
    captured_data: "map over clients of a tensor of shape \\[3, 2\\] from around the traced function",
    flipped: "aten.flip.default on values of the clients, which may mix them: use map_fn",
    centred: "along the axis of clients of y: use a reduction",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_leave_the_data_centre_is_refused(function):
    with pytest.raises(InvalidArgument, match=REFUSED[function]):
        federated.trace(federated.program(function, clients=3), X, Y)


def test_a_graph_is_called_as_it_was_traced():
    with pytest.raises(InvalidArgument, match="traced for x: float32\\[2\\], but got torch.float64 of shape \\[2\\]"):
        graph_of("value")(X.double(), Y)
    with pytest.raises(InvalidArgument, match="expected 3 as the first"):
        graph_of("value")(X, Y[:2])
    with pytest.raises(InvalidArgument, match="arguments of structure"):
        graph_of("value")(X)


def edited(graph, change):
    content = torch.load(io.BytesIO(to_bytes(graph)), weights_only=True)
    description = json.loads(content["graph"])
    change(description)
    file = io.BytesIO()
    torch.save({"graph": json.dumps(description), "constants": content["constants"]}, file)
    return file.getvalue()


def set_target(target):
    def change(description):
        (function,) = description["graph"]["functions"].values()
        function["nodes"][0]["target"] = target

    return change


FIRST, SECOND = {"value": 0}, {"value": 1}


def set_call(target, args, kwargs):
    """Of the client function's inputs."""

    def change(description):
        (function,) = description["graph"]["functions"].values()
        args_of_file = [{"float": one.hex()} if isinstance(one, float) else one for one in args]
        function["nodes"][0].update(target=target, args=args_of_file, kwargs=kwargs)

    return change


def set_verb(description):
    description["graph"]["nodes"][0]["verb"] = "pytree"


@pytest.mark.parametrize(
    "change, message",
    [
        (set_target("torch.load.default"), "does not have"),
        (set_target("aten.from_file.default"), "reads a file"),
        (set_target("aten.empty.memory_format"), "no values of the program"),
        (set_target("aten.as_strided.default"), "how tensors lie in memory"),
        (set_target("aten.add_.Tensor"), "writes into its arguments"),
        # Whose schema does not say that it writes.
        (set_target("aten._no_grad_embedding_renorm_.default"), "writes into its arguments"),
        (set_target("aten._sobol_engine_draw.default"), "internal to torch, and none of those that traces"),
        (
            set_call("aten.segment_reduce.default", [FIRST, "sum"], {"lengths": SECOND, "unsafe": True}),
            "does not check",
        ),
        (
            set_call("aten.native_batch_norm.default", [FIRST, None, None, FIRST, SECOND, True, 0.1, 0.1], {}),
            "clone it first",
        ),
        (set_verb, "which does not exist"),
        (lambda d: d.update(version=2), "version 2, expected 1"),
        (lambda d: d["graph"]["nodes"].reverse(), "did not write"),
    ],
)
def test_nothing_but_operators_can_be_loaded(change, message):
    with pytest.raises(InvalidArgument, match=message):
        from_bytes(edited(graph_of("value"), change))


LAYERS = {
    "softmax": lambda w, x: (w * x).softmax(1).log_softmax(0),
    "prelu": lambda w, x: F.prelu(x * w, w[0, :1]),
    "pools": lambda w, x: F.adaptive_avg_pool2d((w * x)[None, None], (2, 3)).sum(),
    "fractional pools": lambda w, x: F.max_pool2d((w * x)[None, None], 2),
    "norms": lambda w, x: F.batch_norm(F.rms_norm(w * x, (4,)), None, None, training=True),
    "running statistics": lambda w, x: F.batch_norm(w * x, x[0].clone(), x[1].clone(), training=True),
    "weights' norms": lambda w, x: torch._weight_norm(w, x[:, :1], 0),
    "distances": lambda w, x: torch.cdist(w, x).sum() + F.pdist(w).sum() + torch.cdist(w, x, 1.0).sum(),
    "bags": lambda w, x: F.embedding_bag(TOKENS, w, mode="sum", per_sample_weights=x[:2, :2]),
    "interpolation": lambda w, x: F.interpolate((w * x)[None, None], (7, 5), mode="nearest-exact"),
    "frequencies": lambda w, x: torch.fft.irfft(torch.fft.rfft(w * x)) + torch.fft.fft(w).abs(),
    "matrices": lambda w, x: (
        torch.linalg.solve(w + 9 * EYE, x) + torch.linalg.det(w + 2 * EYE) / 9 + torch.logdet(w @ w.T + EYE)
    ),
    "attention": lambda w, x: F.scaled_dot_product_attention(w[None], x[None], w[None]),
}
TOKENS, EYE = torch.tensor([[0, 2], [1, 0]]), torch.eye(4)


@fast_in("name", ["norms", "attention"], list(LAYERS))
def test_operators_of_layers_and_of_their_derivatives_can_be_loaded(name):
    """What is internal to torch among them, too; the oracle is a loop."""
    draw = torch.Generator().manual_seed(1)
    w, xs = torch.randn(4, 4, generator=draw), torch.rand(3, 4, 4, generator=draw)

    def of_client(w, x):
        return LAYERS[name](w, x).square().sum()

    def program(w, xs):
        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(w), xs)))

    def in_a_loop(w):
        return sum(of_client(w, x) for x in xs) / 3

    function = grad(federated.program(program, clients=3))
    loaded = from_bytes(to_bytes(federated.trace(function, w, xs)))
    torch.testing.assert_close(loaded(w, xs), grad(in_a_loop)(w), rtol=1e-4, atol=1e-4)


def test_what_could_not_be_loaded_is_not_traced():
    def program(w, xs):
        function = lambda w, x: F.batch_norm(w * x, x[0], x[1], training=True)  # noqa: E731
        return federated.reduce_sum(federated.map_fn(function, (federated.broadcast(w), xs)))

    with pytest.raises(InvalidArgument, match="as the running statistics .*: clone it first"):
        federated.trace(federated.program(program, clients=3), torch.ones(4, 4), torch.ones(3, 4, 4))


def set_structure(kind, context):
    def change(description):
        schema = {"type": kind, "context": context, "children_spec": []}
        description["graph"]["structures"][1] = json.dumps([1, schema])

    return change


def test_a_number_is_no_dtype():
    """torch would read memory of its process with it, or end it."""

    def change(description):
        (full,) = [node for node in description["graph"]["nodes"] if node["target"] == "aten.full.default"]
        full["kwargs"]["dtype"] = -1

    with pytest.raises(InvalidArgument, match="for the dtype of aten.full.default, expected a ScalarType"):
        from_bytes(edited(graph_of("gradient"), change))


FACTORY = {"default_factory_module": "this", "default_factory_name": "d", "dict_context": []}
ENUM = json.dumps([{"__enum__": True, "fqn": "this:d", "name": "A"}]).replace("__enum__", "__\\u0065num__")


@pytest.mark.parametrize(
    "change", [set_structure("collections.defaultdict", FACTORY), set_structure("builtins.dict", ENUM)]
)
def test_a_structure_imports_no_module(change):
    with pytest.raises(InvalidArgument, match="a structure with"):
        from_bytes(edited(graph_of("value"), change))
    assert "this" not in sys.modules


class Key(enum.Enum):
    A = 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: {Key.A: x}, "the enumeration"),
        (lambda x: defaultdict(Key, a=x), "a defaultdict of"),
    ],
)
def test_what_could_not_be_read_is_not_saved(make, message):
    graph = federated.trace(federated.program(lambda x: make(federated.broadcast(x)), clients=3), X)
    with pytest.raises(InvalidArgument, match=message):
        to_bytes(graph)


def test_structures_are_read_as_they_are():
    value = defaultdict(list, a=OrderedDict(c=X, b=[X]), b=({1: X},))
    graph = federated.trace(federated.program(lambda tree: federated.broadcast(tree), clients=3), value)
    assert from_bytes(to_bytes(graph)).structures == graph.structures


def a_tensor():
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    return file.getvalue()


@pytest.mark.parametrize("data", [b"graph", a_tensor()])
def test_other_bytes_are_no_graph(data):
    with pytest.raises(InvalidArgument, match="not a graph"):
        from_bytes(data)


# ---- what would be silently wrong


def trace_of(body, *arguments):
    return federated.trace(federated.program(body, clients=3), *arguments)


def test_derivatives_of_random_client_functions_are_refused():
    """They would draw other numbers than the function."""

    @federated.program(clients=3)
    def dropped(x):
        return federated.reduce_sum(federated.map_fn(F.dropout, (federated.broadcast(x),), randomness="different"))

    assert federated.trace(dropped, X).verbs() == [BROADCAST, SUM]
    with pytest.raises(InvalidArgument, match="draws random numbers, and its derivative would draw others"):
        federated.trace(jacrev(dropped), X)


UNKNOWN = {  # what a trace cannot keep
    "a write": (lambda y: y.add_(1), "writes into a tensor .*add_.* of shape \\[2\\]"),
    "random numbers": (lambda y: y + torch.rand(2), r"draws random numbers \(aten.rand.default\): say map_fn"),
}
UNKNOWN_ANYWHERE = {  # of client functions and of the server
    "a generator": (
        lambda y: y + torch.randn(2, generator=torch.Generator()),
        "uses a Generator, which a graph cannot keep.*sampling.per_client",
    ),
    "a number": (lambda y: y * y.sum().item(), "values must be known|keep it a tensor"),
    "a mask": (lambda y: y[y > 0].sum(), "runs aten.(nonzero|index).*, for which a tensor's values must be known"),
    "a branch": (lambda y: y if y.sum() > 0 else -y, "values must be known.* use torch.where"),
}


@pytest.mark.parametrize("what", [*UNKNOWN, *UNKNOWN_ANYWHERE])
def test_what_a_trace_does_not_know_is_refused(what):
    function, message = {**UNKNOWN, **UNKNOWN_ANYWHERE}[what]
    randomness = "different" if what == "a generator" else "error"
    with pytest.raises(InvalidArgument, match=message):
        trace_of(lambda y: federated.reduce_sum(federated.map_fn(function, (y,), randomness=randomness)), Y.clone())


def test_what_a_trace_does_not_know_of_the_server_is_refused():
    function, message = UNKNOWN_ANYWHERE["a number"]
    with pytest.raises(InvalidArgument, match=message):
        trace_of(lambda y: function(federated.reduce_sum(y)), Y.clone())


def test_client_functions_draw_where_it_is_said():
    def drawn(y):
        return federated.reduce_sum(federated.map_fn(lambda y: y + torch.rand(2), (y,), randomness="different"))

    torch.manual_seed(0)
    assert not torch.equal(trace_of(drawn, Y)(Y), Y.sum(0))


def test_traces_inside_of_transforms_are_refused():
    with pytest.raises(InvalidArgument, match="trace the transform of the function"):
        grad(lambda x: federated.trace(fax, x, Y)(x, Y))(X)


def test_arguments_in_another_order_are_the_same():
    graph = trace_of(lambda p, y: federated.reduce_sum(y) * p["a"] - p["b"], {"a": X, "b": 2 * X}, Y)
    torch.testing.assert_close(graph({"b": 2 * X, "a": X}, Y), Y.sum(0) * X - 2 * X)


def test_a_tensor_that_is_given_twice_is_two_arguments():
    graph = trace_of(lambda y, z, x, w: federated.reduce_sum(y) * x - federated.reduce_mean(z) * w, Y, Y, X, X)
    torch.testing.assert_close(graph(Y, 2 * Y, X, 3 * X), Y.sum(0) * X - (2 * Y).mean(0) * 3 * X)


HELD = {  # what tensors of equal elements hold once they are converted, by hand
    "a fraction": (lambda: torch.full((3, 2), 2.7).long().float(), 2.0),
    "more than a byte": (lambda: torch.full((3, 2), 300).to(torch.uint8).float(), 44.0),
}
WHERE = {
    "server": lambda make: lambda y: federated.reduce_sum(y) * make()[0],
    "client function": lambda make: (
        lambda y: federated.reduce_sum(federated.map_fn(lambda y: y * (make() + 0 * y.to(make().dtype))[0], y))
    ),
    "clients": lambda make: lambda y: federated.reduce_sum(y * make()),
}


@in_turns("what, where", list(HELD), list(WHERE))
def test_constants_hold_what_their_dtypes_can(what, where):
    make, expected = HELD[what]
    graph = federated.trace(federated.program(WHERE[where](make), clients=3), Y)
    for one in (graph, from_bytes(to_bytes(graph))):
        torch.testing.assert_close(one(Y), Y.sum(0).to(one(Y).dtype) * expected)
    program = federated.program(WHERE[where](make), clients=3)
    gradient = federated.trace(grad(lambda y: program(y).sum()), Y)(Y)
    torch.testing.assert_close(gradient, torch.full((3, 2), float(expected)))
