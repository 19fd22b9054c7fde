"""The base of the E2B API's views, the credentials of its callers, and its health."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from executions.doors.agent_sandbox import health as agent_sandbox_health
from executions.doors.e2b import credentials
from executions.doors.e2b.connect import (
    NoSandbox,
    Refused,
    connect_error,
    control_error,
    ensure_user,
    error_body,
    invalid,
    messages_in,
    object_in,
    unimplemented,
)
from executions.doors.e2b.credentials import MOST_MESSAGE_BYTES, PORT_HEADER, PORTS, SANDBOX_HEADER
from executions.doors.native.authentication import ApiKeyAuthentication
from executions.doors.native.deferred import EventStream, stream
from executions.doors.native.frame import RunningView
from executions.doors.native.rendering import json_response
from executions.doors.native.sessions import LoggedView
from executions.kernel.coroutines import Coroutine
from executions.sessions.models import Session
from executions.sessions.queries import living_session_of
from executions.tenants import keys
from executions.tenants.models import ApiKey

Call = Callable[[Session, Mapping[str, Any]], Coroutine[dict[str, Any]]]


def ensure_basic_user(request: Request) -> None:
    """Of clients that name a user, in a header that is no credential here."""
    scheme, _, text = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() != "basic":
        return
    try:
        name = b64decode(text, validate=True).decode().partition(":")[0]
    except (binascii.Error, ValueError):
        raise invalid("Authorization: Must be base64.") from None
    ensure_user(name)


class ControlView(RunningView):
    """An endpoint of the API that makes and ends sandboxes."""

    schema = None

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return control_error

    def by(self) -> str:
        return f"key:{self.api_key.prefix}"


class SandboxAuthentication(BaseAuthentication):
    """The token of the sandbox that the request names, or an API key."""

    def authenticate(self, request: Request) -> tuple[None, ApiKey]:
        if not (token := credentials.token_in(request.META)):
            return ApiKeyAuthentication().authenticate(request)
        key = credentials.key_of_token(token, request.META.get(SANDBOX_HEADER, ""))
        if key is None:
            # As for a sandbox that is not there: nobody is told which there are.
            raise NoSandbox
        return None, valid(key, request)

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="cofferdam"'


def valid(key: ApiKey, request: Request) -> ApiKey:
    """Raises AuthenticationFailed."""
    try:
        keys.ensure_valid(key, request.META.get("REMOTE_ADDR", ""))
    except keys.Unauthenticated:
        raise AuthenticationFailed("The API key is not valid.") from None
    return key


class SandboxView(LoggedView):
    """An endpoint of one sandbox, which a header names."""

    schema = None
    authentication_classes = (SandboxAuthentication,)

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return connect_error

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if (port := str(request.META.get(PORT_HEADER, ""))) not in ("", *PORTS):
            # A program of the sandbox's own is meant, and not us.
            raise Refused(502, "unavailable", f"port {port[:8]!r} is not open")

    @property
    def sandbox_id(self) -> str:
        return str(self.request.META.get(SANDBOX_HEADER, ""))

    def session(self) -> Session:
        """Raises NoSandbox, NoSuchSession and Conflict, all of them the same to strangers."""
        session_id = credentials.session_id_of(self.sandbox_id)
        if session_id is None:
            raise NoSandbox
        self.of_session = living_session_of(self.api_key.tenant, session_id)
        return self.of_session

    def content(self) -> bytes:
        """The request's body. Raises Refused for one that is too long."""
        source = self.request.stream
        body = b"" if source is None else source.read(MOST_MESSAGE_BYTES + 1)
        if len(body) > MOST_MESSAGE_BYTES:
            raise invalid(f"Must be at most {MOST_MESSAGE_BYTES} bytes.")
        return bytes(body)

    def message(self) -> dict[str, Any]:
        """The one message of a call that is answered at once."""
        content = self.content()
        return object_in(content) if content else {}

    async def answer_call(
        self, service: str, method: str, calls: Mapping[str, Call]
    ) -> HttpResponse:
        """Answer a call at once, by one message for one."""
        call = calls.get(method)
        if call is None:
            raise unimplemented(f"{service}/{method[:64]}")
        ensure_basic_user(self.request)
        body = self.message()
        return json_response(await call(self.session(), body))

    def first_message(self) -> dict[str, Any]:
        """The one message of a call that is answered by a stream."""
        found = messages_in(self.content())
        first = next(found, None)
        if first is None or next(found, None) is not None:
            raise invalid("Send one message.")
        return first

    @property
    def seconds(self) -> float | None:
        """How long the caller gives the call; None for as long as it takes."""
        text = self.request.META.get("HTTP_CONNECT_TIMEOUT_MS", "")
        return (
            int(text) / 1000 if text.isascii() and text.isdigit() and 0 < len(text) < 11 else None
        )

    def stream_answer(
        self, events: EventStream, work: Callable[[], Coroutine[None]]
    ) -> HttpResponseBase:
        """Stream what the work tells of, as a stream of Connect; how it failed is its end."""

        async def run() -> HttpResponseBase:
            try:
                await work()
            except Exception as error:
                events.end({"error": error_body(error)})
            return events

        return stream(self.request, run, events)


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
