"""Authentication by API key, and the scopes of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import (
    AuthenticationFailed,
    MethodNotAllowed,
    NotAuthenticated,
    PermissionDenied,
)
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from executions.tenants import keys
from executions.tenants.keys import note_refusal
from executions.tenants.models import ApiKey, Scope

if TYPE_CHECKING:
    from rest_framework.views import APIView

_ANY_KEY: tuple[Scope, ...] = ()
_EXECUTE = (Scope.EXECUTE,)
_FILES = (Scope.FILES,)
_SESSIONS = (Scope.SESSIONS,)
_READ = (Scope.READ,)
_ADMIN = (Scope.ADMIN,)
# A build runs code of the tenant.
_BUILD = (Scope.TEMPLATES, Scope.EXECUTE)
_RUN_IN_SESSION = (Scope.EXECUTE, Scope.SESSIONS)
# A conversation is opened by whatever comes first.
_FILES_IN_CONVERSATION = (Scope.FILES, Scope.SESSIONS)

# All of the scopes are needed.
NEEDS: Mapping[str, Mapping[str, tuple[Scope, ...]]] = {
    "executions": {"GET": _READ, "POST": _EXECUTE},
    "execution": {"GET": _READ},
    "execution-cancel": {"POST": _EXECUTE},
    "execution-events": {"GET": _READ},
    "execution-artifact": {"GET": _READ},
    "execution-tool-calls": {"GET": _READ},
    "execution-tool-call": {"POST": _EXECUTE},
    "schedules": {"GET": _EXECUTE, "POST": _EXECUTE},
    "schedule": {"GET": _EXECUTE, "PATCH": _EXECUTE, "DELETE": _EXECUTE},
    "sessions": {"GET": _READ, "POST": _SESSIONS},
    "session": {"GET": _READ, "PATCH": _SESSIONS, "DELETE": _SESSIONS},
    "session-executions": {"POST": _RUN_IN_SESSION},
    "session-interrupt": {"POST": _RUN_IN_SESSION},
    "session-reset": {"POST": _SESSIONS},
    "session-network": {"GET": _READ, "PUT": _SESSIONS},
    "network-attempts": {"GET": _READ},
    "templates": {"GET": _READ, "POST": _BUILD},
    "template": {"GET": _READ, "DELETE": _BUILD},
    "session-template": {"POST": (*_BUILD, Scope.SESSIONS)},
    "template-builds": {"POST": _BUILD},
    "template-version": {"GET": _READ},
    "template-version-log": {"GET": _READ},
    "template-version-sbom": {"GET": _READ},
    "template-version-cancel": {"POST": _BUILD},
    "session-contexts": {"GET": _READ, "POST": _SESSIONS},
    "session-context": {"DELETE": _SESSIONS},
    "session-context-restart": {"POST": _SESSIONS},
    "session-processes": {"GET": _READ, "POST": _RUN_IN_SESSION},
    "session-process-stdin": {"POST": _RUN_IN_SESSION},
    "session-process-signal": {"POST": _RUN_IN_SESSION},
    "session-process-events": {"GET": _READ},
    "session-process-resize": {"POST": _RUN_IN_SESSION},
    "session-files": {"GET": _FILES, "DELETE": _FILES},
    "session-file-events": {"GET": _FILES},
    "session-file-content": {"GET": _FILES, "PUT": _FILES},
    "session-file-move": {"POST": _FILES},
    "session-file-mkdir": {"POST": _FILES},
    "session-file-archive": {"GET": _FILES, "PUT": _FILES},
    "session-snapshot": {"POST": _FILES},
    "snapshots": {"GET": _FILES},
    "snapshot": {"GET": _FILES, "DELETE": _FILES},
    "languages": {"GET": _ANY_KEY},
    "usage": {"GET": _READ},
    "admin-providers": {"GET": _ADMIN},
    "admin-config": {"GET": _ADMIN, "POST": _ADMIN},
    "admin-test": {"POST": _ADMIN},
    "admin-active": {"PUT": _ADMIN},
    "agent-sandbox-execute": {"POST": _RUN_IN_SESSION},
    "agent-sandbox-reset": {"POST": _SESSIONS},
    "agent-sandbox-stop": {"POST": _SESSIONS},
    "agent-sandbox-upload": {"POST": _FILES_IN_CONVERSATION},
    "agent-sandbox-upload-urls": {"POST": _FILES_IN_CONVERSATION},
    "agent-sandbox-files": {"GET": _FILES},
    "agent-sandbox-download-url": {"GET": _FILES},
    "e2b-sandboxes": {"GET": _READ, "POST": _SESSIONS},
    "e2b-sandboxes-2": {"GET": _READ, "POST": _SESSIONS},
    "e2b-sandbox": {"GET": _READ, "DELETE": _SESSIONS},
    "e2b-connect": {"POST": _SESSIONS},
    "e2b-connect-2": {"POST": _SESSIONS},
    "e2b-resume": {"POST": _SESSIONS},
    "e2b-timeout": {"POST": _SESSIONS},
    "e2b-pause": {"POST": _SESSIONS},
    "e2b-network": {"PUT": _SESSIONS},
    "e2b-metrics": {"GET": _READ},
    "e2b-snapshot-take": {"POST": _FILES},
    "e2b-snapshots": {"GET": _FILES},
    "e2b-snapshot": {"DELETE": _FILES},
    "e2b-fork": {"POST": _FILES_IN_CONVERSATION},
    "e2b-process": {"POST": _RUN_IN_SESSION},
    "e2b-process-list": {"POST": _READ},
    "e2b-secrets": {"GET": _READ, "POST": _SESSIONS},
    "e2b-secret": {"GET": _READ, "POST": _SESSIONS, "DELETE": _SESSIONS},
    "e2b-templates": {"GET": _READ, "POST": _BUILD},
    "e2b-templates-2": {"GET": _READ, "POST": _BUILD},
    "e2b-templates-3": {"GET": _READ, "POST": _BUILD},
    "e2b-template": {"GET": _READ, "DELETE": _BUILD},
    "e2b-template-alias": {"GET": _READ},
    "e2b-template-files": {"GET": _BUILD},
    "e2b-template-status": {"GET": _READ},
    "e2b-template-build": {"POST": _BUILD},
    "e2b-template-tags": {"POST": _BUILD, "DELETE": _BUILD},
    "e2b-template-tags-of": {"GET": _READ},
    "e2b-process-connect": {"POST": _READ},
    "e2b-filesystem": {"POST": _FILES},
    "e2b-files": {"GET": _FILES, "POST": _FILES},
    "e2b-execute": {"POST": _RUN_IN_SESSION},
    "e2b-contexts": {"GET": _READ, "POST": _SESSIONS},
    "e2b-context": {"DELETE": _SESSIONS},
    "e2b-context-restart": {"POST": _SESSIONS},
    # Each of its tools needs what the endpoint does that it stands for.
    "mcp": {"POST": _ANY_KEY},
}
# Of these the ledger has an entry although nothing is run: they count for more in the minute of
# their tenant (`tenants.quotas`). A run, and a session that is opened or closed, have an
# entry too, and cost a sandbox.
ENTERED: Mapping[str, tuple[str, ...]] = {
    "schedules": ("POST",),
    "schedule": ("PATCH", "DELETE"),
    "session": ("PATCH",),
    "session-network": ("PUT",),
    "templates": ("POST",),
    "template": ("DELETE",),
    "session-template": ("POST",),
    "template-builds": ("POST",),
    "session-reset": ("POST",),
    "session-snapshot": ("POST",),
    "snapshot": ("DELETE",),
    "admin-config": ("POST",),
    "admin-test": ("POST",),
    "admin-active": ("PUT",),
    "agent-sandbox-reset": ("POST",),
    "e2b-connect": ("POST",),
    "e2b-connect-2": ("POST",),
    "e2b-resume": ("POST",),
    "e2b-timeout": ("POST",),
    "e2b-network": ("PUT",),
    "e2b-pause": ("POST",),
    "e2b-snapshot-take": ("POST",),
    "e2b-snapshot": ("DELETE",),
    "e2b-fork": ("POST",),
    "e2b-secrets": ("POST",),
    "e2b-secret": ("POST", "DELETE"),
    "e2b-templates": ("POST",),
    "e2b-templates-2": ("POST",),
    "e2b-templates-3": ("POST",),
    "e2b-template": ("DELETE",),
    "e2b-template-build": ("POST",),
    "e2b-template-tags": ("POST", "DELETE"),
}
# For anybody: what tells nothing of a tenant, and links that are their own proof.
OPEN = frozenset(
    (
        "ledger-keys",
        "agent-sandbox-health",
        "signed-artifact",
        "workspace-link",
        "e2b-template-upload",
    )
)


def is_entered(request: Request) -> bool:
    """Whether the ledger enters what is asked for although nothing is run for it."""
    name = request.resolver_match.url_name if request.resolver_match else None
    return request.method in ENTERED.get(name or "", ())


def has_scopes(request: Request) -> bool:
    """Whether the request's key is for this. Raises PermissionDenied saying what it lacks."""
    name = request.resolver_match.url_name if request.resolver_match else None
    methods = NEEDS.get(name or "", {})
    method = "GET" if request.method == "HEAD" else str(request.method)
    if method not in methods:
        raise MethodNotAllowed(method)
    ensure_scopes(request, methods[method])
    return True


