"""A command's output as E2B's clients read it: its number, its bytes as they come, and its end."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from uuid import UUID

from executions.api.e2b.envelopes import STREAM_TYPE, end, message
from executions.api.streams import EventStream
from executions.kernel.coroutines import Waits
from executions.runs import polling
from executions.runs.event_log import STREAMS, Entry, EventLog
from executions.runs.event_stream import Listener, Relay, first_of, following, recorded
from executions.runs.models import Execution
from executions.sessions.background_commands import record_if_ended
from executions.sessions.queries import has_ended
from providers.waiting import within
from sandbox_site import draining

_LOOK_SECONDS = 2.0
_ASK_SECONDS = 0.5
# What E2B's clients say themselves where it is their connection that breaks.
_GONE = "The sandbox was killed or reached its end of life while the request was in flight."
_LEFT_OUT = "\n[output truncated: there was more than is kept]\n"
# Who asks a sandbox whether a command has ended that nobody follows.
_askers: dict[UUID, object] = {}
_SIGNALS = {129: "hangup", 130: "interrupt", 131: "quit", 137: "killed", 143: "terminated"}


class KeptAlive(EventStream):
    """Events in envelopes, with one that says nothing where nothing has come for a while."""

    keepalive: bytes
    content_type = STREAM_TYPE
    keepalive_seconds = 30.0

    def __init__(self, opening: bytes, **options: Any) -> None:
        super().__init__(self.content_type, **options)
        self._opening = opening
        self._said_at = time.monotonic()

    def take(self) -> tuple[bytes, bool]:
        body, more = super().take()
        if self.has_begun and self._opening:
            body, self._opening = self._opening + body, b""
        if body:
            self._said_at = time.monotonic()
        elif more and self.has_begun and time.monotonic() - self._said_at >= self.keepalive_seconds:
            self._said_at = time.monotonic()
            return self.keepalive, more
        return body, more

    def changed(self) -> Future[None]:
        changed: Future[None] = Future()
        # Whichever comes first: something happened, or it is time to say that nothing has.
        within(self.keepalive_seconds, super().changed()).add_done_callback(
            lambda _: changed.set_result(None)
        )
        return changed

    def ending(self, said: Mapping[str, Any]) -> bytes:
        return end(said.get("error"))


class ProcessEvents(KeptAlive):
    keepalive = message({"event": {"keepalive": {}}})

    def __init__(self, pid: int, *, is_terminal: bool, after: int = 0) -> None:
        self.is_terminal = is_terminal
        super().__init__(b"", after=after)
        self.told_of(pid)

    def told_of(self, pid: int) -> None:
        self._opening = message({"event": {"start": {"pid": pid}}}) if pid else b""

    def line(self, entry: Entry) -> bytes:
        if entry.type not in STREAMS:
            return b""
        data = entry.data
        if not data and entry.said:
            # One that was kept as JSON.
            data = _bytes_of(entry.said)
        return self._data(entry.type, data)

    def ending(self, said: Mapping[str, Any]) -> bytes:
        left_out = self._data("stderr", _LEFT_OUT.encode()) if said.get("left_out") else b""
        last = message({"event": {"end": said["end"]}}) if "end" in said else b""
        return left_out + last + super().ending(said)

    def _data(self, stream: str, data: bytes) -> bytes:
        name = "pty" if self.is_terminal else stream
        return message({"event": {"data": {name: b64encode(data).decode()}}})


def _bytes_of(said: Mapping[str, Any]) -> bytes:
    if isinstance(kept := said.get("data_base64"), str):
        return b64decode(kept)
    return str(said.get("text", "")).encode(errors="replace")


def followed(
    execution: Execution,
    events: ProcessEvents,
    log: EventLog | None,
    listener: Listener,
    seconds: float | None = None,
) -> Waits[dict[str, Any]]:
    """Tell what a command puts out until it has ended: how, as the stream is to say it.

    Whoever leaves, or has no more time, ends nothing. Raises RateLimited where too many follow.
    """
    if log is not None:
        with listener.counted(execution.pk):
            return (yield from told_of(execution, events, log, seconds))
    yield from following(execution.pk, events, 0, listener)
    execution.refresh_from_db()
    return _end_of(execution)


def told_of(
    execution: Execution, events: ProcessEvents, log: EventLog, seconds: float | None = None
) -> Waits[dict[str, Any]]:
    """As `followed`, of a command whose log is here, for one who has a place already."""
    until = None if seconds is None else time.monotonic() + seconds
    events.begin(log)
    while not (log.closed.done() or events.left.done() or draining.is_draining()):
        if until is not None and time.monotonic() >= until:
            return _late()
        yield first_of(log.closed, events.left, seconds=_LOOK_SECONDS)
    execution.refresh_from_db()
    if _is_told(execution, log):
        return _end_of(execution)
    # There was no thread left to follow it: it is told of when it has ended.
    yield from _until_recorded(execution, events, until)
    if execution.finished_at is None:
        is_late = until is not None and time.monotonic() >= until
        return _late() if is_late else _end_of(execution)
    if log.printed("stdout") or log.printed("stderr"):
        # Somebody did follow it for a while: it is not told twice.
        return _end_of(execution)
    relay = Relay()
    relay.push([entry for entry in recorded(execution.pk) if entry.type in STREAMS])
    relay.end()
    events.begin(relay)
    return _end_of(execution)


def _is_told(execution: Execution, log: EventLog) -> bool:
    """Whether it has ended, and what it put out was heard."""
    if execution.finished_at is None:
        return False
    is_heard = log.printed("stdout") or log.printed("stderr")
    return bool(is_heard) or not (execution.stdout or execution.stderr)


def _until_recorded(
    execution: Execution, events: ProcessEvents, until: float | None
) -> Waits[None]:
    if execution.finished_at is not None:
        return
    record, me = polling.Waiter(execution.pk), object()
    with polling.poll.joined(record):
        try:
            while not (record.ended.done() or events.left.done()):
                if until is not None and time.monotonic() >= until:
                    break
                yield first_of(record.ended, events.left, seconds=_ASK_SECONDS)
                # One of those who wait asks the sandbox; the poll tells the others.
                is_mine = _askers.setdefault(execution.pk, me) is me
                if is_mine and execution.session is not None and not record.ended.done():
                    yield from record_if_ended(execution.session, execution)
                    execution.refresh_from_db()
                    if execution.finished_at is not None:
                        return
        finally:
            if _askers.get(execution.pk) is me:
                del _askers[execution.pk]
    if record.ended.done():
        record.ended.result()
    execution.refresh_from_db()


def _late() -> dict[str, Any]:
    return {"error": {"code": "deadline_exceeded", "message": "The call reached its timeout."}}


def _end_of(execution: Execution) -> dict[str, Any]:
    status, left_out = execution.status, execution.stdout_truncated or execution.stderr_truncated
    if execution.finished_at is None:
        return {
            "error": {"code": "unavailable", "message": "The service is stopping. Connect again."}
        }
    if status == Execution.Status.TIMED_OUT:
        return {"left_out": left_out, **_late()}
    if execution.exit_code is None and status == Execution.Status.OUT_OF_MEMORY:
        return {"left_out": left_out, "end": _exit(137, execution.error_message)}
    if execution.exit_code is None:
        if has_ended(execution.session_id):
            return {"error": {"code": "unavailable", "message": _GONE}}
        said = execution.error_message or "The command was ended."
        return {"error": {"code": "unavailable", "message": said}}
    return {"left_out": left_out, "end": _exit(execution.exit_code)}


def _exit(code: int, why: str = "") -> dict[str, Any]:
    signal = _SIGNALS.get(code)
    status = f"signal: {signal}" if signal else f"exit status {code}"
    said: dict[str, Any] = {"exitCode": code, "exited": signal is None, "status": status}
    return {**said, "error": why or status} if code else said
