"""Metrics over clients of unequal sizes against one pass over all examples."""

from __future__ import annotations

import math

import pytest
import torch

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.library import metrics
from tests.conformance.training import process_group

SIZES = (5, 0, 8, 1, 3)  # examples by client, padded to 8


def examples():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(SIZES), 8, 4, generator=generator)
    labels = torch.randint(4, (len(SIZES), 8), generator=generator)
    mask = torch.arange(8) < torch.tensor(SIZES).unsqueeze(1)
    logits[~mask] = float("nan")  # what pads does not count
    return logits, labels, mask


def of_client(logits, labels, mask):
    def of(part):
        args = (logits[part], labels[part], mask[part])
        return {
            "accuracy": metrics.accuracy(*args),
            "loss": metrics.cross_entropy(*args),
            "examples": metrics.count(args[2]),
            "label": metrics.mean(args[1], args[2]),
        }

    return metrics.merge(of(slice(0, 3)), of(slice(3, 8)))  # batches


def in_loops(taking_part):
    logits, labels, _ = examples()
    right = loss = number = label = 0.0
    for client, size in enumerate(SIZES):
        for example in range(size if taking_part[client] else 0):
            row, correct = logits[client, example].tolist(), int(labels[client, example])
            right += row.index(max(row)) == correct
            loss += math.log(sum(math.exp(x) for x in row)) - row[correct]
            label += correct
            number += 1
    return {"accuracy": right / number, "loss": loss / number, "examples": number, "label": label / number}


def on_ranks(rank, world_size, split):
    with process_group():
        mine = federated.local_slice(5, num_local=split)
        placed = tuple(leaf[mine] for leaf in examples())
        for taking_part in (torch.tensor([True] * 5), torch.tensor([True, True, False, True, True])):
            with_mask = None if taking_part.all() else taking_part[mine]
            program = federated.program(
                lambda *data, mask=with_mask: metrics.reduce(federated.map_fn(of_client, data), mask=mask),
                clients=5,
                num_local=split,
            )
            with federated.record() as verbs:
                found = metrics.result(program(*placed))
            assert verbs == ["reduce_sum"]
            assert {key: float(value) for key, value in found.items()} == pytest.approx(in_loops(taking_part), rel=1e-5)


@pytest.mark.parametrize("split", [[3, 2], [4, 0, 1]], ids=str)
def test_metrics_are_those_of_all_examples(pools, split):
    pools[len(split)].run(on_ranks, args=(split,))


def test_of_each_client():
    placed = torch.func.vmap(of_client)(*examples())
    found = metrics.result(placed)["accuracy"]
    assert found.shape == (5,) and found[1].isnan()
    for client in (0, 2, 3, 4):
        alone = [i == client for i in range(5)]
        assert float(found[client]) == pytest.approx(in_loops(alone)["accuracy"])


def test_weights_and_several_at_once():
    values, weights = torch.tensor([1.0, 2.0, float("inf")]), torch.tensor([0.5, 2.0, 0.0])
    assert metrics.result(metrics.mean(values, weights)) == 4.5 / 2.5
    both = metrics.Ratio(torch.tensor([1.0, 6.0]), torch.tensor([2.0, 4.0]))
    assert metrics.result([both, metrics.count(weights)])[0].tolist() == [0.5, 1.5]


def test_halves_are_counted_and_added_up_in_float32():
    """Of so many examples neither the number nor the sum is one of the dtype."""
    number, dtype = 70_000, torch.float16
    values = torch.full((number,), 3.0, dtype=dtype)

    def numbers(metric):
        return [float(leaf) for leaf in metric]

    found = metrics.mean(values, torch.ones(number))
    assert numbers(found) == numbers(metrics.mean(values)) == [3.0 * number, number]
    one = metrics.mean(values[:1])
    assert numbers(metrics.merge(found, one)) == [3.0 * (number + 1), number + 1]
    assert numbers(metrics.count(torch.ones(number, dtype=dtype))) == [number]


def test_pads_are_no_classes_and_have_no_derivative():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [0.5, 0.0]])
    labels, mask = torch.tensor([0, -100, 1]), torch.tensor([True, False, True])
    expected = torch.nn.functional.cross_entropy(logits[mask], labels[mask])
    torch.testing.assert_close(metrics.result(metrics.cross_entropy(logits, labels, mask)), expected)
    gradient = torch.func.grad(lambda x: metrics.cross_entropy(x, labels, mask).sum)(logits)
    assert gradient.isfinite().all() and not gradient[1].any() and gradient[0].any()
    weights = torch.tensor([1.0, 0.0, 1.0])
    gradient = torch.func.grad(lambda w: metrics.mean(torch.tensor([1.0, float("nan"), 3.0]), w).sum)(weights)
    assert gradient.tolist() == [1.0, 0.0, 3.0]


def test_a_mask_of_clients_that_is_none():
    program = federated.program(lambda x: metrics.reduce(metrics.Total(x), mask=torch.ones(3)), clients=3)
    with pytest.raises(InvalidArgument, match=r"mask of torch\..* and shape .*, expected bools \[3\]"):
        program(torch.ones(3))


def test_mistakes():
    with pytest.raises(InvalidArgument, match=r"logits of shape \[3, 4\] for labels of shape \[4\]"):
        metrics.accuracy(torch.zeros(3, 4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match=r"mask of shape \[2\] for values of shape \[3\]"):
        metrics.accuracy(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(2))
