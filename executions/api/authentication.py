"""An API key in `X-API-Key` or `Authorization: Bearer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from executions.api.scopes import has_scopes
from executions.tenants import keys
from executions.tenants.models import ApiKey

if TYPE_CHECKING:
    # The views import their default authentication, which the settings name, while they load.
    from rest_framework.views import APIView


# Under which the web server says what a request holds of it (sandbox_site.web.places).
PLACE = "cofferdam.place"


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
