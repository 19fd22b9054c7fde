"""Background commands of a session."""

from __future__ import annotations

from cofferdam._async.streams import AsyncRunStream
from cofferdam._async.transport import AsyncTransport
from cofferdam.calls import followed, post, post_bytes
from cofferdam.shapes import Execution, Process


class AsyncBackgroundProcess:
    """One background command. `info` is its state when it was requested."""

    def __init__(self, transport: AsyncTransport, session_path: str, info: Process) -> None:
        self._transport = transport
        self._path = f"{session_path}/processes/{info.pid}"
        self.info = info

    @property
    def pid(self) -> int:
        """The number of the command. In a new sandbox of the session numbers start at 1 again."""
        return self.info.pid

    def follow(self, after: int = 0) -> AsyncRunStream:
        """The events after event number `after`. Leaving the block cancels nothing."""
        call = followed(f"{self._path}/events", after)
        return AsyncRunStream(
            self._transport, call, detached=True, id=self.info.execution, after=after
        )

    async def wait(self) -> Execution:
        """Wait until the command has ended, and return its record."""
        async with self.follow() as events:
            return await events.until_done()

    async def write(self, data: bytes, *, close: bool = False) -> None:
        """Send at most 1 MiB to the command's input. With `close` the input ends afterwards."""
        call = post_bytes(f"{self._path}/stdin", data, close="1" if close else None)
        await self._transport.send(call)

    async def signal(self, name: str = "SIGTERM") -> bool:
        """Send a signal to the command and its process group. Returns False if it had ended."""
        found = await self._transport.json(post(f"{self._path}/signal", {"signal": name}))
        return bool(found["signalled"])

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size of the command's terminal."""
        await self._transport.send(post(f"{self._path}/resize", {"cols": cols, "rows": rows}))
