"""Tar archives of single paths, for a provider whose sandboxes make none: read file by file."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator, Sequence
from tempfile import SpooledTemporaryFile
from typing import IO

from providers.errors import InvalidConfiguration
from providers.sandbox import FileEntry, Files

# What is held in memory of a file until it is known to be whole; what is beyond waits on the disk.
IN_MEMORY_BYTES = 1024 * 1024
_PIECE_BYTES = 64 * 1024
_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}


def pack(files: Files, path: str, only: Sequence[str]) -> Iterator[bytes]:
    """Just these paths of a folder, see `Files.read_archive`.

    A file waits until it has been read and looked at again: an archive takes nothing back.
    """
    folder = f"{path.strip('/')}/".lstrip("/")
    for name in only:
        entry = files.stat(folder + name)
        if entry is None:
            continue
        # A service may say of a link what it leads to.
        kind = "symlink" if entry.target else entry.type
        if kind != "file":
            if kind in _TYPES:
                yield _head(name, entry, kind)
            continue
        with SpooledTemporaryFile(IN_MEMORY_BYTES) as held:
            if _hold(files, entry, held):
                yield _head(name, entry, kind)
                held.seek(0)
                while piece := held.read(_PIECE_BYTES):
                    yield piece
                yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _hold(files: Files, entry: FileEntry, held: IO[bytes]) -> bool:
    """Whether all of the file could be read, and was the same before and afterwards."""
    left = entry.size
    try:
        for piece in files.read(entry.path, 0, entry.size):
            held.write(piece)
            left -= len(piece)
        return left == 0 and files.stat(entry.path) == entry
    except InvalidConfiguration:
        # It is gone, or something else by now.
        return False


def _head(name: str, entry: FileEntry, kind: str) -> bytes:
    member = tarfile.TarInfo(name)
    member.type = _TYPES[kind]
    member.size = entry.size if kind == "file" else 0
    member.mode = stat.S_IMODE(entry.mode)
    member.mtime = int(entry.modified)
    member.linkname = entry.target
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
