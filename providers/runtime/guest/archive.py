"""Folders as tar archives, made and unpacked as they stream, links as links."""

import os
import stat
import tarfile

from .file_operations import TAKE, Draft, Event
from .kept import Refused
from .paths import (
    MOST_DEPTH,
    entry,
    named,
    open_file,
    parse,
    parse_anywhere,
    reach,
    refusal,
    shown,
    walk,
)
from .protocol import CHUNK_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any

    from .file_operations import Steps
    from .paths import Found

_BLOCK = 512
# The most that a member may say about itself before it comes.
_MOST_SAID = 64 * 1024
# Of the bits beside the rights, what makes files in a folder its group's, and its owner's alone.
FOLDER_BITS = 0o3777
# An archive that was made elsewhere may name no rights at all.
READABLE = 0o500
_ORDINARY = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}


def pack(base: int, header: "dict[str, object]") -> "Steps":
    """What is neither file, folder nor link is left out and counted as `skipped`."""
    folder = reach(base, parse_anywhere(header.get("path")))
    count = skipped = 0
    waiting = bytearray()
    try:
        for found in walk(folder, MOST_DEPTH, complete=True):
            if found is None:
                yield None
                continue
            member = member_of(found)
            if member is None:
                skipped += 1
                continue
            count += 1
            pieces = iter((head(member),)) if member.type != b"0" else _file(found, member)
            for piece in pieces:
                waiting += piece
                while len(waiting) >= CHUNK_BYTES:
                    yield Event("data", {}, bytes(waiting[:CHUNK_BYTES]))
                    del waiting[:CHUNK_BYTES]
    finally:
        os.close(folder)
    waiting += bytes(2 * _BLOCK)
    while waiting:
        yield Event("data", {}, bytes(waiting[:CHUNK_BYTES]))
        del waiting[:CHUNK_BYTES]
    return {"count": count, "skipped": skipped}


def member_of(found: "Found") -> "tarfile.TarInfo | None":
    """What is said of it in an archive, its size aside; None for what is left out."""
    if found.status is None:
        raise Refused(f"{shown(found.path)} cannot be read.", "path")
    said = entry(found.path, found.status, found.folder, found.name)
    member = tarfile.TarInfo(found.path)
    member.mode = stat.S_IMODE(found.status.st_mode)
    member.mtime = int(found.status.st_mtime)
    if said["type"] == "directory":
        member.type = tarfile.DIRTYPE
    elif said["type"] == "symlink":
        member.type, member.linkname = tarfile.SYMTYPE, str(said["target"])
    elif said["type"] == "other":
        return None
    return member


def head(member: tarfile.TarInfo) -> bytes:
    """What comes before its content."""
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _file(found: "Found", member: tarfile.TarInfo) -> "Iterator[bytes]":
    """Its head and as many bytes as it had when it was opened."""
    try:
        fd, status = open_file(found.folder, found.name)
    except OSError as error:
        said = refusal(error, "path")
        raise Refused(f"{shown(found.path)}: {said.reason}", said.field, said.code) from None
    try:
        size = member.size = status.st_size
        yield head(member)
        offset = 0
        while offset < size:
            data = os.pread(fd, min(CHUNK_BYTES, size - offset), offset)
            if not data:
                raise Refused(f"{shown(found.path)} became shorter while it was read.", "path")
            offset += len(data)
            yield data
        yield bytes(-size % _BLOCK)
    finally:
        os.close(fd)


def unpack(base: int, header: "dict[str, object]") -> "Steps":
    """Each member by itself; what is unpacked before one that is refused stays."""
    folder = reach(base, parse_anywhere(header.get("path")), make=True)
    count = 0
    stream = _Stream()
    said: "dict[str, str]" = {}
    folders: "list[tarfile.TarInfo]" = []
    try:
        while True:
            block = yield from stream.take(_BLOCK)
            if block == bytes(_BLOCK):
                break
            member = _parse(block)
            if member.type in _LONG:
                text = yield from stream.text(member)
                said[_LONG[member.type]] = os.fsdecode(text.rstrip(b"\0"))
            elif member.type == tarfile.XHDTYPE:
                said.update(_records((yield from stream.text(member))))
            elif member.type == tarfile.XGLTYPE:
                yield from stream.text(member)
            else:
                _tell(member, said)
                said = {}
                yield from _unpack_member(folder, member, stream)
                count += 1
                if member.type == tarfile.DIRTYPE:
                    folders.append(member)
        # What is unpacked into a folder needs another mode of it, and changes its time. Those below
        # come first: the last one may close the way to them.
        for member in sorted(folders, key=lambda each: each.name.count("/"), reverse=True):
            _finish_folder(folder, member)
        while (yield TAKE) is not None:
            continue
    finally:
        os.close(folder)
    return {"count": count}


