"""What somebody signed in has run by hand, as a tenant: by the path of what comes with a key.

Nothing is allowed here that is not allowed there, but to choose a provider (`services.choosing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executions.kernel.audit import current_actor
from executions.kernel.coroutines import Waits
from executions.kernel.declarations import refuse
from executions.kernel.text import is_storable
from executions.runs.models import Execution
from executions.runs.record import Caller
from executions.runs.requests import ExecutionRequest
from executions.runs.service import running
from executions.sessions import manual_runs
from executions.sessions.lifecycle import opening
from executions.sessions.models import Session
from executions.sessions.queries import living_session_of
from executions.sessions.requests import SessionRequest, tenant_of
from executions.tenants.models import Tenant
from executions.tenants.service import INTERNAL, internal_tenant, require_active

RAN, OPENED = "Ran it in the playground.", "Opened it in the playground."


def playing(
    read: Callable[..., ExecutionRequest],
    tenant_slug: str,
    person: Any,
    *,
    address: str,
    request_id: str,
) -> Waits[Execution]:
    """The execution, queued as the tenant's, or as that of the tenant of the request's session.

    `read` makes the request, given what is not the person's to say. The record's subject names who
    asked, and so does the admin's log. Raises InvalidConfiguration for a tenant that is not there
    or not active, and what `read` and `running` do.
    """
    request = read(mode="async", subject=_subject())
    if request.session is not None:
        tenant = tenant_of(living_session_of(None, request.session))
        require_active(tenant)
    else:
        tenant = _tenant(tenant_slug)
    caller = Caller(tenant, request_id=request_id, client_address=address)
    outcome = yield from running(
        request,
        caller,
        waits=True,
        beside=lambda execution: manual_runs.note(person, execution, RAN),
    )
    return outcome.execution


def opening_by_hand(
    read: Callable[..., SessionRequest],
    tenant_slug: str,
    person: Any,
    *,
    address: str,
    request_id: str,
) -> Waits[Session]:
    """A session of the tenant, to run cells in. Raises as `playing`, and what `opening` does."""
    request = read(subject=_subject())
    caller = Caller(_tenant(tenant_slug), request_id=request_id, client_address=address)
    return (
        yield from opening(
            request,
            caller,
            may_choose=True,
            beside=lambda session: manual_runs.note(person, session, OPENED),
        )
    )


def _subject() -> str:
    return f"playground by {current_actor()}"[:255]


def _tenant(slug: str) -> Tenant:
    if not is_storable(slug):
        refuse("tenant", "Must be the slug of a tenant.")
    if slug == INTERNAL:
        tenant = internal_tenant()
    else:
        found = Tenant.objects.filter(slug=slug).first()
        if found is None:
            refuse("tenant", "There is no tenant with this slug.")
        tenant = found
    require_active(tenant)
    return tenant
