"""`GET /metrics`: what it says, to whom, and that nobody can make it say something else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.capabilities.observability.counters import BOUNDS, FAULT
from executions.capabilities.observability.metrics import TENANTS, Family, collect, write
from executions.runs.models import Process, hour_of
from executions.runs.statistics import ALL_TIME, TENANT, Increment, Statistic, add
from executions.sessions.models import Session
from providers.models import CircuitBreaker, ProviderConfig, ProviderHealth
from tests.conftest import Caller
from tests.support.ended_runs import ended
from tests.support.held import opened
from tests.support.sessions import in_thread

pytestmark = pytest.mark.database

TOKEN = "a token of a scrape, long enough"

SAMPLE = re.compile(
    r'(?P<name>[a-z_0-9]+)(?:\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (?P<value>\S+)'
)
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\[\\n"])*)"')

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    """Strictly by the format's grammar: a line that is none of it fails the test."""
    found: Samples = {}
    for line in text.split("\n")[:-1]:
        if line.startswith("# "):
            assert re.match(r"# (HELP|TYPE) [a-z_0-9]+ ", line), line
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        labels = tuple(sorted(LABEL.findall(match["labels"] or "")))
        assert (match["name"], labels) not in found, f"twice: {line}"
        found[match["name"], labels] = float(match["value"])
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def scrape(settings: Any, **headers: str) -> Samples:
    settings.METRICS_TOKEN = TOKEN
    answer = Client().get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}, **headers)
    assert answer.status_code == 200, answer.content
    assert answer["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return read(answer.content.decode())


@pytest.mark.django_db
def test_strangers_are_refused_before_the_database_is_asked(
    settings: Any, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    settings.METRICS_TOKEN = TOKEN
    for caller in (alice, bob, charlie):
        # The key of a tenant is no token, whichever tenant's.
        for headers in (
            {},
            {"x-api-key": caller.key_text},
            {"authorization": f"Bearer {caller.key_text}"},
            {"authorization": f"Bearer {TOKEN} "},
            {"authorization": "Bearer \u00e9"},
            {"authorization": TOKEN},
        ):
            with CaptureQueriesContext(
                connection,
            ) as queries:
                answer = Client().get("/metrics", headers=headers)
            assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
            assert not queries.captured_queries
            assert b"cofferdam" not in answer.content
    assert (
        Client().post("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 405
    )


@pytest.mark.django_db
def test_without_a_token_only_named_addresses_may_read_and_none_in_production(
    settings: Any, alice: Caller
) -> None:
    ended(alice)
    opened(alice)

    def status(address: str, **more: str) -> int:
        return Client().get("/metrics", REMOTE_ADDR=address, **more).status_code

    assert [status(at) for at in ("127.0.0.1", "::1", "10.0.0.1", "")] == [200, 200, 403, 403]
    # Nobody asked for anything, so nobody has said that tenants may be named.
    assert b"wonderland" not in Client().get("/metrics").content
    settings.PRODUCTION = True
    assert status("127.0.0.1") == 403
    settings.METRICS_ALLOWED_ADDRESSES = ["10.0.0.0/8"]
    assert [status(at) for at in ("10.0.0.1", "::ffff:10.0.0.1", "127.0.0.1")] == [200, 200, 403]
    # What a client says of itself is not believed.
    assert status("192.0.2.1", HTTP_X_FORWARDED_FOR="10.0.0.1") == 403
    settings.METRICS_TOKEN = TOKEN
    assert status("10.0.0.1") == 401
    assert status("192.0.2.1", HTTP_AUTHORIZATION=f"Bearer {TOKEN}") == 403


@pytest.mark.django_db
def test_executions_are_counted_by_outcome_and_timed_by_phase(
    settings: Any, alice: Caller, charlie: Caller
) -> None:
    for _ in range(3):
        ended(alice, queue_ms=1.0, start_ms=20.0, run_ms=400.0, total_ms=421.0)
    ended(charlie, "failed", total_ms=700_000.0, exit_code=1, cost="0.25")
    ended(alice, "timed_out", error_code="SB005", total_ms=5.0)
    samples = scrape(settings)

    def outcome(status: str, code: str = "") -> float:
        labels = {"provider": "local", "status": status, "error_code": code}
        return value(samples, "cofferdam_executions_total", **labels)

    assert (outcome("succeeded"), outcome("failed"), outcome("timed_out", "SB005")) == (3, 1, 1)
    assert value(samples, "cofferdam_cost_total", provider="local", status="failed") == 0.25
    name = "cofferdam_execution_duration_seconds"
    for phase, number, seconds in (
        ("queue", 3, 0.003),
        ("start", 3, 0.06),
        ("run", 3, 1.2),
        ("total", 5, 701.268),
    ):
        labels = {"provider": "local", "phase": phase}
        assert value(samples, f"{name}_count", **labels) == number
        assert value(samples, f"{name}_sum", **labels) == pytest.approx(seconds)
        buckets = [value(samples, f"{name}_bucket", **labels, le=f"{bound:g}") for bound in BOUNDS]
        assert buckets == sorted(buckets)
        assert value(samples, f"{name}_bucket", **labels, le="+Inf") == number
    at = {"provider": "local", "phase": "total"}
    # What is exactly as long as a bound lies within it.
    assert value(samples, f"{name}_bucket", **at, le="0.005") == 1
    assert value(samples, f"{name}_bucket", **at, le="300") == 4


@pytest.mark.django_db(transaction=True)
def test_what_ends_at_once_in_many_places_is_counted_once_each(alice: Caller) -> None:
    def end_some() -> None:
        try:
            for n in range(5):
                ended(alice, "failed" if n % 2 else "succeeded", run_ms=1.0, total_ms=2.0)
        finally:
            connections.close_all()

    threads = [in_thread(end_some) for _ in range(4)]
    for thread in threads:
        thread.join()
    samples = read(write(collect(with_tenants=False)))
    at = {"provider": "local", "phase": "run"}
    assert value(samples, "cofferdam_execution_duration_seconds_count", **at) == 20
    assert value(samples, "cofferdam_execution_duration_seconds_sum", **at) == pytest.approx(0.02)
    labels = {"provider": "local", "status": "succeeded", "error_code": ""}
    assert value(samples, "cofferdam_executions_total", **labels) == 12


@pytest.mark.django_db
def test_a_guests_fault_is_none_of_the_providers(settings: Any, alice: Caller) -> None:
    ended(alice, "error", error_code="SB003", retryable=True)
    # Code may have been running, and may have brought it about.
    ended(alice, "error", error_code="SB003", retryable=False)
    ended(alice, "error", error_code="SB008", retryable=True)
    ended(alice, "failed")
    ended(alice, "out_of_memory", error_code="SB006")
    failed = {"provider": "e2b", "outcome": "failed", "code": "SB009", "reason": "x", "ms": 1.0}
    ended(alice, hops=[failed, {**failed, "outcome": "passed over", "code": ""}, failed])
    samples = scrape(settings)
    faults = {key: found for key, found in samples.items() if "faults" in key[0]}
    assert list(faults.values()) == [1]
    name = "cofferdam_provider_failures_total"
    assert value(samples, name, provider="e2b", error_code="SB009") == 2
    assert Statistic.objects.get(kind=FAULT, hour__gt=ALL_TIME).count == 1


@pytest.mark.django_db
def test_what_waits_runs_and_stays_open_is_told(
    settings: Any, alice: Caller, charlie: Caller
) -> None:
    waiting = opened(alice, "async")
    opened(charlie, "async")
    opened(charlie)
    for provider, state in (("e2b", "open"), ("e2b", "open"), ("local", "asleep")):
        Session.objects.create(
            tenant=alice.tenant,
            tenant_slug="wonderland",
            language="python",
            provider=provider,
            state=state,
        )
    samples = scrape(settings)
    assert value(samples, "cofferdam_queue_depth") == 2
    assert value(samples, "cofferdam_executions_open", status="running") == 1
    age = value(samples, "cofferdam_queue_oldest_seconds")
    assert 0 <= age <= (timezone.now() - waiting.created_at).total_seconds() + 1
    assert value(samples, "cofferdam_sessions", provider="e2b", state="open") == 2
    assert value(samples, "cofferdam_sessions", provider="local", state="asleep") == 1
    name = "cofferdam_tenant_executions_open"
    assert value(samples, name, tenant="elsewhere", status="queued") == 1


@pytest.mark.django_db
def test_providers_pools_and_hosts_are_told_by_whoever_is_asked(settings: Any) -> None:
    ProviderConfig.objects.create(provider_id="self_managed", is_active=True)
    pool = {"capacity": 8, "busy": 8, "idle": 0, "creation_ms": 250.0, "runtime": "gvisor"}
    ProviderHealth.objects.create(
        provider_id="self_managed",
        config_version=1,
        healthy=False,
        latency_ms=12.5,
        checked_at=timezone.now(),
        checks=10,
        good_checks=9,
        figures={**pool, "region": "eu-1"},
    )
    CircuitBreaker.objects.create(
        provider_id="self_managed", state="open", retry_at=timezone.now(), latency_ms=100
    )
    host = {"load1": 0.5, "memory_bytes": 100, "memory_free_bytes": 5}
    for pid, busy in ((1, 1), (2, 3)):
        figures = {"host": host, "pools": {"local": {"capacity": 4, "busy": busy, "started": 7}}}
        Process.objects.create(instance="h", kind="web", pid=pid, figures=figures)
    # Of an older version, which says nothing of itself.
    Process.objects.create(instance="old", kind="worker", pid=3)
    samples = scrape(settings)
    own = {"provider": "self_managed", "process": ""}
    assert value(samples, "cofferdam_pool_capacity", **own) == 8
    assert value(samples, "cofferdam_pool_sandboxes", **own, state="busy") == 8
    assert value(samples, "cofferdam_pool_creation_seconds", **own) == 0.25
    assert value(samples, "cofferdam_pool_runtime_info", **own, runtime="gvisor") == 1
    here = {"provider": "local", "process": "h web 2"}
    assert value(samples, "cofferdam_pool_sandboxes", **here, state="busy") == 3
    assert value(samples, "cofferdam_pool_started_total", **here) == 7
    # The processes of a host share it.
    assert [each for each in samples if "h web 1" in str(each)] == []
    at = {"provider": "self_managed", "region": "eu-1"}
    assert value(samples, "cofferdam_provider_healthy", **at) == 0
    name = "cofferdam_provider_checks_total"
    assert value(samples, name, provider="self_managed", result="bad") == 1
    assert value(samples, "cofferdam_breaker_open", provider="self_managed") == 1
    assert value(samples, "cofferdam_host_memory_free_bytes", instance="h") == 5
    assert value(samples, "cofferdam_processes", kind="worker", instance="old") == 1


@pytest.mark.django_db
def test_many_tenants_are_few_series_and_few_queries(settings: Any, alice: Caller) -> None:
    hour = hour_of(timezone.now())
    add(Increment(TENANT, f"t{n}", hour, "", n + 1) for n in range(500))
    for n in range(40):
        alice.tenant.slug = f"t{n}"
        alice.tenant.save()
        opened(alice)
    with CaptureQueriesContext(connection) as queries:
        samples = scrape(settings)
    assert len(queries) <= 14
    recent = [key for key in samples if key[0] == "cofferdam_tenant_executions_recent"]
    assert len(recent) == TENANTS + 1
    others = value(samples, "cofferdam_tenant_executions_recent", tenant="_others")
    assert others == sum(range(1, 500 - TENANTS + 1))
    opens = [key for key in samples if key[0] == "cofferdam_tenant_executions_open"]
    assert len(opens) == 2 * (TENANTS + 1)


HOSTILE = 'x"} 1\ncofferdam_queue_depth 0\n# TYPE \\'


@pytest.mark.django_db
def test_no_name_writes_a_line_of_its_own(settings: Any, alice: Caller) -> None:
    # A slug is checked by its form; whoever writes to the database is not.
    type(alice.tenant).objects.filter(pk=alice.tenant.pk).update(slug=HOSTILE)
    alice.tenant.slug = HOSTILE
    opened(alice, "async")
    ended(alice, provider=HOSTILE, total_ms=1.0)
    Process.objects.create(instance=HOSTILE, kind="web", pid=1, figures={"pools": {HOSTILE: {}}})
    samples = scrape(settings)
    assert value(samples, "cofferdam_queue_depth") == 1
    told = HOSTILE.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = {"status": "queued", "tenant": told}
    assert value(samples, "cofferdam_tenant_executions_open", **labels) == 1


@given(st.text(), st.floats(allow_nan=False))
def test_any_text_and_number_is_a_sample(text: str, number: float) -> None:
    family = Family("m", "gauge", "Something.")
    family.add(number, label=text)
    ((key, found),) = read(write([family])).items()
    assert found == number
    (label,) = [told for name, told in key[1] if name == "label"]
    unescaped = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label)
    assert unescaped == text[:200].encode("utf-8", "replace").decode()


@pytest.mark.django_db
def test_a_bucket_of_another_version_is_counted_in_the_next_one(settings: Any) -> None:
    add(Increment("run", "local", ALL_TIME, label, 1, 2.0) for label in ("0.07", "1000", "+Inf"))
    samples = read(write(collect(with_tenants=False)))
    name, at = "cofferdam_execution_duration_seconds_bucket", {"provider": "local", "phase": "run"}
    assert value(samples, name, **at, le="0.05") == 0
    assert value(samples, name, **at, le="0.1") == 1
    assert value(samples, name, **at, le="+Inf") == 3
