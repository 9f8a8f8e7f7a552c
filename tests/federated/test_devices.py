"""Federated programs whose models and data are on a device: as on the CPU, to the bit where the device is emulated.

Each program runs on the CPU and on the device, in one process by itself and on two ranks.
"""

import os
from datetime import timedelta

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

import bagua
import tests.emulated_device as emulated
from bagua import federated
from bagua.federated import Client, IsolatedClients, Simulation, metrics, optimizers, run_on
from bagua.federated.library.aggregators import Aggregator, Clip, Mean, Median, Noise, Quantize, SecureSum
from bagua.federated.library.privacy import PrivateMean
from bagua.testing import world
from tests import accelerator
from tests.distributed.worlds import SAME_TEST, in_turns

NUM_CLIENTS = 5
both_sizes = pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=SAME_TEST), 2])


def on_both(rank, world_size, program, args, num_ranks):
    """Runs `program(job, *args)` on the CPU and on the device, and compares the tensors it returns."""
    if rank >= num_ranks:
        return
    here = accelerator.use_device_of(rank)
    if num_ranks > 1:
        bagua.init_process_group(timeout=timedelta(seconds=20))
    try:
        expected = program(Job(rank, num_ranks, torch.device("cpu")), *args)
        found = program(Job(rank, num_ranks, here), *args)
    finally:
        bagua.destroy_process_group()
    expected, found = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    assert len(found) == len(expected) > 0
    for index, (ours, cpus) in enumerate(zip(found, expected, strict=True)):
        assert ours.device == here, index
        assert ours.dtype == cpus.dtype and accelerator.agree([ours.cpu()], [cpus]), (index, ours.cpu(), cpus)


def check(pool, num_ranks, program, *args):
    pool.run(on_both, args=(program, args, num_ranks))


class Job:
    """What a program is given: a model x, the clients' y of this rank, and where they are."""

    def __init__(self, rank, num_ranks, device):
        self.device, self.rank, self.num_ranks = device, rank if num_ranks > 1 else 0, num_ranks
        torch.manual_seed(0)
        self.x = torch.randn(4).to(device)
        self.y = self.mine(torch.randn(NUM_CLIENTS, 4)).to(device)

    def mine(self, values):
        """Of all clients' values those of this rank."""
        return values if self.num_ranks == 1 else values[:3] if self.rank == 0 else values[3:]

    def program(self, function):
        return federated.program(function, clients=NUM_CLIENTS)


def cubes(job):
    def loss(x, y):
        distances = federated.map_fn(lambda x, y: ((x - y) ** 3).sum(), (federated.broadcast(x), y))
        return federated.reduce_mean(distances)

    return job.program(loss)


def verbs(job):
    weights, mask = job.mine(torch.arange(1.0, 6.0)), job.mine(torch.arange(5) != 1)  # of the CPU, as they often are

    def all_of_them(x, y):
        m = federated.map_fn(lambda x, y: torch.sin(x) * y, (federated.broadcast(x), y))
        return [
            federated.reduce_sum({"a": m, "b": [y.double(), torch.complex(y, m)]}),
            federated.reduce_mean(m),
            federated.reduce_weighted_mean(m, weights),
            federated.reduce_weighted_mean(m, weights, mask=mask),
            federated.reduce_sum((100 * y).to(torch.int16)),
        ]

    return job.program(all_of_them)(job.x, job.y)


def derivatives(job):
    loss, x, y = cubes(job), job.x, job.y
    leaf = x.clone().requires_grad_()
    loss(leaf, y).backward()
    return [
        leaf.grad,
        grad(loss)(x, y),
        grad(loss, argnums=1)(x, y),
        jvp(loss, (x, y), (x, y)),
        hessian(loss)(x, y),
        jacrev(grad(loss))(x, y),
        vmap(loss, (0, None))(torch.stack([x, 2 * x]), y),
    ]


