"""A model that is not the one that was wrapped, or that somebody else synchronises too: told, not trained silently."""

import copy
import dataclasses
import functools
import operator
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import bagua
from bagua.algorithms import Algorithm
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet


def _assign(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _replace(model):
    model[2] = torch.nn.Linear(8, 2)


def _append(model):
    model.append(torch.nn.Linear(2, 2))


def _share(model):
    model[2].weight = torch.nn.Parameter(model[2].weight.detach().clone())


CHANGES = {
    "assigned": (_assign, "4 were replaced, '0.weight' for one"),
    "a module replaced": (_replace, "2 were replaced, '2.weight' for one"),
    "a parameter replaced": (_share, "1 were replaced, '2.weight' for one"),
    "a module added": (_append, "2 were added, '3.weight' for one"),
}


def _net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def _changed(rank, world_size, change, algorithm, find_unused):
    act, told = CHANGES[change]
    with process_group():
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, find_unused_parameters=find_unused)
        meet()  # the first to raise ends the group, also for one that has not got so far
        act(model)
        with pytest.raises(BaguaError, match=rf"has got other parameters.*: {told}; .*call it again"):
            model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("algorithm", "find_unused"), [("bytegrad", False), ("bytegrad", True), ("local_sgd", False)])
def test_parameters_that_are_replaced_or_added_after_the_wrap(pool2, change, algorithm, find_unused):
    pool2.run(_changed, args=(change, algorithm, find_unused))


def _added_in_training(rank, world_size, algorithm, how):
    with process_group():
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        for step in range(4):
            if step == 2:
                meet()
                _append(model)
                if how == "a group":
                    optimizer.add_param_group({"params": list(model[3].parameters())})
                else:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                before = model[3].weight.detach().clone()
                with pytest.raises(BaguaError, match="other parameters.*: 2 were added, '3.weight' for one; .*again"):
                    model(torch.randn(3, 4)).sum().backward()
                    optimizer.step()
                assert torch.equal(model[3].weight, before)
                return
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("how", ["a group", "an optimizer"])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
def test_parameters_that_are_added_in_training(pool2, algorithm, how):
    """An optimizer is about to step them."""
    pool2.run(_added_in_training, args=(algorithm, how))


class _Adapted(torch.nn.Module):
    """A layer that stands still, and a small one beside it that trains."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.low, self.high = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.layer(x) + self.high(self.low(x))


class _Prompted(torch.nn.Sequential):
    """Adds what it has got after the wrap to its input."""

    def forward(self, x):
        return super().forward(x + self.prompt if hasattr(self, "prompt") else x)


def _adapt(model):
    model.requires_grad_(False)
    model[0] = _Adapted(model[0])
    return [*model[0].low.parameters(), *model[0].high.parameters()], "2 were added, '0.low.weight'"


def _new_head(model):
    model.requires_grad_(False)
    model[2] = torch.nn.Linear(8, 2)
    return [*model[2].parameters()], "2 were replaced, '2.weight'"


def _assign_all(model):
    _assign(model)
    return [*model.parameters()], "4 were replaced, '0.weight'"


def _prompt(model):
    model.prompt = torch.nn.Parameter(torch.zeros(4))
    return [model.prompt], "1 were added, 'prompt'"


def _stepped_by_another(rank, world_size, act, algorithm, find_unused):
    with process_group():
        torch.manual_seed(0)
        model = _Prompted(*_net())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        bagua.with_bagua(model, optimizers, algorithm=algorithm, find_unused_parameters=find_unused)
        for step in range(4):
            if step == 2:
                parameters, told = act(model)
                before = [parameter.detach().clone() for parameter in parameters]
                optimizers = [torch.optim.SGD(parameters, lr=0.1)]
                meet()
                with pytest.raises(BaguaError, match=f"has got other parameters.*: {told} for one; .*call it again"):
                    model(torch.full((3, 4), 1.0 + rank)).square().sum().backward()
                    optimizers[0].step()
                assert all(map(torch.equal, parameters, before))
                return
            model(torch.full((3, 4), 1.0 + rank)).square().sum().backward()
            optimizers[0].step()


@pytest.mark.parametrize(("algorithm", "find_unused"), [("qsgd", True), ("qsgd", False), ("local_sgd", True)])
@pytest.mark.parametrize("act", [_adapt, _new_head, _assign_all, _prompt])
def test_parameters_that_an_optimizer_of_their_own_steps(pool2, act, algorithm, find_unused):
    """The model's other parameters take no part, or are stepped by nobody, so that no step of theirs tells."""
    pool2.run(_stepped_by_another, args=(act, algorithm, find_unused))


