"""The trace of one rank: valid JSON with every track, times that fit together, bytes that add up."""

import contextlib
import itertools
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import bagua
from bagua import cli
from bagua.errors import BaguaError, InternalError, InvalidArgument
from bagua.profiler import chrome_trace
from bagua.profiler.recorder import Span
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet
from tests.profiler.training import train


def slices(content, track):
    """(name, begin, end, args) in nanoseconds, as the recorder had them: the file rounds microseconds to doubles."""
    found = []
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == track:
            begin_ns = round(event["ts"] * 1e3)
            found.append((event["name"], begin_ns, begin_ns + round(event["dur"] * 1e3), event["args"]))
    return found


def check_nesting(content, track):
    """Slices of one thread are nested or apart: else viewers draw them wrongly."""
    open_until = []
    for begin_ns, negative_end_ns in sorted((begin_ns, -end_ns) for _, begin_ns, end_ns, _ in slices(content, track)):
        while open_until and open_until[-1] <= begin_ns:
            open_until.pop()
        assert not open_until or -negative_end_ns <= open_until[-1]
        open_until.append(-negative_end_ns)


def test_the_page_on_timelines_explains_every_track():
    page = (Path(__file__).resolve().parents[2] / "docs/timeline.md").read_text()
    assert [
        track for track in chrome_trace.TRACKS if not re.search(rf"^\|.*`{re.escape(track)}`.*\|", page, re.MULTILINE)
    ] == []


def _save(rank, world_size, folder, algorithm):
    with process_group():
        model = train(algorithm)
        sent = bagua.get_default_group().bytes_sent
        timeline = model.bagua.timeline()
        path = f"{folder}/here/rank{rank}.json"
        timeline.save(path)
        with open(path) as file:
            return json.load(file), timeline, sent


