"""What all benchmarks share: where results go, what is refused at once, and how a script says that it was skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def refused(main, options, monkeypatch, capsys):
    """What a script says of options that it refuses."""
    monkeypatch.setattr(sys, "argv", ["script.py", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("place", ["/proc/nope", "{}/file", "{}/file/below"])
@pytest.mark.parametrize("script", ["train_step", "convergence", "replay"])
def test_results_that_cannot_be_written(script, place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    out = place.format(tmp_path)
    said = refused(__import__(script).main, ["--out", out], monkeypatch, capsys)
    assert f"error: --out is {out}, but {out} is no folder to write to (" in said and said.endswith("name another one")


def test_the_folder_of_results_is_made(tmp_path):
    import report

    folder = tmp_path / "new" / "results"
    assert report.parser("").parse_args(["--out", str(folder)]).out == folder
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_rank_that_writes_nothing_makes_no_folder(tmp_path, monkeypatch):
    import report

    monkeypatch.setenv("RANK", "1")
    report.parser("").parse_args(["--out", str(tmp_path / "results")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("replay", ["--hosts", "4", "300"], "--hosts has 300; expected 254 or fewer, as 10.99.0.0/24 has addresses"),
        ("congestion", ["--hosts", "300"], "--hosts is 300; expected 254 or fewer"),
        ("congestion", ["--hosts", "1"], "--hosts is 1; expected 2 or more"),
        ("tcp_hosts", ["--cases", "300:max"], "300:max has hosts 300; expected 254 or fewer"),
        ("tcp_hosts", ["--cases", "4"], "'4' is no case; expected HOSTS:MBIT, such as 4:1000 or 2:max"),
    ],
)
def test_hosts_that_no_subnet_has(script, options, message, tmp_path, monkeypatch, capsys):
    assert message in refused(__import__(script).main, [*options, "--out", str(tmp_path)], monkeypatch, capsys)


@pytest.mark.parametrize("script", ["ablation", "congestion", "performance", "replay", "tcp_hosts"])
def test_a_script_that_is_skipped_says_so_by_its_status(script, tmp_path, monkeypatch, capsys):
    import hosts

    monkeypatch.setattr(hosts, "why_not", lambda: "not here")
    monkeypatch.setattr(sys, "argv", ["script.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        __import__(script).main()
    assert ended.value.code == 77
    assert f"{script} SKIPPED: not here." in capsys.readouterr().out


def bench(*scripts):
    path = Path(__file__).parents[2] / "scripts" / "bench.sh"
    return subprocess.run(
        ["bash", path, *scripts],
        env={**os.environ, "PY": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_make_bench_goes_on_after_what_was_skipped_and_stops_at_what_failed(tmp_path):
    scripts = []
    for status in (77, 0, 3, 0):
        scripts.append(tmp_path / f"{len(scripts)}-ends-with-{status}.py")
        scripts[-1].write_text(f"raise SystemExit({status})")
    done = bench(*scripts[:2])
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"bench: skipped, for the reasons above: {scripts[0]}"
    assert "skipped" not in bench(scripts[1]).stdout
    done = bench(*scripts)
    assert done.returncode == 3 and str(scripts[3]) not in done.stdout
