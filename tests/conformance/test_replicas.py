"""Every registered algorithm: the ranks' models start equal, and stay equal where gradients are exchanged."""

from __future__ import annotations

import copy
import io
import itertools
import weakref

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import (
    ALGORITHMS,
    OF_GRADIENTS,
    OF_WEIGHTS,
    assert_equal_on_all_ranks,
    batch,
    grads_of,
    loss_of,
    make_net,
    make_optimizer,
    process_group,
    slow_but,
    wrap,
)
from tests.distributed.worlds import fast_in

of_gradients = pytest.mark.parametrize("algorithm", OF_GRADIENTS)
FEW, MANY = 17, 101  # steps


def _stay_identical(rank, world_size, algorithm, num_steps):
    with process_group():
        model = make_net(seed=rank)
        optimizer = make_optimizer(algorithm, model, torch.optim.AdamW, lr=0.0003)
        model = wrap(model, optimizer, algorithm=algorithm, bucket_bytes=100_000)
        memory = {bucket.flat.untyped_storage().data_ptr() for bucket in model.bagua.buckets}
        first_loss = None
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, step % 4))
            loss.backward()
            optimizer.step()
            first_loss = first_loss if first_loss is not None else float(loss)
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        for index, state in enumerate(optimizer.state.values()):
            assert_equal_on_all_ranks({f"{index} {k}": v.clone() for k, v in state.items()})
        assert {bucket.flat.untyped_storage().data_ptr() for bucket in model.bagua.buckets} == memory
        assert len(memory) == 1
        # Of the same batch, since 4 divides num_steps - 1. Of dgc a sixteenth of the gradients have arrived.
        assert float(loss) < (1.0 if algorithm == "dgc" else 0.5) * first_loss
        return model.bagua.timeline()


@fast_in(
    "algorithm, backend, num_steps",
    [(algorithm, "torch" if algorithm == "gradient_allreduce" else "native", FEW) for algorithm in OF_GRADIENTS],
    list(itertools.product(OF_GRADIENTS, ["native", "torch"], [MANY])),
)
def test_ranks_stay_bit_identical(pool2, algorithm, backend, num_steps):
    timeline = pool2.run(_stay_identical, args=(algorithm, num_steps), env={"BAGUA_BACKEND": backend})[0]
    assert timeline.summary()["steps"] == num_steps == len(timeline.steps)
    assert timeline.summary()["bytes_sent"] == sum(step.bytes_sent for step in timeline.steps) > 0
    assert timeline.summary()["exposed_s"] > 0
    assert {span.label.split()[0] for span in timeline.spans} == {"bucket"}
    assert all(span.begin_ns <= span.end_ns for span in timeline.spans)


@pytest.mark.slow("test_ranks_stay_bit_identical")
@of_gradients
def test_four_ranks_stay_bit_identical(pool4, algorithm):
    pool4.run(_stay_identical, args=(algorithm, MANY))


def _start(rank, world_size, algorithm):
    with process_group():
        model = make_net(seed=rank)
        optimizer = make_optimizer(algorithm, model, torch.optim.Adam, lr=0.1 * (rank + 1))
        for _ in range(2 + rank):  # state of its own on every rank
            loss_of(model, batch(rank, 7)).backward()
            optimizer.step()
            optimizer.zero_grad()
        keys = list(model.state_dict())
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        assert list(model.state_dict()) == keys
        assert_equal_on_all_ranks(model.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.1
        for state in optimizer.state_dict()["state"].values():
            assert float(state["step"]) == 2
            assert_equal_on_all_ranks({key: value.clone() for key, value in state.items()})
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    "algorithm", slow_but(ALGORITHMS, "gradient_allreduce", "qadam", "low_precision_decentralized")
)
def test_parameters_buffers_and_optimizers_start_as_on_rank_0(pool2, algorithm):
    pool2.run(_start, args=(algorithm,))


