"""httpx connections to a `Receiver`, for SDKs that let themselves be given a transport."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from providers.remote.receiver import Receiver, WrongKey

_MOST_CONNECTIONS = 1000
_MOST_KEPT = 100
_KEPT_SECONDS = 60.0
# To connect, and for the handshake: together less than `STEP_SECONDS` of a trial.
_CONNECT_SECONDS = 4.0


class CheckedTransport(httpx.HTTPTransport):
    """httpx's own transport over connections that are checked, HTTP/1.1 as its default is."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(verify=receiver.tls, trust_env=False)
        self._receiver = receiver
        # The one part of it that httpx gives no parameter for.
        self._pool = httpcore.ConnectionPool(
            ssl_context=receiver.tls,
            max_connections=_MOST_CONNECTIONS,
            max_keepalive_connections=_MOST_KEPT,
            keepalive_expiry=_KEPT_SECONDS,
            network_backend=CheckedNetwork(receiver),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            self._receiver.rules.check_url(str(request.url.copy_with(query=None, fragment=None)))
        except ValueError as error:
            raise httpx.ConnectError(f"The address is refused: {error}", request=request) from None
        return super().handle_request(request)


class CheckedNetwork(httpcore.SyncBackend):
    """Connects to the addresses that were checked, one after the other."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def addresses(self, host: str, port: int) -> list[str]:
        """Where to connect to. Raises httpcore.ConnectError."""
        try:
            return self._receiver.addresses(host, port)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from None

    def connect_seconds(self, timeout: float | None) -> float:
        """How long the next address may take."""
        return min(timeout or _CONNECT_SECONDS, _CONNECT_SECONDS)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in self.addresses(host, port):
            seconds = self.connect_seconds(timeout)
            try:
                stream = super().connect_tcp(address, port, seconds, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _Stream(stream, self._receiver)
        raise failure


class Passed(httpcore.NetworkStream):
    """A connection that is used as it is. What of it is watched a subclass overrides."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return self._inner.start_tls(ssl_context, server_hostname, timeout)


class _Stream(Passed):
    """A connection whose TLS handshake ends with the check of the server's key."""

    def __init__(self, inner: httpcore.NetworkStream, receiver: Receiver) -> None:
        super().__init__(inner)
        self._receiver = receiver

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        timeout = min(timeout or _CONNECT_SECONDS, _CONNECT_SECONDS)
        stream = super().start_tls(ssl_context, server_hostname, timeout)
        try:
            self._receiver.check_key(stream.get_extra_info("ssl_object"))
        except WrongKey as error:
            stream.close()
            raise httpcore.ConnectError(str(error)) from None
        return stream
