"""exchange_rows: rows and their gradients, against plain loops over ranks; zero rows; codecs, row by row."""

import pytest
import torch

import bagua
from bagua import _C
from bagua.errors import InvalidArgument
from tests.distributed.test_codecs import SEED, key_of, passed_through
from tests.distributed.worlds import in_worlds, mixed, shm, tcp

WIDTH = 5
CODECS = ("bf16", "fp16", "fp8_e4m3", "minmax_uint8", "qsgd:bits=4")


def rows_between(world_size):
    """Rows from one rank to another: none on the diagonal below, and the last rank has none at all."""
    last = world_size - 1
    return [
        [0 if last in (a, b) or b == a - 1 else 1 + a + 2 * b for b in range(world_size)] for a in range(world_size)
    ]


def input_of(rank, world_size, shape=(WIDTH,), dtype=torch.float64):
    num = sum(rows_between(world_size)[rank])
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num, *shape, generator=generator, dtype=torch.float64).to(dtype)


def moved(parts, rows, rank):
    """What arrives on ``rank`` of the ranks' tensors."""
    return torch.cat([part.split(splits)[rank] for part, splits in zip(parts, rows, strict=True)])


def check_rows(rank, world_size):
    rows = rows_between(world_size)
    for shape in ((WIDTH,), (), (2, 3)):
        inputs = [input_of(each, world_size, shape) for each in range(world_size)]
        x = inputs[rank].clone().requires_grad_()
        for known in (None, [splits[rank] for splits in rows]):
            y, splits = bagua.exchange_rows(x, torch.tensor(rows[rank]), known)
            assert splits == [of_rank[rank] for of_rank in rows]
            assert torch.equal(y, moved(inputs, rows, rank)) and torch.equal(x, inputs[rank])
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        torch.testing.assert_close(grad, 3 * x.square())
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, 6 * x)
        # The way back gives every row to its sender.
        back, _ = bagua.exchange_rows(y * 2, splits, rows[rank])
        assert torch.equal(back, 2 * x)
    tokens, _ = bagua.exchange_rows(torch.arange(sum(rows[rank])), rows[rank])
    assert tokens.dtype == torch.int64 and not tokens.requires_grad


@in_worlds([shm(3), tcp(2), mixed(4)])
def test_rows_and_gradients(pools, world):
    pools.run(world, check_rows)


def check_gradients(rank, world_size):
    """torch's gradcheck on both ranks at once: rows come back to their rank, so that no result depends on the other."""
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    splits = [[1, 3], [3, 1]][rank]

    def exchanged(value):
        there, incoming = bagua.exchange_rows(value * (1 + rank), splits)
        back, _ = bagua.exchange_rows(there.sin(), incoming, splits)
        return back

    assert torch.autograd.gradcheck(exchanged, x)
    assert torch.autograd.gradgradcheck(exchanged, x)


def test_gradcheck(pool2):
    pool2.run(in_a_group, args=(check_gradients,))


def in_a_group(rank, world_size, check):
    bagua.init_process_group(timeout=30)
    check(rank, world_size)
    bagua.destroy_process_group()


def coded(parts, rows, rank, codec):
    """What arrives on ``rank`` of the ranks' tensors under a codec: each row by itself, the own ones too."""
    seen = []
    for sender, (part, splits) in enumerate(zip(parts, rows, strict=True)):
        width = part[0].numel() if len(part) else 0
        key = key_of(sender, width * sum(splits[:rank]))
        for index, row in enumerate(part.split(splits)[rank]):
            seen.append(row if codec is None else passed_through(codec, row, _C.derive_key(key, index)))
    return torch.stack(seen) if seen else parts[rank][:0]


