"""bagua.fsdp.compress against torch's own FSDP2 and HSDP on gloo, and against the definitions in plain loops."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import bagua
from bagua.errors import InvalidArgument
from bagua.torch_version import is_torch_at_least
from tests.distributed.worlds import SAME_TEST

pytestmark = pytest.mark.skipif(not is_torch_at_least(2, 9), reason="FSDP2's custom reduce-scatter is of torch 2.9")
with contextlib.suppress(ImportError):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

ROWS, COLUMNS = 96, 130  # a shard is 24 KB and more, and no multiple of a codec's block


@contextlib.contextmanager
def mesh_of(num_replicas, num_shards):
    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (num_replicas, num_shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    finally:
        bagua.destroy_process_group()
        dist.destroy_process_group()


# ---- as torch's own, at full precision


def make_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.ReLU(), torch.nn.Linear(80, 64)) for _ in range(3)),
        torch.nn.Linear(64, 10),
    )


CASES = {
    "plain": {},
    "bf16 computation": {"policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    "bf16 on the wire": {"policy": {"reduce_dtype": torch.bfloat16}},
    "fp16 on the wire": {"policy": {"reduce_dtype": torch.float16}},
    "offload": {"offloads": True},
    "checkpointed activations": {"is_checkpointed": True},
    "reentrant checkpoints": {"is_reentrant": True},
    "silent micro-batches": {"silent": "set_requires_gradient_sync"},
    "reductions in every micro-batch": {"num_micro": 2},
    "micro-batches among shards": {"silent": "set_requires_all_reduce"},
    "hooks that read gradients": {"reads": True},
    "unused parameters": {"skips": True},
}


def trained(rank, mesh, form, policy=None, offloads=False, is_checkpointed=False, is_reentrant=False, silent="",
            num_micro=1, reads=False, skips=False):  # fmt: skip
    model = make_model()
    if is_checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, torch.nn.ReLU))
    used = mesh if form == "HSDP" else mesh["dp_shard"]
    options = {
        "mp_policy": MixedPrecisionPolicy(**policy or {}),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
    }
    for part in (*model, model):
        fully_shard(part, mesh=used, **options)
    if form == "compressed HSDP":
        bagua.fsdp.compress(model, None, replicate=mesh["dp_replicate"])
    elif form == "compressed FSDP":
        bagua.fsdp.compress(model, None)
    seen = []
    if reads:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.to_local().sum().item()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    num_micro = 2 if silent else num_micro
    for step in range(3):
        for micro in range(num_micro):
            if silent:
                getattr(model, silent)(micro == num_micro - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(8, 64, generator=generator)
            for part in model[1:] if skips and step == 1 else model:
                x = checkpoint(part, x.requires_grad_(), use_reentrant=True) if is_reentrant else part(x)
            x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()], seen


# Of them those in which replicas exchange something else, or at another time.
AMONG_REPLICAS = [
    "plain",
    "bf16 on the wire",
    "silent micro-batches",
    "micro-batches among shards",
    "unused parameters",
]


def equals_torchs_own(rank, world_size, num_replicas, names):
    with mesh_of(num_replicas, world_size // num_replicas) as mesh:
        forms = ("HSDP", "compressed HSDP") if num_replicas > 1 else ("FSDP", "compressed FSDP")
        for name in names:
            case = CASES[name]
            own, compressed = (trained(rank, mesh, form, **case) for form in forms)
            tolerance = {"rtol": 2e-2, "atol": 1e-3} if "policy" in case else {}
            torch.testing.assert_close(compressed, own, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_full_precision_is_torchs_fsdp(pool2):
    pool2.run(equals_torchs_own, args=(1, list(CASES)))


@pytest.mark.parametrize(
    "names", [AMONG_REPLICAS, pytest.param(list(CASES), marks=SAME_TEST)], ids=["those of replicas", "all"]
)
def test_full_precision_is_torchs_hsdp(pool4, names):
    pool4.run(equals_torchs_own, args=(2, names))


# ---- the definitions


class Sum(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, x):
        return (self.weight * x).sum()


def gradient(step, rank):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1000 * step + rank))


def coded(codec, values):
    codec = bagua.codecs.get(codec)
    return codec.decode(codec.encode(values.reshape(-1)), values.numel(), values.dtype).view(values.shape)


def backward(model, x):
    model.zero_grad()
    model(x).backward()
    return model.weight.grad.to_local().clone()


def reduce_scatter_is_as_defined(rank, world_size, codec, error_feedback):
    with mesh_of(1, world_size) as mesh:
        model = fully_shard(Sum(), mesh=mesh["dp_shard"])
        compression = bagua.fsdp.compress(model, codec, error_feedback=error_feedback)
        residuals = [torch.zeros(ROWS, COLUMNS) for _ in range(world_size)]
        for step in range(4):
            total = torch.zeros(ROWS // world_size, COLUMNS)
            for one in range(world_size):
                values = gradient(step, one) + residuals[one]
                sent = torch.cat([coded(codec, block) for block in values.chunk(world_size)])
                if error_feedback:
                    residuals[one] = values - sent
                total += sent.chunk(world_size)[rank]
            assert torch.equal(backward(model, gradient(step, rank)), total * (1 / world_size)), step
        if error_feedback:
            state = compression.state_dict()
            saved = state["reduce_scatter"]["residuals"]["0"][0]
            assert torch.equal(saved, residuals[rank].view(-1))
            resumed = fully_shard(Sum(), mesh=mesh["dp_shard"])
            again = bagua.fsdp.compress(resumed, codec, error_feedback=True)
            again.load_state_dict(state)
            assert torch.equal(backward(resumed, gradient(9, rank)), backward(model, gradient(9, rank)))


@pytest.mark.parametrize(
    ("codec", "error_feedback"),
    [("bf16", False), ("minmax_uint8", False), ("minmax_uint8", True), ("onebit", True), ("fp4_e2m1", True)],
)
def test_the_reduce_scatter_by_its_definition(pool2, codec, error_feedback):
    pool2.run(reduce_scatter_is_as_defined, args=(codec, error_feedback))


def bears_nan(rank, world_size):
    """Rank 0's part of rank 1's block is NaN, which rank 0 does not see in its own block of the result."""
    with mesh_of(1, world_size) as mesh:
        model = fully_shard(Sum(), mesh=mesh["dp_shard"])
        bagua.fsdp.compress(model, "minmax_uint8", error_feedback=True)
        backward(model, gradient(0, rank))
        bad = gradient(1, rank)
        if rank == 0:
            bad[-1, -1] = float("nan")
        assert backward(model, bad).isnan().any() == (rank == 1)
        assert backward(model, gradient(2, rank)).isfinite().all()


def test_nan_stays_in_no_residual(pool2):
    pool2.run(bears_nan)


def divides_by_a_factor(rank, world_size):
    """Which gloo cannot, so it is compared with its definition."""
    with mesh_of(1, world_size) as mesh:
        model = fully_shard(Sum(), mesh=mesh["dp_shard"])
        model.set_gradient_divide_factor(3.0)
        bagua.fsdp.compress(model, None)
        found = backward(model, gradient(0, rank))
        torch.testing.assert_close(found, (sum(gradient(0, one) for one in range(2)) / 3).chunk(2)[rank])


def test_a_factor_of_the_program(pool2):
    pool2.run(divides_by_a_factor)


def all_reduce_is_as_defined(rank, world_size, codec, error_feedback):
    """Every shard by itself: x <- Q(mean over replicas of Q(x_r + e_r) + f)."""
    with mesh_of(2, 2) as mesh:
        model = fully_shard(Sum(), mesh=mesh["dp_shard"])
        with torch.no_grad():
            model.weight.to_local().fill_(rank)
        compression = bagua.fsdp.compress(model, codec, error_feedback=error_feedback, replicate=mesh["dp_replicate"])
        assert (model.weight.to_local() == rank % 2).all()  # the first replica's
        of_replicas, of_result = [torch.zeros(ROWS // 2, COLUMNS)] * 2, torch.zeros(ROWS // 2, COLUMNS)
        for step in range(4):
            total = torch.zeros(ROWS // 2, COLUMNS)
            for replica in range(2):
                pair = [gradient(step, 2 * replica + one).chunk(2)[rank % 2] for one in range(2)]
                values = (pair[0] + pair[1]) / 2 + of_replicas[replica]
                sent = coded(codec, values)
                if error_feedback:
                    of_replicas[replica] = values - sent
                total += sent
            values = total / 2 + of_result
            expected = coded(codec, values)
            if error_feedback:
                of_result = values - expected
            assert torch.equal(backward(model, gradient(step, rank)), expected), step
        if error_feedback:
            state = compression.state_dict()
            expected = backward(model, gradient(9, rank))
            compression.load_state_dict(state)
            assert torch.equal(backward(model, gradient(9, rank)), expected)


@pytest.mark.parametrize(("codec", "error_feedback"), [("minmax_uint8", False), ("minmax_uint8", True)])
def test_the_all_reduce_of_replicas_by_its_definition(pool4, codec, error_feedback):
    pool4.run(all_reduce_is_as_defined, args=(codec, error_feedback))


# ---- what is sent, and when


def is_silent(rank, world_size):
    with mesh_of(2, 1) as mesh:
        model = fully_shard(Sum(), mesh=mesh["dp_shard"])
        bagua.fsdp.compress(model, "minmax_uint8", replicate=mesh["dp_replicate"])
        group = bagua.from_torch_group(mesh["dp_replicate"].get_group())
        sent = []
        for is_last in (True, False, True):
            before = group.bytes_sent
            model.set_requires_gradient_sync(is_last)
            model(gradient(0, rank)).backward()
            sent.append(group.bytes_sent - before)
        codes = bagua.codecs.get("minmax_uint8").wire_bytes(ROWS * COLUMNS, torch.float32)
        assert sent[1] == 0
        assert sent[0] == sent[2] == pytest.approx(codes, rel=0.02)  # 2 (n-1)/n of them


def test_bytes(pool2):
    pool2.run(is_silent)


def goes_on(rank, world_size):
    """Rank 1 begins its backward when rank 0's has come to the first layer, behind a reduction that needs rank 1."""
    with mesh_of(1, world_size) as mesh:
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(2)))
        for part in (*model, model):
            fully_shard(part, mesh=mesh["dp_shard"], reshard_after_forward=False)
        bagua.fsdp.compress(model, "minmax_uint8")
        store = dist.PrefixStore("turn", dist.distributed_c10d._get_default_store())
        x = torch.randn(4, 128, requires_grad=True)
        between = model[0](x)
        between.register_hook(lambda _: store.set("come", "") if rank == 0 else None)
        loss = model[1](between).square().sum()
        if rank == 1:
            store.wait(["come"])
        loss.backward()
        assert all(one.grad.to_local().isfinite().all() for one in model.parameters())


