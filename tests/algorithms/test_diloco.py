"""diloco beside its oracle in plain float64 loops, and the identities that tie the methods of the engine together."""

from __future__ import annotations

import copy
import time

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in

LR, MOMENTUM, STEPS = 0.1, 0.5, 16
SIZES = (91, 5)  # of the parts of Quadratic


def oracle(n, sync_every, fragments=1, overlap_steps=0, merge=0.0, outer_lr=0.7, outer_momentum=0.9, warmup_steps=0):
    """The weights of all ranks after each step. Fragment p is part p of the model, or both are one."""
    numel = sum(SIZES)
    part_of = [part if fragments > 1 else 0 for part, size in enumerate(SIZES) for _ in range(size)]
    weights = [[0.0] * numel for _ in range(n)]
    velocity = [[0.0] * numel for _ in range(n)]
    reference, outer = [0.0] * numel, [0.0] * numel
    under_way, history = {}, []
    for step in range(STEPS):
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        gradients = [[x - c for x, c in zip(weights[i], targets[i], strict=True)] for i in range(n)]
        if step < warmup_steps:
            gradients = [[sum(g[e] for g in gradients) / n for e in range(numel)]] * n
        velocity = [[MOMENTUM * v + g for v, g in zip(velocity[i], gradients[i], strict=True)] for i in range(n)]
        weights = [[x - LR * v for x, v in zip(weights[i], velocity[i], strict=True)] for i in range(n)]
        local = step + 1 - warmup_steps
        if local == 0:
            reference = list(weights[0])
        for fragment in range(fragments) if local > 0 else ():
            if local % sync_every == fragment * sync_every // fragments:
                mine = [e for e in range(numel) if part_of[e] == fragment]
                deltas = {e: sum(reference[e] - weights[i][e] for i in range(n)) / n for e in mine}
                under_way[local + overlap_steps] = deltas
            for e, delta in under_way.pop(local, {}).items():
                outer[e] = outer_momentum * outer[e] + delta
                reference[e] -= outer_lr * (delta + outer_momentum * outer[e])
                for i in range(n):
                    weights[i][e] = merge * weights[i][e] + (1 - merge) * reference[e]
        history.append(weights)
    return history


def train(rank, steps=range(STEPS), algorithm="diloco", dtype=torch.float64, momentum=MOMENTUM, **options):
    model = Quadratic(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
    return [step_once(model, optimizer, rank, step) for step in steps]


def in_group(rank, world_size, *variants):
    """The history of each variant, a dict of what ``train`` takes."""
    with process_group():
        return [train(rank, **options) for options in variants]


PLAIN = {"sync_every": 3}
STREAMING = {"sync_every": 6, "fragments": 2, "overlap_steps": 2, "merge": 0.25}
VARIANTS = [
    PLAIN,
    {"sync_every": 1, "outer_momentum": 0.0, "outer_lr": 0.4},
    {"sync_every": 4, "overlap_steps": 3, "warmup_steps": 5},
    STREAMING,
    {**STREAMING, "merge": 0.0, "overlap_steps": 1, "warmup_steps": 2},
]


def test_follows_the_oracle(pool4):
    """Quadratic losses have closed-form steps, so overlap and merging are exact as well."""
    per_rank = pool4.run(in_group, args=tuple(VARIANTS))
    for index, options in enumerate(VARIANTS):
        for step, weights in enumerate(oracle(4, **options)):
            for rank, expected in enumerate(weights):
                assert per_rank[rank][index][step] == pytest.approx(expected, abs=1e-12), (options, step, rank)


IDENTITIES = {
    "outer lr 1 without momentum: local_sgd": (
        {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.0},
        {"algorithm": "local_sgd", "sync_every": 3, "momentum_of_it": "keep"},
    ),
    "with H 1 and plain SGD: gradient_allreduce": (
        {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "momentum": 0.0},
        {"algorithm": "gradient_allreduce", "momentum": 0.0},
    ),
}


def _identities(rank, world_size):
    with process_group():
        for name, pair in IDENTITIES.items():
            results = []
            for options in copy.deepcopy(pair):
                kept = options.pop("momentum_of_it", None)
                if kept is None:
                    results.append(train(rank, **options))
                    continue
                model = Quadratic(dtype=torch.float64)
                optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
                bagua.with_bagua(model, optimizer, momentum=kept, **options)
                results.append([step_once(model, optimizer, rank, step) for step in range(STEPS)])
            for ours, theirs in zip(*results, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-12), name


@fast_in("num_ranks", [2], [2, 3, 4])
def test_identities(num_ranks):
    bagua.testing.spawn(_identities, num_ranks)


def _error_feedback(rank, world_size, codec, decay):
    """The ledger: what was sent and what is kept add up to all deltas, of which a decay forgets a share each time."""
    with process_group():
        model = torch.nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"codec": codec, "error_feedback": True, "feedback_decay": decay}
        bagua.with_bagua(
            model, optimizer, algorithm="diloco", sync_every=1, outer_lr=0.5, outer_momentum=0.0, **options
        )
        owed = torch.zeros(64, 64, dtype=torch.float64)
        for step in range(6):
            generator = torch.Generator().manual_seed(100 * step + rank)
            model.weight.grad = torch.randn(64, 64, generator=generator)
            before = model.weight.detach().clone()
            optimizer.step()
            delta = torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            table = torch.empty(world_size, 64, 64)
            bagua.all_gather(table, delta)
            mean = table.double().mean(0)
            sent = (before.double() - model.weight.double()) / 0.5
            owed = decay * owed + mean - sent
        state = model.bagua.state_dict()["parameters"]["states"]["residual"]
        # Each rank owes what its own codes have left out, an n-th of which counts, and the owner of a stripe what the
        # mean's codes have.
        residual = torch.zeros(64, 64, dtype=torch.float64)
        residual += state["parameters"]["weight"].double().view(64, 64) / world_size
        ((first, numel, stripe),) = state["stripes"].values()
        owner = torch.zeros(numel, dtype=torch.float64)
        owner[first : first + stripe.numel()] = stripe.double()
        mine = residual + owner[: 64 * 64].view(64, 64)
        bagua.all_reduce(mine)
        return (mine - owed).abs().max().item(), owed.abs().max().item()


