"""What the workers are asked to do, by dotted name. Rules live in the services."""

from __future__ import annotations

from django.conf import settings

from executions.kernel.background import begin_alone
from executions.ledger import checkpoints, checks
from executions.ledger.verification import verify_entries
from executions.runs import active_runs, event_log, expiry
from executions.services import code_search, compaction, removal, retention, spending
from executions.services.alerts import watching
from executions.services.audit_export import exporting
from executions.services.recurring import beginning
from executions.services.reports import asking
from executions.services.webhooks import outbox
from executions.sessions import maintenance
from executions.sessions.storage import blobs


def end_stale_executions() -> int:
    return expiry.end_stale_executions()


def forget_events() -> int:
    return event_log.forget_old() + active_runs.forget_ended()


def tend_sessions() -> int:
    return maintenance.tend()


def collect_blobs() -> int:
    return blobs.collect()


def write_ledger_checkpoint() -> int | None:
    point = checkpoints.write_checkpoint(verify_entries)
    return point.sequence if point else None


def check_ledger() -> None:
    checks.begin_waiting()


def apply_retention() -> int:
    return sum(erasure.executions for erasure in retention.apply_retention())


def discard_unfinished_uploads() -> int:
    return blobs.discard_unfinished()


def index_new_code() -> int:
    return code_search.index_new_code()


def watch_spending() -> int:
    return spending.watch_spending()


def watch_alerts() -> int:
    return watching.watch_and_tell()


def export_ledger() -> None:
    begin_alone("audit export", exporting.export_for)


def export_metrics() -> None:
    if settings.TELEMETRY is not None:
        from executions.services.telemetry.metrics import send

        begin_alone("metrics over OTLP", send)


def make_reports() -> int:
    begin_alone("audit reports", asking.make_waiting)
    return asking.remove_old()


def tend_webhooks() -> int:
    return outbox.forget_old()


def begin_schedules() -> int:
    return beginning.begin_due()


def remove_tenants() -> int:
    return removal.go_on()


def give_space_back() -> int:
    return compaction.give_space_back()
