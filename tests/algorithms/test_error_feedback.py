"""Error feedback: nothing is lost, a backward with NaN changes nothing, and residuals follow their parameters."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import checkpoint

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, process_group

BLOCK = 2048
CODECS = ["onebit", "topk:k=64", "minmax_uint8", "qsgd:bits=4"]


class Sum(torch.nn.Module):
    """loss = sum c x: the gradient is c."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, *cs: torch.Tensor) -> torch.Tensor:
        return sum((part * c).sum() for part, c in zip(self.parts, cs, strict=True))


def _wrap(model, codec, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"min_compressed_bytes": 0, "error_feedback": True, **options}
    return bagua.with_bagua(model, optimizer, algorithm="bytegrad", codec=codec, **options), optimizer


def _integers(rank, step, shape):
    return torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(100 * step + rank)).float()


def _state(model):
    """Returns what this rank keeps as a contributor, by parameter, and as an owner, by bucket under a codec."""
    state = model.bagua.state_dict()["parameters"]["states"]["residual"]
    if not state["parameters"] and not state["stripes"]:  # nothing was sent yet, so nothing was left out
        return {"worker": {"parts.0": torch.zeros(())}, "owner": [torch.zeros(())]}
    return {"worker": state["parameters"], "owner": [stripe[-1] for stripe in state["stripes"].values()]}


def _residuals(model):
    """Returns by parameter the mean of what contributors keep, and what the owners keep, in float64."""
    state = _state(model)
    group = bagua.get_default_group()
    worker = {name: value.double() for name, value in state["worker"].items()}
    for value in worker.values():
        group.all_reduce(value).wait()
    owners = group.all_gather_object(state["owner"])
    coded = [bucket for bucket in model.bagua.buckets if bucket.declaration.codec is not None]
    owner = {}
    for index, bucket in enumerate(coded):
        whole = torch.cat([of_rank[index] for of_rank in owners]).double()
        for member in bucket.members:
            begin, end = bucket.place_of(member)
            owner[member.name] = whole[begin:end]
    return {name: value / group.size for name, value in worker.items()}, owner


def _nothing_is_lost(rank, world_size, codec, shapes, num_steps, exact, options):
    with process_group():
        model, optimizer = _wrap(Sum(*shapes), codec, **options)
        means = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for step in range(num_steps):
            optimizer.zero_grad()
            model(*[_integers(rank, 10 * step + i, shape) for i, shape in enumerate(shapes)]).backward()
            optimizer.step()
            for i, shape in enumerate(shapes):
                means[i] += sum(_integers(r, 10 * step + i, shape).double() for r in range(world_size)) / world_size
        worker, owner = _residuals(model)
        assert any(float(value.abs().max()) > 0 for value in worker.values())
        for i, part in enumerate(model.parts):
            name = f"parts.{i}"
            sent = -part.detach().double().reshape(-1)  # a learning rate of 1 adds up what was sent
            difference = sent + worker[name] + owner[name] - means[i].reshape(-1)
            assert float(difference.abs().max()) <= (0.0 if exact else 1e-3 * num_steps), (name, codec)
        assert_equal_on_all_ranks(dict(model.named_parameters()))


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_sent_and_what_is_kept_add_up_to_the_gradients(pool2, pool4, codec):
    """topk keeps values as they are, so that with integers it is so to the bit."""
    exact = codec.startswith("topk")
    pool2.run(_nothing_is_lost, args=(codec, [(8, BLOCK)], 12, exact, {}))
    pool4.run(_nothing_is_lost, args=(codec, [(3, 1000), (7, 1111)], 12, exact, {"bucket_bytes": 20_000}))


def test_between_nodes(pool_of_two_nodes):
    options = {"hierarchical": True}
    pool_of_two_nodes.run(
        _between_nodes, args=("topk:k=64", [(8, BLOCK)], 6, options), env={"BAGUA_SOCKET_IFNAME": "lo"}
    )


def _between_nodes(rank, world_size, codec, shapes, num_steps, options):
    """Only leaders keep residuals: theirs, over the number of ranks, and the owners' add up."""
    with process_group():
        model, optimizer = _wrap(Sum(*shapes), codec, **options)
        mean = torch.zeros(shapes[0], dtype=torch.float64)
        for step in range(num_steps):
            optimizer.zero_grad()
            model(_integers(rank, 10 * step, shapes[0])).backward()
            optimizer.step()
            mean += sum(_integers(r, 10 * step, shapes[0]).double() for r in range(world_size)) / world_size
        state = _state(model)
        leads = rank in bagua.get_default_group().nodes.leaders
        assert bool(state["worker"]) == leads
        everyone = bagua.get_default_group().all_gather_object(state)
        leaders = bagua.get_default_group().nodes.leaders
        worker = sum(everyone[leader]["worker"]["parts.0"].double() for leader in leaders)
        owner = torch.cat([everyone[leader]["owner"][0] for leader in leaders]).double()
        sent = -model.parts[0].detach().double().reshape(-1)
        assert torch.equal(sent + worker + owner, mean.reshape(-1))


