"""The timeline of bagua.ddp.comm_hook and bagua.fsdp.compress: each reduction with its bytes and codec, and the waits.

Bytes by hand: between two ranks a coded reduce-scatter sends the code of one half, an all-reduce that of both halves,
and full precision the elements themselves. A code of minmax_uint8 is a byte per element and 8 for each 2048 of them.
"""

import contextlib
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bagua
from bagua import cli
from bagua.errors import InvalidArgument
from bagua.torch_version import is_torch_at_least

NUMEL = 8192  # of a layer; halves are whole blocks
HALF_CODE_BYTES = NUMEL // 2 + 2 * 8
FIRST_BYTES = pytest.approx(4 * NUMEL * 4, rel=1e-3)  # and where the ranks' memory is
STEPS, LATE_S = 3, 0.2
needs_fsdp = pytest.mark.skipif(not is_torch_at_least(2, 9), reason="FSDP2's custom reduce-scatter is of torch 2.9")


@contextlib.contextmanager
def torch_group():
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        bagua.destroy_process_group()
        dist.destroy_process_group()


def make_model():
    return torch.nn.Sequential(*(torch.nn.Linear(64, NUMEL // 64, bias=False) if layer % 2 == 0
                                 else torch.nn.Linear(NUMEL // 64, 64, bias=False) for layer in range(4)))  # fmt: skip


def train(model, rank, late_rank=None, steps=STEPS):
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.randn(4, 64)).square().mean()
        if rank == late_rank:
            time.sleep(LATE_S)
        loss.backward()


def operations_of(timeline):
    """Returns the operations by step, oldest first; each is within its step."""
    operations = [span for span in timeline.spans if span.kind == "operation"]
    by_step = [[span for span in operations if step.begin_ns <= span.begin_ns <= span.end_ns <= step.end_ns]
               for step in timeline.steps]  # fmt: skip
    assert sum(map(len, by_step)) == len(operations)
    return by_step


def check_steps(timeline):
    """Steps follow one another, and their sums are those of the summary."""
    for step in timeline.steps:
        assert step.begin_ns <= step.wait_ns <= step.end_ns
    for one, following in itertools.pairwise(timeline.steps):
        assert one.end_ns <= following.begin_ns
    summary = timeline.summary()
    assert summary["steps"] == len(timeline.steps)
    assert summary["bytes_sent"] == sum(step.bytes_sent for step in timeline.steps)
    assert summary["exposed_s"] == pytest.approx(sum(step.exposed_ns for step in timeline.steps) / 1e9)


def hooked_ddp(rank, world_size, folder):
    with torch_group():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=NUMEL * 4 / 2**20)  # a bucket for each layer
        hook = bagua.ddp.comm_hook("minmax_uint8")
        model.register_comm_hook(None, hook)
        with pytest.raises(InvalidArgument, match="before the first backward"):
            hook.timeline()
        train(model, rank)
        with model.no_sync():
            train(model, rank, steps=1)
        timeline = hook.timeline()
        check_steps(timeline)
        by_step = operations_of(timeline)
        assert len(by_step) == STEPS
        assert sum(span.bytes for span in by_step[0]) == 4 * NUMEL * 4
        assert sum(span.bytes_sent for span in by_step[0]) == timeline.steps[0].bytes_sent == FIRST_BYTES
        assert {span.codec for span in by_step[0]} == {""}  # the first backward is at full precision
        for operations in by_step[1:]:
            assert [span.label for span in operations] == [f"bucket {index}" for index in range(4)]
            assert {(span.bytes, span.bytes_sent, span.codec) for span in operations} == {
                (NUMEL * 4, 2 * HALF_CODE_BYTES, "minmax_uint8")
            }
        assert [step.bytes_sent for step in timeline.steps[1:]] == [8 * HALF_CODE_BYTES] * (STEPS - 1)
        assert [step.num_buckets for step in timeline.steps[1:]] == [4] * (STEPS - 1)
        assert timeline.compute == timeline.exposed_hooks == ()
        train(model, rank, late_rank=1)
        hook.save_timeline(folder)
        return [step.exposed_ns for step in hook.timeline().steps[STEPS:]]


@pytest.mark.timed
def test_the_buckets_of_ddp(pool2, tmp_path, capsys):
    exposed = pool2.run(hooked_ddp, args=(str(tmp_path),))
    assert min(exposed[0]) > LATE_S * 1e9 / 2, "rank 0 waits for rank 1"
    assert cli.main(["timeline", f"{tmp_path}/rank0.json", f"{tmp_path}/rank1.json"]) == 0
    text = capsys.readouterr().out
    assert "algorithm        bagua.ddp.comm_hook, 2 of 2 ranks" in text
    assert "straggler        rank 1: the others wait for it" in text
    assert "(minmax_uint8)" in text


def sharded(model, mesh, reduce_dtype=torch.float32):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for part in (*model, model):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # backward gathers nothing
    return model


def hooked_fsdp(rank, world_size, folder):
    with torch_group():
        mesh = init_device_mesh("cpu", (world_size,))
        # Reductions of float32 end at the end of the backward; those of bfloat16 are cast, so each is waited for.
        for reduce_dtype, are_late in ((torch.float32, True), (torch.bfloat16, False)):
            model = sharded(make_model(), mesh, reduce_dtype)
            compression = bagua.fsdp.compress(model, "minmax_uint8")
            train(model, rank)
            labels = [f"reduce_scatter {layer}" for layer in (3, 2, 1, 0)]
            timeline = compression.timeline()
            check_steps(timeline)
            for operations in operations_of(timeline):
                assert [span.label for span in operations] == labels
                assert {(span.bytes_sent, span.codec) for span in operations} == {(HALF_CODE_BYTES, "minmax_uint8")}
            assert [step.bytes_sent for step in timeline.steps] == [4 * HALF_CODE_BYTES] * STEPS
            assert [hook.hook for hook in timeline.exposed_hooks] == ([] if are_late else labels * STEPS)
            train(model, rank, late_rank=1)
            if rank == 0:
                assert min(step.exposed_ns for step in compression.timeline().steps[STEPS:]) > LATE_S * 1e9 / 2
        compression.save_timeline(folder)


@needs_fsdp
@pytest.mark.timed
def test_the_units_of_fsdp(pool2, tmp_path, capsys):
    pool2.run(hooked_fsdp, args=(str(tmp_path),))
    assert cli.main(["timeline", f"{tmp_path}/rank0.json", f"{tmp_path}/rank1.json"]) == 0
    assert "slowest bucket   reduce_scatter" in capsys.readouterr().out


def nested(rank, world_size):
    """Each layer is a checkpoint with a backward of its own, and the last unit is of the outer one."""
    with torch_group():
        model = sharded(make_model(), init_device_mesh("cpu", (world_size,)))
        compression = bagua.fsdp.compress(model, "minmax_uint8")
        x = torch.randn(4, 64, requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        x.square().mean().backward()
        return [step.num_buckets for step in compression.timeline().steps], compression.timeline().summary()


@needs_fsdp
def test_a_backward_inside_of_another_is_a_step(pool2):
    for num_reductions, summary in pool2.run(nested):
        assert num_reductions == [1] * 4
        assert summary["bytes_sent"] == 4 * HALF_CODE_BYTES


def hooked_hsdp(rank, world_size, folder):
    with torch_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = sharded(make_model(), mesh["dp_shard"])
        compression = bagua.fsdp.compress(model, None, shard_codec="minmax_uint8", replicate=mesh["dp_replicate"])
        train(model, rank)
        for operations in operations_of(compression.timeline()):
            # A shard of float32 is half of a layer, which two replicas send once in all.
            assert {(span.label, span.bytes_sent, span.codec) for span in operations} == {
                one
                for layer in (3, 2, 1, 0)
                for one in (
                    (f"reduce_scatter {layer}", HALF_CODE_BYTES, "minmax_uint8"),
                    (f"all_reduce {layer}", NUMEL // 2 * 4, ""),
                )
            }
            assert len(operations) == 8
        compression.save_timeline(folder)


@needs_fsdp
def test_replicas_and_shards_are_in_one_timeline(pool4, tmp_path, capsys):
    pool4.run(hooked_hsdp, args=(str(tmp_path),))
    assert cli.main(["timeline", *(f"{tmp_path}/rank{rank}.json" for rank in range(4))]) == 0
    text = capsys.readouterr().out
    assert "algorithm        bagua.fsdp.compress, 4 of 4 ranks" in text
    assert "in the background" not in text
