"""Which parameters qadam and its optimizer serve, with which options, and what they say of those that they do not."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import spawn
from tests import accelerator
from tests.algorithms.quadratic import Quadratic, step_once, target_of
from tests.algorithms.test_qadam import BETAS, EPS, LR, SHAPES
from tests.conformance.training import assert_equal_on_all_ranks, process_group


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": "x"}, "eps is 'x', expected a number, 0 or more"),
        ({"weight_decay": True}, "weight_decay is True"),
        ({"variance_floor": "x"}, "variance_floor is 'x', expected a number, 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"lr": "1"}, "lr is '1', expected a number, 0 or more"),
        ({"lr": True}, "lr is True"),
        ({"lr": -1}, "lr is -1"),
        ({"betas": ("a", "b")}, "betas is .*, expected two numbers"),
        ({"betas": (False, 0.9)}, "betas is"),
        ({"betas": 0.9}, "betas is"),
        ({"warmup_steps": 2.0}, "warmup_steps is 2.0"),
    ],
)
def test_options_out_of_range(options, message):
    weight, bias = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1))
    with pytest.raises(InvalidArgument, match=message):
        bagua.optim.QAdam([weight], **options)
    with pytest.raises(InvalidArgument, match=message):
        bagua.optim.QAdam([{"params": [weight]}, {"params": [bias], **options}])
    optimizer = bagua.optim.QAdam([weight])
    with pytest.raises(InvalidArgument, match=message):
        optimizer.add_param_group({"params": [bias], **options})
    assert len(optimizer.param_groups) == 1
    if "lr" not in options:
        with pytest.raises(InvalidArgument, match=message):
            bagua.algorithms.create("qadam", options)


def _wrap(model, optimizer, **options):
    return bagua.with_bagua(model, optimizer, algorithm="qadam", min_compressed_bytes=0, **options)


def _options_of_groups(rank, world_size):
    with process_group():
        model = Quadratic(SHAPES)
        first, second = model.parts
        groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
        optimizer = bagua.optim.QAdam(copy.copy(groups), eps=1e-6)
        with pytest.raises(InvalidArgument, match=r"weight_decay is 0.3 for algorithm 'qadam' and 0.1 for optimizers"):
            _wrap(model, optimizer, weight_decay=0.3)
        with pytest.raises(InvalidArgument, match=r"is 0.1 for .* and 0.0 for optimizers\[0\].param_groups\[1\]"):
            _wrap(model, optimizer, weight_decay=0.1)
        with pytest.raises(InvalidArgument, match="eps is 1e-07 for algorithm 'qadam' and 1e-06 for"):
            _wrap(model, optimizer, eps=1e-7)
        assert not hasattr(model, "bagua")
        _wrap(model, optimizer, warmup_steps=3, eps=1e-6, betas=[0.8, 0.9])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert all(group["warmup_steps"] == 3 and group["eps"] == 1e-6 for group in optimizer.param_groups)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "eps": 1e-5})
        assert optimizer.param_groups[2]["warmup_steps"] == 3 and optimizer.param_groups[2]["eps"] == 1e-5


def test_options_of_parameter_groups_are_kept(pool2):
    pool2.run(_options_of_groups)


def _copies(rank, world_size, make_copy):
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=5)
        model, optimizer = make_copy((model, optimizer))
        with pytest.raises(InvalidArgument, match="warmup_steps is 6 for algorithm 'qadam' and 5 for"):
            _wrap(model, optimizer, warmup_steps=6)
        _wrap(model, optimizer, warmup_steps=5, eps=1e-6)
        step_once(model, optimizer, rank, 0)
        assert optimizer.param_groups[0]["eps"] == 1e-6 and optimizer.num_steps() == 1


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_knows_what_it_was_given(make_copy):
    weight = torch.nn.Parameter(torch.ones(3))
    other = make_copy(bagua.optim.QAdam([weight], warmup_steps=5, betas=(0.8, 0.9)))
    other.check_given({"betas": [0.8, 0.9], "eps": 1e-3}, "x", "y")
    with pytest.raises(InvalidArgument, match=r"warmup_steps is 6 for x and 5 for y.param_groups\[0\]"):
        other.check_given({"warmup_steps": 6}, "x", "y")


def test_a_copy_trains(pool2):
    pool2.run(_copies, args=(copy.deepcopy,))


def _start_cycling():
    model = Quadratic(SHAPES)
    optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2)
    _wrap(model, optimizer)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=20)


def _cycle(model, optimizer, scheduler, rank, steps):
    for step in steps:
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        step_once(model, optimizer, rank, step)
        scheduler.step()


def _cycles_after_loading(rank, world_size):
    """load_state_dict gives the optimizer new groups; what a scheduler changes there counts in the exchange too."""
    with process_group():
        training = _start_cycling()
        model, optimizer, scheduler = training
        _cycle(*training, rank, range(5))
        saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, model.bagua, scheduler)])
        _cycle(*training, rank, range(5, 10))
        expected = [part.detach().clone() for part in model.parts]
        assert 0.85 < optimizer.param_groups[0]["betas"][0] < 0.95  # on its way
    with process_group():
        training = _start_cycling()
        model, optimizer, scheduler = training
        for part, state in zip((model, optimizer, model.bagua, scheduler), saved, strict=True):
            part.load_state_dict(state)
        _cycle(*training, rank, range(5, 10))
        assert all(torch.equal(part, other) for part, other in zip(model.parts, expected, strict=True))


def test_groups_are_those_of_now(pool2):
    pool2.run(_cycles_after_loading)


def _without_optimizer(rank, world_size):
    with process_group():
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        optimizer = bagua.optim.QAdam(model[0].parameters(), warmup_steps=1)
        expected = "no optimizer .* steps 1.weight, 1.bias, 2.weight and 1 more; pass all .* freeze what none of them"
        with pytest.raises(InvalidArgument, match=expected):
            _wrap(model, optimizer)
        model[1].requires_grad_(False)
        second = bagua.optim.QAdam(model[2].parameters(), warmup_steps=1)
        bagua.with_bagua(model, [optimizer, second], algorithm="qadam", min_compressed_bytes=0)
        for _ in range(3):
            model(torch.ones(1, 16)).square().sum().backward()
            optimizer.step()
            second.step()


def test_a_parameter_that_no_optimizer_steps(pool2):
    pool2.run(_without_optimizer)


def _warnings_of(train):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def _other_model(rank, world_size, factor):
    """The optimizer also steps a parameter of a model that is not wrapped, with steps far and with a v of 0."""
    with process_group():
        model, other = Quadratic(SHAPES), torch.nn.Parameter(torch.zeros(3))
        optimizer = bagua.optim.QAdam([*model.parameters(), other], lr=1e-3, warmup_steps=2, variance_floor=0.0)
        _wrap(model, optimizer)

        def train():
            for step in range(4):
                other.grad = torch.tensor([1e-9 if step < 2 else 1.0, 0.0, 1.0])
                x = target_of(rank, step, 2048).float()
                x[:16] *= factor if step < 2 else 1.0
                for part in model.parts:
                    part.grad = None
                model(x).backward()
                optimizer.step()

        return _warnings_of(train)


def test_warnings_are_of_the_wrapped_model(pool2):
    assert pool2.run(_other_model, args=(1.0,)) == [[], []]
    (told,), nothing = pool2.run(_other_model, args=(1e-9,))
    assert re.search(r"moved \d+ weights of parts.0 by more than", told) and nothing == []


class _Embedding(torch.nn.Module):
    """Tables, of whose rows a batch meets some."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(32, 16) for _ in range(4))
        self.head = torch.nn.Linear(16, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(sum(table(rows) for table in self.tables)).square().mean()


def _rows_not_met(rank, world_size, num_rows):
    """Row ``num_rows`` and those behind it come after the warm-up only."""
    with process_group():
        torch.manual_seed(0)
        model = _Embedding()
        before = model.tables[0].weight.detach().clone()
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2)
        _wrap(model, optimizer)

        def train():
            for step in range(5):
                optimizer.zero_grad()
                model(torch.arange(num_rows if step < 2 else 32)).backward()
                optimizer.step()

        told = _warnings_of(train)
        moved = (model.tables[0].weight.detach() != before).any(dim=1)
        assert moved.tolist() == [row < num_rows for row in range(32)]
        return told


