"""Requests to servers of somebody else, within a time that no answer can stretch."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpcore
import httpx

from executions.kernel.addresses import Budget, FetchError, Network, Reason, port_of, too_slow
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


SECONDS = 15.0
_PAUSE_SECONDS = 10.0
# Of an answer's body; and of what may come with it.
MOST_BYTES = 16 * 1024
_RECEIVED_BYTES = 128 * 1024
_REFUSED = "the address is refused"
_NOT_CONNECTED = "it cannot be connected to, or its certificate is not accepted"
_PROBLEMS = {
    Reason.HOST: "the host was not found, or connections to it are not allowed",
    Reason.CONNECTION: _NOT_CONNECTED,
    Reason.CERTIFICATE: _NOT_CONNECTED,
    Reason.ANSWER: "the answer is cut short, or is not HTTP",
    Reason.TOO_SLOW: "there was no answer in time",
    Reason.TOO_LARGE: "the answer is too long",
}


@dataclass(frozen=True)
class Answer:
    """Why it was not taken, without the address, which may hold a secret; "" when it was."""

    problem: str
    body: bytes = b""


def post(url: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> str:
    """Why it was not taken; "" when it was, which the status says."""
    return post_json(url, body, headers, receiver, reads=False).problem


def post_json(
    url: str, body: bytes, headers: Mapping[str, str], receiver: Receiver, *, reads: bool = True
) -> Answer:
    """The same, with the beginning of the answer's body if it `reads` that."""
    try:
        target = httpx.URL(url)
        if not target.host:
            return Answer(_REFUSED)
        receiver.rules.check_url(str(target.copy_with(query=None, fragment=None)))
    except (ValueError, httpx.InvalidURL):
        return Answer(_REFUSED)
    budget = Budget(time.monotonic() + SECONDS, _PAUSE_SECONDS)
    try:
        with exchange(target, receiver, budget, "POST", headers, body) as answer:
            if not 200 <= answer.status < 300:
                return Answer(f"HTTP {answer.status}")
            budget.allow(_RECEIVED_BYTES)
            return Answer("", _beginning(answer) if reads else b"")
    except FetchError as error:
        return Answer(_PROBLEMS.get(error.reason, error.reason.value))


def _beginning(answer: httpcore.Response) -> bytes:
    found = b""
    for piece in answer.iter_stream():
        found += piece
        if len(found) >= MOST_BYTES:
            break
    return found[:MOST_BYTES]
