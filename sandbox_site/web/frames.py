"""gunicorn's WebSocket, with a bound for all that a peer can draw out.

Its own bounds are the size of a message and the messages that wait. `WebSocket` adds others by
overriding methods that are not public: the version is pinned, and
tests/attacks/test_callers_sockets.py holds each override to what it is for.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gunicorn.asgi import websocket

# Of a message as text. A file in it is base64, and has three quarters of that.
MESSAGE_BYTES = 2 * 1024 * 1024
# Of whoever was not let in yet.
EARLY_BYTES = 16 * 1024
# Pieces of one message: those that are empty count for nothing in its size.
MOST_PIECES = 1024
# What waits to be sent when a ping is not answered any more.
UNSENT_BYTES = 64 * 1024
# Frames that are read before others have their turn.
FRAMES_IN_A_ROW = 64
# Without a word for so long a peer is asked whether it is there, and it is gone after twice that.
QUIET_SECONDS = 30.0
# Under which the scope has the status and the words of a refused handshake.
REFUSAL = "cofferdam.refusal"


class WebSocket(websocket.WebSocketProtocol):  # type: ignore[misc]
    """One peer's connection, from its handshake on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_message_size = EARLY_BYTES
        self._heard_at = time.monotonic()
        self._frames = 0

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            await super().run()
        finally:
            watching.cancel()
            # What it has not read is nobody's any more.
            self.transport.close()

    def feed_data(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        super().feed_data(data)

    def feed_eof(self) -> None:
        super().feed_eof()
        # What is sent from now on is for nobody.
        self.closed = True

    async def _watch(self) -> None:
        while not self.closed:
            await asyncio.sleep(QUIET_SECONDS)
            quiet = time.monotonic() - self._heard_at
            if quiet >= 2 * QUIET_SECONDS:
                self.transport.abort()
            elif self.accepted and not self.closed:
                await self._send_frame(websocket.OPCODE_PING, b"")

    async def _send_accept(self, message: Any) -> None:
        await super()._send_accept(message)
        self.max_message_size = MESSAGE_BYTES

    def _deny(self, status: int, reason: str) -> None:
        super()._deny(*self.scope.get(REFUSAL, (status, reason)))

    async def _send_frame(self, opcode: int, payload: Any) -> None:
        is_answer = opcode in (websocket.OPCODE_PING, websocket.OPCODE_PONG)
        if is_answer and self.transport.get_write_buffer_size() > UNSENT_BYTES:
            return
        await super()._send_frame(opcode, payload)

    async def _read_frame(self) -> Any:
        self._frames += 1
        if self._frames % FRAMES_IN_A_ROW == 0:
            await asyncio.sleep(0)
        frame = await super()._read_frame()
        if len(self._fragments) > MOST_PIECES:
            await self._send_close(websocket.CLOSE_POLICY_VIOLATION, "Too many pieces")
            return None
        return frame

    def _unmask(self, payload: bytes, masking_key: bytes) -> bytes:
        """In one step: a megabyte, byte by byte, would hold everybody up for 100 ms."""
        size = len(payload)
        mask = (masking_key * (size // 4 + 1))[:size]
        number = int.from_bytes(payload, "little") ^ int.from_bytes(mask, "little")
        return number.to_bytes(size, "little")


def install() -> None:
    """Have gunicorn's connections use it."""
    # Messages that wait while one is taken: each may be of the largest size.
    websocket.RECEIVE_QUEUE_HIGH_WATER = 1
    websocket.WebSocketProtocol = WebSocket
