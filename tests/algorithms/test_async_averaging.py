"""async: what rounds add to the weights adds up to zero over the ranks, and no rank waits for another."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.conformance.training import TIMEOUT_S, assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet


class Linear(torch.nn.Module):
    """loss = sum c x: the gradient is c wherever x is, so what ranks' own steps add up to is known."""

    def __init__(self, numel: int = 3000, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return (self.x * c).sum()


def _integers(rank, step, numel):
    return torch.randint(-8, 8, (numel,), generator=torch.Generator().manual_seed(100 * step + rank)).float()


def _adds_up(rank, world_size, dtype, num_steps, seconds):
    with process_group():
        model = Linear(dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0, bucket_bytes=4000)
        own = torch.zeros(3000, dtype=torch.float64)
        for step in itertools.count():
            if step >= num_steps[rank] and _num_rounds(model) >= 3:
                break
            # A rank that waits for a slower one stays where it is: dtypes of few bits round larger weights more.
            c = _integers(rank, step, 3000) if step < 4 * num_steps[rank] else torch.zeros(3000)
            optimizer.zero_grad()
            model(c.to(dtype)).backward()
            optimizer.step()
            own -= c.double()
            time.sleep(seconds[rank])
        model.bagua.pause()
        stepped, weights = own.clone(), model.x.detach().double()
        bagua.all_reduce(stepped)
        bagua.all_reduce(weights)
        return float((stepped - weights).abs().max()), float(stepped.abs().max())


def _num_rounds(model):
    return len({span.begin_ns for span in model.bagua.timeline().spans if span.kind == "operation"})


@fast_in("size, dtype", [(4, torch.float64)], list(itertools.product([2, 4], [torch.float32, torch.float64])))
def test_corrections_add_up_to_zero_exactly(pool2, pool4, size, dtype):
    """Integers and halves: every mean of two and of four is exact, so nothing may be lost or counted twice."""
    num_steps = [10 + 3 * rank for rank in range(size)]
    seconds = [0.002 * (1 + rank) for rank in range(size)]
    for difference, largest in {2: pool2, 4: pool4}[size].run(_adds_up, args=(dtype, num_steps, seconds)):
        assert difference == 0.0 if dtype == torch.float64 else difference < 1e-3
        assert largest > 10


@fast_in("dtype", [torch.bfloat16], [torch.float16, torch.bfloat16])
def test_dtypes(pool2, dtype):
    for difference, largest in pool2.run(_adds_up, args=(dtype, [8, 8], [0.003, 0.003])):
        assert difference < 0.02 * largest + 2


def _converges(rank, world_size):
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
        for _ in range(150):
            step_once(model, optimizer, rank, 0)
            bagua.barrier()  # of two ranks on a busy machine one may be done before the other begins
        model.bagua.pause()
        return weights_of(model)


def test_ranks_meet_between_their_targets(pool2):
    weights = pool2.run(_converges)
    targets = [target_of(rank, 0, Quadratic().numel) for rank in range(2)]
    mean = sum(targets) / 2
    for own, target in zip(weights, targets, strict=True):
        alone = float((target - mean).norm())
        assert float((torch.tensor(own, dtype=torch.float64) - mean).norm()) < 0.5 * alone


def _behind_no_rank(rank, world_size):
    """Rank 1 makes its first step when rank 0 has made twenty, in the middle of a round that waits for rank 1."""
    with process_group():
        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)

        def step():
            optimizer.zero_grad()
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()

        if rank == 1:
            meet()
        for _ in range(20):
            step()
        end_ns = time.monotonic_ns()
        if rank == 0:
            meet()
        while not _num_rounds(model):
            step()
        model.bagua.pause()
        # An operation that was started may still be queued for the thread that carries it out.
        spans = [span for span in model.bagua.timeline().spans if span.kind in ("queued", "operation")]
        return min(span.begin_ns for span in spans), end_ns, max(span.end_ns for span in spans)


def test_a_slow_rank_slows_no_other_down(pool2):
    """No step waits for a round: the timeline shows one that began under the steps and ended after them."""
    begin_ns, stepped_ns, end_ns = pool2.run(_behind_no_rank)[0]
    assert begin_ns < stepped_ns < end_ns


def _whatever_order(rank, world_size):
    """Two forwards, no_sync, evaluation, an early end: nothing waits for ever."""
    begin = time.monotonic()
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
        target = target_of(rank, 0, model.numel).float()
        for step in range(12):
            (model(target) + model(target)).backward()
            with model.bagua.no_sync():
                model(target).backward()
            with torch.no_grad():
                model(target)
            if step % 3 != rank:
                optimizer.step()
            optimizer.zero_grad()
            if rank == 1 and step == 5:
                break
        # Rank 1 leaves while rank 0 is under way, without a word; destroying the group tells the others.
    return time.monotonic() - begin


