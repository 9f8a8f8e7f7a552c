"""NumPy arrays in every collective: in place, whatever their strides; and what is refused."""

import numpy as np
import pytest
import torch

import bagua
from bagua.testing import world as thread_world

DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool")


def views(dtype):
    """Arrays of 12 elements with all kinds of strides, each with the array that owns its memory."""
    base = np.arange(48).reshape(6, 8).astype(dtype)
    yield base[:3, :4].copy(), None
    for view in (base[::2, :4], base[:3, ::-2], base.T[:4, ::2], base.reshape(-1)[::4], base[3:, 4:]):
        yield view, base


def check_strides(group):
    for dtype in DTYPES:
        op, combine = (bagua.ReduceOp.BOR, np.bitwise_or) if dtype == "bool" else (bagua.ReduceOp.SUM, np.add)
        for x, base in views(dtype):
            is_inside = None if base is None else inside_of(base, x)
            untouched = None if base is None else base[~is_inside].copy()
            inputs = [(x + r).astype(dtype) for r in range(group.size)]
            x[...] = inputs[group.rank]
            group.all_reduce(x, op).wait()
            expected = inputs[0]
            for other in inputs[1:]:
                expected = combine(expected, other)
            np.testing.assert_array_equal(x, expected)
            if base is not None:
                np.testing.assert_array_equal(base[~is_inside], untouched)


def check_strides_of_one_element(group):
    """They mean nothing, and NumPy calls these contiguous."""
    n = group.size
    for x in (
        np.ones(1)[::-1],
        np.ones((3, 1))[:, ::-1],
        np.ones((1, 3), dtype=np.float32)[::-1],
        np.ones(4, dtype=[("value", "f4"), ("byte", "u1")])["value"][:1],
        np.lib.stride_tricks.as_strided(np.ones(4), (4, 1), (8, 12)),
        np.lib.stride_tricks.as_strided(np.ones(1, dtype=np.int32), (1,), (3,)),
        np.empty((0, 3))[:, ::-1],
    ):
        gathered = np.zeros(n * x.size, dtype=x.dtype)
        group.all_gather(gathered, x).wait()
        np.testing.assert_array_equal(gathered, 1)
        group.all_reduce(x).wait()
        np.testing.assert_array_equal(x, n)


def test_strides_of_one_element():
    thread_world(2, check_strides_of_one_element)


def inside_of(base, view):
    """Which elements of `base` its view shows."""
    before = base.copy()
    base[...] = 0
    view[...] = 1
    is_inside = base == 1
    base[...] = before
    return is_inside


def test_strides():
    thread_world(3, check_strides)


def check_every_collective(group):
    n, rank = group.size, group.rank
    mine = np.arange(4, dtype=np.float32) + 10 * rank
    everybody = np.concatenate([np.arange(4, dtype=np.float32) + 10 * r for r in range(n)])

    out = np.empty(4 * n, dtype=np.float32)
    group.all_gather(out, mine).wait()
    np.testing.assert_array_equal(out, everybody)

    out = np.empty(4 * n, dtype=np.float32) if rank == 1 else None
    group.gather(out, mine, 1).wait()
    if rank == 1:
        np.testing.assert_array_equal(out, everybody)

    out = np.empty((2, 2), dtype=np.float32)
    group.scatter(out, everybody if rank == 0 else None, 0).wait()
    np.testing.assert_array_equal(out.reshape(-1), mine)

    out = np.empty(4, dtype=np.float32)
    group.reduce_scatter(out, everybody).wait()
    np.testing.assert_array_equal(out, n * mine)

    out = np.empty(4 * n, dtype=np.float32)
    group.all_to_all(out, np.repeat(mine[:1], 4 * n)).wait()
    np.testing.assert_array_equal(out, np.repeat(10.0 * np.arange(n), 4))

    x = mine.copy()
    group.broadcast(x, n - 1).wait()
    np.testing.assert_array_equal(x, everybody[-4:])

    x = mine.copy()
    group.reduce(x, 0).wait()
    if rank == 0:
        np.testing.assert_array_equal(x, everybody.reshape(n, 4).sum(axis=0))

    x = mine.copy()
    group.neighbor_average(x, "all").wait()
    np.testing.assert_allclose(x, everybody.reshape(n, 4).mean(axis=0), rtol=1e-6)

    if rank == 0:
        group.send(mine, 1).wait()
    elif rank == 1:
        x = np.empty(8, dtype=np.float32)[::2]
        group.recv(x, 0).wait()
        np.testing.assert_array_equal(x, everybody[:4])

    scalar = np.array(float(rank))
    group.all_reduce(scalar).wait()
    assert scalar.shape == () and scalar == n * (n - 1) / 2
    empty = np.empty((0, 3), dtype=np.float32)
    group.all_reduce(empty).wait()


def test_every_collective():
    thread_world(3, check_every_collective)


