"""One rank of `bagua run`: runs the training script as Python would, and says once, with the rank, what it raised.

Python runs this file by its path, so that nothing of bagua or torch is imported before the script imports it. What a
script raises is shown in lines that begin with the rank. An error of bagua that names another rank, or what was raised
from it, is shown in one line: that rank's own traceback is the one that matters. What was raised is also written where
torch's agent looks for it (TORCHELASTIC_ERROR_FILE), as torch's `record` does, and from there the launcher takes it for
its last line.
"""

from __future__ import annotations

import _thread
import builtins
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import traceback
import types

# The main thread waits so long before it tells of another rank's failure: in most cases the agent ends it meanwhile.
_FOLLOWS_S = 0.3
_NAMING_ANOTHER_RANK = ("TransportError", "DeadlineExceeded", "RemoteError", "Aborted")


def _new_main() -> dict[str, object]:
    """The namespace of a new module __main__; this file's stays with this file's functions."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if "__annotations__" in globals():  # as in the one that Python has made
        main.__annotations__ = {}
    return main.__dict__


def _run_script(path: str) -> None:
    """Runs a file as `python path` does."""
    namespace = _new_main()
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        sys.path[0] = path
        runpy._run_module_as_main("__main__", alter_argv=False)
        return
    path = os.path.join(os.getcwd(), path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as file:
        code = pkgutil.read_code(file)  # of a .pyc
    if code is None:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    namespace.update(__file__=path, __cached__=None, __loader__=loader, __package__=None)
    exec(code, namespace)


def _run_module(name: str) -> None:
    """Runs a module as `python -m name` does."""
    _new_main()
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    runpy._run_module_as_main(name)


def _without_own_frames(error: BaseException) -> BaseException:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as failure:  # of a __str__ of the program's
        text = f"<its str() raised {type(failure).__name__}>"
    return f"{type(error).__name__}: {text}"


def _names_another_rank(error: BaseException, rank: str) -> bool:
    """Returns True for an error of bagua's that reports another rank's failure."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    if not any(("bagua.errors", name) in kinds for name in _NAMING_ANOTHER_RANK):
        return False
    at_fault = getattr(error, "rank", None)
    return at_fault is not None and str(at_fault) != rank


def _carried(error: BaseException, rank: str) -> tuple[int, str] | None:
    """(the other rank that bagua's error names, its text) where C++, as in torch's DDP, has raised anew what a future
    has failed with: as a RuntimeError that has the text and no cause."""
    futures = sys.modules.get("bagua.torch_backend.futures")
    if futures is None or not isinstance(error, RuntimeError):
        return None
    said = _message(error)
    for text, at_fault in tuple(getattr(futures, "carried", ())):
        if text in said and text.partition(":")[0] in _NAMING_ANOTHER_RANK and str(at_fault) != rank:
            return at_fault, text
    return None


def _followed(error: BaseException, rank: str) -> tuple[int, str] | None:
    """(the other rank whose failure has caused `error`, what to say in a line); None if it is this rank's own.

    The error of bagua's that names the other rank may be what `error` was raised from, or while it was handled. The
    line is empty where the traceback has more to say: what was raised in the handling, or before the error.
    """
    texts: list[str] = []
    is_all = True
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        carried = _carried(one, rank)
        if carried is not None:
            at_fault, text = carried
            return at_fault, ", from ".join([*texts, text]) if is_all else ""
        is_raised_from = one.__cause__ is not None
        texts.append(_message(one))
        if _names_another_rank(one, rank):
            is_alone = is_raised_from or one.__suppress_context__ or one.__context__ is None
            return one.rank, ", from ".join(texts) if is_all and is_alone else ""
        is_all = is_all and is_raised_from
        one = one.__cause__ if is_raised_from else one.__context__
    return None


def _write_down(error: BaseException, followed: tuple[int, str] | None) -> None:
    """Writes the format of torch's ErrorHandler.record_exception, with a finer time and what this rank knows of it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now_s = time.time()
    details = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(now_s)),
        "time_s": now_s,
        "names_another_rank": followed is not None,
        "rank_at_fault": None if followed is None else int(followed[0]),
    }
    message = (followed and followed[1]) or _message(error)
    unfinished = f"{path}.{os.getpid()}"
    try:
        # The launcher may end this rank at any point, and cannot go on from a part of the file.
        with open(unfinished, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": details}}, file)
        os.replace(unfinished, path)
    except OSError:  # the traceback on stderr has it all
        pass


def _tell(error: BaseException, rank: str, followed: tuple[int, str] | None) -> None:
    hook = sys.excepthook
    # torch.distributed sets one that puts the rank in front, as is done here.
    if hook is not sys.__excepthook__ and not str(getattr(hook, "__module__", "")).startswith("torch."):
        hook(type(error), error, error.__traceback__)
        return
    line = ""
    if followed is not None:
        time.sleep(_FOLLOWS_S)
        line = followed[1]
    if line:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {frames[0].filename}:{frames[0].lineno}" if frames else ""
        kind, _, rest = line.partition(":")
        text = f"{kind}{where}:{rest}"
    else:
        text = "".join(traceback.format_exception(error))
    text = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
    sys.stderr.write(text)  # in one piece: others write there too
    sys.stderr.flush()


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """The hook for what Python drops. An interrupt that came in a finaliser or a callback of a weak reference (which
    each import has) is not to be lost: the launcher sends one, and kills a rank that still runs half a minute later."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    # From another thread, so that it comes after this function, whose exceptions are dropped too; and a signal, so that
    # it ends a system call in which the main thread is by then. A handler of the program's own hears of it twice.
    _thread.start_new_thread(signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))


def _write_whole_lines() -> None:
    """Flushes output at the end of a line, as a terminal does. `python -u` writes each argument of print, and
    the end of the line, by itself, and what another rank writes into the same pipe comes in between."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not closed, and none of the site's own
            stream.reconfigure(line_buffering=True, write_through=False)


def main() -> None:
    sys.unraisablehook = _interrupt_again
    _write_whole_lines()
    try:
        is_module = sys.argv[1] == "-m"
        del sys.argv[: 2 if is_module else 1]
        (_run_module if is_module else _run_script)(sys.argv[0])
    except SystemExit:
        raise
    except BaseException as error:
        try:
            _without_own_frames(error)
            if isinstance(error, KeyboardInterrupt):
                raise
            rank = os.environ.get("RANK", "?")
            followed = _followed(error, rank)
            _write_down(error, followed)
            _tell(error, rank, followed)
            sys.exit(1)
        except KeyboardInterrupt:
            # The launcher tells it. Python ends as it does after each one: by what is registered with atexit, and then
            # by the signal itself.
            sys.excepthook = lambda *_: None
            raise
    finally:
        if sys.unraisablehook is _interrupt_again:  # from here on the process ends anyway
            sys.unraisablehook = sys.__unraisablehook__


if __name__ == "__main__":
    main()
