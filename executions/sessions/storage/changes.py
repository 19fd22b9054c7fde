"""Changes of the saved files of a session that sleeps, single ones and whole archives."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

from django.db import IntegrityError, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from executions.kernel import background, database
from executions.kernel.coroutines import wait_for
from executions.kernel.text import MOST_PATH_BYTES, from_text, is_name
from executions.runs import active_runs
from executions.runs.requests import Conflict
from executions.sessions.models import Blob, Session, Workspace
from executions.sessions.requests import tenant_of
from executions.sessions.storage import archives, blobs, quota
from executions.sessions.storage.file_saves import workspace_of
from executions.sessions.storage.tree import Edit, Tree, entry_of, parts_of, refuse_for, refuse_path
from executions.sessions.storage.wake import DEAD_AFTER
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.remote.deadline import DeadlinePassed
from providers.runtime.guest.archive import READABLE
from providers.runtime.guest.paths import shown
from providers.sandbox import FileEntry
from providers.waiting import within

T = TypeVar("T")

_TRIES = 3
# How long storage may take for what is sent to it.
STORING_SECONDS = 600.0


class IsAwake(Exception):
    """The session does not sleep any more: its files are its sandbox's."""


def edit_files(session: Session, change: Callable[[Edit], T]) -> T:
    """Apply `change` to the saved files, and return its result. It may be called more than once.
    Raises IsAwake, and Conflict where others change the same files all the time."""
    moment: dict[str, Any] = {"version": F("version") + 1, "saved_at": Now()}
    for number in range(_TRIES):
        if not _asleep_row(session).exists():
            raise IsAwake
        edit = Edit(workspace_of(session, tenant_of(session)))
        try:
            found = change(edit)
        except InvalidConfiguration:
            if edit.is_current():
                raise
            continue
        if edit.is_large:
            if edit.replace(lambda: _hold(session), **moment):
                return found
            continue
        with transaction.atomic():
            _hold(session)
            if number:
                # Many change a little at the same time: each has its turn.
                workspace = Workspace.objects.select_for_update().get(session=session.pk)
                edit = Edit(workspace)
                found = change(edit)
            if not edit.is_large and edit.write_down(**moment):
                return found
    raise _conflict()


def _asleep_row(session: Session) -> QuerySet[Session]:
    """The session, if it sleeps and nobody wakes it."""
    return Session.objects.filter(
        Q(waking_since=None) | Q(waking_since__lt=timezone.now() - DEAD_AFTER),
        pk=session.pk,
        state=Session.State.ASLEEP,
        tenant__isnull=False,
    )


def _hold(session: Session) -> None:
    """Within a transaction in which it sleeps: whoever wakes it writes this row before he reads
    what is saved. Raises IsAwake.
    """
    if not _asleep_row(session).update(used_at=Now(), waking_since=None, process=None):
        raise IsAwake


def write(session: Session, path: str, content: Iterable[bytes]) -> FileEntry:
    """Put a file there, folders included. Raises IsAwake."""
    parts = parts_of(path)
    tree = Tree(Workspace.objects.filter(session=session.pk).first())
    if tree.reach(parts[:-1], "path"):
        _refuse_other_than_file(tree, parts)

    def put() -> FileEntry:
        taken = blobs.receive(content)
        with taken.stream:
            quota.check_session(session.provider, 0, taken.size)
            blob = store_contents(tenant_of(session), [taken])[taken.sha256]

        def change(edit: Edit) -> FileEntry:
            edit.make(parts[:-1], "path")
            _refuse_other_than_file(edit, parts)
            former = edit.at("/".join(parts))
            mode = 0o644 if former is None else former.mode
            row = edit.put(
                "/".join(parts), "file", blob=blob, mode=mode, modified=round(time.time(), 3)
            )
            return entry_of(row)

        return edit_files(session, change)

    return while_blobs_are_there(put)


def make_directory(session: Session, path: str) -> bool:
    """Make a folder and those above it. False when it was there. Raises IsAwake."""
    parts = parts_of(path)

    def change(edit: Edit) -> bool:
        row = edit.at("/".join(parts)) if edit.reach(parts[:-1], "path") else None
        if row is not None and row.type != "directory":
            refuse_path("path", "Something else has this name.")
        return edit.make(parts, "path")

    return edit_files(session, change)


