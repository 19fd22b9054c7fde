"""Whether a sandbox runs: to look is no use of it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from executions.api.agent_sandbox.control import health as agent_sandbox_health
from executions.api.e2b.base import SandboxView
from executions.api.e2b.credentials import SANDBOX_HEADER
from executions.api.e2b.errors import NoSandbox
from executions.sessions.models import Session
from executions.tenants.models import ApiKey


class AnyKey(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.auth, ApiKey)


class HealthView(SandboxView):
    # Two doors share the address, which is open to everybody at the other one.
    permission_classes = (AnyKey,)

    def get(self, request: Request) -> HttpResponse:
        if self.session().state != Session.State.OPEN:
            raise NoSandbox
        return HttpResponse(status=204)


def health(request: HttpRequest) -> HttpResponseBase:
    """Of the sandbox that the request names, or of the service."""
    if SANDBOX_HEADER in request.META:
        return HealthView.as_view()(request)
    return agent_sandbox_health(request)
