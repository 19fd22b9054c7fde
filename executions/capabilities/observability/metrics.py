"""Metrics for Prometheus: collected, written as text, and who may read them."""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import CharField, Count, Max, Min, Q, Sum
from django.db.models.functions import Cast, Now
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.observability.counters import (
    BOUNDS,
    FAULT,
    HOP,
    OBSERVED,
    OUTCOME,
    PHASES,
    REACHED,
)
from executions.capabilities.observability.models import AuditExport
from executions.ledger.models import LedgerEntry
from executions.runs.heartbeat import pools_of
from executions.runs.models import Execution, Process, hour_of
from executions.runs.statistics import ALL_TIME, TENANT, Statistic, rows_since
from executions.sessions.models import Session
from providers.models import CircuitBreaker, ProviderConfig, ProviderHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_MOST_CHARACTERS = 200


@dataclass
class Family:
    """One metric: its name, its kind, what it tells, and its samples.

    A sample's suffix is what a histogram's parts are told apart by.
    """

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, suffix: str = "", **labels: str) -> None:
        """Nothing is added for None: what is not known is not zero."""
        if value is not None:
            self.samples.append((suffix, labels, float(value)))

    def add_histogram(
        self, buckets: Iterable[tuple[float, int]], total: float, **labels: str
    ) -> None:
        """`buckets` are (upper bound, how many in this one alone), every bound once, in order."""
        seen = 0
        for bound, number in buckets:
            seen += number
            self.add(seen, "_bucket", **labels, le=_number(bound))
        self.add(total, "_sum", **labels)
        self.add(seen, "_count", **labels)


