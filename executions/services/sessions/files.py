"""The files of a session: its sandbox's, or while it sleeps what is saved, which wakes nobody.

What a guest says is a claim, and is checked for its shape; what a name means is its to say.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from typing import IO, Any, TypeVar

from executions.models import Session, Workspace
from executions.services.asking import guarded
from executions.services.declared import refuse
from executions.services.sessions.control import done_in
from executions.services.sessions.ending import lose
from executions.services.sessions.file_requests import FileListing
from executions.services.sessions.place import OPERATION_SECONDS, counted_stream, lent_sandbox
from executions.services.waiting import Waits, at_once
from executions.services.workspaces import browsing, changing, quota
from executions.services.workspaces.paths import is_name, to_text
from executions.services.workspaces.unpacking import unpack
from providers.errors import KeptSandboxLost, ProviderUnavailable
from providers.sandbox import FileEntry, KeptSandbox
from providers.waiting import submit

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LISTED = 1000
_LARGEST = 2**53
_PIECE_BYTES = 256 * 1024
# A thread that sends a file waits so long for its next piece before it is given back.
_PIECE_SECONDS = 0.005
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def listing(
    session: Session,
    wanted: FileListing,
    seconds: float = OPERATION_SECONDS,
    *,
    is_use: bool = True,
) -> Waits[tuple[list[FileEntry], str]]:
    """What is in a folder, sorted by path, and where to go on, as a text: "" when that is all."""
    if session.state == Session.State.ASLEEP:
        page, more = _read_saved(
            session,
            lambda saved: browsing.listing(
                saved, wanted.path, wanted.depth, wanted.after, MOST_LISTED
            ),
        )
        return page, to_text(page[-1].path) if more else ""
    found: Sequence[FileEntry] = yield from done_in(
        session,
        lambda kept: kept.files.list(wanted.path, wanted.depth),
        _entries,
        seconds,
        is_use=is_use,
    )
    page = [entry for entry in found if entry.path > wanted.after]
    more = len(page) > MOST_LISTED
    page = page[:MOST_LISTED]
    return page, to_text(page[-1].path) if more else ""


def entry_of(session: Session, path: str) -> Waits[FileEntry | None]:
    """What stands under a path, a link itself where it is one; None where there is nothing."""
    if session.state == Session.State.ASLEEP:
        return _read_saved(session, lambda saved: browsing.stat(saved, path))
    return (
        yield from done_in(
            session,
            lambda kept: kept.files.stat(path),
            lambda seen: None if seen is None else _entry(seen),
        )
    )


def file_of(session: Session, path: str) -> Waits[FileEntry | None]:
    """A regular file, looked at before it is read; None where there is nothing.

    Raises InvalidConfiguration for what is no regular file, or may not be read.
    """
    entry = yield from entry_of(session, path)
    if entry is None:
        return None
    if entry.type != "file":
        refuse("path", f"Is no regular file, but: {entry.type}.")
    yield from refuse_unreadable(session, path, entry)
    return entry


def refuse_unreadable(session: Session, path: str, entry: FileEntry) -> Waits[None]:
    """Raises InvalidConfiguration for a file that may not be read: once an answer with its bytes
    has begun, nothing can be refused any more.
    """
    if entry.mode & stat.S_IRUSR or session.state == Session.State.ASLEEP:
        return
    # Root reads it all the same. Of more than was asked for nothing is taken.
    yield from done_in(
        session, lambda kept: next(iter(kept.files.read(path, 0, 1)), b""), lambda _: None
    )


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
    if session.state == Session.State.ASLEEP:
        blob = _read_saved(session, lambda saved: browsing.blob_at(saved, path))
        return _pieces(session, lambda _: browsing.read(blob, offset, length))
    return _pieces(session, _lent(session, lambda kept: kept.files.read(path, offset, length)))


def read_archive(session: Session, path: str) -> Iterator[bytes]:
    """A folder as tar, in the same way."""
    if session.state == Session.State.ASLEEP:
        archive = _read_saved(session, lambda saved: browsing.archive(saved, path))
        return _pieces(session, lambda _: archive)
    return _pieces(session, _lent(session, lambda kept: kept.files.read_archive(path)))


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


def writing(
    session: Session, path: str, content: Rereadable, *, saves: bool = True
) -> Waits[FileEntry]:
    """Put a file there, folders included. As `done_in`; raises QuotaExceeded for one that is more
    than can be saved of the session.
    """
    quota.refuse_more(session, path, content.size)
    return (
        yield from _changing(
            session,
            lambda: changing.storing(session, lambda: changing.write(session, path, content)),
            lambda kept: kept.files.write(path, content),
            _entry,
            saves=saves,
        )
    )


def unpacking(session: Session, path: str, content: Rereadable) -> Waits[int]:
    """Unpack a tar archive below a folder. How many entries it had."""
    return (
        yield from _changing(
            session,
            lambda: changing.storing(session, lambda: unpack(session, path, content)),
            lambda kept: kept.files.write_archive(content, path),
            _count,
        )
    )


def removing(session: Session, path: str) -> Waits[bool]:
    return (
        yield from _changing(
            session,
            lambda: _at_once_if_small(session, lambda: changing.remove(session, path)),
            lambda kept: kept.files.remove(path),
            _boolean,
        )
    )


def moving(session: Session, source: str, target: str) -> Waits[FileEntry]:
    return (
        yield from _changing(
            session,
            lambda: _at_once_if_small(session, lambda: changing.move(session, source, target)),
            lambda kept: kept.files.move(source, target),
            _entry,
        )
    )


def making_directory(session: Session, path: str) -> Waits[bool]:
    """False when it was there."""
    return (
        yield from _changing(
            session,
            lambda: at_once(lambda: changing.make_directory(session, path)),
            lambda kept: kept.files.make_directory(path),
            _boolean,
        )
    )


def _changing(
    session: Session,
    saved: Callable[[], Waits[T]],
    live: Callable[[KeptSandbox], Any],
    check: Callable[[Any], T],
    *,
    saves: bool = True,
) -> Waits[T]:
    """Change the files that are saved, unless there is a sandbox, or somebody asked for one."""
    if session.state == Session.State.ASLEEP:
        try:
            return (yield from saved())
        except changing.IsAwake:
            logger.info("session %s was woken: its sandbox is asked", session.pk)
    return (yield from done_in(session, live, check, changes_files=True, saves=saves))


def _at_once_if_small(session: Session, change: Callable[[], T]) -> Waits[T]:
    """A change of many rows takes its time: none of the threads that serve waits for it."""
    if changing.may_be_large(session):
        return (yield from changing.storing(session, change))
    return change()


def _read_saved(session: Session, look: Callable[[Workspace | None], T]) -> T:
    """What `look` finds in what is saved of the session."""
    return browsing.read_whole(lambda: Workspace.objects.filter(session=session.pk).first(), look)


def _lent(
    session: Session, begin: Callable[[KeptSandbox], Iterator[bytes]]
) -> Callable[[ExitStack], Iterator[bytes]]:
    def pieces(held: ExitStack) -> Iterator[bytes]:
        sandbox = held.enter_context(lent_sandbox(session))
        return guarded(session.provider, lambda: begin(sandbox))

    return pieces


def _pieces(session: Session, begin: Callable[[ExitStack], Iterator[bytes]]) -> Iterator[bytes]:
    """What is lent for it stays so until the last piece was taken, or nobody wants more.

    Raises RateLimited now, and everything else with the first piece.
    """
    pieces = _sent(session, begin)
    next(pieces)
    return pieces


def _sent(session: Session, begin: Callable[[ExitStack], Iterator[bytes]]) -> Iterator[bytes]:
    with ExitStack() as held:
        held.enter_context(counted_stream(session.tenant_slug))
        yield b""
        try:
            pieces = begin(held)
            while True:
                piece = yield from _come(submit(lambda: next(pieces, None)), held)
                if piece is None:
                    return
                if not isinstance(piece, bytes):
                    raise ProviderUnavailable("The provider gave something that is no bytes.")
                yield piece
        except KeptSandboxLost as error:
            lose(session, error.message)
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
        raise ProviderUnavailable("The provider answered with something that is no list.")
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
    ):
        raise ProviderUnavailable("The provider answered with something that is no file.")
    return answer


def _count(answer: Any) -> int:
    return answer if type(answer) is int and 0 <= answer <= _LARGEST else 0


def _boolean(answer: Any) -> bool:
    return answer is True
