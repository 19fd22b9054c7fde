"""What tenants' code does again and again within an hour, and what was seen of it.

The tenant is the subject, so that one hides nobody else's, and none opens more than one alert of
each rule. Code that several tenants have run has one alert, however many programs it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from django.db.models import Count, Q, QuerySet

from executions.kernel.text import first_uuid7
from executions.runs.models import Execution
from executions.runs.record import QUEUE_ALLOWANCE
from executions.services.alerts.found import Found
from providers.observations import PROCESS_BURST, PROCESS_LIMIT, SIGSYS

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


OUT_OF_MEMORY = repeated(Execution.Status.OUT_OF_MEMORY, "ran out of memory")
TIMED_OUT = repeated(Execution.Status.TIMED_OUT, "ran out of time")
FORBIDDEN_CALLS = seen("had processes ended by SIGSYS", SIGSYS)
PROCESS_BURSTS = seen("started very many processes", PROCESS_LIMIT, PROCESS_BURST)
