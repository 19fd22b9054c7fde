"""urllib3 connections to a `Receiver`."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NewConnectionError

from providers.remote.receiver import Receiver


class _Checked(HTTPConnection):
    """Connects to the addresses that were checked, one after the other."""

    def __init__(self, receiver: Receiver, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiver = receiver

    def _new_conn(self) -> socket.socket:
        name = self._dns_host
        try:
            addresses = self._receiver.addresses(name, self.port)
        except OSError as error:
            raise NewConnectionError(self, str(error)) from error
        try:
            for address in addresses[:-1]:
                try:
                    self._dns_host = address
                    return super()._new_conn()
                except NewConnectionError:
                    continue
            self._dns_host = addresses[-1]
            return super()._new_conn()
        finally:
            # The name is what the request and the certificate are about.
            self._dns_host = name


class _CheckedTls(_Checked, HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        try:
            self._receiver.check_key(self.sock)  # type: ignore[arg-type]
        except BaseException:
            self.close()
            raise


def check_connections(pool: HTTPConnectionPool, receiver: Receiver) -> None:
    """Have a pool, which has none yet, make checked connections only."""
    kind = _CheckedTls if isinstance(pool, HTTPSConnectionPool) else _Checked
    pool.ConnectionCls = partial(kind, receiver)  # type: ignore[assignment]
    if isinstance(pool, HTTPSConnectionPool):
        pool.conn_kw["ssl_context"] = receiver.tls
