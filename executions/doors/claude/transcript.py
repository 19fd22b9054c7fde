"""What is known of the tool calls of an agent's session, by its events.

Events come more than once: each history begins at the first one. Nothing is forgotten of a call,
so that none is carried out after it was answered, denied, or given up.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# They neither say that an agent works nor that it waits.
_NEUTRAL = ("user.tool_confirmation", "session.thread_status_terminated")
# Ids and names are in logs and records, too.
_ID = re.compile(r"[!-~]{1,256}")
_OVER = ("session.status_terminated", "session.deleted")
_RESULTS = ("user.tool_result", "agent.tool_result")
# Of one session: events, calls that are open, and characters of what these give to their tools.
MOST_EVENTS, MOST_OPEN, MOST_GIVEN = 500_000, 20_000, 64 * 1024 * 1024


class TooManyCalls(Exception):
    """The session is larger than a worker can keep."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a built-in tool. `asks` says that a person has to allow it. `size` is how many
    characters `given` has as JSON."""

    id: str
    name: str
    given: Mapping[str, Any]
    asks: bool
    is_refused: bool
    thread: str
    size: int


class Transcript:
    """The calls of one session, for the thread that carries them out and the one that reads.

    `names` are the tools that are ours. A call of another tool is the server's own to carry out
    (web_search), and is ours to answer only where the agent waits for a client. `clock` gives
    seconds.
    """

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names = frozenset(names)
        self._clock = clock
        self._changed = threading.Condition()
        self._seen: set[str] = set()
        self._calls: dict[str, ToolCall] = {}
        self._answered: set[str] = set()
        self._verdicts: dict[str, bool] = {}
        # For which calls the agent waits, as the server has said last.
        self._awaited: frozenset[str] = frozenset()
        self._ended_threads: set[str] = set()
        self._idle_since: float | None = None
        self._is_whole = False
        self._given = 0
        self._closed: list[str] = []
        self.is_over = False

    def note(self, event: Mapping[str, Any]) -> None:
        """Take the next event. Raises TooManyCalls."""
        with self._changed:
            self._note(event)
            self._ensure_bounds()
            self._changed.notify_all()

    def note_history(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take all events until now. Where they break off, no call is begun until all are there:
        its result may be among the rest. Raises TooManyCalls, and what `events` raises."""
        with self._changed:
            self._is_whole = False
        for each in events:
            self.note(each)
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def note_answered(self, call: ToolCall) -> None:
        """Nothing more is to be done about a call."""
        with self._changed:
            self._answered.add(call.id)
            self._changed.notify_all()

    def next_call(self) -> ToolCall | None:
        """Return the first call that is to be carried out, None where there is none now."""
        with self._changed:
            self._forget_closed()
            if not self._is_whole:
                return None
            return next(filter(self._is_ours, self._calls.values()), None)

    def take_closed(self) -> list[str]:
        """Return the ids of calls that asked, and that nobody waits for any more: each once."""
        with self._changed:
            self._forget_closed()
            found, self._closed = self._closed, []
            return found

    def is_ours(self, call: ToolCall) -> bool:
        """Whether the call is of a tool that is ours."""
        return call.name in self._names

    def is_dropped(self, call: ToolCall) -> bool:
        """Whether nobody waits for the result of a call any more."""
        with self._changed:
            return self.is_over or not self._is_open(call)

    def verdict_of(self, call: ToolCall) -> bool | None:
        """Return what was said at the vendor about a call that asks; None where nothing was."""
        with self._changed:
            return self._verdicts.get(call.id)

    @property
    def is_idle(self) -> bool:
        """Whether the agent has nothing to do, as far as is known."""
        return self._is_whole and self._idle_since is not None

    def idle_seconds(self) -> float:
        """Return for how long the agent has had nothing to do; 0 while it works."""
        with self._changed:
            if self._idle_since is None or not self._is_whole:
                return 0.0
            return self._clock() - self._idle_since

    def wait(self, seconds: float) -> None:
        """Wait for something new, for so many seconds at most."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """End the waiting of others."""
        with self._changed:
            self._changed.notify_all()

    def _forget_closed(self) -> None:
        # One that is closed stays so.
        known = self._calls.values()
        self._closed += (each.id for each in known if each.asks and not self._is_open(each))
        self._calls = {each.id: each for each in known if self._is_open(each)}
        self._given = sum(each.size for each in self._calls.values())

    def _ensure_bounds(self) -> None:
        if len(self._seen) > MOST_EVENTS:
            raise TooManyCalls(f"The session has more than {MOST_EVENTS} events.")
        if len(self._calls) > MOST_OPEN or self._given > MOST_GIVEN:
            self._forget_closed()
            # Half, so that not each event is followed by a look at all calls.
            if len(self._calls) > MOST_OPEN // 2 or self._given > MOST_GIVEN // 2:
                raise TooManyCalls("The session has more open calls than a worker can keep.")

    def _is_ours(self, call: ToolCall) -> bool:
        if call.name in self._names:
            return True
        # Of one that asks the agent may wait for the verdict alone.
        is_allowed = not call.asks or self._verdicts.get(call.id) is True
        return is_allowed and call.id in self._awaited

    def _is_open(self, call: ToolCall) -> bool:
        return not (
            call.is_refused
            or call.id in self._answered
            or call.thread in self._ended_threads
            or self._verdicts.get(call.id) is False
        )

    def _note(self, event: Mapping[str, Any]) -> None:
        kind, event_id = event.get("type"), _id(event.get("id"))
        if not isinstance(kind, str) or not event_id or event_id in self._seen:
            return
        self._seen.add(event_id)
        call_id = _id(event.get("tool_use_id"))
        if kind == "agent.tool_use":
            self._add(event_id, event)
        elif kind in _RESULTS and call_id:
            self._answered.add(call_id)
        elif kind == "user.tool_confirmation" and call_id:
            # Of two verdicts the one that denies holds, and what is no verdict allows nothing.
            allows = event.get("result") == "allow"
            self._verdicts[call_id] = allows and self._verdicts.get(call_id, True)
            self._awaited -= {call_id}
        elif kind == "session.thread_status_terminated":
            if thread := _id(event.get("session_thread_id")):
                self._ended_threads.add(thread)
        elif kind in _OVER:
            self.is_over = True
        if kind not in _NEUTRAL:
            self._idle_since = self._clock() if _ends_turn(event) else None
            if not kind.startswith("user."):
                self._awaited = _awaited_ids(event)

    def _add(self, call_id: str, event: Mapping[str, Any]) -> None:
        given, permission = event.get("input"), event.get("evaluated_permission")
        if not (name := _id(event.get("name"))):
            return
        kept: Mapping[str, Any] = {}
        if isinstance(given, dict) and name in self._names:
            kept = given
        size = len(json.dumps(kept))
        self._given += size
        self._calls[call_id] = ToolCall(
            call_id,
            name,
            kept,
            # What is not known asks, too.
            asks=permission not in (None, "allow"),
            is_refused=permission == "deny",
            thread=_id(event.get("session_thread_id")),
            size=size,
        )


def _id(value: Any) -> str:
    return value if isinstance(value, str) and _ID.fullmatch(value) else ""


def _ends_turn(event: Mapping[str, Any]) -> bool:
    return event.get("type") == "session.status_idle" and not _waits(event)


def _waits(event: Mapping[str, Any]) -> bool:
    reason = event.get("stop_reason")
    return isinstance(reason, dict) and reason.get("type") == "requires_action"


def _awaited_ids(event: Mapping[str, Any]) -> frozenset[str]:
    """For which events a server says that the agent waits."""
    if event.get("type") != "session.status_idle" or not _waits(event):
        return frozenset()
    found = event["stop_reason"].get("event_ids")
    return frozenset(filter(None, map(_id, found))) if isinstance(found, list) else frozenset()
