"""The files of a session: its sandbox's, or while it sleeps what is saved, which wakes nobody.

What a guest says is a claim, and is checked for its shape; what a name means is its to say. To
look at what a sandbox says of itself (`Inspection`) is no use of the session: it lives no longer
for it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, Any, TypeVar

from executions.kernel.coroutines import Coroutine, immediate
from executions.kernel.declarations import refuse
from executions.kernel.text import is_name, storable, to_text
from executions.runs.provider_calls import guard
from executions.sessions.control import with_sandbox
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session, Workspace
from executions.sessions.requests import FileListing
from executions.sessions.session_sandbox import OPERATION_SECONDS, borrow_sandbox, stream_slot
from executions.sessions.storage import browse, changes, quota
from providers.errors import InvalidConfiguration, KeptSandboxLost, ProviderUnavailable
from providers.sandbox import WORKSPACE_NAMES, FileEntry, KeptSandbox, SandboxState, below_workspace
from providers.waiting import submit

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LISTED = 1000
_LARGEST = 2**53
_PIECE_BYTES = 256 * 1024
# A thread that sends a file waits so long for its next piece before it is given back.
_PIECE_SECONDS = 0.005
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def list_files(
    session: Session,
    wanted: FileListing,
    seconds: float = OPERATION_SECONDS,
    *,
    is_use: bool = True,
    most: int | None = None,
) -> tuple[list[FileEntry], str]:
    """Return what is in a folder, sorted by path, and where to go on, as a text: "" when that is
    all.

    The sandbox tells of all of it each time: who wants more than a page asks for it at once.
    """
    most = most or MOST_LISTED
    if (saved := _find_saved(session, wanted.path)) is not None:
        after = below_workspace(wanted.after) or ""
        page, more = _read_saved(
            session,
            lambda rows: browse.list_folder(rows, saved.path, wanted.depth, after, most),
        )
        page = [saved.for_caller(entry) for entry in page]
        return page, to_text(page[-1].path) if more else ""
    found: Sequence[FileEntry] = await with_sandbox(
        session,
        lambda kept: kept.files.list(wanted.path, wanted.depth),
        _entries,
        seconds,
        is_use=is_use,
    )
    page = [entry for entry in found if entry.path > wanted.after]
    more = len(page) > most
    page = page[:most]
    return page, to_text(page[-1].path) if more else ""


async def entry_of(session: Session, path: str) -> FileEntry | None:
    """What stands under a path, a link itself where it is one; None where there is nothing."""
    if (saved := _find_saved(session, path)) is not None:
        entry = _read_saved(session, lambda rows: browse.stat(rows, saved.path))
        return entry and saved.for_caller(entry)
    return await with_sandbox(
        session,
        lambda kept: kept.files.stat(path),
        lambda seen: None if seen is None else _entry(seen),
    )


async def file_of(session: Session, path: str) -> FileEntry | None:
    """A regular file, looked at before it is read; None where there is nothing.

    Raises InvalidConfiguration for what is no regular file, or may not be read.
    """
    entry = await entry_of(session, path)
    if entry is None:
        return None
    if (entry.end or entry).type != "file":
        refuse("path", f"Is not a regular file, but: {entry.type}.")
    return await ensure_readable(session, path, entry)


async def ensure_readable(session: Session, path: str, entry: FileEntry) -> FileEntry:
    """Return the file as it can be read, with the size of what a link leads to.

    Raises InvalidConfiguration for one that may not be read: once an answer with its bytes has
    begun, nothing can be refused any more.
    """
    if _find_saved(session, path) is not None:
        return entry
    if path.startswith("/"):
        # What it is, and to whom it belongs, nobody knows who has not opened it.
        size = await with_sandbox(session, lambda kept: _size_of(kept, path, entry), _count)
        return replace(entry, size=size)
    if entry.mode & stat.S_IRUSR:
        return entry
    # Root reads it all the same. Of more than was asked for nothing is taken.
    await with_sandbox(
        session, lambda kept: next(iter(kept.files.read(path, 0, 1)), b""), lambda _: None
    )
    return entry


def _size_of(kept: KeptSandbox, path: str, entry: FileEntry) -> int:
    """Of one that can be read. The kernel says of its own files that they have no bytes."""
    end = kept.files.stat(entry.end.path) if entry.end else entry
    if end is not None and end.size:
        next(iter(kept.files.read(path, 0, 1)), b"")
        return end.size
    return sum(map(len, kept.files.read(path)))


def range_of(header: str, size: int) -> tuple[int, int] | None:
    """The first byte and the number of bytes that a Range asks for, None for the whole file.

    More than one range, or another unit, is answered with the whole file. Raises ValueError for a
    range that lies behind the end.
    """
    asked = _RANGE.fullmatch(header.strip())
    if asked is None or asked.groups() == ("", ""):
        return None
    first, last = asked.groups()
    if not first:
        length = min(int(last), size)
        start = size - length
    else:
        start = int(first)
        end = min(int(last), size - 1) if last else size - 1
        if last and int(last) < start:
            return None
        length = end - start + 1
    if start >= size or length <= 0:
        raise ValueError(f"the file has {size} bytes")
    return start, length


def read(session: Session, path: str, offset: int, length: int | None) -> Iterator[bytes]:
    """A file's bytes. An empty piece stands for none yet, so that nobody has to wait for it."""
    if (saved := _find_saved(session, path)) is not None:
        blob = _read_saved(session, lambda rows: browse.blob_at(rows, saved.path))
        return _pieces(session, lambda _: browse.read(blob, offset, length))
    return _pieces(session, _borrow(session, lambda kept: kept.files.read(path, offset, length)))


