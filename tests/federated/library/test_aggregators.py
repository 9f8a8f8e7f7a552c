"""Aggregators against loops over clients, with their derivatives, on one to three ranks.

What is coded has the derivative of the values as they are, which the loops write as v + (coded - v).detach().
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.func import grad, grad_and_value, jvp, vmap
from torch.utils import _pytree as pytree

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.library.aggregators import (
    Aggregator,
    Clip,
    Mean,
    Median,
    Noise,
    Quantize,
    SecureSum,
    Sum,
    TrimmedMean,
)
from bagua.federated.library.sampling import seed_of
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in

SPLITS = ((3, 3), (4, 0, 2))  # clients by rank
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 4.0])
MASK = torch.tensor([True, True, False, True, True, False])
ROUND = torch.tensor(3)

CHAINS = {
    "mean": (Mean(),),
    "sum": (Sum(),),
    "clip": (Clip(1.5), Mean()),
    "quantized": (Quantize("minmax_uint8"), Mean()),
    "halves": (Quantize("bf16"), Mean()),
    "at random": (Quantize("qsgd:bits=4", seed=7), Sum()),
    "secure": (SecureSum(), Mean()),
    "coarse": (SecureSum(bits=16, fraction_bits=4), Mean()),
    "noise": (Noise(0.5, seed=2), Mean()),
    "all": (Clip(1.5), Quantize("minmax_uint8"), SecureSum(bits=40, fraction_bits=24), Noise(0.1, seed=2), Mean()),
    "median": (Median(),),
    "trimmed": (Clip(1.5), TrimmedMean(0.26)),
}
ROBUST = ("median", "trimmed")


def client(x, y):
    return {"w": torch.sin(x * y), "b": (x * y).sum() ** 2}


def loss_of(aggregated):
    return (aggregated["w"] ** 2 * torch.tensor([1.0, -2.0, 3.0])).sum() + aggregated["b"] ** 2


def rows_of(number):
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(1))


def straight(v, coded):
    return v + (coded - v).detach()


def code(spec, key, tensor):
    """What comes back of a tensor that may be under transforms; of a constant for all of them."""
    codec = bagua.codecs.get(spec)
    with temporarily_clear_interpreter_stack():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        plain = torch.autograd.forward_ad.unpack_dual(tensor).primal.detach().clone()
        return codec.decode(codec.encode(plain, key=key), plain.numel(), plain.dtype)


def in_loops(steps, values, weights, mask):
    """Of a list of the clients' {"w": [3], "b": []}, one by one."""
    kinds = {type(step): step for step in steps}
    weight_of = [1.0 if weights is None else float(w) for w in (weights if weights is not None else values)]
    taking_part = [i for i in range(len(values)) if mask is None or bool(mask[i])]
    flat = {}
    for i in taking_part:
        v = torch.cat([values[i]["w"], values[i]["b"].reshape(1)])
        if Clip in kinds:
            norm = v.square().sum().sqrt()
            if norm.item() > kinds[Clip].norm:
                v = v * (kinds[Clip].norm / norm)
        v = v * weight_of[i]
        if Quantize in kinds:
            key = seed_of(seed_of(kinds[Quantize].seed, "quantize"), 3, i)
            v = straight(v, code(kinds[Quantize].codec, key, v))
        if SecureSum in kinds:
            step = 2.0 ** -kinds[SecureSum].fraction_bits
            v = straight(v, (v.double() / step).round() * step)
        flat[i] = v
    if Median in kinds or TrimmedMean in kinds:
        columns = []
        for j in range(4):
            column = sorted([flat[i][j] for i in taking_part], key=lambda x: x.item())
            cut = (len(column) - 1) // 2 if Median in kinds else math.floor(kinds[TrimmedMean].fraction * len(column))
            kept = column[cut : len(column) - cut]
            columns.append(sum(kept) / len(kept))
        total = torch.stack(columns)
    else:
        total = sum(flat.values())
        if Noise in kinds:
            noise = Noise(kinds[Noise].stddev, kinds[Noise].seed)
            drawn, _ = noise.at_server({"w": torch.zeros(3), "b": torch.zeros(())}, ROUND, 1)
            total = total + torch.cat([drawn["w"], drawn["b"].reshape(1)])
        if Mean in kinds:
            total = total / sum(weight_of[i] for i in taking_part)
    return {"w": total[:3].float(), "b": total[3].float()}


def derivatives(loss):
    x, t = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.3, -2.0, 1.0])
    yield "value", loss(x)
    yield "grad", grad(loss)(x)
    yield "jvp", jvp(loss, (x,), (t,))[1]
    yield "jvp of grad", jvp(grad(loss), (x,), (t,))[1]
    yield "grads of a batch", torch.stack([grad(loss)(x), grad(loss)(t)])


