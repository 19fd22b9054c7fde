"""The figures of `/metrics`, over OTLP: the same numbers, from one worker a minute.

They are of the whole installation, as those of `/metrics` are, so the counters are cumulative and
it does not matter which process sends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from django.conf import settings
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from executions.services.metrics.collecting import collect
from executions.services.metrics.exposition import Family
from executions.services.telemetry.sending import SCOPE, resource_of, session

logger = logging.getLogger(__name__)

_CUMULATIVE = AggregationTemporality.CUMULATIVE
# When they were counted from nobody has noted. Zero says so.
_UNKNOWN = 0
_Labels = tuple[tuple[str, str], ...]


def send() -> bool:
    """Collect and send all of them once; whether the collector took them."""
    telemetry = settings.TELEMETRY
    if telemetry is None:
        return False
    exporter = OTLPMetricExporter(
        telemetry.address("metrics"),
        headers=dict(telemetry.headers),
        timeout=telemetry.seconds,
        session=session(),
    )
    try:
        metrics = metrics_of(collect(with_tenants=True), time.time_ns())
        scoped = ScopeMetrics(SCOPE, metrics, "")
        data = MetricsData([ResourceMetrics(resource_of(telemetry.service), [scoped], "")])
        taken = exporter.export(data) is MetricExportResult.SUCCESS
    finally:
        exporter.shutdown()
    if not taken:
        logger.warning("the metrics were not taken by %s", telemetry.address("metrics"))
    return taken


def metrics_of(families: Iterable[Family], now: int) -> list[Metric]:
    """Each family with samples as a metric of OTLP, under the name that Prometheus has it by."""
    return [_metric(family, now) for family in families if family.samples]


def _metric(family: Family, now: int) -> Metric:
    unit = "s" if family.name.endswith("_seconds") else "1"
    if family.kind == "histogram":
        points = _histograms(family, now)
        return Metric(family.name, family.help, unit, Histogram(points, _CUMULATIVE))
    numbers = [
        NumberDataPoint(dict(labels), _UNKNOWN, now, value) for _, labels, value in family.samples
    ]
    if family.kind == "counter":
        data = Sum(numbers, _CUMULATIVE, is_monotonic=True)
        return Metric(family.name, family.help, unit, data)
    return Metric(family.name, family.help, unit, Gauge(numbers))


def _histograms(family: Family, now: int) -> list[HistogramDataPoint]:
    """Prometheus' buckets hold what is in the smaller ones too; those of OTLP do not."""
    buckets: dict[_Labels, list[tuple[float, float]]] = {}
    totals: dict[_Labels, float] = {}
    for suffix, labels, value in family.samples:
        key = _key(labels)
        if suffix == "_bucket":
            buckets.setdefault(key, []).append((float(labels["le"]), value))
        elif suffix == "_sum":
            totals[key] = value
    points = []
    for key, seen in buckets.items():
        counts = [int(value) for _, value in seen]
        alone = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
        bounds = [bound for bound, _ in seen if bound != float("inf")]
        points.append(
            HistogramDataPoint(
                dict(key),
                _UNKNOWN,
                now,
                counts[-1],
                totals.get(key, 0.0),
                alone,
                bounds,
                # The least and the most, which nobody has kept: OTLP leaves out what is not known.
                None,  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
            )
        )
    return points


def _key(labels: Mapping[str, str]) -> _Labels:
    return tuple((name, value) for name, value in labels.items() if name != "le")
