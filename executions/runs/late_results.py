"""Results that came after their records had been closed: attached, changing no status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import IntegrityError, transaction

from executions.runs import extensions
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.record import used_ms
from executions.runs.sealing import artifact_content
from providers.errors import UNAVAILABLE

_COLUMNS = (
    *("exit_code", "error_code", "error_message", "has_result", "result", "outputs", "stdout"),
    *("stderr", "stdout_truncated", "stderr_truncated", "finished_at", "cost"),
)


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
            more_ms = _ran_on(execution, values)
            for each in extensions.installed():
                each.on_late(execution, late, more_ms)
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
