"""The code inside a rank that a Pool started: it runs tasks from its connection until that closes.

A task is a dict of environment, working directory, import path and a pickled call; the answer is an Outcome. ranks.py
decides about failures.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib.util
import mmap
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from bagua.testing.spawner import RankDescriptors

STACK_SIGNAL = signal.SIGUSR1
_SHIFT_BYTES = 32 << 20
_MAX_REPR = 300


class Outcome(NamedTuple):
    """The outcome of a task; `at` is on the monotonic clock, which all processes of a host share."""

    at: float
    value: bytes | None = None  # pickled return value
    error: bytes | None = None  # pickled exception, None where it cannot be pickled
    text: str | None = None  # traceback; None means success


def rank_main(descriptors: RankDescriptors) -> NoReturn:
    """Runs tasks in the forked process until the parent closes the connection, then exits."""
    _die_with_parent()
    os.dup2(descriptors.stdout, 1)
    os.dup2(descriptors.stderr, 2)
    os.close(descriptors.stdout)
    os.close(descriptors.stderr)
    dump = os.fdopen(descriptors.dump, "w")
    faulthandler.enable(dump)
    faulthandler.register(STACK_SIGNAL, dump)
    sys.stdout.reconfigure(line_buffering=True)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()

    connection = Connection(descriptors.connection)
    keep = []
    while True:
        try:
            task = connection.recv()
        except EOFError:
            _exit()
        if not keep:
            # Forked siblings have the same memory map. This shifts ours, so that an address that leaks from one rank to
            # another is not valid there by chance, as it would not be on two machines.
            keep.append(mmap.mmap(-1, _SHIFT_BYTES * (1 + int(task["environ"]["RANK"])), prot=mmap.PROT_READ))
        outcome = _run(task)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.send(tuple(outcome))


def _exit() -> NoReturn:
    """Exits like a program, but does not tear down modules, which takes half a second with torch in memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins the non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _run(task: dict[str, Any]) -> Outcome:
    try:
        os.environ.clear()
        os.environ.update(task["environ"])
        os.chdir(task["cwd"])
        sys.path[:] = task["sys_path"]
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _make_importable(task["module"], task["file"])
        function, arguments = pickle.loads(task["call"])
        value = function(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *arguments)
        return Outcome(time.monotonic(), value=dumps(value))
    except BaseException as error:  # sys.exit and pytest.fail are failures too
        at = time.monotonic()
        return Outcome(at, error=_pickled(error), text=_describe(error))


def dumps(value: Any) -> bytes:
    """Pickles a value for a rank or the test; closures and lambdas too if cloudpickle is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return cloudpickle.dumps(value)


def _make_importable(module: str, file: str | None) -> None:
    """Loads a test file that is not importable as a module from its path, under the name that its functions have."""
    if module in sys.modules or file is None:
        return
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(module)
        if found is not None and found.origin == file:
            return
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)  # not cloudpickle, so that the parent gets the class that it can import
        pickle.loads(data)  # many exceptions can be pickled but not unpickled
    except Exception:
        return None
    return data


def _describe(error: BaseException) -> str:
    """Returns the traceback without this file's frames, and the local variables of the frame that raised."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and isinstance(error, AssertionError):
        for name, value in trace.tb_frame.f_locals.items():
            text += f"    {name} = {_short(value)}\n"
    return text


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + "..."
