"""Names, files and options of algorithms and codecs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, create, get, register
from bagua.errors import InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, batch, grads_of, loss_of, make_net, process_group
from tests.distributed.worlds import fast_in

NOT_PLUGINS = {"base", "registry"}


@pytest.mark.parametrize("package", [bagua.algorithms, bagua.codecs])
def test_registry_equals_folder(package):
    stems = {file.stem for file in Path(package.__file__).parent.glob("[!_]*.py")} - NOT_PLUGINS
    assert set(package.available()) == stems
    for name in stems:
        assert package.get(name).name == name


def test_codecs_equal_those_of_the_core():
    from bagua import _C

    assert list(bagua.codecs.available()) == sorted(_C.registered_codecs())


def test_errors_list_what_is_valid():
    with pytest.raises(
        InvalidArgument,
        match="unknown algorithm 'sgd'; available: async_averaging, bytegrad, choco, decentralized, demo, dgc, dil",
    ):
        get("sgd")
    with pytest.raises(InvalidArgument, match="unknown codec 'int4'; available: bf16, "):
        bagua.codecs.get("int4")
    with pytest.raises(InvalidArgument, match=r"unknown option 'hierarchy' for.*its options: average .default True"):
        create("gradient_allreduce", {"hierarchy": 2})
    with pytest.raises(InvalidArgument, match=r"option codec is 8 .int., expected str"):
        create("bytegrad", {"codec": 8})
    with pytest.raises(InvalidArgument, match="min_compressed_bytes is -1"):
        create("bytegrad", {"min_compressed_bytes": -1})


def test_registration_is_checked():
    with pytest.raises(InvalidArgument, match="has no name"):

        @register
        @dataclasses.dataclass(kw_only=True)
        class Nameless(Algorithm):
            pass

    with pytest.raises(InvalidArgument, match=r"must be decorated with @dataclasses.dataclass\(kw_only=True\)"):

        @register
        class Undecorated(Algorithm):
            name = "undecorated"

    with pytest.raises(InvalidArgument, match="'bytegrad' is already taken"):
        get("bytegrad")

        @register
        @dataclasses.dataclass(kw_only=True)
        class Taken(Algorithm):
            name = "bytegrad"


def _third_party(rank, world_size):
    from bagua.distributed.process_group import ReduceOp

    @dataclasses.dataclass(kw_only=True)
    class Half(Algorithm):
        """Every other bucket; what it remembers is in the checkpoint."""

        name = "half_of_it"
        every: int = 2
        calls: dataclasses.InitVar[int] = 0

        def __post_init__(self, calls):
            super().__post_init__()
            self.num_calls = calls

        def communicate(self, bucket, group):
            self.num_calls += 1
            if bucket.index % self.every:
                return None
            return group.all_reduce(bucket, ReduceOp.AVG)

        def state_dict(self):
            return {"num_calls": self.num_calls}

        def load_state_dict(self, state):
            self.num_calls = state["num_calls"]

    with process_group():
        algorithm = Half(every=2)
        model = bagua.with_bagua(make_net(), algorithm=algorithm, bucket_bytes=1024)
        loss_of(model, batch(rank, 0)).backward()
        assert model.bagua.algorithm is algorithm
        assert algorithm.num_calls == len(model.bagua.buckets)
        sent = {name for bucket in model.bagua.buckets[::2] for name in bucket.names}
        assert_equal_on_all_ranks({name: grad for name, grad in grads_of(model).items() if name in sent})
        state = model.bagua.state_dict()
        assert state["state"] == {"num_calls": algorithm.num_calls}
        algorithm.num_calls = 0
        model.bagua.load_state_dict(state)
        assert algorithm.num_calls > 0
        with pytest.raises(InvalidArgument, match=r"options \['every'\] were given with an instance"):
            bagua.with_bagua(model, algorithm=algorithm, every=3)
        with pytest.raises(InvalidArgument, match="algorithm is a int"):
            bagua.with_bagua(model, algorithm=3)


def test_an_algorithm_of_another_package(pool2):
    pool2.run(_third_party)


def _sum(rank, world_size, algorithm):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(64, 128, bias=False), algorithm=algorithm, average=False)
        for _ in range(2):
            model.zero_grad()
            with model.bagua.no_sync():
                model(torch.full((1, 64), 1.0 + rank)).sum().backward()
            model(torch.full((1, 64), 10.0 + rank)).sum().backward()
            expected = torch.full((128, 64), 11.0 * world_size + world_size * (world_size - 1))
            torch.testing.assert_close(model.weight.grad, expected)


@fast_in("algorithm", ["gradient_allreduce", "bytegrad"], ["qsgd"])
def test_sum_instead_of_mean(pool2, algorithm):
    pool2.run(_sum, args=(algorithm,))


def _one_instance_for_two_models(rank, world_size):
    """Its state belongs to one model: residuals of another one would be written to by their addresses."""
    with process_group():
        algorithm = create("bytegrad", {"error_feedback": True})
        first, second = make_net(), make_net()
        bagua.with_bagua(first, algorithm=algorithm)
        with pytest.raises(InvalidArgument, match="this instance of algorithm 'bytegrad' belongs to another model"):
            bagua.with_bagua(second, algorithm=algorithm)
        bagua.with_bagua(first, algorithm=algorithm)  # the same model again
        loss_of(first, batch(rank, 0)).backward()
        first.bagua.remove()
        bagua.with_bagua(second, algorithm=algorithm)
        loss_of(second, batch(rank, 0)).backward()


def test_an_instance_belongs_to_one_model(pool2):
    pool2.run(_one_instance_for_two_models)


def test_residuals_of_another_size_are_refused():
    from bagua.distributed.tensors import Residuals
    from bagua.testing import world

    def check(group):
        small, x = torch.zeros(64), torch.zeros(4096)
        with pytest.raises(InvalidArgument, match=r"residuals have \[64, 64, 64, 64\] elements, the tensor 4096"):
            group.all_reduce(x, codec="minmax_uint8", feedback=Residuals(small, small, small, small))
        whole = torch.zeros(4096, dtype=torch.bfloat16)
        with pytest.raises(InvalidArgument, match="not of one dtype"):
            group.all_reduce(x, codec="minmax_uint8", feedback=Residuals(x, whole, x[:8], x[:8]))

    world(2, check)


@pytest.mark.parametrize(
    "algorithm, options",
    [
        ("bytegrad", {"codec": "qsgd:bits=2", "error_feedback": True}),
        ("qadam", {"codec": "qsgd:bits=2", "error_feedback": True}),
        ("qsgd", {"bits": 2, "error_feedback": True}),
    ],
)
def test_codecs_under_which_residuals_would_grow_are_refused(algorithm, options):
    with pytest.raises(InvalidArgument, match="'qsgd:bits=2' with error_feedback=True diverges"):
        create(algorithm, options)


@pytest.mark.parametrize("codec", ["onebit", "qsgd:bits=2"])
def test_differences_travel_under_codecs_that_keep_most_of_them(codec):
    with pytest.raises(InvalidArgument, match="loses about as much as it sends"):
        create("low_precision_decentralized", {"codec": codec})
