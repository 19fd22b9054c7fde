"""Who may use `/api/admin`: a signed-in administrator, or a key of scope `admin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from executions.api.authentication import key_text_of
from executions.api.scopes import has_scopes
from executions.tenants import keys
from executions.tenants.models import ApiKey, Scope

if TYPE_CHECKING:
    from rest_framework.views import APIView

VIEW = "providers.view_providerconfig"
CHANGE = "providers.change_providerconfig"
ACTIVATE = "providers.activate_providerconfig"
TEST = "providers.test_providerconfig"


class AdminAuthentication(SessionAuthentication):
    """A key where one is sent, else the session, whose unsafe requests need the CSRF token.

    Whatever is missing or wrong is answered with 403, so that the answer tells a stranger nothing.
    """

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        if key_text := key_text_of(request):
            try:
                address = request.META.get("REMOTE_ADDR", "")
                return None, keys.authenticate(key_text, address)
            except keys.Unauthenticated:
                return None
        return super().authenticate(request)


class MayAdministrate(BasePermission):
    """A key needs the scope, a user the permission that the view names for the method."""

    message = "This needs an administrator, or an API key with the scope admin."

    def has_permission(self, request: Request, view: APIView) -> bool:
        if isinstance(request.auth, ApiKey):
            return has_scopes(request)
        return may(request, view.needs.get(request.method, CHANGE))  # type: ignore[attr-defined]


def may(request: Request, permission: str) -> bool:
    """Whether whoever sent the request has a permission. A key of scope admin has them all."""
    if isinstance(request.auth, ApiKey):
        return request.auth.has_scope(Scope.ADMIN)
    user = request.user
    return bool(user and user.is_active and user.is_staff and user.has_perm(permission))


def author_of(request: Request) -> str:
    """Who acts, for the record: `user:NAME` or `key:PREFIX`."""
    if isinstance(request.auth, ApiKey):
        return f"key:{request.auth.prefix}"
    return f"user:{request.user.get_username()}"
