"""bagua.net.reports: whom a failure names after another rank has passed it on."""

import json

import pytest

from bagua import _C
from bagua.errors import Aborted, DeadlineExceeded, InvalidArgument, RemoteError, TransportError
from bagua.net.reports import describe, remote_error


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        (InvalidArgument("a NaN"), 3),
        (Aborted("destroyed"), 3),
        (InvalidArgument("no gradient", rank=1), 1),
        (TransportError("rank 1 has exited", rank=1), 1),
        (TransportError("the connection between rank 1 and rank 3 is silent"), None),
        (DeadlineExceeded("rank 1 has not called it", rank=1), 1),
        (DeadlineExceeded("the ranks wait for one another in a circle"), None),
        (RemoteError("rank 2 reported: no memory", rank=2), 2),
        (RemoteError("rank 2 reported: the connection is silent"), None),
    ],
    ids=repr,
)
def test_who_only_passes_a_failure_on_is_not_named(cause, named):
    error = remote_error(describe(cause), 3)
    assert type(error) is RemoteError and error.rank == named and str(cause) in str(error)


@pytest.mark.parametrize(
    ("cause", "ranks"),
    [
        (TransportError("rank 1 died", rank=1, ranks=(1, 2)), (1, 2)),
        (RemoteError("rank 2 reported: rank 1 died", rank=1, ranks=(1, 4)), (1, 4)),
        (InvalidArgument("no gradient", rank=1), (1,)),
        (InvalidArgument("a NaN"), (3,)),
        (DeadlineExceeded("a circle"), ()),
        (TransportError("all but one died", rank=0, ranks=tuple(range(100))), tuple(range(64))),
    ],
    ids=repr,
)
def test_all_ranks_at_fault_are_told(cause, ranks):
    told = json.loads(json.dumps(describe(cause)))
    assert remote_error(told, 3).ranks == ranks


def test_the_core_keeps_all_ranks_at_fault():
    core = _C.local_world("test", 5, 0.0, {})[0]
    core.poison(RemoteError("rank 2 reported: rank 1 died", rank=1, ranks=(1, 4)))
    with pytest.raises(RemoteError) as caught:
        core.check()
    assert (caught.value.rank, caught.value.ranks) == (1, (1, 4))
    core.close()
