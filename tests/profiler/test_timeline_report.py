"""`bagua timeline`: several ranks in one report, waits between ranks, and errors about invalid files."""

import itertools
import json
import re

import pytest
import torch

import bagua
from bagua import cli
from bagua.profiler import chrome_trace, report
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.profiler.training import train

LATE_S = 0.15  # far beyond what another rank of a busy machine loses by chance


STEPS = 3


def _save(rank, world_size, folder, late_rank, algorithm, steps=STEPS):
    with process_group():
        model = train(algorithm, steps=steps, late_rank=late_rank, late_s=LATE_S)
        model.bagua.save_timeline(folder)


@pytest.fixture(scope="module")
def files(pool2, tmp_path_factory):
    """The files of two ranks, the second of which is late."""
    folder = tmp_path_factory.mktemp("timeline")
    pool2.run(_save, args=(str(folder), 1, "gradient_allreduce", 5))
    return [folder / "rank0.json", folder / "rank1.json"]


def test_the_merged_trace_has_a_process_per_rank(files, tmp_path, capsys):
    out = tmp_path / "new folder" / "merged.json"
    assert cli.main(["timeline", *map(str, files), "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    merged = json.loads(out.read_text())
    processes = {e["pid"]: e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert sorted(processes) == [0, 1]
    assert all(name.startswith(f"rank {rank} on ") for rank, name in processes.items())
    parts = [json.loads(path.read_text()) for path in files]
    assert len(merged["traceEvents"]) == sum(len(part["traceEvents"]) for part in parts)
    assert merged["otherData"]["ranks"] == [part["otherData"] for part in parts]


def test_operations_are_the_same_ones_at_the_same_time(files):
    """On one clock every operation overlaps with itself on the other rank, and names the last rank."""
    merged = report.merge(report.load(files))
    by_operation = {}
    for event in merged["traceEvents"]:
        if event.get("cat") == chrome_trace.OPERATIONS and event["ph"] == "X":
            by_operation.setdefault((event["args"]["group"], event["args"]["ticket"]), []).append(event)
    assert len(by_operation) >= 5 * 3
    for first, second in by_operation.values():
        assert first["name"] == second["name"]
        assert max(first["ts"], second["ts"]) <= min(first["ts"] + first["dur"], second["ts"] + second["dur"])
        last = max((first, second), key=lambda event: event["ts"])
        if first["ts"] != second["ts"]:
            assert first["args"]["last_rank"] == second["args"]["last_rank"] == last["pid"]
            assert first["args"]["waited_for_it_us"] == pytest.approx(abs(first["ts"] - second["ts"]), abs=0.01)


@pytest.mark.timed
@fast_in(
    "algorithm, late_rank",
    [("decentralized", 0)],
    list(itertools.product(["gradient_allreduce", "bytegrad", "decentralized"], [0, 1])),
)
def test_the_late_rank_is_named(pool2, tmp_path, capsys, algorithm, late_rank):
    pool2.run(_save, args=(str(tmp_path), late_rank, algorithm))
    assert cli.main(["timeline", f"{tmp_path}/rank0.json", f"{tmp_path}/rank1.json"]) == 0
    text = capsys.readouterr().out
    assert f"algorithm        {algorithm}, 2 of 2 ranks" in text
    assert f"straggler        rank {late_rank}: the others wait for it" in text
    waited = re.search(rf"rank {late_rank} came last at \d+ of \d+ operations; the others waited ([\d.]+) ms", text)
    assert float(waited[1]) > STEPS * LATE_S * 1e3 / 2
    assert re.search(rf"step \d: [\d.]+ ms for rank {late_rank}", text)
    assert re.search(r"slowest bucket   bucket \d \(", text)


@pytest.mark.timed
def test_on_two_nodes_with_a_measured_clock(pool_of_two_nodes, tmp_path, capsys):
    pool_of_two_nodes.run(_save, args=(str(tmp_path), 2, "bytegrad"), env={"BAGUA_SOCKET_IFNAME": "lo"})
    assert cli.main(["timeline", *(f"{tmp_path}/rank{rank}.json" for rank in (3, 1, 0, 2))]) == 0
    text = capsys.readouterr().out
    assert "straggler        rank 2: the others wait for it" in text
    assert re.search(r"clocks +uncertain by rank 2 \d+ us, rank 3 \d+ us, and by 50 us more per second before ", text)
    assert re.findall(rf"^ +(\d)  \S+ +{STEPS} ", text, re.MULTILINE) == ["0", "1", "2", "3"]


@pytest.mark.timed
def test_the_table_has_the_figures_of_the_files(files, capsys):
    assert cli.main(["timeline", *map(str, files)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r" +\d  ", line)]
    for row, path in zip(rows, files, strict=True):
        totals = json.loads(path.read_text())["otherData"]["totals"]
        assert int(row[2]) == totals["steps"] == 5
        assert float(row[5]) == pytest.approx(totals["exposed_s"], abs=1e-3)
        assert float(row[6]) == pytest.approx(totals["bytes_sent"] / 1e6, abs=1e-2)
    assert float(rows[0][5]) > max(5 * LATE_S / 2, float(rows[1][5])), "rank 0 waits for rank 1"


def _save_local_sgd(rank, world_size, folder):
    with process_group():
        train("local_sgd", steps=9, sync_every=4, late_rank=1).bagua.save_timeline(folder)


@pytest.mark.timed
def test_means_of_an_algorithm_that_exchanges_now_and_then(pool2, tmp_path, capsys):
    pool2.run(_save_local_sgd, args=(str(tmp_path),))
    assert cli.main(["timeline", f"{tmp_path}/rank0.json", f"{tmp_path}/rank1.json"]) == 0
    header, row = capsys.readouterr().out.splitlines()[3:5]
    assert header.endswith("exposed ms/step  exposed total s  sent MB  sent MB/step  network MB/step")
    steps, exposed_ms, exposed_s, sent_mb, sent_mb_per_step = (float(row.split()[i]) for i in (2, 4, 5, 6, 7))
    assert exposed_ms == pytest.approx(1e3 * exposed_s / steps, abs=0.1) and exposed_ms > 50 / 9
    assert sent_mb_per_step == pytest.approx(sent_mb / steps, abs=1e-2) and sent_mb_per_step > 0.01


def _save_after_many_operations(rank, world_size, folder):
    with process_group():
        model = train(steps=2)
        for _ in range(4096):
            bagua.barrier()
        for _ in range(3):
            model(torch.randn(8, 128)).sum().backward()
        model.bagua.save_timeline(folder)


def test_operations_of_the_first_steps_were_dropped(pool2, tmp_path, capsys):
    pool2.run(_save_after_many_operations, args=(str(tmp_path),))
    assert cli.main(["timeline", f"{tmp_path}/rank0.json", f"{tmp_path}/rank1.json"]) == 0
    text = capsys.readouterr().out
    assert "note             operations cover steps 2 to 4: the engines keep the last ones\n" in text
    assert [line.split()[2] for line in text.splitlines() if re.match(r" +\d  ", line)] == ["5", "5"]


@pytest.mark.parametrize("since, told", [("before 0", None), ("in 0", "steps 1 to 4"), ("in 4", "less than a step")])
def test_which_steps_the_operations_cover(files, tmp_path, capsys, since, told):
    place, index = since.split()

    def drop(content):
        (begin,) = [e["ts"] for e in content["traceEvents"] if e["name"] == f"step {index}" and e["ph"] == "X"]
        content["otherData"]["operations_since_us"] = begin + (1 if place == "in" else -1)

    other = edited(files[1], tmp_path / "rank1.json", drop)
    assert cli.main(["timeline", str(files[0]), str(other)]) == 0
    found = re.findall(r"note +operations cover (.*): the engines keep the last ones\n", capsys.readouterr().out)
    assert found == ([] if told is None else [told.replace("step 4", "steps 4 to 4")])


@pytest.mark.timed
def test_neighbours_on_a_ring_of_four(pool4, tmp_path, capsys):
    """No rank is named for the ring."""
    pool4.run(_save, args=(str(tmp_path), 2, "low_precision_decentralized"))
    assert cli.main(["timeline", *(f"{tmp_path}/rank{rank}.json" for rank in range(4))]) == 0
    text = capsys.readouterr().out
    num_exchanges = STEPS * len(json.loads((tmp_path / "rank0.json").read_text())["otherData"]["totals"]["buckets"])
    unknown = f"not known for {num_exchanges} operations, whose ranks wait for their neighbours only"
    assert f"straggler        {unknown}\n" in text
    assert re.search(r"slowest bucket   bucket \d \(.* ms at the median with the wait for neighbours", text)
    merged = report.merge(report.load([tmp_path / f"rank{rank}.json" for rank in range(4)]))
    operations = [event for event in merged["traceEvents"] if event.get("cat") == chrome_trace.OPERATIONS]
    assert operations and not any("last_rank" in event["args"] for event in operations)


def _save_a_subset(rank, world_size, folder):
    with process_group():
        group = bagua.new_group([1, 3])
        if rank in group.ranks:
            train(steps=3, late_rank=3, late_s=LATE_S, group=group).bagua.save_timeline(folder)
        bagua.barrier()
        return group.name


@pytest.mark.timed
def test_a_group_of_two_ranks_of_four(pool4, tmp_path, capsys):
    name = pool4.run(_save_a_subset, args=(str(tmp_path),))[0]
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["rank0.json", "rank1.json"]
    assert {json.loads(path.read_text())["otherData"]["group"] for path in files} == {name}
    assert cli.main(["timeline", *map(str, files)]) == 0
    text = capsys.readouterr().out
    assert "algorithm        gradient_allreduce, 2 of 2 ranks" in text
    assert "straggler        rank 1: the others wait for it" in text and "in the background" not in text


def _save_async(rank, world_size, folder):
    with process_group():
        model = train("async", steps=5, sync_interval=0, late_rank=1)
        model.bagua.save_timeline(folder)
        model.bagua.remove()


def test_in_the_background(pool2, tmp_path, capsys):
    pool2.run(_save_async, args=(str(tmp_path),))
    assert cli.main(["timeline", f"{tmp_path}/rank0.json", f"{tmp_path}/rank1.json"]) == 0
    assert "(operations in the background: no step waits for them)" in capsys.readouterr().out


def test_one_file_of_two(files, capsys):
    assert cli.main(["timeline", str(files[1])]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 ranks" in text and "straggler        unknown: name the files of all ranks" in text


def edited(path, into, edit):
    content = json.loads(path.read_text())
    edit(content)
    into.write_text(json.dumps(content))
    return into


def with_about(**changes):
    return lambda content: content["otherData"].update(changes)


def _drifting(rank, ppm):
    """400 steps of half a second with 10 operations each, at which both ranks arrive together; the clocks are compared
    when they end, and rank 1's is too fast."""
    events = []
    for step in range(400):
        for bucket in range(10):
            true_us = 5e5 * step + 2e4 * bucket
            at_us = true_us + rank * 1e-6 * ppm * (true_us - 2e8)
            args = {"group": "world", "ticket": 10 * step + bucket, "bytes": 8}
            place = {"name": f"bucket {bucket}", "cat": chrome_trace.OPERATIONS, "pid": rank, "tid": 6}
            events.append({"ph": "X", **place, "ts": at_us, "dur": 1e4, "args": args})
    clock = {"offset_ns": 7 * rank, "uncertainty_ns": 30_000 * rank, "measured_ns": 2 * 10**11, "measurement": NEVER}
    totals = {"steps": 400, "exposed_s": 0.0, "bytes_sent": 0, "network_bytes_sent": 0}
    place = {"rank": rank, "world_size": 2, "group": "world", "host": f"h{rank}", "boot_id": f"{rank}"}
    about = {"format": chrome_trace.FORMAT, **place, "algorithm": "bytegrad", "clock": clock, "totals": totals}
    return {"traceEvents": events, "otherData": about}


@pytest.mark.parametrize(("ppm", "is_told"), [(30, False), (300, True)])
def test_clocks_that_drift_apart_make_no_straggler(tmp_path, capsys, ppm, is_told):
    files = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for rank, path in enumerate(files):
        path.write_text(json.dumps(_drifting(rank, ppm)))
    assert cli.main(["timeline", *map(str, files)]) == 0
    text = capsys.readouterr().out
    assert ("none stands out" not in text) == is_told
    assert ("rank 0 came last at 0 of 4000" in text) != is_told


NEVER = "0" * 16
GARBAGE = {
    "no JSON": (b"\xff\xfe\x00", "cannot be read as a timeline"),
    "no object": ("[1, 2]", "is not a rank's timeline: its otherData.format is None"),
    "merged": (
        '{"otherData": {"format": "bagua merged timeline 1"}}',
        "is a merged trace; name the files of the ranks",
    ),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage(tmp_path, capsys, case):
    text, complaint = GARBAGE[case]
    path = tmp_path / "garbage.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["timeline", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"bagua timeline: {path} ") and complaint in captured.err
    assert captured.out == ""


def test_a_missing_file(tmp_path, capsys):
    assert cli.main(["timeline", str(tmp_path / "rank0.json")]) == 1
    assert "No such file" in capsys.readouterr().err


BROKEN = {
    "a rank of text": (with_about(rank="1"), "otherData.rank is '1'"),
    "empty totals": (with_about(totals={}), "otherData.totals.steps is None"),
    "no events": (lambda content: content.update(traceEvents=None), "traceEvents is None"),
    "an event at no time": (lambda content: content["traceEvents"][-1].update(ts=float("nan")), "is not a trace event"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_was_changed(files, tmp_path, capsys, case):
    edit, complaint = BROKEN[case]
    path = edited(files[1], tmp_path / "rank1.json", edit)
    assert cli.main(["timeline", str(files[0]), str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and complaint in error


def test_files_that_do_not_belong_together(files, tmp_path, capsys):
    assert cli.main(["timeline", str(files[0]), str(files[0])]) == 1
    assert "are both of rank 0; name one file per rank" in capsys.readouterr().err

    other = edited(files[1], tmp_path / "other.json", with_about(group="pair"))
    assert cli.main(["timeline", str(files[0]), str(other)]) == 1
    assert "are of different groups: group is 'world' and 'pair'" in capsys.readouterr().err

    clock = {"offset_ns": 0, "uncertainty_ns": 0, "measurement": NEVER}
    other = edited(files[1], tmp_path / "other.json", with_about(clock=clock))
    assert cli.main(["timeline", str(files[0]), str(other)]) == 1
    assert f"{files[0]} and {other} are on different clocks" in capsys.readouterr().err


def test_saved_by_each_rank_alone(files, tmp_path, capsys):
    """Without a measurement: ranks of one host have one clock, others do not."""
    assert cli.main(["timeline", *map(str, files)]) == 0
    measured = capsys.readouterr().out
    clock = {"offset_ns": None, "uncertainty_ns": None, "measurement": None}
    mine, other = (
        edited(path, tmp_path / path.name, with_about(clock=clock, boot_id=NEVER)) for path in files
    )  # fmt: skip
    assert cli.main(["timeline", str(mine), str(other)]) == 0
    text = capsys.readouterr().out
    assert _straggler_in(text) == _straggler_in(measured)
    edited(files[1], other, with_about(clock=clock))
    assert cli.main(["timeline", str(mine), str(other)]) == 1
    assert "are on different clocks" in capsys.readouterr().err


def _straggler_in(text):
    return re.search(r"^straggler .*$", text, re.MULTILINE)[0]


def test_it_cannot_write(files, tmp_path, capsys):
    assert cli.main(["timeline", *map(str, files), "--out", str(tmp_path)]) == 1
    assert f"the timeline cannot be written to {tmp_path}" in capsys.readouterr().err


def test_a_rank_s_file_is_not_overwritten(files, capsys):
    before = files[0].read_bytes()
    assert cli.main(["timeline", *map(str, files), "--out", str(files[0])]) == 1
    assert f"--out is {files[0]}, which is a rank's file and would be lost" in capsys.readouterr().err
    assert files[0].read_bytes() == before
