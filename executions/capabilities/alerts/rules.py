"""The rules of alerts, about runs and about the service, and their findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Count, Q, QuerySet, Sum
from django.utils.translation import ngettext

from executions.capabilities.alerts.models import Alert
from executions.capabilities.network.models import NetworkAttempt
from executions.capabilities.observability.counters import (
    FAULT,
    OUTCOME,
    latencies,
    milliseconds_of,
    percentiles,
)
from executions.capabilities.observability.metrics import hosts
from executions.capabilities.observability.models import AuditExport
from executions.capabilities.spending.models import SpendingAlert
from executions.kernel.text import first_uuid7
from executions.ledger.checkpoints import checkpoint_store, newest_line
from executions.ledger.entry import LedgerUnavailable
from executions.ledger.models import LedgerCheck, LedgerEntry
from executions.runs.heartbeat import pools_of
from executions.runs.ledger_checks import first_without_checkpoint, last_result
from executions.runs.models import Execution, Process, hour_of
from executions.runs.queue import WAITS_FOR_APPROVAL, queue_state
from executions.runs.record import QUEUE_ALLOWANCE
from executions.runs.statistics import rows_since
from executions.tenants.models import Tenant
from providers.hidden_characters import visible
from providers.models import (
    CircuitBreaker,
    PendingChange,
    ProviderCheckCount,
    ProviderConfig,
    ProviderHealth,
)
from providers.values import PROCESS_BURST, PROCESS_LIMIT, SIGSYS


@dataclass(frozen=True)
class Found:
    """A subject that a rule does not hold for now."""

    subject: str
    value: float | None
    message: str


HOUR = timedelta(hours=1)
SHARED_CODE = "code of several tenants"

Look = Callable[[datetime, float], Iterator[Found]]


def repeated(status: Execution.Status, what: str) -> Look:
    """Runs that ended so. `what` they did, in the past."""
    return _looking_for(Q(status=status), what)


def seen(what: str, *kinds: str) -> Look:
    """Runs of which one of these was seen."""
    some = Q()
    for kind in kinds:
        some |= Q(observed__contains=kind)
    return _looking_for(Q(some, observed__isnull=False), what)


def _looking_for(wanted: Q, what: str) -> Look:
    def look(now: datetime, most: float) -> Iterator[Found]:
        # The id tells when it was made; what waits longer than that is not run any more, but for
        # what was asked for at a later time.
        earliest = now - HOUR - QUEUE_ALLOWANCE
        made = Q(pk__gte=first_uuid7(earliest)) | Q(run_at__gte=earliest)
        rows = Execution.objects.filter(wanted, made, finished_at__gt=now - HOUR).order_by()
        yield from _of_tenants(rows, most, what)
        yield from _of_code(rows, most, what)

    return look


def _of_tenants(rows: QuerySet[Execution], most: float, what: str) -> Iterator[Found]:
    counted = rows.values_list("tenant_slug").annotate(
        runs=Count("pk"), programs=Count("code_hash", distinct=True)
    )
    for slug, runs, programs in counted.filter(runs__gt=int(most)):
        of = "one program" if programs == 1 else f"{programs} programs"
        yield Found(slug, runs, f"{runs} runs of {slug} {what} within an hour, of {of}.")


def _of_code(rows: QuerySet[Execution], most: float, what: str) -> Iterator[Found]:
    counted = rows.values_list("code_hash").annotate(
        runs=Count("pk"), tenants=Count("tenant_slug", distinct=True)
    )
    worst = counted.filter(runs__gt=int(most), tenants__gt=1).order_by("-runs", "code_hash").first()
    if worst is not None:
        code, runs, tenants = worst
        message = f"{runs} runs of {code}, by {tenants} tenants, {what} within an hour."
        yield Found(SHARED_CODE, runs, message)


def refused_hosts(now: datetime, most: float) -> Iterator[Found]:
    """Tenants whose code asks for hosts that it may not reach, and the host most asked for."""
    rows = NetworkAttempt.objects.filter(
        pk__gte=first_uuid7(now - HOUR), outcome=NetworkAttempt.Outcome.REFUSED
    ).order_by()
    counted = rows.values_list("tenant_slug").annotate(n=Count("pk"))
    for slug, number in counted.filter(n__gt=int(most)):
        hosts_of = rows.filter(tenant_slug=slug).values_list("host").annotate(n=Count("pk"))
        host, times = hosts_of.order_by("-n", "host")[0]
        message = (
            f"{number} attempts of {slug} to reach a host were refused within an hour, {times} of "
            f"them to {visible(host)}."
        )
        yield Found(slug, number, message)


OUT_OF_MEMORY = repeated(Execution.Status.OUT_OF_MEMORY, "ran out of memory")
TIMED_OUT = repeated(Execution.Status.TIMED_OUT, "ran out of time")
FORBIDDEN_CALLS = seen("had processes ended by SIGSYS", SIGSYS)
PROCESS_BURSTS = seen("started very many processes", PROCESS_LIMIT, PROCESS_BURST)


# One check that failed may be a network's hiccup.
FAILED_CHECKS = 3


def changes(now: datetime, _: float) -> Iterator[Found]:
    waiting = PendingChange.objects.filter(status=PendingChange.Status.WAITING).order_by("pk")
    oldest = waiting.values_list("created_at", flat=True).first()
    if oldest is not None:
        number = waiting.count()
        since = f"{oldest:%Y-%m-%d %H:%M} UTC"
        wait = ngettext("%d change waits", "%d changes wait", number) % number
        message = f"{wait} for a second administrator, the oldest since {since}."
        yield Found("changes", number, message)


def unhealthy(now: datetime, _: float) -> Iterator[Found]:
    """Found so again and again by the checks of the background, under its present configuration."""
    versions = dict(ProviderConfig.objects.values_list("provider_id", "version"))
    often = CircuitBreaker.objects.filter(failed_checks__gte=FAILED_CHECKS)
    failed = dict(often.values_list("provider_id", "failed_checks"))
    rows = ProviderHealth.objects.filter(healthy=False, provider_id__in=failed)
    for provider, version, code in rows.values_list("provider_id", "config_version", "code"):
        if versions.get(provider) == version:
            number = failed[provider]
            message = f"{provider} failed {number} consecutive checks ({code or 'no code'})."
            yield Found(provider, number, message)


def dead_queue(now: datetime, most: float) -> Iterator[Found]:
    state = queue_state(now)
    if state.problem(most):
        yield Found("queue", state.waited_seconds, state.problem(most))


def findings(now: datetime, _: float) -> Iterator[Found]:
    check = last_result()
    if check is not None and check.state == LedgerCheck.State.NOT_INTACT:
        when = f"{check.finished_at:%Y-%m-%d %H:%M} UTC"
        message = (
            f"The ledger was not intact when it was verified ({when}): {check.findings} findings."
        )
        yield Found("ledger", check.findings, message)


def checkpoint_old(now: datetime, most: float) -> Iterator[Found]:
    """An entry that no line outside of the database tells of. Nothing is due while none is new."""
    place = checkpoint_store()
    if place is None:
        return
    try:
        line = newest_line()
    except LedgerUnavailable as error:
        yield Found("checkpoints", None, error.message)
        return
    since = first_without_checkpoint(line[0] if line else 0)
    if since is not None and (hours := (now - since) / timedelta(hours=1)) > most:
        message = f"The ledger has had no checkpoint in {place.name} for {hours:.1f} hours."
        yield Found("checkpoints", hours, message)


LEAST = 20
LEAST_CHECKS = 10
# Of one rule; beyond, the worst are told.
MOST_SUBJECTS = 50
_NAMED = 5
STALLED = timedelta(minutes=15)
ALL_TENANTS = "all tenants"

CRITICAL, WARNING = Alert.Severity.CRITICAL, Alert.Severity.WARNING


@dataclass(frozen=True)
class Rule:
    """`look` is given the moment and the threshold, and tells of every subject beyond it.

    `least`: the threshold is the least that should be.
    """

    name: str
    severity: Alert.Severity
    threshold: str
    look: Callable[[datetime, float], Iterator[Found]]
    least: bool = False

    @property
    def limit(self) -> float | None:
        return settings.ALERT_THRESHOLDS.get(self.threshold) if self.threshold else None

    def found(self, now: datetime) -> list[Found]:
        """The worst, and how many more there are in the message of the last one told."""
        every = sorted(self.look(now, self.limit or 0.0), key=self._badness)
        told, left_out = every[:MOST_SUBJECTS], len(every) - MOST_SUBJECTS
        if left_out > 0:
            message = f"{told[-1].message} {left_out} more have the same problem, less severely."
            told[-1] = replace(told[-1], message=message)
        return told

    def _badness(self, found: Found) -> tuple[float, str]:
        """The worst first; what has no value is told by its name."""
        value = found.value or 0.0
        return (value if self.least else -value, found.subject)


def _since(now: datetime) -> datetime:
    return hour_of(now) - timedelta(hours=1)


def _availability(now: datetime, least: float) -> Iterator[Found]:
    configured = set(ProviderConfig.objects.values_list("provider_id", flat=True))
    rows = ProviderCheckCount.objects.filter(hour__gte=_since(now)).order_by()
    for provider, checks, good in rows.values_list("provider_id").annotate(
        checks_sum=Sum("checks"), good_sum=Sum("good_checks")
    ):
        percent = 100 * good / checks if checks else 100.0
        if provider in configured and checks >= LEAST_CHECKS and percent < least:
            yield Found(
                provider, percent, f"{provider} was healthy in {percent:.1f} % of {checks} checks."
            )


def _faults(now: datetime, most: float) -> Iterator[Found]:
    rows = rows_since(_since(now), OUTCOME, FAULT).exclude(name="")
    judged = rows.exclude(label__startswith=Execution.Status.CANCELLED)
    for provider, number, faults in judged.values_list("name").annotate(
        number=Sum("count", filter=Q(kind=OUTCOME), default=0),
        failed=Sum("count", filter=Q(kind=FAULT), default=0),
    ):
        percent = 100 * faults / number if number else 0.0
        if number >= LEAST and percent > most:
            yield Found(
                provider,
                percent,
                f"{provider} failed at {percent:.1f} % of {number} executions before any code ran.",
            )


def _histograms(now: datetime) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    for provider, histogram in latencies(_since(now)).items():
        if provider and sum(number for _, number in histogram) >= LEAST:
            yield provider, histogram


def _average(now: datetime, most: float) -> Iterator[Found]:
    for provider, histogram in _histograms(now):
        total = sum(number for _, number in histogram)
        seconds = sum(milliseconds_of(bucket) * number for bucket, number in histogram) / total
        if (seconds := seconds / 1000) > most:
            message = f"An execution by {provider} takes {seconds:.1f} s on average."
            yield Found(provider, seconds, message)


def _slow(now: datetime, most: float) -> Iterator[Found]:
    for provider, histogram in _histograms(now):
        (p95,) = percentiles(histogram, 0.95)
        if p95 is not None and (seconds := p95 / 1000) > most:
            message = f"5 % of the executions by {provider} take longer than {seconds:.1f} s."
            yield Found(provider, seconds, message)


def _pools(now: datetime, _: float) -> Iterator[Found]:
    """Of a pool on each host, all of them together."""
    pools: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    rows = Process.objects.filter(ended_at=None).order_by("-id").values("instance", "figures")
    figures = [(provider, found) for _, provider, found in pools_of(rows)]
    figures += [
        (provider, found or {})
        for provider, found in ProviderHealth.objects.values_list("provider_id", "figures")
    ]
    for provider, found in figures:
        pools[provider][0] += found.get("busy", 0)
        pools[provider][1] += found.get("capacity", 0)
    for provider, (busy, capacity) in pools.items():
        if capacity and busy >= capacity:
            yield Found(provider, busy, f"All {capacity:g} sandboxes of {provider} are busy.")


def _breakers(now: datetime, _: float) -> Iterator[Found]:
    for row in CircuitBreaker.objects.filter(state=CircuitBreaker.State.OPEN):
        # Its own message may quote a service; the page of the breaker has it.
        message = f"{row.provider_id} is out of service ({row.error_code or 'no code'})."
        yield Found(row.provider_id, None, message)


def _spending(kind: SpendingAlert.Kind) -> Callable[[datetime, float], Iterator[Found]]:
    def look(now: datetime, _: float) -> Iterator[Found]:
        told = SpendingAlert.objects.filter(kind=kind, day=now.date())
        for alert in told.order_by("created_at"):
            whose = alert.tenant_slug or ALL_TENANTS
            # A budget of a day and one of a month are used up each for itself.
            subject = f"{whose} ({alert.period})" if alert.period else whose
            yield Found(subject, None, alert.message)

    return look


def _bounds(now: datetime, most: float) -> Iterator[Found]:
    """One alert for all tenants: how near they are to their bounds is their own doing."""
    open_rows = Execution.objects.filter(finished_at=None, background=False).order_by()
    counted = list(open_rows.values_list("tenant_slug", "status").annotate(number=Count("pk")))
    slugs = {slug for slug, _, _ in counted}
    rows = Tenant.objects.filter(slug__in=slugs).values_list("slug", "max_running", "max_queued")
    own = {slug: (running, queued) for slug, running, queued in rows}
    near = []
    for slug, status, number in counted:
        running, queued = own.get(slug, (None, None))
        bound = settings.SANDBOX_MAX_RUNNING if running is None else running
        if status == Execution.Status.QUEUED:
            bound = settings.SANDBOX_MAX_QUEUED if queued is None else queued
        if bound and 100 * number / bound > most:
            near.append((100 * number / bound, f"{slug} ({number} of {bound} {status})"))
    if near:
        near.sort(reverse=True)
        named = ", ".join(text for _, text in near[:_NAMED])
        rest = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
        yield Found("tenants", near[0][0], f"Near the limit of executions: {named}{rest}.")


def _approvals(now: datetime, _: float) -> Iterator[Found]:
    """One alert for all tenants: how often they are asked about is their own doing."""
    # The approval of what ended undecided waits for ever.
    waiting = Execution.objects.filter(
        WAITS_FOR_APPROVAL, status=Execution.Status.QUEUED, finished_at=None
    ).order_by()
    counted = sorted(waiting.values_list("tenant_slug").annotate(n=Count("pk")))
    if counted:
        number = sum(n for _, n in counted)
        named = ", ".join(f"{slug} ({n})" for slug, n in counted[:_NAMED])
        rest = f" and {len(counted) - _NAMED} more" if len(counted) > _NAMED else ""
        yield Found("approvals", number, f"Executions wait for an approval: {named}{rest}.")


def _throttled(now: datetime, most: float) -> Iterator[Found]:
    rows = rows_since(_since(now), OUTCOME).exclude(name="").values_list("name")
    for provider, total, refused in rows.annotate(
        total=Sum("count"), refused=Sum("count", filter=Q(label__endswith=" SB008"), default=0)
    ):
        percent = 100 * refused / total if total else 0.0
        if total >= LEAST and percent > most:
            message = f"{provider} refused {percent:.1f} % of {total} executions with SB008."
            yield Found(provider, percent, message)


def _memory(now: datetime, most: float) -> Iterator[Found]:
    yield from _used("memory", most)


def _disk(now: datetime, most: float) -> Iterator[Found]:
    yield from _used("disk", most)


def _used(what: str, most: float) -> Iterator[Found]:
    rows = Process.objects.filter(ended_at=None).order_by("-id").values("instance", "figures")
    for instance, found in hosts([dict(row) for row in rows]).items():
        whole, free = found.get(f"{what}_bytes", 0), found.get(f"{what}_free_bytes", 0)
        percent = 100 * (whole - free) / whole if whole else 0.0
        if percent > most:
            yield Found(instance, percent, f"{percent:.0f} % of the {what} of {instance} is used.")


def _export(now: datetime, _: float) -> Iterator[Found]:
    """An entry has waited for long, whyever nobody has sent it. What is no destination any more
    waits for nothing.
    """
    if settings.AUDIT_EXPORT is None:
        return
    name = settings.AUDIT_EXPORT.name
    row = AuditExport.objects.filter(destination=name).first()
    sent = row.sequence if row is not None else 0
    waiting = LedgerEntry.objects.filter(sequence__gt=sent).order_by("sequence")
    oldest = waiting.values_list("at", flat=True).first()
    if oldest is not None and oldest < now - STALLED:
        behind = waiting.count()
        yield Found(name[:100], behind, f"{behind} entries wait for the collector.")


RULES = (
    Rule("provider_availability", CRITICAL, "availability_percent", _availability, least=True),
    Rule("provider_out_of_service", CRITICAL, "", _breakers),
    Rule("error_rate", CRITICAL, "error_percent", _faults),
    Rule("average_time", CRITICAL, "average_seconds", _average),
    Rule("pool_exhausted", CRITICAL, "", _pools),
    Rule("budget_used_up", CRITICAL, "", _spending(SpendingAlert.Kind.STOP)),
    Rule("budget_nearly_used_up", WARNING, "", _spending(SpendingAlert.Kind.WARNING)),
    Rule("cost_spike", WARNING, "", _spending(SpendingAlert.Kind.SPIKE)),
    Rule("rate_limit_near", WARNING, "rate_percent", _bounds),
    Rule("approval_waits", WARNING, "", _approvals),
    Rule("provider_throttles", WARNING, "error_percent", _throttled),
    Rule("memory_high", WARNING, "memory_percent", _memory),
    Rule("disk_high", WARNING, "disk_percent", _disk),
    Rule("slow_executions", WARNING, "p95_seconds", _slow),
    Rule("repeated_out_of_memory", WARNING, "out_of_memory_per_hour", OUT_OF_MEMORY),
    Rule("repeated_timeouts", WARNING, "timed_out_per_hour", TIMED_OUT),
    Rule("forbidden_calls", WARNING, "sigsys_per_hour", FORBIDDEN_CALLS),
    Rule("process_bursts", WARNING, "process_bursts_per_hour", PROCESS_BURSTS),
    Rule("refused_hosts", WARNING, "refused_attempts_per_hour", refused_hosts),
    Rule("audit_export_stalled", CRITICAL, "", _export),
    Rule("provider_unhealthy", CRITICAL, "", unhealthy),
    Rule("queue_dead", CRITICAL, "queue_seconds", dead_queue),
    Rule("ledger_findings", CRITICAL, "", findings),
    Rule("checkpoint_old", CRITICAL, "checkpoint_hours", checkpoint_old),
    Rule("change_waits", WARNING, "", changes),
)
