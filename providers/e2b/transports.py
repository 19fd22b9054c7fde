"""The E2B SDK over connections of ours, which are checked (providers/remote/receiver.py).

The SDK makes its connections in one Rust client for all accounts, which takes neither a resolver
nor a check of the server's key, and uses the environment's proxies. It tells connections apart by
the `proxy` of their account alone. So each receiver gets a name as if it were a proxy, and the two
functions that make connections hand out ours by that name. A call that went past them would look
for a proxy that cannot be there, and fail: the top-level domain `invalid` never exists (RFC 6761).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import httpx
from e2b.api import ProxyConfig, client_sync
from e2b.envd import client_sync as envd
from pyqwest import Headers, ReadError, SyncRequest, SyncResponse
from pyqwest._pyqwest import get_sync_timeout

from providers.remote.checked_httpx import CheckedTransport
from providers.remote.receiver import Receiver

_numbers = itertools.count(1)


class Route(httpx.BaseTransport):
    """The connections to one receiver, as long as somebody holds it. `name` is what the SDK gets.

    Closing a client that uses it closes nothing: others use it too.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.name = f"http://receiver-{next(_numbers)}.invalid"
        self._transport = CheckedTransport(receiver)
        _routes[self.name] = self

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._transport.handle_request(request)

    def execute_sync(self, request: SyncRequest) -> SyncResponse:
        """The same for the SDK's remote procedure calls, which use no httpx."""
        timeout = get_sync_timeout()
        seconds = None if timeout is None else timeout.total_seconds()
        sent = httpx.Request(
            request.method,
            request.url,
            headers=list(request.headers.items()),
            content=request.content,
            extensions={"timeout": httpx.Timeout(seconds).as_dict()},
        )
        try:
            response = self._transport.handle_request(sent)
        except httpx.TransportError as error:
            raise _builtin(error) from error
        headers = [(k, v) for k, v in response.headers.multi_items() if k != "transfer-encoding"]
        return SyncResponse(
            status=response.status_code, headers=Headers(headers), content=_content(response)
        )


_routes: WeakValueDictionary[str, Route] = WeakValueDictionary()


def _content(response: httpx.Response) -> Iterator[bytes]:
    stream = response.stream
    assert isinstance(stream, httpx.SyncByteStream)  # noqa: S101  its transport has no other
    try:
        yield from stream
    except httpx.TransportError as error:
        raise _builtin(error) from error
    finally:
        response.close()


def _builtin(error: httpx.TransportError) -> Exception:
    """What the Rust client raises in its stead."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectionError(str(error))
    if isinstance(error, httpx.TimeoutException):
        return TimeoutError(str(error))
    return ReadError(str(error))


def _ours_or(sdks_own: Callable[..., Any]) -> Callable[..., Any]:
    """The SDK's function for those who use it beside us, and our connections for our accounts."""

    @wraps(sdks_own)
    def connections(proxy: ProxyConfig | None, *arguments: Any, **options: Any) -> Any:
        ours = _routes.get(proxy.url) if proxy else None
        return sdks_own(proxy, *arguments, **options) if ours is None else ours

    return connections


client_sync.get_httpx_transport = _ours_or(client_sync.get_httpx_transport)
envd.get_pyqwest_transport = _ours_or(envd.get_pyqwest_transport)  # type: ignore[attr-defined]
