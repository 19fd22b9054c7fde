"""Reading requests' bodies: off the threads, in a bounded time, into a bounded space."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from providers.errors import ProviderUnavailable, RateLimited

Receive = Callable[[], Awaitable[dict[str, Any]]]

# Read for anybody: no more than what the server buffers of a connection anyway.
SMALL_BYTES = 64 * 1024
# The most without a valid key: forms of the admin.
FORM_BYTES = 2_621_440
IN_MEMORY_BYTES = 1024 * 1024
# What a client must keep up, from when the grace is over.
BYTES_PER_SECOND = 100_000

STRANGERS = ""


class Refused(Exception):
    """The request is answered with an error instead of being handled."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


class ClientGone(Exception):
    """The client went away before its request was complete."""


class Spool:
    """How much of bodies may be held at once: in all, by one tenant, by those without a key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def hold(self, owner: str, size: int) -> None:
        """Raises Refused where it would be too much."""
        share = self._most // (8 if owner == STRANGERS else 2)
        with self._lock:
            if self._held[owner] + size > share:
                status = 503 if owner == STRANGERS else 429
                raise Refused(status, "body: You are sending too much at once. Try again later.", 5)
            if self._held.total() + size > self._most:
                raise Refused(
                    503, "body: The service is receiving too much at once. Try again later.", 5
                )
            self._held[owner] += size

    def release(self, owner: str, size: int) -> None:
        with self._lock:
            self._held[owner] -= size
            if not self._held[owner]:
                del self._held[owner]


class Share:
    """What one request holds: from before its body is read until it is answered, for while its
    run waits what was read is in memory."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._held: Counter[str] = Counter()

    @property
    def owner(self) -> str:
        """Whose body it is, as far as somebody has asked."""
        return next(iter(self._held), STRANGERS)

    @property
    def size(self) -> int:
        return self._held.total()

    def hold(self, owner: str, size: int) -> None:
        """So much, besides what it holds already. Raises Refused."""
        self._spool.hold(owner, size)
        self._held[owner] += size

    def hold_unpacked(self, owner: str, size: int) -> None:
        """The same for what a view finds in it. Raises RateLimited and ProviderUnavailable."""
        try:
            self.hold(owner, size)
        except Refused as refusal:
            kind = RateLimited if refusal.status == 429 else ProviderUnavailable
            raise kind(refusal.message, retry_after=refusal.retry_after) from None

    def shrink(self, size: int) -> None:
        """It has turned out to be no more than this."""
        if self._held:
            owner = self.owner
            self.release()
            if size > SMALL_BYTES:
                self.hold(owner, size)

    def release(self) -> None:
        for owner, size in self._held.items():
            self._spool.release(owner, size)
        self._held.clear()


async def read_body(
    receive: Receive, length: int, grace: float, most: int | None = None
) -> IO[bytes]:
    """The whole body of so many bytes, from its start; it is kept on disk when it is large.

    `most` is what one may have whose length was not announced. Raises Refused for more, and when
    the client pauses for `grace` seconds or, after as many, is slower than BYTES_PER_SECOND, and
    ClientGone.
    """
    body: IO[bytes] = SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115
    began = time.monotonic()
    received = 0
    try:
        while True:
            late = began + grace + received / BYTES_PER_SECOND
            async with asyncio.timeout(min(grace, max(0.0, late - time.monotonic()))):
                message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            received += len(message["body"])
            if most is not None and received > most:
                raise Refused(413, f"body: Must be at most {most} bytes.")
            body.write(message["body"])
            if not message["more_body"]:
                break
    except Refused:
        body.close()
        raise
    except TimeoutError:
        body.close()
        raise Refused(408, "body: Was not received in time.") from None
    except OSError:
        body.close()
        raise Refused(503, "body: Could not be stored; the disk may be full.", 30) from None
    except BaseException:
        body.close()
        raise
    body.seek(0)
    return body
