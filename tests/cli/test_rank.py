"""cli/rank.py: a script runs as under Python itself, and what it raises is told once, with the rank."""

import json
import os
import py_compile
import re
import signal
import socket
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

RANK_PY = str(Path(__file__).resolve().parents[2] / "bagua/cli/rank.py")

ABOUT_ITSELF = """
import atexit, inspect, pickle, sys

class Thing:
    "It has a source."

atexit.register(lambda: print("end", Thing.__name__, sys.modules["__main__"].__dict__ is Thing.report.__globals__))

def report(self):
    print(__name__, __file__, __package__, __cached__ if __package__ is None else "", __doc__)
    print(__spec__ and __spec__.name, type(__loader__).__name__, __builtins__)
    print(sys.argv, sys.path[:2], sorted(globals()))
    print(type(pickle.loads(pickle.dumps(self))) is Thing, sys.modules["__main__"].__dict__ is globals())

Thing.report = report
Thing().report()
if __file__.endswith("train.py"):
    print(inspect.getsource(Thing))
"""


def run(*command, cwd=None, rank="1", error_file=None, **options):
    env = {**os.environ, "RANK": rank, "TORCHELASTIC_ERROR_FILE": str(error_file or ""), **options.pop("env", {})}
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([sys.executable, "-u", *map(str, command)], cwd=cwd, env=env, **options)


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def made(kind, script, tmp_path):
    """(what stands behind `python -u`) for a script of this kind."""
    if kind == "script":
        return [script(ABOUT_ITSELF)]
    if kind == "relative":
        script(ABOUT_ITSELF)
        return ["./train.py"]
    if kind == "module":
        (tmp_path / "package").mkdir()
        (tmp_path / "package/__init__.py").touch()
        script(ABOUT_ITSELF, "package/train.py")
        return ["-m", "package.train"]
    if kind == "folder":
        (tmp_path / "folder").mkdir()
        script(ABOUT_ITSELF, "folder/__main__.py")
        return [tmp_path / "folder"]
    if kind == "archive":
        with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
            archive.writestr("__main__.py", ABOUT_ITSELF)
        return [tmp_path / "archive.zip"]
    py_compile.compile(str(script(ABOUT_ITSELF, "other.py")), cfile=str(tmp_path / "compiled.pyc"))
    return [tmp_path / "compiled.pyc"]


@pytest.mark.parametrize("kind", ["script", "relative", "module", "folder", "archive", "compiled"])
def test_it_runs_as_under_python(kind, script, tmp_path):
    command = [*made(kind, script, tmp_path), "--lr", "0.1", "-m", "x"]
    direct, through = (run(*before, *command, cwd=tmp_path) for before in ([], [RANK_PY]))
    assert direct.returncode == through.returncode == 0, direct.stderr + through.stderr
    assert "end Thing" in direct.stdout
    if kind == "compiled":  # for which Python has another loader
        direct, through = (re.sub(r"Source\w+Loader", "Loader", one.stdout) for one in (direct, through))
        assert re.sub(r"Sourceless", "Source", direct) == re.sub(r"Sourceless", "Source", through)
    else:
        assert direct.stdout == through.stdout


def test_processes_of_a_script_find_its_functions(script):
    path = script(
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [1, 2]))\n"
    )
    assert run(RANK_PY, path).stdout == "[2, 4]\n"


RAISES = "def step():\n    raise ValueError('label 17\\nis not in 0..9')\n\n\nstep()\n"


@pytest.mark.parametrize("arguments", [["train.py"], ["-m", "train"]], ids=" ".join)
def test_an_exception_is_told_with_the_rank(script, tmp_path, arguments):
    path = script(RAISES)
    done = run(RANK_PY, *arguments, cwd=tmp_path, error_file=tmp_path / "error.json")
    assert done.returncode == 1 and done.stdout == ""
    direct = run(*arguments, cwd=tmp_path)
    ours = [line for line in direct.stderr.splitlines() if "runpy" not in line]
    assert done.stderr == "".join(f"[rank 1] {line}\n" for line in ours) and f'"{path}", line 2, in step' in done.stderr
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert written["message"].startswith("ValueError: label 17")
    assert "in step" in written["extraInfo"]["py_callstack"] and not written["extraInfo"]["names_another_rank"]


def test_torch_reads_what_is_written(script, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    error_file = tmp_path / "error.json"
    run(RANK_PY, script(RAISES), error_file=error_file)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(error_file))
    assert failure.message["message"].startswith("ValueError: label 17")
    assert 0 < failure.timestamp <= failure.message["extraInfo"]["time_s"]


FOLLOWS = """
class {name}(Exception):
    rank = {rank}

{name}.__module__ = "bagua.errors"
raise {name}("rank 2 has exited")
"""


