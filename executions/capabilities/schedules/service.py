"""Schedules: created, changed, paused, and begun when they are due."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, zip_longest
from typing import Annotated, Any
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from pydantic import Field

from executions.capabilities.schedules.cron import (
    CRON,
    MOST_CHARACTERS,
    check_cron,
    check_zone,
    next_time,
)
from executions.capabilities.schedules.models import Schedule
from executions.kernel.coroutines import run_sync
from executions.kernel.database import problem_of
from executions.kernel.declarations import (
    END,
    STORABLE,
    Body,
    Query,
    Rule,
    declared,
    newest_first,
    refuse,
)
from executions.kernel.text import to_json
from executions.runs.models import Execution
from executions.runs.payloads import LARGE_BYTES
from executions.runs.requests import API_ENTRYPOINTS, TOOLS_IN_THESE, Caller, ExecutionRequest
from executions.runs.results import DEFAULT_LIMIT, Cursor, Limit
from executions.runs.routing import BeyondKey
from executions.runs.service import execute
from executions.sessions.requests import NOT_FOUND
from executions.tenants.models import ApiKey, Scope, Tenant
from executions.tenants.quotas import Quota, limit_of, tenant_lock
from providers.errors import InvalidConfiguration, RateLimited, SandboxError
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

SCHEDULED = Body(
    ExecutionRequest,
    "ScheduledExecution",
    ours=(
        *("subject", "background", "usual_timeout", "traceparent", "mode", "run_at"),
        *("idempotency_key", "session", "context", "env", "provider"),
    ),
    only={"entrypoint": API_ENTRYPOINTS},
    says=TOOLS_IN_THESE,
)


def read_scheduled(body: Any) -> ExecutionRequest:
    """Raises InvalidConfiguration, which names the field at fault within `request`."""
    try:
        wanted = SCHEDULED.read(body, mode="async")
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"request.{error.message}", field="request") from None
    if len(to_json(body).encode()) > LARGE_BYTES:
        refuse("request", f"Must be at most {LARGE_BYTES} bytes of JSON.")
    return wanted


# Of the names in the tz database.
_ZONE = "[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*"
Name = Annotated[str, Field(min_length=1, max_length=100), STORABLE]
Cron = Annotated[
    str,
    Field(
        max_length=MOST_CHARACTERS,
        description="Minute, hour, day, month, and the day of the week as a name: `30 6 * * "
        "mon-fri`.",
    ),
    Rule(check_cron, {"format": "cron", "pattern": f"^{CRON}{END}"}),
]
Zone = Annotated[
    str,
    Field(max_length=64, description="A time zone, such as `UTC` or `Europe/Berlin`."),
    Rule(check_zone, {"format": "time-zone", "pattern": f"^{_ZONE}{END}"}),
]
Scheduled = Annotated[
    Mapping[str, Any],
    Rule(lambda sent: sent, SCHEDULED.schema),
    Field(description="The request for each run: a body of `POST /api/v1/executions`."),
]


@declared
class ScheduleRequest:
    """Have a request run at the times of a cron expression."""

    name: Name
    cron: Cron
    request: Scheduled
    timezone: Zone = "UTC"
    paused: bool = False

    def __post_init__(self) -> None:
        read_scheduled(self.request)


@declared
class ScheduleChange:
    """What is to be otherwise; what is left out stays."""

    name: Name | None = None
    cron: Cron | None = None
    request: Scheduled | None = None
    timezone: Zone | None = None
    paused: bool | None = None

    def __post_init__(self) -> None:
        if self.request is not None:
            read_scheduled(self.request)


@declared
class ScheduleFilter:
    """Where to go on."""

    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


CREATE = Body(ScheduleRequest, "ScheduleRequest")
CHANGE = Body(ScheduleChange, "ScheduleChange")
LIST = Query(ScheduleFilter, empty_is_none=True)


BY_REQUEST = "Its tenant has paused it."


class NoSuchSchedule(SandboxError):
    """There is none of this id, or it is somebody else's: nobody is told which."""

    entry = NOT_FOUND


@dataclass(frozen=True)
class Page:
    schedules: list[Schedule]
    next_cursor: str


def create(wanted: ScheduleRequest, api_key: ApiKey) -> Schedule:
    """A new schedule of the key's tenant. Raises RateLimited where it has as many as it may."""
    tenant = api_key.tenant
    schedule = Schedule(tenant=tenant, name=wanted.name, cron=wanted.cron, timezone=wanted.timezone)
    _give(schedule, wanted.request, api_key)
    _set(schedule, BY_REQUEST if wanted.paused else "")
    with tenant_lock(tenant.slug):
        has = Schedule.objects.filter(tenant=tenant).count()
        most = limit_of(tenant, Quota.SCHEDULES)
        if has >= most:
            raise RateLimited(
                f"The tenant has {has} schedules, and the limit is {most}. Delete one; an "
                "administrator can raise the limit.",
                field=Quota.SCHEDULES.value,
            )
        schedule.save(force_insert=True)
    return schedule