def _with_nan(rank, world_size):
    with process_group():
        model, optimizer = _wrap(Sum((4, BLOCK), (8,)), "onebit")
        for step in range(6):
            before = _state(model)
            optimizer.zero_grad()
            matrix, bias = _integers(rank, step, (4, BLOCK)), torch.ones(8)
            if step == 2 and rank == 1:
                matrix[1, 1] = float("inf")  # under the codec
            if step == 4 and rank == 0:
                bias[3] = float("nan")  # in a bucket without
            model(matrix, bias).backward()
            after = _state(model)
            same = [
                torch.equal(before["worker"]["parts.0"], after["worker"]["parts.0"]),
                torch.equal(before["owner"][0], after["owner"][0]) or not after["owner"][0].numel(),
            ]
            assert all(same) if step in (2, 4) else not same[0], step
            assert all(bool(value.isfinite().all()) for value in after["worker"].values())
            is_finite = [bool(part.grad.isfinite().all()) for part in model.parts]
            assert is_finite == [step != 2, step != 4], step  # on all ranks, in the same parameters
            if all(is_finite):
                optimizer.step()
        assert_equal_on_all_ranks(dict(model.named_parameters()))


def test_a_backward_with_nan_leaves_no_trace(pool2):
    pool2.run(_with_nan)


def _accumulated(rank, world_size):
    """Two synchronising backwards before a step: the second continues from the residuals of the first."""
    with process_group():
        model, optimizer = _wrap(Sum((8, BLOCK)), "topk:k=64")
        mean = torch.zeros((8, BLOCK), dtype=torch.float64)
        for step in range(4):
            optimizer.zero_grad()
            for half in range(2):
                model(_integers(rank, 2 * step + half, (8, BLOCK))).backward()
                mean += sum(_integers(r, 2 * step + half, (8, BLOCK)).double() for r in range(world_size)) / world_size
            optimizer.step()
        worker, owner = _residuals(model)
        total = -model.parts[0].detach().double().reshape(-1) + worker["parts.0"] + owner["parts.0"]
        assert torch.equal(total, mean.reshape(-1))


def test_accumulation(pool2):
    pool2.run(_accumulated)