def _count_and_names(told):
    return re.search(r"(\d+) weights of (.*) had no gradient but 0 in the warm-up.* keep their values", told).groups()


def test_weights_that_the_warm_up_has_not_met_are_told(pool2):
    (told,), nothing = pool2.run(_rows_not_met, args=(30,))
    names = {f"tables.{i}.weight" for i in range(4)}
    count, shown = _count_and_names(told)
    assert int(count) == 4 * 2 * 16 and nothing == []
    assert shown.endswith(" and 1 more") and set(shown[: -len(" and 1 more")].split(", ")) < names
    assert pool2.run(_rows_not_met, args=(32,)) == [[], []]


def test_a_single_rank_tells_of_still_weights_but_not_of_codecs():
    (told,) = spawn(_rows_not_met, 1, args=(30,))[0]
    assert int(_count_and_names(told)[0]) == 4 * 2 * 16
    assert spawn(_other_model, 1, args=(1e-9,)) == [[]]


def _when_it_is_told(rank, world_size, kind, bad_step):
    with process_group():
        device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(rank)
        torch.manual_seed(0)
        model = _Embedding().to(device)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2, fused=True)
        _wrap(model, optimizer)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        told = []
        for step in range(6):
            optimizer.zero_grad()
            rows, factor = torch.arange(30 if step < 4 else 32), math.inf if step == bad_step else 1.0

            def forward_and_backward(rows=rows, factor=factor):
                (scaler.scale(model(rows.to(device))) * factor).backward()

            told += [(step, "forward", text) for text in _warnings_of(forward_and_backward)]
            told += [(step, "step", text) for text in _warnings_of(lambda: scaler.step(optimizer))]
            scaler.update()
        return told


