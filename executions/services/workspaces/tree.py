"""What stands under the paths of a saved workspace, as a sandbox would find it: a link is followed
neither on the way nor at the end, and a path that is refused there is refused here.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NoReturn

from django.db.models import QuerySet
from django.db.models.functions import Left

from executions.kernel.paths import from_text, key_of, to_text
from executions.models.workspace import Workspace, WorkspaceFile
from providers.errors import InvalidConfiguration
from providers.guest.kept import Refused
from providers.guest.paths import parse
from providers.sandbox import FileEntry

AT_ONCE = 500


def parts_of(path: str, field: str = "path", *, is_named: bool = True) -> list[str]:
    """The names that lead there; none for the workspace itself, unless something must be named.

    Raises InvalidConfiguration for what is no path.
    """
    try:
        parts = parse(path, field)
    except Refused as error:
        refuse(field, error.reason)
    if is_named and not parts:
        refuse(field, "Must name something in the workspace.")
    return parts


def refuse(field: str, reason: str) -> NoReturn:
    """Raise InvalidConfiguration as a sandbox does."""
    raise InvalidConfiguration(reason, field=field)


def refuse_for(number: int, field: str) -> NoReturn:
    """Raise InvalidConfiguration in the words of the system call that would fail there."""
    reason = os.strerror(number)
    if number == errno.ELOOP:
        reason = "The path has a symbolic link, and links are not followed"
    refuse(field, reason)


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