def check_codecs(rank, world_size):
    rows = rows_between(world_size)
    incoming = [[of_rank[each] for of_rank in rows] for each in range(world_size)]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [input_of(each, world_size, (WIDTH,), dtype) for each in range(world_size)]
        grads = [
            torch.randn(sum(of), WIDTH, generator=torch.Generator().manual_seed(sum(of))).to(dtype) for of in incoming
        ]
        for codec in CODECS:
            for backward_codec in ("same", None, "bf16"):
                what = f"{codec} {backward_codec} {dtype}"
                x, seeded = inputs[rank].clone().requires_grad_(), bagua.codecs.get(codec).with_seed(SEED)
                y, _ = bagua.exchange_rows(x, rows[rank], codec=seeded, backward_codec=backward_codec)
                assert torch.equal(y, coded(inputs, rows, rank, codec)), what
                y.backward(grads[rank])
                used = codec if backward_codec == "same" else backward_codec
                assert torch.equal(x.grad, coded(grads, incoming, rank, used)), what


@in_worlds([shm(3), tcp(2)])
def test_codecs_encode_each_row(pools, world):
    pools.run(world, check_codecs)


def check_long_rows(rank, world_size):
    """Rows around the codecs' block, and more than one chunk of a message; one of them with a NaN."""
    rows = rows_between(world_size)
    for width, factor in ((2047, 1), (2048, 1), (3000, 1), (640, 500)):
        splits = [[factor * count for count in of_rank] for of_rank in rows]
        inputs = []
        for each in range(world_size):
            generator = torch.Generator().manual_seed(each)
            x = torch.randn(sum(splits[each]), width, generator=generator)
            x *= torch.logspace(-6, 6, max(1, len(x)))[: len(x), None]  # no scale suits two rows
            x[len(x) // 2 :][:1, 7] = float("nan")
            inputs.append(x)
        for codec in ("fp8_e4m3", "minmax_uint8"):
            y, _ = bagua.exchange_rows(inputs[rank], splits[rank], codec=codec)
            assert torch.equal(y.nan_to_num(7), coded(inputs, splits, rank, codec).nan_to_num(7)), (width, codec)


@in_worlds([shm(3), tcp(2)])
def test_long_rows_are_encoded_by_themselves(pools, world):
    pools.run(world, check_long_rows)


def refuses(rank, world_size):
    bagua.init_process_group(timeout=30)
    x = torch.ones(4, 2)
    for message, call in [
        ("input_splits .* add up to 4", lambda: bagua.exchange_rows(x, [1, 2])),
        ("input_splits are .*, expected 2 whole numbers", lambda: bagua.exchange_rows(x, [1.5, 2.5])),
        ("input is a tensor without dimensions", lambda: bagua.exchange_rows(torch.ones(()), [1, 0])),
        (r"input is \[1\], expected a torch.Tensor", lambda: bagua.exchange_rows([1], [1, 0])),
        ("cannot encode torch.float64", lambda: bagua.exchange_rows(x.double(), [2, 2], codec="bf16")),
        ("cannot encode torch.float64", lambda: bagua.exchange_rows(x.double(), [2, 2], backward_codec="bf16")),
        ("codec 'none' is unknown", lambda: bagua.exchange_rows(x, [2, 2], codec="none")),
        ("output_splits are .*, expected 2 whole numbers", lambda: bagua.exchange_rows(x, [2, 2], [1.5, 1.5])),
        ("output_splits are .* not negative", lambda: bagua.exchange_rows(x, [2, 2], [5, -1])),
        ("input_splits are .* expected 2", lambda: bagua.exchange_rows(x, torch.tensor([4]))),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
    y, _ = bagua.exchange_rows(x, [2, 2])  # nothing was sent, so the group is whole
    assert torch.equal(y, x)
    bagua.destroy_process_group()


def test_what_is_refused(pool2):
    pool2.run(refuses)


def compiled(rank, world_size):
    x = torch.ones(2, 2, requires_grad=True)
    function = torch.compile(lambda value: bagua.exchange_rows(value * 2, [1, 1])[0].sin().sum(), backend="eager")
    function(x).backward()
    torch.testing.assert_close(x.grad, 2 * torch.full((2, 2), 2.0).cos())


def test_inside_torch_compile(pool2):
    pool2.run(in_a_group, args=(compiled,))