def test_a_device_tells_in_the_next_forward_and_of_no_step_that_is_skipped(pair_on_devices):
    for bad_step, told_in in ((None, 2), (2, 3)):
        on_cpu, on_device = (pair_on_devices.run(_when_it_is_told, args=(kind, bad_step)) for kind in ("cpu", "device"))
        ((step, part, text),), nothing = on_cpu
        assert (step, part, nothing) == (told_in, "step", []) and "had no gradient but 0" in text
        assert on_device == [[(told_in + 1, "forward", text)], []]


def _ended_before_the_next_forward(rank, world_size, is_removed):
    with process_group():
        device = accelerator.use_device_of(rank)
        torch.manual_seed(0)
        model = _Embedding().to(device)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2)
        _wrap(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(30).to(device)).backward()
            assert not _warnings_of(optimizer.step)
        return _warnings_of(model.bagua.remove if is_removed else lambda: _wrap(model, optimizer))


def test_a_device_tells_when_the_wrap_ends_before_the_next_forward(pair_on_emulated):
    for is_removed in (False, True):
        (text,), nothing = pair_on_emulated.run(_ended_before_the_next_forward, args=(is_removed,))
        assert "had no gradient but 0" in text and nothing == []


def _late(rank, world_size, num_steps, first_step):
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2, betas=BETAS, eps=EPS)
        _wrap(model, optimizer, codec="onebit", find_unused_parameters=True)
        declared, moments = [], []
        for step in range(num_steps):
            declared.append([str(bucket.declaration) for bucket in model.bagua.buckets])
            optimizer.zero_grad()
            targets = target_of(rank, step, 2048).float().split([part.numel() for part in model.parts])
            num_used = 2 if step >= first_step else 1
            pairs = list(zip(model.parts, targets, strict=True))[:num_used]
            sum(((part.reshape(-1) - c) ** 2).sum() / 2 for part, c in pairs).backward()
            optimizer.step()
            moments.append(optimizer.state[model.parts[1]].get("exp_avg_sq", torch.zeros(32, 32)).reshape(-1).tolist())
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        return declared, moments


def test_a_late_parameter_learns_its_v_at_full_precision(pool2):
    num_steps, first_step, beta2 = 8, 4, BETAS[1]
    declared, moments = pool2.run(_late, args=(num_steps, first_step))[0]
    own = "all_reduce, full precision (warm-up of parts.1)"
    expected = ["all_reduce, full precision (warm-up)"] * 2 + [own] * 4 + ["all_reduce, onebit"] * 2
    assert declared == [[text] for text in expected]
    x, m, v = ([0.0] * 1024 for _ in range(3))
    for step in (first_step, first_step + 1):  # its own warm-up is plain Adam
        t = step - first_step + 1
        targets = [target_of(i, step, 2048)[-1024:].tolist() for i in range(2)]
        g = [sum(a - target[e] for target in targets) / 2 for e, a in enumerate(x)]
        m = [BETAS[0] * a + (1 - BETAS[0]) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        scales = [(b / (1 - beta2**t)) ** 0.5 + EPS for b in v]
        x = [a - LR * b / (1 - BETAS[0] ** t) / c for a, b, c in zip(x, m, scales, strict=True)]
        assert moments[step] == pytest.approx(v, rel=1e-4, abs=1e-9), step
    assert moments[-1] == moments[first_step + 1]


class _Experts(torch.nn.Module):
    """One of three layers at a time, not the same on all ranks, so that each has its warm-up."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 47)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(47, 47) for _ in range(3))
        self.last = torch.nn.Linear(47, 4)

    def forward(self, x, chosen):
        return self.last(torch.tanh(self.experts[chosen](torch.tanh(self.first(x)))))


def _resumed_late(rank, world_size):
    def wrapped():
        torch.manual_seed(0)
        model = _Experts()
        optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=3)
        _wrap(model, optimizer, codec="onebit", find_unused_parameters=True, bucket_bytes=8 << 10)
        return model, optimizer

    def step(model, optimizer, index):
        optimizer.zero_grad()
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * index + rank))
        model(x, (index // 2 + rank * (index % 3 == 0)) % 3 if index > 1 else 0).square().sum().backward()
        optimizer.step()

    with process_group():
        whole, of_whole = wrapped()
        states = []
        for index in range(11):
            parts = (whole, of_whole, whole.bagua)
            states.append([copy.deepcopy(part.state_dict()) for part in parts])
            step(whole, of_whole, index)
        for cut in range(3, 9):
            model, optimizer = wrapped()
            for part, state in zip((model, optimizer, model.bagua), states[cut], strict=True):
                part.load_state_dict(copy.deepcopy(state))
            for index in range(cut, 11):
                step(model, optimizer, index)
            assert all(map(torch.equal, model.parameters(), whole.parameters())), cut


@pytest.mark.filterwarnings("ignore:algorithm 'qadam'")
def test_a_run_resumes_while_parameters_are_in_a_warm_up_of_their_own(pool2):
    """With the stages that it had, whatever the layout is in which they are first asked for."""
    pool2.run(_resumed_late)
