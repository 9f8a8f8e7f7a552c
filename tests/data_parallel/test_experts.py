"""ignore and groups of with_bagua: a mixture of experts, against one process that holds all of them."""

import time
from collections import OrderedDict

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet

WIDTH, ROWS = 16, 24


class Mixture(torch.nn.Module):
    """Each token goes to the expert of its largest score. This rank holds the experts ``held``, by number."""

    def __init__(self, num_experts, held=None, exchange=None):
        super().__init__()
        torch.manual_seed(3)
        self.before = torch.nn.Linear(WIDTH, WIDTH)
        self.gate = torch.nn.Linear(WIDTH, num_experts)
        experts = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_experts)]
        self.after = torch.nn.Linear(WIDTH, 1)
        self.held = range(num_experts) if held is None else held
        # One expert per rank has the same name on all of them.
        names = ["own"] if len(self.held) == 1 else list(map(str, self.held))
        self.experts = torch.nn.ModuleDict(
            OrderedDict((name, experts[number]) for name, number in zip(names, self.held, strict=True))
        )
        self.num_experts, self.exchange = num_experts, exchange

    def forward(self, x):
        hidden = torch.tanh(self.before(x))
        scores = self.gate(hidden).softmax(1)
        chosen = scores.argmax(1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        if self.exchange is None:
            parts = hidden[order].split(counts.tolist())
            worked = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        else:
            tokens, splits = bagua.exchange_rows(hidden[order], counts, group=self.exchange)
            worked, _ = bagua.exchange_rows(self.experts["own"](tokens), splits, counts, group=self.exchange)
        mixed = torch.zeros_like(worked).index_copy(0, order, worked) * scores.gather(1, chosen[:, None])
        return self.after(torch.tanh(hidden + mixed)).flatten()


def inputs(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, generator=generator)


def loss_of(model, rank, step):
    x, y = inputs(rank, step)
    return (model(x) - y).square().mean()


def name_of(name, expert):
    return name.replace("experts.own", f"experts.{expert}")


def in_one_process(world_size, num_experts, steps, make_optimizer, scale=1.0):
    """The weights after each step of a model with all experts, whose loss is the mean over the ranks."""
    model = Mixture(num_experts)
    optimizer = make_optimizer(model)
    after = []
    for step in steps:
        optimizer.zero_grad()
        (scale * sum(loss_of(model, rank, step) for rank in range(world_size)) / world_size).backward()
        optimizer.step()
        after.append({name: value.clone() for name, value in model.state_dict().items()})
    return after


def groups_of(rank, world_size, num_experts):
    """The ranks that exchange tokens, and those that hold this rank's expert: of four ranks, 0 and 2, and 1 and 3."""
    tokens = [bagua.new_group(range(first, first + num_experts)) for first in range(0, world_size, num_experts)]
    alike = [bagua.new_group(range(expert, world_size, num_experts)) for expert in range(num_experts)]
    return tokens[rank // num_experts], alike[rank % num_experts]


def momentum(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def start(rank, world_size, num_experts=2, make_optimizer=momentum, **options):
    tokens, alike = groups_of(rank, world_size, num_experts)
    model = Mixture(num_experts, [rank % num_experts], tokens)
    optimizer = make_optimizer(model)
    return bagua.with_bagua(model, optimizer, groups={"experts.*": alike}, **options), optimizer


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def qadam(model):
    return bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=2)


VARIANTS = {
    "mean": ({}, 1e-5),
    "sum": ({"average": False}, 1e-4),
    "small buckets": ({"bucket_bytes": 300}, 1e-5),
    "unused": ({"find_unused_parameters": True}, 1e-5),
    "bytegrad": ({"algorithm": "bytegrad", "min_compressed_bytes": 0}, 2e-2),
    "qadam": ({"algorithm": "qadam", "codec": "bf16", "min_compressed_bytes": 0}, 2e-2),
}


def equals_one_process(rank, world_size, variant):
    options, tolerance = VARIANTS[variant]
    make_optimizer = qadam if variant == "qadam" else momentum
    with process_group():
        model, optimizer = start(rank, world_size, 2, make_optimizer, check_replicas=1, **options)
        scale = world_size if variant == "sum" else 1.0
        for step, expected in enumerate(in_one_process(world_size, 2, range(5), make_optimizer, scale)):
            train(model, optimizer, rank, [step])
            for name, value in model.state_dict().items():
                other = expected[name_of(name, rank % 2)]
                torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance, msg=f"{name} in step {step}")
        if variant in ("bytegrad", "qadam"):
            coded = {name for bucket in model.bagua.buckets if bucket.declaration.codec for name in bucket.names}
            assert "before.weight" in coded and ("experts.own.weight" in coded) == (world_size == 4)
        kinds = [{name.startswith("experts.") for name in bucket.names} for bucket in model.bagua.buckets]
        assert all(len(kind) == 1 for kind in kinds) and {True} in kinds
        model.bagua.check_replicas()
        if rank == 1:
            with torch.no_grad():
                model.gate.bias += 1
        with pytest.raises(InvalidArgument, match="parameter 'gate.bias' differs"):
            model.bagua.check_replicas()


@fast_in("variant", ["mean", "qadam"], VARIANTS)
def test_equals_one_process_on_two_ranks(pool2, variant):
    pool2.run(equals_one_process, args=(variant,))


@fast_in("variant", ["sum", "small buckets", "unused", "bytegrad"], VARIANTS)
def test_equals_one_process_on_four_ranks(pool4, variant):
    pool4.run(equals_one_process, args=(variant,))


def accumulates(rank, world_size):
    """Micro-batches in no_sync, and weights of losses: as the mean over the tokens of all ranks."""
    with process_group():
        model, _ = start(rank, world_size)
        whole = Mixture(2)
        weights = {(each, step): 1 + each + step for each in range(world_size) for step in range(2)}
        total = sum(weights.values())
        sum(num * loss_of(whole, *of) for of, num in weights.items()).div(total).backward()
        with model.no_sync():
            (loss_of(model, rank, 0) * model.bagua.weight(weights[rank, 0])).backward()
        (loss_of(model, rank, 1) * model.bagua.weight(weights[rank, 1])).backward()
        expected = {name: one.grad for name, one in whole.named_parameters()}
        for name, one in model.named_parameters():
            torch.testing.assert_close(one.grad, expected[name_of(name, rank % 2)], rtol=1e-4, atol=1e-6)


def test_accumulation_and_weights(pool4):
    pool4.run(accumulates)


def refuses_to_divide_twice(rank, world_size):
    with process_group():
        model, optimizer = start(rank, world_size)
        loss_of(model, rank, 0).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, rank, 1).backward()
        with pytest.raises(InvalidArgument, match="would be divided twice"):
            loss_of(model, rank, 2).backward()


