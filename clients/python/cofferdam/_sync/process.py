# Generated from cofferdam/_async by make_sync.py: do not edit.
"""Background commands of a session."""

from __future__ import annotations

from cofferdam._sync.streams import RunStream
from cofferdam._sync.transport import Transport
from cofferdam.calls import followed, post, post_bytes
from cofferdam.shapes import Execution, Process


class BackgroundProcess:
    """One background command. `info` is its state when it was requested."""

    def __init__(self, transport: Transport, session_path: str, info: Process) -> None:
        self._transport = transport
        self._path = f"{session_path}/processes/{info.pid}"
        self.info = info

    @property
    def pid(self) -> int:
        """The number of the command. In a new sandbox of the session numbers start at 1 again."""
        return self.info.pid

    def follow(self, after: int = 0) -> RunStream:
        """The events after event number `after`. Leaving the block cancels nothing."""
        call = followed(f"{self._path}/events", after)
        return RunStream(self._transport, call, detached=True, id=self.info.execution, after=after)

    def wait(self) -> Execution:
        """Wait until the command has ended, and return its record."""
        with self.follow() as events:
            return events.until_done()

    def write(self, data: bytes, *, close: bool = False) -> None:
        """Send at most 1 MiB to the command's input. With `close` the input ends afterwards."""
        call = post_bytes(f"{self._path}/stdin", data, close="1" if close else None)
        self._transport.send(call)

    def signal(self, name: str = "SIGTERM") -> bool:
        """Send a signal to the command and its process group. Returns False if it had ended."""
        found = self._transport.json(post(f"{self._path}/signal", {"signal": name}))
        return bool(found["signalled"])

    def resize(self, cols: int, rows: int) -> None:
        """Change the size of the command's terminal."""
        self._transport.send(post(f"{self._path}/resize", {"cols": cols, "rows": rows}))
