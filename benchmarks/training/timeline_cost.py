"""Measures the cost of recording the timeline, in a training step of ten buckets with 10 ms of compute.

The compute is a sleep of 1 ms per layer in backward, so that no work of the step hides recording. The cost is measured
in two ways in the same run. Counted: the calls of the recorder, reads of the clock and spans written to the engine's
log per step, times the processor time of each; the worker thread writes the spans during backward. Compared: steps with
recording and with a recorder that does nothing, in turns; the engine's log cannot be turned off and is in both. The
script ends with 1 if recording exceeds its limit. A second table has the cost of reading the records of the whole run.

    .venv/bin/python -m benchmarks.training.timeline_cost [--ranks 2] [--tcp] [--quick]
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from bagua.replay.systems import destroy, initialise
from benchmarks.lib import ranks, report, timing

ALGORITHMS = ("gradient_allreduce", "bytegrad")
NUM_BUCKETS, BUCKET_BYTES, LAYER_MS = 10, 1 << 20, 1.0
ALLOWED_SHARE = 0.01
_COUNTED_STEPS = 8
_READINGS = 20
_CALLS, _SPANS = 2000, 50
# The reads of the clock in the Reducer: the end of a forward, the beginning of a step and of the wait, and its end.
_CLOCK_READINGS = 5


def measure(repetitions: int) -> dict[str, dict]:
    """Measures on a rank; returns seconds per step with and without recording, and of recording alone, by algorithm."""
    initialise()
    results = {name: _measure_one(name, repetitions) for name in ALGORITHMS}
    destroy()
    return results


def _measure_one(algorithm: str, repetitions: int) -> dict:
    import bagua

    model, train = _sleeping_model(algorithm)
    for _ in range(3):  # buckets are planned anew in the second
        train()
    reducer = model.bagua.reducer
    real, nothing = reducer.recorder, _Nothing()
    counts = _count(reducer, train)

    def record_with(recorder: Any) -> Callable[[], None]:
        return lambda: _give(reducer, recorder)

    samples = timing.interleaved(
        {
            "recorded": timing.Contender(train, record_with(real)),
            "not recorded": timing.Contender(train, record_with(nothing)),
        },
        repetitions=repetitions,
        barrier=bagua.barrier,
    )
    _give(reducer, real)
    if model.bagua.timeline().summary()["steps"] != 3 + _COUNTED_STEPS + repetitions + 1:
        raise RuntimeError(f"{algorithm}: the recorder has not seen every step")
    costs = _costs_of_calls(type(real)(), repetitions)
    recording = [sum(counts[call] * cost[call] for call in counts) for cost in costs]
    wall = {name: of["wall"] for name, of in samples.items()}
    return {"wall": wall, "recording": recording, "counts": counts, "reading": _seconds_of_readings(model)}


def _seconds_of_readings(model: Any) -> dict[str, list[float]]:
    """Returns the seconds of each way of reading."""
    import bagua

    calls = {"bagua.metrics.values(model)": lambda: bagua.metrics.values(model), "timeline()": model.bagua.timeline}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(_READINGS), calls.items()):
        bagua.barrier()
        begin = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - begin)
    return seconds


def _sleeping_model(algorithm: str) -> tuple[Any, Callable[[], None]]:
    """Returns a wrapped model of NUM_BUCKETS buckets, and a step of it."""
    import torch

    import bagua

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(LAYER_MS / 1e3)
            return grad

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return Sleep.apply(super().forward(x))

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Layer(512, BUCKET_BYTES // 4 // 512, bias=False) for _ in range(NUM_BUCKETS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=BUCKET_BYTES)
    if len(model.bagua.buckets) != NUM_BUCKETS:
        raise RuntimeError(f"the model has {len(model.bagua.buckets)} buckets, expected {NUM_BUCKETS}")
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(bagua.get_rank()))

    def train() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, train


def _give(reducer: Any, recorder: Any) -> None:
    """Makes the reducer, and the operations of its algorithm, use this recorder from now on."""
    reducer.recorder = reducer._bucket_group._record._recorder = recorder


class _Nothing:
    """A recorder that records nothing."""

    def check(self, group: Any) -> None:
        group.check()

    def hook(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add_compute(self, what: str, begin_ns: int, end_ns: int) -> None: ...

    def add_work(self, group: str, work: Any, label: str, is_bucket: bool = True, codec: str = "") -> None: ...

    def add_step(self, begin_ns: int, wait_ns: int, end_ns: int, num_buckets: int) -> None: ...


class _Counting:
    """A recorder that counts calls and forwards them."""

    def __init__(self, recorder: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._recorder = recorder

    def __getattr__(self, name: str) -> Callable[..., None]:
        self.calls[name] += 1
        return getattr(self._recorder, name)


def _count(reducer: Any, train: Callable[[], None]) -> dict[str, float]:
    """Returns the calls per step, by their names in `_costs_of_calls`."""
    import bagua

    group = bagua.get_default_group()
    real, counting = reducer.recorder, _Counting(reducer.recorder)
    _give(reducer, counting)
    num_spans = 0
    for _ in range(_COUNTED_STEPS):  # one step at a time, because the log is a ring
        group.events(clear=True)
        train()
        num_spans += len(group.events())
    calls = counting.calls
    _give(reducer, real)
    expected = {"hook": 1, "check": 1, "add_compute": 1, "add_work": NUM_BUCKETS, "add_step": 1}
    per_step = {name: count / _COUNTED_STEPS for name, count in calls.items()}
    if per_step != expected:
        raise RuntimeError(f"calls of the recorder per step are {per_step}, expected {expected}")
    return {**per_step, "clock": _CLOCK_READINGS, "span": num_spans / _COUNTED_STEPS}


def _costs_of_calls(recorder: Any, repetitions: int) -> list[dict[str, float]]:
    """Returns the seconds of one call by name, repeatedly; the recorder's rings are full, as in a long run."""
    from bagua.testing.spans import record_spans

    works = (_Ended(ticket) for ticket in itertools.count())

    def add_step() -> None:
        recorder.add_step(1, 2, 3, NUM_BUCKETS)

    def hook() -> None:
        with recorder.hook("before_forward"):
            pass

    for _ in range(20_000):
        recorder.add_work("world", next(works), "bucket 0")
        recorder.add_compute("forward", 1, 2)
        hook()
        add_step()

    def take_costs() -> dict[str, float]:
        # A step adds the bytes sent by its operations, which costs time per operation, counted in add_work.
        work_and_step = _seconds_per_call(lambda: (recorder.add_work("world", next(works), "bucket 0"), add_step()))
        step, work = _seconds_per_call(add_step), _seconds_per_call(lambda: next(works))
        return {
            "hook": _seconds_per_call(hook),
            "check": _seconds_per_call(lambda: recorder.check(_Well)),
            "add_compute": _seconds_per_call(lambda: recorder.add_compute("forward", 1, 2)),
            "add_work": max(0.0, work_and_step - step - work),
            "add_step": step,
            "clock": _seconds_per_call(lambda: time.monotonic_ns()),
            "span": _seconds_per_call(lambda: record_spans(_SPANS)) / _SPANS,
        }

    return [take_costs() for _ in range(repetitions)]