def remove(session: Session, path: str) -> bool:
    """Remove a file, or a folder and all in it. False when it was not there. Raises IsAwake."""
    parts = parts_of(path)

    def change(edit: Edit) -> bool:
        there = edit.reach(parts[:-1], "path")
        found = "/".join(parts)
        if not there or (edit.at(found) is None and not edit.is_folder(found)):
            return False
        edit.drop(found)
        return True

    return edit_files(session, change)


def move(session: Session, source: str, target: str) -> FileEntry:
    """Rename. What was at `target` is replaced only where both are files. Raises IsAwake."""
    origin, goal = parts_of(source), parts_of(target, "target")
    old, new = "/".join(origin), "/".join(goal)

    def change(edit: Edit) -> FileEntry:
        moved = edit.at(old) if edit.reach(origin[:-1], "path") else None
        if moved is None:
            refuse_for(errno.ENOENT, "path")
        if not edit.reach(goal[:-1], "target"):
            refuse_for(errno.ENOENT, "target")
        there = edit.at(new)
        if there is not None or edit.is_folder(new):
            if there is None or not there.type == moved.type == "file":
                refuse_path(
                    "target", "A file or folder with this name exists, and is not replaced."
                )
            if new == old:
                return entry_of(moved)
        if moved.type == "directory" and new.startswith(f"{old}/"):
            refuse_for(errno.EINVAL, "target")
        if moved.type == "directory":
            edit.load_all()
        for row in [moved, *(edit.contents(old) if moved.type == "directory" else ())]:
            below = from_text(row.path)[len(old) :]
            parts_of(new + below, "target")
            edit.copy(row, new + below)
        edit.drop(old)
        return entry_of(edit.require(new))

    return edit_files(session, change)


def store_contents(
    tenant: Tenant, contents: Sequence[blobs.Content], *, spared: Collection[int] = ()
) -> dict[str, Blob]:
    """Store contents as `blobs.store` does. Raises QuotaExceeded and ProviderUnavailable."""
    try:
        return blobs.store(tenant, contents, spared=spared)
    except OSError as error:
        raise ProviderUnavailable("The file storage cannot be written now.") from error