def ensure_scopes(request: Request, scopes: Sequence[Scope]) -> None:
    """Raise PermissionDenied saying what the request's key lacks of these."""
    key = cast("ApiKey", request.auth)
    missing = [scope.value for scope in scopes if not key.has_scope(scope)]
    if not missing:
        return
    needed = " and ".join(missing)
    name = request.resolver_match.url_name if request.resolver_match else None
    note_refusal(
        key,
        "scope",
        detail=f"{request.method} {name} needs {needed}",
        address=request.META.get("REMOTE_ADDR", ""),
    )
    raise PermissionDenied(f"The API key lacks the required scope: {needed}.")


# Under which the web server says what a request holds of it (sandbox_site.web.places).
PLACE = "cofferdam.place"
# And when it had read the headers, by `perf_counter`.
RECEIVED = "cofferdam.received"


class Place(Protocol):
    def know_key(self, tenant_slug: str) -> None:
        """The key in the request's headers is valid, and this tenant's."""

    def give_to(self, tenant_slug: str) -> None:
        """Count what the request holds for its tenant. Raises RateLimited beyond its share."""

    def begin_stream(self) -> None:
        """Count a stream for whose the request is. Raises RateLimited beyond their share."""


class ApiKeyAuthentication(BaseAuthentication):
    """`request.auth` is the ApiKey. There is no user: a key acts for its tenant."""

    def authenticate(self, request: Request) -> tuple[None, ApiKey]:
        if not (key_text := key_text_of(request)):
            raise NotAuthenticated("An API key is needed, in X-API-Key or as a Bearer token.")
        try:
            address = request.META.get("REMOTE_ADDR", "")
            key = keys.authenticate(key_text, address)
        except keys.Unauthenticated:
            raise AuthenticationFailed("The API key is not valid.") from None
        if place := place_of(request):
            place.know_key(key.tenant.slug)
        return None, key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="cofferdam"'


class HasApiKey(BasePermission):
    def has_permission(self, request: Request, view: APIView) -> bool:
        return isinstance(request.auth, ApiKey) and has_scopes(request)


def place_of(request: HttpRequest | Request) -> Place | None:
    """What the request holds of the web server; None where it is not served by it."""
    place: Place | None = request.META.get(PLACE)
    return place


def key_text_of(request: Request) -> str:
    return key_text_in(request.META)


def key_text_in(meta: Mapping[str, Any]) -> str:
    """The key in the headers, as WSGI names them; empty without one."""
    if key_text := meta.get("HTTP_X_API_KEY", ""):
        return str(key_text)
    scheme, _, token = meta.get("HTTP_AUTHORIZATION", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