@pytest.mark.timed
def test_two_forwards_no_sync_evaluation_and_early_end(pool2):
    assert max(pool2.run(_whatever_order)) < TIMEOUT_S, "some wait ended by its deadline"


def _warm_up(rank, world_size):
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=7.0, warmup_steps=4)
        equal = []
        for step in range(8):
            step_once(model, optimizer, rank, step)
            everyone = bagua.get_default_group().all_gather_object(weights_of(model))
            equal.append(everyone[0] == everyone[1])
        model.bagua.pause()
        return equal


def test_warm_up_is_synchronous(pool2):
    assert pool2.run(_warm_up)[0] == [True] * 4 + [False] * 4


def _scaler(rank, world_size):
    """A rank's own overflow makes it skip its own step only, and no round is lost."""
    with process_group():
        model = Linear(numel=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        num_skipped = 0
        for step in range(8):
            optimizer.zero_grad()
            is_bad = rank == 1 and step == 3
            scaler.scale(model(torch.full((64,), float("inf") if is_bad else 1.0))).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            num_skipped += scaler.get_scale() < before
        model.bagua.pause()
        total = model.x.detach().double()
        bagua.all_reduce(total)
        return num_skipped, float(total[0])


def test_each_rank_skips_its_own_steps(pool2):
    results = pool2.run(_scaler)
    assert [skipped for skipped, _ in results] == [0, 1]
    assert results[0][1] == -(8 + 7)


def _two_models(rank, world_size):
    with process_group():
        models = [Quadratic(), Quadratic()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
        for step in range(6 + 4 * rank):
            for model, optimizer in zip(models, optimizers, strict=True):
                step_once(model, optimizer, rank, step)
        for model in models:
            model.bagua.pause()
        bagua.with_bagua(models[0], optimizers[0])  # another algorithm
        assert_equal_on_all_ranks(dict(models[0].named_parameters()))


def test_two_models_and_another_algorithm(pool2):
    pool2.run(_two_models)


def test_options():
    with pytest.raises(InvalidArgument, match="sync_interval is -1, expected 0 seconds or more"):
        bagua.algorithms.create("async", {"sync_interval": -1})
    with pytest.raises(InvalidArgument, match="warmup_steps is -1, expected 0 or more"):
        bagua.algorithms.create("async", {"warmup_steps": -1})


def _two_optimizers(rank, world_size, seconds):
    """A step between two backwards of one forward; the second optimizer steps less often."""
    with process_group():
        model = torch.nn.ModuleList([Linear(), Linear(numel=500)])
        model.forward = lambda c: [part(c[: part.x.numel()]) for part in model]
        optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
        bagua.with_bagua(model, optimizers, algorithm="async", sync_interval=0.0, find_unused_parameters=True)
        own = [torch.zeros_like(part.x) for part in model]

        def num_rounds():
            return sum(s.label == "bucket 0" for s in model.bagua.timeline().spans if s.kind == "operation")

        for step in itertools.count():
            if step >= 40 and num_rounds() >= 4:
                break
            c = _integers(rank, step, 3000).requires_grad_()  # so that backward needs x as it was
            for index, loss in enumerate(model(c)):
                loss.backward()
                time.sleep(seconds[rank])
                if index == 0 or step % 3 == 2:
                    optimizers[index].step()
                    own[index] += model[index].x.grad
                    optimizers[index].zero_grad()
        model.bagua.pause()
        weights = [part.x.detach().clone() for part in model]
        totals = []
        for tensor in (*own, *weights):
            bagua.all_reduce(tensor)
            totals.append(tensor)
        return [float((stepped + w).abs().max()) for stepped, w in zip(totals[:2], totals[2:], strict=True)]


def test_two_optimizers_each_with_its_own_steps(pool2):
    for differences in pool2.run(_two_optimizers, args=([0.001, 0.002],)):
        assert max(differences) < 1e-3, differences


def _other_state(rank, world_size):
    with process_group():
        model = torch.nn.ModuleList([Linear(), Linear()])
        whole = torch.optim.SGD(model.parameters(), lr=0.1)
        state = bagua.with_bagua(model, whole, algorithm="async").bagua.state_dict()
        model.bagua.remove()
        halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        bagua.with_bagua(model, halves, algorithm="async")
        with pytest.raises(InvalidArgument, match="checkpoint was written with 1 optimizers, the model has 2"):
            model.bagua.load_state_dict(state)


def test_a_state_with_another_number_of_optimizers(pool2):
    pool2.run(_other_state)