def may_be_large(session: Session) -> bool:
    """Whether a change may write more of the session's rows than go into one transaction."""
    return Workspace.objects.filter(session=session.pk, files__gt=database.MOST_ROWS // 2).exists()


async def run_in_storage_thread(session: Session, change: Callable[[], T]) -> T:
    """Run a change that may be slow: its bytes go to storage, or its rows are many. It has a thread
    of those that are there for that, as its tenant has some of them, and none of those that serve.

    Raises what it does, and ProviderUnavailable where it takes too long; what has not begun by then
    does not begin.
    """
    is_given_up = Event()
    # Who acts is entered in the ledger.
    context = copy_context()

    def begin() -> T:
        if is_given_up.is_set():
            raise Conflict("The request was abandoned meanwhile.")
        return context.run(change)

    awaited = within(STORING_SECONDS, background.submit_keyed(object(), session.tenant_slug, begin))
    with active_runs.cancel_on_shutdown(awaited):
        await wait_for(awaited)
    if awaited.cancelled() or isinstance(awaited.exception(), DeadlinePassed):
        is_given_up.set()
        raise ProviderUnavailable(
            "The file storage did not store it in time. Check whether the file exists before you "
            "send the request again.",
            retry_after=5,
        )
    return awaited.result()


def while_blobs_are_there(change: Callable[[], T]) -> T:
    """What `change` returns, which is begun anew where others removed what it was about to name."""
    for _ in range(_TRIES):
        try:
            return change()
        except IntegrityError:
            continue
    raise _conflict()


def _conflict() -> Conflict:
    return Conflict("Another request changed the same files. Try again.", retry_after=1)


def _refuse_other_than_file(tree: Tree, parts: list[str]) -> None:
    path = "/".join(parts)
    row = tree.at(path)
    kind = "directory" if row is None and tree.is_folder(path) else row and row.type
    if kind not in (None, "file"):
        refuse_path("path", f"Not a regular file ({kind}).")


# What is held until it goes up together.
_HELD_FILES, _HELD_BYTES = 64, 16 * 1024 * 1024
_LATEST = 2**33


@dataclass(frozen=True)
class _Unpacked:
    member: archives.Member
    sha256: str


def unpack(session: Session, path: str, content: Iterable[bytes]) -> int:
    """Unpack it below a folder. How many entries it had. Raises changing.IsAwake."""
    folder = parts_of(path, is_named=False)

    def put() -> int:
        unpacked, found = _receive(session, content)

        def change(edit: Edit) -> int:
            edit.load_all()
            edit.make(folder, "path")
            for each in unpacked:
                _put(edit, folder, each.member, found.get(each.sha256))
                # Each may bring as many folders as a path can have.
                if edit.files > edit.workspace.files:
                    quota.check_session("", edit.files, 0, edit.names)
            return len(unpacked)

        return edit_files(session, change)

    return while_blobs_are_there(put)


def _receive(session: Session, content: Iterable[bytes]) -> tuple[list[_Unpacked], dict[str, Blob]]:
    """The members, and the blobs of those that are files, by their hash."""
    tenant = tenant_of(session)
    unpacked: list[_Unpacked] = []
    found: dict[str, Blob] = {}
    held: list[blobs.Content] = []
    try:
        for member, body in archives.members(iter(content)):
            # Refused before more goes up: what is too much for a session by itself.
            quota.check_session(session.provider, len(unpacked), member.size)
            if max(len(member.name.rstrip("/")), len(member.target)) > MOST_PATH_BYTES:
                refuse_path(
                    "data", f"{shown(member.name)}: A path has {MOST_PATH_BYTES} bytes at most."
                )
            sha256 = ""
            if member.is_file:
                try:
                    taken = blobs.receive(body)
                except archives.NoArchive as error:
                    refuse_path("data", f"{shown(member.name)}: {error.why}")
                held.append(taken)
                sha256 = taken.sha256
                if len(held) >= _HELD_FILES or sum(each.size for each in held) >= _HELD_BYTES:
                    _upload(tenant, held, found)
            unpacked.append(_Unpacked(member, sha256))
        _upload(tenant, held, found)
    except archives.NoArchive as error:
        refuse_path("data", error.why)
    finally:
        for taken in held:
            taken.stream.close()
    return unpacked, found


def _upload(tenant: Tenant, held: list[blobs.Content], found: dict[str, Blob]) -> None:
    if held:
        found.update(store_contents(tenant, held, spared={blob.pk for blob in found.values()}))
    for taken in held:
        taken.stream.close()
    held.clear()


def _put(edit: Edit, folder: list[str], member: archives.Member, blob: Blob | None) -> None:
    try:
        parts = parts_of(member.name, "data", is_named=member.type != "directory")
        path = "/".join([*folder, *parts])
        parts_of(path, "data", is_named=False)
        if member.type == "directory":
            edit.make([*folder, *parts], "data")
            if parts:
                mode = member.mode | READABLE
                edit.put(path, "directory", mode=mode, modified=_moment(member))
            return
        edit.make([*folder, *parts[:-1]], "data")
        if member.type == "file" and blob is not None:
            if edit.is_folder(path):
                refuse_path("data", "Not a regular file (directory).")
            edit.put(path, "file", blob=blob, mode=member.mode, modified=_moment(member))
        elif member.type == "symlink":
            _put_link(edit, path, member)
        elif member.type == "hardlink":
            _put_hardlink(edit, folder, path, member)
        else:
            refuse_path("data", "Is neither file, folder nor link.")
    except InvalidConfiguration as error:
        refuse_path("data", f"{shown(member.name)}: {error.message}")


def _moment(member: archives.Member) -> float:
    return member.modified if 0 <= member.modified < _LATEST else 0.0


def _put_link(edit: Edit, path: str, member: archives.Member) -> None:
    if edit.is_folder(path):
        refuse_for(errno.EISDIR, "data")
    if not is_name(member.target) or len(member.target) > MOST_PATH_BYTES:
        refuse_path("data", "Its link target is not valid.")
    edit.put(path, "symlink", mode=0o777, modified=_moment(member), target=member.target)


def _put_hardlink(edit: Edit, folder: list[str], path: str, member: archives.Member) -> None:
    """A second name of a file that stands below the folder already."""
    target = [*folder, *parts_of(member.target, "data")]
    row = edit.at("/".join(target)) if edit.reach(target[:-1], "data") else None
    if row is None:
        refuse_for(errno.ENOENT, "data")
    if row.type != "file":
        refuse_path("data", "Links to something that is not a regular file.")
    if edit.is_folder(path):
        refuse_for(errno.EISDIR, "data")
    edit.copy(row, path)
