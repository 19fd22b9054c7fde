"""The tree of saved files, and changes of it."""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Left

from executions.kernel import database
from executions.kernel.text import from_text, key_of, to_text
from executions.sessions.models import Blob, Workspace, WorkspaceFile
from executions.sessions.storage import drafts, quota
from executions.sessions.storage.blobs import by_number
from providers.errors import InvalidConfiguration
from providers.runtime.guest.kept import Refused
from providers.runtime.guest.paths import parse
from providers.sandbox import FileEntry, is_internal

AT_ONCE = 500


def parts_of(path: str, field: str = "path", *, is_named: bool = True) -> list[str]:
    """The names that lead there; none for the workspace itself, unless something must be named.

    Raises InvalidConfiguration for what is no path.
    """
    try:
        parts = parse(path, field)
    except Refused as error:
        refuse_path(field, error.reason)
    if is_named and not parts:
        refuse_path(field, "Must name something in the workspace.")
    return parts


def refuse_path(field: str, reason: str) -> NoReturn:
    """Raise InvalidConfiguration as a sandbox does."""
    raise InvalidConfiguration(reason, field=field)


def refuse_for(number: int, field: str) -> NoReturn:
    """Raise InvalidConfiguration in the words of the system call that would fail there."""
    reason = os.strerror(number)
    if number == errno.ELOOP:
        reason = "The path has a symbolic link, and links are not followed"
    refuse_path(field, reason)


def mode_bits(kind: str) -> int:
    """Which bits of a mode are kept: of folders also the one that makes files in them its group's,
    and the one that makes them their owner's alone."""
    return 0o3777 if kind == "directory" else 0o777


def entry_of(row: WorkspaceFile) -> FileEntry:
    target = from_text(row.target)
    size = len(target.encode("utf-8", "surrogateescape")) if row.type == "symlink" else row.size
    kind: Any = row.type
    return FileEntry(from_text(row.path), kind, size, row.mode, row.modified, target)


class Tree:
    """The rows of one workspace, by path; each is read once."""

    def __init__(self, workspace: Workspace | None) -> None:
        self.workspace = workspace
        self.rows: dict[str, WorkspaceFile | None] = {}
        # The paths of all rows there are, in order, where all have been read.
        self._paths: list[str] | None = None

    def load_all(self) -> None:
        """Read all there is at once, for who asks about many paths: each would be looked for."""
        if self.workspace is not None:
            rows = self.workspace.rows.order_by().select_related("blob")
            for row in rows.iterator(chunk_size=2000):
                self.rows.setdefault(from_text(row.path), row)
        self._paths = sorted(path for path, row in self.rows.items() if row is not None)

    def load(self, paths: Iterable[str]) -> None:
        """Read what stands under them, together."""
        wanted = {key_of(path): path for path in paths if path not in self.rows}
        self.rows.update(dict.fromkeys(wanted.values()))
        if self.workspace is None or self._paths is not None:
            return
        keys = list(wanted)
        for start in range(0, len(keys), AT_ONCE):
            found = self.workspace.rows.filter(key__in=keys[start : start + AT_ONCE])
            for row in found.select_related("blob"):
                self.rows[wanted[row.key]] = row

    def at(self, path: str) -> WorkspaceFile | None:
        if path not in self.rows:
            self.load([path])
        return self.rows[path]

    def below(self, folder: str) -> QuerySet[WorkspaceFile]:
        """All that is in a folder, however deep: compared by characters, whatever the database
        takes for the same letter.
        """
        if self.workspace is None:
            return WorkspaceFile.objects.none()
        rows = self.workspace.rows.order_by()
        if not folder:
            return rows
        head = to_text(folder) + "/"
        return rows.annotate(head=Left("path", len(head))).filter(head=head)

    def is_folder(self, path: str) -> bool:
        """Also one that nothing says of, while something stands in it."""
        row = self.at(path) if path else None
        if row is not None:
            return row.type == "directory"
        return not path or self._has_below(path)

    def _has_below(self, folder: str) -> bool:
        if self._paths is None:
            return self.below(folder).exists()
        head = f"{folder}/"
        place = bisect_left(self._paths, head)
        return place < len(self._paths) and self._paths[place].startswith(head)

    def reach(self, parts: list[str], field: str) -> bool:
        """Whether this folder is there. Raises InvalidConfiguration for what is none."""
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        self.load(above)
        for path in above:
            row = self.rows[path]
            if row is None and not self.is_folder(path):
                return False
            if row is not None and row.type == "symlink":
                refuse_for(errno.ELOOP, field)
            if row is not None and row.type == "file":
                refuse_for(errno.ENOTDIR, field)
        return True


