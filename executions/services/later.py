"""Runs at a later time: what is accepted, and what is asked again when they begin.

They wait in the queue, whose claim leaves them there until their time (`services.queue`).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from executions.kernel.declarations import refuse
from executions.models.execution import Execution
from executions.services.requests import ExecutionRequest
from executions.services.spending import refuse_over_budget
from executions.tenants.models import ApiKey, Scope
from providers.errors import ProviderUnavailable
from providers.languages import normalize_language


def refuse_run_at(run_at: datetime, api_key: ApiKey | None) -> None:
    """Raise InvalidConfiguration for a time that has passed, is too far ahead, or at which the key
    is not valid any more.
    """
    now = timezone.now()
    if run_at <= now:
        refuse("run_at", "Must be in the future. Leave it out to run now.")
    days = settings.SANDBOX_MAX_RUN_AHEAD_DAYS
    if run_at > now + timedelta(days=days):
        refuse("run_at", f"Must be at most {days} days ahead (SANDBOX_MAX_RUN_AHEAD_DAYS).")
    if api_key is not None and not api_key.is_valid(run_at):
        refuse("run_at", "The key will have expired by then. Use one that is valid for longer.")


def refuse_begin(execution: Execution, request: ExecutionRequest) -> None:
    """Raise what keeps a claimed execution from beginning.

    What may have changed while it waited is asked again: ProviderUnavailable where its key was
    revoked, or may not run code in this language. What had a time of its own is also not begun
    with a key that has expired, and raises RateLimited where a budget is used up. The
    request is encrypted and the row is not: whoever changes the time there has nothing run sooner,
    and later only by changing it back.
    """
    if execution.run_at != request.run_at:
        raise ProviderUnavailable(
            "The stored run time is not the requested one; nothing was run. Send the request again."
        )
    had_a_time = request.run_at is not None or execution.schedule_id is not None
    if (key := execution.api_key) is not None:
        if key.revoked_at is not None or (had_a_time and not key.is_valid(timezone.now())):
            raise ProviderUnavailable(
                "The key of the request was revoked or has expired meanwhile."
            )
        language = normalize_language(request.language)
        if not (key.has_scope(Scope.EXECUTE) and key.allows("languages", language)):
            raise ProviderUnavailable(f"The key of the request may no longer run {language}.")
    if had_a_time:
        refuse_over_budget(execution.tenant_slug)
