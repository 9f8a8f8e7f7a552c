"""`bagua run`: torchrun's options go through, bagua's become settings, and one node finds a free port by itself."""

import os
import re
import socket
import textwrap

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from bagua.cli import run
from bagua.cli.run import main, parse
from bagua.testing import free_port, spawn

HERE = __file__  # a script that is there
TOKEN = "5kZ0pW-qk2VQyXn3sE7cUw"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("BAGUA_", "PET_")):
            monkeypatch.delenv(name)


def test_torchruns_options_go_through():
    args, environ = parse(["--nproc-per-node", "4", "--max-restarts=2", HERE, "--lr", "0.1", "--tcp-streams", "9"])
    assert (args.nproc_per_node, args.max_restarts) == ("4", 2)
    assert args.training_script == HERE
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
    assert parse([*options, HERE])[1] == expected


def test_the_token_comes_from_a_file(tmp_path, capsys, monkeypatch):
    file = tmp_path / "token"
    for content, mode, problem in (
        ("\n", 0o600, "has 0 characters that are too easy to guess"),
        ("password", 0o600, "make one with `bagua token`"),
        (TOKEN, 0o640, "others can read or change it (-rw-r-----); run `chmod 600"),
        (None, 0, "No such file or directory; name a file that can be read"),
        (TOKEN + "\n", 0o600, None),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
            file.chmod(mode)
        if problem is None:
            break
        with pytest.raises(SystemExit) as caught:
            parse(["--auth-token-file", str(file), HERE])
        said = capsys.readouterr().err
        assert caught.value.code == 2 and f"--auth-token-file '{file}'" in said and problem in said
    assert parse(["--auth-token-file", str(file), HERE])[1] == {"BAGUA_AUTH_TOKEN_FILE": str(file)}
    monkeypatch.setenv("BAGUA_AUTH_TOKEN", TOKEN)
    with pytest.raises(SystemExit):
        parse(["--auth-token-file", str(file), HERE])
    assert "the environment has both BAGUA_AUTH_TOKEN and BAGUA_AUTH_TOKEN_FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tcp-streams", "0", HERE], "--tcp-streams 0 is out of range; give a value in 1..64"),
        (["--tcp-streams", "many", HERE], "--tcp-streams 'many' is not an integer; give a value in 1..64"),
        (["--tcp-congestion", "no name", HERE], "--tcp-congestion 'no name' is no name of 1 to 15 characters"),
        (["--tcp-congestion", "not-loaded", HERE], "--tcp-congestion 'not-loaded' cannot be used on this host"),
        (["--shm-ring-bytes", "5000", HERE], "--shm-ring-bytes 5000 is not a power of two"),
        (["--no-such-option", HERE], "--no-such-option is not an option of bagua or torchrun"),
        (["--tcp-streem=4", HERE], "--tcp-streem is not an option of bagua or torchrun; did you mean --tcp-streams?"),
        (["--max-restart", "two", HERE], "--max_restarts: invalid int value: 'two'; bagua run --help-torchrun says"),
        (["--nproc-per-node", "2"], "which script? Write its name behind the options: bagua run --nproc-per-node 2"),
        (["nowhere.py"], "there is no script nowhere.py; write the name of a file, or -m and that of a module"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_before_anything_starts(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert f"\nbagua run: {message}" in errors or message in errors
    assert errors.startswith("usage: bagua run [options] train.py") and errors.count("\n") == 2


def test_a_number_of_processes_that_is_none(capsys, monkeypatch):
    """What torchrun looks at only when it starts."""
    monkeypatch.setattr(torchrun, "run", lambda args: pytest.fail("started"))
    with pytest.raises(SystemExit):
        main(["--nproc-per-node", "two", HERE])
    assert "bagua run: Unsupported nproc_per_node value: two; bagua run --help-torchrun says" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_number_of_processes_that_is_too_small(number, capsys, monkeypatch):
    monkeypatch.setattr(torchrun, "run", lambda args: pytest.fail("started"))
    with pytest.raises(SystemExit) as caught:
        main(["--nproc-per-node", number, HERE])
    assert caught.value.code == 2
    assert f"bagua run: --nproc-per-node is {number}, expected 1 or more; " in capsys.readouterr().err


def test_a_misspelt_setting_in_the_environment_is_found(monkeypatch, capsys):
    monkeypatch.setenv("BAGUA_TCP_STREAM", "4")
    with pytest.raises(SystemExit):
        parse([HERE])
    assert "BAGUA_TCP_STREAM is not a setting of bagua" in capsys.readouterr().err


def test_one_node_is_standalone_unless_told_otherwise(monkeypatch):
    assert parse([HERE])[0].standalone
    assert parse(["--nnodes", "1", "--nproc-per-node", "2", HERE])[0].standalone
    assert not parse(["--nnodes", "2", HERE])[0].standalone
    assert not parse(["--nnodes", "1:2", HERE])[0].standalone
    for options in (["--master-port", "29501"], ["--rdzv-endpoint", "host:1"], ["--master-addr", "10.0.0.1"]):
        assert not parse([*options, HERE])[0].standalone


def test_ranks_of_one_node_need_no_name_lookup():
    assert parse([HERE])[0].local_addr == "127.0.0.1"
    assert parse(["--standalone", "--local-addr", "host", HERE])[0].local_addr == "host"
    assert parse(["--nnodes", "2", HERE])[0].local_addr is None


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
    """In a rank, which has imported torch already; returns the exit status."""
    return main(arguments)


def launched(tmp_path, script, *arguments, options=()):
    """The script on two ranks: what each of them printed, and the exit status of the launcher."""
    logs = tmp_path / "logs"
    argv = ["--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(logs), *options, script, *arguments]
    (status,) = spawn(launch, 1, args=argv)
    return sorted(log.read_text() for log in logs.rglob("stdout.log")), status


def test_a_script_runs_on_two_ranks_and_fails_the_launcher(script, tmp_path, capfd):
    options = ("--no-shared-memory", "--spin-us", "0")
    printed, status = launched(tmp_path, script, "3", "--more", options=options)
    assert printed == [f"rank {rank} sum 2 tcp ['3', '--more'] 0\n" for rank in range(2)]
    assert status == 3 and "bagua run: rank 0 failed first, exit status 3\n" in capfd.readouterr().err


def test_a_script_that_ends_well(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import os; print(os.environ['BAGUA_AUTH_TOKEN'])")
    (first, second), status = launched(tmp_path, str(path))
    assert first == second and len(first) == 44 and status == 0  # a token of this job


def test_a_port_that_is_taken(script, capfd):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        argv = ["--nproc-per-node", "2", "--master-port", str(port), script]
        assert spawn(launch, 1, args=argv) == [1]
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("bagua run: ")]
    assert told == [
        f"bagua run: the port of --master-port {port} is in use on this host; give another one, or none: then a free "
        "one is chosen"
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DistStoreError("no key"), "the rendezvous at host:29500 is lost: the host that holds it has ended, or cannot"),
        (
            DistNetworkError("Connection reset"),
            "the rendezvous at host:29500 is lost: the host that holds it has ended",
        ),
        (RendezvousConnectionError("failed"), "the rendezvous at host:29500 is lost: the host that holds it has ended"),
        (RendezvousTimeoutError(), "--nnodes is 2, and so many hosts did not come to the rendezvous at host:29500 in"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hosts_that_do_not_meet_are_told_in_two_lines(error, line, capsys, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr(torchrun, "run", fail)
    assert main(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:29500", HERE]) == 1
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bagua run: ")]
    assert first.startswith(f"bagua run: {line}")
    assert second.startswith("bagua run: what torch says of it: ") and type(error).__name__ in second


HOLDS_THE_STORE = """
    import os, sys, time
    name, other, status = sys.argv[1:]
    open(name, "w").close()
    while not os.path.exists(other) or status == "none":
        time.sleep(0.01)
    sys.exit(int(status))
"""


def launch_one(rank, world_size, path, port, folder):
    """One host of two; the first one has the store, and its rank fails when the other's is there."""
    name, other, status = ("first", "second", "3") if rank == 0 else ("second", "first", "none")
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "1"]
    options += ["--rdzv-conf", f"is_host={1 - rank}", "--monitor-interval", "0.02"]
    return main([*options, path, f"{folder}/{name}", f"{folder}/{other}", status])


@pytest.mark.slow("test_hosts_that_do_not_meet_are_told_in_two_lines")
def test_a_host_whose_rendezvous_ends(tmp_path, capfd):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(HOLDS_THE_STORE))
    assert spawn(launch_one, 2, args=(str(path), free_port(), str(tmp_path)), timeout=60) == [3, 1]
    errors = capfd.readouterr().err
    assert "failed first, exit status 3" in errors and "Traceback" not in errors
    assert "failed to shutdown" not in errors
    assert "bagua run: the rendezvous at localhost:" in errors and "The ranks of this host were ended" in errors


def test_own_options_come_first_in_the_help(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: bagua run [options] train.py")
    own, torchruns = text.index("bagua's options:"), text.index("torchrun's options")
    assert own < text.index("--tcp-streams") < torchruns < text.index("--nproc-per-node")
    with pytest.raises(SystemExit) as caught:
        parse(["--nproc-per-node", "2", "-h"])
    assert caught.value.code == 0 and capsys.readouterr().out == text


def test_the_torchrun_options_of_the_help_are_torchruns():
    actions = torchrun.get_args_parser()._actions
    takes_a_value = {name: action.nargs != 0 for action in actions for name in action.option_strings}
    for names, metavar, _ in run._OFTEN_USED:
        assert {takes_a_value.get(name) for name in names} == {metavar is not None}, names


def test_all_options_of_torchrun_are_shown_on_demand(capsys):
    for argv in (["--help-torchrun"], ["--nproc-per-node", "2", "--help-torchrun"]):
        with pytest.raises(SystemExit) as caught:
            parse(argv)
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        names = {name for action in torchrun.get_args_parser()._actions for name in action.option_strings}
        assert names <= set(re.findall(r"--?[\w-]+", printed))
