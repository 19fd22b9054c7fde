"""Beginning what is due: one asynchronous execution for each time, however many workers look.

A time is taken by an UPDATE in the transaction that inserts its execution, and whose count decides.
Of the times that were missed while nobody looked one is made up for.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from datetime import datetime
from itertools import chain, zip_longest
from uuid import UUID

from django.db.models import QuerySet
from django.db.models.functions import Now

from executions.kernel.coroutines import wait_for
from executions.kernel.database import problem_of
from executions.models.schedule import Schedule
from executions.runs.models import Execution
from executions.runs.record import Caller
from executions.runs.routing import BeyondKey
from executions.runs.service import running
from executions.services.recurring.body import read_scheduled
from executions.services.recurring.changing import pause
from executions.services.recurring.cron import next_time
from executions.tenants.models import Scope
from providers.errors import InvalidConfiguration, RateLimited, SandboxError
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

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
    wait_for(running(request, caller, beside=take))
    return True


def _leave_out(schedule: Schedule, following: datetime | None, problem: str) -> None:
    if following is not None:
        _at_its_time(schedule).update(next_at=following, last_problem=problem[:300])


def _at_its_time(schedule: Schedule) -> QuerySet[Schedule]:
    return Schedule.objects.filter(pk=schedule.pk, next_at=schedule.next_at)
