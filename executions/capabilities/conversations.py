"""Conversations: a session of a tenant under a name of its own, and its files."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings

from executions.kernel.coroutines import wait_for
from executions.kernel.declarations import refuse
from executions.kernel.text import from_text, is_path, key_of, storable, to_text
from executions.runs.models import Execution
from executions.runs.requests import Caller, Conflict, ExecutionRequest
from executions.sessions import cell_order, files
from executions.sessions.control import open_session
from executions.sessions.ending import close_if_due
from executions.sessions.maintenance import save_changes
from executions.sessions.models import Session, Workspace, WorkspaceFile
from executions.sessions.queries import sessions_of
from executions.sessions.requests import SessionRequest, ensure_not_ended
from executions.sessions.session_sandbox import store_attempts
from executions.sessions.storage import quota
from executions.sessions.storage.carry_over import newest_with_files
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.guest.names import unescape
from providers.waiting import submit, within

if TYPE_CHECKING:
    from executions.capabilities.fetching.filenames import Names
    from executions.capabilities.fetching.service import Fetched, NotFetched
    from executions.kernel.http import Bounds

DEFAULT = "default"
# What Agent Sandbox has in its own folder of a conversation: never told of, and nobody's to write.
INTERNAL_FILES = (
    "__mcp_exec__.py",
    "__sandboxd__.py",
    "__sb_client__.py",
    ".sb_meta.json",
    ".sb_snapshot.json",
)
_OPENING_SECONDS = 60.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Conversation:
    """Whose sandbox it is."""

    user_id: str
    session_id: str = DEFAULT

    @property
    def key(self) -> str:
        """What stands for it in the database, whatever the ids are."""
        text = f"{len(self.user_id)}:{self.user_id}{self.session_id}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find(tenant: Tenant, conversation: Conversation) -> Session | None:
    """Its session, if it has one now."""
    return find_session(tenant, conversation.key)


def find_session(tenant: Tenant, key: str) -> Session | None:
    """The same by the key of a conversation."""
    found = sessions_of(tenant).filter(conversation=key, closed_at=None)
    session = found.select_related("workspace").order_by("-id").first()
    if session is not None and close_if_due(session.pk):
        return None
    return session


def find_files(tenant: Tenant, conversation: Conversation) -> Session | None:
    """The session whose saved files are the conversation's, if it has any: its own now, or its last
    where files outlive their sessions.
    """
    session = find(tenant, conversation)
    return newest_with_files(sessions_of(tenant).filter(conversation=conversation.key)) or session


async def ensure_session(caller: Caller, conversation: Conversation) -> Session:
    """Return the conversation's session, and open one where it has none. Of several callers at once
    one opens it, and the others wait for that. Raises as `open_session` does."""
    return await find_or_open(caller, _request(conversation))


async def find_or_open(caller: Caller, wanted: SessionRequest) -> Session:
    """The same for a request that has the key of its conversation."""
    until = time.monotonic() + _OPENING_SECONDS
    while True:
        session = find_session(caller.tenant, wanted.conversation)
        if session is None:
            try:
                return await open_session(wanted, caller)
            except Conflict:
                # Somebody else was faster.
                session = find_session(caller.tenant, wanted.conversation)
        if session is not None and _is_open(session):
            return session
        if time.monotonic() >= until:
            raise Conflict("The sandbox is still being opened. Try again.", retry_after=1)
        if session is None:
            await wait_for(within(_LOOK_SECONDS, Future[None]()))
        else:
            await _wait_until_open(session, until)


def _is_open(session: Session) -> bool:
    return session.ref is not None or session.state != Session.State.OPEN


async def _wait_until_open(session: Session, until: float) -> None:
    """Wait until another has opened it, or has failed to."""
    with cell_order.poll_pause(session.pk) as pause:
        while time.monotonic() < until:
            with cell_order.waiter(session.pk) as bell:
                found = Session.objects.filter(pk=session.pk, closed_at=None).first()
                if found is None or _is_open(found):
                    return
                await wait_for(within(pause(_LOOK_SECONDS), bell))


def _request(conversation: Conversation) -> SessionRequest:
    ours = settings.AGENT_SANDBOX
    return SessionRequest(
        idle_seconds=min(ours.idle_seconds, settings.SESSION_MAX_SECONDS),
        max_seconds=min(ours.total_seconds, settings.SESSION_MAX_SECONDS),
        subject=storable(conversation.user_id)[:255],
        saves=Session.Saves.ANSWER,
        conversation=conversation.key,
    )


def cell(session: Session, code: str, **claims: Any) -> ExecutionRequest:
    """Code of a conversation, and who asked for it. Its time is Agent Sandbox's, not ours."""
    seconds = min(settings.AGENT_SANDBOX.execution_seconds, settings.SANDBOX_MAX_TIMEOUT_SEC)
    return ExecutionRequest(code, session=session.pk, usual_timeout=seconds, **claims)


