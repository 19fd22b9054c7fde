"""HTTP answers that cannot grow beyond all bounds.

User code shares a machine with the server that answers for it, and may answer in its stead.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx

MAX_RESPONSE_BYTES = 64 * 1024 * 1024


class ResponseTooLarge(httpx.TransportError):
    """An answer was longer than any honest one, or compressed, so that it might become so."""


class BoundedClient(httpx.Client):
    """Breaks an answer off after MAX_RESPONSE_BYTES, and asks for uncompressed ones."""

    def __init__(self, *, cut: CancelToken | None = None, **options: Any) -> None:
        hooks = [_bound] if cut is None else [cut.watch, _bound]
        super().__init__(**options, event_hooks={"response": hooks})
        self.headers["Accept-Encoding"] = "identity"


def _bound(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        response.close()
        raise ResponseTooLarge("a compressed answer was not requested")
    stream = response.stream
    if isinstance(stream, httpx.SyncByteStream):
        response.stream = _Bounded(stream)


class _Bounded(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[bytes]:
        left = MAX_RESPONSE_BYTES
        for chunk in self._inner:
            left -= len(chunk)
            if left < 0:
                raise ResponseTooLarge(f"more than {MAX_RESPONSE_BYTES} bytes")
            yield chunk

    def close(self) -> None:
        self._inner.close()


class CancelToken:
    """Breaks off, from another thread, the answer that a call is waiting for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def watch(self, response: httpx.Response) -> None:
        """The answer has begun: from now on it can be broken off."""
        stream = response.extensions.get("network_stream")
        self.hold(stream.get_extra_info("socket") if stream is not None else None)

    def hold(self, connection: socket.socket | None) -> None:
        """What to break off from now on, in place of whatever was held before."""
        with self._lock:
            self._socket = connection
            if self.is_cut:
                self._shut()

    def cut(self) -> None:
        """End it now, or as soon as it begins."""
        with self._lock:
            self.is_cut = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            # Closing would not wake who reads. A TLS socket's own would wait for the other side.
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