def _unfrozen_later(rank, world_size, find_unused):
    """Added as a parameter that stands still, by an optimizer that steps it once it does not."""
    with process_group():
        torch.manual_seed(0)
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, find_unused_parameters=find_unused)
        model.append(torch.nn.Linear(2, 2).requires_grad_(False))
        optimizer.add_param_group({"params": [*model[3].parameters()]})
        for step in range(4):
            if step == 2:
                meet()
                model[3].requires_grad_(True)
                with pytest.raises(BaguaError, match="has got other parameters.*: 2 were added, '3.weight' for one"):
                    model(torch.full((3, 4), 1.0 + rank)).square().sum().backward()
                return
            model(torch.full((3, 4), 1.0 + rank)).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize("find_unused", [False, True])
def test_parameters_that_are_added_frozen_and_unfrozen_later(pool2, find_unused):
    pool2.run(_unfrozen_later, args=(find_unused,))


def _called_by_function(rank, world_size):
    """Tensors that take the place of parameters for the time of a call are none of the model's."""
    with process_group():
        model = bagua.with_bagua(_net(), find_unused_parameters=True)
        for _ in range(3):
            others = {name: (2 * value.detach()).requires_grad_() for name, value in model.named_parameters()}
            torch.func.functional_call(model, others, torch.ones(3, 4)).sum().backward()
            model(torch.ones(3, 4)).sum().backward()
            assert all(value.grad is not None for value in others.values())


def test_tensors_in_the_place_of_parameters(pool2):
    pool2.run(_called_by_function)


def _no_less_than_before(rank, world_size):
    """A step before the first backward takes nothing away from what that looks at, and parts may go."""
    with process_group():
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, find_unused_parameters=True)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        model[2] = torch.nn.Identity()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        model.bagua.remove()
        model = _net()
        bagua.with_bagua(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        meet()
        _append(model)
        with pytest.raises(BaguaError, match="2 were added, '3.weight' for one"):
            model(torch.randn(3, 4)).sum().backward()


def test_what_a_new_optimizer_is_asked_for_is_that_alone(pool2):
    pool2.run(_no_less_than_before)


def _wrapped_anew(rank, world_size):
    with process_group():
        model = bagua.with_bagua(_net(), algorithm="gradient_allreduce")
        _assign(model)
        _append(model)
        bagua.with_bagua(model, algorithm="gradient_allreduce")
        for step in range(2):
            model.zero_grad()
            model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank + 2 * step))).square().sum().backward()
            grads = bagua.get_default_group().all_gather_object([p.grad for p in model.parameters()])
            assert functools.reduce(operator.and_, map(torch.equal, *grads))


def test_wrapped_anew_they_are_synchronised(pool2):
    pool2.run(_wrapped_anew)


def _frozen_later(rank, world_size):
    """Not replaced: its own error, which names it."""
    with process_group():
        model = bagua.with_bagua(_net(), algorithm="gradient_allreduce")
        meet()  # as above
        model[0].bias.requires_grad_(False)
        with pytest.raises(BaguaError, match="have no gradient: '0.bias'"):
            model(torch.randn(3, 4)).sum().backward()


def test_a_parameter_frozen_after_the_wrap(pool2):
    pool2.run(_frozen_later)


