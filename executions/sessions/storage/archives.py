"""Tar archives of saved files: read from a sandbox, which is not trusted, and made for one."""

from __future__ import annotations

import hashlib
import math
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from executions.kernel.text import from_text, storable
from executions.sessions.models import Blob, Workspace
from executions.sessions.storage import blobs
from executions.sessions.storage.tree import Tree, mode_bits
from providers.errors import ProviderUnavailable

_BLOCK = tarfile.BLOCKSIZE
# The most that an archive may say about a member before it comes: bytes, and records of headers.
_MOST_SAID, _MOST_RECORDS = 64 * 1024, 1000
_ORDINARY = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_SAYING = (*_LONG, tarfile.XHDTYPE, tarfile.XGLTYPE)

_TYPES = {
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
    **dict.fromkeys(_ORDINARY, "file"),
}


class NoArchive(ProviderUnavailable):
    """`why` what was sent is no archive."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The sandbox sent an invalid archive: {why}")
        self.why = why


@dataclass(frozen=True)
class Member:
    """What an archive says of one of its members; `modified` is seconds since 1970.

    `type` is file, directory, symlink, hardlink or other; `target` is what a link says.
    """

    name: str
    type: str
    size: int
    mode: int
    modified: float
    target: str = ""

    @property
    def is_file(self) -> bool:
        return self.type == "file"


def members(pieces: Iterator[bytes]) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Each member with its bytes, which are to be taken before the next one is asked for.

    What of them was not taken is passed over. Raises NoArchive for what is none.
    """
    stream = _Stream(pieces)
    said: dict[str, str] = {}
    left = _MOST_SAID
    while (block := stream.take(_BLOCK)) != bytes(_BLOCK):
        found = _parse(block)
        if found.type in _SAYING:
            # With its own block: there may be any number of empty ones.
            left -= _BLOCK + found.size
            if left < 0:
                raise NoArchive("The headers of one member are too long.")
            text = stream.text(found.size)
            if found.type in _LONG:
                said[_LONG[found.type]] = os.fsdecode(text.rstrip(b"\0"))
            elif found.type == tarfile.XHDTYPE:
                said.update(_records(text))
        else:
            member = _member(found, said)
            said, left = {}, _MOST_SAID
            body = stream.body(member.size)
            yield member, body
            for _ in body:
                continue
            stream.take(-member.size % _BLOCK)


class _Stream:
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def take(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            found += self._some(size - len(found))
        return bytes(found)

    def body(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self._some(size)
            size -= len(piece)
            yield piece

    def text(self, size: int) -> bytes:
        text = self.take(size)
        self.take(-size % _BLOCK)
        return text

    def _some(self, most: int) -> bytes:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                raise NoArchive("The archive ends too soon.")
            self._left = piece
        found, self._left = self._left[:most], self._left[most:]
        return found


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        raise NoArchive("Is not a tar archive, or a compressed one.") from None
    if found.size < 0:
        raise NoArchive("The archive has a member of negative size.")
    return found


def _member(found: tarfile.TarInfo, said: dict[str, str]) -> Member:
    if found.type == tarfile.GNUTYPE_SPARSE or any(n.startswith("GNU.sparse") for n in said):
        raise NoArchive("Sparse members are not unpacked.")
    kind = _TYPES.get(found.type, "other")
    size = found.size
    if (told := said.get("size")) is not None:
        if not (told.isascii() and told.isdecimal() and len(told) <= 18):
            raise NoArchive("The archive has an invalid header.")
        size = int(told)
    name = said.get("path", found.name)
    return Member(
        name,
        kind,
        size if kind == "file" else 0,
        found.mode & mode_bits(kind),
        _moment(found, said),
        said.get("linkpath", found.linkname) if kind in ("symlink", "hardlink") else "",
    )


def _moment(found: tarfile.TarInfo, said: dict[str, str]) -> float:
    try:
        moment = float(said.get("mtime", found.mtime))
    except ValueError:
        return 0.0
    return moment if math.isfinite(moment) else 0.0


def _records(text: bytes) -> dict[str, str]:
    """The records of an extended header: each its length, a space, name=value, a line's end."""
    found = {}
    start = number = 0
    while start < len(text):
        length = text[start : start + 9].partition(b" ")[0]
        size = int(length) if length.isdigit() else 0
        number += 1
        if not len(length) < size <= len(text) - start or number > _MOST_RECORDS:
            raise NoArchive("The archive has an invalid header.")
        record = text[start + len(length) + 1 : start + size - 1]
        name, _, value = record.partition(b"=")
        found[os.fsdecode(name)] = os.fsdecode(value)
        start += size
    return found


_TAR_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}
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
        head.type = _TAR_TYPES[each.type]
        head.mode = each.mode
        head.mtime = int(each.modified) if 0 <= each.modified <= _LATEST else 0
        head.linkname = each.target
        if each.blob is not None:
            head.size = each.blob.size
        yield head.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if each.blob is not None:
            yield from _check(each.path, each.blob)
            yield bytes(-each.blob.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _check(path: str, blob: Blob) -> Iterator[bytes]:
    digest = hashlib.sha256()
    try:
        for piece in blobs.read(blob):
            digest.update(piece)
            yield piece
    except (FileNotFoundError, blobs.Damaged) as error:
        raise _damage_error(path) from error
    except OSError as error:
        raise ProviderUnavailable("The file storage cannot be read now.", retry_after=5) from error
    if digest.hexdigest() != blob.sha256:
        raise _damage_error(path)


def _damage_error(path: str) -> ProviderUnavailable:
    return ProviderUnavailable(
        f"The saved file {storable(path)[:200]!r} differs from what was saved: its storage is "
        "damaged. Upload it again, or remove it, while the session sleeps."
    )


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
