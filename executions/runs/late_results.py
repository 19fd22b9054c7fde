"""Results that came after their records had been closed: attached, changing no status."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Q

from executions.capabilities.observability.counters import count_used
from executions.capabilities.retention.holds import held_of
from executions.capabilities.spending.service import spend
from executions.kernel.batches import keys_of, let_others_write
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.record import used_ms
from executions.runs.sealing import artifact_content
from providers.errors import UNAVAILABLE

_COLUMNS = (
    *("exit_code", "error_code", "error_message", "has_result", "result", "outputs", "stdout"),
    *("stderr", "stdout_truncated", "stderr_truncated", "finished_at", "cost"),
)
_BODIES = ("result", "outputs", "stdout", "stderr")


def record_late(
    execution: Execution,
    status: Execution.Status,
    values: Mapping[str, Any],
    artifacts: Sequence[Artifact] = (),
) -> bool:
    """Keep what came of a run beside its closed record, and count its cost. False when there is
    one already."""
    late = LateResult(
        execution=execution,
        status=status,
        artifacts=[artifact_content(artifact) for artifact in artifacts],
        **{name: values[name] for name in _COLUMNS if name in values},
    )
    try:
        with transaction.atomic():
            # The receiver of its signal enters it in the ledger (`executions.receivers`).
            late.save(force_insert=True)
            if late.cost:
                spend(execution.tenant_slug, late.cost)
            if more_ms := _ran_on(execution, values):
                count_used(execution.tenant_slug, more_ms)
    except IntegrityError:
        return False
    return True


def _ran_on(execution: Execution, values: Mapping[str, Any]) -> int:
    """Milliseconds that it ran beyond what was counted when its record was closed."""
    ms = min(values.get("run_ms") or 0.0, execution.timeout * 1000)
    return max(0, round(ms) - used_ms(execution, execution.timeout))


def late_result_of(execution: Execution) -> LateResult | None:
    """Asks the database only for what may have one: what was closed as lost or cancelled."""
    is_lost = execution.error_code == UNAVAILABLE.code and not execution.retryable
    if not is_lost and execution.status != Execution.Status.CANCELLED:
        return None
    return LateResult.objects.filter(execution=execution.pk).first()


def erase_late_results(
    tenant_slug: str, created_before: datetime, *, but_of: Collection[UUID] = ()
) -> int:
    """Erase what programs of the tenant printed and returned. How many rows had some of it.

    Each change is entered, so that the ledger tells it from one behind our back.
    """
    due = LateResult.objects.filter(
        # What was asked for at a later time is kept from then on.
        Q(execution__run_at=None) | Q(execution__run_at__lt=created_before),
        execution__tenant_slug=tenant_slug,
        execution__created_at__lt=created_before,
    ).exclude(**dict.fromkeys(_BODIES, ""))
    due = due.exclude(execution__in=but_of)
    erased = 0
    # A page at a time: while something is being read, nothing else can be written here.
    for pk in keys_of(due):
        late = due.filter(pk=pk).first()
        if late is None:
            continue
        # What was put on hold since this began.
        held = held_of(tenant_slug)
        if held.everything or late.execution_id in held.executions:
            continue
        for name in _BODIES:
            setattr(late, name, "")
        late.save(update_fields=_BODIES)
        erased += 1
        let_others_write()
    return erased
