"""The table of docs/performance.md matches the measurements of record."""

import csv

import pytest

from bagua.replay.report import CSV_COLUMNS
from benchmarks.lib import report
from benchmarks.replay import performance, summary


def test_the_document_has_the_table_of_the_record():
    document = (report.ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(summary.table(summary.read(summary.RECORD))) in document


def test_gains_are_over_the_best_that_needs_no_relaxation(tmp_path):
    """There are two cases; rows of two hosts, of another congestion control, or measured again later, do not count."""
    rows = []

    def add(system, step_ms, rate_mbit, hosts=4, congestion="", wire_mb=0.0):
        row = dict.fromkeys(CSV_COLUMNS, "") | {"profile": "m", "scale": "0.1", "ranks_per_host": 1, "compute_ms": 50}
        rows.append(row | {"system": system, "step_ms": step_ms, "rate_mbit": rate_mbit, "hosts": hosts})
        rows[-1] |= {"congestion": congestion, "wire_mb": wire_mb}

    for rate_mbit, full_ms in ((100, 90), (1000, 60)):
        add("ddp", 80, rate_mbit)
        add("ddp_fp16:bucket_cap_mb=2.5", 70, rate_mbit)
        add("gradient_allreduce", full_ms, rate_mbit, wire_mb=2.5)
        for system, step_ms in (("bytegrad", 30), ("qsgd:bits=4", 20), ("decentralized", 60), ("local_sgd", 120)):
            add(system, 1, rate_mbit)
            add(system, step_ms, rate_mbit)
            add(system, 1, rate_mbit, hosts=2)
            add(system, 1, rate_mbit, congestion="cubic")
    with (tmp_path / "record.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    fast, slow = summary.read(tmp_path / "record.csv")
    assert (fast.rate_mbit, slow.rate_mbit) == (1000, 100)
    assert (fast.wire_over_compute, slow.wire_over_compute) == pytest.approx((0.4, 4.0))
    assert fast.gains(fast.step_ms) == pytest.approx([60 / 30, 60 / 20, 60 / 60, 60 / 120])
    assert slow.gains(slow.step_ms) == pytest.approx([70 / 30, 70 / 20, 70 / 60, 70 / 120])
    simulated = dict.fromkeys(slow.step_ms, 35.0)
    assert slow.gains(simulated) == [2.0] * 4
    line = summary.table([slow], [simulated])[-1]
    assert line.count("(2.00)") == 4 and "2.33 (2.00)" in line and "0.58 (2.00)" in line


def test_the_commands_of_the_record_can_be_played(monkeypatch):
    """They produce the rows of the record."""
    from bagua.cli import bench
    from bagua.replay import command, hosts

    played = []
    monkeypatch.setattr(hosts, "available_congestions", lambda: ["cubic"])
    monkeypatch.setattr(command, "run", played.append)
    for options in performance.COMMANDS:
        assert bench.main(["replay", *options.split()]) == 0
    expected = {
        (profile, f"{args.scale:g}", str(num_hosts), str(args.ranks_per_host), str(rate), args.congestion, system)
        for args in played
        for profile in args.profiles
        for num_hosts in args.hosts
        for rate in args.rates
        for system in ("compute alone", *args.systems)
    }
    with summary.RECORD.open(newline="") as file:
        names = ("profile", "scale", "hosts", "ranks_per_host", "rate_mbit", "congestion", "system")
        rows = [tuple(row[name] for name in names) for row in csv.DictReader(file)]
    assert len(rows) == len(set(rows)) and set(rows) == expected
