"""A wrap or a checkpoint that is refused, anywhere on any rank, has changed nothing on any: bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, Stage
from bagua.errors import InvalidArgument, RemoteError
from tests.conformance.test_checkpoints import assert_same
from tests.conformance.training import batch, grads_of, loss_of, make_net, make_optimizer, process_group
from tests.conformance.variants import VARIANTS, described
from tests.distributed.worlds import SAME_TEST
from tests.meeting import meet


class OnPurpose(Exception):
    """An error of a plug-in's own code, no BaguaError."""


@dataclasses.dataclass(kw_only=True)
class Fails(Algorithm):
    """Averages gradients, and writes to everything that is its own on the way; raises in one method on some ranks."""

    name = "fails"

    where: str = ""
    on: tuple[int, ...] = ()

    def _may_fail(self, method):
        if method == self.where and bagua.get_rank() in self.on:
            raise OnPurpose(f"in {method}")

    def check(self, optimizers):
        self._may_fail("check")

    def options(self):
        self._may_fail("options")
        return {}

    def bucket_class(self, parameter):
        self._may_fail("bucket_class")
        return parameter.dim()

    def attach(self, training):
        super().attach(training)
        self._own_group = training.group.subgroup("own", range(training.group.size), 10)
        self._may_fail("attach")

    def parameter_state(self):
        self._may_fail("parameter_state")
        return {}

    def stage(self):
        self._may_fail("stage")
        return Stage()

    def communicate(self, bucket, group):
        return group.all_reduce(bucket)

    def lay_out(self, buckets):
        for bucket in buckets:
            bucket.flat.fill_(float("nan"))
        self._may_fail("lay_out")


METHODS = ("check", "options", "bucket_class", "attach", "parameter_state", "stage", "lay_out")
# The method that raises, and on which ranks: before the ranks agree on anything, and when groups have been made.
FAILURES = [*((method, (1,)) for method in METHODS), ("check", (0,)), ("lay_out", (0,)), ("attach", (0, 1))]


class Stays:
    """An object that no rank can send."""


def _refused_wraps(model, optimizer, rank):
    """All ways in which another wrap is refused. The rank that refuses raises its own error, the others one with it."""
    for where, on in FAILURES:
        with pytest.raises(OnPurpose if rank in on else InvalidArgument, match=f"in {where}"):
            bagua.with_bagua(model, optimizer, algorithm=Fails(where=where, on=on))
    kept = next(iter(optimizer.param_groups))
    kept["stays"] = Stays()
    with pytest.raises(InvalidArgument, match=r"optimizers\[0\] .*\['stays'\] is a Stays, which is not sent between"):
        bagua.with_bagua(model, optimizer)
    del kept["stays"]
    is_one = rank == 1
    other = torch.nn.Sequential(model, torch.nn.Linear(2, 2)) if is_one else model
    for arguments in (
        {"optimizers": [3] if is_one else optimizer},
        {"optimizers": 3 if is_one else optimizer},
        {"bucket_bytes": 1000 if is_one else 2000},
        {"algorithm": "bytegrad" if is_one else "gradient_allreduce"},
    ):
        with pytest.raises((InvalidArgument, TypeError)):
            bagua.with_bagua(model, **{"optimizers": optimizer, **arguments})
    with pytest.raises(InvalidArgument):
        bagua.with_bagua(other, optimizer)
    own = torch.nn.Linear(2, 2)
    own.bagua = 3
    with pytest.raises(InvalidArgument, match="`bagua` of its own"):
        bagua.with_bagua(own if is_one else model, optimizer)
    if hasattr(model, "bagua"):  # the object that trains, once more
        algorithm = model.bagua.algorithm
        with pytest.raises(InvalidArgument, match="bucket_bytes"):
            bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=1000 + rank)
        assert model.bagua.algorithm is algorithm