def write(families: Iterable[Family]) -> str:
    """The whole answer. A family without samples is left out."""
    return "".join(f"{line}\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for suffix, labels, value in family.samples:
        pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        yield (
            f"{family.name}{suffix}{{{pairs}}} {_number(value)}"
            if pairs
            else (f"{family.name}{suffix} {_number(value)}")
        )


def _escaped(text: str) -> str:
    # Lone surrogates have no UTF-8, and other line ends than \n end no line of the format.
    text = text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()
    return text.translate(_ESCAPED)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


_STATES = ("busy", "idle", "kept", "creating", "ending")


def of_pools(processes: list[dict[str, Any]], health: list[dict[str, Any]]) -> Iterator[Family]:
    """`process` is who tells of a host's pool: empty for a service's, which all hosts share."""
    capacity = Family("cofferdam_pool_capacity", "gauge", "Maximum number of sandboxes of a pool.")
    sandboxes = Family("cofferdam_pool_sandboxes", "gauge", "Sandboxes of a pool, by state.")
    waiting = Family("cofferdam_pool_waiting", "gauge", "Callers that wait for a sandbox.")
    started = Family("cofferdam_pool_started_total", "counter", "Sandboxes started.")
    failed = Family("cofferdam_pool_start_failures_total", "counter", "Starts that failed.")
    restarts = Family(
        "cofferdam_pool_restarts_total", "counter", "Sandboxes that ended unused and were replaced."
    )
    refused = Family(
        "cofferdam_pool_refused_total", "counter", "Callers refused because the pool was full."
    )
    creation = Family(
        "cofferdam_pool_creation_seconds",
        "gauge",
        "Time to make a sandbox: median of the last 100.",
    )
    runtime = Family("cofferdam_pool_runtime_info", "gauge", "Runtime that isolates the sandboxes.")
    for provider, process, found in _pools(processes, health):
        labels = {"provider": provider, "process": process}
        capacity.add(found.get("capacity"), **labels)
        for state in _STATES:
            sandboxes.add(found.get(state), **labels, state=state)
        waiting.add(found.get("waiting"), **labels)
        started.add(found.get("started"), **labels)
        failed.add(found.get("failed"), **labels)
        restarts.add(found.get("restarts"), **labels)
        refused.add(found.get("refused"), **labels)
        milliseconds = found.get("creation_ms")
        creation.add(None if milliseconds is None else milliseconds / 1000, **labels)
        if "runtime" in found:
            runtime.add(1, **labels, runtime=found["runtime"])
    yield from (capacity, sandboxes, waiting, started, failed, restarts, refused, creation, runtime)


def _pools(
    processes: list[dict[str, Any]], health: list[dict[str, Any]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for row, provider, found in pools_of(processes):
        yield provider, f"{row['instance']} {row['kind']} {row['pid']}", found
    for row in health:
        if "capacity" in (row["figures"] or {}):
            yield row["provider_id"], "", row["figures"]


def of_hosts(processes: list[dict[str, Any]]) -> Iterator[Family]:
    """One of each instance, by the process that began last."""
    load = Family("cofferdam_host_load1", "gauge", "Load of the host over a minute.")
    processors = Family("cofferdam_host_processors", "gauge", "Processors of the host.")
    memory = Family("cofferdam_host_memory_bytes", "gauge", "Memory of the host.")
    memory_free = Family(
        "cofferdam_host_memory_free_bytes", "gauge", "Available memory of the host."
    )
    disk = Family("cofferdam_host_disk_bytes", "gauge", "The disk of DATA_DIR.")
    disk_free = Family("cofferdam_host_disk_free_bytes", "gauge", "Free space of this disk.")
    for instance, found in hosts(processes).items():
        for family, name in (
            (load, "load1"),
            (processors, "processors"),
            (memory, "memory_bytes"),
            (memory_free, "memory_free_bytes"),
            (disk, "disk_bytes"),
            (disk_free, "disk_free_bytes"),
        ):
            family.add(found.get(name), instance=instance)
    yield from (load, processors, memory, memory_free, disk, disk_free)


def hosts(processes: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The figures of each host by its name; `processes` are in order, the newest first."""
    found: dict[str, dict[str, float]] = {}
    for row in processes:
        if host := (row["figures"] or {}).get("host"):
            found.setdefault(row["instance"], host)
    return found


TENANTS = 20
OTHERS = "_others"
# Rows of processes that are read; each has one while it lives.
MOST_PROCESSES = 500

_INFINITE = float("inf")


def collect(*, with_tenants: bool) -> list[Family]:
    """Every metric, by the moment's state of the database."""
    alive = Process.objects.filter(ended_at=None).order_by("-id")
    figures = alive.values("instance", "kind", "pid", "figures")[:MOST_PROCESSES]
    processes: list[dict[str, Any]] = [dict(row) for row in figures]
    health: list[dict[str, Any]] = [dict(row) for row in ProviderHealth.objects.values()]
    return [
        *_of_ended(),
        *_of_open(with_tenants),
        *_of_providers(health),
        *of_pools(processes, health),
        *of_hosts(processes),
        *_of_the_service(processes),
        *(_of_tenants() if with_tenants else ()),
    ]


def _of_ended() -> Iterator[Family]:
    ended = Family("cofferdam_executions_total", "counter", "Executions that have ended.")
    cost = Family("cofferdam_cost_total", "counter", "Estimated cost of executions, by the prices.")
    faults = Family(
        "cofferdam_provider_faults_total",
        "counter",
        "Executions that their provider failed at before any code of a tenant ran.",
    )
    hops = Family(
        "cofferdam_provider_failures_total",
        "counter",
        "Failed attempts of a provider on a route, whether or not another provider succeeded.",
    )
    observed = Family(
        "cofferdam_observations_total",
        "counter",
        "Executions with security events, by kind.",
    )
    reached = Family(
        "cofferdam_network_attempts_total",
        "counter",
        "Attempts of executions to reach a host, by outcome.",
    )
    duration = Family(
        "cofferdam_execution_duration_seconds",
        "histogram",
        "Duration of executions by phase: queue, start of the sandbox, run, and total.",
    )
    durations: dict[tuple[str, str], list[Any]] = {}
    totals = Statistic.objects.filter(
        kind__in=(OUTCOME, FAULT, HOP, OBSERVED, REACHED, *PHASES), hour=ALL_TIME
    ).order_by("kind", "name", "label")
    for kind, provider, label, count, amount in totals.values_list(
        "kind", "name", "label", "count", "amount"
    ):
        name = provider or "none"
        if kind == OUTCOME:
            status, _, code = label.partition(" ")
            ended.add(count, provider=name, status=status, error_code=code)
            if amount:
                cost.add(amount, provider=name, status=status)
        elif kind == FAULT:
            faults.add(count, provider=name, error_code=label)
        elif kind == HOP:
            hops.add(count, provider=name, error_code=label)
        elif kind == OBSERVED:
            observed.add(count, provider=name, kind=label)
        elif kind == REACHED:
            reached.add(count, provider=name, outcome=label)
        else:
            numbers = durations.setdefault((name, kind), [dict.fromkeys(BOUNDS, 0), 0, 0.0])
            _put(numbers, label, count, amount)
    for (name, phase), (buckets, rest, seconds) in durations.items():
        every = [*buckets.items(), (_INFINITE, rest)]
        duration.add_histogram(every, seconds, provider=name, phase=phase)
    yield from (ended, cost, faults, hops, observed, reached, duration)


def _put(numbers: list[Any], label: str, count: int, amount: float) -> None:
    """Into the bucket; one of another version's bounds goes into the next of ours."""
    bound = float(label)
    fits = next((ours for ours in BOUNDS if ours >= bound), None)
    if fits is None:
        numbers[1] += count
    else:
        numbers[0][fits] += count
    numbers[2] += amount


def _of_open(with_tenants: bool) -> Iterator[Family]:
    """One query over what is open, which the tenants' bounds keep small."""
    rows = (
        Execution.objects.filter(finished_at=None)
        .order_by()
        .values_list("tenant_slug", "status")
        .annotate(
            number=Count("pk"),
            # Those whose time has not come wait for no worker yet.
            due=Count("pk", filter=Q(run_at=None) | Q(run_at__lte=Now())),
            # The id begins with the time; the rows themselves lie behind all of their text.
            oldest=Min(Cast("id", CharField()), filter=Q(run_at=None)),
            oldest_later=Min("run_at", filter=Q(run_at__lte=Now())),
        )
    )
    numbers: dict[str, int] = {"queued": 0, "running": 0}
    of_tenants: dict[str, dict[str, int]] = defaultdict(lambda: {"queued": 0, "running": 0})
    waiting, oldest = 0, 0.0
    for slug, status, number, due, first, first_later in rows:
        numbers[status] += number
        of_tenants[slug][status] += number
        if status == Execution.Status.QUEUED:
            waiting += due
            oldest = max(oldest, _age(first), _age(first_later))
    opened = Family("cofferdam_executions_open", "gauge", "Executions that have not ended.")
    for status, number in numbers.items():
        opened.add(number, status=status)
    depth = Family("cofferdam_queue_depth", "gauge", "Executions that wait for a worker.")
    depth.add(waiting)
    age = Family("cofferdam_queue_oldest_seconds", "gauge", "Wait time of the oldest of them.")
    age.add(oldest)
    sessions = Family("cofferdam_sessions", "gauge", "Sessions that have not ended.")
    living = Session.objects.filter(closed_at=None).order_by().values_list("provider", "state")
    for provider, state, number in living.annotate(number=Count("pk")):
        sessions.add(number, provider=provider or "none", state=state)
    yield from (opened, depth, age, sessions)
    if with_tenants:
        yield _of_open_by_tenant(of_tenants)


def _of_open_by_tenant(of_tenants: dict[str, dict[str, int]]) -> Family:
    family = Family(
        "cofferdam_tenant_executions_open",
        "gauge",
        f"Executions that have not ended, of the {TENANTS} tenants with the most.",
    )
    most = sorted(of_tenants, key=lambda slug: (-sum(of_tenants[slug].values()), slug))
    for slug in most[:TENANTS]:
        for status, number in of_tenants[slug].items():
            family.add(number, tenant=slug, status=status)
    if rest := most[TENANTS:]:
        for status in ("queued", "running"):
            number = sum(of_tenants[slug][status] for slug in rest)
            family.add(number, tenant=OTHERS, status=status)
    return family


def _age(since: str | datetime | None) -> float:
    """Seconds since a time, or the one that an id begins with; 0 for none."""
    if not since:
        return 0.0
    if isinstance(since, str):
        at = int(since.replace("-", "")[:12], 16) / 1000
    else:
        at = since.timestamp()
    return max(0.0, timezone.now().timestamp() - at)


def _of_providers(health: list[dict[str, Any]]) -> Iterator[Family]:
    info = Family(
        "cofferdam_provider_info", "gauge", "Configured providers; active is the one in use."
    )
    healthy = Family("cofferdam_provider_healthy", "gauge", "Whether the last check succeeded.")
    checked = Family(
        "cofferdam_provider_checked_seconds", "gauge", "End of the last check, in Unix time."
    )
    latency = Family(
        "cofferdam_provider_check_duration_seconds", "gauge", "Duration of the last check."
    )
    checks = Family("cofferdam_provider_checks_total", "counter", "Checks, by their result.")
    by_provider = {row["provider_id"]: row for row in health}
    for provider_id, active, version in ProviderConfig.objects.order_by("provider_id").values_list(
        "provider_id", "is_active", "version"
    ):
        row = by_provider.get(provider_id, {})
        region = (row.get("figures") or {}).get("region", "")
        labels = {"provider": provider_id, "region": region, "version": str(version)}
        info.add(1, **labels, active="true" if active else "false")
        if not row:
            continue
        healthy.add(row["healthy"], provider=provider_id, region=region)
        checked.add(row["checked_at"].timestamp(), provider=provider_id)
        latency.add(row["latency_ms"] / 1000, provider=provider_id, region=region)
        good = row["good_checks"]
        checks.add(good, provider=provider_id, result="good")
        checks.add(row["checks"] - good, provider=provider_id, result="bad")
    opened = Family("cofferdam_breaker_open", "gauge", "Whether it is out of service.")
    failures = Family("cofferdam_breaker_failures", "gauge", "Consecutive failed requests.")
    opening = Family(
        "cofferdam_provider_open_seconds", "gauge", "Time to get a sandbox there, smoothed."
    )
    for breaker in CircuitBreaker.objects.order_by("provider_id"):
        name = breaker.provider_id
        opened.add(breaker.state == CircuitBreaker.State.OPEN, provider=name)
        failures.add(breaker.failures, provider=name)
        known = breaker.latency_ms
        opening.add(None if known is None else known / 1000, provider=name)
    yield from (info, healthy, checked, latency, checks, opened, failures, opening)


def _of_the_service(processes: list[dict[str, Any]]) -> Iterator[Family]:
    alive = Family("cofferdam_processes", "gauge", "Processes with a recent heartbeat.")
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    for row in processes:
        numbers[row["kind"], row["instance"]] += 1
    for (kind, instance), number in sorted(numbers.items()):
        alive.add(number, kind=kind, instance=instance)
    alerts = Family("cofferdam_alerts_open", "gauge", "Open alerts, by rule.")
    rows = Alert.objects.filter(active_key__isnull=False).order_by("rule")
    for rule, severity, number in rows.values_list("rule", "severity").annotate(n=Count("pk")):
        alerts.add(number, rule=rule, severity=severity)
    newest = LedgerEntry.objects.aggregate(newest=Max("sequence"))["newest"] or 0
    entries = Family("cofferdam_ledger_entries_total", "counter", "Entries of the ledger.")
    entries.add(newest)
    behind = Family(
        "cofferdam_audit_export_behind", "gauge", "Entries that the collector has not received."
    )
    for destination, sequence in AuditExport.objects.values_list("destination", "sequence"):
        behind.add(max(0, newest - sequence), destination=destination)
    yield from (alive, alerts, entries, behind)


def _of_tenants(now: datetime | None = None) -> Iterator[Family]:
    """Of this hour and the last one: a gauge, for who is named in it changes."""
    since = hour_of(now or timezone.now()) - timedelta(hours=1)
    rows = rows_since(since, TENANT)
    total = rows.aggregate(total=Sum("count"))["total"] or 0
    busiest = rows.values_list("name").annotate(number=Sum("count"))
    family = Family(
        "cofferdam_tenant_executions_recent",
        "gauge",
        f"Executions ended in this hour and the last, of the {TENANTS} busiest tenants.",
    )
    for slug, number in busiest.order_by("-number", "name")[:TENANTS]:
        family.add(number, tenant=slug)
        total -= number
    if total > 0:
        family.add(total, tenant=OTHERS)
    yield family


_SCHEME = "Bearer "


@dataclass(frozen=True)
class Access:
    """What a request may read, or the status that it is refused with."""

    refused: int = 0
    with_tenants: bool = False


def access_of(meta: Mapping[str, Any]) -> Access:
    """By the token and the address of a request, each where it is demanded.

    With neither demanded only this machine may read, and not in production: there a proxy on it
    may pass on whatever comes. Tenants are named to whoever was let in by one of the two.
    """
    token, networks = settings.METRICS_TOKEN, settings.METRICS_ALLOWED_ADDRESSES
    if networks and not _is_within(meta, networks):
        return Access(refused=403)
    if token:
        given = str(meta.get("HTTP_AUTHORIZATION", ""))
        is_right = given.startswith(_SCHEME) and hmac.compare_digest(
            given.removeprefix(_SCHEME).encode("utf-8", "replace"), token.encode()
        )
        return Access(with_tenants=True) if is_right else Access(refused=401)
    if networks:
        return Access(with_tenants=True)
    if settings.PRODUCTION or not _is_within(meta, ("127.0.0.0/8", "::1/128")):
        return Access(refused=403)
    return Access()


def _is_within(meta: Mapping[str, Any], networks: Any) -> bool:
    try:
        address = ipaddress.ip_address(str(meta.get("REMOTE_ADDR", "")).partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in ipaddress.ip_network(network) for network in networks)
