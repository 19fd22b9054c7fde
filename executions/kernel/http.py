"""Requests to servers of somebody else: to which addresses, and what each step may cost."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urljoin

import httpcore
import httpx
from django.conf import settings

from providers.addresses import (
    Address,
    Allowed,
    Rules,
    is_host,
    is_metadata,
    is_public,
    literal,
    unwrapped,
)
from providers.remote.bounded import CancelToken
from providers.remote.checked_httpx import CheckedNetwork, Passed
from providers.remote.receiver import Receiver


class Reason(StrEnum):
    URL = "url"  # it cannot be read, or asks for what is not done
    HOST = "host"  # not found, or not one to connect to
    CONNECTION = "connection"
    CERTIFICATE = "certificate"
    REDIRECTS = "redirects"
    ANSWER = "answer"  # another status, no HTTP, cut short, encoded
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    NO_ROOM = "no_room"  # here


class FetchError(Exception):
    """`text` is for whoever gave the URL. It tells nothing of this network, and no URL."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


@dataclass(frozen=True)
class Bounds:
    """Of a batch. A caller lowers `file_bytes` and `batch_bytes` to what its tenant has left."""

    urls: int = 200
    file_bytes: int = 50 * 1024 * 1024
    batch_bytes: int = 1024 * 1024 * 1024
    # Without a byte; for a file, from its first redirect on; for the batch, the caller's own time
    # with the files included.
    pause_seconds: float = 10.0
    file_seconds: float = 120.0
    batch_seconds: float = 300.0
    # Fetched at once, and files that lie here because their turn has not come.
    threads: int = 4
    ahead: int = 8


class Budget:
    """Of one file, for the thread that fetches it. `cut` ends it from another."""

    def __init__(self, ends: float, pause_seconds: float) -> None:
        self.ends = ends
        self.cut = CancelToken()
        self._pause_seconds = pause_seconds
        self._received_left = 0

    def seconds(self) -> float:
        """How long the next step may wait. Raises FetchError when the time is over."""
        left = self.ends - time.monotonic()
        if left <= 0 or self.cut.is_cut:
            raise too_slow()
        return min(left, self._pause_seconds)

    def allow(self, size: int) -> None:
        """So many bytes may come from now on, whatever they are."""
        self._received_left = size

    def receive(self, size: int) -> None:
        """Raises FetchError when more has come than was allowed."""
        self._received_left -= size
        if self._received_left < 0:
            raise FetchError(
                Reason.TOO_LARGE, "The server sends much more than headers and file can need."
            )


# A piece costs processor time here, whatever its size. So many of a batch may be small, since some
# servers send each line of a table by itself; the others have this size each.
SMALL_PIECES = 200_000
PIECE_BYTES = 1024