def _refused_states(model, optimizer, rank, saved):
    """All ways in which a checkpoint is refused, on rank 1 or on all."""
    handle = model.bagua
    algorithm = type(handle.algorithm)
    bad = [
        {**saved, "algorithm": "other"},
        {**saved, "version": 0},
        {**saved, "layout": saved["layout"][1:]},
        {**saved, "num_steps": 77},
        {**saved, "state": {"no": "state"}},
    ]
    for state in bad:
        for ranks in ((1,), (0, 1)):
            if state["num_steps"] != 77 or ranks == (1,):
                with pytest.raises(Exception):  # noqa: B017 - what a state of another shape leads to is open
                    handle.load_state_dict(state if rank in ranks else saved)
    for method in ("load_state_dict", "lay_out"):
        original = vars(algorithm).get(method)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(algorithm, method, functools.partialmethod(_raises_after, getattr(algorithm, method)))
            with pytest.raises(OnPurpose if rank == 1 else InvalidArgument, match="after loading"):
                handle.load_state_dict(saved)
        assert vars(algorithm).get(method) is original


def _raises_after(self, method, *args):
    """Does what it should, and raises then."""
    method(self, *args)
    raise OnPurpose("after loading")


def _accumulate(model, rank, step):
    if hasattr(model, "bagua"):
        with model.bagua.no_sync():
            loss_of(model, batch(rank, 100 + step)).backward()
    else:
        loss_of(model, batch(rank, 100 + step)).backward()


def _trained(rank, variant, meddle):
    """Returns the states after a training, with ``meddle`` called where most is under way."""
    model = make_net(seed=rank)
    optimizer = make_optimizer(variant[0] if variant else "bytegrad", model, torch.optim.AdamW)
    if variant:
        bagua.with_bagua(model, optimizer, algorithm=variant[0], bucket_bytes=70_000, **variant[1])
    saved = None
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        _accumulate(model, rank, step)
        if step in (0, 4):  # local gradients are there; before and after buckets are laid out as they become ready
            meddle(model, optimizer, saved)
        loss_of(model, batch(rank, step)).backward()
        if step in (2, 4):  # what was exchanged waits for the step; a forward has begun to exchange weights
            loss_of(model, batch(rank, 50 + step))
            meddle(model, optimizer, saved)
        optimizer.step()
        saved = copy.deepcopy(model.bagua.state_dict()) if variant and saved is None else saved
    states = [model.state_dict(), grads_of(model), optimizer.state_dict()]
    kinds = {group["params"][0]: set(group) for group in optimizer.param_groups}
    handle = model.bagua.state_dict() if variant else None
    hooks = [len(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)]
    names = sorted(vars(model))
    if variant:
        assert model.bagua.num_wraps == 1
        model.bagua.remove()
    return [*states, [sorted(keys) for keys in kinds.values()], handle, hooks, names]


def _wraps(rank, world_size, variants):
    with process_group():
        for variant in variants:
            places = []

            def refuse(model, optimizer, saved, places=places):
                def where():
                    return [(p.grad.data_ptr() if p.grad is not None else 0, p.data_ptr()) for p in model.parameters()]

                before = where()
                _refused_wraps(model, optimizer, rank)
                assert where() == before
                places.append(len(bagua.get_default_group().subgroups))

            assert_same(_trained(rank, variant, refuse), _trained(rank, variant, lambda *_: None), str(variant))
            assert set(places) == {1 if variant and variant[0] == "async_averaging" else 0}


def _states(rank, world_size, variants):
    with process_group():
        for variant in variants:

            def refuse(model, optimizer, saved):
                if saved is not None:
                    _refused_states(model, optimizer, rank, saved)

            assert_same(_trained(rank, variant, refuse), _trained(rank, variant, lambda *_: None), str(variant))


FAST = [VARIANTS[[name for name, _ in VARIANTS].index("decentralized")], ("bytegrad", {"error_feedback": True})]
SLOW = [pytest.param(variant, marks=SAME_TEST) for variant in VARIANTS if variant not in FAST]