def _options_are_kept(rank, world_size):
    """Rank 0's options are written into the dicts and tensors that are there, so what holds them still sets them."""
    with process_group():
        model = torch.nn.Linear(3, 1)
        lr = torch.tensor(0.1 * (rank + 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=0.01 * (rank + 1))
        options = optimizer.param_groups[0]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        bagua.with_bagua(model, optimizer)
        assert optimizer.param_groups[0] is options and options["lr"] is lr
        assert float(lr) == pytest.approx(0.1) and options["weight_decay"] == 0.01
        lr.fill_(0.01)  # a warm-up by hand
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
        assert schedule.optimizer.param_groups[0] is options


def test_options_are_written_into_what_the_program_holds(pool2):
    pool2.run(_options_are_kept)


def _state_that_only_rank_0_has(rank, world_size):
    with process_group():
        model = make_net(seed=rank)
        lazy = torch.optim.SGD([model.scale], lr=0.1, momentum=0.5)
        loss_of(model, batch(rank, 7)).backward()
        if rank == 0:
            lazy.step()
        bagua.with_bagua(model, lazy)
        assert_equal_on_all_ranks({"momentum": lazy.state[model.scale]["momentum_buffer"]})


def test_an_optimizer_state_that_only_rank_0_has(pool2):
    pool2.run(_state_that_only_rank_0_has)


def _filled_in_another_order(rank, world_size):
    """Each rank steps its own parameter first: the states are alike but for the order of their keys."""
    with process_group():
        model = torch.nn.ModuleList(torch.nn.Linear(3, 3, bias=False) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for index in (0, 1) if rank == 0 else (1, 0):
            optimizer.zero_grad()
            (model[index](torch.ones(1, 3)).sum() * (1, 100)[index]).backward()
            optimizer.step()
        bagua.with_bagua(model, optimizer)
        return [optimizer.state[p]["momentum_buffer"].unique().tolist() for p in model.parameters()]


def test_optimizer_states_go_by_their_keys_not_by_the_order_in_which_they_were_filled(pool2):
    assert pool2.run(_filled_in_another_order) == 2 * [[[1.0], [100.0]]]


class InFloat32(torch.optim.Optimizer):
    """Keeps its sums in float32, the count in int64 and a history in a list, whatever the parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = parameter.grad.float() / 3
            state["count"] = torch.tensor([1 + 2**40])
            state["history"] = [state["sum"] / 7, {"last": state["sum"] / 9}]


def _of_another_dtype(rank, world_size, is_copied):
    """Torch's load_state_dict casts states to the parameter's dtype, which would not be rank 0's states."""
    with process_group():
        model = torch.nn.Linear(3, 1).bfloat16()
        optimizer = InFloat32(model.parameters())
        if is_copied:
            optimizer.register_state_dict_post_hook(lambda optimizer, state: copy.deepcopy(state))
        if rank == 0:
            model(torch.ones(1, 3).bfloat16()).sum().backward()
            optimizer.step()
        bagua.with_bagua(model, optimizer)
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            history, last = state["history"][0], state["history"][1]["last"]
            assert [t.dtype for t in (state["sum"], history, last)] == 3 * [torch.float32]
            assert torch.equal(state["sum"], torch.ones_like(parameter, dtype=torch.float32) / 3)
            assert torch.equal(history, state["sum"] / 7) and torch.equal(last, state["sum"] / 9)
            assert state["count"].dtype == torch.int64 and state["count"].item() == 1 + 2**40


@pytest.mark.parametrize("is_copied", [False, True])
def test_optimizer_states_of_another_dtype_than_their_parameters(pool2, is_copied):
    pool2.run(_of_another_dtype, args=(is_copied,))


def _own_buffers(rank, world_size, algorithm, broadcast_buffers):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        if broadcast_buffers and not bagua.algorithms.get(algorithm).is_lockstep:
            with pytest.raises(InvalidArgument, match="broadcast_buffers=True makes the ranks wait"):
                bagua.with_bagua(model, optimizer, algorithm=algorithm, broadcast_buffers=True)
            return None
        bagua.with_bagua(model, optimizer, algorithm=algorithm, broadcast_buffers=broadcast_buffers)
        model.norm.running_mean.fill_(float(rank))
        model.norm.eval()
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        return float(model.norm.running_mean[0])


@pytest.mark.parametrize("algorithm", slow_but(OF_WEIGHTS, "decentralized", "async_averaging"))
def test_buffers_are_each_ranks_own_where_weights_are_exchanged(pool2, algorithm):
    own = [0.0, 0.0] if algorithm == "zero_one_adam" else [0.0, 1.0]  # its first step averages gradients
    assert pool2.run(_own_buffers, args=(algorithm, None)) == own
    expected = 0.0 if bagua.algorithms.get(algorithm).is_lockstep else None
    assert pool2.run(_own_buffers, args=(algorithm, True)) == [expected, expected]


def _switch(rank, world_size):
    """From gradient_allreduce to each algorithm, from each to gradient_allreduce and to the next one."""
    with process_group():
        model = make_net(seed=rank)
        optimizer = bagua.optim.QAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)  # suits all of them
        keys = list(model.state_dict())
        earlier = None
        around = [["gradient_allreduce", algorithm] for algorithm in ALGORITHMS]
        for step, name in enumerate([*itertools.chain(*around), *ALGORITHMS]):
            live = grads_of(model)
            bagua.with_bagua(model, optimizer, algorithm=name, bucket_bytes=50_000 * (step % 10 + 1))
            assert_equal_on_all_ranks(dict(model.named_parameters()))  # what weights have come to differ starts equal
            for key, grad in grads_of(model).items():
                assert torch.equal(grad, live[key])  # live gradients moved to the new buckets, or out of them
            assert earlier is None or earlier() is None  # its memory is free again
            earlier = weakref.ref(model.bagua.buckets[0].flat)
            assert model.bagua.algorithm.name == name
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            assert model.bagua.state_dict()["num_steps"] == step + 1
            assert len(model._forward_pre_hooks) == 1
            if name in OF_GRADIENTS:
                assert_equal_on_all_ranks(dict(model.named_parameters()))
        handle = model.bagua
        handle.remove()
        handle.remove()
        assert not hasattr(model, "bagua")
        assert list(model.state_dict()) == keys
        model.zero_grad()
        loss_of(model, batch(rank, 50)).backward()  # local now
        local = {name: grad + 0 for name, grad in grads_of(model).items()}
        first = {name: grad.clone() for name, grad in local.items()}
        for grad in first.values():
            bagua.broadcast(grad, 0)
        assert rank == 0 or not all(torch.equal(first[name], local[name]) for name in first)


def test_switching_the_algorithm_in_mid_training(pool2):
    pool2.run(_switch)


def _several_models(rank, world_size, algorithm):
    with process_group():
        models = [wrap(make_net(seed=i + 10 * rank), algorithm=algorithm) for i in range(3)]
        for step in range(2):
            for model in models:
                model.zero_grad()
            sum(loss_of(model, batch(rank, step)) for model in models).backward()  # one backward through all
            for model in reversed(models):
                assert_equal_on_all_ranks(grads_of(model))
        assert [model.bagua.timeline().summary()["steps"] for model in models] == [2, 2, 2]


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce", "powersgd"))
def test_several_models_in_one_process(pool2, algorithm):
    pool2.run(_several_models, args=(algorithm,))


def _copies(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        loss_of(model, batch(rank, 0)).backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert list(twin.state_dict()) == list(model.state_dict())
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
            if rank == 0:  # not synchronised: the other rank takes no part
                loss_of(twin, batch(0, 1)).backward()
            with pytest.raises(InvalidArgument, match="copy of one that was wrapped"):
                twin.bagua.no_sync()
            twin.zero_grad()
            wrap(twin, algorithm=algorithm)
            loss_of(twin, batch(rank, 1)).backward()
            assert_equal_on_all_ranks(grads_of(twin))
        assert model.bagua.timeline().summary()["steps"] == 1


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce"))
def test_deepcopy_and_pickle_are_plain_models(pool2, algorithm):
    pool2.run(_copies, args=(algorithm,))