def map_reduces(job):
    def cubed(x, y):
        return ((x - y) ** 3).sum()

    def chunked(x, y):
        return federated.map_reduce(cubed, (federated.broadcast(x), y), chunk_size=2)

    def shared(x):
        return federated.map_reduce(lambda x: (x**3).sum(), (federated.broadcast(x),), reduce="sum")

    def weighted(x, y):
        with_weight = lambda x, y: (x - y, y.abs().sum())  # noqa: E731
        return federated.map_reduce(with_weight, (federated.broadcast(x), y), reduce="weighted_mean")

    chunked, shared, weighted = map(job.program, (chunked, shared, weighted))
    x, y = job.x, job.y
    return [
        chunked(x, y),
        grad(chunked, argnums=(0, 1))(x, y),
        jvp(chunked, (x, y), (x, y)),
        hessian(chunked)(x, y),
        shared(x),
        grad(shared)(x),
        weighted(x, y),
    ]


def local_training(job):
    """Federated averaging of a module, each client with steps of its own."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(job.device)
    weights = {name: value.detach() for name, value in net.named_parameters()}
    data = job.mine(torch.randn(NUM_CLIENTS, 6, 4)).to(job.device)

    def train(weights, x):
        for _ in range(3):
            slopes = grad(lambda w: functional_call(net, w, (x,)).square().mean())(weights)
            weights = {name: weights[name] - 0.1 * slopes[name] for name in weights}
        return weights

    def average(weights, data):
        return federated.map_reduce(train, (federated.broadcast(weights), data), chunk_size=2)

    program, server, moments = job.program(average), optimizers.Adam(0.1), None
    for _ in range(3):
        moments = server.init(weights) if moments is None else moments
        change = pytree.tree_map(torch.sub, weights, program(weights, data))
        weights, moments = server.apply(weights, change, moments)
    return weights


def traced(job):
    loss, x, y = cubes(job), job.x, job.y
    return federated.trace(lambda x, y: (grad(loss)(x, y), loss(x, y)), x, y)(x, y)


def metrics_of(job):
    """With a mask of the device, one of the CPU, and none, of placed values and of one client's."""
    logits, labels = job.mine(torch.randn(NUM_CLIENTS, 6, 3)), job.mine(torch.randint(0, 3, (NUM_CLIENTS, 6)))
    mask = job.mine(torch.rand(NUM_CLIENTS, 6) > 0.3)
    logits, labels = logits.to(job.device), labels.to(job.device)

    def measure(logits, labels, mask=None):
        return {
            "loss": metrics.cross_entropy(logits, labels, mask),
            "accuracy": metrics.accuracy(logits, labels, mask),
            "mean": metrics.mean(labels, mask),
        }

    def placed(*data):
        of_clients = federated.map_fn(measure, data)
        return metrics.result(metrics.reduce(of_clients)), metrics.result(of_clients)

    masks = ([], [mask], [mask.to(job.device)])
    found = [job.program(placed)(logits, labels, *one) for one in masks]
    parts = [measure(logits[0], labels[0], *(each[0] for each in one)) for one in masks]
    return found, parts, metrics.result(metrics.merge(parts[0], parts[1]))


@in_turns("program, num_ranks", [verbs, derivatives, map_reduces, local_training, metrics_of], [2, 1])
def test_programs(pair_on_devices, num_ranks, program):
    check(pair_on_devices, num_ranks, program)


@pytest.mark.slow("test_platforms")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_traced_programs(pair_on_devices, num_ranks):
    check(pair_on_devices, num_ranks, traced)


# ---- aggregators

CHAINS = {
    "clip": [Clip(1.0), Mean()],
    "secure sum": [Clip(1.0), SecureSum(), Mean()],
    "noise": [Noise(0.1, seed=3), Mean()],
    "quantize": [Quantize("minmax_uint8"), Mean()],
    "quantize at random": [Quantize("qsgd:bits=4"), SecureSum()],
    "median": [Median()],
}