def read_archive(session: Session, path: str) -> Iterator[bytes]:
    """A folder as tar, in the same way."""
    if (saved := _find_saved(session, path)) is not None:
        archive = _read_saved(session, lambda rows: browse.archive(rows, saved.path))
        return _pieces(session, lambda _: archive)
    return _pieces(session, _borrow(session, lambda kept: kept.files.read_archive(path)))


class Rereadable:
    """The pieces of a file, from its beginning whenever they are asked for: what is done in a
    session is begun anew where it was woken, or others changed the same, meanwhile.
    """

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self.size = content.seek(0, os.SEEK_END)

    def __iter__(self) -> Iterator[bytes]:
        self._content.seek(0)
        while piece := self._content.read(_PIECE_BYTES):
            yield piece


async def write_file(
    session: Session,
    path: str,
    content: Rereadable,
    *,
    saves: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Put a file there, folders included. As `with_sandbox`; raises QuotaExceeded for one that is
    more than can be saved of the session. `metadata` stays with the file as long as its sandbox
    does.
    """
    below = below_workspace(path)
    if below:
        quota.ensure_room(session, below, content.size)
    saved = None if metadata else _find_saved_item(session, path)
    return await _change(
        session,
        None
        if saved is None
        else lambda: _prefix_result(saved, _store(session, saved.path, content)),
        lambda kept: (
            kept.files.write(path, content, metadata=metadata)
            if metadata
            else kept.files.write(path, content)
        ),
        _entry,
        saves=saves,
    )


def _store(session: Session, path: str, content: Rereadable) -> Coroutine[FileEntry]:
    return changes.run_in_storage_thread(session, lambda: changes.write(session, path, content))


async def unpack(session: Session, path: str, content: Rereadable) -> int:
    """Unpack a tar archive below a folder. How many entries it had."""
    saved = _find_saved(session, path)
    return await _change(
        session,
        None
        if saved is None
        else lambda: changes.run_in_storage_thread(
            session, lambda: changes.unpack(session, saved.path, content)
        ),
        lambda kept: kept.files.write_archive(content, path),
        _count,
    )


async def remove_file(session: Session, path: str) -> bool:
    """Remove a file or a folder. False where there was none."""
    saved = _find_saved_item(session, path)
    return await _change(
        session,
        None
        if saved is None
        else lambda: _store_if_large(session, lambda: changes.remove(session, saved.path)),
        lambda kept: kept.files.remove(path),
        _boolean,
    )


async def move_file(session: Session, source: str, target: str) -> FileEntry:
    """Move a file or a folder."""
    before, after = _find_saved_item(session, source), _find_saved_item(session, target, "target")
    return await _change(
        session,
        None
        if before is None or after is None
        else lambda: _prefix_result(
            after,
            _store_if_large(session, lambda: changes.move(session, before.path, after.path)),
        ),
        lambda kept: kept.files.move(source, target),
        _entry,
    )


async def make_directory(session: Session, path: str) -> bool:
    """Make a folder. False when it was there."""
    saved = _find_saved_item(session, path)
    return await _change(
        session,
        None
        if saved is None
        else lambda: immediate(lambda: changes.make_directory(session, saved.path)),
        lambda kept: kept.files.make_directory(path),
        _boolean,
    )


async def _change(
    session: Session,
    saved: Callable[[], Coroutine[T]] | None,
    live: Callable[[KeptSandbox], Any],
    check: Callable[[Any], T],
    *,
    saves: bool = True,
) -> T:
    """Change the files that are saved, unless there is a sandbox, or somebody asked for one. What
    no saved file can be is done in a sandbox: `saved` is None."""
    if session.state == Session.State.ASLEEP and saved is not None:
        try:
            return await saved()
        except changes.IsAwake:
            logger.info("session %s was woken: its sandbox is used", session.pk)
    return await with_sandbox(session, live, check, changes_files=True, saves=saves)


async def _store_if_large(session: Session, change: Callable[[], T]) -> T:
    """A change of many rows takes its time: none of the threads that serve waits for it."""
    if changes.may_be_large(session):
        return await changes.run_in_storage_thread(session, change)
    return change()


@dataclass(frozen=True)
class _Saved:
    """What is saved of a session that sleeps, as it was asked for: `path` is relative, and was
    given behind `prefix`."""

    path: str
    prefix: str = ""

    def for_caller(self, entry: FileEntry) -> FileEntry:
        """The entry under the path that it has for the caller."""
        return replace(entry, path=f"{self.prefix}{entry.path}") if self.prefix else entry


def _find_saved(session: Session, path: str) -> _Saved | None:
    """None where a sandbox is asked: there is one, or the path is none of the workspace."""
    below = below_workspace(path)
    if session.state != Session.State.ASLEEP or below is None:
        return None
    if not path.startswith("/"):
        return _Saved(path)
    name = next(each for each in WORKSPACE_NAMES if below_workspace(path, (each,)) is not None)
    return _Saved(below, f"{name}/")


def _find_saved_item(session: Session, path: str, field: str = "path") -> _Saved | None:
    """The same of what is not the workspace itself. Raises InvalidConfiguration."""
    saved = _find_saved(session, path)
    if saved is not None and not saved.path:
        refuse(field, "Must name something in a folder.")
    return saved


async def _prefix_result(saved: _Saved, changed: Coroutine[FileEntry]) -> FileEntry:
    return saved.for_caller(await changed)


def _read_saved(session: Session, look: Callable[[Workspace | None], T]) -> T:
    """What `look` finds in what is saved of the session."""
    return browse.read_whole(lambda: Workspace.objects.filter(session=session.pk).first(), look)


def _borrow(
    session: Session, begin: Callable[[KeptSandbox], Iterator[bytes]]
) -> Callable[[ExitStack], Iterator[bytes]]:
    def pieces(held: ExitStack) -> Iterator[bytes]:
        sandbox = held.enter_context(borrow_sandbox(session))
        return guard(session.provider, lambda: begin(sandbox))

    return pieces


def _pieces(session: Session, begin: Callable[[ExitStack], Iterator[bytes]]) -> Iterator[bytes]:
    """What is lent for it stays so until the last piece was taken, or nobody wants more.

    Raises RateLimited now, and everything else with the first piece.
    """
    pieces = _send(session, begin)
    next(pieces)
    return pieces


def _send(session: Session, begin: Callable[[ExitStack], Iterator[bytes]]) -> Iterator[bytes]:
    with ExitStack() as held:
        held.enter_context(stream_slot(session.tenant_slug))
        yield b""
        try:
            pieces = begin(held)
            while True:
                piece = yield from _come(submit(lambda: next(pieces, None)), held)
                if piece is None:
                    return
                if not isinstance(piece, bytes):
                    raise ProviderUnavailable("The provider did not return bytes.")
                yield piece
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
            raise


def _come(awaited: Future[T], held: ExitStack) -> Generator[bytes, None, T]:
    """What comes of it, and an empty piece each time that it is asked for in vain.

    Who leaves meanwhile still has a thread, and `held` is given back when that is free.
    """
    patience = _PIECE_SECONDS
    try:
        while True:
            try:
                return awaited.result(patience)
            except NotYet:
                # Whoever asks again holds up nobody: there may be many.
                patience = 0
                yield b""
    except GeneratorExit:
        lent = held.pop_all()
        awaited.add_done_callback(lambda _: lent.close())
        raise


def _entries(answer: Any) -> list[FileEntry]:
    if not isinstance(answer, list | tuple):
        raise ProviderUnavailable("The provider did not return a list.")
    return sorted((_entry(each) for each in answer), key=lambda entry: entry.path)


def _entry(answer: Any) -> FileEntry:
    if (
        not isinstance(answer, FileEntry)
        or not isinstance(answer.path, str)
        or (answer.path and not is_name(answer.path))
        or not isinstance(answer.target, str)
        or answer.type not in ("file", "directory", "symlink", "other")
        or type(answer.size) is not int
        or not 0 <= answer.size <= _LARGEST * 1024
        or type(answer.mode) is not int
        or type(answer.modified) not in (int, float)
        or not math.isfinite(answer.modified)
        or (answer.end is not None and _entry(answer.end).end is not None)
        or not isinstance(answer.metadata, Mapping)
        or not all(isinstance(text, str) for pair in answer.metadata.items() for text in pair)
    ):
        raise ProviderUnavailable("The provider did not return a file.")
    return answer


def _count(answer: Any) -> int:
    return answer if type(answer) is int and 0 <= answer <= _LARGEST else 0


def _boolean(answer: Any) -> bool:
    return answer is True


# How long a page waits for a sandbox to say something.
LOOK_SECONDS = 10.0
MOST_SHOWN = 200
_MOST_CHARACTERS = 500
_LARGEST_FIGURE = 2**63


@dataclass(frozen=True)
class Running:
    """A process, as its sandbox tells of it. `exit_code` is None while it runs."""

    pid: int
    command: str
    cwd: str
    exit_code: int | None


@dataclass(frozen=True)
class Inspection:
    """What is not known is None; `more` is how many processes are left out.

    `cpu_seconds` is all processor time since the sandbox was started.
    """

    memory_bytes: int | None
    cpu_seconds: float | None
    disk_bytes: int | None
    disk_total_bytes: int | None
    contexts: list[tuple[str, str, str]]
    processes: list[Running]
    more: int


async def inspect(session: Session) -> Inspection:
    """Return what the sandbox says of itself. Raises SandboxError; SessionLost where it is gone."""
    return await with_sandbox(
        session, lambda kept: kept.state(), _inspection, LOOK_SECONDS, is_use=False
    )


async def inspect_folder(session: Session, path: str, after: str) -> tuple[list[FileEntry], str]:
    """Return what is in a folder, as `list_files` does, without using the session. Raises
    SandboxError."""
    wanted = FileListing(path=path, after=after)
    return await list_files(session, wanted, LOOK_SECONDS, is_use=False)


async def inspect_file(session: Session, path: str, most_bytes: int) -> bytes | None:
    """Return what is in a file without using the session; None where there is no regular file, or
    a larger one. Raises SandboxError."""
    try:
        if (saved := _find_saved(session, path)) is not None:
            blob = _read_saved(session, lambda rows: browse.blob_at(rows, saved.path))
            content = b"".join(browse.read(blob, 0, most_bytes + 1))
        else:
            content = await with_sandbox(
                session,
                lambda kept: b"".join(kept.files.read(path, 0, most_bytes + 1)),
                _content,
                LOOK_SECONDS,
                is_use=False,
            )
    except InvalidConfiguration as error:
        if error.field != "path":
            raise
        return None
    return content if len(content) <= most_bytes else None


def _content(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise ProviderUnavailable("The provider did not return bytes.")
    return answer


def _inspection(answer: Any) -> Inspection:
    if not isinstance(answer, SandboxState):
        raise ProviderUnavailable("The provider did not return a state.")
    processes = [
        Running(each.pid, _text(" ".join(map(str, each.argv))), _text(each.cwd), each.exit_code)
        for each in _first(answer.processes)
        if type(each.pid) is int and type(each.exit_code) in (int, type(None))
    ]
    used = answer.cpu_seconds
    return Inspection(
        _size(answer.memory_bytes),
        float(used) if isinstance(used, int | float) and 0 <= used < _LARGEST_FIGURE else None,
        _size(answer.disk_bytes),
        _size(answer.disk_total_bytes),
        [(_text(c.id), _text(c.language), _text(c.cwd)) for c in _first(answer.contexts)],
        processes,
        max(0, len(answer.processes) - MOST_SHOWN),
    )


def _size(claimed: Any) -> int | None:
    return claimed if type(claimed) is int and 0 <= claimed < _LARGEST_FIGURE else None


def _first(rows: Iterable[Any]) -> list[Any]:
    if not isinstance(rows, list | tuple):
        raise ProviderUnavailable("The provider did not return a list.")
    return list(rows[:MOST_SHOWN])


def _text(value: Any) -> str:
    return storable(str(value)[:_MOST_CHARACTERS])