@pytest.mark.parametrize("codec, decay", [("minmax_uint8", 1.0), ("onebit", 0.9)])
def test_the_ledger_of_error_feedback(pool2, codec, decay):
    for difference, owed in pool2.run(_error_feedback, args=(codec, decay)):
        assert owed > 1e-3
        assert difference < 1e-5, (difference, owed)


def _resumes(rank, world_size, options):
    """Saved and loaded while an exchange is under way, training continues bit for bit."""
    with process_group():
        straight = train(rank, dtype=torch.float32, **options)
        for stop in (7, 8):  # a fragment is under way after step 7, and has just begun or been merged after 8
            model = Quadratic()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
            bagua.with_bagua(model, optimizer, algorithm="diloco", **options)
            for step in range(stop):
                step_once(model, optimizer, rank, step)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()))
            after = [step_once(model, optimizer, rank, step) for step in range(stop, STEPS)]
            assert after == straight[stop:]
            again = Quadratic()
            optimizer = torch.optim.SGD(again.parameters(), lr=LR, momentum=MOMENTUM)
            bagua.with_bagua(again, optimizer, algorithm="diloco", **options)
            again.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            again.bagua.load_state_dict(saved[2])
            assert [step_once(again, optimizer, rank, step) for step in range(stop, STEPS)] == straight[stop:]


RESUMED = [
    {"sync_every": 2, "codec": "onebit", "error_feedback": True},
    {"sync_every": 4, "overlap_steps": 2, "state_device": "cpu", "state_dtype": "bfloat16"},
    STREAMING,
    {"sync_every": 4, "overlap_steps": 3, "codec": "qsgd:bits=4"},
    {
        "sync_every": 4,
        "codec": "minmax_uint8",
        "error_feedback": True,
        "feedback_decay": 0.9,
        "state_dtype": "bfloat16",
    },
]


@pytest.mark.parametrize("options", RESUMED)
def test_resumes_with_an_exchange_under_way(pool2, options):
    pool2.run(_resumes, args=(options,))


