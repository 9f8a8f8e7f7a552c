"""`bagua bench replay`: arithmetic on cases made by hand, measurements and verification on ranks, options, output."""

import csv
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import bagua
from bagua.cli import bench
from bagua.replay import command, disturbance, hosts, report, systems
from bagua.replay.cases import Case, Outcome, best_ddp, bound_s, is_ddp, outcomes_of
from bagua.replay.profiles import Layer, Profile, SleepingModel, record
from bagua.replay.systems import ALONE, Result, Task, check, check_scaled, destroy, initialise, measure, parse
from bagua.replay.verification import Verification
from bagua.testing import spawn

ROOT = Path(__file__).parents[2]


def outcome(system, step_ms):
    return Outcome(Case("vgg16", 0.1, 4, 1, 1000), system, [step_ms / 1e3], 0.1, 0.19, 0.0, 0.02, None)


# ---- the bound


def drained(ready, wire_bytes, bytes_per_s, burst_bytes):
    """Simulates a link in ticks of 10 us: each tick adds tokens, with which ready bytes are sent."""
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

    draw = random.Random(burst_bytes)
    for _ in range(20):
        parts = [draw.random() for _ in range(draw.randint(1, 6))]
        ready = sorted((draw.uniform(0, 0.1), part / sum(parts)) for part in parts)
        wire_bytes, rate_mbit = draw.uniform(1e4, 2e6), draw.choice([40, 160])
        result = Result("ddp", [0.2], wire_bytes, ready=ready)
        expected = max(0.1, drained(ready, wire_bytes, rate_mbit * 1e6 / 8, burst_bytes))
        assert bound_s(result, 0.1, rate_mbit, burst_bytes) == pytest.approx(expected, abs=2e-4)


def test_the_bound_of_weights():

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
        assert by_name["async:sync_interval=0.01"]["overlap"] == "step"


def measured_while_disturbed(rank, world_size, profile):
    """Results of compute alone and of gradient_allreduce, and how often each was measured: rank 1 is disturbed."""

    shares = [0.4, 0.0, 0.3, 0.2, 0.6] if rank == 1 else [0.0] * 5
    seen = []

    def measure_one(system, *others, **options):
        seen.append(system)
        return original(system, *others, **options)

    original, systems._measure = systems._measure, measure_one
    disturbance.Stolen.share = lambda self: shares.pop(0)
    systems._MOST_SLEPT = 100.0  # ignores other load of this machine
    task = systems.Task(profile, 1.0, None, ["gradient_allreduce"], 1)
    return systems.measure(**vars(task)), seen


def test_all_ranks_measure_again_what_was_disturbed_on_one(tmp_path):
    Profile("one", "made up", (Layer("a", ((30,),), 1.0, 10.0),)).save(tmp_path / "one.json")
    for rank, (results, seen) in enumerate(
        spawn(measured_while_disturbed, 2, timeout=60, args=(str(tmp_path / "one.json"),))
    ):
        assert seen == ["compute alone"] * 2 + ["gradient_allreduce"] * 3
        assert [result["stolen"] for result in results] == ([0.0, 0.2] if rank == 1 else [0.0, 0.0])


VERIFIED = [  # a system, the defect after its steps, and the message about it
    ("ddp", "", "verified"),
    ("ddp_bf16", "one rank's gradient", "the ranks' results differ"),
    ("gradient_allreduce", "gradients are sums", "gradients are 1 off the mean"),
    ("qsgd:bits=4", "gradients are sums", "off the mean"),
    ("powersgd", "", "verified"),
    ("qadam", "", "verified"),
    ("qadam", "one rank's weight", "the ranks' results differ"),
    ("local_sgd", "", "verified"),
    ("local_sgd", "no exchange", "apart"),
    ("local_sgd", "the mean moves", "the weights' mean has moved by"),
    ("async_averaging:sync_interval=0.001", "the mean moves", "the weights' mean has moved by"),
]


def verify_all(rank, world_size):
    """Returns this rank's message for each system, and True if the weights are zero afterwards."""

    initialise()
    torch.manual_seed(rank)
    layers = (Layer("first", ((60, 50),), 0.0, 2.0), Layer("second", ((40, 30),), 1.0, 2.0))
    model = SleepingModel(Profile("tiny", "made up", layers))
    found = []
    for system, fault, _ in VERIFIED:
        found.append(verify(system, fault, model, rank, world_size))
        model.zero_grad()
    destroy()
    return found