class Room:
    """Bytes that all files of a batch share. What failed has been transferred too, and counts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left = size
        self._small_left = SMALL_PIECES
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """For a piece that has come. Raises FetchError when room or small pieces are used up."""
        with self._lock:
            self._left -= size
            self._small_left -= size < PIECE_BYTES
            if self._left < 0:
                raise self._used_up()
            if self._small_left < 0:
                raise FetchError(Reason.TOO_SLOW, "The files are sent in too many tiny pieces.")

    def check(self, size: int) -> None:
        """Raises FetchError when there is less left than a file says it needs."""
        with self._lock:
            if size > self._left:
                raise self._used_up()

    def _used_up(self) -> FetchError:
        text = f"All files of one request together may have {self._size} bytes."
        return FetchError(Reason.TOO_LARGE, text)


def too_slow() -> FetchError:
    return FetchError(Reason.TOO_SLOW, "The server did not send the file in time.")


# A name may have any number of addresses, and each that does not answer takes seconds.
MOST_ADDRESSES = 4

# The ports that browsers connect to for no page (the Fetch standard's bad ports): behind each is
# another protocol, whose server could be made to read a request as its own commands.
BAD_PORTS = frozenset(
    {
        *(0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95),
        *(101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179),
        *(389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601),
        *(636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000),
        *(6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080),
    }
)

_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)


@dataclass(frozen=True)
class Destinations(Rules):
    """Rules for URLs that tenants give; `private` lets the private networks in."""

    private: bool = False

    def is_allowed(self, name: str, address: Address, port: int) -> bool:
        address = unwrapped(address)
        if is_metadata(address):
            return False
        if any(entry.covers(name, address, port) for entry in self.allowed):
            return True
        if _is_own(address):
            return False
        return is_public(address) or (
            self.private and any(address in network for network in _PRIVATE)
        )

    def resolve(self, host: str, port: int) -> list[str]:
        return super().resolve(host, port)[:MOST_ADDRESSES]


def destinations() -> Destinations:
    """Those of the deployment."""
    allowed = tuple(map(Allowed.parse, settings.URL_ALLOWED_NETWORKS))
    setting = "URL_ALLOWED_NETWORKS or ALLOW_PRIVATE_URLS"
    return Destinations(allowed, (), setting, settings.ALLOW_PRIVATE_URLS)


def _is_own(address: Address) -> bool:
    """Whether an address is this machine's, be it a public one: firewalls let it ask itself.

    The kernel sends from the very address that it sends to exactly then.
    """
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: a datagram's socket only looks the route up.
            probe.connect((str(address), 443))
            own = str(probe.getsockname()[0])
    except OSError:
        # No route, so no connection either.
        return False
    return ipaddress.ip_address(own) == address


MOST_CHARACTERS = 8192

_PORTS = {"http": 80, "https": 443}


def read_url(text: str, to: Rules) -> httpx.URL:
    """The URL that `text` is, without fragment, its host in ASCII. Raises FetchError.

    Names are not resolved. An address that the host spells out is checked already.
    """
    text = text.strip()
    if len(text) > MOST_CHARACTERS:
        raise _refused(f"The URL has more than {MOST_CHARACTERS} characters.")
    if "\\" in text or not text.isprintable():
        # Which readers of URLs understand in several ways.
        raise _refused("The URL has a backslash or a character that cannot be seen.")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError):
        raise _refused("This is not a URL.") from None
    if url.scheme not in _PORTS:
        raise _refused("The URL must begin with https:// or http://.")
    if url.userinfo or "@" in re.split("[/?#]", text.partition("//")[2])[0]:
        raise _refused("The URL has a user or password. They are not supported.")
    host = url.raw_host.decode("ascii")
    if not is_host(host):
        raise _refused("The URL names no host.")
    if port_of(url) in BAD_PORTS or not 0 < port_of(url) < 65536:
        raise _refused("Files may not be fetched from the URL's port.")
    address = literal(host)
    if address is not None and not to.is_allowed(host, address, port_of(url)):
        raise FetchError(Reason.HOST, "Files may not be fetched from the URL's address.")
    return url.copy_with(fragment=None)


def redirected(url: httpx.URL, location: str, to: Rules) -> httpx.URL:
    """Where a redirect from `url` leads, checked as any URL is. Raises FetchError."""
    try:
        joined = urljoin(str(url), location)
    except ValueError:
        raise FetchError(Reason.REDIRECTS, "The server redirects to an invalid URL.") from None
    try:
        new = read_url(joined, to)
    except FetchError as error:
        text = f"The server redirects elsewhere, which is refused: {error.text}"
        raise FetchError(error.reason, text) from None
    if url.scheme == "https" and new.scheme == "http":
        raise FetchError(Reason.REDIRECTS, "The server redirects from https to http.")
    return new


def port_of(url: httpx.URL) -> int:
    return _PORTS[url.scheme] if url.port is None else url.port


def without_secrets(url: httpx.URL) -> str:
    """A URL to be shown and kept: signatures and tokens are in the query."""
    return str(url.copy_with(query=None))


def _refused(text: str) -> FetchError:
    return FetchError(Reason.URL, text)


class Network(CheckedNetwork):
    """For one file. Raises FetchError where the budget or the rules say no."""

    def __init__(self, receiver: Receiver, budget: Budget) -> None:
        super().__init__(receiver)
        self._budget = budget

    def addresses(self, host: str, port: int) -> list[str]:
        try:
            return super().addresses(host, port)
        except httpcore.ConnectError:
            # One text for both: which names this network knows is not for everybody to find out.
            raise FetchError(
                Reason.HOST, "The host was not found, or files may not be fetched from it."
            ) from None

    def connect_seconds(self, timeout: float | None) -> float:
        return super().connect_seconds(self._budget.seconds())

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        stream = super().connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._budget)


class _Stream(Passed):
    """The timeouts of httpcore are for each read; here a byte now and then does not renew them."""

    def __init__(self, inner: httpcore.NetworkStream, budget: Budget) -> None:
        super().__init__(inner)
        self._budget = budget
        budget.cut.hold(inner.get_extra_info("socket"))

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        received = super().read(max_bytes, self._budget.seconds())
        self._budget.receive(len(received))
        return received

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        super().write(buffer, self._budget.seconds())

    def close(self) -> None:
        self._budget.cut.hold(None)
        super().close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        stream = super().start_tls(ssl_context, server_hostname, self._budget.seconds())
        return _Stream(stream, self._budget)


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
    """What became of a request. `problem` says why it failed, without the address, which may hold a
    secret; it is "" when it did not. `status` is 0 where none has come."""

    problem: str
    body: bytes = field(default=b"", repr=False)
    status: int = 0


def post(url: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> str:
    """Why it was not taken; "" when it was, which the status says."""
    return post_json(url, body, headers, receiver, reads=False).problem


def post_json(
    url: str, body: bytes, headers: Mapping[str, str], receiver: Receiver, *, reads: bool = True
) -> Answer:
    """The same, with the beginning of the answer's body if it `reads` that."""

    def read(answer: httpcore.Response, budget: Budget) -> Answer:
        if not 200 <= answer.status < 300:
            return Answer(f"HTTP {answer.status}", status=answer.status)
        budget.allow(_RECEIVED_BYTES)
        return Answer("", _beginning(answer, MOST_BYTES) if reads else b"", answer.status)

    return _asked(url, "POST", headers, body, receiver, SECONDS, read)


