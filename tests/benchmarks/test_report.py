"""Shared code of the benchmarks: ratios, the files of results, and the message of a skipped script."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.replay import hosts
from benchmarks.lib import report, timing

ROOT = Path(__file__).parents[2]


def script(name):
    return importlib.import_module(f"benchmarks.{name}")


def test_a_row_is_compared_with_its_baseline_by_medians():
    baseline = report.Row("gloo", [0.010, 0.030, 0.020])
    row = report.Row("bagua", [0.004, 0.005, 0.100], baseline, {"CPU ms": "7"})
    lines = report.Table("title", [baseline, row]).lines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        *("case", "min ms", "p50 ms", "max ms", "ratio", "CPU ms"),
    ]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:6]] == [
        ["gloo", "10.0", "20.0", "30.0", "-", ""],
        ["bagua", "4.00", "5.00", "100", "4.00", "7"],
    ]
    relative = report.Table("title", [row], ratio="relative").lines()
    assert relative[4].split("|")[5].strip() == "0.25"


def test_samples_of_ranks_are_those_of_the_slowest():
    assert timing.slowest([[1, 5, 2], [3, 4, 2]]) == [3, 5, 2]
    assert timing.total([[1, 5, 2], [3, 4, 2]]) == [4, 9, 4]


def test_contenders_take_turns_and_the_first_round_does_not_count():
    seen = []

    def contender(name):
        return timing.Contender(lambda: seen.append(name), prepare=lambda: seen.append(f"prepare {name}"))

    samples = timing.interleaved({"a": contender("a"), "b": contender("b")}, repetitions=2, inner=2)
    assert seen == ["prepare a", "a", "a", "prepare b", "b", "b"] * 3
    assert {name: len(of_one["wall"]) for name, of_one in samples.items()} == {"a": 2, "b": 2}


def refused(main, options, monkeypatch, capsys):
    """Returns the message of a script for options that it refuses."""
    monkeypatch.setattr(sys, "argv", ["script.py", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("place", ["/proc/nope", "{}/file", "{}/file/below"])
def test_results_that_cannot_be_written(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    out = place.format(tmp_path)
    said = refused(script("training.train_step").main, ["--out", out], monkeypatch, capsys)
    assert f"error: --out is {out}, which is no folder to write to (" in said and said.endswith("name another one")


def test_the_folder_of_results_is_made(tmp_path):
    folder = tmp_path / "new" / "results"
    assert report.parser("").parse_args(["--out", str(folder)]).out == folder
    assert folder.is_dir() and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("micro.congestion", ["--hosts", "300"], "--hosts is 300; expected 254 or fewer"),
        ("micro.congestion", ["--hosts", "1"], "--hosts is 1; expected 2 or more"),
        ("micro.tcp_hosts", ["--cases", "300:max"], "300:max has hosts 300; expected 254 or fewer"),
        ("micro.tcp_hosts", ["--cases", "4"], "'4' is no case; expected HOSTS:MBIT, such as 4:1000 or 2:max"),
    ],
)
def test_hosts_that_no_subnet_has(name, options, message, tmp_path, monkeypatch, capsys):
    assert message in refused(script(name).main, [*options, "--out", str(tmp_path)], monkeypatch, capsys)


@pytest.mark.parametrize(
    "name", ["replay.ablation", "replay.performance", "replay.choice", "training.choice", "micro.congestion"]
)
def test_a_script_that_is_skipped_says_so_by_its_status(name, monkeypatch, capsys):
    monkeypatch.setattr(hosts, "why_not", lambda: "not here")
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code == 77
    assert f"{name.split('.')[1]} SKIPPED: not here." in capsys.readouterr().out


def bench(*scripts, path=ROOT):
    return subprocess.run(
        ["bash", ROOT / "scripts" / "bench.sh", *scripts],
        env={**os.environ, "PY": sys.executable, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_make_bench_goes_on_after_what_was_skipped_and_stops_at_what_failed(tmp_path):
    names = [f"script{place}.py" for place in range(4)]
    for name, status in zip(names, (77, 0, 3, 0), strict=True):
        (tmp_path / name).write_text(f"raise SystemExit({status})")
    done = bench(*names[:2], path=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"bench: skipped, for the reasons above: {names[0]}"
    assert "skipped" not in bench(names[1], path=tmp_path).stdout
    done = bench(*names, path=tmp_path)
    assert done.returncode == 3 and names[3] not in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*/*.py")), ids=lambda path: path.stem)
def test_a_script_shows_its_command(path):
    text = path.read_text()
    if "__main__" in text and path.parent.name != "lib":
        assert f"python -m benchmarks.{path.parent.name}.{path.stem} [--" in text or path.stem == "convergence"
