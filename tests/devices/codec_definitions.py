"""The messages of every codec and what they stand for, in array operations: of NumPy, or of CuPy on a GPU.

They are written from the contracts, csrc/kernels/<codec>.h, and do not call bagua. `xp` is the module of the arrays.
Each operation is rounded separately, as in the contracts: CuPy fuses none of them.

Values are float32 arrays of one dimension; float16 and bfloat16 were widened. Messages are uint8 arrays.
"""

BLOCK = 2048
NAN = 0x7FC00000
_LARGEST = {"float32": float.fromhex("0x1.fffffep127"), "float16": 65504, "bfloat16": float.fromhex("0x1.fep127")}


def encode(xp, spec, x, key=0):
    """Encodes the values x into a message."""
    name, option = _parsed(spec)
    if name in ("fp16", "bf16"):
        return xp.ascontiguousarray(_TO_HALF[name](xp, x)).view(xp.uint8)
    parts, keys = [], []
    for start, rows in _rows(xp, x, _block_of(name)):
        keys = [_derived(key, start // _block_of(name) + row) for row in range(len(rows))]
        is_bad = ~xp.isfinite(rows).all(1, keepdims=True)
        parts.append(_ENCODE[name](xp, rows, is_bad, option, keys).reshape(-1))
    return xp.concatenate(parts) if parts else xp.zeros(0, xp.uint8)


def decode(xp, spec, message, numel, dtype):
    """Decodes a message into float32 values, before they are rounded to the type."""
    values = _decoded(xp, spec, message, numel)[0]
    if _parsed(spec)[0] not in ("centroid", "topk_chunk"):
        return values
    return xp.clip(values, -xp.float32(_LARGEST[dtype]), xp.float32(_LARGEST[dtype]))


def decode_add(xp, spec, message, total):
    """Returns total plus the values, where a message has any."""
    values, is_sent = _decoded(xp, spec, message, len(total))
    return xp.where(is_sent, total + values, total)


def reduce_encode(xp, spec, messages, numel, average, key):
    """Encodes the sum, or the mean, of the values of several messages."""
    sums = xp.zeros(numel, xp.float32)
    for message in messages:
        sums = decode_add(xp, spec, message, sums)
    if average:
        sums = (sums.astype(xp.float64) * (1 / len(messages))).astype(xp.float32)
    return encode(xp, spec, sums, key)


def narrow(xp, values, dtype):
    """Rounds float32 values as a decoder or an all_reduce does: beyond the type's range is Inf. bf16 is uint16."""
    return values if dtype == "float32" else _TO_HALF["fp16" if dtype == "float16" else "bf16"](xp, values)


def widen(xp, values, dtype):
    """Converts a narrow type to float32, exactly."""
    if dtype == "bfloat16":
        return (values.astype(xp.uint32) << xp.uint32(16)).view(xp.float32)
    return values.astype(xp.float32)


def to_f16(xp, x):
    """Rounds to nearest even; what is nearer to 65536 than to 65504 becomes Inf, and NaN the canonical one."""
    largest = xp.float32(65504)
    y = xp.clip(x, -largest, largest).astype(xp.float16)
    y = xp.where(xp.abs(x) >= xp.float32(65520), xp.copysign(xp.float16("inf"), y), y)
    return xp.where(xp.isnan(x), xp.float16("nan"), y).astype(xp.float16)


def to_bf16(xp, x):
    """Rounds to the upper half of the bits, to nearest even, which may be Inf; NaN becomes the canonical one."""
    bits = x.view(xp.uint32)
    rounded = bits + xp.uint32(0x7FFF) + ((bits >> xp.uint32(16)) & xp.uint32(1))
    return (xp.where(xp.isnan(x), xp.uint32(NAN), rounded) >> xp.uint32(16)).astype(xp.uint16)


# ---- blocks


def _parsed(spec):
    name, _, given = spec.partition(":")
    options = dict(one.split("=") for one in given.split(",") if one)
    if "chunk" in options:
        return "topk_chunk", tuple(int(options.get(*one)) for one in (("k", 32), ("bits", 32), ("dct", 0)))
    option = {"qsgd": ("bits", 8), "topk": ("k", 32)}.get(name)
    return name, option and int(options.get(*option))


def _block_of(name):
    return 4096 if name == "topk_chunk" else BLOCK


def _rows(xp, x, block):
    """Yields (first element, blocks of one length as rows): the whole blocks, and then the short one."""
    whole = len(x) // block * block
    if whole:
        yield 0, x[:whole].reshape(-1, block)
    if whole < len(x):
        yield whole, x[whole:].reshape(1, -1)


def _decoded(xp, spec, message, numel):
    """Returns values, and a mask of the elements that have any."""
    name, option = _parsed(spec)
    if name in ("fp16", "bf16"):
        dtype, raw = ("float16", xp.float16) if name == "fp16" else ("bfloat16", xp.uint16)
        return widen(xp, message.view(raw), dtype), xp.ones(numel, bool)
    values, is_sent, at = [], [], 0
    block = _block_of(name)
    for count, length in ((numel // block, block), (int(numel % block > 0), numel % block)):
        if not count:
            continue
        row_bytes = _ROW_BYTES[name](length, option)
        rows = message[at : at + count * row_bytes].reshape(count, row_bytes)
        at += count * row_bytes
        found, sent = _DECODE[name](xp, rows, length, option)
        values.append(found.reshape(-1))
        is_sent.append(sent.reshape(-1))
    assert at == len(message)
    return xp.concatenate(values), xp.concatenate(is_sent)


def _bytes(xp, column, dtype):
    """Converts rows of numbers to rows of their bytes."""
    return xp.ascontiguousarray(column.astype(dtype)).view(xp.uint8).reshape(len(column), -1)


def _numbers(xp, rows, dtype):
    return xp.ascontiguousarray(rows).view(dtype)


def _or_nan(xp, is_bad, floats):
    return xp.where(is_bad, xp.full(1, NAN, xp.uint32), xp.ascontiguousarray(floats).view(xp.uint32))


# ---- minmax_uint8


def _ordered(xp, bits):
    """Maps the bits of floats to integers of the same order, with -0 below 0; it is its own inverse."""
    return xp.where(bits < 0, bits ^ xp.int32(0x7FFFFFFF), bits)


def _minmax_grid(xp, low, high):
    span = high.astype(xp.float64) - low.astype(xp.float64)
    scale = xp.where(span >= 2.0**126, 2.0**-4, xp.where((span > 0) & (span < 2.0**-100), 2.0**100, 1.0))
    is_flat = span == 0
    units = xp.where(is_flat, 1.0, span * scale)
    step, inverse = (units / 255).astype(xp.float32), (255 / units).astype(xp.float32)
    scale = scale.astype(xp.float32)
    has_zero = (low <= 0) & (high >= 0)
    zero_code = xp.where(has_zero, xp.rint(-(low * scale * inverse)), xp.float32(0))
    base = xp.where(has_zero, xp.float32(0), low * scale)
    return is_flat, scale, step, inverse, base, zero_code


def _minmax_encode(xp, rows, is_bad, _option, _keys):
    rows = xp.where(is_bad, xp.float32(0), rows)
    order = _ordered(xp, rows.view(xp.int32))
    low, high = (
        _ordered(xp, xp.ascontiguousarray(of(1, keepdims=True))).view(xp.float32) for of in (order.min, order.max)
    )
    is_flat, scale, _, inverse, base, zero_code = _minmax_grid(xp, low, high)
    product = (rows * scale - base) * inverse
    codes = xp.minimum(255, xp.rint(product.astype(xp.float64) + zero_code))
    codes = xp.where(is_flat | is_bad, 0, codes)
    header = [_bytes(xp, _or_nan(xp, is_bad, end), xp.uint32) for end in (low, high)]
    return xp.concatenate([*header, codes.astype(xp.uint8)], 1)


def _minmax_decode(xp, rows, _length, _option):
    low, high = _numbers(xp, rows[:, :4], xp.float32), _numbers(xp, rows[:, 4:8], xp.float32)
    is_flat, scale, step, _, base, zero_code = _minmax_grid(xp, low, high)
    values = ((base - zero_code * step) + rows[:, 8:].astype(xp.float32) * step) / scale
    values = xp.where(is_flat, low, xp.minimum(xp.maximum(values, low), high))
    values = xp.where(xp.isfinite(low), values, xp.float32("nan"))
    return values, xp.ones(values.shape, bool)


# ---- small floats

_FLOATS = {  # exponent bits, mantissa bits, the largest number, bits
    "fp8_e4m3": (4, 3, 448.0, 8),
    "fp8_e5m2": (5, 2, 57344.0, 8),
    "fp4_e2m1": (2, 1, 6.0, 4),
    "fp4_e3m0": (3, 0, 16.0, 4),
}


def _magnitudes(xp, name):
    """Lists the numbers by their code, up to the largest."""
    exponent_bits, mantissa_bits, largest, _ = _FLOATS[name]
    bias, ones, found = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, ones)
        value = (mantissa + (ones if exponent else 0)) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        if value <= largest:
            found.append(value)
    return xp.asarray(found, dtype=xp.float64)


def _float_scales(xp, norm):
    return xp.where(norm < 2.0**-80, xp.float32(2.0**100), xp.float32(1)).astype(xp.float32)


def _float_encode(name):
    def encode_rows(xp, rows, is_bad, _option, _keys):
        rows = xp.where(is_bad, xp.float32(0), rows)
        numbers = _magnitudes(xp, name)
        norm = xp.abs(rows).max(1, keepdims=True)
        scale = _float_scales(xp, norm)
        scaled = (norm * scale).astype(xp.float64)
        units = xp.where(norm == 0, 0.0, numbers[-1] / xp.where(norm == 0, 1.0, scaled)).astype(xp.float32)
        y = (rows * scale * units).astype(xp.float64)
        # Between two neighbours the middle is exact; it goes to the even code.
        above = xp.clip(xp.searchsorted(numbers, xp.abs(y)), 1, len(numbers) - 1)
        middle = (numbers[above - 1] + numbers[above]) / 2
        is_up = (xp.abs(y) > middle) | ((xp.abs(y) == middle) & (above % 2 == 0))
        codes = xp.where(is_up, above, above - 1)
        bits = _FLOATS[name][3]
        codes = xp.where(is_bad, 0, codes + xp.where(xp.signbit(rows), 2 ** (bits - 1), 0)).astype(xp.uint8)
        if bits == 4:
            width = -(-rows.shape[1] // 2)
            upper = xp.zeros((len(rows), width), xp.uint8)
            upper[:, : rows.shape[1] - width] = codes[:, width:]
            codes = codes[:, :width] | upper << xp.uint8(4)
        return xp.concatenate([_bytes(xp, _or_nan(xp, is_bad, norm), xp.uint32), codes], 1)

    return encode_rows


def _float_decode(name):
    def decode_rows(xp, rows, length, _option):
        numbers, sign = _magnitudes(xp, name), 2 ** (_FLOATS[name][3] - 1)
        norm, codes = _numbers(xp, rows[:, :4], xp.float32), rows[:, 4:].astype(xp.int64)
        if sign == 8:
            codes = xp.concatenate([codes % 16, codes // 16], 1)[:, :length]
        scale = _float_scales(xp, norm)
        step = ((norm * scale).astype(xp.float64) / numbers[-1]).astype(xp.float32)
        values = numbers[codes % sign].astype(xp.float32) * step / scale
        values = xp.where(codes % sign == len(numbers) - 1, norm, values)
        values = xp.where(codes >= sign, -values, values)
        values = xp.where(xp.isfinite(norm), values, xp.float32("nan"))
        return values, xp.ones(values.shape, bool)

    return decode_rows


# ---- qsgd

_MASK = 2**64 - 1


def _mixed(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _derived(key, index):
    return _mixed((_mixed(key) + 0x9E3779B97F4A7C15 * (index + 1)) & _MASK)


def _draws(xp, keys, padded):
    """Draws 15 bits for each element of each block."""
    low = xp.asarray([[key & 0xFFFFFFFF] for key in keys], dtype=xp.uint32)
    high = xp.asarray([[key >> 32] for key in keys], dtype=xp.uint32)
    x = xp.arange(padded // 2, dtype=xp.uint32) * xp.uint32(0x9E3779B1) + low
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x7FEB352D)
    x = (x ^ (x >> xp.uint32(15)) ^ high) * xp.uint32(0x846CA68B)
    x = x ^ (x >> xp.uint32(16))
    return xp.concatenate([x & xp.uint32(0x7FFF), x >> xp.uint32(17)], 1).astype(xp.int64)


def _padded(length, bits):
    unit = 4 if bits == 2 else 2
    return -(-length // unit) * unit


def _qsgd_encode(xp, rows, is_bad, bits, keys):
    rows = xp.where(is_bad, xp.float32(0), rows)
    levels, length = 2 ** (bits - 1) - 1, rows.shape[1]
    padded = _padded(length, bits)
    norm = xp.abs(rows).max(1, keepdims=True)
    is_zero = norm == 0
    scale = xp.where(norm < 2.0**-100, xp.float32(2.0**100), xp.float32(1)).astype(xp.float32)
    scaled = xp.where(is_zero, xp.float32(1), norm * scale).astype(xp.float64)
    factor = (levels * 2**15 / scaled).astype(xp.float32)
    filled = xp.concatenate([rows, xp.zeros((len(rows), padded - length), xp.float32)], 1)
    exact = xp.rint(filled * scale * factor).astype(xp.int64)
    codes = (exact + _draws(xp, keys, padded)) >> 15
    extreme = xp.where(xp.signbit(filled), -levels, levels)
    codes = xp.where(xp.abs(filled) == norm, extreme, codes) + levels
    codes = xp.where(is_bad | is_zero, 0, codes).astype(xp.uint8)
    norm = xp.where(is_zero & xp.signbit(rows).all(1, keepdims=True), -norm, norm)
    per_byte = 8 // bits
    packed = xp.zeros((len(rows), padded // per_byte), xp.uint8)
    for part in range(per_byte):
        width = padded // per_byte
        packed |= codes[:, part * width : (part + 1) * width] << xp.uint8(part * bits)
    return xp.concatenate([_bytes(xp, _or_nan(xp, is_bad, norm), xp.uint32), packed], 1)


def _qsgd_decode(xp, rows, length, bits):
    levels, per_byte = 2 ** (bits - 1) - 1, 8 // bits
    norm, packed = _numbers(xp, rows[:, :4], xp.float32), rows[:, 4:]
    codes = [(packed >> xp.uint8(part * bits)) & xp.uint8(2**bits - 1) for part in range(per_byte)]
    codes = xp.concatenate(codes, 1)[:, :length].astype(xp.int32) - levels
    scale = xp.where(norm < 2.0**-100, xp.float32(2.0**100), xp.float32(1)).astype(xp.float32)
    step = ((norm * scale).astype(xp.float64) / levels).astype(xp.float32)
    values = codes.astype(xp.float32) * step / scale
    values = xp.where(xp.abs(codes) == levels, xp.where(codes < 0, -norm, norm), values)
    values = xp.where(norm == 0, norm, values)
    values = xp.where(xp.isfinite(norm), values, xp.float32("nan"))
    return values, xp.ones(values.shape, bool)


# ---- onebit


def _onebit_encode(xp, rows, is_bad, _option, _keys):
    length = rows.shape[1]
    lanes = -(-length // 64) * 64
    magnitudes = xp.zeros((len(rows), lanes), xp.float64)
    magnitudes[:, :length] = xp.where(is_bad, xp.float32(0), xp.abs(rows))
    total = xp.zeros((len(rows), 64), xp.float64)
    for turn in range(lanes // 64):
        total = total + magnitudes[:, turn * 64 : (turn + 1) * 64]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    scale = (total / length).astype(xp.float32)
    padded = -(-length // 8) * 8
    signs = xp.zeros((len(rows), padded), xp.uint8)
    signs[:, :length] = xp.signbit(rows) & ~is_bad
    packed = xp.zeros((len(rows), padded // 8), xp.uint8)
    for bit in range(8):
        packed |= signs[:, bit * padded // 8 : (bit + 1) * padded // 8] << xp.uint8(bit)
    return xp.concatenate([_bytes(xp, _or_nan(xp, is_bad, scale), xp.uint32), packed], 1)


def _onebit_decode(xp, rows, length, _option):
    scale, packed = _numbers(xp, rows[:, :4], xp.float32), rows[:, 4:]
    signs = xp.concatenate([(packed >> xp.uint8(bit)) & xp.uint8(1) for bit in range(8)], 1)[:, :length]
    values = xp.where(signs > 0, -scale, scale)
    return values, xp.ones(values.shape, bool)


# ---- centroid


def _lane_mean(xp, numbers):
    """Returns the mean of each row, in 64 lanes from -0 on."""
    length = numbers.shape[1]
    total = xp.full((len(numbers), 64), -0.0, xp.float64)
    for begin in range(0, length, 64):
        width = min(64, length - begin)
        total[:, :width] = total[:, :width] + numbers[:, begin : begin + width]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total / length


def _centroid_encode(xp, rows, is_bad, _option, _keys):
    length = rows.shape[1]
    numbers = xp.where(is_bad, xp.float32(0), rows).astype(xp.float64)
    mean = _lane_mean(xp, numbers).astype(xp.float32)
    center = mean.astype(xp.float64)
    sigma = xp.sqrt(_lane_mean(xp, (numbers - center) * (numbers - center))).astype(xp.float32)
    step = 1.5 * sigma.astype(xp.float64)
    codes = xp.zeros((len(rows), -(-length // 4) * 4), xp.uint8)
    for threshold in (center - step, center, center + step):
        codes[:, :length] += (rows > threshold.astype(xp.float32)) & ~is_bad
    part = codes.shape[1] // 4
    packed = xp.zeros((len(rows), part), xp.uint8)
    for index in range(4):
        packed |= codes[:, index * part : (index + 1) * part] << xp.uint8(2 * index)
    header = [_bytes(xp, _or_nan(xp, is_bad, number), xp.uint32) for number in (mean, sigma)]
    return xp.concatenate([*header, packed], 1)


def _centroid_decode(xp, rows, length, _option):
    mean, sigma = (_numbers(xp, rows[:, at : at + 4], xp.float32).astype(xp.float64) for at in (0, 4))
    codes = xp.concatenate([(rows[:, 8:] >> xp.uint8(2 * index)) & xp.uint8(3) for index in range(4)], 1)
    levels = mean + (codes[:, :length].astype(xp.float64) - 1.5) * (1.5 * sigma)
    values = xp.clip(levels, -_LARGEST["float32"], _LARGEST["float32"]).astype(xp.float32)
    return values, xp.ones(values.shape, bool)


# ---- topk


def _topk_chosen(xp, rows, is_bad, k):
    """Returns the places of the k largest, in order, of bad rows the first."""
    length = rows.shape[1]
    count = min(k, length)
    magnitudes = (rows.view(xp.int32) & xp.int32(0x7FFFFFFF)).astype(xp.int64)
    places = xp.arange(length, dtype=xp.int64)
    # Sorts by magnitude, of equal ones the lower place first: no two are equal, so it does not matter how.
    order = xp.argsort(-(magnitudes * 4096 + (4095 - places)), axis=1)[:, :count]
    return xp.where(is_bad, places[:count], xp.sort(order, axis=1))


def _topk_encode(xp, rows, is_bad, k, _keys):
    chosen = _topk_chosen(xp, rows, is_bad, k)
    values = xp.take_along_axis(rows, chosen, axis=1)
    return xp.concatenate([_bytes(xp, _or_nan(xp, is_bad, values), xp.uint32), _bytes(xp, chosen, xp.uint16)], 1)


def _topk_decode(xp, rows, length, k):
    count = min(k, length)
    values = _numbers(xp, rows[:, : 4 * count], xp.float32)
    places = _numbers(xp, rows[:, 4 * count :], xp.uint16).astype(xp.int64)
    return _topk_scattered(xp, values, places, length)


def _topk_scattered(xp, values, places, length):
    found, is_sent = xp.zeros((len(values), length), xp.float32), xp.zeros((len(values), length), bool)
    row = xp.arange(len(values))[:, None]
    found[row, places] = values
    is_sent[row, places] = True
    is_bad = ~xp.isfinite(values[:, :1])
    return xp.where(is_bad, xp.float32("nan"), found), is_sent | is_bad


# ---- topk with chunk=4096


def _packed_bits(xp, rows, num_bits):
    """Packs rows of numbers, each of so many bits, from the lowest bits up."""
    count = rows.shape[1]
    bits = (rows[:, :, None].astype(xp.int64) >> xp.arange(num_bits)) & 1
    filled = xp.zeros((len(rows), -(-count * num_bits // 8) * 8), xp.int64)
    filled[:, : count * num_bits] = bits.reshape(len(rows), -1)
    return (filled.reshape(len(rows), -1, 8) << xp.arange(8)).sum(2).astype(xp.uint8)


def _unpacked_bits(xp, rows, num_bits, count):
    bits = ((rows[:, :, None].astype(xp.int64) >> xp.arange(8)) & 1).reshape(len(rows), -1)[:, : count * num_bits]
    return (bits.reshape(len(rows), count, num_bits) << xp.arange(num_bits)).sum(2)


def _chunk_mean(xp, magnitudes, is_one):
    """Returns the mean of those of each row that are taken, in 32 lanes; NaN where there are none."""
    count = magnitudes.shape[1]
    total = xp.zeros((len(magnitudes), 32), xp.float64)
    for begin in range(0, count, 32):
        width = min(32, count - begin)
        taken = xp.where(is_one, magnitudes, 0.0)[:, begin : begin + width]
        total[:, :width] = total[:, :width] + taken
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    num = is_one.sum(1, keepdims=True)
    return xp.where(num > 0, total / xp.maximum(num, 1), xp.float64("nan"))


def _cosines(xp):
    """Returns the matrix of the transform."""
    order = xp.arange(64, dtype=xp.float64)
    matrix = xp.cos(xp.pi / 128 * order[:, None] * (2 * order + 1)) * (2 / 64) ** 0.5
    matrix[0] = 0.125
    return matrix.astype(xp.float32)


def _product(xp, left, right):
    """Multiplies matrices; each sum is in the order of the index, every operation rounded separately."""
    total = xp.zeros(xp.broadcast_shapes(left.shape, right.shape), xp.float32)
    for j in range(64):
        total = total + left[..., :, j : j + 1] * right[..., j : j + 1, :]
    return total


def _transformed(xp, rows):
    squares = xp.zeros((len(rows), 4096), xp.float32)
    squares[:, : rows.shape[1]] = rows / xp.float32(64)
    matrix = _cosines(xp)
    half = _product(xp, matrix, squares.reshape(-1, 64, 64))
    return _product(xp, half, matrix.T).reshape(-1, 4096)


def _transformed_back(xp, rows, length):
    matrix = _cosines(xp)
    half = _product(xp, rows.reshape(-1, 64, 64), matrix)
    values = _product(xp, matrix.T, half).reshape(-1, 4096)[:, :length] * xp.float32(64)
    largest = xp.finfo(xp.float32).max
    return xp.clip(values, -largest, largest)


def _topk_chunk_encode(xp, rows, is_bad, option, _keys):
    k, num_bits, is_dct = option
    k = min(k, rows.shape[1])
    if is_dct:
        rows = _transformed(xp, xp.where(is_bad, xp.float32(0), rows))
    chosen = _topk_chosen(xp, rows, is_bad, k)
    values = xp.take_along_axis(rows, chosen, axis=1)
    indices = _packed_bits(xp, chosen, 12)
    if num_bits == 32:
        return xp.concatenate([_bytes(xp, _or_nan(xp, is_bad, values), xp.uint32), indices], 1)
    magnitudes = xp.where(is_bad, 0.0, xp.abs(values).astype(xp.float64))
    mean = _chunk_mean(xp, magnitudes, xp.ones(magnitudes.shape, bool))
    lower, upper = (_chunk_mean(xp, magnitudes, is_one) for is_one in (magnitudes <= mean, magnitudes > mean))
    both = xp.concatenate([lower, xp.where(xp.isnan(upper), lower, upper)], 1).astype(xp.float32)
    bits = both.view(xp.uint32) & xp.uint32(0xFFFF0000)
    levels = bits.view(xp.float32)
    middle = levels[:, :1] / xp.float32(2) + levels[:, 1:] / xp.float32(2)
    codes = xp.where(is_bad, 0, 2 * (xp.abs(values) > middle) + xp.signbit(values))
    header = _bytes(xp, xp.where(is_bad, xp.uint32(NAN), bits) >> xp.uint32(16), xp.uint16)
    return xp.concatenate([header, _packed_bits(xp, codes, 2), indices], 1)


def _topk_chunk_decode(xp, rows, length, option):
    if not option[2]:
        return _topk_chunk_decoded(xp, rows, length, length, option)
    found, _ = _topk_chunk_decoded(xp, rows, length, 4096, option)
    is_bad = xp.isnan(found[:, :1])
    values = _transformed_back(xp, xp.where(is_bad, xp.float32(0), found), length)
    return xp.where(is_bad, xp.float32("nan"), values), xp.ones(values.shape, bool)


def _topk_chunk_decoded(xp, rows, length, num_coded, option):
    """Returns elements or coefficients, and which of them are sent."""
    k, num_bits, _ = option
    count = min(k, length)
    codes_bytes = 4 * count if num_bits == 32 else 4 + -(-count // 4)
    places = _unpacked_bits(xp, rows[:, codes_bytes:], 12, count)
    if num_bits == 32:
        return _topk_scattered(xp, _numbers(xp, rows[:, :codes_bytes], xp.float32), places, num_coded)
    levels = (_numbers(xp, rows[:, :4], xp.uint16).astype(xp.uint32) << xp.uint32(16)).view(xp.float32)
    codes = _unpacked_bits(xp, rows[:, 4:codes_bytes], 2, count)
    values = xp.where(codes >= 2, levels[:, 1:], levels[:, :1])
    return _topk_scattered(xp, xp.where(codes % 2 == 1, -values, values), places, num_coded)


def _topk_chunk_bytes(length, option):
    k, num_bits, _ = option
    count = min(k, length)
    return (4 * count if num_bits == 32 else 4 + -(-count // 4)) + -(-12 * count // 8)


_TO_HALF = {"fp16": to_f16, "bf16": to_bf16}
_ENCODE = {
    "minmax_uint8": _minmax_encode,
    "qsgd": _qsgd_encode,
    "onebit": _onebit_encode,
    "topk": _topk_encode,
    "topk_chunk": _topk_chunk_encode,
    "centroid": _centroid_encode,
}
_DECODE = {
    "minmax_uint8": _minmax_decode,
    "qsgd": _qsgd_decode,
    "onebit": _onebit_decode,
    "topk": _topk_decode,
    "topk_chunk": _topk_chunk_decode,
    "centroid": _centroid_decode,
}
_ENCODE |= {name: _float_encode(name) for name in _FLOATS}
_DECODE |= {name: _float_decode(name) for name in _FLOATS}
_ROW_BYTES = {
    "fp4_e2m1": lambda length, _: 4 + -(-length // 2),
    "fp4_e3m0": lambda length, _: 4 + -(-length // 2),
    "fp8_e4m3": lambda length, _: 4 + length,
    "fp8_e5m2": lambda length, _: 4 + length,
    "minmax_uint8": lambda length, _: 8 + length,
    "qsgd": lambda length, bits: 4 + _padded(length, bits) * bits // 8,
    "onebit": lambda length, _: 4 + -(-length // 8),
    "centroid": lambda length, _: 8 + -(-length // 4),
    "topk": lambda length, k: 6 * min(k, length),
    "topk_chunk": _topk_chunk_bytes,
}
