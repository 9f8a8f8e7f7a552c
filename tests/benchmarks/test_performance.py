"""What performance.py keeps, concludes and writes, from outcomes made by hand."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest


def outcome(system, step_ms):
    from replay_cases import Case, Outcome

    return Outcome(Case("vgg16", 0.1, 4, 1, 1000), system, [step_ms / 1e3], 0.1, 0.1, 0.0, 0.01, None)


def test_the_verdict_says_where_it_depends():
    from performance_report import verdict

    assert "`bytegrad` makes a step at least 5% faster in all of them" in verdict("bytegrad", [(0.2, 1.1), (3.0, 2.0)])
    assert "in none of them" in verdict("bytegrad", [(0.2, 1.0)])
    apart = verdict("bytegrad", [(0.2, 1.0), (0.4, 1.0), (1.5, 1.3), (3.0, 2.0)])
    assert "all cases from a ratio of 1.50 on" in apart and "none up to 0.40" in apart and "depends" not in apart
    mixed = verdict("bytegrad", [(0.2, 1.0), (0.5, 1.2), (0.7, 1.0), (3.0, 2.0)])
    assert "all cases above a ratio of 0.70" in mixed and "none below 0.50" in mixed and "between" in mixed
    open_end = verdict("bytegrad", [(0.2, 1.0), (0.5, 1.2), (3.0, 1.0)])
    assert "none below a ratio of 0.50; from there on it depends" in open_end and "all" not in open_end


def played(case, systems):
    """Outcomes in which every byte costs time, and compute hides nothing."""
    from replay_cases import Outcome

    bits = {"bytegrad": 8, "qsgd": 8, "qsgd:bits=4": 4, "qadam": 8, "ddp_fp16": 16, "ddp_bf16": 16}
    made = [Outcome(case, "compute alone", [0.1] * 3, 0.1, 0.1, 0, 0.01, None)]
    for system in systems:
        wire_bytes = 1e6 * bits.get(system, 32)
        if system == "async":
            wire_bytes = 1e3 * case.rate_mbit
        step_s = 0.1 + wire_bytes * 8 / (case.rate_mbit * 1e6)
        made.append(Outcome(case, system, [step_s, step_s, 1.1 * step_s], 0.1, 0.09, wire_bytes, 0.02, None))
    return made


def test_the_document(tmp_path, monkeypatch):
    import performance
    import replay
    from ablation import STUDIES
    from performance_report import write_document
    from replay_bars import ratio_bars
    from replay_cases import Case

    outcomes = {case: played(case, systems) for case, systems in performance.CASES.items()}
    studies = {}
    for study in STUDIES:
        alone, whole = played(study.case, [study.algorithm])
        without = [replace(whole, system=f"{study.algorithm}, {part}", step_s=[0.9]) for part in study.matter]
        studies[study] = [alone, whole, *without]
    case = Case("vgg16", 0.1, 4, 1, 100)
    outcomes[case] = [replace(one, stolen=0.001 * place) for place, one in enumerate(outcomes[case])]
    facts = {"date": "2026-01-02 03:04", "machine": "m"}
    document = tmp_path / "docs" / "performance.md"
    document.parent.mkdir()
    write_document(outcomes, studies, facts, document, tmp_path / "plots")
    text = document.read_text()
    links = re.findall(r"\]\((\S+\.png)\)", text)
    assert len(links) == 1 + len(performance.PROFILES)
    assert all((document.parent / link).stat().st_size > 1000 for link in links)
    row = next(line for line in text.splitlines() if line.startswith("| qsgd:bits=4 "))
    # 32 Mbit take 320 ms at 100 Mbit/s, the best DDP's 128 Mbit 1280 ms.
    assert [cell.strip() for cell in row.split("|")][2] == "420 (3.29)"
    assert (
        next(line for line in text.splitlines() if line.startswith("| async ")).split("|")[-2].strip()
        == "0.100 to 5.00"
    )
    stolen = next(line for line in text.splitlines() if line.startswith("| stolen, at most "))
    most = (len(outcomes[case]) - 1) / 10
    assert [cell.strip() for cell in stolen.split("|")][2:4] == [f"{most:.1f}%", "not known"]
    for case in outcomes:
        assert all(bar in text for bar in ratio_bars(outcomes[case]))
    assert "- with cubic for all: bert_large, bytegrad: " in text
    overheads = text[text.index("Where compute can hide all communication") : text.index("## vgg16")].splitlines()
    place = [cell.strip() for cell in overheads[4].split("|")].index("bytegrad")
    hidden = {line.split("|")[1].strip(): line.split("|")[place].strip() for line in overheads[6:] if line}
    assert hidden["resnet50, scale 0.1, 4 hosts, 5000 Mbit/s"] == "**1.128** (20.0)"
    processor = text[text.index("| processor, ms") :].splitlines()
    for system, ms in (("bytegrad", "20.0"), ("compute alone", "10.0")):
        row = next(line for line in processor if line.startswith(f"| {system} "))
        assert [cell.strip() for cell in row.split("|")][2:7] == [ms] * 5
    assert "without hierarchy: a step takes" in text and "it matters" in text
    assert "- `bytegrad` makes a step at least 5% faster in all of them." in text
    assert "- `decentralized` makes a step at least 5% faster in none of them." in text

    lines = re.findall(r"^sudo \S+ benchmarks/replay.py (.*)$", text, re.MULTILINE)
    again = []
    for line in lines:
        monkeypatch.setattr(sys, "argv", ["replay.py", *line.split()])
        arguments = replay._arguments()
        again += [
            (
                Case(profile, arguments.scale, num_hosts, arguments.ranks_per_host, rate, arguments.congestion),
                tuple(arguments.systems),
            )
            for profile in arguments.profiles
            for num_hosts in arguments.hosts
            for rate in arguments.rates
        ]
    assert set(again) == set(performance.CASES.items())


def test_what_is_kept_is_of_one_commit(tmp_path, monkeypatch):
    import performance

    facts = {"date": "2026-01-02 03:04", "machine": "m", "versions": "v", "commit": "c", "TCP": "t"}
    facts["load average"] = "0.1 at the start"
    monkeypatch.setattr(performance, "_facts", lambda: dict(facts))
    path = tmp_path / "kept.jsonl"
    measured = [outcome("compute alone", 100), outcome("bytegrad", 200)]
    assert performance._Kept(path).get("a case", lambda: measured) == measured
    again = performance._Kept(path)
    assert again.get("a case", lambda: pytest.fail("it was measured")) == measured
    facts |= {"date": "2026-01-02 04:00", "load average": "2.5 at the start"}
    assert again.get("a later case", lambda: measured) == measured
    whole = again.facts()
    assert whole["date"] == "2026-01-02 03:04 to 2026-01-02 04:00" and whole["commit"] == "c"
    assert whole["load average"] == "0.1 at the start; at most 2.5 when a case began, right after another"
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2
    with pytest.raises(SystemExit, match="figures of another commit, c; here it is e"):
        again.get("another case", lambda: facts.update(commit="e") or measured)
    assert len(path.read_text().splitlines()) == 2
    facts["commit"] = "d"
    with pytest.raises(SystemExit, match="figures of another commit, c; here it is d"):
        performance._Kept(path)


@pytest.mark.parametrize(
    ("disturbances", "kept"), [([0.2], 0.2), ([3.0, 0.9], 0.9), ([1.2, 4.0, 1.5], 1.2), ([2.0, 4.0, 1.5], 1.5)]
)
def test_what_was_disturbed_is_measured_again(disturbances, kept):
    import timing

    left = list(disturbances)
    assert timing.least_disturbed(lambda: left.pop(0), lambda measured: measured) == kept and not left


def test_what_the_hypervisor_takes(monkeypatch):
    """3 of 10 seconds on each of 4 processors are 0.3; /proc/stat counts ticks over all of them."""
    import timing

    stat = "cpu  10 20 30 40 50 60 70 {} 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    texts = [stat.format(5 * ticks_per_second), stat.format(17 * ticks_per_second)]
    monkeypatch.setattr(timing.Path, "read_text", lambda _: texts.pop(0))
    times = [100.0, 110.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: times.pop(0))
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 4)
    assert timing.Stolen().share() == pytest.approx(0.3)


@pytest.mark.parametrize("option", ["--keep", "--document"])
def test_a_file_that_cannot_be_written_is_refused(option, tmp_path, monkeypatch, capsys):
    import performance

    (tmp_path / "file").touch()
    for path, message in ((tmp_path / "file" / "x", "is no folder to write to"), (tmp_path, "expected a file")):
        monkeypatch.setattr(sys, "argv", ["performance.py", option, str(path)])
        with pytest.raises(SystemExit) as ended:
            performance.main()
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert f"{option} is " in printed and message in printed


def test_a_quick_run_writes_one_case_to_the_folder_of_results(tmp_path, monkeypatch):
    import hosts
    import performance

    monkeypatch.setattr(hosts, "why_not", lambda: None)
    monkeypatch.setattr(hosts, "available_congestions", lambda: ["cubic"])
    monkeypatch.setattr(performance, "run", lambda case, systems, samples: played(case, systems))
    before = performance.DOCUMENT.read_text()
    monkeypatch.setattr(sys, "argv", ["performance.py", "--quick", "--out", str(tmp_path)])
    performance.main()
    assert sorted(path.name.split("-", 3)[3] for path in tmp_path.iterdir()) == [
        "performance-quick.md",
        "performance-quick.png",
    ]
    assert performance.DOCUMENT.read_text() == before


@pytest.mark.parametrize("option", ["--keep", "--document"])
def test_a_quick_run_has_no_use_for_files_of_a_whole_one(option, tmp_path, monkeypatch, capsys):
    import performance

    monkeypatch.setattr(sys, "argv", ["performance.py", "--quick", option, str(tmp_path / "x")])
    with pytest.raises(SystemExit):
        performance.main()
    assert f"{option} is {tmp_path / 'x'}, but --quick plays one case" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profile", "row", "systems"),
    [
        (
            "vgg16",
            "training step of VGG16",
            ("bytegrad", "qsgd:bits=4", "ddp", "ddp_fp16", "ddp_bf16:bucket_cap_mb=2.5"),
        ),
        (
            "bert_large",
            "the same of BERT-large",
            ("gradient_allreduce", "bytegrad", "qsgd:bits=4", "ddp", "ddp_fp16", "ddp_fp16:bucket_cap_mb=2.5"),
        ),
    ],
)
def test_the_page_of_benchmarks_has_the_times_of_the_document(profile, row, systems):
    import report

    section = (report.ROOT / "docs" / "performance.md").read_text().split(f"\n## {profile}: ")[1]
    cells = [[cell.strip() for cell in line.split("|")] for line in section.splitlines() if line.startswith("|")]
    column = cells[0].index("1000 Mbit/s")
    times = {line[1]: line[column].split()[0] for line in reversed(cells) if line[column]}  # the first table wins
    page = (report.ROOT / "docs/benchmarks.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    stated = re.findall(r"(\d+) ms", line.split("|", 2)[2].split("the bounds")[0])
    assert stated == [times[system] for system in systems]
