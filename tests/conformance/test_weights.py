"""Every algorithm that exchanges weights: it leaves gradients alone, and communicates around the optimizer's step."""

from __future__ import annotations

import copy

import pytest
import torch

import bagua
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import (
    ANY,
    OF_WEIGHTS,
    assert_equal_on_all_ranks,
    batch,
    grads_of,
    loss_of,
    make_net,
    plain_grads,
    process_group,
    slow_but,
)
from tests.meeting import meet

of_all = pytest.mark.parametrize("algorithm", OF_WEIGHTS)
# For what is common code: one that exchanges before the step, and one in the background.
of_few = pytest.mark.parametrize("algorithm", slow_but(OF_WEIGHTS, "decentralized", "async_averaging"))

EVERY_STEP = {
    "local_sgd": {"sync_every": 1},
    "diloco": {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
    "noloco": {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "consensus": 1.0},
    "sparseloco": {"sync_every": 1, "outer_lr": 1.0, "feedback_decay": 1.0, "codec": "bf16", "clip_to_median": False},
    "slowmo": {"sync_every": 1, "slow_momentum": 0.0},
    "zero_one_adam": {"max_interval": 1, "codec": ""},
    "async_averaging": {"sync_interval": 0.0},
}


def _sgd(algorithm, parameters, lr):
    """SGD, or an optimizer of the algorithm's own kind whose steps are SGD's: with v = 1, and without momentum."""
    parameters = list(parameters)
    if bagua.algorithms.get(algorithm).optimizer_class is ANY:
        return torch.optim.SGD(parameters, lr=lr)
    optimizer = bagua.optim.QAdam(parameters, lr=lr, betas=(0.0, 0.999), warmup_steps=1)
    for parameter in parameters:  # behind the warm-up, in which gradients are averaged
        zeros = torch.zeros_like(parameter, requires_grad=False)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros + 0.001}
    return optimizer


def _wrap(algorithm, model, optimizers=None, **options):
    if optimizers is None:
        optimizers = _sgd(algorithm, [p for p in model.parameters() if p.requires_grad], lr=0.001)
    options = {**EVERY_STEP.get(algorithm, {}), **options}
    return bagua.with_bagua(model, optimizers, algorithm=algorithm, **options), optimizers


def _num_exchanges(model):
    """Returns the number of exchanges of bucket 0."""
    spans = model.bagua.timeline().spans
    return sum(span.kind == "operation" and span.label == "bucket 0" for span in spans)


def _gradients_are_local(rank, world_size, algorithm):
    with process_group():
        model, _ = _wrap(algorithm, make_net(seed=rank), bucket_bytes=64 * 1024)
        for step in range(2):
            model.zero_grad()
            expected = plain_grads(model, batch(rank, step))
            loss_of(model, batch(rank, step)).backward()
            for name, grad in grads_of(model).items():
                assert torch.equal(grad, expected[name]), name
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            assert float(norm) > 1e-3
        bagua.barrier()  # weights that no step has followed are still under way


@of_all
def test_gradients_are_the_ranks_own(pool2, algorithm):
    pool2.run(_gradients_are_local, args=(algorithm,))


def _once_per_step(rank, world_size, algorithm):
    """Forwards, backwards and evaluations in any number: as many exchanges as optimizer steps."""
    with process_group():
        model, optimizer = _wrap(algorithm, make_net())
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            expected = {name: torch.zeros_like(p) for name, p in trained.items()}

            def backward(loss, trained=trained, expected=expected):
                """Runs backward, and computes without bagua's hooks what it adds to the gradients."""
                alone = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
                for total, grad in zip(expected.values(), alone, strict=True):
                    total += grad
                loss.backward(retain_graph=True)

            with model.bagua.no_sync():
                backward(loss_of(model, batch(rank, 10 * step)))
            model.eval()
            with torch.no_grad():
                model(batch(rank, 99)[0])
            model.train()
            first, second = loss_of(model, batch(rank, 1)), loss_of(model, batch(rank, 2))
            backward(first)
            backward(first)
            backward(second)
            for name, grad in grads_of(model).items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)
            optimizer.step()
            if bagua.algorithms.get(algorithm).is_lockstep:
                assert _num_exchanges(model) == step + 1
        assert _num_exchanges(model) <= 4


@of_all
def test_one_exchange_per_optimizer_step(pool2, algorithm):
    pool2.run(_once_per_step, args=(algorithm,))


