"""`bagua bench links` between imitated hosts, and `bagua bench codecs`: what they print, and what is kept."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

import bagua
from bagua import cli


def _measure(rank, world_size):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return cli.main(["bench", "links"]), printed.getvalue()


def test_links_are_measured_and_kept_for_simulations(pool_of_two_nodes, tmp_path, monkeypatch, capsys):
    env = {"BAGUA_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(tmp_path)}
    (status, printed), *others = pool_of_two_nodes.run(_measure, env=env)
    assert (status, others) == (0, [(0, "")] * 3)
    assert re.search(r"\(rank 0\) and \S+ \(2\) *\|( *[\d.]+ \|){4}", printed)
    assert "all 2 at once, each to the next:" in printed
    assert re.search(r"by streams per peer, Gbit/s: 1: \S+, 2: \S+, 4: \S+, 8: \S+; 2 are in use", printed)
    kept = json.loads((tmp_path / "bagua" / "links.json").read_text())
    pair = next(value for key, value in kept.items() if key != "all")
    assert pair["rate_least"] <= pair["rate_p50"] and pair["latency_p50_s"] <= pair["latency_p99_s"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", pair["date"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = ["--profile", "resnet50", "--scale", "0.01", "--algorithm", "qsgd"]
    assert cli.main(["simulate", *model, "--link", "measured"]) == 0
    assert f"links of {kept['all']['up'] / 1e6:.0f}mbit, measured {kept['all']['date']}" in capsys.readouterr().out


def test_without_ranks_or_measurements(tmp_path, monkeypatch, capsys):
    assert cli.main(["bench", "links"]) == 1
    assert "there is one rank; add --nproc-per-node 2" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["simulate", "--profile", "resnet50", "--link", "measured"]) == 1
    assert "has no measured link; run `bagua bench links`" in capsys.readouterr().err


def test_codecs_have_bits_and_rates(capsys):
    assert cli.main(["bench", "codecs", "--codecs", "bf16", "qsgd:bits=4"]) == 0
    rows = [re.split(r" *\| *", line)[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["bf16", "qsgd:bits=4"]
    for row in rows:
        elements = (1 << 20) // 4
        bits = 8 * bagua.codecs.get(row[0]).wire_bytes(elements, bagua.codecs.get(row[0]).dtypes[0]) / elements
        assert float(row[1]) == pytest.approx(bits, rel=0.01)
        rates = [float(cell) for cell in row[2:8]]
        assert all(0.01 < rate < 1000 for rate in rates)
        # A value leaves twice, and is encoded and decoded twice.
        assert float(row[8].split()[0]) == pytest.approx(8 / (1 / rates[2] + 1 / rates[3]), rel=0.02)
    assert cli.main(["bench", "codecs", "--codecs", "bf17"]) == 1
    assert "bf17" in capsys.readouterr().err
