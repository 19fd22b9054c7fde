"""HTTP answers that cannot grow beyond all bounds.

User code shares a machine with the server that answers for it, and may answer in its stead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

MAX_RESPONSE_BYTES = 64 * 1024 * 1024


class ResponseTooLarge(httpx.TransportError):
    """An answer was longer than any honest one, or compressed, so that it might become so."""


class BoundedClient(httpx.Client):
    """Breaks an answer off after MAX_RESPONSE_BYTES, and asks for uncompressed ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, event_hooks={"response": [_bound]})
        self.headers["Accept-Encoding"] = "identity"


def _bound(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        response.close()
        raise ResponseTooLarge("a compressed answer was not asked for")
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
