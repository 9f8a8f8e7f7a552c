"""Error feedback: nothing is lost, a backward with NaN changes nothing, and residuals follow their parameters."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in

BLOCK = 2048
CODECS = ["onebit", "topk:k=64", "minmax_uint8", "qsgd:bits=4", "fp8_e5m2", "fp4_e2m1", "fp4_e3m0"]


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


@fast_in("codec", ["topk:k=64", "onebit"], CODECS)
def test_what_was_sent_and_what_is_kept_add_up_to_the_gradients(pool2, codec):
    """topk keeps values as they are, so that with integers it is so to the bit."""
    exact = codec.startswith("topk")
    pool2.run(_nothing_is_lost, args=(codec, [(8, BLOCK)], 12, exact, {}))
    pool2.run(_nothing_is_lost, args=(codec, [(3, 1000), (7, 1111)], 12, exact, {"bucket_bytes": 20_000}))


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


def test_residuals_follow_their_parameters_into_another_layout(pool2):
    layouts = pool2.run(_laid_out_anew)[0]
    assert layouts[0] != layouts[2]


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


@fast_in("codec", ["onebit"], ["onebit", "minmax_uint8"])
def test_nothing_is_remembered_between_gradients(pool2, codec):
    """The rank that encodes the sum keeps nothing either: it would change the scale of the codes."""
    pool2.run(_padding, args=[codec])


def _moving_average(rank, world_size):
    """LoCo's formula, step by step from what is kept: e <- 0.8 e + 0.2 (g + e - Q(g + e)), from 0 after 1024 steps."""
    with process_group():
        shape, codec = (1, 2 * BLOCK), bagua.codecs.get("minmax_uint8")
        model, optimizer = _wrap(Sum(shape), codec.name, error_feedback="moving_average")
        for step in range(1028):
            is_checked = step < 4 or step > 1022
            kept = _state(model)["worker"]["parts.0"].expand(shape[1]).clone() if is_checked else None
            optimizer.zero_grad()
            gradient = _integers(rank, step, shape)
            model(gradient).backward()
            if kept is None:
                continue
            kept = torch.zeros_like(kept) if step == 1024 else kept
            value = gradient.view(-1) + kept
            left = value - codec.decode(codec.encode(value), shape[1], torch.float32)
            expected = 0.8 * kept + 0.2 * left
            torch.testing.assert_close(_state(model)["worker"]["parts.0"], expected, rtol=1e-5, atol=1e-5)
            mean = sum(_integers(r, step, shape) for r in range(world_size)) / world_size
            assert float((model.parts[0].grad - mean).abs().max()) < 2.0  # a code at either end, and what was kept
        assert float(left.abs().max()) > 0.1


def test_a_moving_average(pool2):
    pool2.run(_moving_average)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"error_feedback": "mean"}, "error_feedback is 'mean', expected True, False or 'moving_average'"),
        ({"error_feedback": "moving_average", "codec": "onebit"}, "a moving average would lose most of that for good"),
    ],
)
def test_moving_averages_that_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("bytegrad", options)
