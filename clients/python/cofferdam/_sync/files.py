# Generated from cofferdam/_async by make_sync.py: do not edit.
"""Files of a session. Paths are relative to its workspace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from cofferdam._sync.transport import Transport, reaching
from cofferdam.calls import Call, delete, get, next_of, post, put
from cofferdam.decoding import decode
from cofferdam.shapes import File


class Files:
    def __init__(self, transport: Transport, session_path: str) -> None:
        self._transport = transport
        self._path = f"{session_path}/files"

    def list(self, path: str = "", *, depth: int | None = None) -> Iterator[File]:
        """List a folder, `depth` levels deep, fetched page by page."""
        call: Call | None = get(self._path, path=path or None, depth=depth)
        while call is not None:
            page = self._transport.json(call)
            for each in page["entries"]:
                yield decode(File, each)
            call = next_of(self._path, page["next"])

    def read(self, path: str) -> bytes:
        answer = self._transport.send(get(f"{self._path}/content", path=path))
        return answer.content

    def download(self, path: str, target: BinaryIO) -> int:
        """Copy a file into an open local file, piece by piece. Returns the number of bytes."""
        return _copied(self._transport, get(f"{self._path}/content", path=path), target)

    def write(self, path: str, content: bytes | str) -> File:
        """Write a whole file. Replaces an existing one; creates missing folders."""
        data = content.encode() if isinstance(content, str) else content
        call = put(f"{self._path}/content", data, path=path)
        return decode(File, self._transport.json(call))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents."""
        self._transport.send(delete(self._path, path=path))

    def move(self, source: str, target: str) -> File:
        found = self._transport.json(post(f"{self._path}/move", {"from": source, "to": target}))
        return decode(File, found)

    def mkdir(self, path: str) -> bool:
        """Create a folder and its parents. Returns False if it existed."""
        call = post(f"{self._path}/mkdir", {"path": path}, is_repeatable=True)
        return bool((self._transport.json(call))["created"])

    def download_archive(self, target: BinaryIO, path: str = "") -> int:
        """Download a folder as a tar archive. Returns the number of bytes."""
        call = get(f"{self._path}/archive", path=path or None)
        return _copied(self._transport, call, target)

    def unpack(self, archive: bytes, path: str = "") -> int:
        """Unpack a tar archive into a folder. Returns the number of its members."""
        call = put(f"{self._path}/archive", archive, path=path or None)
        call = Call(call.method, call.path, call.params, None, archive, _TAR)
        return int((self._transport.json(call))["entries"])


_TAR = {"Content-Type": "application/x-tar"}


def _copied(transport: Transport, call: Call, target: BinaryIO) -> int:
    answer = transport.open(call)
    count = 0
    try:
        with reaching("The service"):
            for piece in answer.iter_bytes():
                target.write(piece)
                count += len(piece)
    finally:
        answer.close()
    return count
