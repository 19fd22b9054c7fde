"""Files that come into a conversation, sent along or fetched by URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import IO, TYPE_CHECKING
from uuid import UUID

from django.conf import settings

from executions.kernel.coroutines import Waits
from executions.services.conversations import INTERNAL_FILES, names_in, those_saved
from executions.sessions import files
from executions.sessions.models import Session
from executions.sessions.requests import Conflict, refuse_ended
from executions.sessions.storage import quota
from executions.sessions.storage.background_saves import saved_behind
from executions.sessions.storage.models import Workspace
from providers.errors import InvalidConfiguration, SandboxError
from providers.waiting import submit

if TYPE_CHECKING:
    from executions.capabilities.fetching.filenames import Names
    from executions.capabilities.fetching.service import Fetched
    from executions.kernel.addresses import Bounds

_NOT_SAVED = "The file was received, but could not be saved."
# What a program may make a request ask for until it is told no.
_MOST_NAMES = 100

_lock = Lock()
_being_put: set[tuple[UUID, str]] = set()


class TooLarge(InvalidConfiguration):
    """A file beyond MAX_UPLOAD_BYTES."""

    @property
    def http_status(self) -> int:
        return 413


@dataclass
class Arrived:
    """Paths of the files that came, and for each other URL what was wrong with it."""

    paths: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


def refuse_too_large(size: int) -> None:
    """Raises TooLarge for a file that nobody may send along."""
    most = settings.AGENT_SANDBOX.upload_bytes
    if size > most:
        raise TooLarge(f"file: Must be at most {most} bytes (MAX_UPLOAD_BYTES).", field="file")


def putting(session: Session, path: str, content: IO[bytes]) -> Waits[None]:
    """Put a file that was sent along, and save it. Raises QuotaExceeded."""
    yield from files.writing(session, path, files.Rereadable(content))


def fetching(session: Session, urls: Sequence[str], folder: str) -> Waits[Arrived]:
    """Fetch files into a folder, whichever of them come, and save them together.

    None of them replaces a file that is there. Raises where none can be begun with.
    """
    # With it comes an HTTP client, for which no start of this service is to wait.
    from executions.capabilities.fetching.filenames import Names
    from executions.capabilities.fetching.service import NotFetched, fetch_files

    came: list[tuple[str, str]] = []
    arrived = Arrived()
    taken = [*names_in(session, folder), *INTERNAL_FILES]
    names = Names(taken)
    with fetch_files(urls, str(session.tenant_id), bounds=_bounds(session), taken=taken) as results:
        while True:
            # A thread of those that wait: what it waits for is the internet.
            coming = submit(lambda: next(results, None), may_refuse=not came)
            yield coming
            result = coming.result()
            if result is None:
                break
            if isinstance(result, NotFetched):
                arrived.failures.append((result.url, result.text))
            else:
                yield from _put(session, folder, names, result, came, arrived)
    if came:
        yield from saved_behind(session)
    _settle(session, came, arrived)
    return arrived


def _bounds(session: Session) -> Bounds:
    """No more than the session may save."""
    from executions.kernel.addresses import Bounds

    workspace = Workspace.objects.filter(session=session.pk).first()
    left = max(1, quota.left(session.provider, workspace.bytes if workspace else 0))
    usual = Bounds()
    return Bounds(
        file_bytes=min(settings.AGENT_SANDBOX.upload_bytes, left),
        batch_bytes=min(usual.batch_bytes, left),
    )


def _put(
    session: Session,
    folder: str,
    names: Names,
    result: Fetched,
    came: list[tuple[str, str]],
    arrived: Arrived,
) -> Waits[None]:
    try:
        path = yield from _put_beside(session, folder, names, result)
    except Conflict as error:
        refuse_ended(session)
        # What came before was lost with its sandbox; the next one is woken for the next file.
        arrived.failures.append((result.url, error.message))
    except SandboxError as error:
        arrived.failures.append((result.url, error.message))
    else:
        came.append((path, result.url))


def _put_beside(session: Session, folder: str, names: Names, result: Fetched) -> Waits[str]:
    """Write a file under a name that nothing has: a program may have written since the last save,
    and another request may fetch into the same folder. Which path it has.
    """
    for _ in range(_MOST_NAMES):
        name = names.distinct(result.name)
        path = f"{folder}/{name}" if folder else name
        with _alone_at(session.pk, path) as is_alone:
            if is_alone and (yield from files.entry_of(session, path)) is None:
                yield from files.writing(session, path, files.Rereadable(result.body), saves=False)
                return path
    raise Conflict(
        "Files with this name, and with every number that was tried after it, already exist."
    )


@contextmanager
def _alone_at(session_id: UUID, path: str) -> Iterator[bool]:
    """Whether no other request of this process is about to write there. None is meanwhile."""
    with _lock:
        is_alone = (session_id, path) not in _being_put
        if is_alone:
            _being_put.add((session_id, path))
    try:
        yield is_alone
    finally:
        if is_alone:
            with _lock:
                _being_put.discard((session_id, path))


def _settle(session: Session, came: Iterable[tuple[str, str]], arrived: Arrived) -> None:
    """What is said to have come is what is saved."""
    came = list(came)
    saved = those_saved(session, [path for path, _ in came])
    for path, url in came:
        if path in saved:
            arrived.paths.append(path)
        else:
            arrived.failures.append((url, _NOT_SAVED))
