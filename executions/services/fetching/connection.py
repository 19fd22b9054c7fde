"""Connections to checked addresses whose every step costs a budget."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

from executions.services.fetching.budget import Budget
from executions.services.fetching.errors import FetchError, Reason
from providers.remote.checked_httpx import CheckedNetwork, Passed
from providers.remote.receiver import Receiver


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
