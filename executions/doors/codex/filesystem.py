"""The fs methods: files of the session's sandbox, by file: URIs.

A URI leads where its path leads a program in the sandbox, also outside of the workspace: there is
nothing of the host in it. What a client wishes of permissions (`sandbox`) is not carried out, as
for processes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from executions.doors.codex.messages import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    NOT_FOUND,
    Copy,
    Create,
    Failure,
    OnePath,
    Open,
    Paths,
    ReadBlock,
    Remove,
    Walk,
    WriteFile,
)
from executions.sessions import files
from executions.sessions.control import with_sandbox
from executions.sessions.models import Session
from executions.sessions.requests import MOST_DEPTH, FileListing
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.guest.names import escape
from providers.runtime.pool.template import WORKSPACE
from providers.sandbox import FileEntry, below_workspace
from providers.slices import decoded

# What one answer has of a file. Clients read longer ones in blocks.
MOST_FILE_BYTES = 4 * 1024 * 1024
MOST_BLOCK_BYTES = 1024 * 1024
# Of what is copied: it is in memory for a moment.
MOST_COPY_BYTES = 16 * 1024 * 1024
MOST_ENTRIES = 20_000
# Files that one connection has open.
MOST_HANDLES = 64
_WORKSPACE = FileEntry(WORKSPACE, "directory", 0, 0o755)

Answer = Mapping[str, Any]


class Handles:
    """The files that one connection has open, by the names that it gave them."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def add(self, name: str, path: str) -> None:
        """Raises Failure for a name that is taken, and for one more than there may be."""
        if name in self._paths:
            raise Failure(INVALID_REQUEST, f"file read handle {name} is already open")
        if len(self._paths) >= MOST_HANDLES:
            raise Failure(INVALID_REQUEST, f"{MOST_HANDLES} files are open. Close one.")
        self._paths[name] = path

    def path(self, name: str) -> str:
        """Raises Failure where there is none."""
        if name not in self._paths:
            raise Failure(NOT_FOUND, f"unknown file read handle {name[:32]}")
        return self._paths[name]

    def remove(self, name: str) -> None:
        self._paths.pop(name, None)


async def get_metadata(session: Session, paths: Paths, wanted: OnePath) -> Answer:
    """Return what stands under a path. Raises Failure and SandboxError, as all of these."""
    entry = await _entry(session, paths.to_path(wanted.path))
    end = entry if wanted.follow_symlinks is False else entry.end or entry
    changed = int(end.modified * 1000) if abs(end.modified) < 2**40 else 0
    return {
        **_kind(end),
        "isSymlink": entry.type == "symlink",
        "size": end.size,
        "createdAtMs": changed,
        "modifiedAtMs": changed,
    }


async def canonicalize(session: Session, paths: Paths, wanted: OnePath) -> Answer:
    """Return the path that has no links."""
    entry = await _entry(session, paths.to_path(wanted.path))
    return {"path": paths.to_uri((entry.end or entry).path)}