def path_of(name: str, text: str) -> str:
    """The path of a workspace that a caller names. Raises InvalidConfiguration."""
    path = unescape(text.removeprefix("./"))
    if not is_path(path):
        refuse(name, "Must be a relative path, without '..' and empty parts.")
    if path in INTERNAL_FILES:
        refuse(name, "This name is reserved for Agent Sandbox.")
    return path


@dataclass(frozen=True)
class Saved:
    """A file of a conversation, as storage has it."""

    path: str
    row: WorkspaceFile


def saved_files(session: Session) -> Iterator[Saved]:
    """All files that are saved, by path."""
    rows = WorkspaceFile.objects.filter(workspace__session=session, type=WorkspaceFile.Type.FILE)
    for row in rows.exclude(path__in=INTERNAL_FILES).order_by("path").iterator():
        yield Saved(from_text(row.path), row)


def file(session: Session, path: str) -> Saved | None:
    """One of them."""
    return next(iter(_find_saved(session, [path])), None)


def names_in(session: Session, folder: str) -> list[str]:
    """What stands in a folder, as it was saved last: names."""
    prefix = f"{folder}/" if folder else ""
    rows = WorkspaceFile.objects.filter(workspace__session=session)
    if prefix:
        rows = rows.filter(path__startswith=to_text(prefix))
    paths = map(from_text, rows.values_list("path", flat=True).iterator())
    return [path.removeprefix(prefix) for path in paths if "/" not in path.removeprefix(prefix)]


def filter_saved(session: Session, paths: Sequence[str]) -> set[str]:
    """Return those of the paths that are saved files."""
    return {saved.path for saved in _find_saved(session, paths)}


def files_of_run(execution: Execution) -> list[Saved]:
    """Return the files that a run has made or changed, and that were saved with it."""
    if execution.session is None:
        return []
    return sorted(
        _find_saved(execution.session, execution.changed_files), key=lambda saved: saved.path
    )


def filter_missing(session: Session, paths: Sequence[str]) -> list[str]:
    """Return those of the paths that are no saved files."""
    there = filter_saved(session, paths)
    return [path for path in paths if path not in there]


def _find_saved(session: Session, paths: Sequence[str]) -> Iterator[Saved]:
    wanted = [key_of(path) for path in paths]
    rows = WorkspaceFile.objects.filter(
        workspace__session=session, type=WorkspaceFile.Type.FILE
    ).select_related("blob")
    for start in range(0, len(wanted), 500):
        for row in rows.filter(key__in=wanted[start : start + 500]):
            if (path := from_text(row.path)) not in INTERNAL_FILES:
                yield Saved(path, row)


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


def ensure_upload_size(size: int) -> None:
    """Raises TooLarge for a file that nobody may send along."""
    most = settings.AGENT_SANDBOX.upload_bytes
    if size > most:
        raise TooLarge(f"file: Must be at most {most} bytes (MAX_UPLOAD_BYTES).", field="file")


async def put_file(session: Session, path: str, content: IO[bytes]) -> None:
    """Put a file that was sent along, and save it. Raises QuotaExceeded."""
    await files.write_file(session, path, files.Rereadable(content))


