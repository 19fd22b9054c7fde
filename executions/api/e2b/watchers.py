"""What changes in a folder, as E2B's clients are told of it: as a stream, or when they ask.

Those that ask have a number, which this process alone knows: it says so to whoever asks another
one. One that was not asked for five minutes ends.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from executions.api.e2b.envelopes import message
from executions.api.e2b.errors import Refused
from executions.api.e2b.process_stream import KeptAlive
from executions.kernel.coroutines import Waits
from executions.runs.event_log import Entry
from executions.runs.event_stream import first_of
from executions.sessions.control import done_in
from executions.sessions.file_events import Change, Watch
from executions.sessions.models import Session
from providers.errors import SandboxError
from providers.guest.names import escape
from providers.sandbox import FileEntry, below_workspace
from providers.waiting import within

_TYPES = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved": "EVENT_TYPE_RENAME",
    "attributes": "EVENT_TYPE_CHMOD",
}
UNASKED_SECONDS = 300.0
_AT_ONCE_BYTES = 256 * 1024
_ON_ITS_WAY_SECONDS = 0.05


@dataclass(frozen=True)
class Told:
    """What is told of the changes below a folder. `describe` makes of an entry what clients are
    told of it, where they asked for that."""

    folder: str
    is_recursive: bool = False
    describe: Callable[[FileEntry], dict[str, Any]] | None = None

    def events_of(self, entry: Entry) -> list[dict[str, Any]]:
        """None for what lies deeper than was asked for. What was moved is gone from where it was,
        and new where it is."""
        said = entry.said or {}
        path, former = str(said.get("path", "")), str(said.get("former", ""))
        kind = _TYPES.get(entry.type, "EVENT_TYPE_UNSPECIFIED")
        if former:
            return [*self._event(kind, former), *self._event(_TYPES["created"], path, entry)]
        return self._event(kind, path, entry)

    def _event(self, kind: str, path: str, entry: Entry | None = None) -> list[dict[str, Any]]:
        name = _from_home(path).removeprefix(f"{_from_home(escape(self.folder))}/").lstrip("/")
        if "/" in name and not self.is_recursive:
            return []
        event: dict[str, Any] = {"name": name, "type": kind}
        if self.describe is not None and isinstance(entry, Change) and entry.entry is not None:
            event["entry"] = self.describe(entry.entry)
        return [event]


def _from_home(path: str) -> str:
    """Of the home's paths the rest. Not every provider tells of the same ones."""
    below = below_workspace(path)
    return path.rstrip("/") if below is None else below


class WatchEvents(KeptAlive):
    keepalive = message({"keepalive": {}})

    def __init__(self, wanted: Told) -> None:
        super().__init__(message({"start": {}}))
        self._wanted = wanted

    def line(self, entry: Entry) -> bytes:
        events = self._wanted.events_of(entry)
        return b"".join(message({"filesystem": event}) for event in events)

    def follow(self, watch: Watch, seconds: float | None) -> Waits[None]:
        """Raises what ended the watch."""
        self.begin(watch)
        try:
            yield first_of(watch.ended, self.left, seconds=seconds)
            if not (watch.ended.done() or self.left.done()):
                raise Refused(504, "deadline_exceeded", "The call reached its timeout.")
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
    wanted: Told


# What the numbers of this process begin with.
_HERE = secrets.token_hex(4)
_NUMBER = re.compile("[0-9a-f]{32}", re.ASCII)
_lock = threading.Lock()
_kept: dict[str, _Kept] = {}


def keep(session_id: UUID, watch: Watch, wanted: Told) -> str:
    """The number under which its events are asked for."""
    number = _HERE + secrets.token_hex(12)
    watch.keep_for(UNASKED_SECONDS)
    with _lock:
        for old in [old for old, each in _kept.items() if each.watch.ended.done()]:
            del _kept[old]
        _kept[number] = _Kept(session_id, watch, wanted)
    return number


def events_of(session: Session, number: Any) -> Waits[list[dict[str, Any]]]:
    """What has happened since this was asked for last, up to now. Raises Refused where nobody
    watches, or does no more: an empty answer would say for ever that nothing happens."""
    kept = _found(session.pk, number)
    kept.watch.keep_for(UNASKED_SECONDS)
    if not kept.watch.ended.done():
        yield from _caught_up(session, kept)
    # In this order: whatever has ended by now has told all that it will.
    has_ended = kept.watch.ended.done()
    entries, _ = kept.watch.read(0, _AT_ONCE_BYTES)
    if has_ended and not entries:
        _forget(number)
        raise Refused(404, "not_found", _end_of(kept.watch))
    return [event for each in entries for event in kept.wanted.events_of(each)]


def _caught_up(session: Session, kept: _Kept) -> Waits[None]:
    """Wait until what has happened by now is told. The sandbox tells of it before it answers what
    it is asked now; what it told may still be on its way here for a moment."""
    path = kept.wanted.folder
    try:
        yield from done_in(
            session, lambda sandbox: sandbox.files.stat(path), lambda _: None, is_use=False
        )
    except SandboxError:
        # The watch itself tells why there is nothing more.
        return
    if not kept.watch.has_some:
        yield within(_ON_ITS_WAY_SECONDS, kept.watch.changed(0))
        # Who comes now and then is no reader that goes on.
        kept.watch.keep_for(UNASKED_SECONDS)


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
            "This watcher belongs to another process of the web server, or to one that has ended. "
            "With several processes, watch as a stream: see docs/e2b.md.",
        )
    raise Refused(404, "not_found", "There is no such watcher.")