def batched(loss):
    """The same, with what is of a batch under vmap."""
    pairs = torch.tensor([[0.5, -1.0, 2.0], [0.3, -2.0, 1.0]])
    for what, value in derivatives(loss):
        yield what, vmap(grad(loss))(pairs) if what == "grads of a batch" else value


def check_against_loops(name, split, rank, are_masked=(False, True)):
    number = sum(split)
    begin = sum(split[:rank])
    own = slice(begin, begin + split[rank])
    rows = rows_of(number)
    for is_masked in are_masked:
        weights = WEIGHTS if is_masked and name not in ROBUST else None
        mask = MASK if is_masked else None
        aggregate = Aggregator(*CHAINS[name])
        state = tuple(ROUND if torch.is_tensor(s) else s for s in aggregate.init(torch.zeros(3)))

        @federated.program(clients=number, num_local=split)
        def program(x, y, weights=weights, mask=mask, aggregate=aggregate, state=state):
            values = federated.map_fn(client, (federated.broadcast(x), y))
            if mask is not None:  # what they have does not count
                values["b"] = torch.where(mask[own], values["b"], torch.tensor(float("nan")))
            mine = (None if one is None else one[own] for one in (weights, mask))
            aggregated, after = aggregate(values, state, **dict(zip(("weights", "mask"), mine, strict=True)))
            assert all(a == ROUND + 1 for a in after if torch.is_tensor(a))
            return loss_of(aggregated)

        def by_hand(x, weights=weights, mask=mask):
            return loss_of(in_loops(CHAINS[name], [client(x, row) for row in rows], weights, mask))

        mine = batched(lambda x, program=program: program(x, rows[own]))
        for (what, ours), (_, theirs) in zip(mine, derivatives(by_hand), strict=True):
            message = f"{what} of {name}, weights {weights}, mask {mask}"
            # Of numbers without axes torch 2.13 makes float64 tangents.
            torch.testing.assert_close(ours, theirs.float(), rtol=2e-4, atol=2e-5, msg=lambda m, x=message: f"{x}: {m}")


@fast_in("name", ["all"], list(CHAINS))
def test_in_one_process(name):
    check_against_loops(name, (6,), 0)


def on_ranks(rank, world_size, name, split, are_masked):
    with process_group():
        check_against_loops(name, split, rank, are_masked)


MASKED, EITHER = (True,), (False, True)
FAST = [("coarse", (3, 3)), ("median", (4, 0, 2))]


@fast_in("name, split, are_masked", [(*one, MASKED) for one in FAST], list(itertools.product(CHAINS, SPLITS, [EITHER])))
def test_on_ranks(pools, name, split, are_masked):
    pools[len(split)].run(on_ranks, args=(name, split, are_masked))


# ---- on ranks


def to_the_bit(rank, world_size, split):
    """Of the chain with everything, and of a robust one; with how many operations each takes."""
    rows, found = rows_of(6).split(split)[rank], []
    with process_group():
        for steps in ((Clip(1.5), Quantize("qsgd", seed=3), SecureSum(), Noise(0.1, seed=2), Mean()), (Median(),)):
            aggregate = Aggregator(*steps)
            program = federated.program(aggregate, clients=6, num_local=split)
            state = aggregate.init(rows)
            for _ in range(3):
                bagua.get_default_group().events(clear=True)
                value, state = program({"w": rows, "b": rows[:, 0]}, state)
                found.append([x.tolist() for x in (value["w"], value["b"])])
            events = bagua.get_default_group().events(clear=True, parts=False)
            assert sum(event.kind == "operation" for event in events) == 1
    return found


def test_results_are_the_same_to_the_bit_on_any_number_of_ranks(pools):
    found = [result for split in ((3, 0, 3), (6, 0)) for result in pools[len(split)].run(to_the_bit, args=(split,))]
    assert all(one == found[0] for one in found)
    first, second, *_ = found[0]
    assert first != second, "each round has noise of its own"


def out_of_range(rank, world_size):
    with process_group():
        program = federated.program(Aggregator(SecureSum(bits=8, fraction_bits=2), Mean()), clients=4)
        mine = torch.tensor([1.0, 100.0 if rank == 1 else 2.0])
        with pytest.raises(InvalidArgument) as caught:
            program(mine, ((), ()))
        value, _ = program(mine.clamp(max=2.0), ((), ()))  # the group is as it was
        assert value == 1.5
    return str(caught.value)


def test_a_value_out_of_range_is_told_to_all_ranks(pool2):
    others, own = pool2.run(out_of_range)
    assert others == "rank 1 has clients with values out of the range of fixed point"
    assert own.startswith(
        "a value of magnitude 100 at [0] is out of the range of fixed point, 7.75 for a sum of 4 terms"
    )


