"""prepare() with Accelerate's own Accelerator; the oracle is accelerator.prepare, which takes torch's DDP over gloo."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.distributed.worlds import SAME_TEST, fast_in

pytestmark = pytest.mark.needs("accelerate")
ONEBIT = {"algorithm": "bytegrad", "codec": "onebit", "error_feedback": True}


@contextlib.contextmanager
def accelerators():
    """Yields what makes an Accelerator on the CPU; its groups and bagua's end with the block."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        yield lambda **options: Accelerator(cpu=True, **options)
    finally:
        bagua.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._reset_state()


def objects(optimizer="sgd"):
    """Returns a model, its optimizer, a loader and a scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 512), torch.nn.BatchNorm1d(512), torch.nn.ReLU(), torch.nn.Linear(512, 4)
    )
    if optimizer == "qadam":
        made = bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, made, loader_of(64), torch.optim.lr_scheduler.StepLR(made, 4, 0.5)


def loader_of(num_rows):
    x = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


def epoch(accelerator, model, optimizer, batches, scheduler):
    """Trains; returns the bytes that bagua has sent before and after each micro-batch."""
    sent_bytes = []
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        sent_bytes.append(bagua.get_default_group().bytes_sent if bagua.is_initialized() else 0)
    return sent_bytes


def weights_of(accelerator, model):
    return {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def _beside_ddp(rank, world_size, mixed_precision):
    from bagua.integrations.accelerate import prepare

    with accelerators() as make:
        accelerator = make(gradient_accumulation_steps=2, mixed_precision=mixed_precision)
        theirs = accelerator.prepare(*objects())
        mine = prepare(accelerator, *objects())
        assert type(mine[0]) is torch.nn.Sequential and mine[0].bagua.algorithm.name == "gradient_allreduce"
        for prepared in (theirs, mine):
            sent_bytes = epoch(accelerator, *prepared)
        num_bytes = 4 * sum(parameter.numel() for parameter in mine[0].parameters())
        first, in_micro_batch, second = (b - a for a, b in itertools.pairwise(sent_bytes))
        assert in_micro_batch == 0 and num_bytes <= first < 2 * num_bytes and num_bytes <= second < 2 * num_bytes
        theirs, mine = (weights_of(accelerator, prepared[0]) for prepared in (theirs, mine))
        if rank != 0:  # torch sends rank 0's buffers before the next forward, bagua after each backward
            theirs, mine = (
                {name: value for name, value in of.items() if "running" not in name} for of in (theirs, mine)
            )
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@fast_in("mixed_precision", ["bf16"], ["no"])
def test_trains_as_ddp_does(pool2, mixed_precision):
    """Micro-batches send nothing."""
    pool2.run(_beside_ddp, args=(mixed_precision,))


def _tokens(rank, world_size):
    """The gradient of a mean over rows, of ranks and micro-batches with different numbers of them."""
    from bagua.integrations.accelerate import prepare

    with accelerators() as make:
        accelerator = make(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model, whole, loss = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4), torch.nn.functional.cross_entropy
        whole.load_state_dict(model.state_dict())
        model = prepare(accelerator, model)
        x, y = loader_of(20).dataset.tensors
        for rows in [[range(1), range(1, 6)], [range(6, 15), range(15, 20)]]:
            with accelerator.accumulate(model):
                mine = [*rows[rank]]
                weight = model.bagua.weight(len(mine)) * accelerator.gradient_accumulation_steps
                accelerator.backward(loss(model(x[mine]), y[mine]) * weight)
        loss(whole(x), y).backward()
        torch.testing.assert_close(model.weight.grad, whole.weight.grad)


def test_means_that_count_tokens(pool2):
    pool2.run(_tokens)


def _resume(rank, world_size, folder, options):
    from bagua.integrations.accelerate import prepare

    folder, kind = str(folder), "qadam" if options["algorithm"] == "qadam" else "sgd"
    weights = []
    with accelerators() as make:
        for is_resumed in (False, True):
            accelerator = make()
            prepared = prepare(accelerator, *objects(kind), **options)
            if is_resumed:
                accelerator.load_state(folder)
            else:
                epoch(accelerator, *prepared)
                accelerator.save_state(folder)
            epoch(accelerator, *prepared)
            prepared[0].bagua.remove()
            weights.append(weights_of(accelerator, prepared[0]))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


OTHERS = [{"algorithm": "local_sgd", "sync_every": 3}, {"algorithm": "qadam", "codec": "onebit"}]


@pytest.mark.parametrize(
    "options",
    [ONEBIT, *(pytest.param(one, marks=SAME_TEST) for one in ({"algorithm": "decentralized"}, *OTHERS))],
    ids=lambda options: options["algorithm"],
)
def test_resuming_equals_never_having_stopped(pool2, tmp_path, options):
    pool2.run(_resume, args=(tmp_path, options))


def _async(rank, world_size):
    from bagua.integrations.accelerate import prepare

    with accelerators() as make:
        accelerator = make()
        prepared = prepare(accelerator, *objects(), algorithm="async", sync_interval=0.001)
        is_averaged = torch.zeros(1)
        while not is_averaged:
            epoch(accelerator, *prepared)
            is_averaged[0] = prepared[0].bagua.timeline().summary()["bytes_sent"] > 0
            is_averaged = accelerator.reduce(is_averaged, "sum")
        prepared[0].bagua.remove()


def test_weights_are_averaged_in_the_background(pool2):
    pool2.run(_async)


def _other_world(rank, world_size, folder):
    from bagua.integrations.accelerate import prepare

    with accelerators() as make:
        accelerator = make()
        prepared = prepare(accelerator, *objects(), **ONEBIT)
        if world_size == 2:
            epoch(accelerator, *prepared)
            accelerator.save_state(folder)
            return float(prepared[0][0].weight.detach().double().sum())
        else:
            accelerator.load_state(folder)
            loaded = float(prepared[0][0].weight.detach().double().sum())
            epoch(accelerator, *prepared)
            return loaded


def test_on_another_number_of_ranks_it_trains_on(pool2, tmp_path):
    saved = pool2.run(_other_world, args=(str(tmp_path),))
    from bagua.testing import spawn

    assert spawn(_other_world, 1, args=(str(tmp_path),))[0] == saved[0]


def _apart(rank, world_size, folder):
    """Two ranks train apart and save; another number of ranks loads."""
    from bagua.integrations.accelerate import prepare

    with accelerators() as make:
        accelerator = make()
        prepared = prepare(accelerator, *objects(), algorithm="local_sgd", sync_every=100)
        if world_size == 2:
            epoch(accelerator, *prepared)
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        model, optimizer = prepared[0], prepared[1].optimizer
        momenta = [optimizer.state[parameter]["momentum_buffer"].tolist() for parameter in model.parameters()]
        return [value.tolist() for value in model.state_dict().values()], momenta


def test_on_another_number_of_ranks_weights_begin_from_their_mean(pool2, tmp_path):
    """And the optimizer's momenta; counters, such as BatchNorm's, are rank 0's."""
    first, second = pool2.run(_apart, args=(str(tmp_path),))
    from bagua.testing import spawn

    (loaded,) = spawn(_apart, 1, args=(str(tmp_path),))
    assert first != second
    for mine, other, mean in zip(*(itertools.chain(*one) for one in (first, second, loaded)), strict=True):
        mine, other = torch.tensor(mine), torch.tensor(other)
        expected = (mine + other) / 2 if mine.is_floating_point() else mine
        torch.testing.assert_close(torch.tensor(mean), expected)


def _two_models(rank, world_size):
    from bagua.integrations.accelerate import prepare

    with accelerators() as make, pytest.raises(bagua.InvalidArgument, match="got 2 models, expected one"):
        prepare(make(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def test_several_models_are_refused(pool2):
    pool2.run(_two_models)