def _torch_ddp(rank, world_size):
    with process_group():
        torch.distributed.init_process_group("gloo", timeout=bagua.get_default_group().timeout)
        try:
            inside = torch.nn.parallel.DistributedDataParallel(_net())
            for model, named in ((inside, "the model"), (torch.nn.Sequential(inside), "module '0'")):
                with pytest.raises(InvalidArgument, match=f"{named} is torch's DistributedDataParallel.*its .module"):
                    bagua.with_bagua(model, algorithm="gradient_allreduce")
            bagua.with_bagua(inside.module, algorithm="gradient_allreduce")
            with pytest.raises(InvalidArgument, match="DistributedDataParallel is around the wrapped model; leave one"):
                inside(torch.randn(3, 4))
            inside.module(torch.randn(3, 4)).sum().backward()
        finally:
            torch.distributed.destroy_process_group()


def test_torch_ddp_inside_or_around_a_wrapped_model(pool2):
    pool2.run(_torch_ddp)


def _uneven(rank, world_size):
    with process_group():
        model = bagua.DistributedDataParallel(_net())
        with pytest.raises(InvalidArgument, match=r"the same number of batches.*drop_last=True"), model.join():
            pass
        with pytest.raises(InvalidArgument, match="the same number of batches"):
            torch.distributed.algorithms.Join([model])


def test_uneven_inputs(pool2):
    pool2.run(_uneven)


def _compiled(rank, world_size):
    with process_group():
        models = [_net() for _ in range(3)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        for model in models[:2]:
            bagua.with_bagua(model, algorithm="bytegrad")
        compiled_first = bagua.with_bagua(torch.compile(models[2], backend="eager"), algorithm="bytegrad")
        ran = [models[0], torch.compile(models[1], backend="eager"), compiled_first]
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        for model in ran:
            model(x).square().sum().backward()
        for compiled in models[1:]:
            for one, other in zip(models[0].parameters(), compiled.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)


def test_a_model_that_is_compiled_after_or_before_the_wrap(capfd):
    """The hooks run beside the graphs, untraced: no warnings."""
    from bagua.testing import spawn

    spawn(_compiled, 2)
    said = capfd.readouterr().err
    assert "Exception ignored" not in said and "Dynamo does not know" not in said


def _without_memory(rank, world_size):
    """On all ranks, by the name of the parameter, buffer or state, and before anything but the verdict travels."""
    with process_group():
        torch.distributed.init_process_group("gloo", timeout=bagua.get_default_group().timeout)
        try:
            spread, buffered, stepped = _net(), _net(), _net()
            torch.distributed.fsdp.fully_shard(spread, mesh=init_device_mesh("cpu", (world_size,)))
            with FakeTensorMode():
                buffered.register_buffer("mask", torch.ones(3))
                fake = torch.ones(4)
            optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1, momentum=0.9)
            optimizer.state[stepped[0].weight]["momentum_buffer"] = fake
            frozen = _net()
            frozen[0].weight = torch.nn.Parameter(spread[0].weight.detach(), requires_grad=False)
            for model, optimizers, told in (
                (spread, (), r"parameter '0.weight' is a DTensor, .*\.to_local\(\)"),
                (frozen, (), r"parameter '0.weight' is a DTensor"),
                (buffered, (), "buffer 'mask' is a FakeTensor"),
                (stepped, optimizer, r"the state 'momentum_buffer' of optimizers\[0\] \(SGD\) is a FakeTensor"),
            ):
                sent = bagua.get_default_group().bytes_sent
                with pytest.raises(InvalidArgument, match=told):
                    bagua.with_bagua(model, optimizers, algorithm="gradient_allreduce")
                assert bagua.get_default_group().bytes_sent - sent < 4096
                assert not hasattr(model, "bagua")
            # One rank alone has such a parameter: the other learns it.
            model = frozen if rank == 1 else _net()
            with pytest.raises(InvalidArgument, match="parameter '0.weight' is a DTensor"):
                bagua.with_bagua(model, algorithm="gradient_allreduce")
        finally:
            torch.distributed.destroy_process_group()


def test_parameters_buffers_and_states_without_memory(pool2):
    pool2.run(_without_memory)


