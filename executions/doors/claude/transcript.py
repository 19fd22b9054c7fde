"""What is known of the tool calls of an agent's session, by its events.

Events come more than once: each history begins at the first one. Nothing is forgotten of a call,
so that none is carried out after it was answered, denied, or given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# They neither say that an agent works nor that it waits.
_NEUTRAL = ("user.tool_confirmation", "session.thread_status_terminated")
# What is kept of an event. Results, which may be long, are somebody else's to read.
_KEPT = (
    *("id", "type", "name", "input", "evaluated_permission", "session_thread_id", "tool_use_id"),
    *("result", "stop_reason"),
)
_MOST_ID = 256
_OVER = ("session.status_terminated", "session.deleted")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that is ours. `asks` says that a person has to allow it."""

    id: str
    name: str
    given: Mapping[str, Any]
    asks: bool
    is_refused: bool
    thread: str


class Transcript:
    """The calls of one session, for the thread that carries them out and the one that reads.

    `names` are the tools that are ours; calls of others are somebody else's to answer. `clock`
    gives seconds.
    """

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names = frozenset(names)
        self._clock = clock
        self._changed = threading.Condition()
        self._seen: set[str] = set()
        self._calls: dict[str, ToolCall] = {}
        self._answered: set[str] = set()
        self._verdicts: dict[str, bool] = {}
        self._ended_threads: set[str] = set()
        self._idle_since: float | None = None
        self.is_over = False

    def note(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take events in their order, all of them at once."""
        found = list(events)
        with self._changed:
            for each in found:
                self._note(each)
            self._changed.notify_all()

    def note_answered(self, call: ToolCall) -> None:
        """Nothing more is to be done about a call."""
        with self._changed:
            self._answered.add(call.id)
            self._changed.notify_all()

    def next_call(self) -> ToolCall | None:
        """Return the first call that is to be carried out, None where there is none now."""
        with self._changed:
            # One that is closed stays so.
            self._calls = {each.id: each for each in self._calls.values() if self._is_open(each)}
            return next(iter(self._calls.values()), None)

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
        return self._idle_since is not None

    def idle_seconds(self) -> float:
        """Return for how long the agent has had nothing to do; 0 while it works."""
        with self._changed:
            return 0.0 if self._idle_since is None else self._clock() - self._idle_since

    def wait(self, seconds: float) -> None:
        """Wait for something new, for so many seconds at most."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """End the waiting of others."""
        with self._changed:
            self._changed.notify_all()

    def _is_open(self, call: ToolCall) -> bool:
        return not (
            call.is_refused
            or call.id in self._answered
            or call.thread in self._ended_threads
            or self._verdicts.get(call.id) is False
        )

    def _note(self, event: Mapping[str, Any]) -> None:
        kind, event_id = event.get("type"), event.get("id")
        if not isinstance(kind, str) or not isinstance(event_id, str) or event_id in self._seen:
            return
        if len(event_id) > _MOST_ID:
            return
        self._seen.add(event_id)
        if kind == "agent.tool_use":
            self._add(event_id, event)
        elif kind == "user.tool_result":
            self._answered.add(str(event.get("tool_use_id")))
        elif kind == "user.tool_confirmation":
            # Of two verdicts the one that denies holds, and what is no verdict allows nothing.
            call_id, allows = str(event.get("tool_use_id")), event.get("result") == "allow"
            self._verdicts[call_id] = allows and self._verdicts.get(call_id, True)
        elif kind == "session.thread_status_terminated":
            if thread := event.get("session_thread_id"):
                self._ended_threads.add(str(thread))
        elif kind in _OVER:
            self.is_over = True
        if kind not in _NEUTRAL:
            self._idle_since = self._clock() if _ends_turn(event) else None

    def _add(self, call_id: str, event: Mapping[str, Any]) -> None:
        given, permission = event.get("input"), event.get("evaluated_permission")
        name = str(event.get("name"))
        if name not in self._names:
            return
        self._calls[call_id] = ToolCall(
            call_id,
            name,
            given if isinstance(given, dict) else {},
            # What is not known asks, too.
            asks=permission not in (None, "allow"),
            is_refused=permission == "deny",
            thread=str(event.get("session_thread_id") or ""),
        )


def slim(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is kept of an event."""
    return {name: event[name] for name in _KEPT if name in event}


def _ends_turn(event: Mapping[str, Any]) -> bool:
    reason = event.get("stop_reason")
    waits = isinstance(reason, dict) and reason.get("type") == "requires_action"
    return event.get("type") == "session.status_idle" and not waits
