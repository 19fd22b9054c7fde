from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class ExecutionsConfig(AppConfig):
    name = "executions"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Executions"

    def ready(self) -> None:
        # Its models are there only now.
        from django_q.signals import post_spawn

        from executions import (
            checks,  # noqa: F401  registers the checks
            receivers,
        )
        from executions.capabilities.network.credentials import CREDENTIALS
        from executions.capabilities.network.lists import LISTS
        from executions.capabilities.observability import capability
        from executions.capabilities.policies.service import POLICIES
        from executions.capabilities.retention.capability import HOLDS
        from executions.capabilities.spending.models import Budget
        from executions.kernel.audit import current_actor
        from executions.ledger.bindings import add_check
        from executions.ledger.verification import register_records
        from executions.runs import extensions, journal, payloads
        from executions.runs.ledger_checks import Executions
        from executions.runs.orphaned_runs import has_ended
        from executions.sessions.cells import Sessions
        from executions.tenants.keys import KEYS
        from executions.tenants.models import Tenant
        from executions.tenants.service import ensure_roles
        from providers.guarded import Guarded, guard
        from providers.remote.reclaim import learn_of_ends
        from providers.services import row_changes
        from providers.services.rotation import also_rotate

        capability.start()
        extensions.register_installed(Sessions())
        register_records(Executions())
        add_check("executions.schedule", _is_due_in_time)
        receivers.connect()
        learn_of_ends(has_ended)
        post_spawn.connect(_worker_started, dispatch_uid="queue")
        also_rotate(payloads.rotate)
        also_rotate(journal.rotate)
        guard(Guarded(Tenant))
        guard(Guarded(Budget))
        guard(KEYS)
        guard(POLICIES)
        guard(LISTS)
        guard(CREDENTIALS)
        guard(HOLDS)
        # The last of the apps that name what is guarded.
        row_changes.connect(current_actor)
        _compose_heartbeat()
        # The last of the apps with permissions, so that all of them are there by then.
        post_migrate.connect(ensure_roles, sender=self, dispatch_uid="roles")


def _is_due_in_time(schedule: Any) -> str:
    # It reads cron expressions, whose library takes a while to load.
    from executions.capabilities.schedules.service import is_due_in_time

    return is_due_in_time(schedule)


def _compose_heartbeat() -> None:
    """Register what the heartbeat of a process does, and what a process does last.

    The lease knows none of this: records ask for the lease, and the steps close records.
    """
    from executions.runs import active_runs, heartbeat, orphaned_runs
    from executions.runs.heartbeat import PeriodicStep
    from executions.sessions.ending import abort_unfinished
    from executions.sessions.storage.wake import release_stale_claims

    def create_steps() -> list[PeriodicStep]:
        watcher, unattended = orphaned_runs.Watcher(), orphaned_runs.UnattendedRuns()
        return [
            PeriodicStep("signals", active_runs.deliver_requests),
            PeriodicStep("deaths", watcher.look, is_behind=lambda: watcher.is_behind),
            PeriodicStep("unfinished sessions", lambda lease: abort_unfinished()),
            PeriodicStep("waking", lambda lease: release_stale_claims()),
            PeriodicStep("unattended", unattended.close, orphaned_runs.UNATTENDED_LOOK_SECONDS),
            PeriodicStep(
                "forget", lambda lease: orphaned_runs.forget_ended(), orphaned_runs.FORGET_SECONDS
            ),
        ]

    heartbeat.register_steps(create_steps)
    active_runs.register_shutdown_step(heartbeat.end)


def _worker_started(**signal: Any) -> None:
    """In a process of `qcluster` that takes tasks, and in no other."""
    from executions.runs.worker import run_queue_in_background

    run_queue_in_background()
