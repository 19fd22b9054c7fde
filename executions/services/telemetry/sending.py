"""Sending spans and metrics over OTLP/HTTP, with OpenTelemetry's own packages.

They are no part of what is installed by default: see requirements-otel.in. Nothing else imports
this module than what has looked whether they are wanted.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable
from time import perf_counter

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from executions.runs.models import Execution
from executions.services.telemetry.spans import Span, admission_spans, ended_spans, is_sampled
from sandbox_site.observability import Telemetry

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