class _Well:
    """A group without a failure."""

    @staticmethod
    def check() -> None: ...


class _Ended:
    """An operation that has ended, with the attributes that the recorder reads."""

    def __init__(self, ticket: int) -> None:
        self.ticket, self.sent = ticket, (1, 0)


def _seconds_per_call(call: Callable[[], Any]) -> float:
    """Returns the processor time of a call, less that of an empty function."""
    seconds = []
    for function in (call, lambda: None):
        begin = time.thread_time()
        for _ in range(_CALLS):
            function()
        seconds.append((time.thread_time() - begin) / _CALLS)
    return max(0.0, seconds[0] - seconds[1])


def rows_of(algorithm: str, per_rank: list[dict]) -> list[report.Row]:
    """Returns rows of steps without and with recording, and of counted recording, for the slowest rank."""
    of_rank = [result[algorithm] for result in per_rank]
    bare = report.Row(
        f"{algorithm}, not recorded", timing.slowest([result["wall"]["not recorded"] for result in of_rank])
    )
    recorded = report.Row(
        f"{algorithm}, recorded", timing.slowest([result["wall"]["recorded"] for result in of_rank]), bare
    )
    counted = report.Row(
        f"{algorithm}, recording as counted", timing.slowest([result["recording"] for result in of_rank]), recorded
    )
    counted.cells = {
        "% of a step": report.three_digits(100 * counted.p50 / recorded.p50),
        "spans per step": report.three_digits(statistics.mean(result["counts"]["span"] for result in of_rank)),
    }
    return [bare, recorded, counted]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tcp", action="store_true", help="TCP over loopback instead of shared memory")
    args = parser.parse_args()
    setup = {"transport": "tcp over loopback" if args.tcp else "shared memory"}
    result = report.Report(__file__, "what recording the timeline costs per step", args, setup)
    per_rank = ranks.run(
        args.ranks,
        {"repetitions": 20 if args.quick else 200},
        env={"BAGUA_SHARED_MEMORY": "0"} if args.tcp else {},
    )
    rows = [row for name in ALGORITHMS for row in rows_of(name, per_rank)]
    notes = ["ratio: over the row before it; the last one of three is the share of a step that goes into recording."]
    title = f"Step of {NUM_BUCKETS} buckets of 1 MiB, {NUM_BUCKETS * LAYER_MS:.0f} ms of compute, {args.ranks} ranks"
    result.add(report.Table(title, rows, ratio="relative", notes=notes))
    readings = [
        report.Row(f"{name}, {call}", timing.slowest([result[name]["reading"][call] for result in per_rank]))
        for name in ALGORITHMS
        for call in per_rank[0][name]["reading"]
    ]
    result.add(report.Table("Reading the records", readings))
    shares = dict(zip(ALGORITHMS, rows[2::3], strict=True))
    is_allowed = {name: row.p50 < ALLOWED_SHARE * row.baseline.p50 for name, row in shares.items()}
    for name, row in shares.items():
        share, verdict = 100 * row.p50 / row.baseline.p50, "below" if is_allowed[name] else "NOT below"
        result.say(f"{name}: {share:.2f}% of a step, {verdict} the limit of {100 * ALLOWED_SHARE:.0f}%.")
    figure, axes = report.subplots(2)
    report.bars(axes[0], [row for row in rows if row not in shares.values()], "a step", "ms", 1e3)
    report.bars(axes[1], list(shares.values()), "of it recording", "us", 1e6)
    figure.tight_layout()
    result.write(figure)
    sys.exit(0 if all(is_allowed.values()) else 1)


if __name__ == "__main__":
    ranks.main(measure, main)
