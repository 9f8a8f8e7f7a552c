"""The trace of one rank: valid JSON with every lane, times that fit together, bytes that add up."""

import json

import pytest
import torch

import bagua
from bagua import trace
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import process_group
from tests.timeline.training import train


def slices(content, lane):
    """(name, begin, end, args) in nanoseconds, as the recorder had them: the file rounds microseconds to doubles."""
    found = []
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == lane:
            begin_ns = round(event["ts"] * 1e3)
            found.append((event["name"], begin_ns, begin_ns + round(event["dur"] * 1e3), event["args"]))
    return found


def check_nesting(content, lane):
    """Slices of one thread are nested or apart: else viewers draw them wrongly."""
    open_until = []
    for begin_ns, negative_end_ns in sorted((begin_ns, -end_ns) for _, begin_ns, end_ns, _ in slices(content, lane)):
        while open_until and open_until[-1] <= begin_ns:
            open_until.pop()
        assert not open_until or -negative_end_ns <= open_until[-1]
        open_until.append(-negative_end_ns)


def _save(rank, world_size, folder, algorithm):
    with process_group():
        model = train(algorithm)
        sent = bagua.get_default_group().bytes_sent
        timeline = model.bagua.timeline()
        path = f"{folder}/here/rank{rank}.json"
        timeline.save(path)
        with open(path) as file:
            return json.load(file), timeline, sent


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_the_trace_of_a_rank(pool2, tmp_path, algorithm):
    content, timeline, sent = pool2.run(_save, args=(str(tmp_path), algorithm))[1]
    about = content["otherData"]
    assert about["format"] == trace.FORMAT
    assert (about["rank"], about["world_size"], about["algorithm"]) == (1, 2, algorithm)
    assert about["clock"] == {"offset_ns": None, "uncertainty_ns": None, "measurement": None}

    names = {event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == list(trace.LANES)
    filled = {event["cat"] for event in content["traceEvents"] if event["ph"] != "M"}
    expected = set(trace.LANES) if algorithm == "bytegrad" else set(trace.LANES) - {trace.ENCODE}
    assert expected - filled <= {trace.DECODE}, "small tensors at full precision are summed without a span"
    for lane in trace.LANES:
        check_nesting(content, lane)

    steps = slices(content, trace.STEPS)
    assert [name for name, *_ in steps] == [f"step {index}" for index in range(4)]
    for lane in (trace.OPERATIONS, trace.WAITS):
        for name, begin, end, _ in slices(content, lane):
            assert any(first <= begin and end <= last for _, first, last, _ in steps), f"{lane}: {name}"
    ready = [event for event in content["traceEvents"] if event.get("cat") == trace.READY]
    assert len(ready) == len(slices(content, trace.OPERATIONS)) == sum(step.num_buckets for step in timeline.steps)
    assert {event["ph"] for event in ready} == {"i"}

    begun = {name: [begin, end] for name, begin, end, _ in slices(content, trace.COMPUTE) if name.startswith("backw")}
    for record in timeline.steps:
        assert begun[f"backward {record.index}"] == [record.begin_ns, record.wait_ns]

    # Until the first step there were the messages of with_bagua, which no step has sent.
    by_steps = sum(args["bytes_sent"] for *_, args in steps)
    assert by_steps == about["totals"]["bytes_sent"] == timeline.summary()["bytes_sent"]
    assert 0 < by_steps <= sent


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
        timeline = train("decentralized").bagua.timeline()
        of_weights = {span.label for span in timeline.coordination}
        timeline = train("gradient_allreduce", find_unused_parameters=True).bagua.timeline()
        assert {span.label.split()[0] for span in timeline.spans} == {"bucket"}
        return of_weights, {span.label for span in timeline.coordination}


def test_messages_beside_the_buckets_are_told_apart(pool2):
    of_weights, of_gradients = pool2.run(_coordination)[0]
    assert of_weights == {"finite gradients"}
    assert of_gradients == {"ready order", "buffers", "used parameters"}


def _one_rank_cannot_write(rank, world_size, folder):
    with process_group():
        model = train(steps=1)
        place = f"{folder}/free" if rank == 0 else f"{folder}/taken/folder"
        with pytest.raises(InvalidArgument, match=r"taken/folder/rank1.json: .*; name another place"):
            model.bagua.save_timeline(place)
        bagua.barrier()


def test_a_rank_that_cannot_write_is_told_to_all(pool2, tmp_path):
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    pool2.run(_one_rank_cannot_write, args=(str(tmp_path),))


def _alone(rank, world_size, folder):
    with process_group():
        model = train(steps=2)
        path = model.bagua.save_timeline(folder)
        bagua.destroy_process_group()
        with pytest.raises(BaguaError):
            model.bagua.save_timeline(folder)
        return json.loads(path.read_text())["otherData"]["clock"]


def test_a_single_rank(tmp_path):
    from bagua.testing import spawn

    (clock,) = spawn(_alone, 1, args=(str(tmp_path),))
    assert (clock["offset_ns"], clock["uncertainty_ns"]) == (0, 0)
