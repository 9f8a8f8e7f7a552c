"""Files that replace others: a disk that is full leaves the one that was there."""

import contextlib
import os
import resource
from pathlib import Path

import pytest

from bagua.errors import InvalidArgument
from bagua.profiler import chrome_trace
from bagua.replay import profiles
from bagua.replay.profiles import Profile


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond 100 bytes, as on a disk that has no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trace(num_events):
    return {"traceEvents": [{"name": f"event {index}"} for index in range(num_events)], "otherData": {}}


def test_a_trace_that_does_not_fit_leaves_the_last_one(tmp_path):
    path = tmp_path / "rank0.json"
    chrome_trace.write(path, trace(1))
    good = path.read_bytes()
    with full_disk(), pytest.raises(InvalidArgument, match="cannot be written"):
        chrome_trace.write(path, trace(100))
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_that_does_not_fit_leaves_the_last_one(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text("good")
    profile = Profile.load(next((Path(profiles.__file__).parent / "models").glob("*.json")))
    with full_disk(), pytest.raises(OSError, match="File too large"):
        profile.save(path)
    assert path.read_text() == "good"


def test_a_trace_is_written_through_a_link_and_into_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    chrome_trace.write(tmp_path / "link", trace(1))
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        chrome_trace.write(tmp_path / "pipe", trace(1))
        assert os.read(reader, 10_000) == (tmp_path / "file").read_bytes()
    finally:
        os.close(reader)
