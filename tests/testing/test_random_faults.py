"""bagua.testing.random_faults: its random cases, and its verdicts."""

import dataclasses
import signal

import pytest

import bagua
from bagua.replay import hosts
from bagua.testing import RankDied
from bagua.testing.failures import Failure
from bagua.testing.faulty_program import SLEEP_S, Case, Fault, Report, WrongNumbers
from bagua.testing.random_faults import KINDS, LIMIT_S, TRANSPORTS, draw, judge, main

COUNT = 300


def test_a_case_is_drawn_from_its_seed_and_index_alone():
    assert [draw(7, index) for index in (3, 1)] == [draw(7, index) for index in (1, 3)][::-1]
    assert len({str(draw(seed, 3)) for seed in range(10)}) > 5


def test_300_cases_have_everything():
    cases = [draw(0, index) for index in range(COUNT)]
    assert {case.size for case in cases} == {2, 3, 4}
    assert {case.transport for case in cases} == set(TRANSPORTS)
    assert {case.algorithm for case in cases} == {"", *bagua.algorithms.available()}
    assert {len(case.faults) for case in cases} == {1, 2}
    faults = [fault for case in cases for fault in case.faults]
    for is_training in (False, True):
        assert {fault.kind for fault in faults if fault.phase.startswith("step") == is_training} == set(KINDS)
    assert {fault.phase for fault in faults} >= {"init", "wrap", "step 0", "step 5"}
    assert {fault.where for fault in faults} == {"before", "in", "backward"}
    for case in cases:
        assert len({fault.rank for fault in case.faults}) == len(case.faults) < case.size
        for fault in case.faults:
            assert fault.rank < case.size and (fault.kind != "cut" or case.transport == "namespaces"), case
            assert case.algorithm or (fault.phase != "wrap" and fault.where != "backward"), case


# ---- verdicts; every fault strikes at 100 s

AT = 100.0


def case_of(kind, size=3, num_faulty=1):
    faults = tuple(Fault(size - 1 - i, kind, "before", "step 0", 0.0) for i in range(num_faulty))
    return Case(0, 0, size, "namespaces", "bytegrad", faults)


def seen(named, after_s=1.0, error="RemoteError", digests=()):
    return Report(error, named, "message", AT + after_s, AT + after_s, list(digests))


def words_for(case, *ends):
    struck = {fault.rank: AT for fault in case.faults}
    ends = {rank: end for rank, end in enumerate(ends) if end is not None}
    return judge(case, struck, AT + 3, ends, "stacks").words


KILLED = Failure(AT, 2, RankDied(2, -signal.SIGKILL), None)


def test_a_fault_that_all_others_name_is_ok():
    assert words_for(case_of("kill"), seen(2), seen(2), KILLED) == "ok"
    assert words_for(case_of("raise"), seen(2), seen(2), seen(None, 0, "InjectedFault")) == "ok"
    assert words_for(case_of("stop"), seen(2), seen(2), seen(None, 4)) == "ok"
    assert words_for(case_of("sleep"), seen(2), seen(2), seen(2, SLEEP_S + LIMIT_S - 1)) == "ok"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "hang"),
        (seen(1), "innocent named"),
        (seen(None), "no rank named"),
        (seen(2, LIMIT_S + 1), "late"),
        (seen(None, error=""), "unnoticed"),
        (Failure(AT, 0, RankDied(0, -signal.SIGSEGV), None), "died"),
        (Failure(AT, 0, KeyError("k"), "traceback"), "another error"),
        (Failure(AT, 0, WrongNumbers("off by 1"), "traceback"), "wrong numbers"),
    ],
)
def test_what_is_bad(end, words):
    assert words_for(case_of("kill"), end, seen(2), KILLED) == words


def test_a_case_without_a_fault_is_bad():
    well = {rank: seen(None, error="") for rank in range(3)}
    assert judge(case_of("kill"), {}, AT, well, "").words == "no fault"


def test_weights_that_differ_are_wrong_numbers():
    ends = [seen(2, digests=["a", "b"]), seen(2, digests=["a"]), KILLED]
    assert words_for(case_of("kill"), *ends) == "ok"
    ends[1] = seen(2, digests=["a", "c"])
    assert words_for(case_of("kill"), *ends) == "wrong numbers"


def test_a_resumed_rank_must_not_hang():
    for kind in ("stop", "sleep"):
        assert words_for(case_of(kind), seen(2), seen(2), None) == "hang"


def test_who_is_named_where_a_link_is_cut():
    assert words_for(case_of("cut"), seen(2), seen(2), seen(None)) == "ok"
    assert words_for(case_of("cut"), seen(None), seen(2), seen(2)) == "no rank named"
    assert words_for(case_of("cut", size=2), seen(None), seen(None)) == "ok"
    assert words_for(case_of("cut", size=2), seen(0), seen(None)) == "innocent named"
    # Two of three are cut off: to the third it looks as if it were the one.
    alone = case_of("cut", num_faulty=2)
    assert words_for(alone, seen(0), seen(1), seen(None)) == "ok"
    assert words_for(dataclasses.replace(alone, size=4), seen(0), seen(1), seen(2), seen(1)) == "innocent named"
    # Two of four: to the others these two may be together.
    half = case_of("cut", size=4, num_faulty=2)
    assert words_for(half, seen(None), seen(None), seen(2), seen(3)) == "ok"
    assert words_for(half, seen(0), seen(None), seen(2), seen(3)) == "innocent named"
    assert words_for(case_of("cut", size=4), seen(None), seen(3), seen(3), seen(3)) == "no rank named"


def test_options_that_make_no_sense(capsys):
    with pytest.raises(SystemExit):
        main(["--count", "0"])
    assert "--count is 0; expected 1 or more" in capsys.readouterr().err


@pytest.mark.timed
@pytest.mark.slow("test_what_is_bad")
def test_ten_cases(capsys):
    status = main(["--count", "10"])
    output = capsys.readouterr().out
    assert status == 0 and len([line for line in output.splitlines() if line.startswith("seed 0  case")]) == 10, output
    assert (" skipped: " in output) == (hosts.why_not() is not None)
