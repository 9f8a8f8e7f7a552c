"""The arithmetic behind docs/performance.md, on cases made by hand."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bagua.replay.profiles import Layer, Profile
from bagua.testing import spawn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def outcome(system, step_ms, profile="vgg16", rate_mbit=1000, bound_ms=190.0, compute_ms=100.0, wire_bytes=0.0):
    from replay_cases import Case, Outcome

    case = Case(profile, 0.1, 4, 1, rate_mbit)
    return Outcome(case, system, [step_ms / 1e3], compute_ms / 1e3, bound_ms / 1e3, wire_bytes, 0.02, None)


# ---- the bound


def drained(ready, wire_bytes, bytes_per_s, burst_bytes):
    """A link in ticks of 10 us: each tick adds tokens, and what is ready leaves while there are any."""
    tick_s = 1e-5
    tokens, waiting, at, next_part = burst_bytes, 0.0, 0.0, 0
    while next_part < len(ready) or waiting > 1e-6:
        while next_part < len(ready) and ready[next_part][0] <= at:
            waiting += ready[next_part][1] * wire_bytes
            next_part += 1
        sent = min(tokens, waiting)
        waiting -= sent
        tokens = min(burst_bytes, tokens - sent + bytes_per_s * tick_s)
        at += tick_s
    return at


@pytest.mark.parametrize("burst_bytes", [2_000, 50_000])
def test_the_bound_is_when_a_token_bucket_has_sent_all(burst_bytes):
    from replay_cases import bound_s
    from replay_systems import Result

    draw = random.Random(burst_bytes)
    for _ in range(20):
        parts = [draw.random() for _ in range(draw.randint(1, 6))]
        ready = sorted((draw.uniform(0, 0.1), part / sum(parts)) for part in parts)
        wire_bytes, rate_mbit = draw.uniform(1e4, 2e6), draw.choice([40, 160])
        result = Result("ddp", [0.2], wire_bytes, ready=ready)
        expected = max(0.1, drained(ready, wire_bytes, rate_mbit * 1e6 / 8, burst_bytes))
        assert bound_s(result, 0.1, rate_mbit, burst_bytes) == pytest.approx(expected, abs=2e-4)


def test_the_bound_of_weights():
    from replay_cases import bound_s
    from replay_systems import Result

    def bound_ms(overlap, wire_bytes, period=1):
        result = Result("", [], wire_bytes, overlap=overlap, period=period)
        return 1e3 * bound_s(result, 0.1, 8, 10_000)  # 1,000 bytes per ms

    assert bound_ms("nothing", 60_000) == pytest.approx(150)  # 10,000 pass at once
    assert bound_ms("nothing", 5_000) == pytest.approx(100)
    # In four steps: 400 ms of compute, and 240,000 bytes of which 10,000 pass at once.
    assert bound_ms("nothing", 60_000, period=4) == pytest.approx((400 + 230) / 4)
    assert bound_ms("nothing", 5_000, period=4) == pytest.approx((400 + 10) / 4)
    assert bound_ms("step", 60_000) == pytest.approx(100)
    assert bound_ms("step", 250_000) == pytest.approx(250)


PERIODS = {
    "ddp": 1,
    "gradient_allreduce": 1,
    "local_sgd": 4,
    "local_sgd:sync_every=3": 3,
    "low_precision_decentralized:interval=2": 2,
    "async:sync_interval=0.01": 1,
}


def measured(rank, world_size, profile):
    from replay_systems import Task, measure

    return measure(**vars(Task(profile, 1.0, 1000, list(PERIODS), 1)))


def test_what_a_rank_measures_of_a_model_of_two_dtypes(tmp_path):
    """Parts are those of the bytes, and the period is that of the exchanges; the interface is named by its address."""
    layers = (Layer("half", ((30,),), 0.0, 5.0, "bfloat16"), Layer("double", ((5,),), 1.0, 5.0, "float64"))
    Profile("mixed", "made up", layers).save(tmp_path / "mixed.json")
    env = {"BAGUA_SOCKET_IFNAME": "127.0.0.1"}
    for results in spawn(measured, 2, timeout=60, env=env, args=(str(tmp_path / "mixed.json"),)):
        by_name = {result["system"]: result for result in results}
        assert {system: by_name[system]["period"] for system in PERIODS} == PERIODS
        assert [part for _, part in by_name["gradient_allreduce"]["ready"]] == [0.4, 0.6]
        assert not by_name["local_sgd"]["ready"]


def measured_while_disturbed(rank, world_size, profile):
    """Results of compute alone and of gradient_allreduce, and how often each was measured: rank 1 is disturbed."""
    import replay_systems
    import timing

    shares = [0.4, 0.0, 0.3, 0.2, 0.6] if rank == 1 else [0.0] * 5
    seen = []

    def measure(system, *others, **options):
        seen.append(system)
        return original(system, *others, **options)

    original, replay_systems._measure = replay_systems._measure, measure
    timing.Stolen.share = lambda self: shares.pop(0)
    replay_systems._MOST_SLEPT = 100.0  # whatever else this machine does now
    task = replay_systems.Task(profile, 1.0, None, ["gradient_allreduce"], 1)
    return replay_systems.measure(**vars(task)), seen


def test_all_ranks_measure_again_what_was_disturbed_on_one(tmp_path):
    Profile("one", "made up", (Layer("a", ((30,),), 1.0, 10.0),)).save(tmp_path / "one.json")
    for rank, (results, seen) in enumerate(
        spawn(measured_while_disturbed, 2, timeout=60, args=(str(tmp_path / "one.json"),))
    ):
        assert seen == ["compute alone"] * 2 + ["gradient_allreduce"] * 3
        assert [result["stolen"] for result in results] == ([0.0, 0.2] if rank == 1 else [0.0, 0.0])


VERIFIED = [  # a system, what is not as it should be after its steps, and what is said of it
    ("ddp", "", "verified"),
    ("ddp_bf16", "one rank's gradient", "the ranks' results differ"),
    ("gradient_allreduce", "gradients are sums", "gradients are 1 off the mean"),
    ("qsgd:bits=4", "", "verified"),
    ("qsgd:bits=4", "gradients are sums", "off the mean"),
    ("qadam", "", "verified"),
    ("qadam", "one rank's weight", "the ranks' results differ"),
    ("local_sgd", "", "verified"),
    ("local_sgd", "no exchange", "apart"),
    ("local_sgd", "the mean moves", "the weights' mean has moved by"),
    ("low_precision_decentralized", "", "verified"),
    ("async:sync_interval=0.001", "the mean moves", "the weights' mean has moved by"),
]


def verify_all(rank, world_size):
    """What this rank says of each system, and whether the weights are zero afterwards."""
    import torch
    from contenders import destroy, initialise

    from bagua.replay.profiles import SleepingModel

    initialise()
    torch.manual_seed(rank)
    layers = (Layer("first", ((60, 50),), 0.0, 2.0), Layer("second", ((40, 30),), 1.0, 2.0))
    model = SleepingModel(Profile("tiny", "made up", layers))
    found = []
    for system, spoil, _ in VERIFIED:
        found.append(verify(system, spoil, model, rank, world_size))
        model.zero_grad()
    destroy()
    return found


def verify(system, spoil, model, rank, world_size):
    import torch
    from replay_systems import _step_of, parse
    from replay_verify import Verification

    import bagua

    step = _step_of(system, model)
    handle = getattr(model, "bagua", None)
    name, options = parse(system)
    verification = Verification(name, options, model, handle.algorithm.exchanges if handle else "gradients")
    for _ in range(0 if spoil == "no exchange" else 8):
        step()
    parameter = next(model.parameters())
    with torch.no_grad():
        if spoil == "one rank's gradient" and rank == 0:
            parameter.grad.flatten()[-1] += 1e-3
        elif spoil == "one rank's weight" and rank == 1:
            parameter.flatten()[-1] += 1e-3
        elif spoil == "gradients are sums":
            for each in model.parameters():
                each.grad *= world_size
        elif spoil == "the mean moves":
            if not handle.algorithm.is_lockstep:
                handle.pause()  # a round that one rank began before this and the other after it would part them
            parameter += 1
    try:
        verification.end()
        said = "verified"
    except RuntimeError as error:
        said = str(error)
    is_zero = not any(each.count_nonzero() for each in model.parameters())
    bagua.barrier()
    if handle is not None:
        handle.remove()
    return said, is_zero


def test_what_is_timed_is_verified():
    """On every rank, whoever it was; weights are zero afterwards."""
    for found in spawn(verify_all, 2, timeout=60):
        for (system, spoil, said), (heard, is_zero) in zip(VERIFIED, found, strict=True):
            assert said in heard, (system, spoil)
            assert is_zero or heard != "verified"


# ---- systems and outcomes


def test_names_of_systems():
    from replay import SYSTEMS, systems_of
    from replay_cases import is_ddp
    from replay_systems import parse

    assert parse("qsgd:bits=4,error_feedback=True,codec=bf16") == (
        "qsgd",
        {"bits": 4, "error_feedback": True, "codec": "bf16"},
    )
    assert parse("ddp") == ("ddp", {})
    assert systems_of(1.0) == SYSTEMS
    shrunk = systems_of(0.1)[len(SYSTEMS) :]
    assert "ddp_fp16:bucket_cap_mb=2.5" in shrunk and "qsgd:bits=4,bucket_bytes=2621440" in shrunk
    assert is_ddp(outcome("ddp_fp16:bucket_cap_mb=2.5", 1)) and not is_ddp(outcome("bytegrad", 1))


def test_systems_that_can_be_played():
    from ablation import STUDIES
    from replay import systems_of
    from replay_systems import check

    parts = [system.format(study.algorithm) for study in STUDIES for system in study.parts.values()]
    options = [
        "ddp_bf16:find_unused_parameters=True,static_graph=True",
        "qadam:warmup_steps=1",
        "local_sgd:sync_every=8",
    ]
    for system in (*systems_of(0.1), *parts, *options):
        check(system)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts 0", "--hosts has 0; expected 1 or more"),
        ("--profiles vgg16 resnet50 vgg16", "--profiles has vgg16 more than once"),
        ("--rates 100 100", "--rates has 100 more than once"),
        ("--hosts 2 -3", "--hosts has -3; expected 1 or more"),
        ("--ranks-per-host 0", "--ranks-per-host has 0; expected 1 or more"),
        ("--rates 100 0", "--rates has 0; expected 1 or more"),
        ("--congestion not-loaded", "--congestion is not-loaded; this kernel has "),
        ("--turns 0", "--turns has 0; expected 1 or more"),
        ("--scale nan", "--scale is nan; expected a number of more than 0"),
        ("--scale inf", "--scale is inf; expected a number of more than 0"),
        ("--profiles vgg16 {}/none.json", "--profiles has {}/none.json; expected a file, or one of bert_large"),
        ("--profiles vgg16 {}", "--profiles: {} cannot be read as a profile"),
        ("--profiles {}/broken.json", "--profiles: {}/broken.json cannot be read as a profile"),
        ("--systems ddp nothing:bits=4", "--systems has nothing:bits=4; expected ddp"),
        ("--systems ddp:overlap=False", "ddp:overlap=False: unknown option 'overlap' for torch's DDP; its options"),
        ("--systems ddp_fp16:process_group=1", "unknown option 'process_group' for torch's DDP"),
        ("--systems ddp:bucket_cap_mb=0", "option bucket_cap_mb is 0, expected a number of more than 0"),
        ("--systems ddp:bucket_cap_mb=a", "option bucket_cap_mb is 'a', expected a number of more than 0"),
        ("--systems ddp:static_graph=1", "option static_graph is 1, expected True or False"),
        ("--systems bytegrad:nonsense=3", "bytegrad:nonsense=3: unknown option 'nonsense' for algorithm 'bytegrad'"),
        ("--systems bytegrad:group=3", "unknown option 'group' for algorithm 'bytegrad'"),
        ("--systems bytegrad:bucket_bytes=0", "option bucket_bytes is 0, expected an integer of at least 1"),
        ("--systems bytegrad:overlap=0", "option overlap is 0, expected True or False"),
        ("--systems qsgd:bits=5", "qsgd:bits=5: "),
        ("--systems qsgd:bits", "bits is '', expected 8, 4 or 2"),
        ("--systems qadam:warmup_steps=7", "qadam:warmup_steps=7: warmup_steps is 7"),
        ("--systems local_sgd:overlap=False", "option overlap is for algorithms that exchange gradients"),
        ("--systems async:broadcast_buffers=True", "broadcast_buffers=True is for algorithms whose ranks step"),
    ],
)
def test_options_that_are_refused_before_anything_runs(options, message, tmp_path, monkeypatch, capsys):
    import replay

    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setattr(sys, "argv", ["replay.py", *options.format(tmp_path).split()])
    with pytest.raises(SystemExit):
        replay._arguments()
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err


def test_options_as_they_come(monkeypatch):
    import replay

    monkeypatch.setattr(sys, "argv", ["replay.py", "--systems", "ddp:bucket_cap_mb=2.5", "qsgd:bits=4"])
    args = replay._arguments()
    assert (args.hosts, args.ranks_per_host, args.rates) == ([4], 1, [1000])
    assert args.systems == ["ddp:bucket_cap_mb=2.5", "qsgd:bits=4"]


def test_outcomes_are_those_of_the_slowest_rank():
    from dataclasses import asdict

    from replay_cases import Case, outcomes_of
    from replay_systems import ALONE, Result

    per_rank = [
        [asdict(Result(ALONE, [0.1, 0.1], 0)), asdict(Result("bytegrad", [0.2, 0.5], 100.0, 0.05, 0.01, [(0.05, 1)]))],
        [asdict(Result(ALONE, [0.1, 0.1], 0)), asdict(Result("bytegrad", [0.3, 0.4], 300.0, 0.07, 0.02, [(0.05, 1)]))],
    ]
    alone, bytegrad = outcomes_of(Case("vgg16", 0.1, 2, 1, 1), per_rank, 0)
    assert alone.compute_s == bytegrad.compute_s == 0.1
    assert bytegrad.step_s == [0.3, 0.5] and bytegrad.wire_bytes == 300 and bytegrad.waiting_s == 0.02
    assert bytegrad.processor_s == pytest.approx(0.06)
    assert bytegrad.bound_s == pytest.approx(0.1)  # 300 bytes take 2.4 ms at 1 Mbit/s, from 50 ms on


def test_bars(monkeypatch):
    from replay_bars import bars_of

    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    outcomes = [outcome("compute alone", 100), outcome("ddp", 500), outcome("ddp_fp16", 421)]
    outcomes += [outcome("ddp_fp16:bucket_cap_mb=2.5", 300), outcome("gradient_allreduce", 490, bound_ms=470)]
    outcomes += [outcome("bytegrad", 200, bound_ms=190)]
    outcomes += [replace(outcome("qsgd:bits=4", 150, bound_ms=120), processor_s=0.07)]
    full, bytegrad, qsgd = bars_of(outcomes)
    assert "gradient_allreduce: 1.020 times as fast as DDP" in full and full.endswith("met")
    assert (
        "bytegrad: 2.105 times as fast as the best DDP as it comes (bar 2.1, at its bound it would be 2.22)" in bytegrad
    )
    assert ": met; beside ddp_fp16:bucket_cap_mb=2.5 1.500 times (at its bound 1.58): MISSED, and beyond" in bytegrad
    assert (
        "1.25 of its bound (bar 1.15): MISSED (step 150 ms, bound 120 ms; each of 4 ranks ran 50 ms more than compute "
        "alone, which after forward takes 133 ms on 2 cores); beside"
    ) in qsgd  # VGG16's forward takes 33 ms
    assert "2.000 times (at its bound 2.50): MISSED, and beyond its bound on this machine" in qsgd
    (beyond,) = bars_of([outcome("ddp_fp16", 400), outcome("bytegrad", 200, bound_ms=195)])
    assert "at its bound it would be 2.05)" in beyond
    assert beyond.endswith(": MISSED, and beyond its bound on this machine")
    (slower,) = bars_of([outcome("ddp", 499), outcome("gradient_allreduce", 501, bound_ms=490)])
    assert "gradient_allreduce: 0.996 times as fast as DDP" in slower and slower.endswith("MISSED")
    assert bars_of([outcome("bytegrad", 200, rate_mbit=500)]) == []
    everybody_has_cubic = replace(outcomes[0].case, congestion="cubic")
    equal_terms = bars_of([replace(one, case=everybody_has_cubic) for one in outcomes])
    assert equal_terms == [line.replace("- ", "- with cubic for all: ", 1) for line in (full, bytegrad, qsgd)]


def test_the_bar_on_overhead_is_wherever_compute_can_hide_the_communication():
    from replay_bars import bars_of

    def hidden(system, step_ms, bound_ms=100.05):
        return outcome(system, step_ms, "made/up.json", 2500, bound_ms)

    outcomes = [
        hidden("compute alone", 100),
        hidden("ddp", 120),
        hidden("gradient_allreduce", 120, bound_ms=101),  # the wire takes longer
        hidden("bytegrad", 104.9),
        hidden("bytegrad:overlap=False", 120),
        hidden("qadam", 150),  # computes
        hidden("async", 105.1),
    ]
    (line,) = bars_of(outcomes)
    assert line == (
        "- up, scale 0.1, 4 hosts, 2500 Mbit/s, where compute can hide the communication, a step over compute alone "
        "(bar 1.05): bytegrad 1.049 met, async 1.051 MISSED (20.0 ms of processor per rank)"
    )

    def elsewhere(**changes):
        return bars_of([replace(one, case=replace(one.case, **changes)) for one in outcomes])

    assert elsewhere(num_hosts=2, ranks_per_host=2) == [line.replace("4 hosts", "2 hosts x 2 ranks")]


# ---- what it leaves behind


def fake_run(case, systems, samples, turns):
    from replay_cases import Outcome

    alone = Outcome(case, "compute alone", [0.1], 0.1, 0.1, 0.0, 0.01, None)
    return [alone, *(Outcome(case, system, [0.3, 0.2], 0.1, 0.15, 1e6, 0.02, None) for system in systems)]


def results_of(options, tmp_path, monkeypatch):
    """Plays nothing; the figure that replay.py writes."""
    import hosts
    import replay
    import report

    figures = []
    write = report.Report.write
    monkeypatch.setattr(report.Report, "write", lambda self, figure: [figures.append(figure), write(self, figure)])
    monkeypatch.setattr(hosts, "why_not", lambda: None)
    monkeypatch.setattr(replay, "run", fake_run)
    monkeypatch.setattr(sys, "argv", ["replay.py", "--out", str(tmp_path), *options.split()])
    replay.main()
    (figure,) = figures
    monkeypatch.undo()
    return figure


def labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_two_rates_are_drawn_as_the_document_draws_them(tmp_path, monkeypatch):
    from replay_plots import PLOTTED

    figure = results_of("--profiles vgg16 --hosts 2 4 --rates 1000 100", tmp_path, monkeypatch)
    assert len(figure.axes) == 6
    for steps, exposed, wire in (figure.axes[:3], figure.axes[3:]):
        assert all(axis.get_xscale() == axis.get_yscale() == "log" for axis in (steps, exposed))
        assert labels(steps) == [*PLOTTED, "compute alone"]
        assert [list(line.get_xdata()) for line in steps.lines[:2]] == [[100, 1000]] * 2
        assert [list(line.get_ydata()) for line in steps.lines[:2]] == [[250, 250], [150, 150]]  # it, its bound
        assert list(exposed.lines[0].get_ydata()) == [150, 150]
        assert len(wire.patches) == len(PLOTTED)
    assert figure.axes[3].get_title() == "vgg16, scale 1, 4 hosts: step, dotted: its bound"


def test_systems_that_were_chosen_are_drawn(tmp_path, monkeypatch):
    options = "--profiles vgg16 --rates 100 1000 --systems qadam ddp:bucket_cap_mb=2.5"
    assert labels(results_of(options, tmp_path, monkeypatch).axes[0])[:2] == ["qadam", "ddp:bucket_cap_mb=2.5"]


def test_one_rate_is_drawn_as_bars_beside_bounds(tmp_path, monkeypatch):
    figure = results_of("--profiles vgg16 resnet50 --systems ddp bytegrad", tmp_path, monkeypatch)
    assert [labels(axis) for axis in figure.axes] == [["bound"]] * 2


def test_results_are_named_by_the_profiles_and_replaced_aloud(tmp_path, monkeypatch, capsys):
    for profiles in ("vgg16", "resnet50 vgg16", "vgg16"):
        results_of(f"--profiles {profiles} --systems ddp", tmp_path, monkeypatch)
    ends = [line for line in capsys.readouterr().out.splitlines() if line.startswith("written")]
    assert [line.endswith(", in the place of an earlier result") for line in ends] == [False, False, True]
    names = sorted(path.name.split("-", 3)[3] for path in tmp_path.iterdir())
    assert names == [f"replay-{of}.{kind}" for of in ("resnet50-vgg16", "vgg16") for kind in ("md", "png")]


LAYERS = (Layer("first", ((300, 40),), 1.0, 2.0), Layer("second", ((50, 300),), 1.0, 2.0))


def launched(options, tmp_path):
    """The table, the header and the plots of two ranks that `bagua run` starts."""
    Profile("tiny", "made up", LAYERS).save(tmp_path / "tiny.json")
    command = [sys.executable, "-m", "bagua", "run", "--nproc-per-node", "2", BENCHMARKS / "replay.py"]
    command += ["--profiles", tmp_path / "tiny.json", "--systems", "ddp", "bytegrad", "async", "--quick"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out", *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*-replay-tiny.png"))) == 1
    return done.stdout


@pytest.mark.slow("test_one_rate_is_drawn_as_bars_beside_bounds")
def test_a_link_that_nobody_named_has_no_rate_and_no_bound(tmp_path):
    out = launched([], tmp_path)
    assert "- link: not named; give --rates to have the bound" in out
    assert "### tiny, scale 1, 1 hosts x 2 ranks\n" in out and "Mbit/s" not in out and "bound ms" not in out


@pytest.mark.slow("test_one_rate_is_drawn_as_bars_beside_bounds")
def test_a_link_that_is_named_has_a_bound(tmp_path):
    out = launched(["--rates", "500"], tmp_path)
    assert "- link: 500 Mbit/s" in out and "1 hosts x 2 ranks, 500 Mbit/s" in out and "of bound |" in out
