"""async: ranks that pause, end, crash or stall, and what the other ranks hear of it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import re
import sys
import time

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import spawn
from tests.algorithms.quadratic import Quadratic, step_once
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet, wait_until
from tests.warned import warned


def _pause_and_resume(rank, world_size):
    with process_group(), warned() as messages:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)

        def count():
            return sum(span.kind == "operation" for span in model.bagua.timeline().spans)

        for step in range(5):
            step_once(model, optimizer, rank, step)
        model.bagua.pause()
        model.bagua.pause()
        before = count()
        for step in range(5):
            step_once(model, optimizer, rank, step)
        assert count() == before  # local steps only
        model.bagua.load_state_dict(model.bagua.state_dict())
        model.bagua.resume()
        model.bagua.resume()
        for step in range(5 + 3 * rank):
            step_once(model, optimizer, rank, step)
        model.bagua.pause()
        assert count() > before
        assert messages == []
        model.bagua.resume()
        model.bagua.remove()


def test_pause_and_resume(pool2):
    pool2.run(_pause_and_resume)


def _interval_and_timeout(rank, world_size):
    with process_group(timeout_s=3.0):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InvalidArgument, match=r"sync_interval is 1\.6 s, .* half of the group's timeout, .* 3 s"):
            bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=1.6)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=1.5)


@pytest.mark.timed
def test_an_interval_too_long_for_the_timeout(pool2):
    pool2.run(_interval_and_timeout)


def _early_end(rank, world_size):
    """Rank 2 ends while the others have two rounds to go."""
    with process_group(), warned() as messages:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.3)
        end = time.monotonic() + (0.1 if rank == 2 else 0.7)
        while time.monotonic() < end:
            step_once(model, optimizer, rank, 0)
            time.sleep(0.02)
        model.bagua.remove()
        bagua.barrier()
        return messages


@pytest.mark.timed
def test_a_rank_that_ends_early_is_named_and_ends_no_other(pool4):
    results = pool4.run(_early_end)
    assert results[2] == []
    for rank in (0, 1, 3):
        assert len(results[rank]) == 1, results
        assert "rank 2 of the group 'world' ended the training" in results[rank][0]
        assert "no longer averaged" in results[rank][0]


def _program(rank, world_size, how):
    """Rank 1 ends by an uncaught exception, as a program does; returns the other one's error."""
    bagua.init_process_group(timeout=_LONG_S)
    if how == "own hook":
        sys.excepthook = lambda *of: print("own hook", file=sys.stderr)

    def main():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.05)
        for step in itertools.count():
            if rank == 1 and step == 10:
                raise KeyError("a mistake of the user's")
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            time.sleep(0.01)

    if rank == 0:
        with pytest.raises(bagua.BaguaError) as caught:
            main()
        return caught.value.rank, str(caught.value)
    sys.modules["__main__"].main = main
    assert ctypes.pythonapi.PyRun_SimpleString(b"main()") != 0  # with the interpreter's own way to tell of an exception
    atexit._run_exitfuncs()
    os._exit(1)


@fast_in("how", ["own hook"], ["default hook", "own hook"])
def test_a_crash_is_no_end(how, capfd):
    """One rank raises the other's uncaught exception, long before any deadline."""
    (culprit, message), _ = spawn(_program, 2, args=(how,), timeout=_LONG_S / 2, expect_exit={1: 1})
    assert ("own hook" if how == "own hook" else "a mistake of the user's") in capfd.readouterr().err
    assert culprit == 1 and 'rank 1 failed, and trains no more: KeyError: "a mistake of the user' in message


_LONG_S = 60.0  # a deadline that none of these may need


def _train_until(rank, algorithm, error, messages):
    """Rank 1 raises `error` after some steps, and leaves the group on its way; what the others hear, and when.

    They go on until they have heard of it, by an error or a warning, and after a warning some steps more.
    """
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sync_interval": 0.05} if algorithm == "async" else {}
    bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
    begin = time.monotonic()
    try:
        num_more = 10
        while num_more > 0:
            step_once(model, optimizer, rank, 0)
            time.sleep(0.01)
            num_more -= rank == 1 or bool(messages)
        if error is not None and rank == 1:
            raise error
    except bagua.BaguaError as heard:
        return time.monotonic() - begin, heard.rank, str(heard)
    finally:
        bagua.destroy_process_group()


def _leave_while_an_exception_is_under_way(rank, world_size, algorithm, error):
    bagua.init_process_group(timeout=_LONG_S)
    with warned() as messages, contextlib.suppress(type(error) if error else ()):
        return _train_until(rank, algorithm, error, messages), messages
    return None, messages


@pytest.mark.timed
@pytest.mark.parametrize(
    ("algorithm", "error", "told"),
    [
        ("async", KeyError("mine"), "rank 1 failed, and trains no more: KeyError: 'mine'; see its log"),
        ("async", SystemExit(3), "rank 1 failed, and trains no more: SystemExit: 3; see its log"),
        ("local_sgd", KeyError("mine"), "rank 1 left the group 'world'"),
    ],
    ids=["async", "async exits", "local_sgd"],
)
def test_a_failed_rank_that_destroys_its_group_is_no_end(pool4, algorithm, error, told):
    results = pool4.run(_leave_while_an_exception_is_under_way, args=(algorithm, error))
    for rank in (0, 2, 3):
        after_s, culprit, message = results[rank][0]
        assert (culprit, told in message) == (1, True), results
        assert after_s < _LONG_S / 4


