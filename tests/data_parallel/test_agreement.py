"""Wraps that are refused, on any rank: every rank raises, with both sides, and the group lives on."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import bagua
from bagua.algorithms import Algorithm
from bagua.distributed.consensus import agree
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import process_group


def _linear(numel=4, **kwargs):
    return torch.nn.Linear(numel, 2, **kwargs)


def _frozen():
    model = _linear()
    model.bias.requires_grad_(False)
    return model


def _buffered():
    model = _linear()
    model.register_buffer("extra", torch.zeros(3))
    return model


def _transposed():
    model = _linear()
    model.weight = torch.nn.Parameter(torch.zeros(4, 2).T)
    return model


def _other_order():
    model = torch.nn.Linear(4, 2, bias=False)
    bias = torch.nn.Parameter(torch.zeros(2))
    weight = model.weight
    del model.weight
    model.bias = bias
    model.weight = weight
    return model


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# The difference of rank 1 from with_bagua(_linear(), algorithm="bytegrad"), and the message on every rank.
DIFFERENCES = {
    "shape": (lambda: _linear(5), {}, r"parameter 'weight'.*rank 0 has \(2, 4\).*rank 1 has \(2, 5\)"),
    "dtype": (lambda: _linear(dtype=torch.float64), {}, "parameter 'weight'.*float32.*rank 1 has.*float64"),
    "memory format": (_transposed, {}, r"parameter 'weight'.*requires_grad=True, rank 1 has.*strides=\[1, 2\]"),
    "absent": (lambda: _linear(bias=False), {}, "parameter 'bias'.*rank 1 has none"),
    "frozen": (_frozen, {}, "parameter 'bias'.*requires_grad=True.*requires_grad=False"),
    "buffer": (_buffered, {}, r"buffer 'extra'.*rank 0 has none, rank 1 has \(3,\) torch.float32"),
    "order": (_other_order, {}, "the order of registration, entry .*rank 0 has parameter 'weight'"),
    "algorithm": (_linear, {"algorithm": "gradient_allreduce"}, "algorithm: rank 0 has bytegrad, rank 1 has gradient"),
    "option": (_linear, {"codec": "bf16"}, "option 'codec': rank 0 has 'minmax_uint8', rank 1 has 'bf16'"),
    "bucket_bytes": (_linear, {"bucket_bytes": 999}, "rank 0 has 26214400, rank 1 has 999"),
    "unused": (_linear, {"find_unused_parameters": True}, "find_unused_parameters: rank 0 has False, rank 1 has True"),
    "optimizer": (_linear, {"optimizers": _sgd}, "optimizer 0: rank 0 has none, rank 1 has SGD"),
    "unknown algorithm": (
        _linear,
        {"algorithm": "bitegrad"},
        "unknown algorithm 'bitegrad'; available: async_averaging, bytegrad",
    ),
    "unknown option": (
        _linear,
        {"codek": "bf16"},
        "unknown option 'codek'.*its options: average .default True.*codec",
    ),
    "nothing": (lambda: torch.nn.ReLU(), {}, "no parameter of the model requires a gradient"),
    "sparse": (lambda: torch.nn.Embedding(3, 2, sparse=True), {}, r"'' \(Embedding\) gives sparse gradients"),
    "complex": (
        lambda: _linear(dtype=torch.complex64),
        {},
        r"parameter 'weight': rank 0 has \(2, 4\) torch.float32 on cpu .*rank 1 has \(2, 4\) torch.complex64 on cpu",
    ),
    "device": (lambda: _linear(device="meta"), {}, "parameter 'weight' is on meta"),
    "no optimizer": (
        _linear,
        {"optimizers": lambda model: [3]},
        r"optimizers\[0\] is of type int, expected a torch optimizer",
    ),
    "foreign": (
        _linear,
        {"optimizers": lambda _: _sgd(_linear())},
        r"optimizers\[0\] \(SGD\) steps no parameter of this",
    ),
}


def _disagree(rank, world_size):
    messages = {}
    with process_group():
        for name, (make, options, _) in DIFFERENCES.items():
            model = make() if rank == 1 else _linear()
            options = dict(options) if rank == 1 else {}
            make_optimizers = options.pop("optimizers", lambda model: ())
            with pytest.raises(BaguaError) as caught:
                bagua.with_bagua(model, make_optimizers(model), **{"algorithm": "bytegrad", **options})
            assert isinstance(caught.value, InvalidArgument)
            assert not hasattr(model, "bagua")
            messages[name] = str(caught.value)
        model = bagua.with_bagua(_linear())  # nothing is broken
        model(torch.ones(1, 4)).sum().backward()
    return messages


def test_every_rank_names_the_difference(pool2):
    first, second = pool2.run(_disagree)
    for name, (_, _, pattern) in DIFFERENCES.items():
        for message in (first[name], second[name]):
            assert re.search(pattern, message), f"{name}: {message}"


def _groups(*groups, kind=torch.optim.SGD, lr=0.1):
    """Returns a function that makes an optimizer of parameters of a model, by name, and of others."""

    def make(model):
        own = dict(model.named_parameters())
        return kind(
            [{"params": [own.get(p, torch.nn.Parameter(torch.zeros(8))) for p in group]} for group in groups], lr
        )

    return make


_USUAL = _groups(["weight"], ["bias", "other"])
# The difference of rank 1's optimizer from _USUAL, and the message on every rank.
OPTIMIZERS = {
    "class": (
        _groups(["weight"], ["bias", "other"], kind=torch.optim.Adagrad),
        r"optimizer 0: rank 0 has SGD with parameter groups of \[1, 2\], rank 1 has Adagrad with .* \[1, 2\]; pass",
    ),
    "number of groups": (
        _groups(["weight", "bias", "other"]),
        r"optimizer 0: .* rank 1 has SGD with .* of \[3\]; pass",
    ),
    "what is in them": (
        _groups(["bias"], ["weight", "other"]),
        "parameter 0 of group 0 of optimizer 0: rank 0 has 'weight', rank 1 has 'bias'; pass",
    ),
    "order": (
        _groups(["weight"], ["other", "bias"]),
        r"parameter 0 of group 1 of optimizer 0: rank 0 has 'bias', rank 1 has \(8,\) torch.float32 of another model",
    ),
}


def _optimizers_disagree(rank, world_size):
    with process_group():
        for name, (make, told) in OPTIMIZERS.items():
            model = _linear()
            with pytest.raises(InvalidArgument, match=f"the ranks disagree about {told}"):
                bagua.with_bagua(model, (make if rank == 1 else _USUAL)(model))
            assert not hasattr(model, "bagua"), name
        model = _linear()
        optimizer = _groups(["weight"], ["bias"], lr=0.1 + rank)(model)
        bagua.with_bagua(model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]  # rank 0's


def test_optimizers_that_differ_in_more_than_their_options(pool2):
    pool2.run(_optimizers_disagree)


def _wrapped_twice(rank, world_size):
    with process_group():
        inner = torch.nn.Linear(2, 2)
        outer = torch.nn.Sequential(inner, torch.nn.ReLU())
        bagua.with_bagua(inner)
        with pytest.raises(InvalidArgument, match=r"parameter '0\.weight' is synchronised by another model"):
            bagua.with_bagua(outer)
        inner.bagua.remove()
        bagua.with_bagua(outer)
        named = torch.nn.Linear(2, 2)
        named.bagua = 3
        with pytest.raises(InvalidArgument, match="attribute `bagua` of its own"):
            bagua.with_bagua(named)
        with pytest.raises(InvalidArgument, match="no longer synchronised"):
            handle = outer.bagua
            handle.remove()
            handle.no_sync().__enter__()


def test_a_parameter_has_one_owner(pool2):
    pool2.run(_wrapped_twice)


def _load_errors(rank, world_size):
    with process_group():
        model = bagua.with_bagua(_linear(), algorithm="bytegrad")
        state = model.bagua.state_dict()
        bad = {
            "of algorithm 'other'": {**state, "algorithm": "other"},
            "no state of version": {"a": 1},
            "other trainable parameters": {**state, "ready_order": ["weight", "bios"]},
            "ranks disagree about num_steps": {**state, "num_steps": rank},
            "num_steps of the state is -5, expected an integer of at least 0": {**state, "num_steps": -5},
            "loss_scale of the state is nan, expected a number above 0": {**state, "loss_scale": float("nan")},
            "num_steps of the state is True, expected": {**state, "num_steps": True},
            "num_steps of the state is '7'": {**state, "num_steps": "7" if rank else 7},
        }
        for pattern, value in bad.items():
            with pytest.raises(InvalidArgument, match=pattern):
                model.bagua.load_state_dict(value)
        model.bagua.load_state_dict(state)


def test_states_that_do_not_fit(pool2):
    pool2.run(_load_errors)


KINDS = {  # of tensors that no rank could write as they are, and the error
    "sparse": (lambda: torch.eye(3).to_sparse(), r"has layout torch.sparse_coo; .*\.to_dense\(\)"),
    "meta": (lambda: torch.ones(3, device="meta"), r"is on meta; .*to_empty"),
    "expanded": (lambda: torch.ones(1).expand(3), r"of shape \(3,\) is expanded.*\.clone\(\)"),
}


def _cannot_be_written(rank, world_size):
    """A buffer, a frozen parameter or a state, on whichever rank; a training that is under way continues."""
    with process_group():
        model = _linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        bagua.with_bagua(model, optimizer)
        for make, message in KINDS.values():
            for ranks in ((0, 1), (0,), (1,)):
                value = make()
                other = _linear()
                other.register_buffer("mask", value if rank in ranks else torch.ones(value.shape, dtype=value.dtype))
                frozen = _linear()
                frozen.own = torch.nn.Parameter(other.mask, requires_grad=False)
                for refused, what in ((other, "buffer 'mask'"), (frozen, "parameter 'own'")):
                    with pytest.raises(InvalidArgument, match=f"{what} .*{message}"):
                        bagua.with_bagua(refused)
                    assert not hasattr(refused, "bagua")
                optimizer.state[model.bias]["more"] = other.mask
                with pytest.raises(InvalidArgument, match=rf"the state 'more' of optimizers\[0\] \(SGD\) .*{message}"):
                    bagua.with_bagua(model, optimizer, algorithm="bytegrad")
                del optimizer.state[model.bias]["more"]
                model(torch.ones(2, 4) + rank).sum().backward()


def test_tensors_that_cannot_be_written(pool2):
    pool2.run(_cannot_be_written)


def _synchronised_by_torch(rank, world_size):
    """DistributedDataParallel, FSDP2's DTensors and fake tensors; before anything but the verdict travels."""
    with process_group():
        torch.distributed.init_process_group("gloo", timeout=bagua.get_default_group().timeout)
        try:
            inside = torch.nn.parallel.DistributedDataParallel(_linear())
            spread, buffered = _linear(), _linear()
            torch.distributed.fsdp.fully_shard(spread, mesh=init_device_mesh("cpu", (world_size,)))
            with FakeTensorMode():
                buffered.register_buffer("mask", torch.ones(3))
            for model, message in (
                (inside, "the model is torch's DistributedDataParallel.*its .module"),
                (torch.nn.Sequential(inside), "module '0' is torch's DistributedDataParallel.*its .module"),
                (spread, "the model is under fully_shard, which reduces gradients itself"),
                (buffered, "buffer 'mask' is a FakeTensor"),
                (spread if rank == 1 else _linear(), "the model is under fully_shard"),
            ):
                sent = bagua.get_default_group().bytes_sent
                with pytest.raises(InvalidArgument, match=message):
                    bagua.with_bagua(model)
                assert bagua.get_default_group().bytes_sent - sent < 4096
                assert not hasattr(model, "bagua")
        finally:
            torch.distributed.destroy_process_group()