async def read_file(session: Session, paths: Paths, wanted: OnePath) -> Answer:
    """Return the content of a file."""
    path = paths.to_path(wanted.path)
    await _ensure_followed(session, wanted, path)
    await _file(session, path)
    data = await read_bytes(session, path, MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise Failure(
            INVALID_REQUEST,
            f"The file has more than {MOST_FILE_BYTES} bytes. Read it in blocks, with fs/open.",
        )
    return {"dataBase64": b64encode(data).decode()}


async def open_file(session: Session, paths: Paths, wanted: Open) -> str:
    """Return the path of a file that can be read."""
    path = paths.to_path(wanted.path)
    await _file(session, path)
    return path


async def read_block(session: Session, path: str, wanted: ReadBlock) -> Answer:
    """Return a part of an open file."""
    length = min(wanted.len, MOST_BLOCK_BYTES)
    data = await read_bytes(session, path, length + 1, wanted.offset)
    return {"chunk": b64encode(data[:length]).decode(), "eof": len(data) <= length}


async def write_file(session: Session, paths: Paths, wanted: WriteFile) -> Answer:
    """Put a file there, in place of what was there."""
    path = _item(paths, wanted.path)
    try:
        data = decoded(wanted.data_base64)
    except ValueError as error:
        raise Failure(INVALID_REQUEST, f"dataBase64: {error}") from None
    await _ensure_followed(session, wanted, path)
    await files.write_file(session, path, files.Rereadable(BytesIO(data)))
    return {}


async def create_directory(session: Session, paths: Paths, wanted: Create) -> Answer:
    """Make a folder, by default with those above it."""
    path = _item(paths, wanted.path)
    if wanted.recursive is False:
        await _folder(session, path.rpartition("/")[0] or "/")
    is_new = await files.make_directory(session, path)
    if not is_new and wanted.recursive is False:
        raise Failure(INVALID_REQUEST, "The folder is already there.")
    return {}


async def read_directory(session: Session, paths: Paths, wanted: OnePath) -> Answer:
    """Return what is in a folder."""
    path = paths.to_path(wanted.path)
    await _folder(session, path)
    found = await _list(session, path, 1)
    return {"entries": [{"fileName": _name(each), **_kind(each.end or each)} for each in found]}


async def walk(session: Session, paths: Paths, wanted: Walk) -> Answer:
    """Return the files and folders below a folder, as deep as the client says. No link is
    followed."""
    path, options = paths.to_path(wanted.path), wanted.options
    await _folder(session, path)
    depth = min(options.max_depth, MOST_DEPTH)
    found = await _list(session, path, depth) if depth else []
    most = min(options.max_entries, MOST_ENTRIES)
    entries = [each for each in found if each.type in ("file", "directory")]
    kinds = {"directory": "directory", "file": "file"}
    told = [{"path": paths.to_uri(each.path), "kind": kinds[each.type]} for each in entries[:most]]
    return {"entries": told, "errors": [], "truncated": len(entries) > most}


async def remove(session: Session, paths: Paths, wanted: Remove) -> Answer:
    """Remove a file, or a folder and all in it."""
    path = _item(paths, wanted.path)
    if wanted.recursive is False:
        entry = await files.entry_of(session, path)
        if entry is not None and entry.type == "directory" and await _list(session, path, 1):
            raise Failure(INVALID_REQUEST, "The folder is not empty.")
    if not await files.remove_file(session, path) and wanted.force is False:
        raise _missing(path)
    return {}


async def copy(session: Session, paths: Paths, wanted: Copy) -> Answer:
    """Copy a file, or with `recursive` a folder and all in it."""
    source = paths.to_path(wanted.source_path, "sourcePath")
    target = _item(paths, wanted.destination_path, "destinationPath")
    entry = await _entry(session, source)
    if (entry.end or entry).type == "file":
        data = await read_bytes(session, source, MOST_COPY_BYTES + 1)
        _ensure_copied(data)
        await files.write_file(session, target, files.Rereadable(BytesIO(data)))
        return {}
    if not wanted.recursive:
        raise Failure(INVALID_REQUEST, "sourcePath: Is a folder: recursive must be true.")
    if f"{target}/".startswith(f"{source.rstrip('/')}/"):
        raise Failure(INVALID_REQUEST, "destinationPath: Must not be within sourcePath.")
    data = await with_sandbox(
        session, lambda kept: _taken(kept.files.read_archive(source), MOST_COPY_BYTES + 1), _bytes
    )
    _ensure_copied(data)
    await files.make_directory(session, target)
    await files.unpack(session, target, files.Rereadable(BytesIO(data)))
    return {}


def _ensure_copied(data: bytes) -> None:
    if len(data) > MOST_COPY_BYTES:
        raise Failure(
            INVALID_REQUEST,
            f"sourcePath: Is more than {MOST_COPY_BYTES} bytes. Copy it with a command.",
        )


async def _entry(session: Session, path: str) -> FileEntry:
    if below_workspace(path) == "":
        return _WORKSPACE
    try:
        entry = await files.entry_of(session, path)
    except InvalidConfiguration as error:
        if error.field != "path":
            raise
        # Something above it is not there, or is no folder.
        raise _missing(path) from None
    if entry is None:
        raise _missing(path)
    return entry


async def _ensure_followed(session: Session, wanted: OnePath, path: str) -> None:
    """Raises Failure for a link where the client wants none to be followed."""
    if wanted.follow_symlinks is False:
        entry = await files.entry_of(session, path)
        if entry is not None and entry.type == "symlink":
            raise Failure(INVALID_REQUEST, "path: Is a symbolic link.")


async def _file(session: Session, path: str) -> None:
    entry = await _entry(session, path)
    if (kind := (entry.end or entry).type) != "file":
        raise Failure(INVALID_REQUEST, f"path: Is not a regular file, but of type {kind}.")


async def _folder(session: Session, path: str) -> None:
    entry = await _entry(session, path)
    if (entry.end or entry).type != "directory":
        raise Failure(INVALID_REQUEST, "path: Is not a folder.")


async def _list(session: Session, path: str, depth: int) -> list[FileEntry]:
    found, more = await files.list_files(
        session, FileListing(path=path, depth=depth), most=MOST_ENTRIES
    )
    if more:
        raise Failure(INVALID_REQUEST, f"path: There are more than {MOST_ENTRIES} entries.")
    return found


async def read_bytes(session: Session, path: str, length: int, offset: int = 0) -> bytes:
    """Return so many bytes of a file, or those that there are. Raises SandboxError."""
    return await with_sandbox(
        session, lambda kept: _taken(kept.files.read(path, offset, length), length), _bytes
    )


def _taken(pieces: Any, most: int) -> bytes:
    """The first bytes of what comes in pieces."""
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) >= most:
            break
    return bytes(found[:most])


def _bytes(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise ProviderUnavailable("The provider did not return bytes.")
    return answer


def _item(paths: Paths, uri: str, field: str = "path") -> str:
    path = paths.to_path(uri, field)
    if path in ("/", WORKSPACE):
        raise Failure(INVALID_PARAMS, f"{field}: Must name something in a folder.")
    return path


def _missing(path: str) -> Failure:
    return Failure(NOT_FOUND, f"No such file or directory: {escape(path)}")


def _name(entry: FileEntry) -> str:
    return escape(entry.path.rpartition("/")[2])


def _kind(entry: FileEntry) -> dict[str, bool]:
    return {"isDirectory": entry.type == "directory", "isFile": entry.type == "file"}