def check_read_only(group):
    """What is only read may be read-only; what is written may not."""
    x = np.full(3, float(group.rank))
    x.flags.writeable = False
    out = np.empty(3 * group.size)
    group.all_gather(out, x).wait()
    np.testing.assert_array_equal(out, np.repeat(np.arange(float(group.size)), 3))
    y = np.full(3, 7.0)
    y.flags.writeable = group.rank != 1
    group.broadcast(y, 1).wait()
    with pytest.raises(bagua.InvalidArgument, match="tensor is a read-only array"):
        group.all_reduce(x)
    with pytest.raises(bagua.InvalidArgument, match="output is a read-only array"):
        group.all_gather(x, out)


def test_read_only_arrays(recwarn):
    thread_world(2, check_read_only)
    assert not recwarn.list


def check_refused(group):
    for array in (
        np.zeros(3, dtype=">f4"),
        np.array(["a"]),
        np.zeros(3, dtype=object),
        np.zeros(3, dtype=np.complex64),
        np.zeros(3, dtype=np.uint16),
        np.zeros(3, dtype=[("a", "f4")]),
    ):
        with pytest.raises(bagua.InvalidArgument, match="cannot be sent|is not supported here"):
            group.all_reduce(array)
    with pytest.raises(bagua.InvalidArgument, match=r"is a float; give a torch.Tensor, a numpy.ndarray, or"):
        group.all_reduce(1.0)


def test_what_is_refused():
    thread_world(2, check_refused)


def check_mixed(group):
    out, x = torch.empty(2 * group.size), np.full(2, float(group.rank), dtype=np.float32)
    group.all_gather(out, x).wait()
    assert out.tolist() == [float(r) for r in range(group.size) for _ in range(2)]


def test_arrays_and_tensors_in_one_call():
    thread_world(2, check_mixed)


def check_expanded(group):
    """What is only read may be expanded; what is written cannot hold its values."""
    row = torch.arange(4.0)
    output = torch.empty(6 * group.size, 2)
    group.all_gather(output[: 4 * group.size].view(-1), row.expand(2, 4)).wait()
    for expanded in (torch.zeros(1).expand(5), np.lib.stride_tricks.as_strided(np.zeros(3, "f4"), (4, 3), (0, 4))):
        sent = group.bytes_sent
        with pytest.raises(bagua.InvalidArgument, match="tensor of shape .* is expanded.*pass a copy"):
            group.all_reduce(expanded)
        assert group.bytes_sent == sent
    with pytest.raises(bagua.InvalidArgument, match="output of shape .* is expanded"):
        group.all_gather(torch.zeros(1).expand(group.size), torch.ones(1))
    group.all_reduce(torch.zeros(0, 1).expand(0, 7)).wait()  # nothing to write
    group.barrier().wait()


def test_expanded_tensors():
    thread_world(2, check_expanded)


def test_elements_that_share_some_of_their_bytes():
    def check(group):
        memory = np.zeros(32, dtype=np.uint8)
        sent = group.bytes_sent
        with pytest.raises(bagua.InvalidArgument, match=r"strides \(2,\) overlaps itself"):
            group.all_reduce(np.ndarray((3,), np.float32, memory, strides=(2,)))
        assert group.bytes_sent == sent

    thread_world(2, check)


class OfAnotherLibrary:
    """An array that only says where its memory is, as CuPy's do."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class OfNowhere:
    """One whose memory torch does not know."""

    def __dlpack__(self, **options):
        raise BufferError("it is on the moon")

    def __dlpack_device__(self):
        return (1, 0)


def check_other_libraries(group):
    mine = OfAnotherLibrary(torch.full((5,), float(group.rank + 1)))
    total = sum(range(1, group.size + 1))
    group.all_reduce(mine).wait()
    assert mine.values.tolist() == [float(total)] * 5  # in its own memory
    out = OfAnotherLibrary(np.zeros(5 * group.size, dtype=np.float32))
    group.all_gather(out, mine).wait()
    assert out.values.tolist() == [float(total)] * 5 * group.size
    with pytest.raises(bagua.InvalidArgument, match=r"tensor is a OfNowhere, whose memory torch cannot take: it is on"):
        group.all_reduce(OfNowhere())


def test_arrays_of_other_libraries():
    thread_world(2, check_other_libraries)


class OnAGpu:
    """One with the CUDA array interface only, as Numba's are."""

    def __init__(self, values):
        self.values = values
        self.__cuda_array_interface__ = {"data": (values.data_ptr(), False)}


def test_an_array_of_another_gpu_than_the_current_one(monkeypatch):
    """torch would give a copy of it on the current GPU, where nobody would look for the result."""

    def check(group):
        mine = OnAGpu(torch.ones(3))
        monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.values)
        group.all_reduce(mine).wait()
        group.all_reduce(OnAGpu(torch.empty(0))).wait()
        monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.values.clone())
        with pytest.raises(bagua.InvalidArgument, match="OnAGpu on another GPU than the current one"):
            group.all_reduce(mine)
        assert mine.values.tolist() == [1.0] * 3

    thread_world(1, check)
