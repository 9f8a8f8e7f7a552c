"""`bagua simulate`: its table, its timeline, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from bagua import cli, simulator
from bagua.replay.profiles import Layer, Profile


@pytest.fixture
def profile(tmp_path):
    """A file with a small profile, whose matrices every algorithm takes."""
    path = tmp_path / "small.json"
    layers = (Layer("first", ((256, 64), (64,)), 1.0, 2.0), Layer("second", ((64, 256),), 3.0, 4.0))
    Profile("Small", "made up", layers).save(path)
    return str(path)


def test_all_algorithms_in_one_table(profile, capsys):
    assert cli.main(["simulate", "--profile", profile, "--hosts", "3", "--link", "10mbit", "--slowdown", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Small: 32,832 parameters, 10 ms of compute per step\n3 hosts, 1 rank each, links of 10mbit"
    )
    rows = {cells[1]: cells[2:6] for cells in (re.split(r" *\| *", line) for line in printed.splitlines()[5:-1])}
    assert set(rows) == set(simulator.available()) - {"noloco"}
    assert "noloco is left out: topology 'matching' leaves one of 3 ranks out" in printed
    step_ms, ratio, waited_ms, link_mb = rows["gradient_allreduce"]
    assert ratio == "" and float(link_mb) == pytest.approx(32832 * 4 * 4 / 3 / 1e6, abs=0.01)
    assert float(step_ms) == pytest.approx(10 + float(waited_ms), rel=0.01)
    assert float(rows["bytegrad"][1]) > 1.5


def test_one_algorithm_with_options_and_its_timeline(profile, capsys, tmp_path):
    out = tmp_path / "trace.json"
    argv = ["simulate", "--profile", profile, "--algorithm", "qsgd:bits=4,bucket_bytes=32768", "--timeline", str(out)]
    assert cli.main([*argv, "--jitter", "0.1", "--slowdown", "2", "--scale", "2"]) == 0
    assert "65,664 parameters" in capsys.readouterr().out
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"bucket 0", "bucket 1", "bucket 2"}
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "1gbps"], "'1gbps' is not a rate"),
        (["--hosts", "1"], "hosts is 1, expected an integer of at least 2"),
        (["--algorithm", "bytegard"], "bytegard"),
        (["--algorithm", "async_averaging"], "'async_averaging', cannot be rehearsed"),
        (["--algorithm", "qsgd:bits=3"], "bits"),
        (["--scale", "0"], "scale is 0"),
        (["--jitter", "-1"], "sigma is -1"),
        (["--slowdown", "-1", "--algorithm", "bytegrad"], "slowdown is -1"),
        (["--timeline", "/nowhere/x.json", "--algorithm", "bytegrad"], "--timeline /nowhere/x.json cannot be written"),
    ],
)
def test_it_says_what_is_wrong(profile, capsys, arguments, message):
    assert cli.main(["simulate", "--profile", profile, *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("bagua simulate: ") and message in printed.err


def test_a_timeline_is_of_one_algorithm(profile, capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--profile", profile, "--timeline", "x.json"])
    assert "--timeline is of one algorithm, but --algorithm has" in capsys.readouterr().err
    assert cli.main(["simulate", "--profile", "nothing.json"]) == 1
    assert "nothing.json cannot be read as a profile" in capsys.readouterr().err


def test_plots_and_traces(profile, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = ["simulate", "--profile", profile, "--algorithm", "bytegrad"]
    assert cli.main([*argv, "--plot", str(tmp_path / "x.png"), "--chakra", str(tmp_path / "x")]) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"x.png", *(f"x.{rank}.et" for rank in range(4))}
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*argv, "--plot", "/nowhere/x.png"]) == 1
    assert "--plot /nowhere/x.png cannot be written" in capsys.readouterr().err