def verify(system, fault, model, rank, world_size):

    step = systems._step_of(system, model)
    handle = getattr(model, "bagua", None)
    name, options = parse(system)
    verification = Verification(name, options, model, handle.algorithm.exchanges if handle else "gradients")
    num_steps = 40 if name == "powersgd" else 8  # by then what it has left out is several times a gradient
    for _ in range(0 if fault == "no exchange" else num_steps):
        step()
    parameter = next(model.parameters())
    with torch.no_grad():
        if fault == "one rank's gradient" and rank == 0:
            parameter.grad.flatten()[-1] += 1e-3
        elif fault == "one rank's weight" and rank == 1:
            parameter.flatten()[-1] += 1e-3
        elif fault == "gradients are sums":
            for each in model.parameters():
                each.grad *= world_size
        elif fault == "the mean moves":
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
    """All ranks report a defect of any rank; weights are zero afterwards."""
    for found in spawn(verify_all, 2, timeout=60):
        for (system, fault, said), (heard, is_zero) in zip(VERIFIED, found, strict=True):
            assert said in heard, (system, fault)
            assert is_zero or heard != "verified"


# ---- sent bytes

# Not those of other packages that happen to be installed.
OWN_ALGORITHMS = [name for name in bagua.algorithms.available() if (ROOT / f"bagua/algorithms/{name}.py").exists()]
NUM_STEPS = 6