def test_models_that_torch_synchronises(pool2):
    pool2.run(_synchronised_by_torch)


@dataclasses.dataclass(kw_only=True)
class Misspelt(Algorithm):
    name = "misspelt"
    exchanges = "gradient"


@dataclasses.dataclass(kw_only=True)
class WithoutHook(Algorithm):
    name = "without_hook"
    exchanges = "weights"

    def after_optimiser_step(self, optimizer, buckets, group):
        pytest.fail("it is no hook")


@dataclasses.dataclass(kw_only=True)
class Misdescribed(Algorithm):
    name = "misdescribed"

    def parameter_state(self):
        return {"total": torch.float32}

    def communicate(self, bucket, group):
        return group.all_reduce(bucket)


@dataclasses.dataclass(kw_only=True)
class Staged(Algorithm):
    name = "staged"

    def stage(self):
        return "early"


ALGORITHMS = (
    (Staged(), r"stage\(\) gave a str, expected a bagua.algorithms.Stage"),
    (Misspelt(), "algorithm 'misspelt' has exchanges = 'gradient', expected 'gradients' or 'weights'"),
    (WithoutHook(), "'without_hook' exchanges weights, but WithoutHook defines no .*define .*after_optimizer_step"),
    (Misdescribed(), r"parameter_state\(\) describes 'total' by torch.float32, expected a ParameterState"),
)


def _algorithms(rank, world_size):
    with process_group():
        model = _linear()
        for algorithm, message in ALGORITHMS:
            with pytest.raises(InvalidArgument, match=message):
                bagua.with_bagua(model, _sgd(model), algorithm=algorithm)


def test_algorithms_that_cannot_exchange_anything(pool2):
    pool2.run(_algorithms)


def _equal_but_for_their_types(rank, world_size):
    pattern = "about steps: rank 0 has 7, rank 1 has '7'; x"
    with process_group(), pytest.raises(InvalidArgument, match=pattern):
        agree(bagua.get_default_group(), lambda: (None, {"steps": "7" if rank else 7}), "x")


def test_values_that_look_alike_are_shown_with_their_types(pool2):
    pool2.run(_equal_but_for_their_types)


def test_without_a_process_group():
    with pytest.raises(bagua.BaguaError, match="init_process_group"):
        bagua.with_bagua(_linear())
