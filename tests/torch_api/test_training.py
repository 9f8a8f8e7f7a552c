"""Training by each of the original's classes, two models at a time: bit for bit what bagua.with_bagua does."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch

import bagua
import bagua.torch_api as api
from bagua.torch_api.algorithms import Algorithm, async_model_average, bytegrad, decentralized, gradient_allreduce
from bagua.torch_api.algorithms import q_adam as q
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.worlds import SAME_TEST
from tests.meeting import wait_until
from tests.torch_api.programs import process_group

# The original's name and options; bagua's.
CASES = [
    ("gradient_allreduce", {}, "gradient_allreduce", {}),
    ("gradient_allreduce", {"hierarchical": True, "average": False}, "gradient_allreduce",
     {"hierarchical": True, "average": False}),
    ("bytegrad", {}, "bytegrad", {"hierarchical": True}),
    ("bytegrad", {"hierarchical": False, "average": False}, "bytegrad", {"average": False}),
    ("decentralized", {}, "decentralized", {"hierarchical": True}),
    ("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2},
     "decentralized", {"topology": "shift_one", "interval": 2}),
    ("low_precision_decentralized", {}, "low_precision_decentralized", {}),
    ("low_precision_decentralized", {"hierarchical": False, "communication_interval": 3},
     "low_precision_decentralized", {"interval": 3}),
    ("qadam", {}, "qadam", {"hierarchical": True}),
    ("qadam", {"hierarchical": False}, "qadam", {}),
]  # fmt: skip
NUM_STEPS = 6


def make(seed: int, native_options: dict | None = None, algorithm: str = "") -> tuple:
    """A model that bytegrad encodes most of (64 KiB), and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1))
    if algorithm == "qadam":
        kind = q.QAdamOptimizer if native_options is None else bagua.optim.QAdam
        return model, kind(model.parameters(), lr=1e-3, warmup_steps=3)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(models: list, rank: int, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    """The weights of all models after so many steps on each rank's own data."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
        for model, optimizer in models:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for model, _ in models for p in model.parameters()]


def _train_both_ways(rank, world_size, name, options, native, native_options):
    with process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the ring, which has a test of its own
        pairs = [make(seed, algorithm=native) for seed in (1, 2)]
        shared = None if name == "qadam" else Algorithm.init(name, **options)
        for model, optimizer in pairs:
            algorithm = shared or Algorithm.init(name, q_adam_optimizer=optimizer, **options)
            assert model.with_bagua([optimizer], algorithm) is model
            assert model.bagua_algorithm is algorithm and model.bagua_optimizers == [optimizer]
            assert [bucket.label for bucket in model.bagua_buckets] == [b.label for b in model.bagua.buckets]
        actual = train(pairs, rank)
        pairs = [make(seed, native_options, native) for seed in (1, 2)]
        for model, optimizer in pairs:
            bagua.with_bagua(model, [optimizer], algorithm=native, **native_options)
        expected = train(pairs, rank)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if place in (1, 2, 5, 7, 9) else SAME_TEST) for place, case in enumerate(CASES)],
    ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}",
)
def test_each_algorithm(pool2, case):
    pool2.run(_train_both_ways, args=case)


@pytest.mark.slow("test_each_algorithm")
@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case[0])
def test_each_algorithm_on_three_ranks(pool3, case):
    pool3.run(_train_both_ways, args=case)


def _gradients(rank, world_size):
    """The mean over ranks of the gradients, in plain loops."""
    with process_group():
        model, optimizer = make(1)
        model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
        (model(torch.full((4, 16), rank + 1.0))).sum().backward()
        actual = [p.grad.clone() for p in model.parameters()]
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for other in range(world_size):
            plain, _ = make(1)
            plain(torch.full((4, 16), other + 1.0)).sum().backward()
            for total, p in zip(expected, plain.parameters(), strict=True):
                total += p.grad / world_size
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_gradients_are_the_mean(pool2):
    pool2.run(_gradients)


def _interval(rank, world_size, name):
    """With lr 0 nothing but the exchange changes weights: in the steps 1, 1 + k, ..., as in the original."""
    with process_group():
        model, _ = make(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.with_bagua([optimizer], Algorithm.init(name, hierarchical=False, communication_interval=3))
        steps = []
        for step in range(1, 9):
            for parameter in model.parameters():
                parameter.data.fill_(10 * step + rank)
            weights = train([(model, optimizer)], rank, num_steps=1)
            if not all(bool((w == 10 * step + rank).all()) for w in weights):
                steps.append(step)
        assert steps == [1, 4, 7]


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized"])
def test_communication_interval(pool2, name):
    pool2.run(_interval, args=(name,))


def _asynchronous(rank, world_size):
    """With lr 0 nothing but the averaging changes weights: they become the mean of what they were."""
    with process_group():
        value, mean = (0, 2, 7)[rank], 3
        algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=1)
        models = []
        for seed in (1, 2):
            model, _ = make(seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            models.append((model.with_bagua([optimizer], algorithm), optimizer))
        for model, _ in models:
            algorithm.resume(model)  # as the original's examples do before the first epoch: nothing to go on with
            for parameter in model.parameters():
                parameter.data.fill_(value)

        def has_met():
            train(models, rank, num_steps=1)
            return all(bool((p == mean).all()) for model, _ in models for p in model.parameters())

        wait_until(has_met, "all ranks at the mean")
        for model, _ in models:
            model.bagua_algorithm.abort(model)
            model.bagua_algorithm.abort(model)
            for parameter in model.parameters():
                parameter.data.fill_(value)
        weights = train(models, rank, num_steps=5)
        assert all(bool((w == value).all()) for w in weights)
        for model, _ in models:
            algorithm.resume(model)
        train(models, rank, num_steps=5)
        for model, _ in models:
            algorithm.abort(model)


def test_async(pool3):
    pool3.run(_asynchronous)


def _async_warmup(rank, world_size):
    with process_group():
        model, optimizer = make(1)
        model.with_bagua([optimizer], async_model_average.AsyncModelAverageAlgorithm("all", 1000, warmup_steps=4))
        plain, plain_optimizer = make(1)
        bagua.with_bagua(plain, [plain_optimizer])
        pairs = train([(model, optimizer)], rank, 4), train([(plain, plain_optimizer)], rank, 4)
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        model.bagua_algorithm.abort(model)


def test_async_begins_with_gradients(pool2):
    pool2.run(_async_warmup)


def _group(rank, world_size):
    """Models that train among some ranks."""
    with process_group():
        group = api.new_group([0, 2])
        model, optimizer = make(rank)
        if rank != 1:
            model.with_bagua([optimizer], bytegrad.ByteGradAlgorithm(), group)
            weights = train([(model, optimizer)], rank)
            api.allreduce_inplace(total := weights[0].clone(), comm=group.get_global_communicator())
            assert torch.equal(total, 2 * weights[0])


def test_in_a_group(pool3):
    pool3.run(_group)


def _data_parallel(rank, world_size):
    with process_group():
        model, optimizer = make(1)
        wrapped = DistributedDataParallel(model, optimizers=[optimizer], algorithm=bytegrad.ByteGradAlgorithm(False))
        other, other_optimizer = make(1)
        other.with_bagua([other_optimizer], bytegrad.ByteGradAlgorithm(False))
        pairs = train([(wrapped, optimizer)], rank), train([(other, other_optimizer)], rank)
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        assert wrapped.module is model and isinstance(wrapped.bagua_algorithm, bytegrad.ByteGradAlgorithm)
        assert next(iter(wrapped.state_dict())) == "module.0.weight"
        with wrapped.no_sync():
            wrapped(torch.ones(1, 16)).sum().backward()
        # The default is gradient_allreduce; QAdam has its optimizer; algorithms of weights and gradients work.
        assert DistributedDataParallel(make(1)[0]).bagua.algorithm.name == "gradient_allreduce"
        model, optimizer = make(1, algorithm="qadam")
        assert DistributedDataParallel(model, algorithm=q.QAdamAlgorithm(optimizer)).bagua_optimizers == [optimizer]
        model, optimizer = make(1)
        algorithm = async_model_average.AsyncModelAverageAlgorithm()
        wrapped = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
        train([(wrapped, optimizer)], rank, num_steps=2)
        algorithm.abort(wrapped)


def test_data_parallel(pool2):
    pool2.run(_data_parallel)


def _attributes_of_a_model(rank, world_size):
    """Checks the attributes of bagua_ddp, and a property of it."""
    with process_group():
        model, optimizer = make(1)
        algorithm = bytegrad.ByteGradAlgorithm()
        model.with_bagua([optimizer], algorithm)
        ddp = model.bagua_ddp
        assert ddp.module is model and ddp.bagua_algorithm is algorithm and ddp.bagua_optimizers == [optimizer]
        assert ddp.process_group is api.communication._get_default_group() and ddp.parameters_to_ignore == []
        assert ddp.bagua_buckets == model.bagua_buckets
        assert ddp.bagua_module_name == model.bagua_module_name == f"Sequential_{id(model)}"
        model.bagua_module_name = "mine"
        assert ddp.bagua_module_name == "mine"

        assert ddp.bagua_train_step_counter == 0
        train([(model, optimizer)], rank, num_steps=2)
        model.eval()(torch.ones(1, 16))
        model.train()
        assert ddp.bagua_train_step_counter == 2

        ddp.require_backward_grad_sync = False
        optimizer.zero_grad()
        model(torch.full((1, 16), float(rank))).sum().backward()
        ddp.require_backward_grad_sync = True
        local = model[0].weight.grad.clone()
        api.broadcast(first := local.clone())
        assert torch.equal(first, local) == (rank == 0)

        # Wrapped anew it begins again, and only one hook counts; a copy is a plain model.
        group = api.new_group([0, 1])
        model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), group)
        assert model.bagua_ddp is not ddp and model.bagua_ddp.process_group is group
        assert model.bagua_module_name == "mine"
        train([(model, optimizer)], rank, num_steps=1)
        assert (ddp.bagua_train_step_counter, model.bagua_ddp.bagua_train_step_counter) == (3, 1)
        assert copy.deepcopy(model).bagua_ddp is None
        kept = weakref.ref(model)
        del model
        gc.collect()
        assert kept() is None and ddp.module is None


def test_bagua_ddp(pool2):
    pool2.run(_attributes_of_a_model)


def _told_of_a_wrapper(rank, world_size):
    with process_group():
        model, optimizer = make(1)
        algorithm = async_model_average.AsyncModelAverageAlgorithm()
        wrapped = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
        assert wrapped.inner is wrapped.bagua_ddp is model.bagua_ddp and wrapped.inner.module is model
        assert wrapped.parameters_to_ignore == [] and wrapped.require_backward_grad_sync
        with wrapped.no_sync():
            assert not wrapped.require_backward_grad_sync
        train([(wrapped, optimizer)], rank, num_steps=2)
        assert wrapped.inner.bagua_train_step_counter == 2
        algorithm.abort(wrapped.inner)
        algorithm.resume(model.bagua_ddp)
        algorithm.abort(wrapped)


def test_the_ddp_inside_distributed_data_parallel(pool2):
    pool2.run(_told_of_a_wrapper)


def _without_optimizers(rank, world_size):
    """The original takes most of these; here the error says what to pass."""
    kinds = {
        "decentralized": decentralized.DecentralizedAlgorithm(),
        "low_precision_decentralized": decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical=False),
        "async_averaging": async_model_average.AsyncModelAverageAlgorithm(),
    }
    with process_group():
        for name, algorithm in kinds.items():
            message = f"{name!r} exchanges weights.*pass all optimizers of the model, and freeze what none"
            model, optimizer = make(1)
            with pytest.raises(bagua.InvalidArgument, match=message):
                model.with_bagua([], algorithm)
            with pytest.raises(bagua.InvalidArgument, match=message):
                DistributedDataParallel(model, algorithm=algorithm)
            assert model.bagua_ddp is None
            train([(model.with_bagua([optimizer], algorithm), optimizer)], rank, num_steps=1)
            if name == "async":
                algorithm.abort(model)


def test_algorithms_that_exchange_weights_ask_for_optimizers(pool2):
    pool2.run(_without_optimizers)


def _ring(rank, world_size):
    """Once per process, where nodes have several ranks, and only for the hierarchy that there is not."""
    decentralized._warn_about_hierarchy.cache_clear()
    with process_group(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for hierarchical in (False, True, True):
            model, optimizer = make(1)
            model.with_bagua([optimizer], decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical))
            said = [str(warning.message) for warning in caught if "hierarchical" in str(warning.message)]
            assert len(said) == hierarchical
        assert "Pass hierarchical=False" in said[0]


def test_the_ring_of_ranks_is_warned_of_once(pool2):
    pool2.run(_ring)


def _refused(rank, world_size):
    with process_group():
        model, optimizer = make(1)
        qadam_optimizer = q.QAdamOptimizer(model.parameters())
        mean, coded = gradient_allreduce.GradientAllReduceAlgorithm(), bytegrad.ByteGradAlgorithm()

        class Ignoring(torch.nn.Linear):
            _bagua_params_and_buffers_to_ignore = ["bias"]

        calls = {
            "algorithm is a str.*bagua.with_bagua takes names": lambda: model.with_bagua([optimizer], "bytegrad"),
            "do_flatten=False": lambda: model.with_bagua([optimizer], mean, do_flatten=False),
            "process_group is a str": lambda: model.with_bagua([optimizer], mean, "world"),
            "names \\['bias'\\].*freeze": lambda: Ignoring(1, 1).with_bagua([], mean),
            "not among the optimizers": lambda: model.with_bagua([optimizer], q.QAdamAlgorithm(qadam_optimizer)),
            "device_ids is \\[0\\]": lambda: DistributedDataParallel(model, [0]),
            "gradient_as_bucket_view=False.*leave it out": lambda: DistributedDataParallel(
                model, gradient_as_bucket_view=False
            ),
            "check_reduction": lambda: DistributedDataParallel(model, check_reduction=True),
            "has not been wrapped": lambda: async_model_average.AsyncModelAverageAlgorithm().abort(model),
        }
        for message, call in calls.items():
            with pytest.raises(bagua.InvalidArgument, match=message):
                call()
        model.with_bagua([optimizer], coded)
        with pytest.raises(bagua.InvalidArgument, match="nothing in the background"):
            async_model_average.AsyncModelAverageAlgorithm().abort(model)
        train([(model, optimizer)], rank, num_steps=1)


def test_what_cannot_be_honoured_is_refused(pool2):
    pool2.run(_refused)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bytegrad", {"average": 1}, "average is 1"),
        ("decentralized", {"peer_selection_mode": "ring"}, "expected 'all' or 'shift_one'"),
        ("qadam", {"q_adam_optimizer": None}, "expected a QAdamOptimizer"),
        ("async", {"peer_selection_mode": "shift_one"}, "expected 'all'"),
        ("async", {"sync_interval_ms": 0}, "the original never averages"),
        ("local_sgd", {}, "not one of async, bytegrad"),
    ],
)
def test_options_are_refused_at_once(name, options, message):
    with pytest.raises(bagua.InvalidArgument, match=message):
        Algorithm.init(name, **options)


def test_options_that_do_not_exist():
    with pytest.raises(TypeError, match="codec"):
        bytegrad.ByteGradAlgorithm(codec="bf16")


def test_algorithms_of_ones_own_are_bagua_s():
    with pytest.raises(bagua.InvalidArgument, match="run by bagua.with_bagua"):

        class Mine(Algorithm):
            pass
