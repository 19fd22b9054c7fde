"""Changes to the rows of a workspace: gathered first, counted, and then written down together.

Few are written in one transaction. Many are written beside what is saved (`drafts`).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from executions.kernel import batches
from executions.kernel.paths import from_text, key_of, to_text
from executions.models.workspace import Blob, Workspace, WorkspaceFile
from executions.services.workspaces import drafts, quota
from executions.services.workspaces.blobs import by_number
from executions.services.workspaces.tree import AT_ONCE, Tree, mode_bits, refuse, refuse_for
from providers.sandbox import is_internal


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
            refuse("path", "Names that begin with `.cofferdam-` are reserved.")
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

    def known(self, path: str) -> WorkspaceFile:
        row = self.at(path)
        if row is None:
            refuse_for(errno.ENOENT, "path")
        return row

    @property
    def is_large(self) -> bool:
        """Whether it writes more rows than a transaction may."""
        return len(self._removed()) + len(self._written()) > batches.MOST_ROWS

    def is_current(self) -> bool:
        """Whether the workspace is still what it was when its row was read."""
        return self._unchanged().exists()

    def write_down(self, **values: Any) -> bool:
        """Within a transaction: write it. False, and nothing is written, where others have changed
        the workspace since it was read. Raises QuotaExceeded.
        """
        counts = self._counts()
        if not self._unchanged().update(**counts, **values):
            return False
        files, names = self.files - self.workspace.files, self.names - self.workspace.names
        quota.reserve(self.workspace.tenant_id, files=files, names=names)
        keys = [row.pk for row in self._removed()]
        for start in range(0, len(keys), AT_ONCE):
            rows = WorkspaceFile.objects.filter(pk__in=keys[start : start + AT_ONCE])
            rows._raw_delete(rows.db)
        WorkspaceFile.objects.bulk_create(by_number(self._written()), batch_size=AT_ONCE)
        return True

    def replace(self, hold: Callable[[], object], **values: Any) -> bool:
        """Write it beside the workspace, in short transactions, and put it in its place in the
        last one, in which `hold` is called first. As `write_down`.
        """
        counts = self._counts()
        former = self.workspace
        with drafts.draft(former.tenant) as draft:
            drafts.copy(former, draft, but={row.key for row in self._removed()})
            drafts.add(draft, self._written())
            try:
                with transaction.atomic():
                    hold()
                    drafts.put_in_place(former, draft, **counts, **values)
            except drafts.Overtaken:
                return False
        drafts.discard_former(former)
        return True

    def _unchanged(self) -> QuerySet[Workspace]:
        seen = self.workspace
        return Workspace.objects.filter(pk=seen.pk, version=seen.version, session=seen.session_id)

    def _counts(self) -> dict[str, int]:
        """How much there will be. Raises QuotaExceeded."""
        before = self.workspace
        size = sum(row.size for row in self._written()) - sum(row.size for row in self._removed())
        if self.files > before.files or size > 0 or self.names > before.names:
            provider = before.session.provider if before.session is not None else ""
            quota.check_session(provider, self.files, before.bytes + size, self.names)
        return {"files": self.files, "bytes": before.bytes + size, "names": self.names}

    def _removed(self) -> list[WorkspaceFile]:
        return [row for row in self._former.values() if row is not None]

    def _written(self) -> list[WorkspaceFile]:
        return [row for row in self._changed.values() if row is not None]

    def _set(self, path: str, row: WorkspaceFile | None) -> None:
        if path not in self._former:
            self._former[path] = self.at(path)
        before = self.at(path)
        self.files += (row is not None) - (before is not None)
        self.names += (row.names if row is not None else 0) - (before.names if before else 0)
        self._changed[path] = self.rows[path] = row