def recorded_model():
    """Records a model of two matrices that powersgd sends as factors, one that it does not, and biases."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 80), torch.nn.Linear(80, 4))


def bytes_of_steps(model, step):
    """Returns the bytes that this rank sends in some steps of a wrapped model; for `async`, those of all buckets.

    The number of its rounds that end meanwhile depends on time.
    """
    group = bagua.get_default_group()
    step()
    bagua.barrier()
    before = group.bytes_sent
    for _ in range(NUM_STEPS):
        step()
    bagua.barrier()
    sent = group.bytes_sent - before
    if not model.bagua.algorithm.is_lockstep:
        sent = bagua.metrics.values(model)["bucket_bytes"]
    model.bagua.remove()
    return sent


def sent_in_training_and_replay(rank, world_size):
    """Returns the bytes sent for a trained model, and for its recorded profile, by algorithm."""
    bagua.init_process_group()
    inputs = torch.randn(8, 96)
    profile = record(recorded_model(), lambda model: model(inputs).square().mean(), repetitions=1)
    sent = {}
    for name in OWN_ALGORITHMS:
        model = recorded_model()
        optimizer = systems.optimizer_of(name, list(model.parameters()))
        # How often replicas are compared depends on time, and some methods would not exchange in these steps.
        often = {"sync_every": 2} if hasattr(bagua.algorithms.get(name), "sync_every") else {}
        system = ",".join([f"{name}:check_replicas=False", *(f"{key}={value}" for key, value in often.items())])
        bagua.with_bagua(model, optimizer, algorithm=name, check_replicas=False, **often)

        def step(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        trained = bytes_of_steps(model, step)
        played = SleepingModel(profile.scaled(1.0))
        sent[name] = trained, bytes_of_steps(played, systems._step_of(system, played))
    bagua.destroy_process_group()
    return sent


def test_at_scale_1_every_algorithm_sends_what_it_sends_in_training(pool2):
    for sent in pool2.run(sent_in_training_and_replay):
        for name, (trained, replayed) in sent.items():
            assert replayed == trained > 0, name
        assert sent["powersgd"][1] < sent["gradient_allreduce"][1] / 2


def test_what_a_scaled_model_plays():
    """A matrix without factors, and an algorithm that does not look at sides, are played at any scale."""
    profile = Profile("one", "made up", (Layer("a", ((300, 40), (40,)), 1.0, 2.0), Layer("b", ((4, 8),), 1.0, 2.0)))
    assert profile.scaled(1.0) == profile
    half = profile.scaled(0.5)
    assert half.layers[0].parameters == ((6000, 1), (20,)) and half.num_parameters == profile.num_parameters / 2
    for system in (*command.SYSTEMS, "powersgd:rank=40"):
        check_scaled(system, profile, 0.5)
    check_scaled("powersgd", profile, 1.0)
    with pytest.raises(bagua.InvalidArgument, match=r"\(300, 40\) in layer 'a' become \(6000, 1\)"):
        check_scaled("powersgd", profile, 0.5)


# ---- systems and outcomes


def test_names_of_systems():

    assert parse("qsgd:bits=4,error_feedback=True,codec=bf16") == (
        "qsgd",
        {"bits": 4, "error_feedback": True, "codec": "bf16"},
    )
    assert parse("ddp") == ("ddp", {})
    assert command.systems_of(1.0) == command.SYSTEMS
    shrunk = command.systems_of(0.1)[len(command.SYSTEMS) :]
    assert "ddp_fp16:bucket_cap_mb=2.5" in shrunk and "qsgd:bits=4,bucket_bytes=2621440" in shrunk
    assert is_ddp(outcome("ddp_fp16:bucket_cap_mb=2.5", 1)) and not is_ddp(outcome("bytegrad", 1))


def test_systems_that_can_be_played():
    options = [
        "ddp_bf16:find_unused_parameters=True,static_graph=True",
        "qadam:warmup_steps=1",
        "local_sgd:sync_every=8",
        "bytegrad:overlap=False",
        "bytegrad:bucket_bytes=1",
        "gradient_allreduce:hierarchical=True",
        "async",
    ]
    for system in (*command.systems_of(0.1), *options):
        check(system)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts 0", "--hosts has 0; expected 1 or more"),
        ("--profiles vgg16 resnet50 vgg16", "--profiles has vgg16 more than once"),
        ("--congestion not-loaded", "--congestion is not-loaded; this kernel has "),
        ("--scale nan", "--scale is nan; expected a number of more than 0"),
        ("--profiles vgg16 {}/none.json", "--profiles has {}/none.json; expected a file, or one of bert_large"),
        ("--profiles {}/broken.json", "{}/broken.json cannot be read as a profile"),
        ("--hosts 4 300", "--hosts has 300; expected 254 or fewer, as 10.99.0.0/24 has addresses"),
        ("--csv {}/other.csv", "--csv is {}/other.csv, whose first line is 'a,b', expected 'date,profile,scale,"),
        ("--plot {}/x.xyz", "--plot is {}/x.xyz; expected a name that ends in ."),
        ("--plot {}/none/x.png", "--plot is {}/none/x.png, but there is no folder {}/none"),
        ("--systems ddp nothing:bits=4", "--systems has nothing:bits=4; expected ddp"),
        ("--systems ddp:overlap=False", "ddp:overlap=False: unknown option 'overlap' for torch's DDP; its options"),
        ("--systems ddp:bucket_cap_mb=0", "option bucket_cap_mb is 0, expected a number of more than 0"),
        ("--systems bytegrad:nonsense=3", "bytegrad:nonsense=3: unknown option 'nonsense' for algorithm 'bytegrad'"),
        ("--scale 0.5 --systems powersgd", "at scale 0.5 it would not play what powersgd does: parameters of (64, 3"),
        ("--systems qsgd:bits=5", "qsgd:bits=5: "),
        ("--systems local_sgd:overlap=False", "option overlap is for algorithms that exchange gradients"),
        (
            "--systems async_averaging:broadcast_buffers=True",
            "broadcast_buffers=True is for algorithms whose ranks step",
        ),
    ],
)
def test_options_that_are_refused_before_anything_runs(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(command, "run", lambda args: pytest.fail("it ran"))
    given = options.format(tmp_path).split()
    with pytest.raises(SystemExit):
        bench.main(["replay", *([] if "--profiles" in given else ["--profiles", "vgg16"]), *given])
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err


def test_its_help_shows_how_it_is_called(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["replay", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "sudo $(which bagua) bench replay --profiles vgg16" in printed and "columns of the table" in printed
    assert "or some of bert_large, gpt_124m, resnet50, vgg16" in printed


def test_three_digits():
    values = [0.01234, 1.234, 123.4, 1234.0, 0, float("inf")]
    assert [report.three_digits(value) for value in values] == ["0.0123", "1.23", "123", "1234", "0", "inf"]


def test_options_as_they_come(monkeypatch):
    taken = []
    monkeypatch.setattr(command, "run", taken.append)
    argv = ["replay", "--profiles", "vgg16", "--systems", "ddp:bucket_cap_mb=2.5", "qsgd:bits=4", "powersgd", "async"]
    assert bench.main(argv) == 0
    (args,) = taken
    assert (args.hosts, args.ranks_per_host, args.rates) == ([4], 1, [1000])
    assert args.systems == args.plotted == ["ddp:bucket_cap_mb=2.5", "qsgd:bits=4", "powersgd", "async"]


def test_without_hosts_it_says_what_would_work(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "why_not", lambda: "network namespaces need root")
    assert bench.main(["replay", "--profiles", "vgg16"]) == 1
    said = capsys.readouterr().err
    assert "network namespaces need root. A launcher's hosts" in said and "-m bagua bench replay" in said


def test_outcomes_are_those_of_the_slowest_rank():

    per_rank = [
        [asdict(Result(ALONE, [0.1, 0.1], 0)), asdict(Result("bytegrad", [0.2, 0.5], 100.0, 0.05, 0.01, [(0.05, 1)]))],
        [asdict(Result(ALONE, [0.1, 0.1], 0)), asdict(Result("bytegrad", [0.3, 0.4], 300.0, 0.07, 0.02, [(0.05, 1)]))],
    ]
    alone, bytegrad = outcomes_of(Case("vgg16", 0.1, 2, 1, 1), per_rank, 0)
    assert alone.compute_s == bytegrad.compute_s == 0.1
    assert bytegrad.step_s == [0.3, 0.5] and bytegrad.wire_bytes == 300 and bytegrad.waiting_s == 0.02
    assert bytegrad.processor_s == pytest.approx(0.06)
    assert bytegrad.bound_s == pytest.approx(0.1)  # 300 bytes take 2.4 ms at 1 Mbit/s, from 50 ms on


def test_the_best_of_torchs():
    outcomes = [outcome(ALONE, 100), outcome("ddp", 500), outcome("ddp_fp16:bucket_cap_mb=2.5", 300)]
    assert best_ddp([*outcomes, outcome("bytegrad", 200)]) is outcomes[2]
    assert best_ddp([outcome("bytegrad", 200)]) is None


@pytest.mark.parametrize(
    ("disturbances", "kept"), [([0.2], 0.2), ([3.0, 0.9], 0.9), ([1.2, 4.0, 1.5], 1.2), ([2.0, 4.0, 1.5], 1.5)]
)
def test_what_was_disturbed_is_measured_again(disturbances, kept):
    left = list(disturbances)
    assert disturbance.least_disturbed(lambda: left.pop(0), lambda measured: measured) == kept and not left


def test_what_the_hypervisor_takes(monkeypatch):
    """3 of 10 seconds on each of 4 processors are 0.3; /proc/stat counts ticks over all of them."""
    stat = "cpu  10 20 30 40 50 60 70 {} 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    texts = [stat.format(5 * ticks_per_second), stat.format(17 * ticks_per_second)]
    monkeypatch.setattr(disturbance.Path, "read_text", lambda _: texts.pop(0))
    times = [100.0, 110.0]
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: times.pop(0))
    monkeypatch.setattr(disturbance.os, "cpu_count", lambda: 4)
    assert disturbance.Stolen().share() == pytest.approx(0.3)


# ---- output and files


def fake_play(case, systems, samples, turns):
    alone = Outcome(case, ALONE, [0.1], 0.1, 0.1, 0.0, 0.01, None)
    return [alone, *(Outcome(case, system, [0.3, 0.2], 0.1, 0.15, 1e6, 0.02, None) for system in systems)]


@pytest.fixture
def played(monkeypatch):
    """Plays nothing; the figures that were drawn."""
    figures = []
    draw = command.plot
    monkeypatch.setattr(command, "plot", lambda *what: figures.append(draw(*what)) or figures[-1])
    monkeypatch.setattr(hosts, "why_not", lambda: None)
    monkeypatch.setattr(command, "play", fake_play)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)

    def of(options, *files):
        figures.clear()
        assert bench.main(["replay", *options.split(), *map(str, files)]) == 0
        return figures

    return of


def test_the_table_compares_with_the_best_ddp(played, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the models are in the package
    played("--profiles vgg16 --systems ddp bytegrad")
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    _, _, alone, ddp, bytegrad = (dict(zip(cells[0], line, strict=True)) for line in cells)
    assert alone["system"] == ALONE and alone["ratio"] == alone["wire MB"] == ""
    assert ddp["step ms"] == bytegrad["step ms"] == "250" and (ddp["min"], ddp["max"]) == ("200", "300")
    assert (ddp["ratio"], bytegrad["ratio"]) == ("", "1.00")
    assert (bytegrad["exposed ms"], bytegrad["of bound"]) == ("150", "1.67")
    # 138.4 million float32, 1.5 of each through the link, at 1 Gbit/s take 6.64 s, compute 0.1 s.
    assert "### vgg16, scale 1, 4 hosts, 1000 Mbit/s" in lines and "wire over compute: 66.4" in lines


def test_rows_are_added_to_a_csv(played, tmp_path):
    for rate in (100, 1000):
        played(f"--profiles vgg16 --rates {rate} --systems ddp bytegrad --csv", tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == report.CSV_COLUMNS
    assert [(row["rate_mbit"], row["system"]) for row in rows] == [
        (rate, system) for rate in ("100", "1000") for system in (ALONE, "ddp", "bytegrad")
    ]
    row = rows[-1]
    assert (row["profile"], row["scale"], row["hosts"], row["ranks_per_host"]) == ("vgg16", "1", "4", "1")
    assert (row["step_ms"], row["min_ms"], row["max_ms"], row["compute_ms"]) == ("250", "200", "300", "100")
    assert (row["exposed_ms"], row["of_bound"], row["wire_mb"], row["processor_ms"]) == ("150", "1.67", "1.00", "20.0")


def labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_one_rate_is_drawn_as_bars_beside_bounds(played, tmp_path):
    figure = played("--profiles vgg16 resnet50 --systems ddp bytegrad --plot", tmp_path / "x.png")[-1]
    assert [labels(axis) for axis in figure.axes] == [["bound"]] * 2


# ---- the whole command

LAYERS = (Layer("first", ((300, 40),), 1.0, 2.0), Layer("second", ((50, 300),), 1.0, 2.0))


def run_command(arguments, folder):
    """Runs the command in an empty folder, as with an installed wheel; returns its output."""
    Profile("tiny", "made up", LAYERS).save(folder / "tiny.json")
    packages = folder / "packages"
    packages.mkdir()
    (packages / "bagua").symlink_to(Path(bagua.__file__).parent)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bagua",
            *arguments,
            "--profiles",
            "tiny.json",
            "--systems",
            "ddp",
            "bytegrad",
            "--quick",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow("test_the_table_compares_with_the_best_ddp")
def test_on_hosts_that_it_makes_wherever_it_is_started(tmp_path):
    if (reason := hosts.why_not()) is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    out = run_command(["bench", "replay", "--hosts", "2", "--rates", "200", "--csv", "x.csv"], tmp_path)
    assert "### tiny, scale 1, 2 hosts, 200 Mbit/s\n" in out and "of bound |" in out
    with (tmp_path / "x.csv").open(newline="") as file:
        alone, ddp, bytegrad = csv.DictReader(file)
    assert [row["system"] for row in (alone, ddp, bytegrad)] == [ALONE, "ddp", "bytegrad"]
    # 27,000 float32 once around two hosts; 8 bits are a quarter of it.
    assert 0.108 <= float(ddp["wire_mb"]) < 0.13 and 0.027 <= float(bytegrad["wire_mb"]) < 0.04


LAUNCHED = ["run", "--nproc-per-node", "2", "-m", "bagua", "bench", "replay"]


@pytest.mark.slow("test_the_table_compares_with_the_best_ddp")
def test_under_a_launcher_a_link_that_nobody_named_has_no_bound(tmp_path):
    out = run_command(LAUNCHED, tmp_path)
    assert "- link: not named; --rates gives the bound" in out
    assert "### tiny, scale 1, 1 hosts x 2 ranks\n" in out and "Mbit/s" not in out and "bound ms" not in out


@pytest.mark.slow("test_the_table_compares_with_the_best_ddp")
def test_under_a_launcher_a_link_that_is_named_has_a_bound(tmp_path):
    out = run_command([*LAUNCHED, "--rates", "500"], tmp_path)
    assert "- link: 500 Mbit/s" in out and "1 hosts x 2 ranks, 500 Mbit/s" in out and "of bound |" in out
