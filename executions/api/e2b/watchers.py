"""What changes in a folder, as E2B's clients are told of it: as a stream, or when they ask.

Those that ask have a number, which this process alone knows: it says so to whoever asks another
one. One that was not asked for five minutes ends.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from executions.api.e2b.envelopes import message
from executions.api.e2b.errors import Refused
from executions.api.e2b.process_stream import KeptAlive
from executions.services.following import first_of
from executions.services.live import Entry
from executions.services.sessions.watching import Watch
from executions.services.waiting import Waits
from providers.errors import SandboxError
from providers.guest.names import escape
from providers.sandbox import below_workspace

_TYPES = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved": "EVENT_TYPE_RENAME",
}
UNASKED_SECONDS = 300.0
_AT_ONCE_BYTES = 256 * 1024


def event_of(entry: Entry, folder: str, *, is_recursive: bool) -> dict[str, Any] | None:
    """None for what is not told: it lies deeper than was asked for."""
    path = str((entry.said or {}).get("path", ""))
    name = _from_home(path).removeprefix(f"{_from_home(escape(folder))}/").lstrip("/")
    if "/" in name and not is_recursive:
        return None
    return {"name": name, "type": _TYPES.get(entry.type, "EVENT_TYPE_UNSPECIFIED")}


def _from_home(path: str) -> str:
    """Of the home's paths the rest. Not every provider tells of the same ones."""
    below = below_workspace(path)
    return path.rstrip("/") if below is None else below


class WatchEvents(KeptAlive):
    keepalive = message({"keepalive": {}})

    def __init__(self, folder: str, *, is_recursive: bool) -> None:
        super().__init__(message({"start": {}}))
        self._folder = folder
        self._is_recursive = is_recursive

    def line(self, entry: Entry) -> bytes:
        event = event_of(entry, self._folder, is_recursive=self._is_recursive)
        return message({"filesystem": event}) if event else b""

    def follow(self, watch: Watch, seconds: float | None) -> Waits[None]:
        """Raises what ended the watch."""
        self.begin(watch)
        try:
            yield first_of(watch.ended, self.left, seconds=seconds)
            if not (watch.ended.done() or self.left.done()):
                raise Refused(504, "deadline_exceeded", "The time of the call is over.")
        finally:
            watch.leave()
            watch.end()
        if watch.ended.done():
            watch.ended.result()
        self.end({})


@dataclass
class _Kept:
    session_id: UUID
    watch: Watch
    folder: str
    is_recursive: bool


# What the numbers of this process begin with.
_HERE = secrets.token_hex(4)
_NUMBER = re.compile("[0-9a-f]{32}", re.ASCII)
_lock = threading.Lock()
_kept: dict[str, _Kept] = {}


def keep(session_id: UUID, watch: Watch, folder: str, *, is_recursive: bool) -> str:
    """The number under which its events are asked for."""
    number = _HERE + secrets.token_hex(12)
    watch.keep_for(UNASKED_SECONDS)
    with _lock:
        for old in [old for old, each in _kept.items() if each.watch.ended.done()]:
            del _kept[old]
        _kept[number] = _Kept(session_id, watch, folder, is_recursive)
    return number


def events_of(session_id: UUID, number: Any) -> list[Mapping[str, Any]]:
    """What has happened since this was asked for last. Raises Refused where nobody watches, or
    does no more: an empty answer would say for ever that nothing happens."""
    kept = _found(session_id, number)
    kept.watch.keep_for(UNASKED_SECONDS)
    # In this order: whatever has ended by now has told all that it will.
    has_ended = kept.watch.ended.done()
    entries, _ = kept.watch.read(0, _AT_ONCE_BYTES)
    if has_ended and not entries:
        _forget(number)
        raise Refused(404, "not_found", _end_of(kept.watch))
    told = [event_of(each, kept.folder, is_recursive=kept.is_recursive) for each in entries]
    return [each for each in told if each is not None]


def remove(session_id: UUID, number: Any) -> None:
    """Raises Refused where nobody watches."""
    kept = _found(session_id, number)
    _forget(number)
    kept.watch.leave()


def _forget(number: Any) -> None:
    with _lock:
        _kept.pop(number, None)


def _end_of(watch: Watch) -> str:
    error = watch.ended.exception()
    why = f": {error.message}" if isinstance(error, SandboxError) else "."
    return f"This watcher has ended{why}"


def _found(session_id: UUID, number: Any) -> _Kept:
    with _lock:
        kept = _kept.get(number) if isinstance(number, str) else None
    if kept is not None and kept.session_id == session_id:
        return kept
    if isinstance(number, str) and _NUMBER.fullmatch(number) and not number.startswith(_HERE):
        raise Refused(
            501,
            "unimplemented",
            "This watcher is known to another process of the web server, or to one that is gone. "
            "Where there are several, watch as a stream: see docs/e2b.md.",
        )
    raise Refused(404, "not_found", "There is no such watcher.")
