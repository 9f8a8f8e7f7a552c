"""Random collectives: one seeded plan that every rank makes alike, each rank's inputs, and the oracle in float64 loops.

A plan is a list of operations of random kind, type, size, operator, codec, group, memory and blocking; every rank
starts them in the plan's order and waits for them in an order of its own. Inputs are integers that the types hold, so
results without a codec are exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import bagua
from bagua import ReduceOp
from tests.codec_specs import CONTRACTIONS, SPECS
from tests.distributed.oracles import DTYPES, compressed_sum, decoded_sum, neighbor_weights, ops_of, reduced

KINDS = (
    "all_reduce",
    "all_reduce",  # the one that everybody uses has the most algorithms
    "reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "broadcast",
    "neighbor_average",
    "barrier",
    "send_recv",
)
TOPOLOGIES = ("ring", "shift_one", "exponential", "all")
CODEC_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENCODES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "neighbor_average")


@dataclass(frozen=True)
class Call:
    """One operation of the plan; ranks are ranks of the world."""

    index: int
    kind: str
    group: int  # into the plan's groups
    members: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    op: ReduceOp
    codec: str | None
    hierarchical: bool
    root: int
    peer: int  # of send_recv: from root to peer
    topology: str
    is_shared: bool  # tensors from bagua.empty
    is_strided: bool
    is_blocking: bool

    def input_of(self, rank: int, numel: int) -> torch.Tensor:
        """Different for every operation, rank and element, and small, so that sums of four are exact."""
        x = torch.arange(numel, dtype=torch.int64) * 7 + 13 * rank + self.index
        if self.op is ReduceOp.PRODUCT:
            return (x % 3 + 1).to(self.dtype)
        return (x % 2 == 0) if self.dtype is torch.bool else (x % 29).to(self.dtype)


def make_groups(world_size: int, random_: random.Random) -> list[tuple[int, ...]]:
    """The world and three random, overlapping subsets of at least two."""
    everybody = tuple(range(world_size))
    subsets = [tuple(sorted(random_.sample(everybody, random_.randint(2, world_size)))) for _ in range(3)]
    return [everybody, *subsets]


def random_call(index: int, groups: list[tuple[int, ...]], random_: random.Random) -> Call:
    kind = random_.choice(KINDS)
    dtype = random_.choice(DTYPES)
    if kind == "neighbor_average":
        dtype = random_.choice([d for d in DTYPES if d.is_floating_point])
    codec = None
    if kind in ENCODES and dtype in CODEC_DTYPES and random_.random() < 0.3:
        codec = random_.choice(SPECS)
    op = random_.choice([ReduceOp.SUM, ReduceOp.AVG] if codec else ops_of(dtype))
    # Mostly small, sometimes none, sometimes beyond every threshold of the selector.
    numel = random_.choice([0, 1, random_.randint(2, 100), random_.randint(101, 5000), random_.randint(5001, 60_000)])
    if random_.random() < 0.02:
        numel = random_.randint(60_001, 600_000)
    group = random_.randrange(len(groups))
    root, peer = random_.sample(groups[group], 2)
    return Call(
        index=index,
        kind=kind,
        group=group,
        members=groups[group],
        dtype=dtype,
        numel=numel,
        op=op,
        codec=codec,
        hierarchical=kind == "all_reduce" and random_.random() < 0.2 and codec not in CONTRACTIONS,
        root=root,
        peer=peer,
        topology=random_.choice(TOPOLOGIES),
        is_shared=random_.random() < 0.3,
        is_strided=random_.random() < 0.1,
        is_blocking=random_.random() < 0.3,
    )


class Memory:
    """Tensors to work on: shared ones are kept and used again, as buckets are."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, call: Call, values: torch.Tensor) -> torch.Tensor:
        if call.is_strided:
            return torch.stack([values, values], dim=-1)[..., 1]
        if not call.is_shared:
            return values.clone()
        capacity = 1 << max(values.numel() - 1, 0).bit_length()
        free = self._free.setdefault((values.dtype, capacity), [])
        block = free.pop() if free else bagua.empty(capacity, dtype=values.dtype)
        tensor = block[: values.numel()]
        tensor.copy_(values)
        return tensor

    def release(self, call: Call, tensor: torch.Tensor) -> None:
        if call.is_shared and not call.is_strided and tensor.numel() > 0:
            base = tensor._base
            self._free[base.dtype, base.numel()].append(base)


