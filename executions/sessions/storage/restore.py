"""From storage to a sandbox: the saved files as one tar archive, made as it is sent."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from executions.kernel.text import from_text, storable
from executions.sessions.storage import blobs
from executions.sessions.storage.models import Blob, Workspace
from executions.sessions.storage.tree import Tree
from providers.errors import ProviderUnavailable

_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}
_LATEST = 2**33 - 1


@dataclass(frozen=True)
class Restored:
    """One member of an archive to be; `blob` is None but for a file."""

    path: str
    type: str
    mode: int
    modified: float
    target: str
    blob: Blob | None


def to_restore(workspace: Workspace, folder: str = "") -> list[Restored]:
    """All that is saved of a workspace, or of a folder of it and then relative to that, by path,
    read at once: what makes the archive of it has no connection to the database. What could not
    stand under its path, because a file or a link is on the way to it, is left out.
    """
    rows = Tree(workspace).below(folder).select_related("blob")
    head = len(folder) + 1 if folder else 0
    found = [
        Restored(
            *(from_text(row.path)[head:], row.type, row.mode, row.modified, from_text(row.target)),
            row.blob,
        )
        for row in rows.iterator(chunk_size=500)
    ]
    found.sort(key=lambda each: each.path)
    no_folders = {each.path for each in found if each.type != "directory"}
    return [each for each in found if no_folders.isdisjoint(_above(each.path))]


def archive_of(members: Sequence[Restored]) -> Iterator[bytes]:
    """The archive, in pieces. Raises ProviderUnavailable where storage has not what it should."""
    for each in members:
        head = tarfile.TarInfo(each.path)
        head.type = _TYPES[each.type]
        head.mode = each.mode
        head.mtime = int(each.modified) if 0 <= each.modified <= _LATEST else 0
        head.linkname = each.target
        if each.blob is not None:
            head.size = each.blob.size
        yield head.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if each.blob is not None:
            yield from _checked(each.path, each.blob)
            yield bytes(-each.blob.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _checked(path: str, blob: Blob) -> Iterator[bytes]:
    digest = hashlib.sha256()
    try:
        for piece in blobs.read(blob):
            digest.update(piece)
            yield piece
    except (FileNotFoundError, blobs.Damaged) as error:
        raise _damaged(path) from error
    except OSError as error:
        raise ProviderUnavailable("The file storage cannot be read now.", retry_after=5) from error
    if digest.hexdigest() != blob.sha256:
        raise _damaged(path)


def _damaged(path: str) -> ProviderUnavailable:
    return ProviderUnavailable(
        f"The saved file {storable(path)[:200]!r} differs from what was saved: its storage is "
        "damaged. Upload it again, or remove it, while the session sleeps."
    )


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
