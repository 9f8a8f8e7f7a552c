"""A command that takes long says what it does: one line, and nothing where it takes little."""

import io
import sys
import threading

import pytest

from bagua.cli.progress import Progress
from tests.meeting import wait_until


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal], ids=["pipe", "terminal"])
def test_what_takes_little_time_is_silent(kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", kind())
    with Progress("bagua doctor", silent_s=60) as progress:
        progress.tell("looking at this host")
    assert sys.stderr.getvalue() == ""
    assert "bagua-progress" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("kind", [io.StringIO, Terminal], ids=["pipe", "terminal"])
def test_what_takes_long_is_told(kind, monkeypatch):
    stderr = kind()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress("bagua doctor", silent_s=0) as progress:
        for text in ("ranks 0 and 1", "ranks 0 and 2"):
            progress.tell(text)
            wait_until(lambda text=text: text in stderr.getvalue(), text)
    if kind is Terminal:
        lines = stderr.getvalue().split("\r\x1b[K")
        assert lines[1].startswith("bagua doctor: ranks 0 and 1 ... 0 s") and lines[-1] == ""  # removed at the end
        assert "\n" not in stderr.getvalue()
    else:
        assert stderr.getvalue() == "bagua doctor: ranks 0 and 1 ...\nbagua doctor: ranks 0 and 2 ...\n"


def test_two_seconds_are_not_long():
    assert Progress("bagua")._silent_s == 2
