"""How `bagua run` ends before its time: one line and a status, on a signal and for a rank that fails."""

import importlib
import json
import os
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bagua.cli import endings
from bagua.cli.endings import Interrupts, who_failed_first
from bagua.cli.run import main
from bagua.testing import spawn
from tests.distributed.worlds import SAME_TEST, fast_in


def launch(rank, world_size, *arguments):
    return main(arguments)


@pytest.fixture
def launched(tmp_path, monkeypatch, capfd):
    """Runs a script on three ranks; returns the launcher's exit status, and what it and the ranks have printed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise torchrun sets and announces it

    def run(text, *options, timeout=20):
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        argv = ["--nproc-per-node", "3", "--monitor-interval", "0.02", *options, str(path)]
        (status,) = spawn(launch, 1, args=argv, timeout=timeout)
        captured = capfd.readouterr()
        # What torch's store says where no name server answers, as in these tests (conftest.py).
        told = [line for line in captured.err.splitlines(keepends=True) if "hostname of the client socket" not in line]
        return status, captured.out, "".join(told)

    return run


# Short ones, one after another: a signal that comes when Python has looked for one, and has not begun to sleep yet, is
# seen only after the sleep, which the agent does not wait for. On a busy machine that happens once in a thousand times.
SLEEPS = "while True: time.sleep(0.02)"
# Where they need two seconds for that.
WAITING = "bagua run: waiting 30 s for 3 ranks to end, Ctrl-C kills them ...\n"
SIGNALS_ITS_LAUNCHER = """
    import os, signal, time
    open("here" + os.environ["RANK"], "w").close()
    if os.environ["RANK"] == "1":
        while not (os.path.exists("here0") and os.path.exists("here2")):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.{name})
    {sleeps}
"""


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("SIGINT", 130, "bagua run: interrupted, 3 ranks ended\n"),
        ("SIGTERM", 143, "bagua run: ended by SIGTERM, 3 ranks ended\n"),
        pytest.param("SIGHUP", 129, "bagua run: ended by SIGHUP, 3 ranks ended\n", marks=SAME_TEST),
    ],
)
def test_a_signal_ends_all_ranks_in_one_line(launched, name, status, line):
    ended, printed, errors = launched(SIGNALS_ITS_LAUNCHER.format(name=name, sleeps=SLEEPS))
    assert (ended, printed, errors.replace(WAITING, "")) == (status, "", line)


def test_the_second_interrupt_kills(launched):
    """Ranks that ignore the first; torch's agent would wait for them for half a minute."""
    text = SIGNALS_ITS_LAUNCHER.format(name="SIGINT", sleeps=SLEEPS).splitlines()
    text[2:2] = [
        '    again = lambda *_: (print("again", flush=True), os.kill(os.getppid(), signal.SIGINT))',
        '    signal.signal(signal.SIGINT, again if os.environ["RANK"] == "1" else signal.SIG_IGN)',
    ]
    status, printed, errors = launched("\n".join(text))
    ended = errors.replace(WAITING, "")
    last = "bagua run: interrupted, 3 ranks ended, 3 of them killed after 0 s (--grace)\n"
    assert (status, printed, ended) == (130, "again\n", last)


SAVES = """
    import os, signal, subprocess, sys, time
    def save(number, frame):
        time.sleep(0.3)
        print(signal.Signals(number).name, worker.poll(), flush=True)
        worker.stdin.close()
        worker.wait()
        open("saved" + os.environ["RANK"], "w").close()
        sys.exit(0)
    signal.signal(signal.{name}, save)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    outlives = subprocess.Popen(["sleep", "100"])
    with open("outlives", "a") as file:
        file.write("%d\\n" % outlives.pid)
"""


