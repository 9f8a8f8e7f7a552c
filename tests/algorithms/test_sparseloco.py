"""sparseloco beside its oracle in plain float64 loops, and its identity with diloco."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import weights_of
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in

LR, CHUNK, NUMEL = 0.05, 4096, 5000  # a whole chunk and a short one


class Rows(torch.nn.Module):
    """loss = sum (x - c)^2 / 2; its one parameter is as its bucket, without padding between."""

    def __init__(self, numel=NUMEL):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(numel)])

    def forward(self, target):
        return ((self.parts[0] - target[: len(self.parts[0])]) ** 2).sum() / 2


def target_of(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(NUMEL, generator=generator) * (1 + rank)  # norms of ranks differ


def train_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    model(target_of(rank, step)).backward()
    optimizer.step()
    return weights_of(model)


def _follows(rank, world_size, options):
    """One exchange after the other from what the ranks keep: every rank computes all messages from all residuals."""
    with process_group():
        model = Rows()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="sparseloco", sync_every=2, **options)
        codec = bagua.codecs.get(model.bagua.algorithm.codec)
        group = bagua.get_default_group()
        reference = [0.0] * NUMEL
        for step in range(8):
            residual = model.bagua.buckets[0].state("residual")[:NUMEL].clone()
            before = model.parts[0].detach() - LR * (model.parts[0].detach() - target_of(rank, step))
            weights = train_step(model, optimizer, rank, step)
            if step % 2 == 0:
                assert weights == pytest.approx(before.tolist(), abs=1e-6)
                continue
            value = 0.95 * residual + (torch.tensor(reference) - before)
            messages = group.all_gather_object(codec.decode(codec.encode(value), NUMEL, torch.float32).tolist())
            sent = torch.tensor(messages[rank])
            kept = model.bagua.buckets[0].state("residual")[:NUMEL]
            torch.testing.assert_close(kept, value - sent, rtol=1e-5, atol=1e-6)
            norms = [
                [math.sqrt(sum(x * x for x in message[begin : begin + CHUNK])) for begin in range(0, NUMEL, CHUNK)]
                for message in messages
            ]
            for element in range(NUMEL):
                chunk = element // CHUNK
                ordered = sorted(of_rank[chunk] for of_rank in norms)
                middle = len(ordered) // 2
                median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
                values = [message[element] for message in messages]
                senders = world_size if options.get("counts_all") else sum(x != 0 for x in values)
                if options.get("clip_to_median", True):
                    values = [
                        x * min(1.0, median / of_rank[chunk]) if x else 0.0
                        for x, of_rank in zip(values, norms, strict=True)
                    ]
                if senders:
                    reference[element] -= 0.4 * sum(values) / senders
            assert weights == pytest.approx(reference, abs=1e-5)
            reference = weights


@fast_in(
    "options",
    [{}],
    [{}, {"counts_all": True}, {"clip_to_median": False}],
)
def test_follows_the_oracle(pool4, options):
    pool4.run(_follows, args=(options,))


def _equals_diloco(rank, world_size):
    """With all elements sent at full precision, and nothing scaled down, it is diloco without momentum."""
    with process_group():
        results = []
        for algorithm, options in (
            ("diloco", {"outer_momentum": 0.0}),
            ("sparseloco", {"codec": "topk:chunk=4096,k=256", "feedback_decay": 1.0, "clip_to_median": False}),
        ):
            model = Rows(numel=200)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            options = {"sync_every": 3, "outer_lr": 0.7, "fragments": 1, **options}
            bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
            results.append([train_step(model, optimizer, rank, step) for step in range(9)])
        for ours, theirs in zip(*results, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_all_elements_sent_equal_diloco(pool2):
    pool2.run(_equals_diloco)


def _bytes(rank, world_size):
    with process_group():
        model = torch.nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="sparseloco", sync_every=1)
        group = bagua.get_default_group()
        model.weight.grad = torch.randn(1024, 1024)
        before = group.bytes_sent
        optimizer.step()
        return (group.bytes_sent - before) / (4 * 1024 * 1024)


def test_bytes_of_an_exchange(pool2):
    """To one other rank: 1/140 of float32, digest included."""
    for share in pool2.run(_bytes):
        assert 0 < share <= 1 / 140


def _resumes(rank, world_size):
    with process_group():
        histories = []
        for stop in (9, 5):  # an exchange is under way after five steps
            model = Rows()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            options = {"sync_every": 4, "overlap_steps": 2, "state_dtype": "bfloat16"}
            bagua.with_bagua(model, optimizer, algorithm="sparseloco", **options)
            history = [train_step(model, optimizer, rank, step) for step in range(stop)]
            if stop < 9:
                saved = copy.deepcopy((model.state_dict(), model.bagua.state_dict()))
                model = Rows()
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                bagua.with_bagua(model, optimizer, algorithm="sparseloco", **options)
                model.load_state_dict(saved[0])
                model.bagua.load_state_dict(saved[1])
                history += [train_step(model, optimizer, rank, step) for step in range(stop, 9)]
            histories.append(history)
        assert histories[0] == histories[1]


def test_resumes_with_an_exchange_under_way(pool2):
    pool2.run(_resumes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"outer_lr": -1.0}, "outer_lr is -1.0, expected a number above 0"),
        ({"feedback_decay": 0.0}, "feedback_decay is 0.0, expected a number above 0"),
        ({"codec": "qsgd"}, "codec 'qsgd' is no contraction"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("sparseloco", options)