def test_backward_goes_on_while_gradients_travel(pool2):
    pool2.run(goes_on, timeout=30)


# ---- what is refused


def refuses(rank, world_size):
    with mesh_of(2, 2) as mesh:
        with pytest.raises(InvalidArgument, match="no module of the model is under fully_shard"):
            bagua.fsdp.compress(Sum())
        with pytest.raises(InvalidArgument, match="replicate=mesh\\['dp_replicate'\\]"):
            bagua.fsdp.compress(fully_shard(Sum(), mesh=mesh))
        model = fully_shard(Sum(), mesh=mesh["dp_shard"])
        with pytest.raises(InvalidArgument, match="'dp_shard'.* are in both"):
            bagua.fsdp.compress(model, replicate=mesh["dp_shard"])
        with pytest.raises(InvalidArgument, match="are in both"):
            bagua.fsdp.compress(model, replicate=dist.group.WORLD)
        with pytest.raises(InvalidArgument, match="shard_codec is for a model with replicas"):
            bagua.fsdp.compress(model, shard_codec="bf16")
        with pytest.raises(InvalidArgument, match="to_empty"), torch.device("meta"):
            bagua.fsdp.compress(fully_shard(Sum(), mesh=mesh["dp_shard"]))
        other = torch.nn.Linear(8, 8 if rank < 2 else 16)
        with pytest.raises(InvalidArgument, match="the model, parameter 0"):
            bagua.fsdp.compress(fully_shard(other, mesh=mesh["dp_shard"]), replicate=mesh["dp_replicate"])


def test_what_cannot_be_compressed_is_refused(pool4):
    pool4.run(refuses)
