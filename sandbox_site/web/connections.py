"""gunicorn's asgi worker, with an end to everything that a client can draw out.

The worker has no deadline for headers or slow readers, and no bound of connections. `Connection`
adds them by overriding methods of its protocol class that are not public: the version is pinned,
and tests/attacks/test_callers_serving.py holds each override to what it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
from typing import Any

from django.conf import settings
from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.workers import gasgi

from sandbox_site import draining
from sandbox_site.web.stopping import Stopping

# The request line and all headers. A browser's are some 2 KiB.
HEADER_BYTES = 64 * 1024
# How long a client may go on sending what is not read any more, and so get to read its answer.
LINGER_SECONDS = 2.0
# What sandboxes, files and the database need beside the connections.
SPARE_FILES = 2048
# An answer goes from its thread to the event loop, which should not wait for 5 ms (the default)
# until another thread lets go of the interpreter: p50 of that step was 1.2 ms and is 0.2.
SWITCH_SECONDS = 0.0005

_LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class Connection(ASGIProtocol):  # type: ignore[misc]
    """One client's. It is *owing* while the worker waits for bytes of a request from it."""

    _response_buffer: bytes | None

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_ending = False
        self._will_close_now: bool | None = None
        self.owing_since = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether something of a request is here."""
        return bool(self._header_bytes) or self._current_request is not None

    @property
    def fd(self) -> int:
        fd: int = self.transport.get_extra_info("socket").fileno()
        return fd

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._owe()
        self._await_headers()
        self.worker.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.worker.owing.pop(self, None)
        for timer in (self._header_timer, self._send_timer, self._linger_timer):
            if timer:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            # Read and dropped: otherwise the system would break the connection off, and with it
            # the answer that is on its way.
            return
        if self._current_request is None and not self._header_timer:
            self._await_headers()
        super().data_received(data)
        if self._current_request is None and not self._closed:
            self._header_bytes += len(data)
            if self._header_bytes > HEADER_BYTES:
                self._send_error_response(431, "The headers are too large.")
                self._close_transport()

    def give_up(self, farewell: bytes = b"") -> None:
        """Close it at once: what it owes does not come, or is not waited for any longer."""
        if self.has_begun:
            self._safe_write(farewell)
        self._close_transport()
        self.transport.close()
        if self._request_ready:
            # Lets the connection's task find out.
            self._request_ready.set()

    def refuse(self) -> None:
        self._safe_write(_FULL)
        self._close_transport()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.worker.loop.call_later(settings.WEB_SEND_SECONDS, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer:
            self._send_timer.cancel()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.worker.loop.call_later(
            settings.WEB_HEADER_SECONDS, self.give_up, _LATE
        )

    def _on_headers_complete(self) -> Any:
        if self._header_timer:
            self._header_timer.cancel()
            self._header_timer = None
        self._will_close_now = None
        return super()._on_headers_complete()

    def _will_close(self, request: Any, response_requires_close: bool) -> bool:
        """Decided when it is told, and kept to: a client that was not told may be using the
        connection again already, and closing it would lose that request."""
        if self._will_close_now is None:
            announced = super()._will_close(request, response_requires_close)
            self._will_close_now = announced or draining.is_draining()
        return self._will_close_now

    def _send_response_start(
        self, status: int, headers: Any, request: Any, close: bool = False
    ) -> None:
        """What says that nobody is to hold it back may have nothing to tell for long: its headers
        do not wait for that."""
        super()._send_response_start(status, headers, request, close=close)
        if any(name.lower() == b"x-accel-buffering" for name, _ in headers):
            self._safe_write(self._response_buffer)
            self._response_buffer = None

    def _on_message_complete(self) -> None:
        self.worker.owing.pop(self, None)
        super()._on_message_complete()

    def _arm_keepalive_timer(self) -> None:
        super()._arm_keepalive_timer()
        self._owe()

    def _owe(self) -> None:
        self.owing_since = time.monotonic()
        self.worker.owing[self] = None

    def _close_transport(self) -> None:
        """Half-close, and wait for the other half, but not for ever."""
        if self._is_ending or not self.transport:
            return
        self._is_ending = True
        self.worker.owing.pop(self, None)
        receiver = self._body_receiver
        is_sending = receiver is not None and not receiver._complete
        seconds = LINGER_SECONDS if is_sending else settings.WEB_SEND_SECONDS
        self._linger_timer = self.worker.loop.call_later(seconds, self._abort)
        if not is_sending or self.transport.is_closing():
            super()._close_transport()
            return
        self._closed = True
        with contextlib.suppress(OSError, RuntimeError):
            self.transport.write_eof()
            self.transport.resume_reading()

    def _abort(self) -> None:
        self.transport.abort()


class Worker(gasgi.ASGIWorker):  # type: ignore[misc]
    """Bounds its connections, and ends at once what has not begun when it is to end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owing: dict[Connection, None] = {}
        self._most = settings.WEB_CONNECTIONS
        self._serving: asyncio.Task[None] | None = None
        self._is_stopping = False

    def init_process(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = settings.WEB_CONNECTIONS + SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self._most = max(16, min(self._most, soft - SPARE_FILES, soft // 2))
        sys.setswitchinterval(SWITCH_SECONDS)
        super().init_process()

    def make_room(self, newest: Connection) -> None:
        """Close the connection that has owed for the longest where there are too many.

        Whoever sends his request at once is served, however many do not.
        """
        if self.nr_conns <= self._most:
            return
        oldest = next(iter(self.owing))
        if oldest is newest:
            newest.refuse()
        else:
            oldest.give_up(_LATE)

    async def _serve(self) -> None:
        self._serving = asyncio.current_task()
        await super()._serve()

    @property
    def is_hurried(self) -> bool:
        hurried: bool = self._quick_shutdown
        return hurried

    def handle_exit_signal(self) -> None:
        """SIGTERM, which the master sends again and again to a worker that is one too many."""
        self._stop()

    def handle_quit_signal(self) -> None:
        """SIGQUIT and SIGINT, also after SIGTERM."""
        self._quick_shutdown = True
        self._stop()

    def _stop(self) -> None:
        # gunicorn's `alive` stays: without it connections would be closed without a word.
        draining.begin()
        if self._is_stopping:
            return
        self._is_stopping = True
        if self.servers and self._serving:
            # Out of its sleep, into the shutdown.
            self._serving.cancel()
        else:
            self.alive = False

    async def _shutdown(self) -> None:
        await Stopping(self).carry_out()


gasgi.ASGIProtocol = Connection