class _Stream:
    """The archive's bytes, as the host sends them."""

    def __init__(self) -> None:
        self._left = b""

    def some(self, most: int) -> "Generator[Any, bytes | None, bytes]":
        """At least one byte."""
        while not self._left:
            data = yield TAKE
            if data is None:
                raise Refused("The archive ends too soon.", "data")
            self._left = data
        found, self._left = self._left[:most], self._left[most:]
        return found

    def take(self, size: int) -> "Generator[Any, bytes | None, bytes]":
        found = b""
        while len(found) < size:
            found += yield from self.some(size - len(found))
        return found

    def text(self, member: tarfile.TarInfo) -> "Generator[Any, bytes | None, bytes]":
        """What comes before a member and says something about it."""
        if member.size > _MOST_SAID:
            raise Refused("The headers of one member are too long.", "data")
        text = yield from self.take(member.size)
        yield from self.take(-member.size % _BLOCK)
        return text


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        raise Refused("Is not a tar archive, or a compressed one.", "data") from None
    if member.size < 0:
        raise Refused("The archive has a member of negative size.", "data")
    return member


def _records(text: bytes) -> "dict[str, str]":
    """The records of an extended header: each its length, a space, name=value, a line's end."""
    found = {}
    while text:
        length, _, _ = text.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(text):
            raise Refused("The archive has an invalid header.", "data")
        record, text = text[len(length) + 1 : int(length) - 1], text[int(length) :]
        name, _, value = record.partition(b"=")
        found[os.fsdecode(name)] = os.fsdecode(value)
    return found


def _tell(member: tarfile.TarInfo, said: "dict[str, str]") -> None:
    """Let what was said about a member hold."""
    if any(name.startswith("GNU.sparse") for name in said) or member.type == tarfile.GNUTYPE_SPARSE:
        raise Refused("Sparse members are not unpacked.", "data")
    member.name = said.get("path", member.name)
    member.linkname = said.get("linkpath", member.linkname)
    size = said.get("size", "0")
    if not size.isdecimal() or len(size) > 18:
        raise Refused("The archive has an invalid header.", "data")
    member.size = int(size) if "size" in said else member.size


def _unpack_member(
    folder: int, member: tarfile.TarInfo, stream: _Stream
) -> "Generator[Any, bytes | None, None]":
    try:
        parts = parse(member.name, "data")
        if member.type == tarfile.DIRTYPE:
            below = reach(folder, parts, make=True)
            try:
                if parts:
                    os.fchmod(below, member.mode & 0o777 | 0o700)
            finally:
                os.close(below)
            return
        parts = named(member.name, "data")
        below = reach(folder, parts[:-1], make=True)
        try:
            if member.type in _ORDINARY:
                yield from _unpack_file(below, parts[-1], member, stream)
            elif member.type == tarfile.SYMTYPE:
                _clear(below, parts[-1])
                os.symlink(member.linkname, parts[-1], dir_fd=below)
            elif member.type == tarfile.LNKTYPE:
                _link(folder, below, parts[-1], member)
            else:
                raise Refused("Is neither file, folder nor link.", "data")
        finally:
            os.close(below)
    except Refused as refused:
        reason = f"{shown(member.name)}: {refused.reason}"
        raise Refused(reason, refused.field and "data", refused.code) from None
    except (OSError, ValueError) as error:
        said = refusal(error, "data") if isinstance(error, OSError) else Refused(str(error))
        raise Refused(f"{shown(member.name)}: {said.reason}", "data", said.code) from None


def _finish_folder(folder: int, member: tarfile.TarInfo) -> None:
    """Give a folder the mode and the time that the archive says."""
    parts = parse(member.name, "data")
    if not parts:
        return
    try:
        below = reach(folder, parts)
    except (OSError, Refused):
        # A program has taken it away meanwhile, or has put something else there.
        return
    try:
        if 0 <= member.mtime < 1 << 33:
            os.utime(below, (member.mtime, member.mtime))
        os.fchmod(below, member.mode & FOLDER_BITS | READABLE)
    finally:
        os.close(below)


def _unpack_file(
    below: int, name: str, member: tarfile.TarInfo, stream: _Stream
) -> "Generator[Any, bytes | None, None]":
    _clear(below, name, only_links=True)
    draft = Draft(below, name)
    try:
        left = member.size
        while left:
            data = yield from stream.some(left)
            draft.add(data)
            left -= len(data)
        yield from stream.take(-member.size % _BLOCK)
        draft.finish(member.mode & 0o777)
        if 0 <= member.mtime < 1 << 33:
            os.utime(draft.fd, (member.mtime, member.mtime))
    finally:
        draft.drop()


def _clear(below: int, name: str, *, only_links: bool = False) -> None:
    """What has this name goes, unless it is a folder; that fails where it is to be replaced."""
    try:
        status = os.lstat(name, dir_fd=below)
        if stat.S_ISLNK(status.st_mode) or not only_links:
            os.unlink(name, dir_fd=below)
    except FileNotFoundError:
        return


def _link(folder: int, below: int, name: str, member: tarfile.TarInfo) -> None:
    """A second name of a file that stands below the folder already."""
    target = named(member.linkname, "data")
    source = reach(folder, target[:-1])
    try:
        if not stat.S_ISREG(os.lstat(target[-1], dir_fd=source).st_mode):
            raise Refused("Links to something that is not a regular file.", "data")
        _clear(below, name)
        os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=below, follow_symlinks=False)
    finally:
        os.close(source)
