"""The Rust step as Python drives it, a step with generators; the rest is tested in rust_core/tests/step.rs."""

import pytest

from bagua import _C
from bagua.errors import InvalidArgument

StepMachine = _C.StepMachine


def run(step, communicate, events, decided):
    """Plays one backward: ``communicate(bucket)`` is a generator. Returns what finish() has returned."""
    suspended = {}

    def take():
        while (decision := step.next()) is not None:
            decided.append(decision)
            kind, bucket = decision
            if kind == StepMachine.LAUNCH:
                suspended[bucket] = communicate(bucket)
            if kind in (StepMachine.LAUNCH, StepMachine.RESUME):
                try:
                    next(suspended[bucket])
                except StopIteration:
                    del suspended[bucket]
                else:
                    step.suspended(bucket)

    step.begin()
    for tensor in events:
        if step.ready(tensor):
            take()
    outcome = step.finish()
    assert not step.is_open
    take()
    assert not suspended
    return outcome


def yields(num_yields_of):
    def communicate(bucket):
        for _ in range(num_yields_of[bucket]):
            yield

    return communicate


def named(decided):
    of_buckets = {getattr(StepMachine, name): name for name in ("LAUNCH", "RESUME", "WAIT")}
    of_steps = ("SEND_BUFFERS", "AGREE_ON_USE", "FINALIZE_USE", "AGREE_ON_ORDER")
    names = {**of_buckets, **{getattr(StepMachine, name): name for name in of_steps}}
    return [f"{names[kind]} {bucket}" if kind in of_buckets else names[kind] for kind, bucket in decided]


@pytest.mark.parametrize("events", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_generators_go_on_at_the_same_place_whatever_the_events(events):
    step, decided = StepMachine(5, finds_unused=True), []
    step.lay_out([0, 1, 1, 2, 3], order=[0, 1, 2, 3, 4])
    assert run(step, yields([2, 0, 1, 1]), events, decided) == StepMachine.COMPLETE
    expected = ["LAUNCH 0", "LAUNCH 1", "LAUNCH 2", "RESUME 0", "LAUNCH 3"]
    expected += ["SEND_BUFFERS", "AGREE_ON_USE", "RESUME 2", "RESUME 0", "RESUME 3"]
    expected += [f"WAIT {bucket}" for bucket in range(4)]
    assert named(decided) == [*expected, "FINALIZE_USE", "AGREE_ON_ORDER"]
    assert step.observed_order() == events and step.missing() == [] and step.num_launched == 4


def test_an_agreed_order_is_due_until_it_is_laid_out():
    step, decided = StepMachine(3, finds_unused=False), []
    step.lay_out([2, 1, 0], order=[2, 1, 0])
    assert step.order is None and step.layout_due() is None
    run(step, yields([0, 0, 0]), [0, 2, 1], decided)
    assert decided[-1] == (StepMachine.AGREE_ON_ORDER, 0)
    step.agree(step.observed_order())
    assert step.order == step.layout_due() == [0, 2, 1]
    step.lay_out([0, 1, 1], order=[0, 2, 1])
    assert step.order == [0, 2, 1] and step.layout_due() is None
    decided.clear()
    run(step, yields([0, 0]), [0, 2, 1], decided)
    assert named(decided) == ["LAUNCH 0", "LAUNCH 1", "SEND_BUFFERS", "WAIT 0", "WAIT 1"]


def test_what_is_refused():
    step = StepMachine(2, finds_unused=False)
    refused = [
        ("begin without buckets", step.begin),
        ("bucket_of has 1 entries", lambda: step.lay_out([0], [0, 1])),
        ("bucket 0 of 2 has no tensor", lambda: step.lay_out([1, 1], [0, 1])),
        (r"order\[1\] is 0, which occurs earlier", lambda: step.lay_out([0, 1], [0, 0])),
        ("order has 0 entries", lambda: step.agree([])),
        ("ready outside a step", lambda: step.ready(0)),
        ("finish outside a step", step.finish),
        ("bucket 0 cannot be suspended", lambda: step.suspended(0)),
    ]
    for message, call in refused:
        with pytest.raises(InvalidArgument, match=message):
            call()
    step.lay_out([0, 1], [0, 1])
    step.begin()
    step.ready(0)
    open_refuses = [
        ("tensor 0 is already ready", lambda: step.ready(0)),
        ("tensor index is 2; expected below 2", lambda: step.ready(2)),
        ("lay_out while a step is open", lambda: step.lay_out([0, 1], [0, 1])),
        ("set_stage while a step is open", lambda: step.set_stage(1, True)),
    ]
    for message, call in open_refuses:
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert step.next() == (StepMachine.LAUNCH, 0)
    with pytest.raises(InvalidArgument, match="bucket 1 cannot be suspended; expected 0"):
        step.suspended(1)