def change(schedule_id: UUID, wanted: ScheduleChange, api_key: ApiKey) -> Schedule:
    """Change a schedule of the key's tenant, which is that key's from then on: with a key that is
    held to less nobody has anything run by the power of another. Raises NoSuchSchedule.
    """
    with transaction.atomic():
        schedule = _locked(api_key.tenant, schedule_id)
        was = (schedule.cron, schedule.timezone, schedule.paused_because)
        for name in ("name", "cron", "timezone"):
            if (value := getattr(wanted, name)) is not None:
                setattr(schedule, name, value)
        try:
            body = wanted.request if wanted.request is not None else schedule.request
        except DecryptionError:
            refuse("request", "The stored request cannot be decrypted. Send it again.")
        _give(schedule, body, api_key)
        because = schedule.paused_because
        if wanted.paused is not None:
            because = BY_REQUEST if wanted.paused else ""
        if was != (schedule.cron, schedule.timezone, because):
            # What is due already, and not begun yet, stays due otherwise.
            _set(schedule, because)
        schedule.save()
    return schedule


def pause(schedule: Schedule, because: str) -> bool:
    """Have nothing begun by it until its tenant resumes it. False where it is paused, or gone."""
    with transaction.atomic():
        found = Schedule.objects.select_for_update().defer("request").filter(pk=schedule.pk)
        row = found.filter(next_at__isnull=False).first()
        if row is None:
            return False
        row.paused_because, row.next_at = because[:200], None
        row.save(update_fields=["paused_because", "next_at"])
    return True


def remove(tenant: Tenant, schedule_id: UUID) -> None:
    """Raises NoSuchSchedule. What it has begun stays."""
    with transaction.atomic():
        _locked(tenant, schedule_id).delete()


def schedule_of(tenant: Tenant, schedule_id: UUID) -> Schedule:
    """Raises NoSuchSchedule."""
    found = schedules_of(tenant).filter(pk=schedule_id).first()
    if found is None:
        raise _no_such()
    return found


def list_schedules(tenant: Tenant, wanted: ScheduleFilter) -> Page:
    """A page of the tenant's schedules, newest first."""
    return Page(*newest_first(schedules_of(tenant), wanted.cursor, wanted.limit))


def _locked(tenant: Tenant, schedule_id: UUID) -> Schedule:
    mine = schedules_of(tenant).select_for_update(of=("self",))
    found = mine.filter(pk=schedule_id).first()
    if found is None:
        raise _no_such()
    return found


def _give(schedule: Schedule, body: Mapping[str, Any], api_key: ApiKey) -> None:
    request = read_scheduled(body)
    schedule.request = dict(body)
    schedule.language, schedule.code_hash = request.language, request.code_hash
    schedule.api_key, schedule.api_key_prefix = api_key, api_key.prefix


def _set(schedule: Schedule, paused_because: str) -> None:
    """Its next time from now on; none while it is paused."""
    schedule.paused_because = paused_because
    if paused_because:
        schedule.next_at = None
        return
    schedule.next_at = next_time(schedule.cron, schedule.timezone, timezone.now())
    if schedule.next_at is None:
        refuse("cron", "Invalid cron expression: there is no such day.")


def _no_such() -> NoSuchSchedule:
    return NoSuchSchedule("Schedule not found.")


# Of one look, and its seconds. What is left is due in the next, in a minute.
AT_ONCE = 500
LOOK_SECONDS = 30.0


class _TakenByAnother(Exception):
    """Another worker has begun it, or it was changed meanwhile: nothing is to be inserted."""


def begin_due() -> int:
    """Begin what is due, the tenants by turns. How many executions were made.

    The time is the database's, so that the clock of a host decides nothing.
    """
    due = Schedule.objects.filter(next_at__lte=Now()).order_by("next_at")
    of_tenants: dict[int, list[UUID]] = defaultdict(list)
    for pk, tenant in due.values_list("pk", "tenant_id")[:AT_ONCE]:
        of_tenants[tenant].append(pk)
    by_turns = chain.from_iterable(zip_longest(*of_tenants.values()))
    until = time.monotonic() + LOOK_SECONDS
    begun = 0
    for pk in by_turns:
        if time.monotonic() > until:
            break
        begun += pk is not None and _begin_alone(pk)
    return begun


def _begin_alone(schedule_id: UUID) -> bool:
    """Whatever is wrong with one keeps none of the others."""
    try:
        return _begin(schedule_id)
    except Exception:
        logger.exception("schedule %s could not be checked", schedule_id)
        return False


