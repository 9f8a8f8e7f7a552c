"""Metrics of a wrapped model, or of any function that returns some, for dashboards: values, TensorBoard, Prometheus.

They are computed when they are read, and nothing is sent anywhere. Only this module uses TensorBoard and
prometheus-client; `pip install bagua[metrics]` installs both.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from bagua.data_parallel.handle import BaguaHandle, handle_of
from bagua.data_parallel.reducer import Reducer
from bagua.errors import InvalidArgument

__all__ = ["FiguresCollector", "PrometheusCollector", "add_figures", "add_scalars", "values"]

# Prometheus' counters, which only grow, until the model is wrapped again.
_COUNTERS = {
    "steps": "Synchronising backwards.",
    "exposed_communication_seconds": "Time in which this rank waited for communication.",
    "sent_bytes": "Payload bytes that this rank has sent for the model.",
    "network_sent_bytes": "Payload bytes that this rank has sent for the model over a network, not in shared memory.",
}
_GAUGES = {
    "last_step_seconds": "From the end of the last backward but one to the end of the last.",
    "last_step_exposed_communication_seconds": "Time of the last step in which this rank waited for communication.",
    "last_step_sent_bytes": "Payload bytes that this rank has sent for the model in the last step.",
    "last_step_network_sent_bytes": "Payload bytes that this rank has sent over a network in the last step.",
    "slowest_operation_seconds": "The longest operation of a bucket since the last backward but one.",
    "buckets": "Messages per step, one for each bucket.",
    "bucket_bytes": "Bytes of all buckets at full precision.",
    "world_size": "Ranks that train together.",
}
_OF_LAST_STEP = tuple(_GAUGES)[: list(_GAUGES).index("buckets")]
_LABELS = ("model", "rank", "group", "algorithm")


class ScalarWriter(Protocol):
    """The method of torch.utils.tensorboard.SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None: ...


def values(model: torch.nn.Module) -> dict[str, float]:
    """Returns this rank's figures by name, without communication.

    Any thread may call it. A call takes one to three milliseconds, so call it every few seconds.

    ``steps``, ``exposed_communication_seconds``, ``sent_bytes`` and ``network_sent_bytes`` (without the bytes that went
    through shared memory) count since the model was wrapped. ``last_step_seconds``,
    ``last_step_exposed_communication_seconds``, ``last_step_sent_bytes``, ``last_step_network_sent_bytes`` and
    ``slowest_operation_seconds`` describe the last step; they are 0 before the first. ``buckets``, ``bucket_bytes`` and
    ``world_size`` describe the model. ``bucket_bytes`` is at full precision: compare it with ``sent_bytes`` to see what
    a codec saves.

    Raises:
        InvalidArgument: the model is not wrapped.

    Example:
        >>> bagua.metrics.values(model)["exposed_communication_seconds"] >= 0
        True
    """
    handle = handle_of(model)
    if handle is None:
        raise InvalidArgument(
            f"the {type(model).__name__} is not wrapped, so there are no figures; call with_bagua first"
        )
    return _values(handle)


def add_scalars(model: torch.nn.Module, writer: ScalarWriter, step: int | None = None) -> None:
    """Writes ``values(model)`` as scalars ``bagua/<name>``. Call it every hundred steps or so.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, or an object with its ``add_scalar``. One per rank, each with a
            ``log_dir`` of its own, or on rank 0 only.
        step: the x-axis; by default the number of steps.

    Raises:
        InvalidArgument: the model is not wrapped.

    Example:
        >>> writer = torch.utils.tensorboard.SummaryWriter(f"runs/rank{bagua.get_rank()}")     # doctest: +SKIP
        >>> if step % 100 == 0:                                                   # doctest: +SKIP
        ...     bagua.metrics.add_scalars(model, writer, step)
    """
    figures = values(model)
    add_figures(figures, writer, int(figures["steps"]) if step is None else step)


def add_figures(figures: Mapping[str, float], writer: ScalarWriter, step: int, prefix: str = "bagua") -> None:
    """Writes figures as scalars ``<prefix>/<name>``; the other arguments are those of ``add_scalars``."""
    for name, value in figures.items():
        writer.add_scalar(f"{prefix}/{name}", value, step)


