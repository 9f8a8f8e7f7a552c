"""The `bagua` command: its subcommands, their exit statuses, and what it says about anything else."""

import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
from bagua import cli, config
from bagua.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


HELP = [
    [],
    ["-h"],
    ["--version"],
    *([command, "-h"] for command in ("run", "doctor", "bench", "simulate", "timeline")),
    ["bench", "record", "-h"],
]


def test_without_arguments_it_lists_the_commands(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0 and capsys.readouterr().out == printed
    assert printed.startswith("usage: bagua [-h] [--version] COMMAND ...")
    assert all(re.search(rf"^ +{name} +\w", printed, re.MULTILINE) for name in cli._COMMANDS)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"bagua {bagua.__version__}\n"


def test_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["trian"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert re.match(r"bagua: argument COMMAND: invalid choice: 'trian' \(choose from '?run", captured.err)
    assert captured.err.endswith("`bagua --help` lists the commands\n") and captured.out == ""


def test_each_command_is_a_module_with_a_main():
    modules = [cli._MODULES.get(name, name) for name in cli._COMMANDS]
    assert all(callable(importlib.import_module(f"bagua.cli.{name}").main) for name in modules)
    # rank.py is run by its path, so that Python looks for its own modules in that folder first.
    assert not sys.stdlib_module_names & {path.stem for path in (ROOT / "bagua/cli").glob("*.py")}


def test_a_token(tmp_path, capsys):
    tokens = []
    for _ in range(2):
        assert cli.main(["token"]) == 0
        tokens.append(capsys.readouterr().out.strip())
        assert config.settings({"BAGUA_AUTH_TOKEN": tokens[-1]}).auth_token == tokens[-1]
    file = tmp_path / "token"
    before = os.umask(0)
    try:
        assert cli.main(["token", "--output", str(file)]) == 0
    finally:
        os.umask(before)
    tokens.append(config.settings({"BAGUA_AUTH_TOKEN_FILE": str(file)}).auth_token)
    assert file.stat().st_mode & 0o777 == 0o600 and len(set(tokens)) == 3 and capsys.readouterr().out == ""
    assert cli.main(["token", "-o", str(file)]) == 1
    assert f"bagua token: {file}: File exists; name a new file\n" == capsys.readouterr().err
    assert file.read_text() == tokens[-1] + "\n"


def imported_by(*command):
    """What a process of Python has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("argv", [["-m", "bagua", *argv] for argv in HELP] + [["-m", "bagua.run", "-h"]], ids=" ".join)
def test_help_imports_no_torch(argv):
    modules = imported_by(*argv)
    assert "bagua.cli" in modules and not {"torch", "numpy"} & modules


@pytest.fixture
def script(tmp_path):
    """The script `bagua`, as pip writes it."""
    path = tmp_path / "bagua"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom bagua.cli import main\nsys.exit(main())\n")
    return str(path)


@pytest.mark.parametrize("argv", [["-h"], ["run", "-h"]], ids=" ".join)
def test_help_of_the_script_imports_no_torch(script, argv):
    modules = imported_by(script, *argv)
    assert "bagua.cli" in modules and "torch" not in modules


def test_help_takes_less_than_half_a_second(script):
    """Of processor time, which other programs do not lengthen much; the clock shows as much where nothing else runs."""
    subprocess.run([sys.executable, script, "run", "-h"], check=True, capture_output=True)  # compiles it
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, script, "run", "-h"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_script_is_the_one_in_pyproject():
    assert '[project.scripts]\nbagua = "bagua.cli:main"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_doctor_alone(no_launcher, capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split()[0] for line in lines]
    assert titles[:2] == ["bagua", "machine"]
    assert {"cpu", "core", "codecs", "transports", "token", "interface", "peers"} <= set(titles)
    assert any(line.split()[:3] == ["interface", "lo", "127.0.0.1"] for line in lines)
    assert "minmax_uint8" in next(line for line in lines if line.startswith("codecs"))
    assert next(line for line in lines if line.startswith("transports")).split()[1:3] == ["shm", "tcp"]


@pytest.mark.parametrize(
    ("torch_has_some", "why"), [(False, "and torch has none either"), (True, "BAGUA_CUDA=1 pip install .")]
)
def test_doctor_says_in_one_line_that_there_is_no_gpu(no_launcher, capsys, torch_has_some, why):
    import torch

    no_launcher.setattr(doctor, "_is_built_in", lambda kind: kind == "cpu")
    no_launcher.setattr(torch.cuda, "is_available", lambda: torch_has_some)
    assert doctor.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "CUDA" in line or line.startswith("device")]
    assert len(lines) == 1 and lines[0].startswith("devices        none: ") and why in lines[0]


def test_doctor_finds_no_gpu_with_cuda_built_in(no_launcher, capsys):
    no_launcher.setattr(doctor, "_is_built_in", lambda kind: kind in ("cpu", "cuda"))
    no_launcher.setattr(doctor._C, "num_devices", lambda kind: 0)
    no_launcher.setattr(doctor._C, "device_versions", lambda kind: f"of {kind}")
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    assert "devices        none: CUDA finds none (of cuda)\n" in output
    assert "device tensors" not in output
    assert re.search(r"^core +built for cpu cuda$", output, re.MULTILINE)


def test_doctor_shows_the_settings(no_launcher, capsys):
    no_launcher.setenv("BAGUA_SHARED_MEMORY", "0")
    no_launcher.setenv("BAGUA_TCP_STREAMS", "5")
    no_launcher.setenv("BAGUA_TCP_CONGESTION", "system")
    no_launcher.setenv("BAGUA_SOCKET_IFNAME", "lo")
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    assert re.search(r"transports +tcp \(5 streams per peer, congestion control \w+\)$", output, re.MULTILINE), output
    assert re.search(r"interface +lo +127\.0\.0\.1 +<- BAGUA_SOCKET_IFNAME", output)


def test_doctor_finds_a_bad_setting(no_launcher, capsys):
    no_launcher.setenv("BAGUA_TCP_STREAM", "5")
    assert doctor.main([]) == 1
    assert "settings       FAILED: BAGUA_TCP_STREAM is not a setting of bagua" in capsys.readouterr().err
    no_launcher.delenv("BAGUA_TCP_STREAM")
    no_launcher.setenv("BAGUA_TCP_CONGESTION", "not-loaded")
    assert doctor.main([]) == 1
    assert "FAILED: BAGUA_TCP_CONGESTION='not-loaded' cannot be used on this host" in capsys.readouterr().err


def test_doctor_refuses_unknown_options(no_launcher, capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--fast"])
    assert caught.value.code == 2 and "--fast" in capsys.readouterr().err


def run_command(*arguments, env=None, timeout=90):
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "bagua", *arguments],
        env={**environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("number", ["0", "-1"])
def test_doctor_refuses_a_number_of_processes(no_launcher, capsys, number):
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--nproc-per-node", number])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"bagua doctor: error: --nproc-per-node is {number}, expected 1 or more\n")


@pytest.fixture
def unbuilt(tmp_path):
    """A folder with the source of bagua, without what is compiled, as after `pip install .`."""
    (tmp_path / "bagua").mkdir()
    shutil.copy(ROOT / "bagua/__init__.py", tmp_path / "bagua")
    return tmp_path


def run_in(folder, *command, first=ROOT):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("BAGUA_", "PYTHONSAFE"))}
    environ = {**environ, "PYTHONPATH": f"{first}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(list(command), cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", [["-c", "import bagua"], ["-m", "bagua", "doctor"]], ids=" ".join)
def test_a_source_that_is_not_built_says_so(unbuilt, command):
    # Without site: its hook of an editable install finds the compiled module of another folder.
    done = run_in(unbuilt, sys.executable, "-S", *command)
    assert done.returncode == 1 and "circular" not in done.stderr
    assert f"{unbuilt} is the source of bagua, which is not built there" in done.stderr
    assert "change to another folder" in done.stderr and "make build" in done.stderr


def test_ranks_of_commands_do_not_import_a_source_that_is_not_built(unbuilt, tmp_path, monkeypatch):
    """A torch that ends the rank says which bagua imports it."""
    from bagua.replay import command

    first = tmp_path / "first"
    first.mkdir()
    (first / "torch.py").write_text("import os, sys; os.write(1, sys.modules['bagua'].__file__.encode()); os._exit(0)")
    monkeypatch.chdir(unbuilt)
    # Without the current folder, as the script `bagua` has it.
    monkeypatch.setattr(sys, "path", [str(first), *(path for path in sys.path if path)])
    of_replay = [*command.rank_command()[1:], "folder", "{}"]
    of_doctor = [str(ROOT / "bagua/cli/rank.py"), *doctor._as_script()]
    for program in (of_replay, of_doctor):
        done = run_in(unbuilt, sys.executable, *program, first=first)
        assert done.stdout == bagua.__file__, done.stderr
    monkeypatch.chdir(ROOT)
    assert doctor._as_script() == ["-m", "bagua.cli.doctor"]


@pytest.mark.slow("test_doctor_measures_as_a_rank")
def test_doctor_measures_between_ranks():
    done = run_command("doctor", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert "rank peer  over     one way        rate" in done.stdout
    assert re.search(r"^ +0 +1  shm +[\d.]+ us +[\d.]+ GB/s$", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("machine") == 1, "one rank reports for all"


def test_doctor_measures_as_a_rank(no_launcher, capfd):
    """Every pair, with the transport that carries it, on two imitated nodes."""
    from bagua.testing import spawn

    statuses = spawn(doctor_as_rank, 3, nodes=[2, 1], env={"BAGUA_SOCKET_IFNAME": "lo"})
    assert statuses == [0, 0, 0]
    rows = re.findall(r"^ +(\d) +(\d)  (\w+) ", capfd.readouterr().out, re.MULTILINE)
    assert rows == [("0", "1", "shm"), ("0", "2", "tcp"), ("1", "2", "tcp")]


def test_doctor_names_torch_where_it_carries_everything(no_launcher, capfd):
    from bagua.testing import spawn

    no_launcher.setenv("BAGUA_BACKEND", "torch")
    assert spawn(doctor_as_rank, 2) == [0, 0]
    output = capfd.readouterr().out
    assert "transports     torch (BAGUA_BACKEND)" in output
    assert re.findall(r"^ +(\d) +(\d)  (\w+) ", output, re.MULTILINE) == [("0", "1", "torch")]


def doctor_as_rank(rank, world_size):
    return doctor.main([])


def test_doctor_reports_ranks_that_do_not_meet(capfd):
    from bagua.testing import spawn

    assert spawn(doctor_with_own_token, 2) == [1, 1]
    assert "peers          FAILED: the ranks disagree about auth_token" in capfd.readouterr().err


def doctor_with_own_token(rank, world_size):
    os.environ["BAGUA_AUTH_TOKEN"] = ["5kZ0pW-qk2VQyXn3sE7cUw", "9aLr_T4hBf6mJd1vGi8oNx"][rank]
    return doctor.main([])
