"""The Model Context Protocol over HTTP: the endpoint and its session ids."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.crypto import constant_time_compare, salted_hmac
from rest_framework.exceptions import APIException, PermissionDenied
from rest_framework.request import Request

from executions.doors.native.authentication import RECEIVED
from executions.doors.native.deferred import answer, stream
from executions.doors.native.frame import RunningView, ensure_length, render_error
from executions.doors.native.rendering import json_response
from executions.kernel.bodies import (
    BODY,
    CALL,
    TINY,
    BodyTooLarge,
    ensure_text_size,
    reading,
    value_of,
)
from executions.runs.models import Execution
from executions.runs.requests import Caller
from executions.runs.results import executions_of
from executions.runs.service import HasEnded, cancel
from executions.tenants.models import ApiKey, Scope
from providers.errors import InvalidConfiguration
from providers.json_reading import Read

_FORM = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)
_LONGEST_ID = 80


def new_session_id(key: ApiKey) -> str:
    nonce = secrets.token_hex(16)
    return f"{nonce}.{_mac(nonce, key)}"


def nonce_of(session_id: str, key: ApiKey) -> str:
    """What its requests have in common; empty for an id that is not this key's."""
    parts = _FORM.fullmatch(session_id)
    if parts is None or not constant_time_compare(_mac(parts[1], key), parts[2]):
        return ""
    return parts[1]


def request_id_of(nonce: str, message_id: object) -> str:
    """How the record of a run names the request that asked for it."""
    said = f"{type(message_id).__name__[0]}{message_id}"
    if len(said) > _LONGEST_ID or not said.isascii() or not said.isprintable():
        said = hashlib.sha256(said.encode("utf-8", "replace")).hexdigest()
    return f"mcp:{nonce}:{said}"


def _mac(nonce: str, key: ApiKey) -> str:
    said = f"{nonce}:{key.pk}:{key.key_hash}"
    return salted_hmac("cofferdam mcp session", said, algorithm="sha256").hexdigest()


MOST_MESSAGE_BYTES = 8 * 1024 * 1024
SESSION_HEADER = "Mcp-Session-Id"
_WRITING = (Scope.EXECUTE, Scope.FILES, Scope.SESSIONS)
_PARSE_ERROR, _INVALID_REQUEST, _REFUSED = -32700, -32600, -32001


class NotOurSession(APIException):
    status_code = 404
    default_detail = "Unknown MCP session. Start with initialize."


class BadMessage(InvalidConfiguration):
    """What is no JSON."""


class NoMessage(APIException):
    status_code = 400
    default_detail = "Send one JSON-RPC message; its id must be a string or a whole number."


class McpView(RunningView):
    schema = None
    http_method_names = ["post"]

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return _as_message

    def perform_authentication(self, request: Request) -> None:
        # Before any key is looked at: a page of a browser has no business here.
        _refuse_foreign_origin(request)
        super().perform_authentication(request)

    def post(self, request: Request) -> HttpResponseBase:
        content = _content_of(request)
        message = _message_in(request, content, self.api_key)
        nonce = self._nonce(request)
        if nonce and message.get("method") == "notifications/cancelled":
            return answer(request, self.handle_errors(self._cancel(nonce, message)))
        return self._exchange(request, content, message, nonce)

    def _nonce(self, request: Request) -> str:
        if not (given := request.headers.get(SESSION_HEADER, "")):
            return ""
        if not (nonce := nonce_of(given, self.api_key)):
            raise NotOurSession
        return nonce

    def _exchange(
        self, request: Request, content: bytes, message: Mapping[str, Any], nonce: str
    ) -> HttpResponseBase:

        from executions.doors.mcp.server import Exchange, ensure_started

        request_id = self.request_id
        if nonce and "id" in message:
            request_id = request_id_of(nonce, message["id"])
        caller = Caller.of_key(
            self.api_key,
            request_id=request_id,
            client_address=request.META.get("REMOTE_ADDR", "")[:64],
            received=request.META.get(RECEIVED),
        )
        exchange = Exchange(caller, _scope_of(request), content)
        if message.get("method") == "initialize":
            exchange.answer[SESSION_HEADER] = new_session_id(self.api_key)
        server = ensure_started(MOST_MESSAGE_BYTES)
        return stream(
            request, lambda: self.handle_errors(exchange.carry_out(*server)), exchange.answer
        )

    async def _cancel(self, nonce: str, message: Mapping[str, Any]) -> HttpResponse:
        """End what a request of the same MCP session runs, in whichever process it does."""
        params = message.get("params")
        asked = params.get("requestId") if isinstance(params, dict) else None
        if isinstance(asked, int | str):
            mine = executions_of(self.api_key.tenant).defer(None).defer("pending")
            status = (Execution.Status.RUNNING, Execution.Status.QUEUED)
            found = mine.filter(
                request_id=request_id_of(nonce, asked),
                api_key=self.api_key,
                background=False,
                tenant_slug=self.api_key.tenant.slug,
                finished_at=None,
                status__in=status,
            ).first()
            if found is not None:
                with contextlib.suppress(HasEnded):
                    await cancel(found, f"key:{self.api_key.prefix}")
        return HttpResponse(status=202)


def _content_of(request: Request) -> bytes:
    ensure_length(request.META, MOST_MESSAGE_BYTES)
    source = request.stream
    return b"" if source is None else bytes(source.read(MOST_MESSAGE_BYTES))


def _message_in(request: Request, content: bytes, key: ApiKey) -> Mapping[str, Any]:
    """The message. What else it has to be, the SDK says.

    Raises BadMessage, NoMessage, and BodyTooLarge: only a call of a tool is large, and only by a
    key that does more than to read.
    """
    bounds = CALL if any(map(key.has_scope, _WRITING)) else TINY
    ensure_text_size(content, bounds)
    read: Future[Read] | None = request.META.get(BODY)
    if read is None:
        read = reading(content, bounds)
    try:
        message = value_of(read, bounds)
        if not isinstance(message, dict):
            raise NoMessage
        if message.get("method") != "tools/call":
            ensure_text_size(content, TINY)
            value_of(read, TINY)
    except (BodyTooLarge, NoMessage):
        raise
    except InvalidConfiguration as error:
        raise BadMessage(error.message, field="body") from None
    if "id" in message and (
        not isinstance(message["id"], int | str) or isinstance(message["id"], bool)
    ):
        raise NoMessage
    return message


def _scope_of(request: Request) -> dict[str, Any]:
    """The request as ASGI has it."""
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in request.headers.items()
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }


def _refuse_foreign_origin(request: Request) -> None:
    """A page that a browser was lured to may not call, whatever name it has made this host take."""
    host = request.get_host()
    if (origin := request.headers.get("Origin")) is None:
        return
    if origin in settings.CSRF_TRUSTED_ORIGINS or origin == f"{request.scheme}://{host}":
        return
    raise PermissionDenied("Calls from web pages of this origin are not allowed.")


def _as_message(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """An error of the product, as an error of JSON-RPC."""
    known = render_error(exc, context)
    said = json.loads(known.content)["error"]
    code = _PARSE_ERROR if isinstance(exc, BadMessage) else _REFUSED
    if isinstance(exc, NoMessage):
        code = _INVALID_REQUEST
    error = {"code": code, "message": said["message"], "data": said}
    response = json_response({"jsonrpc": "2.0", "id": None, "error": error}, known.status_code)
    for name in ("WWW-Authenticate", "Allow", "Retry-After"):
        if name in known:
            response[name] = known[name]
    return response