def aggregation(job, chain):
    aggregate = Aggregator(*CHAINS[chain])
    options = {"mask": job.mine(torch.arange(NUM_CLIENTS) != 1)}
    if aggregate.is_secure:
        options["weights"] = job.mine(torch.arange(1.0, 6.0))
    run = job.program(lambda y, state: aggregate(y, state, **options))
    first, state = run(job.y, aggregate.init(job.x))
    second, state = run(job.y, state)
    of_values = lambda y: run(y, state)[0]  # noqa: E731
    return first, second, grad(lambda y: of_values(y).sum())(job.y), jvp(of_values, (job.y,), (job.y,))[1]


@in_turns("chain, num_ranks", list(CHAINS), [2, 1])
def test_aggregators(pair_on_devices, num_ranks, chain):
    check(pair_on_devices, num_ranks, aggregation, chain)


def privacy(job, options):
    private_mean = PrivateMean(noise_multiplier=0.5, clip=1.0, seed=3, **options)
    run = job.program(lambda y, state: private_mean(y, state, mask=job.mine(torch.arange(NUM_CLIENTS) != 1)))
    first, state = run(job.y, private_mean.init(job.x))
    second, state = run(job.y, state)
    on_cpu = private_mean.init(0.0)  # a norm of the CPU serves, too
    return first, second, state["clip"], run(job.y, on_cpu)[0]


OPTIONS = {
    "plain": {},
    "adaptive": {"quantile": 0.5, "count_stddev": 1.0},
    "secure": {"quantile": 0.5, "count_stddev": 1.0, "reduction": SecureSum()},
}


@in_turns("options, num_ranks", list(OPTIONS), [2, 1])
def test_private_means(pair_on_devices, num_ranks, options):
    check(pair_on_devices, num_ranks, privacy, OPTIONS[options])


def traced_noise(job):
    """Noise is drawn by the host in a graph, too, and moves."""
    chain = Aggregator(Quantize("minmax_uint8"), Noise(0.1, seed=3), Mean())
    given = job.y, chain.init(job.x)
    return federated.trace(job.program(lambda y, state: chain(y, state)[0]), *given)(*given)


def traced_privacy(job):
    private_mean = PrivateMean(noise_multiplier=0.5, clip=1.0, seed=3, quantile=0.5, count_stddev=1.0)
    given = job.y, private_mean.init(job.x)
    return federated.trace(job.program(lambda y, state: private_mean(y, state)[0]), *given)(*given)


@both_sizes
@pytest.mark.parametrize("program", [traced_noise, pytest.param(traced_privacy, marks=SAME_TEST)])
def test_traced_aggregators(pair_on_devices, num_ranks, program):
    check(pair_on_devices, num_ranks, program)


# ---- around programs


def simulation(job, folder):
    """Three rounds at once, and with a checkpoint in between, from which a simulation on the CPU could go on."""
    torch.manual_seed(0)
    data = torch.randn(20, 4).to(job.device)

    def step(state, round):
        @federated.program(clients=6, num_local=len(round.clients))
        def mean(x, y):
            return federated.reduce_weighted_mean(
                federated.map_fn(torch.sub, (federated.broadcast(x), y)),
                torch.ones(len(round.clients)),
                mask=round.mask,
            )

        model = state["model"] - 0.1 * mean(state["model"], data[round.clients])
        state = {"model": model, "drawn": state["drawn"] + torch.randn(4, device=job.device)}
        return state, {"norm": model.norm()}

    def new():
        start = {name: torch.zeros(4, device=job.device) for name in ("model", "drawn")}
        return Simulation(step, start, population=20, cohort=6, seed=1)

    whole, first, second = new(), new(), new()
    whole.run(3)
    path = f"{folder}/{job.device.type}" + (f"-{os.getpid()}" if job.num_ranks == 1 else "")
    first.run(1)
    first.save(path)
    assert all(leaf.is_cpu for leaf in torch.load(path, weights_only=True)["leaves"])
    second.load(path)
    second.run(3)
    for name, value in second.state.items():
        assert torch.equal(value, whole.state[name]) and value.device == job.device, name
    # CUDA's generators draw other numbers than the CPU's.
    return list(whole.state.values()) if accelerator.is_emulated() else whole.state["model"]


