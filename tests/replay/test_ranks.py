"""Ranks as processes of any command: their results, the failed one with its output, and that no process is left."""

import os
import sys

import pytest

from bagua.replay import ranks as module
from bagua.replay.ranks import Ranks, RanksFailed, answer

REPORT = """\
import json, os, sys
folder, options = sys.argv[1:]
value = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MINE")]
open(f"{folder}/rank{value[0]}.json", "w").write(json.dumps([*value, json.loads(options)]))
"""
FAIL = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no memory left'); time.sleep(60)"
SLEEP = "import time; time.sleep(60)"


def ranks_of(program, world_size=2):
    return Ranks([sys.executable, "-S", "-c", program], world_size, {"a": 1}, env={"MINE": "x"})


def test_what_ranks_return_comes_back_by_rank():
    with ranks_of(REPORT, 4) as ranks:
        ranks.start([["nice"], ["nice", "-n", "1"]])
        assert ranks.collect(30) == [
            [str(rank), str(rank % 2), str(rank // 2), "2", "x", {"a": 1}] for rank in range(4)
        ]


def test_the_first_failure_is_told_with_what_the_rank_said(monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    with ranks_of(FAIL) as ranks:
        ranks.start()
        with pytest.raises(RanksFailed, match=r"a rank failed:\n(.*\n)*--- rank1 \(exit status 1\)\nno memory left"):
            ranks.collect(60)


def test_a_rank_that_is_lost_on_purpose_fails_nobody():
    with ranks_of(f"{REPORT}\nif value[0] == '1': sys.exit(3)", 2) as ranks:
        ranks.start()
        assert ranks.collect(30, lost=[1])[0][0] == "0"


@pytest.mark.timeout(30)  # the ranks sleep for twice that
def test_time_runs_out_and_no_process_is_left():
    pids = []
    with ranks_of(SLEEP) as ranks:
        ranks.start()
        with pytest.raises(RanksFailed, match=r"the ranks had not finished after 0\.2 s"):
            ranks.collect(0.2, on_poll=lambda of_ranks: pids.extend(of_ranks))
    assert pids and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_answer_is_whole_or_not_there(tmp_path):
    answer(lambda a: {"twice": 2 * a}, 3, str(tmp_path), '{"a": 21}')
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.json"]
    assert (tmp_path / "rank3.json").read_text() == '{"twice": 42}'
