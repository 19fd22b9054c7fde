"""One file from one URL, by redirects that are checked as the URL was."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

import httpcore
from django.conf import settings

from executions.kernel.addresses import (
    Bounds,
    Budget,
    FetchError,
    Reason,
    Room,
    read_url,
    redirected,
    without_secrets,
)
from executions.kernel.disk import disk_problem
from executions.kernel.http import HEAD_BYTES, exchange
from executions.services.fetching.names import name_of
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