def _global_model(rank, world_size):
    """synchronize() ends what is under way and takes an outer step, so that all ranks have the reference."""
    with process_group():
        model = Quadratic(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        options = {"sync_every": 4, "overlap_steps": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
        bagua.with_bagua(model, optimizer, algorithm="diloco", **options)
        for step in range(5):
            step_once(model, optimizer, rank, step)
        model.bagua.synchronize()
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        model.bagua.synchronize()
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        step_once(model, optimizer, rank, 5)  # which merged nothing, as nothing is under way
        mine = torch.tensor(weights_of(model), dtype=torch.float64)
        expected = mine.clone()
        bagua.all_reduce(expected, bagua.ReduceOp.AVG)
        model.bagua.synchronize()
        assert weights_of(model) == pytest.approx(expected.tolist(), abs=1e-12)


def test_the_global_model(pool2):
    pool2.run(_global_model)


def _again(rank, world_size):
    """A second synchronize() changes nothing: no local step is between, and the momentum alone is not to move it."""
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="diloco", sync_every=4, fragments=2)
        for step in range(7):
            step_once(model, optimizer, rank, step)
        model.bagua.synchronize()
        before = weights_of(model)
        model.bagua.synchronize()
        assert weights_of(model) == before
        step_once(model, optimizer, rank, 7)  # exchanges fragment 0
        model.bagua.synchronize()
        assert weights_of(model) != before


def test_synchronizing_again(pool2):
    pool2.run(_again)


def _small_dtype(rank, world_size):
    """Means of less than half an ulp of bf16 add up in the reference: rank 0 moves by one in each round, others not."""
    with process_group():
        model = Quadratic(dtype=torch.bfloat16)
        with torch.no_grad():
            for part in model.parts:
                part.fill_(1.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
        bagua.with_bagua(model, optimizer, algorithm="diloco", **options)
        ulp = 2.0**-7
        for _ in range(12):
            for part in model.parts:
                part.grad = torch.full_like(part, ulp if rank == 0 else 0.0)
            optimizer.step()
        for bucket in model.bagua.buckets:
            for member in bucket.members:
                reference = bucket.state("reference", member)
                assert float((reference - (1.5 - 12 * ulp / world_size)).abs().max()) < 1e-5
        for part in model.parts:
            assert float((part.detach().float() - (1.5 - 12 * ulp / world_size)).abs().max()) <= ulp / 2


def test_weights_of_a_smaller_dtype(pool4):
    pool4.run(_small_dtype)


def _ends_early(rank, world_size):
    """The model of a function that has returned is gone, while its last exchange is under way for the other rank."""

    def run():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="diloco", sync_every=4, overlap_steps=3, check_replicas=False)
        for step in range(4):
            step_once(model, optimizer, rank, step)
        if rank == 1:
            time.sleep(0.3)
            for step in range(4, 7):
                step_once(model, optimizer, rank, step)

    with process_group():
        run()


def test_a_rank_that_ends_while_an_exchange_is_under_way(pool2):
    pool2.run(_ends_early)


def _parted(rank, world_size):
    """A rank whose reference differs is found before its values are taken, on all ranks."""
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="diloco", sync_every=2)
        step_once(model, optimizer, rank, 0)
        if rank == 1:
            model.bagua.buckets[0].state("reference")[3] += 1e-3
        # A rank may hear of it from the other one first.
        with pytest.raises(bagua.BaguaError, match="rank 1 has another reference of fragment 0 than rank 0"):
            step_once(model, optimizer, rank, 1)


def test_references_that_differ(pool2):
    pool2.run(_parted)


BAD = [
    ({"sync_every": 0}, "sync_every is 0, expected 1 or more"),
    ({"sync_every": 10, "fragments": 4}, "sync_every is 10, expected a multiple of fragments=4"),
    ({"sync_every": 8, "fragments": 4, "overlap_steps": 2}, "overlap_steps is 2, expected less than .* = 2"),
    ({"overlap_steps": 5, "merge": 1.5}, "merge is 1.5, expected 0 .* to 1"),
    ({"merge": 0.5}, "merge is 0.5 with overlap_steps=0"),
    ({"outer_lr": 0.0}, "outer_lr is 0.0, expected a number above 0"),
    ({"outer_momentum": 1.0}, "outer_momentum is 1.0, expected 0 or more, and below 1"),
    ({"codec": "onebit"}, "codec 'onebit' loses as much as it sends"),
    ({"error_feedback": True}, "error_feedback=True without a codec"),
    ({"codec": "bf16", "feedback_decay": 0.9}, "feedback_decay is 0.9, but there is no error_feedback"),
    ({"warmup_steps": -1}, "warmup_steps is -1, expected 0 or more"),
    ({"state_device": "cuda"}, "state_device is 'cuda', expected ''"),
    ({"fragments": 3, "sync_every": 3}, "fragments is 3, but the model has 2 parameters"),
]


def _refused(rank, world_size):
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for options, message in BAD:
            with pytest.raises(InvalidArgument, match=message):
                bagua.with_bagua(model, optimizer, algorithm="diloco", **options)
        with pytest.raises(InvalidArgument, match="the ranks disagree about option 'outer_lr'"):
            bagua.with_bagua(model, optimizer, algorithm="diloco", outer_lr=0.5 + rank)
        with pytest.raises(InvalidArgument, match="no optimizer that was passed to with_bagua steps"):
            bagua.with_bagua(model, algorithm="diloco")


def test_bad_input(pool2):
    pool2.run(_refused)


class WithBuffers(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t() + rank)  # not contiguous
        self.complex = torch.nn.Parameter(torch.full((3,), 1 + 2j * rank))
        self.register_buffer("mean", torch.full((4,), float(rank), dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7 + rank))


def _average(rank, world_size):
    with process_group():
        model = WithBuffers(rank)
        averaged = bagua.average_model(model)
        shift = (world_size - 1) / 2
        assert torch.equal(averaged.weight, torch.arange(6.0).view(2, 3).t() + shift)
        assert torch.equal(averaged.complex, torch.full((3,), 1 + 2j * shift))
        assert torch.equal(averaged.mean, torch.full((4,), shift, dtype=torch.float64))
        assert averaged.count == 7
        assert torch.equal(model.mean, torch.full((4,), float(rank), dtype=torch.float64))


def test_average_model(pool2):
    pool2.run(_average)