NOTHING = {
    "no leaves": lambda number: {},
    "some": lambda number: {
        "a": torch.ones(number, 2, 0),
        "w": torch.ones(number, 3),
        "z": torch.ones(number, 0, dtype=torch.bfloat16),
    },
}
# Of three clients with (1, 1, 1), whose norm is sqrt(3).
OF_ONES = {"secure": 1.0, "median": 1.0}


def of_nothing(rank, world_size, name, kind, split):
    aggregate, found = Aggregator(*CHAINS[name]), []
    program = federated.program(aggregate, clients=3, num_local=split)
    with process_group():
        value = NOTHING[kind](split[rank])
        for mask in (None, torch.ones(split[rank], dtype=torch.bool)):
            found.append(program(value, aggregate.init(value), mask=mask)[0])
    return found


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("name", OF_ONES)
def test_trees_without_leaves_and_leaves_without_elements(pool2, name, kind):
    expected = {key: leaf[0] for key, leaf in NOTHING[kind](1).items()}
    if kind == "some":
        expected["w"] = torch.full((3,), OF_ONES[name])
    for found in itertools.chain(*pool2.run(of_nothing, args=(name, kind, (1, 2)))):
        torch.testing.assert_close(found, expected)
    for found in pool2.run(of_nothing, args=(name, kind, (3, 0)))[0]:
        torch.testing.assert_close(found, expected)


# ---- by themselves


def run(*steps, values, **options):
    aggregate = Aggregator(*steps)
    program = federated.program(lambda: aggregate(values, aggregate.init(values), **options), clients=len(values))
    return program()[0]


def test_attackers_do_not_move_a_median_far():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, float("nan"), float("inf"), 1e30])
    mask = torch.tensor([True] * 6 + [False])
    assert run(Median(), values=values) == 4
    assert run(Median(), values=values, mask=mask) == 3.5
    assert run(TrimmedMean(0.4), values=values, mask=mask) == 3.5
    assert run(TrimmedMean(0.0), values=values[:4]) == 2.5


def test_noise_has_its_deviation_and_is_added_once():
    noise = run(Noise(0.5, seed=4), values=torch.zeros(3, 20000))
    assert abs(noise.std() - 0.5) < 0.01 and abs(noise.mean()) < 0.015
    assert torch.equal(noise / 3, run(Noise(0.5, seed=4), Mean(), values=torch.zeros(3, 20000)))
    assert not torch.equal(noise, run(Noise(0.5, seed=5), values=torch.zeros(3, 20000)))


@pytest.mark.parametrize("dtype, large", [(torch.float16, 6e4), (torch.bfloat16, 3e38)])
def test_norms_do_not_overflow_and_dtypes_stay(dtype, large):
    values = {"x": torch.tensor([[large, -large], [0.5, 0.0]], dtype=dtype), "y": torch.zeros(2, dtype=dtype)}
    aggregate = Aggregator(Clip(1.0), Noise(0.0, seed=1))
    program = federated.program(lambda: aggregate(values, aggregate.init(values)), clients=2)
    found, _ = program()
    assert found["x"].dtype == found["y"].dtype == dtype
    expected = torch.tensor([0.5 + 0.5**0.5, -(0.5**0.5)], dtype=torch.float64)
    torch.testing.assert_close(found["x"].double(), expected, rtol=3e-2, atol=0)


@pytest.mark.parametrize(
    "dtype, large, norm",
    [
        (torch.float16, 6e4, 1e-2),
        (torch.float32, 3e38, 1e-8),
        (torch.float64, 1e-300, 1e-301),
    ],
)
def test_clipped_values_have_the_norm_at_any_scale(dtype, large, norm):
    """Where factors are below the dtype, or squares beyond it, too."""
    values = torch.tensor([[large, -large, 0.0, large, large]], dtype=dtype)
    expected = torch.tensor([0.5, -0.5, 0.0, 0.5, 0.5], dtype=torch.float64) * norm
    found = run(Clip(norm), values=values)
    rtol = {torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=0)


def test_totals_that_are_no_halves():
    """Weights that add up to more than float16 has, and numbers of clients that bfloat16 has not."""
    values, weights = torch.full((100,), 1e-3, dtype=torch.float16), torch.full((100,), 1000.0)
    assert run(Mean(), values=values, weights=weights) == values[0]
    assert federated.program(federated.reduce_weighted_mean, clients=100)(values, weights) == values[0]
    assert run(Quantize("minmax_uint8"), Mean(), values=1e5 * values, weights=weights) == 1e5 * values[0]
    large = torch.full((100,), 6e4, dtype=torch.float16)
    assert run(Median(), values=large) == run(TrimmedMean(0.1), values=large) == large[0]
    odd = torch.zeros(771, dtype=torch.bfloat16)
    odd[:257] = 3.0  # a 771st is no bfloat16
    assert run(TrimmedMean(0.0), values=odd) == 1


