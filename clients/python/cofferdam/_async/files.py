"""Files of a session. Paths are relative to its workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO

from cofferdam._async.transport import AsyncTransport, reaching
from cofferdam.calls import Call, delete, get, next_of, post, put
from cofferdam.decoding import decode
from cofferdam.shapes import File


class AsyncFiles:
    def __init__(self, transport: AsyncTransport, session_path: str) -> None:
        self._transport = transport
        self._path = f"{session_path}/files"

    async def list(self, path: str = "", *, depth: int | None = None) -> AsyncIterator[File]:
        """List a folder, `depth` levels deep, fetched page by page."""
        call: Call | None = get(self._path, path=path or None, depth=depth)
        while call is not None:
            page = await self._transport.json(call)
            for each in page["entries"]:
                yield decode(File, each)
            call = next_of(self._path, page["next"])

    async def read(self, path: str) -> bytes:
        answer = await self._transport.send(get(f"{self._path}/content", path=path))
        return answer.content

    async def download(self, path: str, target: BinaryIO) -> int:
        """Copy a file into an open local file, piece by piece. Returns the number of bytes."""
        return await _copied(self._transport, get(f"{self._path}/content", path=path), target)

    async def write(self, path: str, content: bytes | str) -> File:
        """Write a whole file. Replaces an existing one; creates missing folders."""
        data = content.encode() if isinstance(content, str) else content
        call = put(f"{self._path}/content", data, path=path)
        return decode(File, await self._transport.json(call))

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents."""
        await self._transport.send(delete(self._path, path=path))

    async def move(self, source: str, target: str) -> File:
        found = await self._transport.json(
            post(f"{self._path}/move", {"from": source, "to": target})
        )
        return decode(File, found)

    async def mkdir(self, path: str) -> bool:
        """Create a folder and its parents. Returns False if it existed."""
        call = post(f"{self._path}/mkdir", {"path": path}, is_repeatable=True)
        return bool((await self._transport.json(call))["created"])

    async def download_archive(self, target: BinaryIO, path: str = "") -> int:
        """Download a folder as a tar archive. Returns the number of bytes."""
        call = get(f"{self._path}/archive", path=path or None)
        return await _copied(self._transport, call, target)

    async def unpack(self, archive: bytes, path: str = "") -> int:
        """Unpack a tar archive into a folder. Returns the number of its members."""
        call = put(f"{self._path}/archive", archive, path=path or None)
        call = Call(call.method, call.path, call.params, None, archive, _TAR)
        return int((await self._transport.json(call))["entries"])


_TAR = {"Content-Type": "application/x-tar"}


async def _copied(transport: AsyncTransport, call: Call, target: BinaryIO) -> int:
    answer = await transport.open(call)
    count = 0
    try:
        with reaching("The service"):
            async for piece in answer.aiter_bytes():
                target.write(piece)
                count += len(piece)
    finally:
        await answer.aclose()
    return count