@fast_in("name, status", [("SIGUSR1", 138)], [("SIGTERM", 143)])
def test_what_a_rank_has_started_serves_it_while_it_saves(launched, tmp_path, name, status):
    """As a DataLoader's workers do. What it leaves behind ends after it."""
    text = SAVES.format(name=name) + SIGNALS_ITS_LAUNCHER.format(name=name, sleeps=SLEEPS)
    ended, printed, errors = launched(text, "--signals-to-handle", f"SIGTERM,{name}")
    assert (ended, printed) == (status, f"{name} None\n" * 3)
    assert errors.replace(WAITING, "") == f"bagua run: ended by {name}, 3 ranks ended\n"
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1", "saved2"}
    for pid in (tmp_path / "outlives").read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_rank_that_does_not_end_in_its_grace_time_is_killed_and_counted(launched):
    text = (
        'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ["RANK"] == "2" else signal.SIG_DFL)'
    )
    text = "import os\n" + text + textwrap.dedent(SIGNALS_ITS_LAUNCHER.format(name="SIGTERM", sleeps=SLEEPS))
    ended, _, errors = launched(text, "--grace", "1")
    last = "bagua run: ended by SIGTERM, 3 ranks ended, 1 of them killed after 1 s (--grace)\n"
    assert (ended, errors) == (143, last)