class FiguresCollector:
    """A collector of prometheus-client that calls a function at every scrape and reports gauges ``<prefix>_<name>``.

    Args:
        figures: returns numbers by name; called on any thread. Characters that Prometheus does not allow become "_".
        prefix: prefix of the names.
        labels: labels of every gauge.

    Raises:
        InvalidArgument: prometheus-client is not installed.

    Example:
        >>> from prometheus_client import REGISTRY                                # doctest: +SKIP
        >>> REGISTRY.register(bagua.metrics.FiguresCollector(lambda: {"queue": 3}, "serving"))    # doctest: +SKIP
    """

    def __init__(
        self, figures: Callable[[], Mapping[str, float]], prefix: str, labels: Mapping[str, str] | None = None
    ) -> None:
        self._core = _prometheus("FiguresCollector")
        self._figures, self._prefix, self._labels = figures, prefix, dict(labels or {})

    def collect(self) -> list[Any]:
        """Returns one family per figure."""
        families = []
        for name, value in self._figures().items():
            full = re.sub("[^a-zA-Z0-9_:]", "_", f"{self._prefix}_{name}")
            family = self._core.GaugeMetricFamily(full, name, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            families.append(family)
        return families


def _prometheus(what: str) -> Any:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise InvalidArgument(
            f"{what} needs prometheus-client, which cannot be imported ({error}); pip install prometheus-client"
        ) from error
    return core


class PrometheusCollector:
    """A collector of prometheus-client that reports ``values`` as ``bagua_<name>``; counters end in ``_total``.

    Labels: ``model``, ``rank``, ``group`` and ``algorithm``. The collector holds weak references to the models, and
    keeps reporting a model that is wrapped again. Use one collector for all models of a process: the registry refuses a
    second one, because its metrics would have the same names.

    Args:
        models: a wrapped model, whose label is the name of its class, or a dict of models by label.

    Raises:
        InvalidArgument: a model is not wrapped, there is none, or prometheus-client is not installed.

    Example:
        >>> from prometheus_client import REGISTRY, start_http_server             # doctest: +SKIP
        >>> REGISTRY.register(bagua.metrics.PrometheusCollector({"g": generator, "d": critic}))  # doctest: +SKIP
        >>> start_http_server(9400 + bagua.get_local_rank())                      # doctest: +SKIP
    """

    def __init__(self, models: torch.nn.Module | Mapping[str, torch.nn.Module]) -> None:
        if not isinstance(models, Mapping):
            models = {type(models).__name__: models}
        if not models:
            raise InvalidArgument("models is empty, expected a wrapped model, or a dict of models by name")
        for model in models.values():
            values(model)  # raises if the model is not wrapped
        self._core = _prometheus("PrometheusCollector")
        self._models = {name: weakref.ref(model) for name, model in models.items()}

    def describe(self) -> list[Any]:
        """Returns the families without values, from which the registry recognises a second collector."""
        return list(self._families().values())

    def collect(self) -> list[Any]:
        """Returns one family per figure; none if all models were deleted or unwrapped with ``model.bagua.remove()``."""
        families = self._families()
        for label, reference in self._models.items():
            model = reference()
            handle = None if model is None else handle_of(model)
            if handle is not None:
                labels = [label, str(handle.group.rank), handle.group.name, handle.algorithm.name]
                for name, figure in _values(handle).items():
                    families[name].add_metric(labels, figure)
        return [family for family in families.values() if family.samples]

    def _families(self) -> dict[str, Any]:
        kinds = ((self._core.CounterMetricFamily, _COUNTERS), (self._core.GaugeMetricFamily, _GAUGES))
        return {
            name: kind(f"bagua_{name}", text, labels=_LABELS) for kind, texts in kinds for name, text in texts.items()
        }


def _values(handle: BaguaHandle) -> dict[str, float]:
    totals, buckets = handle.reducer.recorder.totals(), handle.buckets
    return {
        "steps": totals["steps"],
        "exposed_communication_seconds": totals["exposed_s"],
        "sent_bytes": totals["bytes_sent"],
        "network_sent_bytes": totals["network_bytes_sent"],
        **_of_last_step(handle.reducer),
        "buckets": len(buckets),
        "bucket_bytes": sum(bucket.flat.nbytes for bucket in buckets),
        "world_size": handle.group.size,
    }


def _of_last_step(reducer: Reducer) -> dict[str, float]:
    steps = reducer.recorder.steps(last=2)
    if not steps:
        return dict.fromkeys(_OF_LAST_STEP, 0)
    last = steps[-1]
    before_ns = steps[-2].end_ns if len(steps) > 1 else last.begin_ns
    # Weights may travel before the backward of the step, or after it.
    events = [
        (group.name, event) for group in reducer.groups for event in group.events(parts=False, after_ns=before_ns)
    ]
    spans, _ = reducer.recorder.spans(events)
    slowest_ns = max((span.end_ns - span.begin_ns for span in spans if span.kind == "operation"), default=0)
    times = ((last.end_ns - before_ns) / 1e9, last.exposed_ns / 1e9)
    return dict(zip(_OF_LAST_STEP, (*times, last.bytes_sent, last.network_bytes_sent, slowest_ns / 1e9), strict=True))