@pytest.mark.timed
@pytest.mark.parametrize("error", [None, SystemExit(0), StopIteration()], ids=repr)
def test_an_end_that_python_tells_by_an_exception_is_an_end(pool2, error):
    (outcome, messages), _ = pool2.run(_leave_while_an_exception_is_under_way, args=("async", error))
    assert outcome is None and len(messages) == 1 and "rank 1 of the group 'world' ended" in messages[0]


def _second_attempt(rank, world_size):
    """Training that begins and ends while an exception is handled, as one with smaller batches may."""
    try:
        raise MemoryError("of the first attempt")
    except MemoryError:
        bagua.init_process_group(timeout=_LONG_S)
        with warned() as messages:
            return _train_until(rank, "async", None, messages), messages


@pytest.mark.timed
def test_the_end_of_a_second_attempt_is_an_end(pool2):
    (outcome, messages), _ = pool2.run(_second_attempt)
    assert outcome is None and len(messages) == 1 and "rank 1 of the group 'world' ended" in messages[0]


def _rank_of_multiprocessing(rank, path, how, connection):
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent used
    store = torch.distributed.FileStore(path, 2)
    bagua.init_process_group(store=store, rank=rank, world_size=2, timeout=_LONG_S)
    model = Quadratic()
    model.itself = [model]  # stays in memory until the process ends
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.05)
    try:
        with warned() as messages:
            num_more = 10
            while num_more > 0:
                step_once(model, optimizer, rank, 0)
                time.sleep(0.01)
                num_more -= rank == 1 or bool(messages)
    except bagua.BaguaError as heard:
        connection.send((heard.rank, str(heard)))
    else:
        if rank == 0:
            connection.send((1, messages[0]))
        elif how == "raises":
            raise KeyError("mine")


def _starts_processes(rank, world_size, path, how):
    """Returns the error or warning that the first of two processes gets of the other."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    processes = [context.Process(target=_rank_of_multiprocessing, args=(i, path, how, sender)) for i in range(2)]
    for process in processes:
        process.start()
    try:
        assert receiver.poll(_LONG_S)
        return receiver.recv()
    finally:
        for process in processes:
            process.join(10)
            process.kill()


@fast_in("how", ["raises"], ["returns"])
def test_processes_of_multiprocessing_say_how_they_end(tmp_path, how):
    (heard,) = spawn(_starts_processes, 1, args=(str(tmp_path / "store"), how), timeout=_LONG_S)
    told = (
        "rank 1 of the group 'world' ended"
        if how == "returns"
        else "rank 1 failed, and trains no more: KeyError: 'mine'"
    )
    assert heard[0] == 1 and told in heard[1]


def _group_of_the_rounds():
    (group,) = bagua.get_default_group().subgroups
    return group


_STALLED_S = 0.5  # a warning comes after half of the timeout


def _an_optimizer_that_does_not_step(rank, world_size):
    with process_group(), warned() as messages:
        model = torch.nn.ModuleList([Quadratic(), Quadratic()])
        model.forward = lambda c: model[0](c) + model[1](c)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        bagua.with_bagua(model, optimizers, algorithm="async", sync_interval=0.0)
        _group_of_the_rounds().set_timeout(2 * _STALLED_S)
        while not messages:
            model(torch.ones(model[0].numel)).backward()
            optimizers[0].step()
            time.sleep(0.03)
        model.bagua.pause()
        return messages


@pytest.mark.timed
def test_an_optimizer_that_does_not_step_is_named(pool2):
    for rank, messages in enumerate(pool2.run(_an_optimizer_that_does_not_step)):
        assert len(messages) == 1, messages
        waited = re.search(rf"rank {rank} has waited ([\d.]+) s for a step of optimizers\[1\];", messages[0])
        assert waited and float(waited[1]) >= _STALLED_S, messages


def _peer_that_does_not_come(rank, world_size):
    with process_group(), warned() as messages:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
        step_once(model, optimizer, rank, 0)
        meet()
        _group_of_the_rounds().set_timeout(0.5)
        if rank == 0:
            model.bagua.remove()
        meet()
        return messages


@pytest.mark.timed
def test_an_end_that_fails_is_told():
    """The last averages are not taken: whoever leaves says so, and because of whom."""
    messages = spawn(_peer_that_does_not_come, 2)[0]
    assert any("the last averages of weights" in text and "rank 1" in text for text in messages), messages


def _remove(rank, world_size):
    """After four models there are as many threads as after the first."""
    with process_group():
        counts = []
        for _ in range(4):
            model = Quadratic()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
            for step in range(3):
                step_once(model, optimizer, rank, step)
            model.bagua.remove()
            counts.append(_num_threads())
        wait_until(lambda: _num_threads() <= counts[0], f"as few threads as after the first model, of {counts}")
        assert bagua.get_default_group().subgroups == {}


def _num_threads():
    """One that was joined may still count for a moment, until the kernel has taken it away."""
    return len(os.listdir("/proc/self/task"))


def test_remove_leaves_nothing_open(pool2):
    pool2.run(_remove)