def _laid_out_anew(rank, world_size):
    """Gradients come in another order than parameters were registered: the layout changes after the first step."""
    with process_group():
        shapes = [(3, 1000), (2, BLOCK), (5, 700)]
        model, optimizer = _wrap(Sum(*shapes), "topk:k=64", bucket_bytes=30_000)
        layouts, means = [], [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for step in range(3):
            optimizer.zero_grad()
            cs = [_integers(rank, 10 * step + i, shape) for i, shape in enumerate(shapes)]
            for i in (1, 0, 2):
                means[i] += sum(_integers(r, 10 * step + i, shapes[i]).double() for r in range(world_size)) / world_size
            (
                (model.parts[1] * cs[1]).sum()
                + (model.parts[0] * cs[0]).sum()
                + (model.parts[2] * cs[2]).sum()
                + 0 * model(*cs)
            ).backward()
            optimizer.step()
            layouts.append([bucket.names for bucket in model.bagua.buckets])
        worker, owner = _residuals(model)
        for i, part in enumerate(model.parts):
            total = -part.detach().double().reshape(-1) + worker[f"parts.{i}"] + owner[f"parts.{i}"]
            assert torch.equal(total, means[i].reshape(-1)), i
        return layouts


def test_residuals_follow_their_parameters_into_another_layout(pool2, pool4):
    for pool in (pool2, pool4):
        layouts = pool.run(_laid_out_anew)[0]
        assert layouts[0] != layouts[2]


def _left_out(rank, world_size):
    """A parameter that no rank uses keeps its residual for the next time."""
    with process_group():
        model, optimizer = _wrap(Sum((4, BLOCK), (4, BLOCK)), "topk:k=64", find_unused_parameters=True)
        mean = torch.zeros((4, BLOCK), dtype=torch.float64)
        for step in range(6):
            optimizer.zero_grad()
            first, second = _integers(rank, step, (4, BLOCK)), _integers(rank, 50 + step, (4, BLOCK))
            if step % 2:
                model(first, second)
                (model.parts[0] * first).sum().backward()
            else:
                model(first, second).backward()
                mean += sum(_integers(r, 50 + step, (4, BLOCK)).double() for r in range(world_size)) / world_size
            optimizer.step()
        worker, owner = _residuals(model)
        total = -model.parts[1].detach().double().reshape(-1) + worker["parts.1"] + owner["parts.1"]
        assert torch.equal(total, mean.reshape(-1))


def test_unused_parameters(pool2):
    pool2.run(_left_out)


def _bfloat16(rank, world_size):
    with process_group():
        model, optimizer = _wrap(Sum((8, BLOCK)), "onebit", state_dtype="bfloat16")
        mean = torch.zeros((8, BLOCK), dtype=torch.float64)
        for step in range(10):
            optimizer.zero_grad()
            model(_integers(rank, step, (8, BLOCK))).backward()
            optimizer.step()
            mean += sum(_integers(r, step, (8, BLOCK)).double() for r in range(world_size)) / world_size
        state = _state(model)
        assert state["worker"]["parts.0"].dtype == torch.bfloat16
        worker, owner = _residuals(model)
        total = -model.parts[0].detach().double().reshape(-1) + worker["parts.0"] + owner["parts.0"]
        off = (total - mean.reshape(-1)).abs()
        assert 0 < float(off.max()) < 8  # each step rounds residuals of some hundreds to 8 bits


def test_state_in_bfloat16(pool2):
    pool2.run(_bfloat16)


def _half_gradients(rank, world_size, dtype):
    """Contributions with their residuals are encoded from float32; numbers that bfloat16 holds, since a result that it
    does not is rounded behind the codec.
    """
    with process_group():
        model = Sum((8, BLOCK)).to(dtype)
        _, optimizer = _wrap(model, "topk:k=64")
        mean = torch.zeros((8, BLOCK), dtype=torch.float64)
        sent = torch.zeros((8, BLOCK), dtype=torch.float64)
        for step in range(4):
            optimizer.zero_grad()
            model((_integers(rank, step, (8, BLOCK)) / 16).round().to(dtype)).backward()
            sent += model.parts[0].grad.double()
            optimizer.step()
            mean += sum((_integers(r, step, (8, BLOCK)) / 16).round().double() for r in range(world_size)) / world_size
        worker, owner = _residuals(model)
        assert torch.equal(sent.reshape(-1) + worker["parts.0"] + owner["parts.0"], mean.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients(pool2, dtype):
    pool2.run(_half_gradients, args=(dtype,))


def test_contractions_need_it():
    for codec in ("onebit", "topk"):
        with pytest.raises(InvalidArgument, match="is of use with error feedback only; pass error_feedback=True"):
            bagua.algorithms.create("bytegrad", {"codec": codec})


def _padding(rank, world_size, codec):
    with process_group():
        model = Sum(*[(3, 1)] * 300)  # each with a gap behind it
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"codec": codec, "error_feedback": True, "min_compressed_bytes": 0}
        bagua.with_bagua(model, optimizer, algorithm="bytegrad", **options)
        for step in range(4):
            optimizer.zero_grad()
            model(*(_integers(rank, 300 * step + i, (3, 1)) for i in range(300))).backward()
            optimizer.step()
        stripes = model.bagua.state_dict()["parameters"]["states"]["residual"]["stripes"]
        assert stripes
        for index, (first, bucket_numel, stripe) in stripes.items():
            bucket = model.bagua.buckets[int(index)]
            assert bucket_numel == bucket.numel
            is_padding = torch.ones(bucket.numel, dtype=torch.bool)
            for begin, end in map(bucket.place_of, bucket.members):
                is_padding[begin:end] = False
            is_padding = is_padding[first : first + stripe.numel()]
            assert is_padding.any() and stripe.any() and not stripe[is_padding].any()


@pytest.mark.parametrize("codec", ["onebit", "minmax_uint8"])
def test_nothing_is_remembered_between_gradients(pool2, codec):
    """The rank that encodes the sum keeps nothing either: it would change the scale of the codes."""
    pool2.run(_padding, args=[codec])


def _distributed_checkpoint(rank, world_size, folder):
    with process_group():
        model = Sum((4, BLOCK), (5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"codec": "onebit", "error_feedback": True, "min_compressed_bytes": 0}
        bagua.with_bagua(model, optimizer, algorithm="bytegrad", **options)

        def step(seed):
            optimizer.zero_grad()
            model(_integers(rank, seed, (4, BLOCK)), _integers(rank, seed + 1, (5, 3))).backward()
            optimizer.step()

        for seed in range(4):
            step(seed)
        own = f"{folder}/{rank}"
        checkpoint.save(
            {"model": model.state_dict(), "bagua": model.bagua.state_dict()}, checkpoint_id=own, no_dist=True
        )
        step(9)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        state = {"model": model.state_dict(), "bagua": model.bagua.state_dict()}
        checkpoint.load(state, checkpoint_id=own, no_dist=True)
        model.load_state_dict(state["model"])
        model.bagua.load_state_dict(state["bagua"])
        step(9)
        assert all(map(torch.equal, model.parameters(), expected))


def test_a_checkpoint_of_torch_distributed(pool2, tmp_path):
    """It makes strings of keys of other types."""
    pool2.run(_distributed_checkpoint, args=[str(tmp_path)])
