"""A tar archive that a sandbox sends, member by member: bounded, and believed in nothing."""

from __future__ import annotations

import math
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from executions.sessions.storage.tree import mode_bits
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
        found = _parsed(block)
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


def _parsed(block: bytes) -> tarfile.TarInfo:
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