def test_what_is_within_the_norm_stays_to_the_bit():
    values = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    for norm in (41.0, 49.0, 97.3, 1000.0):
        assert values.norm() < norm and torch.equal(run(Clip(norm), values=values), values[0])


def test_a_message_is_of_one_client():
    like = {"w": torch.zeros(3000), "b": torch.zeros(7), "h": torch.zeros(5, dtype=torch.float16)}
    codec = bagua.codecs.get("minmax_uint8")
    expected = codec.wire_bytes(3007, torch.float32) + codec.wire_bytes(5, torch.float16)
    assert Quantize("minmax_uint8").wire_bytes(like) == expected
    values = torch.stack([torch.linspace(0, 1, 3000), torch.linspace(0, 1e6, 3000)])
    found = run(Quantize("minmax_uint8"), values=values, mask=torch.tensor([True, False]))
    assert ((found - values[0]).abs() <= codec.error_bound(values[0])).all()


@pytest.mark.slow("test_isolated_clients_give_what_the_program_gives")
@pytest.mark.parametrize("name", ["clip", "all"])
def test_isolated_clients(name):
    """A chain leaves the data centre: its graph, and that of its gradient, on clients that see their own data only."""
    aggregate = Aggregator(*CHAINS[name])
    rows, x = rows_of(6), torch.tensor([0.5, -1.0, 2.0])

    @federated.program(clients=6)
    def loss(x, y, w, m, state):
        values = federated.map_fn(client, (federated.broadcast(x), y))
        return loss_of(aggregate(values, state, weights=w, mask=m)[0])

    state = pytree.tree_map(lambda round: round + 5, aggregate.init(x))
    function = grad_and_value(loss)
    graph = federated.trace(function, x, rows, WEIGHTS, MASK, state)
    expected = function(x, rows, WEIGHTS, MASK, state)
    torch.testing.assert_close(graph(x, rows, WEIGHTS, MASK, state), expected)
    clients = [federated.Client(y=rows[i], w=WEIGHTS[i], m=MASK[i]) for i in range(6)]
    of_server = {"state": state} if "state" in str(graph) else {}
    found = federated.run_on(federated.IsolatedClients(clients), graph, x=x, **of_server)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_norm_that_is_learned():
    """Its derivative is over all clients, whichever rank holds them."""
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]])

    @federated.program(clients=3)
    def loss(norm):
        aggregate = Aggregator(Clip(norm), Sum())
        return aggregate(values, aggregate.init(values))[0].sum()

    with federated.record() as verbs:
        found = grad(loss)(torch.tensor(2.0))
    torch.testing.assert_close(found, torch.tensor(1.4 * 2))
    assert verbs == ["broadcast", "reduce_sum", "broadcast", "reduce_sum"]


@pytest.mark.slow("test_in_one_process")
@pytest.mark.parametrize("name", ["all", "median"])
def test_compiled(name):
    torch.compiler.reset()
    aggregate = Aggregator(*CHAINS[name])
    rows, state = rows_of(6), aggregate.init(torch.zeros(3))

    @federated.program(clients=6)
    def loss(x):
        return loss_of(aggregate(federated.map_fn(client, (federated.broadcast(x), rows)), state)[0])

    x, t = torch.tensor([0.5, -1.0, 2.0]), torch.ones(3)
    for transformed in (loss, grad(loss), lambda x: jvp(loss, (x,), (t,))):
        torch.testing.assert_close(torch.compile(transformed, backend="aot_eager")(x), transformed(x))


MISTAKES = {
    "a secure median": (lambda: Aggregator(Median(), SecureSum()), "Median needs every client's values, which secure"),
    "another order": (
        lambda: Aggregator(Mean(), Clip(1.0)),
        "steps in the order Mean, Clip, expected: filters, clip, quant",
    ),
    "a dtype": (
        lambda: run(Quantize("qsgd"), values=torch.zeros(2, dtype=torch.float64)),
        "of torch.float64, expected",
    ),
    "a fraction": (lambda: TrimmedMean(0.5), "fraction=0.5"),
    "a traced median": (
        lambda: federated.trace(lambda x: run(Median(), values=x), torch.zeros(3)),
        "Median in a traced program, whose clients' values stay with them",
    ),
    "traced at random": (
        lambda: federated.trace(lambda x: run(Quantize("qsgd"), values=x), torch.zeros(3)),
        "does not round at random",
    ),
    "nobody": (lambda: run(Median(), values=torch.zeros(2), mask=torch.zeros(2, dtype=torch.bool)), "add up to 0"),
    "weights": (lambda: run(Mean(), values=torch.zeros(2), weights=torch.ones(3)), r"weights of shape \[3\], expected"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what):
    make, message = MISTAKES[what]
    with pytest.raises(InvalidArgument, match=message):
        make()