def splits(call: Call, source: int, target: int) -> int:
    """Rows that go from one member (by group rank) to another in all_to_all."""
    return (source * 3 + target * 5 + call.index) % 4 * (call.numel // 4)


class Started:
    """A call that this rank has started: its Work and how to check it once it has ended."""

    def __init__(self, work, tensors, check):
        self._work, self._tensors, self._check = work, tensors, check

    def finish(self, call: Call, memory: Memory) -> None:
        if self._work is not None:
            self._work.wait()
        self._check()
        for tensor in self._tensors:
            memory.release(call, tensor)


def expect(call: Call, actual: torch.Tensor, exact: torch.Tensor, error_bound: torch.Tensor | float = 0.0) -> None:
    """Equal to what float64 says within `error_bound`, and within what one rounding to the type may change."""
    if not call.dtype.is_floating_point:
        assert torch.equal(actual, exact.to(call.dtype)), f"{call}: {actual} is not {exact}"
        return
    exact = exact.double()
    rounding = 2 * torch.finfo(call.dtype).eps * exact.abs()
    wrong = (actual.double() - exact).abs() > rounding + error_bound
    assert not wrong.any(), f"{call}: element {int(wrong.nonzero()[0])} of {wrong.numel()} is wrong"


def codec_bound(call: Call, inputs: list[torch.Tensor], times: int) -> float:
    """A bound on the error of a sum of `inputs`, each encoded once, that is encoded `times - 1` more times.

    A contraction has none: what is expected of it is what its codec makes of the inputs.
    """
    if call.codec is None or call.codec in CONTRACTIONS or not inputs or inputs[0].numel() == 0:
        return 0.0
    largest = sum(float(x.double().abs().max()) for x in inputs)
    # A small float is off by half the distance of its two largest numbers, and no other codec without chance by more
    # than 1/255 of a block's range, which is at most twice the largest magnitude.
    of_floats = {"fp8_e4m3": 1 / 28, "fp8_e5m2": 1 / 14, "fp4_e2m1": 1 / 6, "fp4_e3m0": 1 / 4}
    codec = bagua.codecs.get(call.codec)
    share = 1 / (2 ** (codec.bits - 1) - 1) if codec.is_random else of_floats.get(call.codec, 1 / 255)
    return 2.1 * times * largest * share


def coded(call: Call, x: torch.Tensor) -> torch.Tensor:
    """What arrives of x."""
    if call.codec not in CONTRACTIONS:
        return x
    codec = bagua.codecs.get(call.codec)
    return codec.decode(codec.encode(x.contiguous()), x.numel(), x.dtype)


def start(call: Call, group: bagua.ProcessGroup, rank: int, memory: Memory) -> Started:
    """Start `call` on a member of its group."""
    return _STARTERS[call.kind](call, group, rank, memory)


def _options(call: Call, group) -> dict:
    options = {"group": group, "async_op": not call.is_blocking}
    return {**options, "codec": call.codec} if call.kind in ENCODES else options


def _all_reduce(call, group, rank, memory):
    inputs = [call.input_of(r, call.numel) for r in call.members]
    x = memory.take(call, inputs[call.members.index(rank)])
    work = bagua.all_reduce(x, call.op, hierarchical=call.hierarchical, **_options(call, group))
    scale = len(inputs) if call.op is ReduceOp.AVG else 1
    bound = codec_bound(call, inputs, 2) / scale
    if call.hierarchical and call.dtype.itemsize == 2 and call.dtype.is_floating_point:
        # Stages round to the type, products too.
        exact = reduced([y.double() for y in inputs], call.op)
        bound += 4 * torch.finfo(call.dtype).eps * float(exact.abs().max()) if call.numel else 0.0
    if call.codec in CONTRACTIONS:
        return Started(work, [x], lambda: expect(call, x, compressed_sum(call.codec, inputs, call.op)))
    return Started(work, [x], lambda: expect(call, x, _total(call, inputs), bound))


def _total(call, inputs):
    if not call.dtype.is_floating_point:
        return reduced(inputs, call.op)
    return reduced([x.double() for x in inputs], call.op)


def _reduce(call, group, rank, memory):
    inputs = [call.input_of(r, call.numel) for r in call.members]
    x = memory.take(call, inputs[call.members.index(rank)])
    work = bagua.reduce(x, call.root, call.op, **_options(call, group))
    return Started(work, [x], lambda: rank == call.root and expect(call, x, _total(call, inputs)))


def _reduce_scatter(call, group, rank, memory):
    n, group_rank = len(call.members), call.members.index(rank)
    inputs = [call.input_of(r, n * call.numel) for r in call.members]
    x, out = memory.take(call, inputs[group_rank]), torch.empty(call.numel, dtype=call.dtype)
    work = bagua.reduce_scatter(out, x, call.op, **_options(call, group))
    blocks = [y.view(n, call.numel)[group_rank] for y in inputs]
    bound = codec_bound(call, blocks, 1)
    if call.codec in CONTRACTIONS:
        return Started(work, [x], lambda: expect(call, out, decoded_sum(call.codec, blocks, call.op, [0] * n)))
    return Started(work, [x], lambda: expect(call, out, _total(call, blocks), bound))


def _all_gather(call, group, rank, memory):
    inputs = [call.input_of(r, call.numel) for r in call.members]
    x = memory.take(call, inputs[call.members.index(rank)])
    out = torch.empty(len(inputs) * call.numel, dtype=call.dtype)
    work = bagua.all_gather(out, x, **_options(call, group))
    bound = codec_bound(call, inputs, 1)
    return Started(work, [x], lambda: expect(call, out, torch.cat([coded(call, y) for y in inputs]), bound))


def _gather(call, group, rank, memory):
    inputs = [call.input_of(r, call.numel) for r in call.members]
    x = memory.take(call, inputs[call.members.index(rank)])
    out = torch.empty(len(inputs) * call.numel, dtype=call.dtype) if rank == call.root else None
    work = bagua.gather(out, x, call.root, **_options(call, group))
    return Started(work, [x], lambda: out is not None and expect(call, out, torch.cat(inputs)))


def _scatter(call, group, rank, memory):
    n, group_rank = len(call.members), call.members.index(rank)
    values = call.input_of(call.root, n * call.numel)
    x = memory.take(call, values) if rank == call.root else None
    out = torch.empty(call.numel, dtype=call.dtype)
    work = bagua.scatter(out, x, call.root, **_options(call, group))
    expected = values.view(n, call.numel)[group_rank]
    return Started(work, [] if x is None else [x], lambda: expect(call, out, expected))


def _all_to_all(call, group, rank, memory):
    n, group_rank = len(call.members), call.members.index(rank)
    rows = [[splits(call, s, t) for t in range(n)] for s in range(n)]
    inputs = [call.input_of(call.members[s], sum(rows[s])) for s in range(n)]
    x = memory.take(call, inputs[group_rank])
    expected = torch.cat([coded(call, inputs[s].split(rows[s])[group_rank]) for s in range(n)])
    out = torch.empty_like(expected)
    work = bagua.all_to_all(out, x, [rows[s][group_rank] for s in range(n)], rows[group_rank], **_options(call, group))
    bound = codec_bound(call, [expected], 1)
    return Started(work, [x], lambda: expect(call, out, expected, bound))


def _broadcast(call, group, rank, memory):
    values = call.input_of(call.root, call.numel)
    x = memory.take(call, values if rank == call.root else torch.zeros_like(values))
    work = bagua.broadcast(x, call.root, **_options(call, group))
    return Started(work, [x], lambda: expect(call, x, coded(call, values), codec_bound(call, [values], 1)))


def _neighbor_average(call, group, rank, memory):
    n, group_rank = len(call.members), call.members.index(rank)
    inputs = [call.input_of(r, call.numel) for r in call.members]
    x = memory.take(call, inputs[group_rank])
    work = bagua.neighbor_average(x, call.topology, call.index, **_options(call, group))
    exact = torch.zeros(call.numel, dtype=torch.float64)
    bound = codec_bound(call, inputs, 1) + 1e-12
    for j, weight in enumerate(neighbor_weights(call.topology, n, group_rank, call.index)):
        value = inputs[j] if j == group_rank else coded(call, inputs[j])
        exact += weight * value.double()
        if call.codec in CONTRACTIONS and call.numel:  # it is added in float32, and `coded` has rounded it to its dtype
            bound += weight * torch.finfo(call.dtype).eps * float(value.double().abs().max())
    return Started(work, [x], lambda: expect(call, x, exact, bound))


def _barrier(call, group, rank, memory):
    return Started(bagua.barrier(**_options(call, group)), [], lambda: None)


def _send_recv(call, group, rank, memory):
    values = call.input_of(call.root, call.numel)
    if rank == call.root:
        x = memory.take(call, values)
        return Started(bagua.send(x, call.peer, group=group, async_op=True), [x], lambda: None)
    if rank == call.peer:
        x = memory.take(call, torch.zeros_like(values))
        return Started(bagua.recv(x, call.root, group=group, async_op=True), [x], lambda: expect(call, x, values))
    return Started(None, [], lambda: None)


_STARTERS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "neighbor_average": _neighbor_average,
    "barrier": _barrier,
    "send_recv": _send_recv,
}
