"""What one file may take of our time and of the network, and what all files of a batch may hold."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from executions.services.fetching.errors import FetchError, Reason
from providers.remote.bounded import Cut


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
        self.cut = Cut()
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