def _begin(schedule_id: UUID) -> bool:
    found = Schedule.objects.defer("request").select_related("tenant", "api_key__tenant")
    schedule = found.annotate(now=Now()).filter(pk=schedule_id, next_at__lte=Now()).first()
    if schedule is None or schedule.next_at is None:
        return False
    try:
        # Monotonic, whatever the clock does: no time that was taken is due again.
        latest = max(schedule.now, schedule.next_at)
        following = next_time(schedule.cron, schedule.timezone, latest)
    except (ValueError, KeyError) as error:
        logger.warning("schedule %s is paused: %s", schedule.pk, error)
        pause(schedule, "Its cron expression or its time zone cannot be read. Send them again.")
        return False
    try:
        if because := _kept_from_it(schedule, schedule.now):
            pause(schedule, because)
            return False
        if following is None:
            pause(schedule, "It has no further run.")
            return False
        return _run(schedule, following)
    except _TakenByAnother:
        return False
    except RateLimited as error:
        # Without a quota of the tenant's it is the service that is busy: it stays due.
        if error.field:
            _leave_out(schedule, following, error.message)
    except (InvalidConfiguration, BeyondKey) as error:
        _leave_out(schedule, following, error.message)
    except SandboxError as error:
        # Nothing of the tenant's is at fault: it stays due.
        logger.warning("schedule %s could not be started: %s", schedule.pk, error.message)
    except DecryptionError:
        # Nor can its row be entered in the ledger, as a pause would be.
        _leave_out(schedule, following, "Its request cannot be decrypted. Send it again.")
    except Exception as error:
        if problem_of(error):
            # The database's, which is looked at again: it stays due.
            raise
        logger.exception("schedule %s failed inside the service", schedule.pk)
        _leave_out(schedule, following, "It failed inside the service. The log has the details.")
    return False


def _kept_from_it(schedule: Schedule, now: datetime) -> str:
    """Why it must begin nothing any more; "" where nothing keeps it."""
    key = schedule.api_key
    if not schedule.tenant.is_active:
        return "Its tenant is inactive."
    if key is None:
        return "Its key was removed."
    if (key.tenant_id, key.prefix) != (schedule.tenant_id, schedule.api_key_prefix):
        return "Its key is not the one that created it."
    if not key.is_valid(now):
        return "Its key was revoked." if key.revoked_at else "Its key has expired."
    return "" if key.has_scope(Scope.EXECUTE) else "Its key may no longer run code."


def _run(schedule: Schedule, following: datetime) -> bool:
    request = read_scheduled(schedule.request)

    def take(execution: Execution) -> None:
        if not _at_its_time(schedule).update(
            next_at=following, last_at=execution.created_at, last_problem=""
        ):
            raise _TakenByAnother

    caller = Caller(
        schedule.tenant,
        schedule.api_key,
        request_id=f"schedule:{schedule.pk}",
        schedule_id=schedule.pk,
    )
    run_sync(execute(request, caller, beside=take))
    return True


def _leave_out(schedule: Schedule, following: datetime | None, problem: str) -> None:
    if following is not None:
        _at_its_time(schedule).update(next_at=following, last_problem=problem[:300])


def _at_its_time(schedule: Schedule) -> QuerySet[Schedule]:
    return Schedule.objects.filter(pk=schedule.pk, next_at=schedule.next_at)


def schedules_of(tenant: Tenant) -> QuerySet[Schedule]:
    return Schedule.objects.defer("request").filter(tenant=tenant)


# More than the clocks of hosts do.
_CLOCKS_DIFFER = timedelta(hours=1)
_A_DAY = timedelta(days=1)


def is_due_in_time(row: Schedule) -> str:
    """Its next time follows from its expression: whoever moves it away has nothing run meanwhile.

    A clock of ours may have been ahead when it was written, or set back since. `last_at` is not
    bound, so it excuses no more than a day.
    """
    if row.paused_because:
        return "" if row.next_at is None else "it has a next run although it is paused"
    if row.next_at is None:
        return "it has no next run although it is not paused"
    now = timezone.now()
    last = min(row.last_at or row.created_at, now + _A_DAY)
    begin = max(now, row.created_at, last) + _CLOCKS_DIFFER
    try:
        latest = next_time(row.cron, row.timezone, begin)
    except (ValueError, KeyError):
        # That it was altered is found by its hash.
        return ""
    if latest is not None and row.next_at <= latest:
        return ""
    return f"it is due at {row.next_at:%Y-%m-%d %H:%M} UTC, later than its expression says"


RESTORED = "The database was restored from a backup. Resume it."


def pause_schedules() -> int:
    """Pause what has come due since the backup: it may have been begun before the restore. How many
    were paused. Raises LedgerUnavailable.
    """
    due = Schedule.objects.defer("request").filter(next_at__lte=Now())
    return sum(pause(schedule, RESTORED) for schedule in due)
