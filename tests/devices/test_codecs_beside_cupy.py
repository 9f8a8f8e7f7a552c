"""A second opinion on the kernels of codecs and sums: definitions in array operations, CuPy's for CUDA.

The same definitions run with NumPy's arrays beside the CPU's kernels, everywhere: so they are tested themselves.
"""

import importlib

import pytest
import torch

from bagua.testing import world
from tests.codec_specs import SPECS
from tests.devices import codec_definitions as definitions
from tests.distributed.worlds import fast_in

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, of what is meant
NUMELS = (1, 33, 2 * 2048 + 1027)
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=[pytest.mark.gpu, pytest.mark.needs("cupy")])])
def run(request):
    """Runs a check with NumPy and bagua on the CPU, or with CuPy and bagua on a GPU."""
    if request.param == "numpy":
        return lambda check, *args: check("cpu", *args)
    pool = request.getfixturevalue("device_pools")("cuda", 1)
    return lambda check, *args: pool.run(on_a_gpu, args=(check, args))


def on_a_gpu(rank, world_size, check, args):
    check("cuda", *args)


def arrays_for(device):
    return importlib.import_module("cupy" if device == "cuda" else "numpy")


def array_of(xp, tensor):
    """The array in a tensor's memory; bf16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return xp.from_dlpack(tensor.view(torch.int16)).view(xp.uint16)
    return xp.from_dlpack(tensor)


def inputs(numel, dtype, device):
    """Values of many magnitudes: rows by row of a kind that some codec treats apart."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    places = torch.arange(numel)
    spread = normal * torch.exp2(torch.randint(-20, 16, (numel,), generator=generator).float())
    kinds = {
        "normal": normal,
        "spread": spread,
        "positive": normal.abs() + 1,
        "constant": torch.full((numel,), -3.25),
        "zeros": torch.where(places % 3 == 0, -0.0, 0.0),
        "negative zeros": torch.full((numel,), -0.0),
        "tiny": normal * 2.0**-140,
        "equal": torch.where(places % 2 == 0, 1.5, -1.5),
        "huge": normal.clamp(-1, 1) * 3.0e38,
        "not finite": torch.where(places == numel // 2, float("inf"), normal),
    }
    for name, values in kinds.items():
        values = values.to(getattr(torch, dtype))
        if name != "not finite" and not values.isfinite().all():
            continue
        if name == "tiny" and device == "cuda":  # CuPy compiles its kernels to take subnormals for zeros
            continue
        yield name, values.to(device)


def same(xp, found, expected):
    """Returns True for the same bits, where all NaNs count as equal."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype == xp.uint8:
        return bool((found == expected).all())
    bits = getattr(xp, f"uint{8 * found.itemsize}")
    equal = xp.ascontiguousarray(found).view(bits) == xp.ascontiguousarray(expected).view(bits)
    if found.dtype == xp.uint16:
        nan = ((found & 0x7FFF) > 0x7F80) & ((expected & 0x7FFF) > 0x7F80)
    else:
        nan = xp.isnan(found) & xp.isnan(expected)
    return bool((equal | nan).all())


def check_codec(device, spec):
    import bagua

    xp, codec = arrays_for(device), bagua.codecs.get(spec)
    for numel in NUMELS:
        for dtype in DTYPES:
            for name, x in inputs(numel, dtype, device):
                case = spec, numel, dtype, name
                values = definitions.widen(xp, array_of(xp, x), dtype)
                messages = [codec.encode(x, key=key) for key in (5, 2**63 + 7)]
                for key, message in zip((5, 2**63 + 7), messages, strict=True):
                    assert same(xp, array_of(xp, message), definitions.encode(xp, spec, values, key)), case
                stood_for = definitions.decode(xp, spec, array_of(xp, messages[0]), numel, dtype)
                decoded = codec.decode(messages[0], numel, x.dtype)
                assert same(xp, array_of(xp, decoded), definitions.narrow(xp, stood_for, dtype)), case
                total = torch.linspace(-2, 2, numel, device=device)
                expected = definitions.decode_add(xp, spec, array_of(xp, messages[0]), array_of(xp, total.clone()))
                codec.decode_add(messages[0], total, x.dtype)
                assert same(xp, array_of(xp, total), expected), case
                rows = [array_of(xp, message) for message in messages]
                for average in (False, True):
                    found = codec.reduce_encode(torch.stack(messages), numel, x.dtype, average=average, key=9)
                    expected = definitions.reduce_encode(xp, spec, rows, numel, average, 9)
                    assert same(xp, array_of(xp, found), expected), (*case, average)


@fast_in("spec", ["fp16", "fp8_e4m3", "fp4_e3m0", "minmax_uint8", "onebit", "qsgd:bits=4", "topk:k=8"], SPECS)
def test_codecs(run, spec):
    run(check_codec, spec)


# ---- sums between two ranks, whose order does not matter

OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


def reduced(xp, op, one, other):
    """Reduces float32 values in float32, and integers in their type."""
    if op == "AVG":
        return (one + other) / xp.float32(2)
    return {"SUM": xp.add, "MIN": xp.minimum, "MAX": xp.maximum, "PRODUCT": xp.multiply}[op](one, other)


def check_sums(device):
    world(2, check_sums_of_a_rank, device)


def check_sums_of_a_rank(group, device):
    import bagua

    xp = arrays_for(device)
    for dtype in (*DTYPES, "int32", "int64"):
        for numel in (1, 33, 100_003):
            parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 100 for rank in range(2)]
            parts = [part.to(getattr(torch, dtype)).to(device) for part in parts]
            arrays = [array_of(xp, part) for part in parts]
            is_float = dtype in DTYPES
            values = [definitions.widen(xp, array, dtype) if is_float else array for array in arrays]
            for op in OPERATIONS if is_float else OPERATIONS[:1] + OPERATIONS[2:]:
                expected = reduced(xp, op, *values)
                expected = definitions.narrow(xp, expected, dtype) if is_float else expected
                given = parts[group.rank].clone()
                group.all_reduce(given, getattr(bagua.ReduceOp, op)).wait()
                assert same(xp, array_of(xp, given), expected), (dtype, numel, op)


def test_sums(run):
    run(check_sums)


class OnlyTheInterface:
    """An array of a library that has no DLPack."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def check_arrays(device):
    xp = arrays_for(device)

    def sum_arrays(group):
        for wrap in (lambda array: array, OnlyTheInterface) if device == "cuda" else (lambda array: array,):
            array = xp.arange(1000, dtype=xp.float32) * (group.rank + 1)
            group.all_reduce(wrap(array)).wait()
            assert (array == xp.arange(1000, dtype=xp.float32) * 3).all()

    world(2, sum_arrays)


def test_arrays_are_summed_in_place(run):
    run(check_arrays)