def test_a_second_backward_on_what_is_divided(pool2):
    pool2.run(refuses_to_divide_twice)


class Normed(torch.nn.Module):
    """Parameters, buffers and frozen values that differ by rank; ``local`` has another shape on each."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.shared = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.expert = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.local = torch.nn.Sequential(torch.nn.Linear(4, 2 + rank), torch.nn.BatchNorm1d(2 + rank))
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.add_(rank)

    def forward(self, x):
        return self.local(self.expert(self.shared(x))).square().mean()


def becomes_equal(rank, world_size):
    with process_group():
        _, alike = groups_of(rank, world_size, 2)
        model = Normed(rank)
        optimizer = torch.optim.Adam(
            [
                {"params": [*model.shared.parameters(), *model.expert.parameters()]},
                {"params": model.local.parameters()},
            ],
            lr=0.1 + rank,
        )
        model(torch.randn(8, 4)).backward()
        optimizer.step()

        def values():
            found = {name: value.clone() for name, value in model.state_dict().items()}
            for name, one in model.named_parameters():
                found[f"moment of {name}"] = optimizer.state[one]["exp_avg"].clone()
            return found

        before = bagua.all_gather_object(values())
        bagua.with_bagua(model, optimizer, groups={"expert.*": alike}, ignore=["local.*"], check_replicas=1)
        source = {"shared": 0, "expert": rank % 2, "local": rank}
        for name, value in values().items():
            assert torch.equal(value, before[source[name.removeprefix("moment of ").split(".")[0]]][name]), name
        assert [options["lr"] for options in optimizer.param_groups] == [0.1, 0.1 + rank]
        local = bagua.with_bagua(Normed(0).local)  # of another model: two wraps do not meet
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).backward()
            grad = model.local[0].weight.grad
            optimizer.step()
        assert grad.untyped_storage().data_ptr() != model.bagua.reducer.storage.memory.untyped_storage().data_ptr()
        after = bagua.all_gather_object(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(value, after[source[name.split(".")[0]]][name]), name
        assert any(not torch.equal(after[0][name], after[1][name]) for name in after[0] if name.startswith("expert."))
        assert "bagua" in vars(local)


def test_what_becomes_equal_and_what_stays(pool4):
    pool4.run(becomes_equal)


def skips_together(rank, world_size):
    """Inf in one expert's gradient, or in an ignored one, is found by all ranks."""
    with process_group():
        for kind in ("groups", "ignore"):
            if kind == "groups":
                model, optimizer = start(rank, world_size)
            else:
                model = Mixture(2, [rank % 2], groups_of(rank, world_size, 2)[0])
                bagua.with_bagua(model, ignore=["experts.*"])
                optimizer = torch.optim.SGD(model.experts.parameters(), 0.1)
            scaler = bagua.amp.GradScaler("cpu", init_scale=4.0)
            if rank == 1:
                model.experts["own"].weight.register_hook(lambda grad: grad * torch.inf)
            before = [one.clone() for one in model.parameters()]
            scaler.scale(loss_of(model, rank, 0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def test_ranks_skip_a_step_together(pool2):
    pool2.run(skips_together)


def refuses(rank, world_size):
    with process_group():
        tokens, alike = groups_of(rank, world_size, 2)
        mine = {"experts.*": alike}
        others = [bagua.new_group([each]) for each in range(world_size)]
        for message, options in [
            (r"'expert.\*' matches no parameter .* 'experts.own.bias'", {"ignore": ["expert.*"]}),
            (r"'nothing' matches no parameter", {"groups": {"nothing": alike}}),
            (r"'experts.own.weight' matches '\*.weight' and 'exp", {"ignore": ["*.weight"], "groups": mine}),
            ("expected a list of patterns", {"ignore": "experts.*"}),
            ("expected a dict of patterns", {"groups": ["experts.*"]}),
            ("leave no parameter that trains", {"ignore": ["before.*", "gate.*", "after.*"], "groups": mine}),
            (r"ignore= is for algorithms .* 'local_sgd'", {"ignore": ["experts.*"], "algorithm": "local_sgd"}),
            (r"groups= is for algorithms .* 'decentralized'", {"groups": mine, "algorithm": "decentralized"}),
            ("remembers residual", {"groups": mine, "algorithm": "bytegrad", "error_feedback": True}),
            ("remembers error, q", {"groups": mine, "algorithm": "powersgd"}),
            ("hierarchical=True", {"groups": mine, "hierarchical": True}),
            ('nonfinite="raise"', {"groups": mine, "nonfinite": "raise"}),
            ("no member of the group", {"groups": {"experts.*": others[1 - rank]}}),
            (
                r"not all in the model's \(\[",
                {"groups": {"experts.*": bagua.get_default_group()}, "group": others[rank]},
            ),
            ("the ranks disagree about the group of", {"groups": {"experts.*": [others[0], tokens][rank]}}),
            ("the ranks disagree about ignore", {"ignore": [["experts.*"], ["experts.own.*"]][rank]}),
        ]:
            model = Mixture(2, [rank % 2], tokens)
            optimizer = momentum(model)
            with pytest.raises(InvalidArgument, match=message):
                bagua.with_bagua(model, optimizer, **options)
            assert not hasattr(model, "bagua")
        model, _ = start(rank, world_size)
        with pytest.raises(InvalidArgument, match="join with groups="), model.bagua.join():
            pass
        model = bagua.with_bagua(Mixture(2, [rank % 2], tokens), ignore=["experts.*"])
        with pytest.raises(InvalidArgument, match=r"weight\(\) inside no_sync with ignore="), model.no_sync():
            model.bagua.weight(3)


def test_what_cannot_be_kept_is_refused(pool2):
    pool2.run(refuses)


def saves(rank, world_size, folder):
    with process_group():
        model, optimizer = start(rank, world_size)
        train(model, optimizer, rank, range(2))
        bagua.save(folder, model, optimizer, step=2)
        train(model, optimizer, rank, range(2, 4))
        expected = [model.state_dict(), optimizer.state_dict()["state"]]
        again, its = start(rank, world_size)
        assert bagua.load(folder, again, its)["step"] == 2
        train(again, its, rank, range(2, 4))
        for one, other in zip(expected, [again.state_dict(), its.state_dict()["state"]], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def loads_elsewhere(rank, world_size, folder):
    with process_group():
        model, optimizer = start(rank, world_size)
        with pytest.raises(InvalidArgument, match="of 4 ranks with experts of their own, and here are 2"):
            bagua.load(folder, model, optimizer)
        model = bagua.with_bagua(Mixture(2, [0]))
        with pytest.raises(
            InvalidArgument, match=r"ignore=\[\] and groups for \['experts.\*'\], this one has ignore=\[\]"
        ):
            bagua.load(folder, model)


def test_checkpoints_hold_the_experts_of_every_rank(pool4, pool2, tmp_path):
    pool4.run(saves, args=(tmp_path,))
    pool2.run(loads_elsewhere, args=(tmp_path,))


def raises_in_backward(rank, world_size, timeout_s):
    """Rank 1 waits in the experts' group alone, whose bucket is the first one."""
    with process_group(timeout_s):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        bagua.with_bagua(model, groups={"1.*": bagua.new_group()})
        output = model(torch.ones(4, 8))

        def raises(grad):
            meet()
            return 1 / 0

        if rank == 0:
            output.register_hook(raises)
        else:  # it has started all buckets by then
            model[0].weight.register_post_accumulate_grad_hook(lambda parameter: meet())
        began_at = time.monotonic()
        with pytest.raises(ZeroDivisionError if rank == 0 else bagua.BaguaError, match="zero|rank 0 raised"):
            output.sum().backward()
        took_s = time.monotonic() - began_at
        meet()  # rank 0 does not end before: its end would be news by itself
        return took_s


@pytest.mark.timed
def test_a_rank_that_raises_leaves_none_waiting_in_the_group_of_its_expert(pool2):
    timeout_s = 20.0
    assert max(pool2.run(raises_in_backward, args=(timeout_s,))) < timeout_s / 4