KINDS = {  # of tensors that no rank could write as they are, and what is told of them
    "sparse": (lambda: torch.eye(3).to_sparse(), r"has layout torch.sparse_coo; .*\.to_dense\(\)"),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), r"lazy conjugate .*\.resolve_conj\(\)"),
    "negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, r"lazy negative .*\.resolve_neg\(\)"),
    "meta": (lambda: torch.ones(3, device="meta"), r"is on meta; .*to_empty"),
    "expanded": (lambda: torch.ones(1).expand(3), r"of shape \(3,\) is expanded.*\.clone\(\)"),
}


def _cannot_be_written(rank, world_size):
    """A wrap that is refused for it, on whichever ranks it is, has changed nothing: they train on."""
    with process_group():
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        bagua.with_bagua(model, optimizer)

        def train():
            optimizer.zero_grad()
            model(torch.ones(2, 4) + rank).square().sum().backward()
            optimizer.step()

        train()
        for make, told in KINDS.values():
            for ranks in ((0, 1), (0,), (1,)):
                value = make()
                other = _net()
                other[0].weight.data.fill_(rank)
                other.register_buffer("mask", value if rank in ranks else torch.ones(value.shape, dtype=value.dtype))
                frozen = _net()
                frozen.own = torch.nn.Parameter(other.mask, requires_grad=False)
                for refused, what in ((other, "buffer 'mask'"), (frozen, "parameter 'own'")):
                    with pytest.raises(InvalidArgument, match=f"{what} .*{told}"):
                        bagua.with_bagua(refused)
                    assert not hasattr(refused, "bagua")
                assert torch.all(other[0].weight == rank)
                optimizer.state[model[0].bias]["more"] = other.mask
                with pytest.raises(InvalidArgument, match=rf"the state 'more' of optimizers\[0\] \(SGD\) .*{told}"):
                    bagua.with_bagua(model, optimizer, algorithm="bytegrad")
                del optimizer.state[model[0].bias]["more"]
                train()


def test_buffers_frozen_parameters_and_states_that_cannot_be_written(pool2):
    pool2.run(_cannot_be_written)


def _convert_later(rank, world_size):
    """The gradients that are there are converted with it, inside the tensors that were views of buckets."""
    told = []
    for keeps_gradients in (False, True):
        with process_group():
            model = bagua.with_bagua(torch.nn.Linear(4, 2))
            model(torch.ones(2, 4)).sum().backward()
            model.double()
            model.zero_grad(set_to_none=not keeps_gradients)
            meet()  # as above
            with pytest.raises(bagua.BaguaError) as error:
                model(torch.ones(2, 4).double()).sum().backward()
            told.append(str(error.value))
    return told


def test_a_model_that_is_converted_after_the_wrap(pool2):
    for of_rank in pool2.run(_convert_later):
        for told in of_rank:
            assert re.search(
                r"gradient of '(bias|weight)' is torch.float64 on cpu, but .* was torch.float32 on cpu", told
            )


