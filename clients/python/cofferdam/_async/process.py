"""Commands of a session that run in the background."""

from __future__ import annotations

from cofferdam._async.streams import AsyncRunStream
from cofferdam._async.transport import AsyncTransport
from cofferdam.calls import followed, post, post_bytes
from cofferdam.shapes import Execution, Process


class AsyncBackgroundProcess:
    """One command. `info` is how it was when it was asked for."""

    def __init__(self, transport: AsyncTransport, session_path: str, info: Process) -> None:
        self._transport = transport
        self._path = f"{session_path}/processes/{info.pid}"
        self.info = info

    @property
    def pid(self) -> int:
        """Its number in this sandbox of the session. The next sandbox counts from 1 again."""
        return self.info.pid

    def follow(self, after: int = 0) -> AsyncRunStream:
        """Its events behind the one of this number. Leaving them ends nothing."""
        call = followed(f"{self._path}/events", after)
        return AsyncRunStream(
            self._transport, call, detached=True, id=self.info.execution, after=after
        )

    async def wait(self) -> Execution:
        """Its record, once it has ended."""
        async with self.follow() as events:
            return await events.until_done()

    async def write(self, data: bytes, *, close: bool = False) -> None:
        """Bytes for its input, at most 1 MiB; with `close` the input ends after them."""
        call = post_bytes(f"{self._path}/stdin", data, close="1" if close else None)
        await self._transport.send(call)

    async def signal(self, name: str = "SIGTERM") -> bool:
        """Send a signal to it and its group. Whether it was there."""
        found = await self._transport.json(post(f"{self._path}/signal", {"signal": name}))
        return bool(found["signalled"])

    async def resize(self, cols: int, rows: int) -> None:
        """Give its terminal another size."""
        await self._transport.send(post(f"{self._path}/resize", {"cols": cols, "rows": rows}))
