"""Importing agentrun-sdk, which costs seconds and about 100 MB, and does more than one would want.

While it is imported it loads a `.env` file from around its own folder into our environment, and
gives its logger a handler of its own. Neither happens here, its answers are bounded, and it makes
connections to the receiver in force alone (`connections_to`), by no proxy and after no redirect.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import httpx
import requests
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool

from providers.remote.bounded import BoundedClient
from providers.remote.checked_httpx import CheckedTransport
from providers.remote.checked_urllib3 import check_connections
from providers.remote.receiver import Receiver

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