def _accumulation(rank, world_size, algorithm):
    """k micro-batches, then one step, is one step on their mean."""
    with process_group():
        results = []
        for is_split in (True, False):
            model = torch.nn.Linear(16, 1)
            optimizer = _sgd(algorithm, model.parameters(), lr=0.1)
            _wrap(algorithm, model, optimizer, **({"warmup_steps": 9} if algorithm == "async_averaging" else {}))
            with torch.no_grad():
                model.weight.fill_(0.1), model.bias.zero_()
            model.bagua.load_state_dict(model.bagua.state_dict()) if algorithm == "decentralized" else None
            bagua.with_bagua(model, optimizer, algorithm=algorithm, **EVERY_STEP.get(algorithm, {}))
            for step in range(3):
                x, y = batch(rank, step)
                optimizer.zero_grad()
                pieces = list(zip(x.split(4), y.split(4), strict=True)) if is_split else [(x, y)]
                for index, (inputs, targets) in enumerate(pieces):
                    loss = (model(inputs).squeeze(1) - targets).square().mean() / len(pieces)
                    if index + 1 < len(pieces):
                        with model.bagua.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
                optimizer.step()
                if algorithm == "async_averaging":  # a round takes as long as it takes
                    model.bagua.pause()
                    model.bagua.resume()
            results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            model.bagua.remove()
        # A value that is rounded for the others may fall on the other side of half a code: a 255th of a weight's move.
        tolerance = 1e-5 if algorithm != "low_precision_decentralized" else 3e-3
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=tolerance)
        assert float((results[0] - 0.1).abs().max()) > 0.1


@of_all
def test_accumulation_equals_one_step_on_the_mean(pool2, algorithm):
    if algorithm == "async_averaging":
        pytest.skip("when a round takes place depends on time; see tests/algorithms/test_async_averaging.py")
    pool2.run(_accumulation, args=(algorithm,))


def _unused(rank, world_size, algorithm):
    with process_group(timeout_s=5.0):
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(16, 1), "idle": torch.nn.Linear(16, 1)})
        model.forward = lambda x: model["used"](x)
        optimizer = _sgd(algorithm, model.parameters(), lr=0.001)
        for parameter in model["idle"].parameters():
            optimizer.state.pop(parameter, None)  # it has never stepped
        _wrap(algorithm, model, optimizer, find_unused_parameters=True)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)[0]).sum().backward()
            assert model["idle"].weight.grad is None
            optimizer.step()
        # One rank may hear of the other's failure while it still wraps its model.
        with pytest.raises(BaguaError, match=r"2 of 4 parameters have no gradient: 'idle\.weight', 'idle\.bias'"):
            bagua.with_bagua(model, optimizer, algorithm=algorithm)
            model(batch(rank, 0)[0]).sum().backward()


@of_few
def test_unused_parameters(pool2, algorithm):
    pool2.run(_unused, args=(algorithm,))


class Dtypes(torch.nn.Module):
    """One parameter of every dtype."""

    def __init__(self):
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            self.register_parameter("of_" + str(dtype)[6:], torch.nn.Parameter(torch.ones(130, 10, dtype=dtype)))

    def forward(self, factor):
        return sum((parameter.float() * factor).sum() for parameter in self.parameters())


def _dtypes(rank, world_size, algorithm):
    with process_group():
        model, optimizer = _wrap(algorithm, Dtypes())
        assert all(len({m.parameter.dtype for m in bucket.members}) == 1 for bucket in model.bagua.buckets)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((130, 10), 10.0 * (1 + rank))).backward()
            optimizer.step()
        if algorithm == "async_averaging":
            model.bagua.pause()
        for parameter in model.parameters():
            expected = 1 - 0.001 * 4 * 15  # ranks' steps are of 10 and 20
            mean = parameter.detach().double()
            bagua.all_reduce(mean, bagua.ReduceOp.AVG)
            assert float((mean - expected).abs().max()) < 0.03, parameter.dtype
            assert float((parameter - 1).abs().max()) > 0.02


@of_all
def test_dtypes(pool2, algorithm):
    if algorithm == "zero_one_adam":
        pytest.skip("it refuses 16 bits; see tests/algorithms/test_zero_one_adam.py")
    pool2.run(_dtypes, args=(algorithm,))


def _closure(rank, world_size, algorithm):
    """An optimizer that runs forwards inside its step."""
    with process_group():
        model = torch.nn.Linear(16, 1)
        model, optimizer = _wrap(algorithm, model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))
        for step in range(3):
            x, y = batch(rank, step)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (model(x).squeeze(1) - y).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        if bagua.algorithms.get(algorithm).is_lockstep:
            assert _num_exchanges(model) == 3


@of_few
def test_an_optimizer_with_a_closure(pool2, algorithm):
    if bagua.algorithms.get(algorithm).optimizer_class is not ANY:
        pytest.skip("it steps with an optimizer of its own")
    pool2.run(_closure, args=(algorithm,))


def _optimizers(rank, world_size, algorithm):
    with process_group():
        model = make_net()
        missing = "no optimizer that was passed to with_bagua steps 'scale' and 11 more|needs the model's optimizer"
        with pytest.raises(InvalidArgument, match=missing):
            _wrap(algorithm, model, ())
        trainable = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(InvalidArgument, match="no optimizer that was passed to with_bagua steps 'exact.bias'"):
            _wrap(algorithm, model, _sgd(algorithm, trainable[:-1], lr=0.1))
        twice = [_sgd(algorithm, trainable, lr=0.1), _sgd(algorithm, trainable[:1], lr=0.1)]
        with pytest.raises(InvalidArgument, match="'scale' is stepped by optimizers 0 and 1"):
            _wrap(algorithm, model, twice)
        halves = [_sgd(algorithm, trainable[:4], lr=0.001), _sgd(algorithm, trainable[4:], lr=0.001)]
        _wrap(algorithm, model, halves)
        indices = {id(m.parameter): bucket.optimizer_index for bucket in model.bagua.buckets for m in bucket.members}
        assert [indices[id(p)] for p in trainable] == [0] * 4 + [1] * (len(trainable) - 4)
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            halves[step % 2].step()
        twin = copy.deepcopy(model)
        assert torch.equal(twin.scale, model.scale)


