"""Figures for dashboards: the same ones from `values`, in TensorBoard and in Prometheus' text."""

import copy
import math
import sys

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.profiler.training import train

COUNTERS = {"steps", "exposed_communication_seconds", "sent_bytes", "network_sent_bytes"}


def _values(rank, world_size):
    with process_group():
        before = bagua.metrics.values(train(steps=0))
        model = train("bytegrad", steps=3)
        found, timeline = bagua.metrics.values(model), model.bagua.timeline()
        return before, found, timeline, sum(bucket.flat.nbytes for bucket in model.bagua.buckets)


def test_values(pool2):
    before, found, timeline, bucket_bytes = pool2.run(_values)[0]
    assert set(before) == set(found)
    assert {name: value for name, value in before.items() if value} == {
        "buckets": before["buckets"],
        "bucket_bytes": before["bucket_bytes"],
        "world_size": 2,
    }
    last = timeline.steps[-1]
    assert found["steps"] == 3
    assert found["sent_bytes"] == sum(step.bytes_sent for step in timeline.steps) > 0
    assert found["network_sent_bytes"] == found["last_step_network_sent_bytes"] == 0, "the ranks share memory"
    assert found["exposed_communication_seconds"] == pytest.approx(sum(s.exposed_ns for s in timeline.steps) / 1e9)
    assert found["last_step_seconds"] == (last.end_ns - timeline.steps[-2].end_ns) / 1e9 > 0
    assert found["last_step_exposed_communication_seconds"] == last.exposed_ns / 1e9
    assert found["last_step_sent_bytes"] == last.bytes_sent
    assert 0 < found["slowest_operation_seconds"] < 15
    assert found["bucket_bytes"] == bucket_bytes > 3 * last.bytes_sent, "8 bits in place of 32"


def test_a_plain_model(pool2):
    plain = torch.nn.Linear(2, 2)
    for ask in (bagua.metrics.values, bagua.metrics.PrometheusCollector):
        with pytest.raises(InvalidArgument, match="the Linear is not wrapped, .*call with_bagua first"):
            ask(plain)


