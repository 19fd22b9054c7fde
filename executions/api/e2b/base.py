"""What the endpoints of this door share: whose calls they are, and in which words they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from executions.api.authentication import ApiKeyAuthentication
from executions.api.base import RunningView
from executions.api.e2b import tokens
from executions.api.e2b.credentials import MOST_MESSAGE_BYTES, SANDBOX_HEADER
from executions.api.e2b.envelopes import STREAM_TYPE, end, messages_in, object_in
from executions.api.e2b.errors import (
    NoSandbox,
    connect_error,
    control_error,
    invalid,
    told,
)
from executions.api.later import stream
from executions.api.streams import EventStream
from executions.models import ApiKey, Session
from executions.services import keys
from executions.services.live import Entry
from executions.services.sessions.finding import living_session_of
from executions.services.waiting import Waits


class Nothing:
    """Where there is nothing to be told of but the end."""

    def read(self, after: int, most_bytes: int) -> tuple[Sequence[Entry], bool]:
        return (), True

    def changed(self, after: int) -> Future[None]:
        return Future()


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
        if not (token := tokens.token_in(request.META)):
            return ApiKeyAuthentication().authenticate(request)
        key = tokens.key_of_token(token, request.META.get(SANDBOX_HEADER, ""))
        if key is None:
            # As for a sandbox that is not there: nobody is told which there are.
            raise NoSandbox
        return None, valid(key, request)

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="cofferdam"'


def valid(key: ApiKey, request: Request) -> ApiKey:
    """Raises AuthenticationFailed."""
    try:
        keys.require_valid(key, request.META.get("REMOTE_ADDR", ""))
    except keys.Unauthenticated:
        raise AuthenticationFailed("The API key is not valid.") from None
    return key


class SandboxView(RunningView):
    """An endpoint of one sandbox, which a header names."""

    schema = None
    authentication_classes = (SandboxAuthentication,)

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return connect_error

    @property
    def sandbox_id(self) -> str:
        return str(self.request.META.get(SANDBOX_HEADER, ""))

    def session(self) -> Session:
        """Raises NoSandbox, NoSuchSession and Conflict, all of them the same to strangers."""
        session_id = tokens.session_id_of(self.sandbox_id)
        if session_id is None:
            raise NoSandbox
        return living_session_of(self.api_key.tenant, session_id)

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

    def first_message(self) -> dict[str, Any]:
        """The one message of a call that is answered by a stream."""
        found = messages_in(self.content())
        if len(found) != 1:
            raise invalid("Send one message.")
        return found[0]

    @property
    def seconds(self) -> float | None:
        """How long the caller gives the call; None for as long as it takes."""
        text = self.request.META.get("HTTP_CONNECT_TIMEOUT_MS", "")
        return (
            int(text) / 1000 if text.isascii() and text.isdigit() and 0 < len(text) < 11 else None
        )

    def streamed(self, events: EventStream, work: Callable[[], Waits[None]]) -> HttpResponseBase:
        """What the work tells of, as a stream of Connect; how it failed, as its end."""

        def carried_out() -> Waits[HttpResponseBase]:
            failed: dict[str, str] | None = None
            try:
                yield from work()
            except Exception as error:
                failed = told(error)
            if not events.has_begun:
                events.begin(Nothing())
            if failed is not None:
                events.end({"error": failed})
            return HttpResponse(end(failed), content_type=STREAM_TYPE)

        return stream(self.request, carried_out(), events)
