"""bagua.testing.spawn and Pool: values, environment, first causes, deadlines, and no process left."""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

from bagua.testing import (
    Pool,
    RankDied,
    RankError,
    RankTraceback,
    WorldTimeout,
    free_port,
    kill,
    spawn,
    spawner,
    stop,
)
from tests.meeting import meet, wait_until

NODE_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


class CannotTravel(Exception):
    def __init__(self, left, right):
        super().__init__(f"{left} != {right}")


def rank_of(rank, world_size):
    return rank


def read_environment(rank, world_size, names):
    return [os.environ.get(name) for name in names]


def all_reduce_with_gloo(rank, world_size):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.arange(4.0) * world_size + rank
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x


def sleep_in_a_named_function(seconds):
    time.sleep(seconds)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(pids):
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "all ranks gone")


def test_values_come_back_by_rank():
    assert spawn(rank_of, 3) == [0, 1, 2]


def test_arguments_closures_and_tensors_travel():
    offset = torch.tensor([10.0, 20.0])
    results = spawn(lambda rank, world_size, x: x * rank + offset, 2, args=(torch.ones(2),))
    torch.testing.assert_close(results, [offset, offset + 1])


def test_ranks_are_fresh_processes():
    pids = spawn(lambda rank, world_size: os.getpid(), 2)
    assert len({*pids, os.getpid()}) == 3
    assert_gone(pids)


def test_environment_is_torchruns():
    values = spawn(read_environment, 4, args=(NODE_VARIABLES,), nodes=2)
    assert values == [
        ["0", "4", "0", "2", "0", "2"],
        ["1", "4", "1", "2", "0", "2"],
        ["2", "4", "0", "2", "1", "2"],
        ["3", "4", "1", "2", "1", "2"],
    ]


def test_nodes_may_have_unequal_sizes():
    values = spawn(read_environment, 3, args=(NODE_VARIABLES,), nodes=[1, 2])
    assert [value[2:5] for value in values] == [["0", "1", "0"], ["0", "2", "1"], ["1", "2", "1"]]


@pytest.mark.parametrize("nodes", [2, [3, 0]])
def test_impossible_nodes_are_refused(nodes):
    with pytest.raises(ValueError, match="nodes is"):
        spawn(rank_of, 3, nodes=nodes)


def test_env_adds_and_removes(monkeypatch):
    monkeypatch.setenv("BAGUA_TEST_INHERITED", "from the test")
    names = ("BAGUA_TEST_INHERITED", "BAGUA_TEST_ADDED", "MASTER_ADDR")
    values = spawn(read_environment, 1, args=(names,), env={"BAGUA_TEST_ADDED": "1", "MASTER_ADDR": None})
    assert values == [["from the test", "1", None]]


def test_torch_distributed_starts_from_the_environment():
    results = spawn(all_reduce_with_gloo, 2)
    torch.testing.assert_close(results, [torch.tensor([1.0, 5.0, 9.0, 13.0])] * 2)


def test_rank_0_can_hold_the_store_itself():
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    assert len(spawn(all_reduce_with_gloo, 2, env=env)) == 2


@pytest.mark.timed
def test_first_failure_is_raised_with_its_own_traceback():
    def fail(rank, world_size):
        meet()
        if rank == 1:
            raise KeyError("the cause")
        time.sleep(0.2)
        raise ValueError("what the other saw of it")

    with pytest.raises(KeyError, match="the cause") as caught:
        spawn(fail, 2)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert "rank 1 of 2" in str(cause)
    assert "in fail" in str(cause)
    assert "rank 0: ValueError: what the other saw of it" in str(cause)


def test_a_failed_assertion_shows_its_values():
    def fail(rank, world_size):
        seed = 1234
        assert rank == seed

    with pytest.raises(AssertionError) as caught:
        spawn(fail, 1)
    assert "seed = 1234" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_pickled_keeps_its_text():
    def fail(rank, world_size):
        raise CannotTravel(1, 2)

    with pytest.raises(RankError, match=r"rank 0: .*CannotTravel: 1 != 2"):
        spawn(fail, 1)


def test_a_value_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(TypeError, match="lock"):
        spawn(lambda rank, world_size: threading.Lock(), 1)


@pytest.mark.timed
def test_others_that_hang_after_a_failure_are_shown(monkeypatch):
    monkeypatch.setattr("bagua.testing.ranks._GRACE_S", 0.2)

    def fail(rank, world_size):
        if rank == 0:
            raise KeyError("the cause")
        sleep_in_a_named_function(60)

    begin = time.monotonic()
    with pytest.raises(KeyError) as caught:
        spawn(fail, 2)
    assert time.monotonic() - begin < 30  # half of what it sleeps
    assert "sleep_in_a_named_function" in str(caught.value.__cause__)


@pytest.mark.timed
def test_the_deadline_shows_every_stack_and_ends_every_process():
    def hang(rank, world_size):
        if rank != 1:
            thread = threading.Thread(target=sleep_in_a_named_function, args=(60,), daemon=True)
            thread.start()
            thread.join()

    with Pool(3) as pool:
        pool.run(rank_of)
        run = pool.start(hang, timeout=0.5)
        begin = time.monotonic()
        with pytest.raises(WorldTimeout, match=r"ranks \[0, 2\] of 3 had not finished after 0.5 s") as caught:
            run.result()
        assert time.monotonic() - begin < 30  # half of what they sleep
        assert_gone(run.pids)
    text = str(caught.value)
    assert text.count("in sleep_in_a_named_function") == 2
    assert text.count("in join") == 2
    assert "ranks [1] had" in text


