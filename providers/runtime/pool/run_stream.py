"""What a guest says while it runs something: checked, and handed on as it comes."""

from __future__ import annotations

from collections.abc import Mapping

from providers.runtime.guest.protocol import CHUNK_BYTES
from providers.runtime.guest.wire import FrameError
from providers.runtime.pool.channel import Frame
from providers.runtime.pool.claims import read_outputs
from providers.values import Emit, Event, RunLimits


class LiveRun:
    """The events of one run, and what of them is known should the guest not answer.

    A guest that counts wrongly, speaks for another request or puts out more than the run's limits
    allow breaks the protocol.
    """

    def __init__(self, request_id: int, limits: RunLimits, emit: Emit) -> None:
        self.printed = {"stdout": bytearray(), "stderr": bytearray()}
        self.outputs: list[Mapping[str, object]] = []
        self._request_id = request_id
        self._limits = limits
        self._emit = emit
        self._next = 0
        self._shown = 0
        self._room = limits.rich_output_bytes

    @property
    def has_told(self) -> bool:
        return self._next > 0

    def take(self, frame: Frame) -> None:
        """Hand one event on. Raises FrameError."""
        header, parts = frame
        if header.get("id") != self._request_id or header.get("seq") != self._next:
            raise FrameError("an event of another request, or out of order")
        self._next += 1
        kind = header.get("event")
        if kind == "stdout" or kind == "stderr":
            self._print(kind, parts)
        elif kind == "output":
            self._show(parts)
        else:
            raise FrameError("an event of an unknown kind")

    def _print(self, kind: str, parts: Mapping[str, bytes]) -> None:
        data, printed = parts.get("data", b""), self.printed[kind]
        if parts.keys() != {"data"} or not 0 < len(data) <= CHUNK_BYTES:
            raise FrameError(f"an event of {kind} with no data, or too much")
        if len(printed) + len(data) > self._limits.output_bytes:
            raise FrameError(f"more {kind} than the run may have")
        printed += data
        self._emit(Event("stdout" if kind == "stdout" else "stderr", data))

    def _show(self, parts: Mapping[str, bytes]) -> None:
        self._shown += 1
        self._room -= sum(map(len, parts.values()))
        if self._shown > self._limits.rich_output_count or self._room < 0:
            raise FrameError("more outputs than the run may have")
        named = {f"output:0:{mime}": content for mime, content in parts.items()}
        for output in read_outputs(named, self._limits):
            self.outputs.append(output)
            self._emit(Event("output", output=output))
