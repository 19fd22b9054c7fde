"""gunicorn's asgi worker, with an end to everything that a client can draw out.

The worker has no deadline for headers or slow readers, and no bound of connections. `Connection`
adds them by overriding methods of its protocol class that are not public: the version is pinned,
and tests/attacks/test_callers_serving.py holds each override to what it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from http import HTTPStatus
from typing import Any

from django.conf import settings
from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.workers import gasgi

from providers import draining
from sandbox_site.client_address import counted_address
from sandbox_site.web import frames
from sandbox_site.web.places import RETRY_SECONDS, most_connections, spare_of
from sandbox_site.web.stopping import Stopping, is_readable

# The request line and all headers. A browser's are some 2 KiB.
HEADER_BYTES = 64 * 1024
# How long a client may go on sending what is not read any more, and so get to read its answer.
LINGER_SECONDS = 2.0
# An answer goes from its thread to the event loop, which should not wait for 5 ms (the default)
# until another thread lets go of the interpreter: p50 of that step was 1.2 ms and is 0.2.
SWITCH_SECONDS = 0.0005

_CODES = {408: "request_timeout", 500: "internal_error", 503: "SB009"}


def _refusal(status: int, message: str, *headers: str) -> bytes:
    """In the shape of the API's errors. What is refused here has no request, or half of one."""
    known = {"ran": False} if status == 503 else {}
    error = {"code": _CODES.get(status, "bad_request"), "message": message, "field": None, **known}
    body = json.dumps({"error": error, "id": None}, separators=(",", ":")).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


_LATE = _refusal(408, "The request was not received in time.")
_FULL = _refusal(
    503, "The service has reached its limit of connections.", f"Retry-After: {RETRY_SECONDS}"
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
        self._is_refused = False
        self.owing_since = 0.0
        # Who is at the other end; "" for a trusted proxy, behind which there are many.
        self.peer = ""

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
        self.peer = counted_address({"REMOTE_ADDR": _host_of(transport)})
        self._owe()
        self._await_headers()
        self.worker.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._flow_control:
            # Whoever waits for room to write finds out that there is no peer any more.
            self._flow_control.resume_writing()
        self.worker.settle(self)
        self.worker.ending.pop(self, None)
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
        """Answer that there is no room, and let the client read it."""
        self._is_refused = True
        self._safe_write(_FULL)
        self._close_transport()
        if self._request_ready:
            self._request_ready.set()

    def abort(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.worker.loop.call_later(settings.WEB_SEND_SECONDS, self.abort)

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

    def _send_error_response(self, status: int, message: str, extra_headers: Any = ()) -> None:
        more = [f"{name}: {value}" for name, value in extra_headers]
        self._safe_write(_refusal(status, message, *more))

    def _on_message_complete(self) -> None:
        self.worker.settle(self)
        super()._on_message_complete()

    def _arm_keepalive_timer(self) -> None:
        super()._arm_keepalive_timer()
        self._owe()

    def _owe(self) -> None:
        self.owing_since = time.monotonic()
        self.worker.owe(self)

    def _close_transport(self) -> None:
        """Half-close, and wait for the other half, but not for ever."""
        if self._is_ending or not self.transport:
            return
        self._is_ending = True
        self.worker.settle(self)
        self.worker.ending[self] = None
        receiver = self._body_receiver
        is_sending = self._is_refused or (receiver is not None and not receiver._complete)
        seconds = LINGER_SECONDS if is_sending else settings.WEB_SEND_SECONDS
        self._linger_timer = self.worker.loop.call_later(seconds, self.abort)
        if not is_sending or self.transport.is_closing():
            super()._close_transport()
            return
        self._closed = True
        with contextlib.suppress(OSError, RuntimeError):
            self.transport.write_eof()
            self.transport.resume_reading()


def _host_of(transport: Any) -> str:
    """A Unix socket has no address, and neither have its clients."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


class Worker(gasgi.ASGIWorker):  # type: ignore[misc]
    """Bounds its connections, and ends at once what has not begun when it is to end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owing: dict[Connection, None] = {}
        # Those that are being closed, and wait for their clients to read the last of it.
        self.ending: dict[Connection, None] = {}
        self._owed_by: Counter[str] = Counter()
        self._most = 0
        self._serving: asyncio.Task[None] | None = None
        self._is_stopping = False

    def init_process(self) -> None:
        most = most_connections()
        # Beyond the usual ones there is room to read what is asked for: the bridge refuses what is
        # neither for the admin nor a probe.
        self._most = most + spare_of(most)
        sys.setswitchinterval(SWITCH_SECONDS)
        super().init_process()

    def owe(self, connection: Connection) -> None:
        if connection not in self.owing:
            self.owing[connection] = None
            self._owed_by[connection.peer] += 1

    def settle(self, connection: Connection) -> None:
        """It owes nothing, or nothing is waited for any longer."""
        if connection in self.owing:
            del self.owing[connection]
            self._owed_by[connection.peer] -= 1
            if not self._owed_by[connection.peer]:
                del self._owed_by[connection.peer]

    def make_room(self, newest: Connection) -> None:
        """Close a connection where there are too many: of the peer that most connections owe a
        request of, the one that has for the longest.

        Whoever sends his request at once is served, however many do not.
        """
        if self.nr_conns <= self._most:
            return
        peer = max(self._owed_by, key=self._owed_by.__getitem__)
        oldest = next(each for each in self.owing if each.peer == peer)
        if len(self.ending) > self._owed_by[peer]:
            next(iter(self.ending)).abort()
        elif oldest is newest or (not oldest.has_begun and is_readable(oldest.fd)):
            # Its request may be here, and was not looked at yet.
            oldest.refuse()
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
frames.install()
