"""Traces and metrics for an OpenTelemetry collector."""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from time import perf_counter
from typing import Any

import requests
from django.conf import settings
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
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
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from executions.capabilities.observability.destinations import Telemetry
from executions.capabilities.observability.metrics import Family, collect
from executions.runs.models import Execution
from executions.runs.network import OUTCOMES
from providers.network import NETWORK

REQUEST, ADMISSION, EXECUTION = "request", "admission", "execution"
QUEUE, ATTEMPT, START, RUN, CLOSE = (
    *("queue", "provider attempt", "sandbox start"),
    *("sandbox run", "close"),
)
_SAMPLED = 1
_NANOSECONDS = 1_000_000_000
_MS = 1_000_000


@dataclass(frozen=True)
class Span:
    """One span. Ids are as OTLP has them, `parent` 0 for none; times in nanoseconds since 1970."""

    name: str
    trace: int
    id: int
    parent: int
    start: int
    end: int
    is_server: bool = False
    error: str = ""
    attributes: Mapping[str, str | int | bool] = field(default_factory=dict)


def is_sampled(execution: Execution) -> bool:
    """As its caller decided. Without a trace of the caller's, it has one of its own."""
    parent = execution.traceparent
    return parent is None or bool(int(parent[53:55], 16) & _SAMPLED)


def admission_spans(execution: Execution, began: int, recorded: int) -> Iterator[Span]:
    """Of one that was just recorded: how long that took, and of one that is queued its request,
    which has its answer."""
    yield _span(execution, ADMISSION, REQUEST, began, recorded)
    if execution.mode == Execution.Mode.ASYNC:
        yield _request(execution, began, recorded)


def ended_spans(execution: Execution) -> Iterator[Span]:
    """Of one that has ended, by its timings, which have milliseconds and no gaps."""
    end = _at(execution.finished_at or execution.created_at)
    begin = min(_at(execution.created_at), end)
    if execution.total_ms is not None:
        begin = end - _ns(execution.total_ms)
    if execution.mode != Execution.Mode.ASYNC:
        yield _request(execution, begin, end)
    yield _span(execution, EXECUTION, REQUEST, begin, end, **_outcome(execution))
    recorded = min(begin + _ns(execution.received_ms), end)
    served = recorded + _ns(execution.queue_ms) if execution.queue_ms is not None else end
    yield _span(execution, QUEUE, EXECUTION, recorded, min(served, end))
    yield from _left(execution, recorded, min(served, end))
    if execution.queue_ms is None:
        return
    attempt = f"{ATTEMPT} {execution.provider}"
    yield _span(
        execution,
        ATTEMPT,
        EXECUTION,
        served,
        end,
        key=attempt,
        **_outcome(execution),
    )
    if execution.start_ms is None:
        return
    started = served + _ns(execution.start_ms)
    yield _span(execution, START, attempt, served, started)
    if execution.run_ms is None:
        return
    ran = started + _ns(execution.run_ms)
    yield _span(execution, RUN, attempt, started, ran, **_outcome(execution))
    yield _span(execution, CLOSE, attempt, ran, max(ran, end))


def _left(execution: Execution, begin: int, until: int) -> Iterator[Span]:
    """Providers that were tried and left before the one that served, one after the other."""
    left = [hop for hop in execution.hops or () if hop.get("outcome") != "served"]
    at = max(begin, until - sum(_ns(hop.get("ms")) for hop in left))
    for number, hop in enumerate(left):
        following = at + _ns(hop.get("ms"))
        yield _span(
            execution,
            ATTEMPT,
            EXECUTION,
            at,
            following,
            key=f"{ATTEMPT} {number}",
            provider=str(hop.get("provider")),
            outcome=str(hop.get("outcome")),
            error=str(hop.get("code") or ""),
        )
        at = following


def _request(execution: Execution, begin: int, end: int) -> Span:
    parent = int(execution.traceparent[36:52], 16) if execution.traceparent else 0
    return Span(
        REQUEST,
        _trace(execution),
        _id(execution, REQUEST),
        parent,
        begin,
        end,
        is_server=bool(execution.request_id),
        attributes={**_facts(execution), "cofferdam.request.id": execution.request_id},
    )


def _span(
    execution: Execution,
    name: str,
    parent: str,
    start: int,
    end: int,
    *,
    key: str = "",
    error: str = "",
    **more: str | int,
) -> Span:
    told = {f"cofferdam.{key}": value for key, value in more.items()}
    return Span(
        name,
        _trace(execution),
        _id(execution, key or name),
        _id(execution, parent),
        start,
        max(start, end),
        error=error,
        attributes={**_facts(execution), **told},
    )


