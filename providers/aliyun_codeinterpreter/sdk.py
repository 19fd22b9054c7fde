"""Importing agentrun-sdk, which costs seconds and about 100 MB, and does more than one would want.

While it is imported it loads a `.env` file from around its own folder into our environment, and
gives its logger a handler of its own. Neither happens here, its answers are bounded, and it makes
connections to the receiver in force alone (`connections_to`), by no proxy and after no redirect.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import httpx
import requests
from agentrun.utils.exception import AgentRunError, HTTPError, ResourceNotExistError
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool

from providers.errors import (
    ConnectionFailed,
    CreationFailed,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.remote.bounded import BoundedClient
from providers.remote.checked_httpx import CheckedTransport
from providers.remote.checked_urllib3 import check_connections
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret, scrub

_QUIETLY = {"PYTHON_DOTENV_DISABLED": "true", "DISABLE_BREAKING_CHANGES_WARNING": "1"}

with patch.dict(os.environ, _QUIETLY):
    from agentrun.sandbox import Sandbox, TemplateInput, TemplateType
    from agentrun.sandbox.api import sandbox_data
    from agentrun.sandbox.api.code_interpreter_data import CodeInterpreterDataAPI
    from agentrun.sandbox.client import SandboxClient
    from agentrun.sandbox.model import ListSandboxesInput
    from agentrun.utils import data_api
    from agentrun.utils.config import Config
    from agentrun.utils.exception import ResourceNotExistError
    from darabonba.core import DaraCore

# Where none is in force, nothing is connected to.
_receiver: ContextVar[Receiver] = ContextVar("aliyun_receiver")


@contextmanager
def connections_to(receiver: Receiver) -> Iterator[None]:
    """Within it, and in this thread, the SDK's connections are checked to be to `receiver`."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def _client(**options: Any) -> BoundedClient:
    return BoundedClient(transport=CheckedTransport(_receiver.get()), **options)


class _CheckedAdapter(HTTPAdapter):
    """Of the control plane, whose client is made with requests."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        super().__init__()

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        pool = super().get_connection_with_tls_context(*arguments, **options)
        check_connections(cast("HTTPConnectionPool", pool), self._receiver)
        return pool

    def cert_verify(self, *arguments: Any, **options: Any) -> None:
        """Nothing: it would add authorities to those of the receiver."""


class _CheckedSession(requests.Session):
    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self.trust_env = False
        self.adapters.clear()
        self.mount("https://", _CheckedAdapter(receiver))

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        options |= {"proxies": {}, "verify": True, "allow_redirects": False}
        return super().send(request, **options)


_sessions: WeakKeyDictionary[Receiver, _CheckedSession] = WeakKeyDictionary()


def _session(*_: Any, **__: Any) -> _CheckedSession:
    receiver = _receiver.get()
    if receiver not in _sessions:
        _sessions[receiver] = _CheckedSession(receiver)
    return _sessions[receiver]


DaraCore._get_session = staticmethod(_session)
for _module in (data_api, sandbox_data):
    # The SDK reads answers whole, however long they are, and leaves no other way in.
    _module.httpx = SimpleNamespace(**{**vars(httpx), "Client": _client})

_logger = logging.getLogger("agentrun-logger")
_logger.handlers.clear()
# Below this it logs the headers of its requests.
_logger.setLevel(logging.WARNING)

__all__ = [
    "CodeInterpreterDataAPI",
    "Config",
    "ListSandboxesInput",
    "ResourceNotExistError",
    "Sandbox",
    "SandboxClient",
    "TemplateInput",
    "TemplateType",
    "connections_to",
]


def translate(
    error: BaseException,
    secrets: Sequence[Secret],
    *,
    creating: bool = False,
) -> SandboxError:
    """The SandboxError for what the SDK raised."""
    told = _translated(error, secrets, creating)
    told.answered = "status" if getattr(error, "status_code", 0) else ""
    return told


def _translated(error: BaseException, secrets: Sequence[Secret], creating: bool) -> SandboxError:
    said = scrub(_message(error), secrets)
    status = error.status_code if isinstance(error, HTTPError) else None
    if status in (401, 403):
        return ConnectionFailed(
            "Aliyun refuses the credentials. Check the AccessKey, the account id and the RAM "
            f"policy. {said}"
        )
    if status == 429:
        return RateLimited(f"Aliyun's rate limit is reached. {said}", retry_after=_delay(error))
    if status == 404 or isinstance(error, ResourceNotExistError):
        if creating:
            return CreationFailed(f"Aliyun does not know the template. {said}")
        return ProviderUnavailable(f"The Aliyun sandbox is gone. {said}")
    if status is not None and status >= 400:
        if creating and status != 503:
            return CreationFailed(f"Aliyun could not create a sandbox. {said}")
        return ProviderUnavailable(f"Aliyun is not available. {said}")
    # Uploads and downloads raise what httpx raised, all else wraps it.
    cause = error if isinstance(error, httpx.HTTPError) else error.__cause__
    if isinstance(cause, httpx.ConnectError):
        return ConnectionFailed(
            f"Aliyun cannot be reached. Check the network, region and endpoints. {said}"
        )
    if isinstance(cause, httpx.TimeoutException) or isinstance(error, TimeoutError):
        return ConnectionFailed(f"Aliyun does not answer in time. {said}")
    if status == 0 and cause is None and creating:
        return CreationFailed(f"Aliyun could not create a sandbox. {said}")
    return ConnectionFailed(f"Aliyun's answer is incomplete or not JSON. {said}")


def _message(error: BaseException) -> str:
    said = error.message if isinstance(error, AgentRunError) else str(error)
    request_id = getattr(error, "request_id", None)
    status = getattr(error, "status_code", 0)
    parts = [f"HTTP {status}." if status else "", said or type(error).__name__]
    return " ".join([*parts, f"(request {request_id})" if request_id else ""]).strip()


def _delay(error: BaseException) -> float | None:
    headers = httpx.Headers(getattr(error, "response_headers", None) or {})
    delay = headers.get("retry-after", "")
    return float(delay) if delay.isdecimal() and len(delay) < 6 else None