def _named(variant):
    return described(variant) if variant else "unwrapped"


@pytest.mark.parametrize("variant", [None, FAST[1], pytest.param(FAST[0], marks=SAME_TEST), *SLOW], ids=_named)
def test_a_refused_wrap_changes_nothing(pool2, variant):
    pool2.run(_wraps, args=([variant],))


@pytest.mark.parametrize("variant", [*FAST, *SLOW], ids=_named)
def test_a_refused_checkpoint_changes_nothing(pool2, variant):
    pool2.run(_states, args=([variant],))


def _async_goes_on(rank, world_size):
    """Rounds of async_averaging, which depend on time, continue."""
    with process_group():
        model = make_net(seed=rank)
        optimizer = make_optimizer("async", model)
        bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.0)

        def train(num_steps):
            for step in range(num_steps):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()

        def num_rounds():
            return len(next(iter(bagua.get_default_group().subgroups)).events(parts=False))

        train(3)
        _refused_wraps(model, optimizer, rank)
        before = num_rounds()
        while num_rounds() < before + 3:
            train(1)


def test_async_goes_on_averaging_after_a_refused_wrap(pool2):
    pool2.run(_async_goes_on)


@dataclasses.dataclass(kw_only=True)
class FailsInTraining(Fails):
    """Raises as Fails does, in a hook of a step, once ``is_due``."""

    name = "fails_in_training"
    is_due = False

    def _may_fail(self, method):
        if self.is_due:
            super()._may_fail(method)

    def before_forward(self, buckets, group):
        self._may_fail("before_forward")

    def communicate(self, bucket, group):
        self._may_fail("communicate")
        work = group.all_reduce(bucket.flat, label=bucket.label)
        work.finish_with(lambda: self._may_fail("finish"))
        return work

    def after_backward(self, buckets, group):
        self._may_fail("after_backward")


@dataclasses.dataclass(kw_only=True)
class FailsInSteps(FailsInTraining):
    """The same of weights."""

    name = "fails_in_steps"
    exchanges = "weights"

    def stage(self):
        return Stage(synchronises_gradients=False)

    def before_optimizer_step(self, optimizer, buckets, group):
        self._may_fail("before_optimizer_step")

    def after_optimizer_step(self, optimizer, buckets, group):
        self._may_fail("after_optimizer_step")
        if bagua.get_world_size() > 1:
            bagua.barrier()  # else a rank may be steps ahead


HOOKS = {  # where it raises: the class, and what messages call the hook
    "before_forward": (FailsInTraining, "before_forward"),
    "communicate": (FailsInTraining, "communicate"),
    "finish": (FailsInTraining, "communicate"),
    "after_backward": (FailsInTraining, "after_backward"),
    "stage": (FailsInTraining, "lay_out"),
    "before_optimizer_step": (FailsInSteps, "before_optimizer_step"),
    "after_optimizer_step": (FailsInSteps, "after_optimizer_step"),
}


def _in_training(rank, world_size):
    for where, (kind, hook) in HOOKS.items():
        with process_group():
            model = make_net(seed=rank)
            optimizer = make_optimizer("bytegrad", model)
            bagua.with_bagua(model, optimizer, algorithm=kind(where=where, on=(1,)), bucket_bytes=70_000)
            meet()
            model.bagua.algorithm.is_due = True
            error = OnPurpose if rank == 1 else RemoteError
            with pytest.raises(error, match="in " + where) as caught:
                for step in range(3):
                    optimizer.zero_grad()
                    loss_of(model, batch(rank, step)).backward()
                    optimizer.step()
            if rank == 0:
                assert f"rank 1: {hook} of algorithm {kind.name!r} raised OnPurpose" in str(caught.value)
                assert caught.value.rank == 1


def test_an_error_of_a_hook_on_one_rank_ends_the_training_of_the_others_at_once(pool2):
    """They raise it long before the deadline at which they would give up without a cause."""
    pool2.run(_in_training)
