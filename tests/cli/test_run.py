"""`bagua run`: torchrun's options go through, bagua's become settings, and one node finds a free port by itself."""

import os
import textwrap

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from bagua.cli.run import main, parse
from bagua.testing import spawn


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("BAGUA_", "PET_")):
            monkeypatch.delenv(name)


def test_torchruns_options_go_through():
    args, environ = parse(
        ["--nproc-per-node", "4", "--max-restarts=2", "train.py", "--lr", "0.1", "--tcp-streams", "9"]
    )
    assert (args.nproc_per_node, args.max_restarts) == ("4", 2)
    assert args.training_script == "train.py"
    assert args.training_script_args == ["--lr", "0.1", "--tcp-streams", "9"], "behind the script they are the script's"
    assert environ == {}
    args, _ = parse(["-m", "package.train", "-x"])
    assert args.module and args.training_script == "package.train" and args.training_script_args == ["-x"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--interface", "lo"], {"BAGUA_SOCKET_IFNAME": "lo"}),
        (["--tcp-streams", "4"], {"BAGUA_TCP_STREAMS": "4"}),
        (["--tcp-congestion", "system"], {"BAGUA_TCP_CONGESTION": "system"}),
        (["--shm-ring-bytes", "65536"], {"BAGUA_SHM_RING_BYTES": "65536"}),
        (["--spin-us", "0"], {"BAGUA_SPIN_US": "0"}),
        (["--no-shared-memory"], {"BAGUA_SHARED_MEMORY": "0"}),
        (["--spin-us", "5", "--no-shared-memory"], {"BAGUA_SPIN_US": "5", "BAGUA_SHARED_MEMORY": "0"}),
    ],
    ids=" ".join,
)
def test_baguas_options_become_settings(options, expected):
    assert parse([*options, "train.py"])[1] == expected


def test_the_token_comes_from_a_file(tmp_path, capsys):
    file = tmp_path / "token"
    file.write_text("secret of the job\n")
    assert parse(["--auth-token-file", str(file), "train.py"])[1] == {"BAGUA_AUTH_TOKEN": "secret of the job"}
    file.write_text("\n")
    for path, problem in ((file, "the file is empty"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(SystemExit) as caught:
            parse(["--auth-token-file", str(path), "train.py"])
        assert caught.value.code == 2 and f"--auth-token-file {path}: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tcp-streams", "0", "train.py"], "BAGUA_TCP_STREAMS=0 is out of range"),
        (["--tcp-streams", "many", "train.py"], "argument --tcp-streams: invalid int value: 'many'"),
        (["--tcp-congestion", "no name", "train.py"], "BAGUA_TCP_CONGESTION='no name' is no name"),
        (
            ["--tcp-congestion", "not-loaded", "train.py"],
            "BAGUA_TCP_CONGESTION='not-loaded' cannot be used on this host",
        ),
        (["--shm-ring-bytes", "5000", "train.py"], "BAGUA_SHM_RING_BYTES=5000 is not a power of two"),
        (["--no-such-option", "train.py"], "unrecognized arguments|the following arguments are required"),
        (["--nproc-per-node", "2"], "training_script"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_before_anything_starts(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert any(part in errors for part in message.split("|")), errors
    assert "usage: bagua run" in errors


def test_a_misspelt_setting_in_the_environment_is_found(monkeypatch, capsys):
    monkeypatch.setenv("BAGUA_TCP_STREAM", "4")
    with pytest.raises(SystemExit):
        parse(["train.py"])
    assert "BAGUA_TCP_STREAM is not a setting of bagua" in capsys.readouterr().err


def test_one_node_is_standalone_unless_told_otherwise(monkeypatch):
    assert parse(["train.py"])[0].standalone
    assert parse(["--nnodes", "1", "--nproc-per-node", "2", "train.py"])[0].standalone
    assert not parse(["--nnodes", "2", "train.py"])[0].standalone
    assert not parse(["--nnodes", "1:2", "train.py"])[0].standalone
    for options in (["--master-port", "29501"], ["--rdzv-endpoint", "host:1"], ["--master-addr", "10.0.0.1"]):
        assert not parse([*options, "train.py"])[0].standalone


def test_ranks_of_one_node_need_no_name_lookup():
    assert parse(["train.py"])[0].local_addr == "127.0.0.1"
    assert parse(["--standalone", "--local-addr", "host", "train.py"])[0].local_addr == "host"
    assert parse(["--nnodes", "2", "train.py"])[0].local_addr is None


SCRIPT = """
    import os, sys, torch, bagua
    bagua.init_process_group(timeout=30.0)
    x = torch.ones(4)
    bagua.all_reduce(x)
    kind = "shm" if len(bagua.get_default_group().local_ranks) == 2 else "tcp"
    spin = os.environ.get("BAGUA_SPIN_US")
    print(f"rank {bagua.get_rank()} sum {x[0].item():g} {kind} {sys.argv[1:]} {spin}", flush=True)
    bagua.barrier()  # the launcher ends the others when one has failed
    sys.exit(int(sys.argv[1]) if bagua.get_rank() == 0 else 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def launch(rank, world_size, *arguments):
    """In a rank, which has imported torch already; what torchrun says of a failure."""
    try:
        main(arguments)
    except ChildFailedError as error:
        return str(error)


def launched(tmp_path, script, *arguments, options=()):
    """The script on two ranks, what each of them printed, and what torchrun says."""
    logs = tmp_path / "logs"
    argv = ["--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(logs), *options, script, *arguments]
    (failure,) = spawn(launch, 1, args=argv)
    return sorted(log.read_text() for log in logs.rglob("stdout.log")), failure


def test_a_script_runs_on_two_ranks_and_fails_the_launcher(script, tmp_path):
    options = ("--no-shared-memory", "--spin-us", "0")
    printed, failure = launched(tmp_path, script, "3", "--more", options=options)
    assert printed == [f"rank {rank} sum 2 tcp ['3', '--more'] 0\n" for rank in range(2)]
    assert "exitcode  : 3" in failure


def test_a_script_that_ends_well(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('done')")
    assert launched(tmp_path, str(path)) == (["done\n"] * 2, None)
