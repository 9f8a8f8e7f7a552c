"""async: ranks that pause, end, crash or stall, and what the other ranks hear of it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once
from tests.communication.worlds import fast_in
from tests.conformance.training import process_group

pytestmark = pytest.mark.timed


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Those of the log "bagua" in the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("bagua")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _pause_and_resume(rank, world_size):
    with process_group(), _warnings() as messages:
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


def test_an_interval_too_long_for_the_timeout(pool2):
    pool2.run(_interval_and_timeout)


def _early_end(rank, world_size):
    """Rank 2 ends while the others have two rounds to go."""
    with process_group(timeout_s=2.0), _warnings() as messages:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.6)
        end = time.monotonic() + (0.15 if rank == 2 else 1.35)
        while time.monotonic() < end:
            step_once(model, optimizer, rank, 0)
            time.sleep(0.02)
        model.bagua.remove()
        bagua.barrier()
        return messages


def test_a_rank_that_ends_early_is_named_and_hurts_nobody(pool4):
    results = pool4.run(_early_end)
    assert results[2] == []
    for rank in (0, 1, 3):
        assert len(results[rank]) == 1, results
        assert "rank 2 of the group 'world' ended the training" in results[rank][0]
        assert "no longer averaged" in results[rank][0]


_PROGRAM = """
    import sys, time
    import torch
    import bagua
    store, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    bagua.init_process_group(store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2, timeout=30)
    if how == "own hook":
        sys.excepthook = lambda *of: print("own hook", file=sys.stderr)

    def main():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.05)
        for step in range(1000):
            if rank == 1 and step == 10:
                print(time.monotonic(), flush=True)
                raise KeyError("a mistake of the user's")
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            try:
                optimizer.step()
            except bagua.BaguaError as error:
                print(time.monotonic(), error.rank, error)
                return
            time.sleep(0.01)

    main()
"""


@fast_in("how", ["own hook"], ["default hook", "own hook"])
def test_a_crash_is_no_end(how, tmp_path):
    """Two programs; one hears of the other's exception that nobody catches, long before any deadline."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(tmp_path / "store")]
    programs = [
        subprocess.Popen(
            [*command, str(rank), how], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [program.communicate(timeout=100) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 1], outputs
    assert ("own hook" if how == "own hook" else "a mistake of the user's") in outputs[1][1]
    crashed_at = float(outputs[1][0])
    heard_at, culprit, message = outputs[0][0].split(maxsplit=2)
    assert culprit == "1" and 'rank 1 failed, and trains no more: KeyError: "a mistake of the user' in message
    assert float(heard_at) - crashed_at < 5


_LONG_S = 60.0  # a deadline that none of these may need


def _train_until(rank, algorithm, error):
    """Rank 1 raises `error` after some steps, and leaves the group on its way; what the others hear, and when."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sync_interval": 0.05} if algorithm == "async" else {}
    bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
    begin = time.monotonic()
    try:
        for step in range(10 if rank == 1 else 40):
            step_once(model, optimizer, rank, step)
            time.sleep(0.01)
        if error is not None and rank == 1:
            raise error
    except bagua.BaguaError as heard:
        return time.monotonic() - begin, heard.rank, str(heard)
    finally:
        bagua.destroy_process_group()


def _leave_while_an_exception_is_under_way(rank, world_size, algorithm, error):
    bagua.init_process_group(timeout=_LONG_S)
    with _warnings() as messages, contextlib.suppress(type(error) if error else ()):
        return _train_until(rank, algorithm, error), messages
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
        with _warnings() as messages:
            return _train_until(rank, "async", None), messages


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
        for step in range(10 if rank == 1 else 40):
            step_once(model, optimizer, rank, step)
            time.sleep(0.01)
    except bagua.BaguaError as heard:
        connection.send((heard.rank, str(heard)))
    else:
        if rank == 0:
            connection.send(None)
        elif how == "raises":
            raise KeyError("mine")


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_processes_of_multiprocessing_say_how_they_end(tmp_path, how):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    arguments = str(tmp_path / "store"), how, sender
    processes = [context.Process(target=_rank_of_multiprocessing, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert receiver.poll(_LONG_S)
        heard = receiver.recv()
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    if how == "returns":
        assert heard is None
    else:
        assert heard[0] == 1 and "rank 1 failed, and trains no more: KeyError: 'mine'" in heard[1]


def _an_optimizer_that_does_not_step(rank, world_size):
    with process_group(timeout_s=2.0), _warnings() as messages:
        model = torch.nn.ModuleList([Quadratic(), Quadratic()])
        model.forward = lambda c: model[0](c) + model[1](c)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        bagua.with_bagua(model, optimizers, algorithm="async", sync_interval=0.0)
        for _ in range(60):
            model(torch.ones(model[0].numel)).backward()
            optimizers[0].step()
            time.sleep(0.03)
        model.bagua.pause()
        return messages


def test_an_optimizer_that_does_not_step_is_named(pool2):
    for rank, messages in enumerate(pool2.run(_an_optimizer_that_does_not_step)):
        assert len(messages) == 1, messages
        assert f"rank {rank} has waited 1" in messages[0] and "for a step of optimizers[1];" in messages[0]


def _peer_that_does_not_come(rank, world_size):
    with process_group(timeout_s=1.0), _warnings() as messages:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
        step_once(model, optimizer, rank, 0)
        if rank == 1:
            time.sleep(2)
            return None
        model.bagua.remove()
        return messages


def test_an_end_that_fails_is_told():
    """The last averages are not taken: whoever leaves says so, and because of whom."""
    from bagua.testing import spawn

    messages = spawn(_peer_that_does_not_come, 2)[0]
    assert any("the last averages of weights" in text and "rank 1" in text for text in messages), messages


def _remove(rank, world_size):
    """Threads after each of some models."""
    with process_group():
        counts = []
        for _ in range(4):
            model = Quadratic()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)
            for step in range(3):
                step_once(model, optimizer, rank, step)
            model.bagua.remove()
            counts.append(len(os.listdir("/proc/self/task")))
        assert bagua.get_default_group().subgroups == {}
        return counts


def test_remove_leaves_nothing_open(pool2):
    for counts in pool2.run(_remove):
        assert counts[0] >= counts[-1], counts