class Edit(Tree):
    """A workspace as it will be, from what it was when its row was read."""

    workspace: Workspace

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        # What is to be written, or removed, by path; and what stood there.
        self._changed: dict[str, WorkspaceFile | None] = {}
        self._former: dict[str, WorkspaceFile | None] = {}
        self.files, self.names = workspace.files, workspace.names

    def put(
        self,
        path: str,
        kind: str,
        *,
        mode: int,
        modified: float,
        blob: Blob | None = None,
        target: str = "",
    ) -> WorkspaceFile:
        """Have this stand under a path, whatever stood there."""
        if is_internal(path):
            refuse_path("path", "Names that begin with `.cofferdam-` are reserved.")
        row = WorkspaceFile(
            workspace=self.workspace,
            key=key_of(path),
            path=to_text(path),
            type=kind,
            blob=blob,
            size=blob.size if blob is not None else 0,
            mode=mode & mode_bits(kind),
            modified=modified,
            target=to_text(target),
        )
        self._set(path, row)
        return row

    def copy(self, row: WorkspaceFile, path: str) -> None:
        """Have what `row` is stand under another path as well."""
        self.put(
            path,
            row.type,
            mode=row.mode,
            modified=row.modified,
            blob=row.blob,
            target=from_text(row.target),
        )

    def make(self, parts: list[str], field: str) -> bool:
        """Have this folder be there, and those above it. Whether it was not."""
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        self.load(above)
        made = False
        for path in above:
            row = self.rows[path]
            if row is None:
                # One that nothing says of, while something stands in it, is there.
                made = not self.is_folder(path)
                self.put(path, "directory", mode=0o755, modified=round(time.time(), 3))
            elif row.type != "directory":
                number = errno.ELOOP if row.type == "symlink" else errno.ENOTDIR
                refuse_for(number, field)
        return made

    def drop(self, path: str) -> None:
        """Have nothing stand under a path, nor below it."""
        for row in list(self.contents(path)):
            self._set(from_text(row.path), None)
        self._set(path, None)

    def contents(self, folder: str) -> Iterator[WorkspaceFile]:
        """All that stands below a folder now."""
        head = f"{folder}/"
        for row in self.below(folder).select_related("blob").iterator(chunk_size=AT_ONCE):
            path = from_text(row.path)
            if path not in self._changed:
                yield self.rows.setdefault(path, row) or row
        for path, changed in list(self._changed.items()):
            if changed is not None and path.startswith(head):
                yield changed

    def require(self, path: str) -> WorkspaceFile:
        row = self.at(path)
        if row is None:
            refuse_for(errno.ENOENT, "path")
        return row

    @property
    def is_large(self) -> bool:
        """Whether it writes more rows than a transaction may."""
        return len(self._removed_rows()) + len(self._written_rows()) > database.MOST_ROWS

    def is_current(self) -> bool:
        """Whether the workspace is still what it was when its row was read."""
        return self._same_workspace().exists()

    def write_down(self, **values: Any) -> bool:
        """Within a transaction: write it. False, and nothing is written, where others have changed
        the workspace since it was read. Raises QuotaExceeded.
        """
        counts = self._counts()
        if not self._same_workspace().update(**counts, **values):
            return False
        files, names = self.files - self.workspace.files, self.names - self.workspace.names
        quota.reserve(self.workspace.tenant_id, files=files, names=names)
        keys = [row.pk for row in self._removed_rows()]
        for start in range(0, len(keys), AT_ONCE):
            rows = WorkspaceFile.objects.filter(pk__in=keys[start : start + AT_ONCE])
            rows._raw_delete(rows.db)
        WorkspaceFile.objects.bulk_create(by_number(self._written_rows()), batch_size=AT_ONCE)
        return True

    def replace(self, hold: Callable[[], object], **values: Any) -> bool:
        """Write it beside the workspace, in short transactions, and put it in its place in the
        last one, in which `hold` is called first. As `write_down`.
        """
        counts = self._counts()
        former = self.workspace
        with drafts.draft(former.tenant) as draft:
            drafts.copy(former, draft, but={row.key for row in self._removed_rows()})
            drafts.add(draft, self._written_rows())
            try:
                with transaction.atomic():
                    hold()
                    drafts.swap(former, draft, **counts, **values)
            except drafts.Overtaken:
                return False
        drafts.discard_former(former)
        return True

    def _same_workspace(self) -> QuerySet[Workspace]:
        seen = self.workspace
        return Workspace.objects.filter(pk=seen.pk, version=seen.version, session=seen.session_id)

    def _counts(self) -> dict[str, int]:
        """How much there will be. Raises QuotaExceeded."""
        before = self.workspace
        written = sum(row.size for row in self._written_rows())
        size = written - sum(row.size for row in self._removed_rows())
        if self.files > before.files or size > 0 or self.names > before.names:
            provider = before.session.provider if before.session is not None else ""
            quota.check_session(provider, self.files, before.bytes + size, self.names)
        return {"files": self.files, "bytes": before.bytes + size, "names": self.names}

    def _removed_rows(self) -> list[WorkspaceFile]:
        return [row for row in self._former.values() if row is not None]

    def _written_rows(self) -> list[WorkspaceFile]:
        return [row for row in self._changed.values() if row is not None]

    def _set(self, path: str, row: WorkspaceFile | None) -> None:
        if path not in self._former:
            self._former[path] = self.at(path)
        before = self.at(path)
        self.files += (row is not None) - (before is not None)
        self.names += (row.names if row is not None else 0) - (before.names if before else 0)
        self._changed[path] = self.rows[path] = row
