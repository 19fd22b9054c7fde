"""Traces and metrics reach an OTLP collector over a real socket, and nothing else changes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from executions.capabilities.observability import capability
from executions.capabilities.observability.destinations import Telemetry
from executions.capabilities.observability.metrics import collect
from executions.capabilities.observability.otlp import Traces, send
from executions.runs import active_runs
from executions.runs.models import Execution
from executions.tasks import export_metrics
from sandbox_site import observability
from sandbox_site.environment import StrictEnv
from tests.capabilities.collectors import Receiver
from tests.conftest import Caller
from tests.support.ended_runs import ended
from tests.support.running import run, run_queued

pytestmark = pytest.mark.django_db

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CALLER}-01"
SECRET = "s3cr3t-words"


@pytest.fixture
def collector() -> Iterator[Receiver]:
    receiver = Receiver(lambda number: (200, {}))
    yield receiver
    receiver.close()


@pytest.fixture
def traces(collector: Receiver, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    settings.TELEMETRY = Telemetry(collector.url, (("x-key", "k"),), "cofferdam", "host1", 1)
    monkeypatch.setattr(capability, "traces", None)
    capability.start()
    made = capability.traces
    assert made is not None
    yield made
    made.close()


def asked(caller: Caller, code: str, trace: str = SAMPLED, **body: Any) -> Any:
    path = "/api/v1/executions"
    answer = caller.client.post(path, {"code": code, **body}, HTTP_TRACEPARENT=trace)
    assert active_runs.wait_for_ends(20)
    return answer


def body_of(request: tuple[str, dict[str, str], bytes]) -> bytes:
    _, headers, body = request
    return gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body


def spans_of(collector: Receiver, traces: Traces) -> list[Any]:
    traces.flush(30)
    found = []
    for request in collector.requests:
        assert request[0] == "/v1/traces"
        assert request[1]["x-key"] == "k"
        for resource in ExportTraceServiceRequest.FromString(body_of(request)).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert (named["service.name"], named["service.instance.id"]) == ("cofferdam", "host1")
            for scoped in resource.scope_spans:
                found += scoped.spans
    return found


def facts(span: Any) -> dict[str, Any]:
    values = {}
    for each in span.attributes:
        values[each.key.removeprefix("cofferdam.")] = getattr(
            each.value, each.value.WhichOneof("value")
        )
    return values


def test_a_run_is_a_tree_of_spans_in_its_callers_trace(
    scripted: object, alice: Caller, collector: Receiver, traces: Traces
) -> None:
    code = f"answer = ExecutionResult({SECRET!r}, {SECRET!r}, 3, 0.0)"
    answer = asked(alice, code, arguments={"a": SECRET}).json()

    spans = spans_of(collector, traces)
    by_name = {span.name: span for span in spans}
    assert len(spans) == len(by_name) == 8
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    request = by_name["request"]
    assert (request.parent_span_id.hex(), request.kind) == (CALLER, 2)
    parents = {span.name: span.parent_span_id for span in spans}
    assert parents["admission"] == parents["execution"] == request.span_id
    assert parents["queue"] == parents["provider attempt"] == by_name["execution"].span_id
    attempt = by_name["provider attempt"].span_id
    assert {parents[name] for name in ("sandbox start", "sandbox run", "close")} == {attempt}

    said = facts(by_name["provider attempt"])
    assert said["execution.id"] == answer["id"]
    assert (said["tenant"], said["status"]) == ("wonderland", "failed")
    assert said["provider"] == "scripted"
    assert by_name["execution"].status.code == 2
    timings = answer["timings"]
    ran = by_name["sandbox run"]
    assert ran.end_time_unix_nano - ran.start_time_unix_nano == int(timings["run_ms"] * 1e6)
    starts = [
        by_name[name].start_time_unix_nano for name in ("sandbox start", "sandbox run", "close")
    ]
    assert starts == sorted(starts)
    for span in spans:
        assert request.start_time_unix_nano <= span.start_time_unix_nano + 50_000_000
        assert span.end_time_unix_nano <= request.end_time_unix_nano + 50_000_000
    # No code, no output, no argument, no key.
    sent = b"".join(map(body_of, collector.requests))
    for hidden in (SECRET, alice.key_text):
        assert hidden.encode() not in sent


def test_a_queued_run_is_in_one_trace_across_its_processes(
    scripted: object, alice: Caller, collector: Receiver, traces: Traces
) -> None:
    answer = asked(alice, "pass", mode="async")
    assert answer.status_code == 202
    first = {span.name: span for span in spans_of(collector, traces)}
    assert set(first) == {"request", "admission"}
    # What the worker knows is what the row says.
    assert run_queued() is not None
    ran = {span.name: span for span in spans_of(collector, traces)[2:]}
    assert {"execution", "queue", "sandbox run"} <= set(ran)
    assert "request" not in ran
    assert ran["execution"].parent_span_id == first["request"].span_id
    assert {span.trace_id.hex() for span in ran.values()} == {TRACE}


def test_a_caller_without_a_trace_has_one_and_one_that_is_not_sampled_has_none(
    scripted: object, alice: Caller, collector: Receiver, traces: Traces
) -> None:
    asked(alice, "pass", SAMPLED[:-1] + "0")
    assert spans_of(collector, traces) == []
    pk = run(alice, "pass").json()["id"]
    spans = spans_of(collector, traces)
    assert {span.trace_id.hex() for span in spans} == {pk.replace("-", "")}
    (request,) = (span for span in spans if span.name == "request")
    assert request.parent_span_id == b""


def test_providers_that_were_left_are_attempts_of_their_own(
    alice: Caller, collector: Receiver, traces: Traces, scripted: object
) -> None:
    pk = run(alice, "pass").json()["id"]
    execution = Execution.objects.get(pk=pk)
    spans_of(collector, traces)
    collector.requests.clear()
    execution.hops = [
        {"provider": "away", "outcome": "failed", "code": "SB002", "reason": SECRET, "ms": 1.0},
        {"provider": "scripted", "outcome": "served", "ms": 2.0},
    ]
    traces.ended(execution)
    attempts = [span for span in spans_of(collector, traces) if span.name == "provider attempt"]
    told = [(facts(span)["provider"], span.status.message) for span in attempts]
    assert told == [("away", "SB002"), ("scripted", "")]
    assert SECRET.encode() not in b"".join(map(body_of, collector.requests))


def test_a_span_says_how_many_attempts_to_reach_hosts_ended_in_which_way(
    alice: Caller, collector: Receiver, traces: Traces, scripted: object
) -> None:
    execution = Execution.objects.get(pk=run(alice, "pass").json()["id"])
    spans_of(collector, traces)
    collector.requests.clear()
    attempts = [{"host": SECRET, "outcome": "refused"}]
    execution.meta["network"] = {"allowed": 2, "refused": 1, "failed": 0, "attempts": attempts}
    traces.ended(execution)
    (whole,) = [span for span in spans_of(collector, traces) if span.name == "execution"]
    counts = {name: n for name, n in facts(whole).items() if name.startswith("network.")}
    assert counts == {"network.allowed": 2, "network.refused": 1, "network.failed": 0}
    assert SECRET.encode() not in b"".join(map(body_of, collector.requests))


def test_a_collector_that_is_away_costs_no_run(
    scripted: object, alice: Caller, collector: Receiver, traces: Traces
) -> None:
    collector.close()
    for _ in range(2):
        assert asked(alice, "pass").json()["status"] == "succeeded"


class Endless(BaseHTTPRequestHandler):
    """Answers with a body that is longer than anybody should read."""

    left = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(1000):
                self.wfile.write(b"x" * 65536)
        except OSError:
            self.left.set()

    def log_message(self, *args: Any) -> None:
        """Nothing is to be said."""


def test_a_collector_whose_answer_has_no_end_is_not_listened_to(
    alice: Caller, settings: Any
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    settings.TELEMETRY = Telemetry(url, (), "cofferdam", "host1")
    try:
        assert send() is True
        assert Endless.left.wait(60)
    finally:
        server.shutdown()
        server.server_close()


def test_the_metrics_are_those_of_prometheus(
    alice: Caller, collector: Receiver, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.TELEMETRY = Telemetry(collector.url, (), "cofferdam", "host1")
    for milliseconds in (20, 700):
        ended(alice, total_ms=milliseconds, run_ms=milliseconds)
    begun: list[Any] = []
    monkeypatch.setattr(
        "executions.tasks.run_once_in_background", lambda name, work: begun.append(work)
    )
    export_metrics()
    assert begun[0]() is True
    (request,) = collector.requests
    assert request[0] == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body_of(request)).resource_metrics
    assert "service.instance.id" not in {each.key for each in resource.resource.attributes}
    (scoped,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scoped.metrics}
    families = {family.name: family for family in collect(with_tenants=True) if family.samples}
    assert set(metrics) == set(families)

    total = metrics["cofferdam_executions_total"].sum
    assert (total.is_monotonic, total.aggregation_temporality) == (True, 2)
    assert sum(point.as_double for point in total.data_points) == 2
    for point in metrics["cofferdam_execution_duration_seconds"].histogram.data_points:
        labels = {each.key: each.value.string_value for each in point.attributes}
        if labels["phase"] == "total":
            assert (point.count, sum(point.bucket_counts)) == (2, 2)
            assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
            assert point.sum == pytest.approx(0.72)
            assert not point.HasField("min")
    assert metrics["cofferdam_queue_depth"].gauge.data_points[0].as_double == 0


def test_without_an_endpoint_nothing_is_made_or_sent(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings.TELEMETRY is None
    assert capability.traces is None
    capability.start()
    assert capability.traces is None
    monkeypatch.setattr("executions.tasks.run_once_in_background", lambda *_: pytest.fail("sent"))
    export_metrics()


def read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Telemetry | None:
    monkeypatch.setattr(StrictEnv, "ENVIRON", variables)
    headers = variables.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    return observability.telemetry(StrictEnv(), "host1")


def test_the_endpoint_and_its_headers_are_read_as_opentelemetry_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = read(
        monkeypatch,
        OTEL_EXPORTER_OTLP_ENDPOINT="https://collector:4318/",
        OTEL_EXPORTER_OTLP_HEADERS="api-key=a%20b,X-Tenant=c",
        OTEL_SERVICE_NAME="ours",
    )
    assert found is not None
    assert found.address("traces") == "https://collector:4318/v1/traces"
    assert found.headers == (("api-key", "a b"), ("x-tenant", "c"))
    assert (found.service, "a b" in repr(found)) == ("ours", False)
    assert read(monkeypatch) is None
    off = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:1", "OTEL_SDK_DISABLED": "true"}
    assert read(monkeypatch, **off) is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b%0d%0ac"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=named):
        read(monkeypatch, **{"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318", **variables})


def test_missing_packages_are_named_and_the_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = (("opentelemetry-sdk", "opentelemetry.no_such.sdk"),)
    monkeypatch.setattr(observability, "_OTEL_PACKAGES", missing)
    with pytest.raises(ImproperlyConfigured, match=r"opentelemetry-sdk.*requirements-otel.txt"):
        read(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="https://collector:4318")
    assert read(monkeypatch) is None
