"""One request to a server of somebody else's, and what it answers."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpcore
import httpx

from executions.services.fetching.budget import Budget, too_slow
from executions.services.fetching.connection import Network
from executions.services.fetching.errors import FetchError, Reason
from executions.services.fetching.urls import port_of
from providers.remote.receiver import Receiver

# Of all that comes before a body: lines of the status 1xx and headers.
HEAD_BYTES = 256 * 1024

_NONE: Mapping[str, str] = {}


@contextmanager
def exchange(
    url: httpx.URL,
    receiver: Receiver,
    budget: Budget,
    method: str = "GET",
    headers: Mapping[str, str] = _NONE,
    content: bytes | None = None,
) -> Iterator[httpcore.Response]:
    """A server's answer, its body not read, on a connection of its own; no redirect is followed.

    Raises FetchError.
    """
    budget.allow(HEAD_BYTES)
    budget.seconds()
    target = httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=port_of(url), target=url.raw_path
    )
    sent = [
        (b"Host", url.netloc),
        (b"User-Agent", b"Cofferdam"),
        (b"Accept", b"*/*"),
        (b"Accept-Encoding", b"identity"),
        (b"Connection", b"close"),
        *((name.encode(), value.encode()) for name, value in headers.items()),
    ]
    if content is not None:
        sent.append((b"Content-Length", str(len(content)).encode()))
    pool = httpcore.ConnectionPool(
        ssl_context=receiver.tls if url.scheme == "https" else None,
        max_connections=1,
        max_keepalive_connections=0,
        network_backend=Network(receiver, budget),
    )
    try:
        with pool, pool.stream(method, target, headers=sent, content=content) as answer:
            yield answer
    except httpcore.TimeoutException:
        raise too_slow() from None
    except httpcore.ConnectError as error:
        raise _not_connected(error) from None
    except (httpcore.ProtocolError, httpcore.NetworkError):
        text = "The server's answer is cut short, or is not HTTP, or has too long headers."
        raise FetchError(Reason.ANSWER, text) from None


def _not_connected(error: httpcore.ConnectError) -> FetchError:
    cause = error.args[0] if error.args else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        text = f"The server's certificate is not accepted: {cause.verify_message}."
        return FetchError(Reason.CERTIFICATE, text)
    if isinstance(cause, ssl.SSLError):
        return FetchError(Reason.CONNECTION, "The server violates the TLS protocol.")
    return FetchError(Reason.CONNECTION, "The server cannot be connected to.")
