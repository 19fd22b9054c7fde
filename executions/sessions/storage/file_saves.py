"""Saving the files of a session: read from its sandbox, which is not trusted."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F
from django.db.models.functions import Length, Now

from executions.kernel import database
from executions.kernel.text import (
    MOST_PATH_BYTES,
    from_text,
    is_name,
    is_path,
    key_of,
    storable,
    to_text,
)
from executions.runs.models import Execution
from executions.runs.provider_calls import guard
from executions.runs.requests import Conflict
from executions.sessions.models import Session, Workspace, WorkspaceFile
from executions.sessions.requests import ensure_not_ended
from executions.sessions.session_sandbox import borrow_sandbox
from executions.sessions.storage import archives, blobs, drafts, quota
from executions.sessions.storage.tree import Tree, mode_bits
from executions.tenants.models import Tenant
from providers.errors import KeptSandboxLost, ProviderUnavailable, SandboxError
from providers.sandbox import Changes, FileEntry, KeptSandbox
from providers.waiting import submit

logger = logging.getLogger(__name__)

_MOST_SIZE = 2**60
_MOST_MARK = 200
# Before the mark of a look that could not see all: what had gone of that is told by none after it.
BLIND = "!"
_SAVED = ("file", "directory", "symlink")


@dataclass(frozen=True)
class Claimed:
    """Changes that are well-formed: each path once, and every entry something that is saved.

    What is neither file, folder nor link, or has a name that no restored file could have, is told
    as removed. Nothing below a folder that is unseen is removed.
    """

    mark: str
    entries: Mapping[str, FileEntry]
    removed: Sequence[str]
    complete: bool
    unseen: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed since the mark."""
        return not (self.complete or self.entries or self.removed or self.unseen)


def check_changes(answer: Any) -> Claimed:
    """Check the changes that a sandbox reports. Raises ProviderUnavailable for what are no changes,
    QuotaExceeded for too many."""
    mark = mark_of(answer)
    told = (answer.entries, answer.removed, answer.unseen)
    if not all(isinstance(each, list | tuple) for each in told):
        raise _none()
    unseen = frozenset(answer.unseen)
    if not all(isinstance(path, str) and (not path or is_path(path)) for path in unseen):
        raise _none()
    if len(answer.entries) > settings.SESSION_STORAGE_FILES:
        quota.check_session("", len(answer.entries), 0)
    entries: dict[str, FileEntry] = {}
    removed = []
    for entry in answer.entries:
        if not _is_entry(entry) or entry.path in entries:
            raise _none()
        if entry.type in _SAVED and is_path(entry.path) and _is_target(entry):
            entries[entry.path] = entry
        else:
            removed.append(entry.path)
    for path in answer.removed:
        if not isinstance(path, str):
            raise _none()
        if is_path(path) and path not in entries:
            removed.append(path)
    removed = [path for path in removed if is_path(path) and unseen.isdisjoint(_above(path))]
    mark = f"{BLIND}{mark}" if unseen and mark else mark
    return Claimed(mark, entries, removed, bool(answer.complete), sorted(unseen))


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts))]


def mark_of(answer: Any) -> str:
    """The mark of what are said to be changes; "" for one that cannot be kept: all is told the next
    time. Raises ProviderUnavailable.
    """
    if not isinstance(answer, Changes) or not isinstance(answer.mark, str):
        raise _none()
    mark = answer.mark
    return mark if len(mark) <= _MOST_MARK and mark.isascii() and mark.isprintable() else ""


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, FileEntry)
        and isinstance(entry.path, str)
        and isinstance(entry.target, str)
        and type(entry.size) is int
        and 0 <= entry.size <= _MOST_SIZE
        and type(entry.mode) is int
        and type(entry.modified) in (int, float)
        and math.isfinite(entry.modified)
    )


def _is_target(entry: FileEntry) -> bool:
    return entry.type != "symlink" or (
        len(entry.target) <= MOST_PATH_BYTES and is_name(entry.target)
    )


def _none() -> ProviderUnavailable:
    return ProviderUnavailable("The sandbox did not return file changes.")


ANSWER_SECONDS = 120.0
PIECE_SECONDS = 30.0


def call_in_thread(
    provider_id: str, call: Callable[[], Any], seconds: float = ANSWER_SECONDS
) -> Any:
    """Call a provider in a thread, and return its answer. Raises SandboxError; ProviderUnavailable
    for silence."""
    awaited = submit(call)
    try:
        return guard(provider_id, lambda: awaited.result(seconds))
    except NotYet:
        raise ProviderUnavailable(
            f"The provider {provider_id!r} did not answer within {seconds:g} s."
        ) from None


