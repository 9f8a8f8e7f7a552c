"""Figures of a wrapped model for dashboards: plain values, TensorBoard scalars, Prometheus metrics.

Beside the data path, and pull only: nothing is computed before somebody asks, nothing is sent anywhere. Neither
TensorBoard nor prometheus-client is needed for the rest of bagua; `pip install bagua[metrics]` installs both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from bagua.errors import InvalidArgument
from bagua.handle import BaguaHandle, handle_of
from bagua.timeline import Timeline

__all__ = ["PrometheusCollector", "add_scalars", "values"]

# What Prometheus calls counters: they only grow, until the model is wrapped anew.
_COUNTERS = {
    "steps": "Synchronising backwards.",
    "exposed_communication_seconds": "Time in which this rank waited for communication.",
    "bytes_sent": "Payload bytes that this rank has sent.",
}
_GAUGES = {
    "last_step_seconds": "From the end of the last backward but one to the end of the last.",
    "last_step_exposed_communication_seconds": "Of it, what this rank waited for communication.",
    "last_step_bytes_sent": "Payload bytes that this rank has sent in it.",
    "slowest_operation_seconds": "The longest operation of a bucket since the last backward but one.",
    "buckets": "Messages per step, one for each bucket.",
    "bucket_bytes": "Bytes of all buckets at full precision.",
    "world_size": "Ranks that train together.",
}


class ScalarWriter(Protocol):
    """What is needed of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None: ...


def values(model: torch.nn.Module) -> dict[str, float]:
    """This rank's figures, by name; local, from any thread. Takes up to 20 milliseconds: ask every few seconds.

    ``steps``, ``exposed_communication_seconds`` and ``bytes_sent`` count since the model was wrapped. Of the last step
    there are ``last_step_seconds``, ``last_step_exposed_communication_seconds``, ``last_step_bytes_sent`` and
    ``slowest_operation_seconds``, all 0 before there is one. ``buckets``, ``bucket_bytes`` (at full precision, so
    bytes_sent beside it shows what a codec saves) and ``world_size`` describe the model.

    Raises:
        InvalidArgument: the model is not wrapped.

    Example:
        >>> bagua.metrics.values(model)["exposed_communication_seconds"]          # doctest: +SKIP
        0.21
    """
    handle = handle_of(model)
    if handle is None:
        raise InvalidArgument(
            f"the {type(model).__name__} is not wrapped, so there are no figures; call with_bagua first"
        )
    return _values(handle)


def add_scalars(model: torch.nn.Module, writer: ScalarWriter, step: int | None = None) -> None:
    """Writes ``values(model)`` as scalars ``bagua/<name>``; call it every so many steps.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, or anything with its ``add_scalar``. One per rank, each with a
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
    for name, value in figures.items():
        writer.add_scalar(f"bagua/{name}", value, int(figures["steps"]) if step is None else step)


class PrometheusCollector:
    """A collector of prometheus-client: ``bagua_<name>`` of ``values``, counters with the ending ``_total``.

    Labels: ``rank``, ``group`` and ``algorithm``. It holds the model weakly, and follows it when it is wrapped anew.

    Raises:
        InvalidArgument: the model is not wrapped, or prometheus-client is not installed.

    Example:
        >>> from prometheus_client import REGISTRY, start_http_server             # doctest: +SKIP
        >>> REGISTRY.register(bagua.metrics.PrometheusCollector(model))           # doctest: +SKIP
        >>> start_http_server(9400 + bagua.get_local_rank())                      # doctest: +SKIP
    """

    def __init__(self, model: torch.nn.Module) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise InvalidArgument(
                f"PrometheusCollector needs prometheus-client, which cannot be imported ({error}); "
                "pip install prometheus-client"
            ) from error
        values(model)  # refuses one that is not wrapped
        self._core = core
        self._model = weakref.ref(model)

    def describe(self) -> list[Any]:
        """Nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family per figure; none when the model is gone, or ``model.bagua.remove()`` was called."""
        model = self._model()
        handle = None if model is None else handle_of(model)
        if handle is None:
            return
        labels = {"rank": str(handle.group.rank), "group": handle.group.name, "algorithm": handle.algorithm.name}
        figures = _values(handle)
        for kind, texts in ((self._core.CounterMetricFamily, _COUNTERS), (self._core.GaugeMetricFamily, _GAUGES)):
            for name, text in texts.items():
                family = kind(f"bagua_{name}", text, labels=list(labels))
                family.add_metric(list(labels.values()), figures[name])
                yield family


def _values(handle: BaguaHandle) -> dict[str, float]:
    timeline, buckets = handle.timeline(parts=False), handle.buckets
    return {
        "steps": timeline.totals["steps"],
        "exposed_communication_seconds": timeline.totals["exposed_s"],
        "bytes_sent": timeline.totals["bytes_sent"],
        **_of_last_step(timeline),
        "buckets": len(buckets),
        "bucket_bytes": sum(bucket.flat.nbytes for bucket in buckets),
        "world_size": handle.group.size,
    }


def _of_last_step(timeline: Timeline) -> dict[str, float]:
    names = ("last_step_seconds", "last_step_exposed_communication_seconds", "last_step_bytes_sent")
    if not timeline.steps:
        return dict.fromkeys((*names, "slowest_operation_seconds"), 0)
    last = timeline.steps[-1]
    before_ns = timeline.steps[-2].end_ns if len(timeline.steps) > 1 else last.begin_ns
    # Weights may travel before the backward of the step, or after it.
    operations = [span for span in timeline.spans if span.kind == "operation" and span.end_ns > before_ns]
    slowest_ns = max((span.end_ns - span.begin_ns for span in operations), default=0)
    figures = ((last.end_ns - before_ns) / 1e9, last.exposed_ns / 1e9, last.bytes_sent)
    return {**dict(zip(names, figures, strict=True)), "slowest_operation_seconds": slowest_ns / 1e9}