@of_few
def test_every_parameter_belongs_to_one_optimizer(pool2, algorithm):
    pool2.run(_optimizers, args=(algorithm,))


def _several_models(rank, world_size, algorithm):
    with process_group():
        wrapped = [_wrap(algorithm, make_net(seed=i + 10 * rank)) for i in range(2)]
        for step in range(2):
            for _, optimizer in wrapped:
                optimizer.zero_grad()
            sum(loss_of(model, batch(rank, step)) for model, _ in wrapped).backward()
            for _, optimizer in reversed(wrapped):
                optimizer.step()
        assert [model.bagua.timeline().summary()["steps"] for model, _ in wrapped] == [2, 2]
        for model, optimizer in wrapped:
            bagua.with_bagua(model, optimizer)
            assert_equal_on_all_ranks(dict(model.named_parameters()))


@of_few
def test_several_models_in_one_process(pool2, algorithm):
    pool2.run(_several_models, args=(algorithm,))


def _with_a_closure(rank, world_size, algorithm):
    """Weights are those without one, but under decentralized, which averages before the closure: x <- p - lr g(p)."""
    with process_group():
        found = []
        for with_closure in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Linear(16, 1)
            _, optimizer = _wrap(algorithm, model, _sgd(algorithm, model.parameters(), lr=0.1))
            for step in range(3):
                if not with_closure:
                    loss_of(model, batch(rank, step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    continue

                def closure(model=model, optimizer=optimizer, step=step):
                    optimizer.zero_grad()
                    loss = loss_of(model, batch(rank, step))
                    loss.backward()
                    return loss

                optimizer.step(closure)
            found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            model.bagua.remove()
        if algorithm != "decentralized":
            assert torch.equal(*found)
            return
        torch.manual_seed(0)
        alone = torch.nn.Linear(16, 1)
        weights = [torch.cat([p.detach().reshape(-1) for p in alone.parameters()]) for _ in range(world_size)]
        for step in range(3):
            torch.nn.utils.vector_to_parameters(sum(weights) / world_size, alone.parameters())
            mean, gradients = sum(weights) / world_size, [plain_grads(alone, batch(r, step)) for r in range(world_size)]
            weights = [mean - 0.1 * torch.cat([of["weight"].reshape(-1), of["bias"]]) for of in gradients]
        torch.testing.assert_close(found[1], weights[rank])


@of_all
def test_a_closure_that_is_evaluated_once(pool2, algorithm):
    if not bagua.algorithms.get(algorithm).is_lockstep:
        pytest.skip("its weights depend on time")
    pool2.run(_with_a_closure, args=(algorithm,))


def _made_anew(rank, world_size, algorithm):
    """An optimizer that with_bagua does not know steps: the next forward names the one that it knows."""
    with process_group():
        model, optimizer = _wrap(algorithm, make_net())
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(rank, 0)).backward()
            optimizer.step()
            with torch.no_grad():  # weights may change between two forwards with a step in between
                model.scale.mul_(1.0)
            if number == 0:
                loss_of(model, batch(rank, 1)).backward()  # and two forwards follow one another without one
        kind = type(optimizer).__name__
        optimizer = _sgd(algorithm, [p for p in model.parameters() if p.requires_grad], lr=0.001)
        loss_of(model, batch(rank, 1)).backward()
        meet()
        optimizer.step()
        text = rf"weights of optimizers\[0\] \({kind}\) have changed.*'{algorithm}'.*again"
        with pytest.warns(RuntimeWarning, match=text):
            for _ in range(2):
                model(batch(rank, 2)[0])


@of_few
def test_an_optimizer_made_anew_is_named_at_the_next_forward(pool2, algorithm):
    pool2.run(_made_anew, args=(algorithm,))


def _hooks_are_public(rank, world_size, algorithm):
    """No hook is on other optimizers, and ``remove`` takes the last one away."""
    with process_group():
        model, optimizer = _wrap(algorithm, make_net())
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        assert [len(each) for each in hooks] == [1, 1]
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        assert [len(each) for each in hooks] == [1, 1]
        model.bagua.remove()
        assert [len(each) for each in hooks] == [0, 0]
        bagua.with_bagua(model, optimizer)
        assert [len(each) for each in hooks] == [0, 0]


@of_few
def test_it_works_in_the_public_hooks_of_its_optimizers(pool2, algorithm):
    pool2.run(_hooks_are_public, args=(algorithm,))