def test_a_rank_that_is_ended_meanwhile_leaves_no_part_of_it(script, tmp_path):
    """Torch's launcher cannot go on from one: it would raise instead of starting the ranks again."""
    text = """
        import json, os
        def dump(content, file):
            file.write("{")
            file.flush()
            os._exit(3)
        json.dump = dump
        raise ValueError("of this rank")
    """
    result = run(RANK_PY, script(textwrap.dedent(text)), error_file=tmp_path / "error.json")
    assert result.returncode == 3 and not (tmp_path / "error.json").exists()


@pytest.mark.parametrize("name", ["RemoteError", "TransportError", "DeadlineExceeded", "Aborted"])
def test_another_ranks_failure_is_one_line(script, tmp_path, name):
    path = script(FOLLOWS.format(name=name, rank=2))
    done = run(RANK_PY, path, error_file=tmp_path / "error.json")
    assert done.returncode == 1 and done.stderr == f"[rank 1] {name} at {path}:6: rank 2 has exited\n"
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert written["message"] == f"{name}: rank 2 has exited" and written["extraInfo"]["names_another_rank"]


@pytest.mark.parametrize(("name", "rank"), [("RemoteError", 1), ("RemoteError", None), ("InvalidArgument", 2)])
def test_other_errors_of_bagua_have_a_traceback(script, name, rank):
    done = run(RANK_PY, script(FOLLOWS.format(name=name, rank=rank)))
    assert done.stderr.startswith("[rank 1] Traceback (most recent call last):\n")


def test_the_names_are_those_of_bagua():
    import bagua.errors
    from bagua.cli import rank

    for name in rank._NAMING_ANOTHER_RANK:
        kind = getattr(bagua.errors, name)
        assert rank._names_another_rank(kind("x", rank=0), "1") and not rank._names_another_rank(kind("x", rank=1), "1")


FOLLOWS_IN_A_TRY = """
class RemoteError(Exception):
    rank = 2

RemoteError.__module__ = "bagua.errors"
try:
    raise RemoteError("rank 2 has exited")
except RemoteError as error:
    raise RuntimeError("step 1 failed") from error
"""


def followed_by(script, tmp_path, text):
    """(what the rank has written down, what it has told)."""
    done = run(RANK_PY, script(text), error_file=tmp_path / "error.json")
    assert done.returncode == 1
    return json.loads((tmp_path / "error.json").read_text())["message"], done.stderr


def test_what_is_raised_from_another_ranks_failure_is_one_line(script, tmp_path):
    written, told = followed_by(script, tmp_path, FOLLOWS_IN_A_TRY)
    text = "step 1 failed, from RemoteError: rank 2 has exited"
    assert told == f"[rank 1] RuntimeError at {tmp_path}/train.py:9: {text}\n"
    assert written["message"] == f"RuntimeError: {text}" and written["extraInfo"]["rank_at_fault"] == 2


@pytest.mark.parametrize("raised", ["1 / 0", 'raise KeyError("checkpoint") from None', "undefined"])
def test_what_goes_wrong_in_the_handling_has_a_traceback(script, tmp_path, raised):
    """The other rank has failed first, but that is no reason to hide it."""
    text = FOLLOWS_IN_A_TRY.replace('raise RuntimeError("step 1 failed") from error', raised)
    written, told = followed_by(script, tmp_path, text)
    assert told.startswith("[rank 1] Traceback (most recent call last):\n")
    assert written["extraInfo"]["names_another_rank"] and written["extraInfo"]["rank_at_fault"] == 2
    assert not written["message"].startswith("RemoteError")


def test_what_went_wrong_before_it_has_a_traceback(script, tmp_path):
    """Such as a failure of this rank, in whose clean-up it communicates once more."""
    cleaned_up = FOLLOWS.format(name="RemoteError", rank=2).replace("raise", "    raise").strip()
    first, _, second = cleaned_up.partition("    raise")
    text = f"{first}try:\n    1 / 0\nfinally:\n    raise{second}\n"
    written, told = followed_by(script, tmp_path, text)
    assert "[rank 1] ZeroDivisionError: division by zero" in told
    assert "[rank 1] bagua.errors.RemoteError: rank 2" in told
    assert written["extraInfo"]["names_another_rank"]


@pytest.mark.parametrize("raised", ["raise ValueError('label 17')", "raise ValueError('label 17') from KeyError('x')"])
def test_what_comes_after_the_handling_is_of_this_rank(script, tmp_path, raised):
    text = FOLLOWS_IN_A_TRY.replace('raise RuntimeError("step 1 failed") from error', f"pass\n{raised}")
    written, told = followed_by(script, tmp_path, text)
    assert not written["extraInfo"]["names_another_rank"] and written["extraInfo"]["rank_at_fault"] is None
    assert "RemoteError" not in told


def test_exceptions_that_are_one_anothers_cause(script, tmp_path):
    text = """
        one, two = ValueError("one"), ValueError("two")
        one.__cause__, two.__cause__ = two, one
        raise one
    """
    written, _ = followed_by(script, tmp_path, textwrap.dedent(text))
    assert written["message"] == "ValueError: one"