@pytest.mark.timed
def test_the_deadline_holds_for_a_stopped_rank(monkeypatch):
    monkeypatch.setattr("bagua.testing.rank_process._DUMP_LIMIT_S", 0.2)
    with pytest.raises(WorldTimeout, match="rank 0 .*\n.*SIGSTOP"):
        spawn(lambda rank, world_size: stop(), 1, timeout=0.5)


@pytest.mark.timed
def test_the_deadline_holds_while_a_rank_keeps_the_gil():
    def hold(rank, world_size):
        ctypes.PyDLL(None).sleep(60)

    with pytest.raises(WorldTimeout, match="in hold"):
        spawn(hold, 1, timeout=0.5)


@pytest.mark.timed
def test_a_killed_rank_is_named_and_comes_before_what_others_saw():
    def die(rank, world_size):
        if rank == 1:
            time.sleep(0.2)
            kill()
        raise ConnectionError("peer has exited")

    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL") as caught:
        spawn(die, 2)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    assert "ConnectionError: peer has exited" in str(caught.value.__cause__)


def test_a_crash_shows_where():
    def crash_in_a_named_function(rank, world_size):
        ctypes.string_at(8)

    with pytest.raises(RankDied, match=r"SIGSEGV(.|\n)*crash_in_a_named_function"):
        spawn(crash_in_a_named_function, 1)


def test_a_crash_after_the_last_function_is_seen():
    def crash_later(rank, world_size):
        import atexit

        atexit.register(os._exit, 7)

    with pytest.raises(RankDied, match="exit code 7: while the interpreter was shutting down"):
        spawn(crash_later, 1)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        pytest.param(kill, signal.SIGKILL, id="killed", marks=pytest.mark.slow("test_two_deaths_at_once")),
        pytest.param(stop, signal.SIGSTOP, id="stopped", marks=pytest.mark.slow("test_a_stopped_rank")),
        pytest.param(lambda: os._exit(9), 9, id="exit 9"),  # an exit, not the signal
    ],
)
def test_an_expected_end_leaves_the_others_results(end, expected):
    def run(rank, world_size):
        if rank == 1:
            end()
        return rank

    assert spawn(run, 3, expect_exit={1: expected}) == [0, None, 2]


@pytest.mark.parametrize("expected", [signal.SIGKILL, 3])
def test_another_end_than_expected_is_a_failure(expected):
    with pytest.raises(RankDied, match=r"exit code 9: expected exit"):
        spawn(lambda rank, world_size: os._exit(9), 1, expect_exit={0: expected})


def test_returning_instead_of_dying_is_a_failure():
    with pytest.raises(AssertionError, match="rank 0 returned, but was expected to end by"):
        spawn(rank_of, 1, expect_exit={0: signal.SIGKILL})


def test_expect_exit_of_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="expect_exit names rank 2, expected one of 0..1"):
        spawn(rank_of, 2, expect_exit={2: signal.SIGKILL})


def test_the_address_of_one_rank_is_not_that_of_another():
    addresses = spawn(lambda rank, world_size: torch.empty(1 << 20).data_ptr(), 4)
    assert len(set(addresses)) == 4


def test_output_of_ranks_is_output_of_the_test(capfd):
    def shout(rank, world_size):
        print(f"rank {rank} says hello\n", end="")  # one write: the ranks share the file

    spawn(shout, 2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 says hello", "rank 1 says hello"]


def test_pool_keeps_its_processes_and_their_modules():
    with Pool(2) as pool:
        first = pool.run(lambda rank, world_size: setattr(torch, "bagua_test_mark", rank) or os.getpid())
        second = pool.run(lambda rank, world_size: (torch.bagua_test_mark, os.getpid()))
        assert second == list(enumerate(first))
        assert pool.pids == first
    assert_gone(first)


def test_pool_gives_every_run_its_own_environment_and_store():
    names = ("BAGUA_TEST_RUN", "MASTER_PORT")
    with Pool(2) as pool:
        first = pool.run(read_environment, args=(names,), env={"BAGUA_TEST_RUN": "a"})
        second = pool.run(read_environment, args=(names,))
        assert [value[0] for value in first + second] == ["a", "a", None, None]
        assert first[0][1] != second[0][1]
        for _ in range(3):
            pool.run(all_reduce_with_gloo)


def test_pool_starts_again_after_a_failure():
    def fail(rank, world_size):
        raise KeyError("first")

    with Pool(2) as pool:
        before = pool.run(lambda rank, world_size: os.getpid())
        with pytest.raises(KeyError):
            pool.run(fail)
        assert pool.pids == []
        assert_gone(before)
        assert pool.run(rank_of) == [0, 1]
        assert not set(before) & set(pool.pids)


def test_pool_reports_a_rank_that_died_between_runs():
    with Pool(2) as pool:
        pool.run(rank_of)
        kill(pool.pids[1])
        assert_gone([pool.pids[1]])
        with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL: between two functions"):
            pool.run(rank_of)
        assert pool.run(rank_of) == [0, 1]


def test_a_test_can_act_on_a_running_world():
    with Pool(2) as pool:
        run = pool.start(lambda rank, world_size: time.sleep(30 if rank == 1 else 0.2), expect_exit={1: signal.SIGKILL})
        kill(run.pids[1])
        assert run.result() == [None, None]


def test_nothing_is_left_when_the_test_process_is_killed(tmp_path):
    def test_process(rank, world_size):
        spawner.PRELOADED = ()
        pool = Pool(2)
        (tmp_path / "pids").write_text(" ".join(map(str, pool.run(lambda rank, world_size: os.getpid()))))
        pool.start(lambda rank, world_size: time.sleep(60))
        kill()

    spawn(test_process, 1, expect_exit={0: signal.SIGKILL})
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert_gone(pids)