def _facts(execution: Execution) -> dict[str, str | int | bool]:
    facts: dict[str, Any] = {
        "execution.id": str(execution.pk),
        "tenant": execution.tenant_slug,
        "language": execution.language,
        "mode": execution.mode,
        "session.id": str(execution.session_id) if execution.session_id else None,
    }
    return {f"cofferdam.{name}": value for name, value in facts.items() if value is not None}


def _outcome(execution: Execution) -> dict[str, Any]:
    facts = {
        "status": str(execution.status),
        "provider": execution.provider or None,
        "config_version": execution.config_version,
        "runtime": execution.runtime or None,
        "isolation": execution.isolation or None,
        "exit_code": execution.exit_code,
        "error_code": execution.error_code or None,
        **_attempts(execution),
    }
    succeeded = execution.status == Execution.Status.SUCCEEDED
    error = "" if succeeded else execution.error_code or str(execution.status)
    return {**{name: value for name, value in facts.items() if value is not None}, "error": error}


def _attempts(execution: Execution) -> dict[str, int]:
    """How many attempts to reach hosts ended in each way, of a run that had a network."""
    told = execution.meta.get(NETWORK)
    if not isinstance(told, Mapping):
        return {}
    counts = {outcome: told.get(outcome) for outcome in OUTCOMES}
    return {f"network.{name}": n for name, n in counts.items() if type(n) is int}


def _trace(execution: Execution) -> int:
    return int(execution.traceparent[3:35], 16) if execution.traceparent else execution.pk.int


def _id(execution: Execution, name: str) -> int:
    digest = hashlib.sha256(f"{execution.pk} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


def _at(moment: datetime) -> int:
    return int(moment.timestamp() * _NANOSECONDS)


def _ns(milliseconds: Any) -> int:
    return max(0, int(milliseconds * _MS)) if isinstance(milliseconds, (int, float)) else 0


logger = logging.getLogger(__name__)

SCOPE = InstrumentationScope("cofferdam")
_FLAGS = TraceFlags(TraceFlags.SAMPLED)


def resource_of(service: str, instance: str = "") -> Resource:
    """As OTEL_RESOURCE_ATTRIBUTES says, with the service's name, and the host's where one is meant:
    whichever sends the metrics, they are of all."""
    named = {"service.name": service}
    ours = Resource({**named, "service.instance.id": instance} if instance else named)
    return OTELResourceDetector().detect().merge(ours)


def session() -> requests.Session:
    """For an exporter. Of an answer it needs status and headers; its body may have no end."""
    made = requests.Session()
    made.stream = True
    return made


class Traces:
    """Sends spans in batches from a thread of its own. What the collector does not take in time,
    or what is more than its queue holds, is dropped: no run waits for it, and none fails."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._making = threading.Lock()
        self._processor: BatchSpanProcessor | None = None
        self._resource: Resource | None = None

    def admitted(self, execution: Execution, began: float) -> None:
        """It was recorded just now; `began` is the `perf_counter` of its request."""
        now = time.time_ns()
        self._put(execution, admission_spans, now - int((perf_counter() - began) * 1e9), now)

    def ended(self, execution: Execution) -> None:
        """Its record is complete."""
        self._put(execution, ended_spans)

    def flush(self, seconds: float) -> None:
        if self._processor is not None:
            self._processor.force_flush(int(seconds * 1000))

    def close(self) -> None:
        if self._processor is not None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _put(
        self, execution: Execution, spans_of: Callable[..., Iterable[Span]], *times: int
    ) -> None:
        """Nothing that goes wrong here is the run's."""
        try:
            if is_sampled(execution):
                processor = self._started()
                for span in spans_of(execution, *times):
                    processor.on_end(self._readable(span))
        except Exception:
            logger.exception("the spans of execution %s could not be sent", execution.pk)

    def _started(self) -> BatchSpanProcessor:
        """With the first span: a process may fork before, and most commands have none."""
        with self._making:
            if self._processor is None:
                self._resource = resource_of(self._telemetry.service, self._telemetry.instance)
                exporter = OTLPSpanExporter(
                    self._telemetry.address("traces"),
                    headers=dict(self._telemetry.headers),
                    timeout=self._telemetry.seconds,
                    session=session(),
                )
                self._processor = BatchSpanProcessor(exporter)
                atexit.register(self.close)
            return self._processor

    def _readable(self, span: Span) -> ReadableSpan:
        context = SpanContext(span.trace, span.id, is_remote=False, trace_flags=_FLAGS)
        parent = None
        if span.parent:
            parent = SpanContext(span.trace, span.parent, is_remote=True, trace_flags=_FLAGS)
        return ReadableSpan(
            span.name,
            context,
            parent,
            self._resource,
            dict(span.attributes),
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=SCOPE,
        )


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