async def fetch_urls(session: Session, urls: Sequence[str], folder: str) -> Arrived:
    """Fetch files into a folder, whichever of them come, and save them together.

    None of them replaces a file that is there. Raises where none can be begun with.
    """
    # With it comes an HTTP client, for which no start of this service is to wait.
    from executions.capabilities.fetching.filenames import Names
    from executions.capabilities.fetching.service import NotFetched, fetch_files

    came: list[tuple[str, str]] = []
    attempts: list[Mapping[str, Any]] = []
    arrived = Arrived()
    taken = [*names_in(session, folder), *INTERNAL_FILES]
    names = Names(taken)
    with fetch_files(urls, str(session.tenant_id), bounds=_bounds(session), taken=taken) as results:
        while True:
            # A thread of those that wait: what it waits for is the internet.
            coming = submit(lambda: next(results, None), may_refuse=not came)
            await wait_for(coming)
            result = coming.result()
            if result is None:
                break
            attempts.append(_attempt(result))
            if isinstance(result, NotFetched):
                arrived.failures.append((result.url, result.text))
            else:
                await _put(session, folder, names, result, came, arrived)
    store_attempts(session, attempts)
    if came:
        await save_changes(session)
    _settle(session, came, arrived)
    return arrived


def _attempt(result: Fetched | NotFetched) -> dict[str, Any]:
    """The attempt to fetch a file, as `runs.network.checked_attempts` has attempts."""
    from executions.capabilities.fetching.service import NotFetched
    from executions.kernel.http import Reason

    if isinstance(result, NotFetched):
        is_refused = result.reason in (Reason.URL, Reason.HOST)
        source, size, why = result.url, 0, str(result.reason)
        outcome = "refused" if is_refused else "failed"
    else:
        source, size, why, outcome = result.source, result.size, "", "allowed"
    try:
        url = urlsplit(source)
        host, port, path = url.hostname, url.port or (80 if url.scheme == "http" else 443), url.path
    except ValueError:
        host, port, path = None, 0, ""
    return {
        "at": time.time(),
        "host": storable((host or "?")[:255]),
        "port": port,
        "outcome": outcome,
        "why": why,
        "method": "GET",
        "path": storable(path[:256]),
        "received": size,
    }


def _bounds(session: Session) -> Bounds:
    """No more than the session may save."""
    from executions.kernel.http import Bounds

    workspace = Workspace.objects.filter(session=session.pk).first()
    left = max(1, quota.bytes_left(session.provider, workspace.bytes if workspace else 0))
    usual = Bounds()
    return Bounds(
        file_bytes=min(settings.AGENT_SANDBOX.upload_bytes, left),
        batch_bytes=min(usual.batch_bytes, left),
    )


async def _put(
    session: Session,
    folder: str,
    names: Names,
    result: Fetched,
    came: list[tuple[str, str]],
    arrived: Arrived,
) -> None:
    try:
        path = await _put_beside(session, folder, names, result)
    except Conflict as error:
        ensure_not_ended(session)
        # What came before was lost with its sandbox; the next one is woken for the next file.
        arrived.failures.append((result.url, error.message))
    except SandboxError as error:
        arrived.failures.append((result.url, error.message))
    else:
        came.append((path, result.url))


async def _put_beside(session: Session, folder: str, names: Names, result: Fetched) -> str:
    """Write a file under a name that nothing has: a program may have written since the last save,
    and another request may fetch into the same folder. Which path it has.
    """
    for _ in range(_MOST_NAMES):
        name = names.distinct(result.name)
        path = f"{folder}/{name}" if folder else name
        with _alone_at(session.pk, path) as is_alone:
            if is_alone and (await files.entry_of(session, path)) is None:
                await files.write_file(session, path, files.Rereadable(result.body), saves=False)
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
    saved = filter_saved(session, [path for path, _ in came])
    for path, url in came:
        if path in saved:
            arrived.paths.append(path)
        else:
            arrived.failures.append((url, _NOT_SAVED))
