"""The saved files of a session or a snapshot, links to them and previews: no sandbox is woken."""

from __future__ import annotations

import csv
import errno
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TypeVar

from django.db.models import QuerySet
from django.urls import reverse

from executions.kernel.declarations import refuse
from executions.kernel.presentation import Shown, shown
from executions.kernel.storage import (
    MOST_LINK_SECONDS,
    WORKSPACES,
    clean_filename,
    file_store,
    safe_type,
)
from executions.kernel.text import from_text
from executions.runs.artifacts import BadLink, read_token, sign_token
from executions.runs.results import SIGNATURE_BYTES, image_type
from executions.sessions.models import Blob, Workspace
from executions.sessions.storage import blobs
from executions.sessions.storage.archives import archive_of, to_restore
from executions.sessions.storage.tree import Tree, entry_of, parts_of, refuse_for, refuse_path
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.hidden_characters import visible
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


def list_folder(
    workspace: Workspace | None, path: str, depth: int, after: str, most: int
) -> tuple[list[FileEntry], bool]:
    """Return what is in a folder, `depth` levels deep and sorted by path, behind `after`: at most
    so many, and whether there are more. Raises InvalidConfiguration for what is no folder."""
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
        refuse_path("path", "No such file or directory.")
    if row.blob is None:
        refuse_path("path", f"Is not a regular file, but: {row.type}.")
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


_SALT = "executions.workspace"


@dataclass(frozen=True)
class Wanted:
    """What a link is to be to, and what it is handed out as."""

    blob: Blob
    filename: str
    mime_type: str = "application/octet-stream"


def links_to(
    tenant: Tenant,
    wanted: Sequence[Wanted],
    *,
    expires_in: int,
    absolute: Callable[[str], str] = lambda path: path,
) -> list[str | None]:
    """Where each of them can be had for `expires_in` seconds, 7 days at most, whoever removes or
    overwrites the file meanwhile. `absolute` makes a path on this service into a URL.

    None for what is not there any more, is another tenant's, or of one that is not active.
    """
    if type(expires_in) is not int or not 0 < expires_in <= MOST_LINK_SECONDS:
        refuse("expires_in", f"Must be a whole number of seconds, 1 to {MOST_LINK_SECONDS}.")
    there = blobs.keep_until_read(tenant, {each.blob.pk for each in wanted}, expires_in)
    return [_url(each, expires_in, absolute) if each.blob.pk in there else None for each in wanted]


def _url(wanted: Wanted, expires_in: int, absolute: Callable[[str], str]) -> str:
    url = file_store(WORKSPACES).link(
        str(wanted.blob.file),
        expires_in=expires_in,
        filename=wanted.filename,
        mime_type=wanted.mime_type,
    )
    if url is not None:
        return url
    # Cleaned here, so that no name makes an address longer than servers take.
    facts = [
        wanted.blob.pk,
        wanted.blob.sha256,
        clean_filename(wanted.filename),
        safe_type(wanted.mime_type),
    ]
    return absolute(reverse("workspace-link", args=[sign_token(_SALT, expires_in, *facts)]))


def target_of(token: str) -> tuple[Blob, str, str]:
    """The blob of a link of ours, and the name and type it is handed out by. Raises BadLink, also
    when its tenant is not active any more.
    """
    pk, sha256, filename, mime_type = read_token(_SALT, token, facts=3)
    # A database that was restored gives numbers again: the link is to these bytes and no others.
    blob = _of_active_tenants().filter(pk=pk, sha256=sha256).first()
    if blob is None:
        raise BadLink
    return blob, filename, mime_type


def _of_active_tenants() -> QuerySet[Blob]:
    return Blob.objects.filter(tenant__is_active=True)


# What of a file is read for a page, and how large a picture may be that is shown whole.
MOST_BYTES = 128 * 1024
MOST_IMAGE_BYTES = 8 * 1024 * 1024
MOST_ROWS, MOST_COLUMNS, _MOST_CELL = 100, 30, 200
_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Preview:
    """One of: the type of a picture, the rows of a table, or a text; none of them where nothing of
    it can be shown. `is_cut` says that there is more.
    """

    image: str = ""
    table: list[list[str]] = field(default_factory=list)
    text: Shown | None = None
    is_cut: bool = False


def preview_of(blob: Blob, path: str) -> Preview:
    """Raises ProviderUnavailable where storage does not give it."""
    return preview_of_start(b"".join(read(blob, 0, MOST_BYTES)), blob.size, path)


def preview_of_start(start: bytes, size: int, path: str) -> Preview:
    """Of the first bytes of a file that has so many."""
    if mime_type := image_type(start[:SIGNATURE_BYTES]):
        return Preview(mime_type if size <= MOST_IMAGE_BYTES else "")
    text = _decode(start, is_cut=size > len(start))
    if text is None:
        return Preview()
    delimiter = _TABLES.get(path[-4:].lower())
    if delimiter and (table := _table(text, delimiter)):
        is_wide = any(len(row) > MOST_COLUMNS for row in table)
        rows = [[visible(cell[:_MOST_CELL]) for cell in row[:MOST_COLUMNS]] for row in table]
        is_cut = size > len(start) or len(rows) > MOST_ROWS or is_wide
        return Preview(table=rows[:MOST_ROWS], is_cut=is_cut)
    return Preview(text=shown(text), is_cut=size > len(start))


def image_of(blob: Blob) -> str:
    """As what a browser may draw it: a raster image of a size that a page can have; else ""."""
    if blob.size > MOST_IMAGE_BYTES:
        return ""
    return image_type(b"".join(read(blob, 0, SIGNATURE_BYTES)))


def _decode(start: bytes, *, is_cut: bool) -> str | None:
    """Text, unless the bytes are none."""
    if b"\0" in start:
        return None
    for lost in range(4 if is_cut else 1):
        try:
            return start[: len(start) - lost].decode()
        except UnicodeDecodeError:
            continue
    return None


def _table(text: str, delimiter: str) -> list[list[str]]:
    """Its rows, one more than are shown; none for what is no table."""
    rows = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            rows.append(row)
            if len(rows) > MOST_ROWS:
                break
    except csv.Error:
        return []
    return rows
