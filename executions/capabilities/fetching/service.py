"""Files that a request names by URL: fetched in batches, a few of each tenant at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO

import httpcore
from django.conf import settings

from executions.capabilities.fetching.filenames import Names, name_of
from executions.kernel.background import Shares
from executions.kernel.http import (
    HEAD_BYTES,
    Bounds,
    Budget,
    FetchError,
    Reason,
    Room,
    destinations,
    exchange,
    read_url,
    redirected,
    too_slow,
    without_secrets,
)
from executions.runs.admission import disk_problem
from providers.errors import InvalidConfiguration, RateLimited
from providers.remote.receiver import Receiver

logger = logging.getLogger(__name__)

MOST_REDIRECTS = 5

_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Download:
    """`name` is clean, or "" where server and URL name none. `body` is at its start."""

    name: str
    size: int
    source: str
    body: IO[bytes]


def download(text: str, receiver: Receiver, bounds: Bounds, budget: Budget, room: Room) -> Download:
    """The file behind the URL `text`; the caller closes its body. Raises FetchError."""
    url = asked = read_url(text, receiver.rules)
    for _ in range(MOST_REDIRECTS + 1):
        with exchange(url, receiver, budget) as answer:
            if answer.status in _REDIRECTS:
                url = redirected(url, _header(answer, b"location"), receiver.rules)
                continue
            size = _check(answer, bounds, room)
            body, size = _received(answer, size, bounds, budget, room)
            name = name_of(_header(answer, b"content-disposition"), asked, url)
            return Download(name, size, without_secrets(url), body)
    raise FetchError(Reason.REDIRECTS, f"The server redirects more than {MOST_REDIRECTS} times.")


def _check(answer: httpcore.Response, bounds: Bounds, room: Room) -> int | None:
    """The size that the headers announce, if they do. Raises FetchError for what is no file."""
    if answer.status not in (200, 203):
        raise FetchError(Reason.ANSWER, f"The server answers with the status {answer.status}.")
    if _header(answer, b"content-encoding").strip().lower() not in ("", "identity"):
        # Decoded, it may be a thousand times as long; as it is, it is not what was asked for.
        raise FetchError(
            Reason.ANSWER, "The server sends the file compressed, which was not requested."
        )
    announced = _header(answer, b"content-length")
    if not announced:
        return None
    size = int(announced)
    if size > bounds.file_bytes:
        raise _too_large(bounds)
    room.check(size)
    return size


def _received(
    answer: httpcore.Response, announced: int | None, bounds: Bounds, budget: Budget, room: Room
) -> tuple[IO[bytes], int]:
    """The body in a file without a name, and its size. Raises FetchError."""
    # Chunks have lines between them.
    budget.allow(2 * (bounds.file_bytes if announced is None else announced) + HEAD_BYTES)
    if problem := disk_problem():
        raise _no_room(problem)
    try:
        # There, because its disk is the one that is watched.
        body: IO[bytes] = TemporaryFile(dir=settings.DATA_DIR)  # noqa: SIM115
    except OSError as error:
        raise _no_room(error) from None
    size = 0
    try:
        for piece in answer.iter_stream():
            size += len(piece)
            if size > bounds.file_bytes:
                raise _too_large(bounds)
            room.take(len(piece))
            body.write(piece)
        body.flush()
        body.seek(0)
    except OSError as error:
        body.close()
        raise _no_room(error) from None
    except BaseException:
        body.close()
        raise
    return body, size


def _no_room(problem: object) -> FetchError:
    logger.error("a fetched file could not be kept: %s", problem)
    return FetchError(Reason.NO_ROOM, "There is no space for the file on this server now.")


def _too_large(bounds: Bounds) -> FetchError:
    return FetchError(Reason.TOO_LARGE, f"The file has more than {bounds.file_bytes} bytes.")


def _header(answer: httpcore.Response, name: bytes) -> str:
    """The first header of this name, as UTF-8 where it is that; "" without one."""
    for key, value in answer.headers:
        if key.lower() == name:
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value.decode("latin-1")
    return ""


MOST = 16
MOST_OF_ONE = 2

_RETRY_SECONDS = 10.0

_slots = Shares(MOST, MOST_OF_ONE)
# Reentrant: the garbage collector may end a generator that holds a slot, in any thread.
_lock = threading.RLock()


def held() -> int:
    """How many there are now."""
    return _slots.taken


class Slot:
    """Held by a batch and each of its threads; given back when the last of them has let go."""

    def __init__(self, holder: str) -> None:
        """Raises RateLimited when there is none for `holder`."""
        if not _slots.take(holder):
            is_own = _slots.of(holder) >= MOST_OF_ONE
            raise RateLimited(
                f"{MOST_OF_ONE} requests are already fetching files by URL. Wait until one ends."
                if is_own
                else "Too many requests are fetching files by URL. Try again.",
                retry_after=_RETRY_SECONDS,
            )
        self._holder = holder
        self._holds = 1

    def hold(self) -> bool:
        """False when it has been given back already."""
        with _lock:
            if not self._holds:
                return False
            self._holds += 1
            return True

    def release(self) -> None:
        with _lock:
            self._holds -= 1
            is_last = not self._holds
        # The shares have a lock of their own, under which the collector may release another slot.
        if is_last:
            _slots.give_back(self._holder)


# After its time a file is not waited for, though a name server may hold its thread for longer.
GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Fetched:
    """A file. `name` is clean, and no other's of the batch. `source` is the URL that it came from
    in the end, without its query. `body` stands at the start, and is closed with the next file.
    """

    index: int
    url: str = field(repr=False)
    name: str
    size: int
    source: str
    body: IO[bytes] = field(repr=False)


@dataclass(frozen=True)
class NotFetched:
    """A file that did not come. `text` is for whoever gave the URL."""

    index: int
    url: str = field(repr=False)
    reason: Reason
    text: str


@contextmanager
def fetch_files(
    urls: Sequence[str],
    holder: str,
    *,
    bounds: Bounds | None = None,
    taken: Iterable[str] = (),
) -> Iterator[Iterator[Fetched | NotFetched]]:
    """What comes of each URL, in their order, so that equal names get the same numbers each time.

    `holder` is the tenant, whose batches are counted. `taken` are names in the folder that the
    files are for. Raises InvalidConfiguration for too many URLs, and RateLimited while the tenant,
    or all together, have as many batches under way as they may. Leaving gives up what still comes.
    """
    bounds = bounds or Bounds()
    if len(urls) > bounds.urls:
        raise InvalidConfiguration(
            f"urls: {len(urls)} are given; the limit is {bounds.urls}.", field="urls"
        )
    batch = _Batch(bounds, holder, Names(taken))
    results = batch.results(urls)
    try:
        yield results
    finally:
        # First: whoever waits for a file in another thread is to do so no longer.
        batch.end()
        # Entered by another thread, it goes with that thread's last look at it.
        with suppress(ValueError):
            results.close()


class _Batch:
    def __init__(self, bounds: Bounds, holder: str, names: Names) -> None:
        self.bounds = bounds
        self.room = Room(bounds.batch_bytes)
        self.receiver = Receiver(destinations())
        self.ends = time.monotonic() + bounds.batch_seconds
        self._names = names
        self._tasks: deque[_Task] = deque()
        self._current: _Task | None = None
        self._has_ended = False
        self._threads = ThreadPoolExecutor(bounds.threads, thread_name_prefix="fetching")
        # Last, because nobody would give it back if something else failed.
        self._slot = Slot(holder)

    def results(self, urls: Sequence[str]) -> Generator[Fetched | NotFetched, None, None]:
        coming = enumerate(urls)
        while True:
            if self._has_ended:
                return
            while len(self._tasks) < self.bounds.ahead and (following := next(coming, None)):
                begun = self._begin(*following)
                if begun is None:
                    return
                self._tasks.append(begun)
            if not self._tasks:
                return
            task = self._current = self._tasks.popleft()
            try:
                yield self._result(task)
            finally:
                task.give_up()

    def end(self) -> None:
        self._has_ended = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in (self._current, *list(self._tasks)):
            if task is not None:
                task.give_up()
        self._slot.release()

    def _begin(self, index: int, url: str) -> _Task | None:
        """None where the batch was ended meanwhile, in another thread."""
        task = _Task(self, index, url)
        if not self._slot.hold():
            return None
        try:
            task.future = self._threads.submit(task.run)
        except RuntimeError:
            self._slot.release()
            if self._has_ended:
                return None
            # No thread can be started.
            raise
        task.future.add_done_callback(lambda _: self._slot.release())
        return task

    def _result(self, task: _Task) -> Fetched | NotFetched:
        try:
            file = task.wait()
        except FetchError as error:
            return NotFetched(task.index, task.url, error.reason, error.text)
        name = self._names.distinct(file.name)
        return Fetched(task.index, task.url, name, file.size, file.source, file.body)


class _Task:
    """One URL. It is run by a thread of the batch, which nobody waits for once it is given up."""

    future: Future[Download]

    def __init__(self, batch: _Batch, index: int, url: str) -> None:
        self.index = index
        self.url = url
        self._batch = batch
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._budget = Budget(batch.ends, batch.bounds.pause_seconds)
        self._file: Download | None = None
        self._given_up = False

    def run(self) -> Download:
        batch = self._batch
        self._budget.ends = min(batch.ends, time.monotonic() + batch.bounds.file_seconds)
        self._started.set()
        file = download(self.url, batch.receiver, batch.bounds, self._budget, batch.room)
        with self._lock:
            self._file = file
            if self._given_up:
                file.body.close()
        return file

    def wait(self) -> Download:
        """Raises FetchError, at the latest when the time of the file or the batch is over."""
        batch_left = max(0.0, self._batch.ends - time.monotonic())
        if not self._started.wait(batch_left):
            raise FetchError(
                Reason.TOO_SLOW,
                "The time limit of the request was reached before this file was fetched.",
            )
        try:
            left = self._budget.ends - time.monotonic() + GRACE_SECONDS
            return self.future.result(max(0.0, left))
        except (NotYet, CancelledError):
            raise too_slow() from None
        except FetchError:
            raise
        except Exception as error:
            # Not its text, in which the URL may be.
            logger.error("a file could not be fetched: %s", type(error).__name__)
            raise FetchError(Reason.ANSWER, "The file could not be fetched.") from None

    def give_up(self) -> None:
        """End what goes on, and let go of what has come."""
        with self._lock:
            self._given_up = True
            if self._file is not None:
                self._file.body.close()
        self._budget.cut.cut()
        self._started.set()