NO_STR = """
class Broken(Exception):
    def __str__(self):
        raise KeyError("no text")

raise Broken
"""


def test_an_exception_without_a_text(script, tmp_path):
    written, told = followed_by(script, tmp_path, NO_STR)
    assert written["message"] == "Broken: <its str() raised KeyError>"
    lines = told.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):" and "train.py" in lines[1]
    assert "rank.py" not in told
    assert all(line.startswith("[rank 1] ") for line in lines) and "Broken" in lines[-1]


def test_what_does_not_compile(script):
    done = run(RANK_PY, script("def f(:\n"))
    assert done.returncode == 1 and "rank.py" not in done.stderr
    assert 'train.py", line 1' in done.stderr and done.stderr.splitlines()[-1].startswith("[rank 1] SyntaxError: ")


def test_a_hook_of_the_script_has_its_say(script, tmp_path):
    text = "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', error, trace.tb_lineno)\n1 / 0\n"
    done = run(RANK_PY, script(text), error_file=tmp_path / "error.json")
    assert (done.returncode, done.stdout, done.stderr) == (1, "mine division by zero 3\n", "")
    assert "ZeroDivisionError" in (tmp_path / "error.json").read_text()


def test_a_hook_of_torch_does_not_put_the_rank_there_twice(script):
    hook = "def hook(*_): print('not this one')\nhook.__module__ = 'torch.distributed'\n"
    text = f"import sys\n{hook}sys.excepthook = hook\n1 / 0\n"
    done = run(RANK_PY, script(text))
    assert done.stdout == "" and done.stderr.startswith("[rank 1] Traceback")


@pytest.mark.parametrize(("code", "status", "printed"), [("3", 3, ""), ("", 0, ""), ("'no data'", 1, "no data\n")])
def test_an_exit_status_is_the_scripts(script, tmp_path, code, status, printed):
    done = run(RANK_PY, script(f"import sys\nsys.exit({code})\n"), error_file=tmp_path / "error.json")
    assert (done.returncode, done.stderr) == (status, printed) and not (tmp_path / "error.json").exists()


def test_an_interrupt_is_silent(script):
    text = "import atexit, os, signal\natexit.register(print, 'closed')\nos.kill(os.getpid(), signal.SIGINT)\n"
    done = run(RANK_PY, script(text))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "closed\n", "")


def test_an_interrupt_that_python_drops_comes_again(script):
    """As in a finaliser, or at the end of an import; the script would go on, and the launcher waits for it in vain."""
    text = """
        import os, signal, time
        class Thing:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
        Thing()
        for _ in range(100):
            time.sleep(0.02)
    """
    done = run(RANK_PY, script(textwrap.dedent(text)))
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_anything_else_that_python_drops_is_told(script):
    done = run(RANK_PY, script("class Thing:\n    def __del__(self):\n        raise ValueError('17')\nThing()\n"))
    assert done.returncode == 0 and done.stderr.startswith("Exception ignored in: <function Thing.__del__ at ")
    assert done.stderr.endswith("ValueError: 17\n")


def test_an_interrupt_takes_the_place_of_what_it_has_caused(script):
    """Another rank has ended by the same Ctrl-C, and this one has noticed that first."""
    text = "import os, signal, threading\nthreading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    done = run(RANK_PY, script(text + FOLLOWS.format(name="TransportError", rank=0)))
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_line_is_written_in_one_piece(script):
    """Where several ranks share a pipe; a socket of packets keeps what is written apart."""
    text = """
        import os, sys
        for stream in (sys.stdout, sys.stderr):
            print("step", 1, "loss", 0.5, file=stream)
            print("50%", end="\\r", file=stream)
            print("no end", end="", file=stream, flush=True)
            print(", and now one", file=stream)
        print("at the end", end="")
    """
    path = script(textwrap.dedent(text))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert run(RANK_PY, path, capture_output=False, stdout=theirs, stderr=theirs).returncode == 0
        theirs.close()
        pieces = list(iter(lambda: ours.recv(4096), b""))
    of_a_stream = [b"step 1 loss 0.5\n", b"50%\r", b"no end", b", and now one\n"]
    assert pieces == [*of_a_stream, *of_a_stream, b"at the end"]


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_stream_that_is_closed(script, closed):
    path = script("open('here', 'w').close()")
    command = f"exec {sys.executable} -u {RANK_PY} {path} {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=path.parent, timeout=60).returncode == 0
    assert (path.parent / "here").exists()


def test_a_stream_of_the_sites_own(script):
    path = script("import sys; sys.stdout.write(type(sys.stdout).__name__)")
    text = """
        import sys
        class Tee:
            def write(self, text): sys.__stdout__.write(text)
            def flush(self): sys.__stdout__.flush()
        sys.stdout = Tee()
    """
    script(textwrap.dedent(text), "sitecustomize.py")
    done = run(RANK_PY, path, env={"PYTHONPATH": str(path.parent)})
    assert (done.stdout, done.returncode) == ("Tee", 0), done.stderr