class Writer:
    """Keeps what a SummaryWriter would write."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        assert isinstance(scalar_value, (int, float)) and math.isfinite(scalar_value)
        self.scalars[tag, global_step] = scalar_value


def _add_scalars(rank, world_size):
    with process_group():
        model, writer = train(steps=2), Writer()
        bagua.metrics.add_scalars(model, writer)
        bagua.metrics.add_scalars(model, writer, step=70)
        expected = bagua.metrics.values(model)
    assert writer.scalars == {
        (f"bagua/{name}", step): value for step in (2, 70) for name, value in expected.items()
    }  # fmt: skip


def test_scalars(pool2):
    pool2.run(_add_scalars)


def _tensorboard(rank, world_size, folder):
    from torch.utils.tensorboard import SummaryWriter

    with process_group():
        model = train(steps=2)
        with SummaryWriter(f"{folder}/rank{rank}") as writer:
            bagua.metrics.add_scalars(model, writer)
        return bagua.metrics.values(model)


@pytest.mark.needs("tensorboard")
def test_tensorboard_reads_them_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from bagua.testing import spawn

    for rank, expected in enumerate(spawn(_tensorboard, 2, args=(str(tmp_path),))):
        events = EventAccumulator(f"{tmp_path}/rank{rank}").Reload()
        written = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        assert {tag: scalars[0].value for tag, scalars in written.items()} == {
            f"bagua/{name}": pytest.approx(value) for name, value in expected.items()
        }
        assert {scalar.step for scalars in written.values() for scalar in scalars} == {2}


def _prometheus(rank, world_size, folder):
    from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile

    with process_group():
        model = train(steps=2)
        registry = CollectorRegistry()
        registry.register(bagua.metrics.PrometheusCollector(model))
        expected = bagua.metrics.values(model)
        write_to_textfile(f"{folder}/rank{rank}.prom", registry)

        copied = copy.deepcopy(model)
        assert "bagua" in vars(copied)
        with pytest.raises(InvalidArgument, match="not wrapped"):
            bagua.metrics.PrometheusCollector(copied)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        bagua.with_bagua(model, optimizer, algorithm="bytegrad")
        again = generate_latest(registry).decode()
        assert 'algorithm="bytegrad"' in again and 'algorithm="gradient_allreduce"' not in again
        model.bagua.remove()
        assert generate_latest(registry) == b""
        del model
        assert generate_latest(registry) == b""
    return expected


@pytest.mark.needs("prometheus_client")
def test_prometheus(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    from bagua.testing import spawn

    for rank, expected in enumerate(spawn(_prometheus, 2, args=(str(tmp_path),))):
        text = (tmp_path / f"rank{rank}.prom").read_text()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert set(families) == {f"bagua_{name}" for name in expected}
        for name, value in expected.items():
            family = families[f"bagua_{name}"]
            (sample,) = family.samples
            is_counter = name in COUNTERS
            assert family.type == ("counter" if is_counter else "gauge")
            assert sample.name == f"bagua_{name}{'_total' if is_counter else ''}"
            assert sample.value == pytest.approx(value)
            labels = {"rank": str(rank), "group": "world", "algorithm": "gradient_allreduce"}
            assert sample.labels == {"model": "Sequential", **labels}


def _two_models(rank, world_size):
    from prometheus_client import CollectorRegistry
    from prometheus_client.openmetrics.exposition import generate_latest

    with process_group():
        models = {"generator": train(steps=2), "critic": train("bytegrad", steps=3)}
        registry = CollectorRegistry()
        registry.register(bagua.metrics.PrometheusCollector(models))
        with pytest.raises(ValueError, match="bagua_steps"):
            registry.register(bagua.metrics.PrometheusCollector(models["critic"]))
        with pytest.raises(InvalidArgument, match="models is empty"):
            bagua.metrics.PrometheusCollector({})
        return generate_latest(registry).decode()


@pytest.mark.needs("prometheus_client")
def test_two_models_of_a_process():
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    from bagua.testing import spawn

    for text in spawn(_two_models, 2):
        families = {family.name: family for family in text_string_to_metric_families(text)}
        steps = {sample.labels["model"]: sample.value for sample in families["bagua_steps"].samples}
        assert steps == {"generator": 2, "critic": 3}


def _sent(rank, world_size):
    with process_group():
        models = [train("gradient_allreduce", steps=0) for _ in range(2)]
        steps = (2, 5)
        for model, num_steps in zip(models, steps, strict=True):
            for _ in range(num_steps):
                model(torch.randn(8, 128)).sum().backward()
                bagua.all_reduce(torch.ones(10_000))  # the user's, of the same group
        return [bagua.metrics.values(model) for model in models]


@fast_in("shares_memory", [False], [True, False])
def test_each_model_has_the_bytes_of_its_own_operations(shares_memory):
    """In an all_reduce of n bytes each of two ranks sends n; small messages outside buckets stay below 8 KB."""
    from bagua.testing import spawn

    for of_rank in spawn(_sent, 2, env={"BAGUA_SHARED_MEMORY": "1" if shares_memory else "0"}):
        for found, num_steps in zip(of_rank, (2, 5), strict=True):
            assert found["sent_bytes"] == pytest.approx(num_steps * found["bucket_bytes"], abs=8000)
            assert found["network_sent_bytes"] == (0 if shares_memory else found["sent_bytes"])
            assert found["last_step_network_sent_bytes"] == (0 if shares_memory else found["last_step_sent_bytes"])


def _without_the_package(rank, world_size):
    sys.modules["prometheus_client"] = None  # what an import then says is ImportError
    with process_group():
        with pytest.raises(InvalidArgument, match="cannot be imported .*; pip install prometheus-client"):
            bagua.metrics.PrometheusCollector(train(steps=1))


def test_without_prometheus_client():
    from bagua.testing import spawn

    spawn(_without_the_package, 1)