def _convert_format_later(rank, world_size, keeps_gradients):
    with process_group():
        model = bagua.with_bagua(torch.nn.Conv2d(3, 4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):  # the second lays out the buckets anew
            model(torch.ones(2, 3, 8, 8)).sum().backward()
            optimizer.step()
        model.to(memory_format=torch.channels_last)
        model.zero_grad(set_to_none=not keeps_gradients)
        before = [parameter.clone() for parameter in model.parameters()]
        meet()  # as above
        with pytest.raises(bagua.BaguaError) as error:  # the other rank's, if that is first
            model(torch.ones(2, 3, 8, 8)).sum().backward()
        assert all(map(torch.equal, model.parameters(), before))
        return str(error.value)


@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_a_model_in_another_memory_format_after_the_wrap(pool2, keeps_gradients):
    """A fused optimizer would pair a weight with the gradient of another."""
    for told in pool2.run(_convert_format_later, args=(keeps_gradients,)):
        assert re.search(
            r"gradient of 'weight' is of strides \(27, 1, 9, 3\), but the parameter was of another memory", told
        )


def _normed():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def _compile(model):
    return model, torch.compile(model, backend="eager")


def _compile_and_pass(model):
    compiled = torch.compile(model, backend="eager")
    return compiled, compiled


def _compile_pass_and_call_what_is_inside(model):
    return torch.compile(model, backend="eager"), model


def _compile_whole(model):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    return compiled, compiled


def _compile_whole_and_call_what_is_inside(model):
    return torch.compile(model, backend="eager", fullgraph=True), model


def _compile_in_place(model):
    model.compile(backend="eager")
    return model, model


def _compile_a_part(model):
    model[0].compile(backend="eager")
    return model, model


def _compiled_and_run(rank, world_size, make):
    """BatchNorm's statistics are rank 0's at each forward, so inputs of rank 0's own make them equal after it."""
    with process_group():
        torch.compiler.reset()
        model = _normed()
        wrapped, called = make(model)
        for _ in range(2):
            called(torch.randn(6, 4)).square().sum().backward()
        for num_wraps in (1, 2):
            bagua.with_bagua(wrapped)
            for _ in range(2):
                called(torch.randn(6, 4) + rank).square().sum().backward()
            x = torch.randn(6, 4)
            bagua.broadcast(x, 0)
            called(x).square().sum().backward()
            statistics = bagua.get_default_group().all_gather_object([buffer.clone() for buffer in model.buffers()])
            assert all(map(torch.equal, *statistics))
            assert model.bagua.num_wraps == num_wraps
        assert len(model.bagua.timeline().compute) == 3
        wrapped.bagua.remove()
        assert not hasattr(model, "bagua") and not hasattr(model, "no_sync")
        if rank == 0:  # nothing waits for the others
            called(torch.randn(6, 4)).square().sum().backward()


MAKES = (
    _compile,
    _compile_and_pass,
    _compile_pass_and_call_what_is_inside,
    _compile_whole,
    _compile_whole_and_call_what_is_inside,
    _compile_in_place,
    _compile_a_part,
)


@fast_in("make", [_compile_and_pass, _compile_whole_and_call_what_is_inside, _compile_in_place], MAKES)
def test_a_model_that_is_compiled_and_run_before_the_wrap(pool2, make):
    pool2.run(_compiled_and_run, args=(make,))


@dataclasses.dataclass(kw_only=True)
class _Misspelt(Algorithm):
    name = "misspelt"
    exchanges = "gradient"

    def communicate(self, bucket, group):
        return group.all_reduce(bucket, bagua.ReduceOp.AVG)


@dataclasses.dataclass(kw_only=True)
class _WithoutHook(Algorithm):
    name = "without_hook"
    exchanges = "weights"

    def after_optimiser_step(self, optimizer, buckets, group):
        pytest.fail("nobody calls it")


@dataclasses.dataclass(kw_only=True)
class _Misdescribed(Algorithm):
    name = "misdescribed"

    def parameter_state(self):
        return {"total": torch.float32}

    def communicate(self, bucket, group):
        return group.all_reduce(bucket, bagua.ReduceOp.AVG)


@dataclasses.dataclass(kw_only=True)
class _HookOfItsOwn(Algorithm):
    name = "hook_of_its_own"
    exchanges = "weights"

    def __post_init__(self):
        super().__post_init__()
        self.calls = 0
        self.after_optimizer_step = self._exchange

    def _exchange(self, optimizer, buckets, group):
        self.calls += 1


def _with_a_hook_of_its_own(rank, world_size):
    with process_group():
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=_HookOfItsOwn())
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert model.bagua.algorithm.calls == 1


def test_a_hook_may_be_the_object_s_own(pool2):
    pool2.run(_with_a_hook_of_its_own)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (_Misspelt(), "algorithm 'misspelt' has exchanges = 'gradient', expected 'gradients' or 'weights'"),
        (_WithoutHook(), "_WithoutHook defines no hook .*it has after_optimiser_step: is after_optimizer_step meant"),
        (_Misdescribed(), r"parameter_state\(\) describes 'total' by torch.float32, expected a ParameterState"),
    ],
)
def test_an_algorithm_that_says_wrongly_what_it_does(pool2, algorithm, message):
    pool2.run(_refused_algorithm, args=[algorithm, message])


def _refused_algorithm(rank, world_size, algorithm, message):
    with process_group():
        model = _net()
        with pytest.raises(InvalidArgument, match=message):
            bagua.with_bagua(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm=algorithm)
