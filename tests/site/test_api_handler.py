"""A program is answered the same, with or without the middleware that is for people."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.http import HttpResponse
from django.http.response import HttpResponseBase

from executions.runs.models import Execution
from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from sandbox_site.wsgi import ApiHandler
from tests.conftest import Caller
from tests.support.asgi import scope
from tests.support.running import run

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def one_connection() -> Iterator[None]:
    """The connection of the test stays open behind a request."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


def environ_of(method: str, path: str, **values: str) -> dict[str, Any]:
    body = values.pop("body", "").encode()
    path, _, query = path.partition("?")
    return {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "SERVER_PROTOCOL": "HTTP/1.1",
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "REMOTE_ADDR": "192.0.2.1",
        "HTTP_HOST": "testserver",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        **values,
    }


def answered(handler: WSGIHandler, environ: dict[str, Any]) -> tuple[int, dict[str, Any], Any]:
    response: HttpResponseBase = handler(environ, lambda *_: None)
    content = b"" if response.streaming else getattr(response, "content", b"")
    headers: dict[str, Any] = dict(response.items())
    headers.pop("X-Request-ID", None)
    # Of a view that asks for the session of who has no key: without a cookie there is none.
    if headers.get("Vary") == "Cookie":
        del headers["Vary"]
    # The middleware has no order for them.
    policy = "Content-Security-Policy"
    headers[policy] = sorted(headers.get(policy, "").split("; "))
    assert not response.cookies
    response.close()
    text = content.decode()
    return response.status_code, headers, json.loads(text) if text.startswith("{") else text


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [
        ("GET", "/api/v1/executions", {}),
        ("HEAD", "/api/v1/executions", {}),
        ("GET", "/api/v1/executions?limit=x", {}),
        ("PUT", "/api/v1/executions", {}),
        ("GET", "/api/v1/nothing", {}),
        ("GET", "/api/v1/executions/{id}", {}),
        ("GET", "/api/v1/usage", {"HTTP_X_API_KEY": "wrong"}),
        ("GET", "/api/v1/usage", {"HTTP_X_API_KEY": ""}),
        ("GET", "/api/v1/executions/{id}/events", {"HTTP_X_API_KEY": ""}),
        ("POST", "/api/v1/executions", {"body": "{"}),
        ("POST", "/v1/execute", {"body": "{}"}),
        ("GET", "/sandboxes", {}),
        ("GET", "/api/v1/usage", {"HTTP_HOST": "evil.test"}),
    ],
)
def test_it_is_answered_as_by_the_handler_of_all(
    scripted: object, alice: Caller, settings: Any, method: str, path: str, more: dict[str, str]
) -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    execution = run(alice, "pass").json()["id"]
    path = path.format(id=execution)
    both = [
        answered(handler, environ_of(method, path, **{"HTTP_X_API_KEY": alice.key_text} | more))
        for handler in (WSGIHandler(), ApiHandler())
    ]
    assert both[0] == both[1]


def test_a_run_is_answered_with_all_security_headers(scripted: object, alice: Caller) -> None:
    key = {"HTTP_X_API_KEY": alice.key_text, "body": json.dumps({"code": "pass"})}
    status, headers, body = answered(ApiHandler(), environ_of("POST", "/api/v1/executions", **key))
    assert (status, body["status"]) == (200, "succeeded")
    for name in ("X-Frame-Options", "X-Content-Type-Options", "Content-Security-Policy"):
        assert headers[name]
    assert Execution.objects.get().client_address == "192.0.2.1"


def test_the_list_of_the_other_handler_is_left_as_it_is() -> None:
    before = list(settings.MIDDLEWARE)
    handler = ApiHandler()
    assert before == settings.MIDDLEWARE
    assert "axes.middleware.AxesMiddleware" in before
    assert handler._middleware_chain is not None
    assert set(settings.API_MIDDLEWARE) < set(before)
    assert [each for each in before if each in settings.API_MIDDLEWARE] == settings.API_MIDDLEWARE


def test_who_has_a_cookie_passes_everything() -> None:
    """Also to the API: pages of the admin call it with their session."""
    used: list[str] = []

    def handler(name: str) -> WSGIHandler:
        def handle(environ: Any, start: Any) -> HttpResponse:
            used.append(name)
            return HttpResponse(name)

        return cast("WSGIHandler", handle)

    limits = Limits(body_bytes=1000, spool_bytes=1000, body_seconds=10)
    bridge = Bridge(handler("all"), 4, limits, handler("api"))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        return None

    cookie = {"headers": [(b"cookie", b"sessionid=x")]}
    for path, more in (
        ("/api/v1/usage", {}),
        ("/api/v1/usage", cookie),
        ("/admin/", {}),
        ("/api/admin/sandbox/config", {}),
        ("/mcp", {}),
    ):
        asyncio.run(bridge(scope(path, **more), receive, send))
    assert used == ["api", "all", "all", "all", "api"]
