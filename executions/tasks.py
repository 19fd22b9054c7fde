"""What the workers are asked to do, by dotted name. Rules live in the services."""

from __future__ import annotations

from django.conf import settings

from executions.capabilities.alerts import service as alerts
from executions.capabilities.network import sources
from executions.capabilities.observability import audit_export
from executions.capabilities.reports import service as reports
from executions.capabilities.retention import service
from executions.capabilities.retention import service as retention
from executions.capabilities.schedules import service as schedules
from executions.capabilities.search import service as search
from executions.capabilities.spending import service as spending
from executions.capabilities.templates import builds as templates
from executions.capabilities.templates import drafts
from executions.capabilities.webhooks import service as webhooks
from executions.kernel.background import run_once_in_background
from executions.ledger import checkpoints
from executions.ledger.verification import verify_entries
from executions.runs import active_runs, event_log, ledger_checks, orphaned_runs
from executions.sessions import maintenance
from executions.sessions.storage import blobs


def end_stale_executions() -> int:
    return orphaned_runs.end_stale_executions()


def forget_events() -> int:
    return event_log.forget_old() + active_runs.forget_ended()


def tend_sessions() -> int:
    return maintenance.maintain()


def collect_blobs() -> int:
    return blobs.collect()


def write_ledger_checkpoint() -> int | None:
    point = checkpoints.write_checkpoint(verify_entries)
    return point.sequence if point else None


def check_ledger() -> None:
    ledger_checks.start_waiting()


def apply_retention() -> int:
    return sum(erasure.executions for erasure in retention.apply_retention())


def discard_unfinished_uploads() -> int:
    return blobs.discard_unfinished()


def index_new_code() -> int:
    return search.index_new_code()


def watch_spending() -> int:
    return spending.watch_spending()


def watch_alerts() -> int:
    return alerts.watch_and_tell()


def export_ledger() -> None:
    run_once_in_background("audit export", audit_export.export_for)


def export_metrics() -> None:
    if settings.TELEMETRY is not None:
        from executions.capabilities.observability.otlp import send

        run_once_in_background("metrics over OTLP", send)


def follow_credential_sources() -> None:
    run_once_in_background("values of credentials", sources.follow_sources)


def make_reports() -> int:
    run_once_in_background("audit reports", reports.make_waiting)
    return reports.remove_old()


def build_templates() -> None:
    templates.build_in_background()


def remove_unused_templates() -> int:
    drafts.remove_old()
    return templates.remove_unused()


def tend_webhooks() -> int:
    return webhooks.forget_old()


def begin_schedules() -> int:
    return schedules.begin_due()


def remove_tenants() -> int:
    return service.go_on()


def give_space_back() -> int:
    return retention.give_space_back()
