"""One call over the bridge: from a request's body to its answer, by the path of every run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseFailure

from executions.bridge.answers import answer_of, unrun
from executions.bridge.requests import read_request
from executions.kernel.coroutines import wait_for
from executions.kernel.database import nothing_ran, problem_of
from executions.runs.event_log import EventLog
from executions.runs.record import Caller
from executions.runs.routes import Route, lender
from executions.runs.routing import BeyondKey
from executions.runs.service import running
from executions.tenants.keys import Unauthenticated, authenticate, note_refusal
from executions.tenants.models import Scope
from executions.tenants.service import internal_tenant
from providers import registry
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.executor_manager import provider as executor_manager
from providers.manager import manager
from providers.services.route_order import planned

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bridge:
    """Runs what is asked for, as its key's tenant. `folder` takes large artifacts, where there is
    one.
    """

    folder: Path | None = None

    def check(self) -> None:
        """Raise InvalidConfiguration for settings under which no call could be carried out."""
        if settings.CODE_EXEC_PROVIDER_TYPE:
            registry.get(settings.CODE_EXEC_PROVIDER_TYPE)
        if self.folder is not None and not self.folder.is_dir():
            raise InvalidConfiguration(f"{self.folder} is not a directory.", field="artifacts")

    def call(self, body: Mapping[str, Any], log: EventLog | None = None) -> dict[str, Any]:
        """The answer, whatever happens. `log` is told what comes of the run while it runs."""
        try:
            request = read_request(body)
            caller = _caller()
            route = _route(caller.tenant.slug, request.language)
            outcome = wait_for(running(request, caller, route=route, log=log))
            return answer_of(outcome, self.folder)
        except SandboxError as error:
            return unrun(error)
        except DatabaseFailure as failure:
            if problem := problem_of(failure):
                return unrun(nothing_ran(problem))
            return _failed()
        except Exception:
            return _failed()

    def warm(self) -> None:
        """Have the provider started before the first call comes."""
        if not settings.CODE_EXEC_PROVIDER_TYPE:
            manager.warm()
            return
        try:
            with lender(settings.CODE_EXEC_PROVIDER_TYPE)():
                pass
        except SandboxError as error:
            logger.warning("No provider is ready. %s: %s", error.code, error.message)


def _failed() -> dict[str, Any]:
    logger.exception("a call over the bridge failed inside the service")
    message = "The call failed inside the service. Its log has the details."
    return unrun(ProviderUnavailable(message, started=True))


def _caller() -> Caller:
    """Whose run it is. The key is looked at for each call: it may be revoked meanwhile."""
    if not settings.CODE_EXEC_API_KEY:
        return Caller(internal_tenant())
    try:
        key = authenticate(settings.CODE_EXEC_API_KEY)
    except Unauthenticated:
        raise InvalidConfiguration(
            "CODE_EXEC_API_KEY: Is not valid. Set a key of an active tenant that is not revoked "
            "and has not expired.",
            field="CODE_EXEC_API_KEY",
        ) from None
    if not key.has_scope(Scope.EXECUTE):
        note_refusal(key, "scope", detail="the bridge needs execute")
        raise BeyondKey(
            "CODE_EXEC_API_KEY: The API key lacks the required scope: execute.",
            field="CODE_EXEC_API_KEY",
        )
    return Caller.of_key(key)


def _route(tenant_slug: str, language: str) -> Route | None:
    """Who is asked: None for whom the admin's routes name, or the active provider.

    RAGFlow's executor is asked only where there is neither, and never because one has failed.
    """
    if settings.CODE_EXEC_PROVIDER_TYPE:
        return lender(settings.CODE_EXEC_PROVIDER_TYPE)
    if settings.SANDBOX_HOST and not manager.in_force() and not planned(tenant_slug, language):
        return executor_manager.route_to(settings.SANDBOX_HOST)
    return None