@fast_in("algorithm", ["bytegrad", "decentralized"], ["gradient_allreduce"])
def test_the_trace_of_a_rank(pool2, tmp_path, algorithm):
    content, timeline, sent = pool2.run(_save, args=(str(tmp_path), algorithm))[1]
    about = content["otherData"]
    assert about["format"] == chrome_trace.FORMAT
    assert (about["rank"], about["world_size"], about["algorithm"]) == (1, 2, algorithm)
    assert about["clock"] == dict.fromkeys(["offset_ns", "uncertainty_ns", "measured_ns", "measurement"])
    assert about["failure"] is None

    names = {event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == list(chrome_trace.TRACKS)
    filled = {event["cat"] for event in content["traceEvents"] if event["ph"] != "M"}
    expected = set(chrome_trace.TRACKS)
    if algorithm != "bytegrad":
        expected.remove(chrome_trace.ENCODE)
    if algorithm == "decentralized":
        expected.remove(chrome_trace.COORDINATION)
    assert expected - filled <= {chrome_trace.DECODE}, "small tensors at full precision are summed without a span"
    for track in chrome_trace.TRACKS:
        check_nesting(content, track)

    steps = slices(content, chrome_trace.STEPS)
    assert [name for name, *_ in steps] == [f"step {index}" for index in range(4)]
    for track in (chrome_trace.OPERATIONS, chrome_trace.WAITS):
        for name, begin, end, _ in slices(content, track):
            assert any(first <= begin and end <= last for _, first, last, _ in steps), f"{track}: {name}"
    ready = [event for event in content["traceEvents"] if event.get("cat") == chrome_trace.READY]
    assert (
        len(ready) == len(slices(content, chrome_trace.OPERATIONS)) == sum(step.num_buckets for step in timeline.steps)
    )
    assert {event["ph"] for event in ready} == {"i"}

    begun = {
        name: [begin, end] for name, begin, end, _ in slices(content, chrome_trace.COMPUTE) if name.startswith("backw")
    }
    for record in timeline.steps:
        assert begun[f"backward {record.index}"] == [record.begin_ns, record.wait_ns]

    # Until the first step there were the messages of with_bagua, which no step has sent.
    by_steps = sum(args["bytes_sent"] for *_, args in steps)
    assert by_steps == about["totals"]["bytes_sent"] == timeline.summary()["bytes_sent"]
    assert 0 < by_steps <= sent


def _accumulate(rank, world_size, folder):
    with process_group():
        model = train(steps=1)
        of_losses, of_nothing = [], []

        def pause(into):
            begin = time.monotonic_ns()
            time.sleep(0.005)
            into.append((begin, time.monotonic_ns()))

        for _ in range(2):
            for _ in range(3):
                with model.bagua.no_sync():
                    loss = model(torch.randn(8, 128)).square().mean()
                    pause(of_losses)
                    loss.backward()
            model(torch.randn(8, 128)).sum().backward()
            model(torch.randn(8, 128))  # without a backward
            pause(of_nothing)
        model.bagua.timeline().save(f"{folder}/rank{rank}.json")
        with open(f"{folder}/rank{rank}.json") as file:
            return json.load(file), of_losses, of_nothing


def test_backwards_inside_no_sync_belong_to_the_step(pool2, tmp_path):
    """And what follows a forward is its loss only if a backward ends it."""
    content, of_losses, of_nothing = pool2.run(_accumulate, args=(str(tmp_path),))[0]
    check_nesting(content, chrome_trace.COMPUTE)
    compute = slices(content, chrome_trace.COMPUTE)
    for name, begin, end, args in slices(content, chrome_trace.STEPS)[1:]:
        inside = [what for what, since, until, _ in compute if begin <= since and until <= end]
        alone = ["forward"] if args["index"] == 2 else []
        of_backwards = ["forward", "loss", "local backward"] * 3 + ["forward", "loss", f"backward {args['index']}"]
        assert inside == alone + of_backwards, name
    for begin, end in of_losses:
        (covering,) = [what for what, since, until, _ in compute if since <= begin and end <= until]
        assert covering == "loss"
    for begin, end in of_nothing:
        assert not [what for what, since, until, _ in compute if since < end and begin < until]


EXCHANGES = {
    "gradient_allreduce": {},
    "decentralized": {},
    "local_sgd": {"sync_every": 2},
    "low_precision_decentralized": {},
    "async": {"sync_interval": 0},
}


def _save_all(rank, world_size, folder):
    contents = {}
    for algorithm, options in EXCHANGES.items():
        with process_group():
            path = f"{folder}/{algorithm}{rank}.json"
            handle = train(algorithm, late_rank=1, late_s=0.01, **options).bagua
            handle.remove()  # waits for the round under way
            handle.timeline().save(path)
            with open(path) as file:
                contents[algorithm] = json.load(file)
    return contents


@pytest.fixture(scope="module")
def contents(pool2, tmp_path_factory):
    """The traces of rank 0, which waits for the other one, by algorithm."""
    return pool2.run(_save_all, args=(str(tmp_path_factory.mktemp("traces")),))[0]


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_the_waits_inside_a_step_add_up_to_what_it_exposed(contents, algorithm):
    steps, waits = (slices(contents[algorithm], track) for track in (chrome_trace.STEPS, chrome_trace.WAITS))
    for name, begin, end, args in steps:
        inside = [(wait, until - since) for wait, since, until, _ in waits if begin <= since and until <= end]
        assert sum(ns for _, ns in inside) == pytest.approx(args["exposed_us"] * 1e3, abs=1), name
        outside = sum(ns for wait, ns in inside if not wait.startswith("backward"))
        assert outside == pytest.approx(args["outside_us"] * 1e3, abs=1), name
    assert all(any(begin <= since and until <= end for _, begin, end, _ in steps) for _, since, until, _ in waits)


@pytest.mark.timed
def test_the_step_that_exchanges_is_the_one_that_waits(contents):
    """local_sgd exchanges after every second step; before its first step a rank waits for nobody."""
    steps = slices(contents["local_sgd"], chrome_trace.STEPS)
    operations = slices(contents["local_sgd"], chrome_trace.OPERATIONS)
    num_buckets = steps[0][3]["num_buckets"]
    by_step = [sum(begin <= since < end for _, since, _, _ in operations) for _, begin, end, _ in steps]
    assert by_step == [0, num_buckets, 0, num_buckets]
    exposed_us = [args["outside_us"] for *_, args in steps]
    assert min(exposed_us[1], exposed_us[3]) > max(exposed_us[0], exposed_us[2])


def test_rounds_in_the_background_have_tracks_of_their_own(contents):
    content = contents["async"]
    names = {event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    of_rounds = {name for name in names.values() if name.startswith("operations, ")}
    assert len(of_rounds) == 1 and of_rounds.pop().endswith("/async-0")
    operations = [event for event in content["traceEvents"] if event.get("cat") == chrome_trace.OPERATIONS]
    assert operations and all(names[event["tid"]].startswith("operations, ") for event in operations)


SINCE_NS = 1_000


def _span(kind, begin_ns, end_ns, ticket=1):
    return Span("bucket 0", kind, begin_ns, end_ns, 8, "world", ticket)


def test_no_wire_is_made_up_for_an_operation_whose_parts_were_dropped():
    about = {"rank": 0, "host": "here", "group": "world", "clock": {"offset_ns": 500}}
    spans = [_span("operation", SINCE_NS - 100, SINCE_NS + 50), _span("operation", SINCE_NS + 60, SINCE_NS + 90, 2)]
    content = chrome_trace.document(((), (), ()), spans, (), {"world": (0, SINCE_NS)}, None, about)
    assert slices(content, chrome_trace.WIRE) == [("bucket 0", SINCE_NS + 560, SINCE_NS + 590, {})]
    assert len(slices(content, chrome_trace.OPERATIONS)) == 2
    assert content["otherData"]["operations_since_us"] is None
    content = chrome_trace.document(((), (), ()), spans, (), {"world": (SINCE_NS, 0), "other": (0, 0)}, None, about)
    assert content["otherData"]["operations_since_us"] == (SINCE_NS + 500) / 1e3


def _without_parts(rank, world_size):
    with process_group():
        model = train("bytegrad")
        whole, operations = model.bagua.timeline(), model.bagua.timeline(parts=False)
        assert set(whole.kept_since_ns.values()) == {(0, 0)}
        return [{span.kind for span in one.spans} for one in (whole, operations)], [
            [span for span in one.spans if span.kind == "operation"] for one in (whole, operations)
        ]


def test_operations_without_their_parts(pool2):
    kinds, operations = pool2.run(_without_parts)[0]
    assert kinds == [{"queued", "operation", "encode", "wire", "decode"}, {"queued", "operation"}]
    assert operations[0] == operations[1] != []


def _bytes(rank, world_size):
    with process_group():
        model = train(steps=1)
        group = bagua.get_default_group()
        before = group.bytes_sent
        for _ in range(3):
            model(torch.randn(8, 128)).sum().backward()
        return sum(step.bytes_sent for step in model.bagua.timeline().steps[1:]), group.bytes_sent - before


def test_bytes_of_the_steps_are_those_that_the_group_has_sent(pool2):
    for counted, sent in pool2.run(_bytes):
        assert counted == sent > 0


def _coordination(rank, world_size):
    with process_group():
        assert train("decentralized").bagua.timeline().coordination == ()
        timeline = train("gradient_allreduce", find_unused_parameters=True).bagua.timeline()
        assert {span.label.split()[0] for span in timeline.spans} == {"bucket"}
        return {span.label for span in timeline.coordination}


def test_messages_beside_the_buckets_are_told_apart(pool2):
    assert pool2.run(_coordination)[0] == {"ready order", "buffers", "used parameters", "replicas"}


def _before_any_step(rank, world_size, folder):
    with process_group():
        train(steps=0).bagua.timeline().save(f"{folder}/rank{rank}.json")


def test_before_any_step(pool2, tmp_path):
    pool2.run(_before_any_step, args=(str(tmp_path),))
    assert slices(json.loads((tmp_path / "rank1.json").read_text()), chrome_trace.STEPS) == []


def _one_rank_cannot_write(rank, world_size, folder):
    with process_group():
        model = train(steps=1)
        place = f"{folder}/free" if rank == 0 else f"{folder}/taken/folder"
        with pytest.raises(InvalidArgument, match=r"taken/folder/rank1.json: .*; give another path"):
            model.bagua.save_timeline(place)
        bagua.barrier()


def test_a_rank_that_cannot_write_is_told_to_all(pool2, tmp_path):
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    pool2.run(_one_rank_cannot_write, args=(str(tmp_path),))


def _after_a_failure(rank, world_size, folder):
    with process_group():
        model = train(steps=3)
        with contextlib.suppress(BaguaError):
            bagua.barrier()
            if rank == 1:
                bagua.get_default_group().poison(InternalError("a test ends the group", rank=1))
        with pytest.raises(BaguaError, match=r"ends the group; model.bagua.timeline\(\).save\(path\) writes") as raised:
            model.bagua.save_timeline(folder)
        model.bagua.timeline().save(f"{folder}/alone{rank}.json")
        with open(f"{folder}/alone{rank}.json") as file:
            return raised.value.rank, len(slices(json.load(file), chrome_trace.STEPS))


def test_after_a_failure_each_rank_saves_alone(tmp_path):
    from bagua.testing import spawn

    assert spawn(_after_a_failure, 2, args=(str(tmp_path),)) == [(1, 3)] * 2


def _alone(rank, world_size, folder):
    with process_group():
        model = train(steps=2)
        path = model.bagua.save_timeline(folder)
        bagua.destroy_process_group()
        with pytest.raises(InvalidArgument, match=r"was destroyed; .*timeline\(\).save\(path\)"):
            model.bagua.save_timeline(folder)
        model.bagua.timeline().save(f"{folder}/after.json")
        return json.loads(path.read_text())["otherData"]["clock"]


def test_a_single_rank(tmp_path):
    from bagua.testing import spawn

    (clock,) = spawn(_alone, 1, args=(str(tmp_path),))
    assert (clock["offset_ns"], clock["uncertainty_ns"]) == (0, 0)


TIMEOUT_S = 0.5


def _left_waiting(rank, world_size, folder, algorithm, is_killed):
    with process_group():
        model = train(algorithm, steps=2)
        meet()
        bagua.get_default_group().set_timeout(TIMEOUT_S)
        # A death that is known before the weights are sent fails the backward in which their exchange begins.
        dies_between = is_killed and algorithm == "decentralized"
        if rank == 1:
            if dies_between or not is_killed:
                meet()  # when the other one sends, or has failed
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            return None
        optimizer = model.bagua.algorithm.training.optimizers[0]
        with pytest.raises(BaguaError) as raised:
            model(torch.randn(8, 128)).sum().backward()
            if dies_between:
                meet()
            optimizer.step()
        if not is_killed:
            meet()
        model.bagua.timeline().save(f"{folder}/rank0.json")
        return raised.value.rank, str(raised.value)


@pytest.mark.timed
@fast_in(
    "algorithm, is_killed",
    [("bytegrad", False), ("decentralized", True)],
    list(itertools.product(["bytegrad", "decentralized"], [True, False])),
)
def test_the_wait_that_failed_is_told(tmp_path, capsys, algorithm, is_killed):
    """Rank 1 dies, or does not come: the text names it, says how long rank 0 has waited, and that a file is missing."""
    from bagua.testing import spawn

    exits = {1: signal.SIGKILL} if is_killed else {}
    blamed, message = spawn(_left_waiting, 2, args=(str(tmp_path), algorithm, is_killed), expect_exit=exits)[0]
    content = json.loads((tmp_path / "rank0.json").read_text())
    failure = content["otherData"]["failure"]
    # Weights are waited for around the optimizer's step, which the timeline counts with the backward that follows.
    step = 3 if algorithm == "decentralized" else 2
    assert (failure["step"], failure["rank"]) == (step, blamed) == (step, 1)
    assert message in failure["error"]
    check_nesting(content, chrome_trace.WAITS)
    (waited_ns,) = [
        end - begin for name, begin, end, _ in slices(content, chrome_trace.WAITS) if name.endswith(" failed")
    ]
    assert waited_ns == failure["end_ns"] - failure["wait_ns"]
    assert 0 < waited_ns < 4e9 * TIMEOUT_S
    assert cli.main(["timeline", f"{tmp_path}/rank0.json"]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 ranks; missing: rank 1\n" in text
    where = f"step {step}, {failure['where']}"
    told = rf"failed +rank 0 in {where}, after it had waited [\d.]+ s, for which rank 1 is to blame:"
    assert re.search(told, text) and message in text