@both_sizes
def test_simulations(pair_on_devices, tmp_path, num_ranks):
    check(pair_on_devices, num_ranks, simulation, str(tmp_path))


def platform(job):
    """Server and clients on the device; what travels is of the CPU."""
    loss, data = cubes(job), job.y
    graph = federated.trace(lambda x, y: (grad(loss)(x, y), loss(x, y)), job.x, data)
    clients = [Client(y=one) for one in data]
    clients[1] = Client.restore(clients[1].state(), y=data[1])
    found = run_on(IsolatedClients(clients), graph, x=job.x)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, graph(job.x, data), strict=True))
    return found


@pytest.mark.needs("cryptography")
def test_platforms(pair_on_devices):
    check(pair_on_devices, 1, platform)


def recording(rank, world_size):
    """A device's backward runs on a thread of its own; the record has its verbs all the same."""
    job = Job(rank, 1, accelerator.device_of(rank))
    with federated.record() as found:
        grad(cubes(job))(job.x, job.y)
    assert found == ["broadcast", "reduce_mean", "broadcast", "reduce_sum"]


def test_records(pair_on_devices):
    pair_on_devices.run(recording)


def several_devices(rank, world_size):
    """In one process, ranks that are threads: each on a device of its own."""
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))

    def train(group, device_type):
        here = torch.device("cpu") if device_type == "cpu" else accelerator.use_device_of(group.rank)
        mine, x = values[2 * group.rank :][:2].to(here), torch.ones(3, device=here)

        @federated.program(clients=4, group=group)
        def loss(x, y):
            return federated.map_reduce(lambda x, y: ((x - y) ** 3).sum(), (federated.broadcast(x), y))

        results = [loss(x, mine), *grad(loss, argnums=(0, 1))(x, mine)]
        assert all(result.device == here for result in results)
        return [result.cpu() for result in results]

    for found, expected in zip(world(2, train, accelerator.kind()), world(2, train, "cpu"), strict=True):
        assert accelerator.agree(found, expected)


def test_ranks_with_different_devices(pair_on_emulated):
    pair_on_emulated.run(several_devices)


def refusals(rank, world_size):
    here = accelerator.device_of(rank)
    bagua.init_process_group(timeout=timedelta(seconds=20))
    try:
        total = federated.program(federated.reduce_sum, clients=4)
        with pytest.raises(bagua.InvalidArgument, match=f"tensor 0 of a client.*on {here.type}"):
            total(torch.ones(2, 3, device=here if rank == 0 else "cpu"))
        gathered = federated.program(lambda a, b: Aggregator(Median())({"a": a, "b": b}, ((),))[0], clients=4)
        with pytest.raises(bagua.InvalidArgument, match=f"is on {here.type}:.*, but .* is on cpu"):
            gathered(torch.ones(2, 3, device=here), torch.ones(2, 3))
        # A sum of values of both: a collective for each.
        both = total({"a": torch.ones(2, 3, device=here), "b": torch.ones(2)})
        assert both["a"].tolist() == [4.0] * 3 and both["a"].device == here
        assert both["b"].item() == 4.0 and both["b"].is_cpu
    finally:
        bagua.destroy_process_group()


def test_what_ranks_must_have_in_common(pair_on_devices):
    pair_on_devices.run(refusals)


def copies(rank, world_size):
    """A sum in one process stays on the device."""
    job = Job(rank, 1, accelerator.device_of(rank))
    loss = cubes(job)
    loss(job.x, job.y)
    torch.accelerator.synchronize()
    emulated.reset_counters()
    grad(loss)(job.x, job.y)
    torch.accelerator.synchronize()
    counts = emulated.counters()
    assert counts["bytes_to_device"] == counts["bytes_to_host"] == 0


def test_nothing_comes_to_the_host(pair_on_emulated):
    pair_on_emulated.run(copies)