def changes_of(
    provider_id: str, sandbox: KeptSandbox, mark: str, *, thorough: bool = False
) -> Claimed:
    """Return what has changed since a mark that `check_changes` gave; all there is, where the look
    before could not see all and this one could: what went meanwhile was told to nobody. Raises
    SandboxError.
    """

    def look(since: str) -> Claimed:
        return check_changes(
            call_in_thread(provider_id, lambda: sandbox.files.changes(since, thorough=thorough))
        )

    found = look(mark.removeprefix(BLIND))
    if mark.startswith(BLIND) and not found.unseen and not found.complete:
        return look("")
    return found


def pieces_of(provider_id: str, begin: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Bytes that a provider streams. Raises SandboxError; ProviderUnavailable for silence."""
    pieces = call_in_thread(provider_id, begin, PIECE_SECONDS)
    while True:
        piece = call_in_thread(provider_id, lambda: next(pieces, None), PIECE_SECONDS)
        if piece is None:
            return
        if not isinstance(piece, bytes):
            raise ProviderUnavailable("The provider did not return bytes.")
        yield piece


# Of looks that others overtook, and of those after which something was not to be had.
_LOOKS = 6
_ROUNDS = 3
_PAUSE_SECONDS = 0.05
# A save that takes longer has what it named collected: see blobs.GRACE.
MOST_SECONDS = 1800.0
# What is asked for in one archive, and what is held until it goes up together.
_ASKED_PATHS, _ASKED_BYTES = 500, 128 * 1024
_HELD_FILES, _HELD_BYTES = 64, 16 * 1024 * 1024
_MOST_MISSED = 100
_KEYS_AT_ONCE = 500


@dataclass(frozen=True)
class Saved:
    """What a save found: paths, as the sandbox has them. `missed` changed while they were read, or
    cannot be read, as a folder that its program has closed. `touched` is what of the session it is
    the state of.
    """

    changed: Sequence[str]
    removed: Sequence[str]
    missed: Sequence[str]
    touched: int
    wakes: int

    @property
    def is_complete(self) -> bool:
        return not self.missed


def save(session: Session, *, thorough: bool = False) -> Saved:
    """Bring to storage what has changed in the session's sandbox. Waits, in the calling thread.

    `thorough` looks at every file. Raises Conflict where there is no sandbox now, KeptSandboxLost,
    QuotaExceeded, and ProviderUnavailable where sandbox or storage do not serve; what was saved
    before is then as it was, and the workspace says why.
    """
    changed: set[str] = set()
    removed: set[str] = set()
    missed: Sequence[str] = ()
    rounds = 0
    for _ in range(_LOOKS):
        try:
            saved = _save_once(session.pk, thorough=thorough)
        except KeptSandboxLost:
            raise
        except OSError as error:
            logger.warning("session %s could not be saved", session.pk, exc_info=error)
            away = ProviderUnavailable("The file storage cannot be written now.")
            _tell(session, away.message)
            raise away from error
        except Conflict:
            raise
        except SandboxError as error:
            _tell(session, f"{error.code}: {error.message}")
            raise
        if saved is None:
            continue
        changed |= set(saved.changed)
        removed = (removed | set(saved.removed)) - set(saved.changed)
        changed -= set(saved.removed)
        rounds += 1
        missed = saved.missed
        if saved.is_complete or rounds == _ROUNDS:
            return Saved(sorted(changed), sorted(removed), missed, saved.touched, saved.wakes)
        time.sleep(_PAUSE_SECONDS * rounds)
    raise ProviderUnavailable("Other requests keep saving the same session.", retry_after=1)


def workspace_of(session: Session, tenant: Tenant) -> Workspace:
    """The session's workspace, made where it has none yet."""
    return Workspace.objects.get_or_create(session=session, defaults={"tenant": tenant})[0]


@dataclass
class _Look:
    """One look at a sandbox, and what of it is to be committed."""

    session: Session
    workspace: Workspace
    tenant: Tenant
    open_turns: list[int]
    deadline: float = field(default_factory=lambda: time.monotonic() + MOST_SECONDS)
    rows: dict[str, WorkspaceFile] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    held: list[tuple[WorkspaceFile, blobs.Content]] = field(default_factory=list)
    held_bytes: int = 0

    def drop_held(self) -> None:
        for _, content in self.held:
            content.stream.close()
        self.held, self.held_bytes = [], 0


def _save_once(session_pk: UUID, *, thorough: bool) -> Saved | None:
    """None where there was no workspace yet, and where somebody else saved, or removed what was to
    be named, meanwhile."""
    # With the session: a version that came with its next sandbox must not go with this one.
    rows = Workspace.objects.select_related("session__tenant").defer("session__env")
    workspace = rows.filter(session=session_pk).first()
    session = None if workspace is None else workspace.session
    if session is None:
        session = Session.objects.defer("env").select_related("tenant").get(pk=session_pk)
    ensure_not_ended(session)
    tenant = session.tenant
    if session.ref is None or tenant is None or session.saves == Session.Saves.NEVER:
        raise Conflict("The session has no sandbox whose files could be saved now.")
    if workspace is None:
        workspace_of(session, tenant)
        return None
    # In this order: what ends after the row was read has touched it since.
    open_turns = Execution.objects.filter(session=session.pk, finished_at=None)
    look = _Look(
        session, workspace, tenant, sorted(filter(None, open_turns.values_list("turn", flat=True)))
    )
    with borrow_sandbox(session) as sandbox:
        claim = changes_of(session.provider, sandbox, workspace.mark, thorough=thorough)
        if claim.is_empty and not workspace.missed:
            return _note_unchanged(look, claim)
        before = _rows_before(workspace, claim)
        _check_claim(session, workspace, claim, before)
        try:
            _take_in(look, sandbox, claim, before)
            if not _is_there(session):
                return None
            _upload(look)
        finally:
            look.drop_held()
    try:
        return _commit(look, claim, before)
    except IntegrityError:
        logger.info("session %s is saved again: a blob was removed", session.pk)
        return None


def _note_unchanged(look: _Look, claim: Claimed) -> Saved | None:
    """Record a look that has found what is saved already."""
    session, workspace = look.session, look.workspace
    values = {
        "mark": claim.mark,
        "saved_at": Now(),
        "problem": "",
        "seen_turns": session.turns,
        "open_turns": look.open_turns,
    }
    with transaction.atomic():
        if not look.open_turns:
            _note_clean(session)
        mine = Workspace.objects.filter(pk=workspace.pk, version=workspace.version)
        # What a sandbox says that has been lost since is not the session's state.
        still = mine.filter(session__state=Session.State.OPEN, session__wakes=session.wakes)
        if not still.update(version=F("version") + 1, **values):
            transaction.set_rollback(True)
            return None
    return Saved([], [], [], session.touched, session.wakes)


def _note_clean(session: Session) -> None:
    """Nothing is unsaved, unless something has used the session since it was read."""
    clean = Session.objects.filter(pk=session.pk, touched=session.touched)
    clean.update(unsaved_since=None)


class _Before(NamedTuple):
    """A row that there is: its bytes, and the characters of its names."""

    size: int
    names: int


def _rows_before(workspace: Workspace, claim: Claimed) -> dict[str, _Before]:
    """By key, what of the rows that there are may be replaced or removed."""
    if not workspace.files:
        return {}
    names = Length("path") + Length("target")
    rows = workspace.rows.annotate(characters=names).values_list("key", "size", "characters")
    if claim.complete:
        return {key: _Before(*counts) for key, *counts in rows.iterator()}
    keys = [key_of(path) for path in (*claim.entries, *claim.removed, *_missed_paths(workspace))]
    found = {}
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = rows.filter(key__in=keys[start : start + _KEYS_AT_ONCE])
        found.update({key: _Before(*counts) for key, *counts in some})
    return found


def _missed_paths(workspace: Workspace) -> list[str]:
    return [from_text(text) for text in workspace.missed]


def _check_claim(
    session: Session, workspace: Workspace, claim: Claimed, before: dict[str, _Before]
) -> None:
    """Nothing is asked for that would be too much anyway."""
    keys = {key_of(path) for path in claim.entries}
    gone = {key_of(path) for path in claim.removed}
    kept = sum(row.size for key, row in before.items() if key not in keys and key not in gone)
    if claim.complete:
        total, count = 0, len(claim.entries)
    else:
        total = workspace.bytes - sum(row.size for row in before.values()) + kept
        count = workspace.files - len(before.keys() & gone) + len(keys - before.keys())
    claimed_bytes = sum(entry.size for entry in claim.entries.values() if entry.type == "file")
    quota.check_session(session.provider, count, total + claimed_bytes)


def _take_in(look: _Look, sandbox: KeptSandbox, claim: Claimed, before: dict[str, _Before]) -> None:
    wanted: dict[str, FileEntry | None] = {}
    for path, entry in claim.entries.items():
        if entry.type == "file":
            wanted[path] = entry
        else:
            look.rows[path] = _row(look.workspace, path, entry.type, entry.mode, entry)
    for path in _missed_paths(look.workspace):
        if not claim.complete and path not in claim.entries and path not in claim.removed:
            wanted.setdefault(path, None)
    # What was looked up is what is replaced or removed; without a memory of it, all.
    replaced = sum(row.size for row in before.values())
    others = 0 if claim.complete else look.workspace.bytes - replaced
    room = quota.bytes_left(look.session.provider, others)
    for batch in _batches(list(wanted)):
        room -= _take_batch(look, sandbox, batch, wanted, room)


def _is_there(session: Session) -> bool:
    """Whether what was read is the session's: a sandbox that is being removed shows what is left of
    its files, and it is removed after its session has let it go.
    """
    same = Session.objects.filter(pk=session.pk, state=Session.State.OPEN, wakes=session.wakes)
    return same.exists()


def _take_batch(
    look: _Look,
    sandbox: KeptSandbox,
    batch: Sequence[str],
    wanted: dict[str, FileEntry | None],
    room: int,
) -> int:
    """How many bytes came."""
    left = set(batch)
    taken = 0
    pieces = pieces_of(look.session.provider, lambda: sandbox.files.read_archive("", only=batch))
    for member, body in archives.members(_in_time(look, pieces)):
        if member.name not in left:
            raise ProviderUnavailable("The sandbox sent a file that was not requested.")
        if not member.is_file:
            # It became something else meanwhile: the next look tells what.
            continue
        taken += member.size
        if taken > room:
            quota.refuse_session_bytes(look.session.provider)
        left.discard(member.name)
        content = blobs.receive(body)
        row = _row(look.workspace, member.name, "file", member.mode, wanted[member.name])
        row.size, row.modified = content.size, row.modified or member.modified
        look.held.append((row, content))
        look.held_bytes += content.size
        if len(look.held) >= _HELD_FILES or look.held_bytes >= _HELD_BYTES:
            _upload(look)
    look.missed += sorted(left)
    return taken


def _in_time(look: _Look, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if time.monotonic() > look.deadline:
            raise ProviderUnavailable(f"The files were not received within {MOST_SECONDS:g} s.")
        yield piece


def _upload(look: _Look) -> None:
    if not look.held:
        return
    contents = [content for _, content in look.held]
    named = (row.blob_id for row in look.rows.values() if row.blob_id is not None)
    found = blobs.store(look.tenant, contents, spared=named)
    for row, content in look.held:
        row.blob = found[content.sha256]
        look.rows[from_text(row.path)] = row
    look.drop_held()


def _commit(look: _Look, claim: Claimed, before: dict[str, _Before]) -> Saved | None:
    workspace = look.workspace
    keys = {key_of(path): path for path in look.rows}
    missed_keys = {key_of(path) for path in look.missed}
    if claim.complete:
        # What could not be had or seen stays as it was saved last.
        gone = before.keys() - keys.keys() - missed_keys - _keys_below(workspace, claim.unseen)
        removed: list[str] = []
    else:
        removed = [path for path in claim.removed if key_of(path) not in keys]
        gone = {key_of(path) for path in removed} & before.keys()
    dropped = [before[key] for key in before.keys() & (keys.keys() | gone)]
    sizes = sum(row.size for row in look.rows.values()) - sum(row.size for row in dropped)
    names = sum(row.names for row in look.rows.values()) - sum(row.names for row in dropped)
    files = len(keys.keys() - before.keys()) - len(gone)
    missed = [to_text(path) for path in look.missed]
    not_seen = [*look.missed, *claim.unseen]
    values = {
        "files": workspace.files + files,
        "bytes": workspace.bytes + sizes,
        "names": workspace.names + names,
        "saved_at": Now(),
        "problem": _problem(not_seen),
    }
    if len(missed) <= _MOST_MISSED:
        values |= {"mark": claim.mark, "missed": missed}
    if not not_seen:
        values |= {"seen_turns": look.session.turns, "open_turns": look.open_turns}
    quota.check_session(
        look.session.provider,
        workspace.files + files,
        workspace.bytes + sizes,
        workspace.names + names if names > 0 else 0,
    )
    if claim.complete:
        removed = _paths_of(workspace, gone)
    if len(look.rows) + len(gone) > database.MOST_ROWS:
        unnamed = _replace(look, gone, values)
    else:
        with transaction.atomic():
            mine = Workspace.objects.filter(pk=workspace.pk, version=workspace.version)
            if not mine.update(version=F("version") + 1, **values):
                return None
            quota.reserve(look.tenant.pk, files=files, names=names)
            unnamed = _delete(workspace, gone)
            _write(list(look.rows.values()))
    if unnamed is None:
        return None
    session = look.session
    if not not_seen and not look.open_turns:
        # Not above: who changes both holds the session first, and would wait for this for ever.
        _note_clean(session)
    if unnamed and settings.DELETE_S3_ON_DELETE:
        blobs.remove_unnamed(look.tenant.pk, unnamed)
    return Saved(list(look.rows), removed, not_seen, session.touched, session.wakes)


def _replace(look: _Look, gone: set[str], values: dict[str, Any]) -> set[int] | None:
    """Write many rows beside what is saved, and put them in its place. The blobs that those which
    are gone named; None where somebody else saved meanwhile.
    """
    former = look.workspace
    named = set(_blobs_of(former, gone))
    written = {row.key for row in look.rows.values()}
    with drafts.draft(look.tenant) as draft:
        drafts.copy(former, draft, but=gone | written)
        drafts.add(draft, look.rows.values())
        try:
            with transaction.atomic():
                drafts.swap(former, draft, **values)
        except drafts.Overtaken:
            return None
    drafts.discard_former(former)
    return named


def _blobs_of(workspace: Workspace, keys: set[str]) -> Iterator[int]:
    listed = sorted(keys)
    for start in range(0, len(listed), _KEYS_AT_ONCE):
        rows = workspace.rows.filter(key__in=listed[start : start + _KEYS_AT_ONCE])
        yield from rows.exclude(blob=None).values_list("blob", flat=True)


def _problem(missed: Sequence[str]) -> str:
    if not missed:
        return ""
    named = storable(missed[0] or ".")[:200]
    more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
    return f"{named!r}{more} changed while it was read, or cannot be read."


def _keys_below(workspace: Workspace, folders: Sequence[str]) -> set[str]:
    tree = Tree(workspace)
    return {key for folder in folders for key in tree.below(folder).values_list("key", flat=True)}


def _paths_of(workspace: Workspace, keys: set[str]) -> list[str]:
    listed = sorted(keys)
    found: list[str] = []
    for start in range(0, len(listed), _KEYS_AT_ONCE):
        rows = workspace.rows.filter(key__in=listed[start : start + _KEYS_AT_ONCE])
        found += map(from_text, rows.values_list("path", flat=True))
    return found


def _delete(workspace: Workspace, keys: set[str]) -> set[int]:
    """The blobs that they named."""
    named: set[int] = set()
    listed = sorted(keys)
    for start in range(0, len(listed), _KEYS_AT_ONCE):
        rows = workspace.rows.filter(key__in=listed[start : start + _KEYS_AT_ONCE])
        named |= set(rows.exclude(blob=None).values_list("blob", flat=True))
        rows.delete()
    return named


def _write(rows: Sequence[WorkspaceFile]) -> None:
    WorkspaceFile.objects.bulk_create(
        blobs.by_number(rows),
        batch_size=_KEYS_AT_ONCE,
        update_conflicts=True,
        unique_fields=["workspace", "key"],
        update_fields=["type", "blob", "size", "mode", "modified", "target"],
    )


def _row(
    workspace: Workspace, path: str, kind: str, mode: int, entry: FileEntry | None
) -> WorkspaceFile:
    return WorkspaceFile(
        workspace=workspace,
        key=key_of(path),
        path=to_text(path),
        type=kind,
        mode=mode & mode_bits(kind),
        modified=entry.modified if entry is not None else 0.0,
        target=to_text(entry.target) if entry is not None and kind == "symlink" else "",
    )


def _batches(wanted: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for path in wanted:
        if batch and (len(batch) >= _ASKED_PATHS or size + len(path) > _ASKED_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += len(path)
    if batch:
        yield batch


def _tell(session: Session, problem: str) -> None:
    Workspace.objects.filter(session=session.pk).update(problem=storable(problem)[:500])