def get(
    url: str,
    headers: Mapping[str, str],
    receiver: Receiver,
    *,
    most_bytes: int,
    seconds: float = SECONDS,
) -> Answer:
    """Return the whole body whatever the status. More than `most_bytes` of it is a problem."""

    def read(answer: httpcore.Response, budget: Budget) -> Answer:
        # Frames of small pieces are larger than what is in them.
        budget.allow(most_bytes + _RECEIVED_BYTES)
        body = _beginning(answer, most_bytes + 1)
        if len(body) > most_bytes:
            return Answer(_PROBLEMS[Reason.TOO_LARGE], status=answer.status)
        return Answer("", body, answer.status)

    return _asked(url, "GET", headers, None, receiver, seconds, read)


def _asked(
    url: str,
    method: str,
    headers: Mapping[str, str],
    content: bytes | None,
    receiver: Receiver,
    seconds: float,
    read: Callable[[httpcore.Response, Budget], Answer],
) -> Answer:
    try:
        target = httpx.URL(url)
        if not target.host:
            return Answer(_REFUSED)
        receiver.rules.check_url(str(target.copy_with(query=None, fragment=None)))
    except (ValueError, httpx.InvalidURL):
        return Answer(_REFUSED)
    budget = Budget(time.monotonic() + seconds, min(seconds, _PAUSE_SECONDS))
    try:
        with exchange(target, receiver, budget, method, headers, content) as answer:
            return read(answer, budget)
    except FetchError as error:
        return Answer(_PROBLEMS.get(error.reason, error.reason.value))


def _beginning(answer: httpcore.Response, most: int) -> bytes:
    found = bytearray()
    for piece in answer.iter_stream():
        found += piece
        if len(found) >= most:
            break
    return bytes(found[:most])
