"""The saved files of a session or a snapshot, looked at in storage: no sandbox is woken for it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import TypeVar

from executions.kernel.text import from_text
from executions.sessions.storage import blobs
from executions.sessions.storage.models import Blob, Workspace
from executions.sessions.storage.restore import archive_of, to_restore
from executions.sessions.storage.tree import Tree, entry_of, parts_of, refuse, refuse_for
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.sandbox import FileEntry

T = TypeVar("T")

_LOOKS = 5


def read_whole(find: Callable[[], Workspace | None], look: Callable[[Workspace | None], T]) -> T:
    """What `look` finds in the workspace that `find` returns. It looks again where a change has put
    another in its place meanwhile, whose rows are then removed. Raises what `look` does.
    """
    for _ in range(_LOOKS):
        workspace = find()
        try:
            found = look(workspace)
        except InvalidConfiguration:
            if _is_same(workspace, find()):
                raise
            continue
        if _is_same(workspace, find()):
            return found
    raise ProviderUnavailable("Other requests keep changing the files. Try again.", retry_after=1)


def _is_same(one: Workspace | None, other: Workspace | None) -> bool:
    return (one and one.pk) == (other and other.pk)


def listing(
    workspace: Workspace | None, path: str, depth: int, after: str, most: int
) -> tuple[list[FileEntry], bool]:
    """What is in a folder, `depth` levels deep and sorted by path, behind `after`: at most so many,
    and whether there are more. Raises InvalidConfiguration for what is no folder.
    """
    parts = parts_of(path, is_named=False)
    tree = Tree(workspace)
    if not tree.reach(parts, "path"):
        refuse_for(errno.ENOENT, "path")
    levels = len(parts) + depth

    def paths() -> Iterator[str]:
        texts = tree.below("/".join(parts)).values_list("path", flat=True)
        for found in map(from_text, texts.iterator(chunk_size=2000)):
            if found > after and found.count("/") < levels:
                yield found

    page = nsmallest(most + 1, paths())
    tree.load(page)
    rows = [row for found in page[:most] if (row := tree.rows[found]) is not None]
    return [entry_of(row) for row in rows], len(page) > most


def stat(workspace: Workspace | None, path: str) -> FileEntry | None:
    """One entry, the link itself where it is one; None where there is nothing."""
    parts = parts_of(path)
    tree = Tree(workspace)
    if not tree.reach(parts[:-1], "path"):
        return None
    if (row := tree.at("/".join(parts))) is not None:
        return entry_of(row)
    if tree.is_folder("/".join(parts)):
        return FileEntry("/".join(parts), "directory", 0, 0o755, 0.0, "")
    return None


def blob_at(workspace: Workspace | None, path: str) -> Blob:
    """The bytes of a regular file. Raises InvalidConfiguration where there is none."""
    parts = parts_of(path)
    tree = Tree(workspace)
    row = tree.at("/".join(parts)) if tree.reach(parts[:-1], "path") else None
    if row is None:
        refuse("path", "No such file or directory.")
    if row.blob is None:
        refuse("path", f"Is not a regular file, but: {row.type}.")
    return row.blob


def read(blob: Blob, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Raises ProviderUnavailable where storage does not give them."""
    try:
        yield from blobs.read(blob, offset, length)
    except OSError as error:
        raise ProviderUnavailable("The file storage cannot be read now.", retry_after=5) from error


def archive(workspace: Workspace | None, path: str) -> Iterator[bytes]:
    """A folder as tar, made as it is sent. Raises InvalidConfiguration for what is no folder."""
    parts = parts_of(path, is_named=False)
    if not Tree(workspace).reach(parts, "path"):
        refuse_for(errno.ENOENT, "path")
    folder = "/".join(parts)
    return archive_of(to_restore(workspace, folder) if workspace is not None else [])