def test_a_signal_that_cannot_be_handled(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    for name in ("SIGKILL", "SIG_IGN", "SIGSTOP", "TERM"):
        with pytest.raises(SystemExit):
            main(["--signals-to-handle", name, str(script)])
        assert f"--signals-to-handle has {name!r}, which is no signal" in capsys.readouterr().err


FAILS = """
    import os, time
    class RemoteError(Exception):
        rank = 1
    RemoteError.__module__ = "bagua.errors"
    if os.environ["RANK"] == "1":
        raise ValueError("label 17 is not in 0..9")
    cause = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/%s/error" % os.environ["RANK"], "/1/error")
    while {at_work} or not os.path.exists(cause):
        time.sleep(0.01)
    raise RemoteError("rank 1 has exited")
"""


@pytest.mark.parametrize("at_work", [False, True])
def test_an_exception_is_shown_once_and_in_the_last_line(launched, at_work):
    """Whether the others fail of it, or are still at work."""
    status, printed, errors = launched(FAILS.format(at_work=at_work))
    assert status == 1 and printed == ""
    lines = errors.splitlines()
    assert lines.count("[rank 1] Traceback (most recent call last):") == errors.count("Traceback") == 1
    assert lines.count("[rank 1] ValueError: label 17 is not in 0..9") == 1
    first = lines.index("bagua run: rank 1 failed first, exit status 1: ValueError: label 17 is not in 0..9")
    assert not at_work or not lines[first + 1 :]
    assert re.fullmatch(r"(bagua run: (rank [02]|ranks 0, 2) failed after that)?", "\n".join(lines[first + 1 :]))
    assert all(line.startswith(("[rank ", "bagua run: ")) for line in lines), errors
    assert sum(line.startswith(("[rank 0]", "[rank 2]")) for line in lines) <= 2


def test_a_rank_that_is_killed(launched):
    status, _, errors = launched(
        FAILS.format(at_work=True).replace('raise ValueError("label 17 is not in 0..9")', DIES)
    )
    assert (status, errors) == (139, "bagua run: rank 1 failed first, it died of SIGSEGV\n")


DIES = "os.kill(os.getpid(), 11)"


def test_output_in_files_is_named(launched, tmp_path):
    status, _, errors = launched(FAILS.format(at_work=True), "--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    assert status == 1 and errors.count("\n") == 2
    assert "bagua run: rank 1 failed first, exit status 1: ValueError: label 17" in errors
    (log,) = (line.partition("what it wrote is in ")[2] for line in errors.splitlines()[1:])
    with open(log) as file:
        assert file.read().endswith("[rank 1] ValueError: label 17 is not in 0..9\n")


def test_a_rank_is_started_again(launched, tmp_path):
    text = """
        import os
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", "the first time"
        print("well")
    """
    status, printed, errors = launched(text, "--max-restarts", "1")
    assert (status, printed) == (0, "well\n" * 3) and "AssertionError: the first time" in errors
    assert "bagua run" not in errors


# ---- which of several failures is the cause ---------------------------------------------------------------


@pytest.fixture
def first_of(tmp_path):
    """What is said of ranks that ended so: {rank: exit code, or (exit code, message, names another rank, time)}.

    Instead of True, the other rank.
    """

    def first(ends, at=1000):
        failures = {}
        for rank, end in ends.items():
            code, *raised = end if isinstance(end, tuple) else (end,)
            path = tmp_path / f"{rank}.json"
            if raised:
                message, follows, time_s = raised
                details = {"timestamp": str(int(time_s)), "time_s": time_s, "names_another_rank": follows is not False}
                details["rank_at_fault"] = None if isinstance(follows, bool) else follows
                path.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
            failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(path))
            if not raised:
                failures[rank].timestamp = at
        text, status = who_failed_first(ChildFailedError("train.py", failures))
        return text.removeprefix("bagua run: "), status

    return first


def test_the_earlier_one_within_a_second(first_of):
    text, status = first_of({0: (1, "KeyError: 'b'", False, 1000.75), 1: (1, "KeyError: 'a'", False, 1000.25)})
    assert text.startswith("rank 1 failed first, exit status 1: KeyError: 'a'\n") and status == 1
    assert text.endswith("rank 0 failed after that")


def test_one_that_names_another_rank_came_later(first_of):
    text, _ = first_of({0: (1, "RemoteError: rank 2", True, 1000.0), 2: (1, "KeyError: 'a'", False, 1000.5)})
    assert text.startswith("rank 2 failed first, exit status 1: KeyError: 'a'")


def test_where_all_name_another_rank_the_first_of_them(first_of):
    """As on a host whose ranks have been left alone."""
    text, status = first_of({0: (1, "RemoteError: b", True, 1001.0), 1: (1, "DeadlineExceeded: a", True, 1000.0)})
    assert text.startswith("rank 1 failed first, exit status 1: DeadlineExceeded: a") and status == 1


def test_a_rank_of_another_host_is_the_cause(first_of):
    """Or one that ended with status 0, which leaves no failure either."""
    assert first_of({2: (1, "TransportError: rank 1 left", 1, 1000.0), 3: (1, "RemoteError: rank 2", 1, 1001.0)}) == (
        "rank 2 ended because of rank 1, which is not on this host or ended with status 0, exit status 1: "
        "TransportError: rank 1 left\nbagua run: rank 3 failed after that",
        1,
    )


def test_a_rank_that_was_ended_in_its_clean_up_is_the_cause(first_of):
    text, _ = first_of({0: (1, "TransportError: rank 1 left", 1, 1000.0), 1: -signal.SIGTERM})
    assert text.startswith("rank 0 ended because of rank 1, which was ended before it said why, exit status 1: ")


def test_ranks_that_name_one_another(first_of):
    text, _ = first_of({0: (1, "RemoteError: rank 1", 1, 1000.5), 1: (1, "DeadlineExceeded: rank 0", 0, 1000.0)})
    assert text.startswith("rank 1 failed first, exit status 1: DeadlineExceeded: rank 0")


def test_what_the_agent_ended_is_no_cause(first_of):
    assert first_of({0: -signal.SIGTERM, 1: 7, 2: -signal.SIGTERM}) == ("rank 1 failed first, exit status 7", 7)


def test_a_rank_that_had_raised_and_was_ended(first_of):
    """Its last lines took longer than the others' failures."""
    ends = {0: (1, "TransportError: rank 1", True, 1000.5), 1: (-15, "ValueError: x", False, 1000.0)}
    assert first_of(ends) == (
        "rank 1 failed first, exit status 1: ValueError: x\nbagua run: rank 0 failed after that",
        1,
    )


def test_a_rank_that_died_explains_the_others(first_of):
    """Such as of the kernel, which kills what takes too much memory; theirs says only that a connection is closed."""
    ends = {0: (1, "RuntimeError: Connection closed by peer", False, 1000.1), 1: -signal.SIGKILL}
    assert first_of(ends) == (
        "rank 1 failed first, it died of SIGKILL\nbagua run: rank 0 failed after that",
        137,
    )


def test_a_rank_that_the_agent_had_to_kill_does_not(first_of):
    ends = {0: (1, "ValueError: x", False, 1000.1), 1: -signal.SIGKILL}
    assert first_of(ends, at=1030) == ("rank 0 failed first, exit status 1: ValueError: x", 1)


def test_a_traceback_that_only_torch_has_written_down_is_shown(launched):
    """As of a script in the launcher's own interpreter, which rank.py does not run."""
    path = FAILS.format(at_work=True).replace('"TORCHELASTIC_ERROR_FILE"', '"RANK"')
    status, _, errors = launched(path, "--run-path", "--start-method", "fork")
    assert status == 1 and errors.count("[rank 1] Traceback (most recent call last):") == 1
    assert errors.endswith(
        "[rank 1] ValueError: label 17 is not in 0..9\n"
        "bagua run: rank 1 failed first, exit status 1: ValueError: label 17 is not in 0..9\n"
    )


def forks(rank, world_size, number):
    def ended():
        try:
            pid = os.fork()
            if pid == 0:
                time.sleep(5)
                os._exit(0)
        except KeyboardInterrupt:  # in the child, whose Python has begun
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(pid, number)  # before Python has begun in it, mostly
        return os.waitpid(pid, 0)[1]

    with Interrupts():
        return [ended() for _ in range(10)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_forked_has_not_the_handlers_of_the_launcher_and_loses_no_signal(number):
    (ended,) = spawn(forks, 1, args=[number], timeout=60)
    assert {*ended} <= ({number} if number == signal.SIGTERM else {number, signal.SIGKILL})


def forks_and_is_interrupted_in_the_hook(rank, world_size):
    pending = signal.sigpending

    def and_another():
        found = pending()
        os.kill(os.getpid(), signal.SIGINT)
        return found

    with Interrupts():
        signal.sigpending = and_another
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return os.waitpid(pid, 0)[1]


def test_a_rank_that_is_forked_loses_no_signal_that_comes_while_its_handlers_are_restored():
    assert spawn(forks_and_is_interrupted_in_the_hook, 1, timeout=60) == [signal.SIGINT]


def is_interrupted_at_forks(rank, world_size):
    """By a signal that comes when the fork is over and Python's hooks behind it are not."""
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
    own = importlib.reload(endings)  # whose hooks come behind that one
    seen = 0
    for _ in range(3):
        try:
            with own.Interrupts():
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                time.sleep(5)
        except SignalException as error:
            seen += error.sigval == signal.SIGINT
        os.waitpid(pid, 0)
    return seen


def test_the_launcher_does_not_lose_a_signal_that_comes_at_a_fork():
    assert spawn(is_interrupted_at_forks, 1, timeout=60) == [3]


# ---- with bagua itself -----------------------------------------------------------------------------------

REAL = """
    import bagua, torch
    bagua.init_process_group(timeout=30.0)
    for step in range(100):
        if bagua.get_rank() == 1 and step == 3:
            raise ValueError("label 17 is not in 0..9")
        bagua.all_reduce(torch.ones(4))
"""


@pytest.mark.slow("test_an_exception_is_shown_once_and_in_the_last_line")
def test_ranks_that_are_in_a_collective_when_one_raises(launched):
    status, _, errors = launched(REAL, timeout=60)
    assert status == 1 and errors.count("Traceback") == 1
    assert "\nbagua run: rank 1 failed first, exit status 1: ValueError: label 17 is not in 0..9\n" in errors
    assert all(line.startswith(("[rank ", "bagua run: ")) for line in errors.splitlines()), errors


@pytest.mark.slow("test_a_signal_ends_all_ranks_in_one_line")
def test_ranks_that_are_in_a_collective_when_they_are_interrupted(launched):
    interrupts = "import os, signal, time\n            os.kill(os.getppid(), signal.SIGINT)\n            " + SLEEPS
    text = REAL.replace('raise ValueError("label 17 is not in 0..9")', interrupts)
    status, printed, errors = launched(text, timeout=60)
    assert (status, printed) == (130, "")
    assert errors.replace(WAITING, "") == "bagua run: interrupted, 3 ranks ended\n"
