"""One agent's session, while its item of the queue is leased to this worker.

One thread extends the lease, one reads events, and one carries out calls, each in its turn. Once
the lease is lost nothing runs any more and nothing is answered: another worker has the session.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from executions.doors.claude.calls import Calls, NotCarriedOut, NotPermitted, Place
from executions.doors.claude.client import (
    LEASE_LOST,
    NO_HEARTBEAT,
    Client,
    Refused,
    Unavailable,
    Work,
    stream_budget,
)
from executions.doors.claude.environment import NoEnvironment
from executions.doors.claude.tools import TOOLS, Result
from executions.doors.claude.transcript import ToolCall, Transcript, slim
from executions.kernel.http import Budget
from providers.threads import start_thread

logger = logging.getLogger(__name__)

# Until the server has said otherwise: how often a lease is extended, and how long it lasts.
BEAT_SECONDS, LEASE_SECONDS = 30.0, 90.0
# Between attempts to read events, and to send a result.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 10.0
_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 70.0
_FAULT = "The call failed inside the service. Its log has the cause."


@dataclass(frozen=True)
class Pace:
    """Seconds: after which an agent that has nothing to do is left, and what a call may still take
    once the worker stops."""

    idle: float = 60.0
    grace: float = 20.0


class Lease:
    """The hold on one item. It ends once, for one reason, and then calls `on_end`.

    What `is_lost` is not this worker's any more: nothing is answered, and nothing stopped.
    """

    def __init__(
        self, client: Client, environment_id: str, work: Work, on_end: Callable[[], object]
    ) -> None:
        self._client = client
        self._environment_id = environment_id
        self._work = work
        self._lock = threading.Lock()
        self._on_end = on_end
        self.ended = threading.Event()
        self.is_lost = False
        self.seconds = LEASE_SECONDS

    def end(self, *, is_lost: bool = False) -> None:
        """End it. What came first holds."""
        with self._lock:
            if self.ended.is_set():
                return
            self.is_lost = is_lost
            self.ended.set()
        self._on_end()

    def extend(self, ensure_permitted: Callable[[], object]) -> None:
        """Extend it until it ends. `ensure_permitted` raises what ends it, too."""
        last, interval, succeeded = NO_HEARTBEAT, BEAT_SECONDS, time.monotonic()
        while not self.ended.is_set():
            try:
                ensure_permitted()
                beat = self._client.beat(self._environment_id, self._work, last)
            except Refused as error:
                logger.warning("the lease of %s ended: %s", self._work.id, error)
                self.end(is_lost=error.status == LEASE_LOST)
                return
            except (NoEnvironment, NotPermitted) as error:
                logger.error("the session %s is left: %s", self._work.session_id, error)
                # Nothing more is sent with a key that is gone.
                self.end(is_lost=True)
                return
            except Unavailable as error:
                if time.monotonic() - succeeded > self.seconds:
                    logger.error("the lease of %s is taken as lost: %s", self._work.id, error)
                    self.end(is_lost=True)
                    return
                logger.warning("a heartbeat of %s failed: %s", self._work.id, error)
            else:
                last, succeeded = beat.last, time.monotonic()
                if beat.seconds:
                    self.seconds = beat.seconds
                    interval = max(1.0, min(beat.seconds / 2, BEAT_SECONDS))
                if not beat.goes_on:
                    self.end()
                    return
            self.ended.wait(interval)


class Serving:
    """Serves one item to its end.

    `ensure_permitted` raises NoEnvironment and NotPermitted, and Unavailable where it cannot know.
    """

    def __init__(
        self,
        client: Client,
        environment_id: str,
        work: Work,
        place: Place,
        ensure_permitted: Callable[[], object],
        pace: Pace,
    ) -> None:
        self._client = client if work.token is None else client.with_token(work.token)
        self._environment_id = environment_id
        self._work = work
        self._place = place
        self._ensure_permitted = ensure_permitted
        self._pace = pace
        self._transcript = Transcript(TOOLS)
        self._lease = Lease(self._client, environment_id, work, self._end_all)
        self._budget: Budget | None = None
        self._calls: Calls | None = None
        self._stops_at: float | None = None
        self._current: ToolCall | None = None
        self._has_read = False

    def stop(self) -> None:
        """Have it come to an end: what runs has a little time, and nothing new begins."""
        self._stops_at = time.monotonic() + self._pace.grace
        self._transcript.wake()

    def run(self) -> None:
        """Serve until the agent is done, the lease ends, or the worker stops."""
        threads = []
        # What comes to no end of its own is another's.
        is_left = True
        try:
            threads.append(start_thread("claude lease", self._extend))
            threads.append(start_thread("claude watch", self._watch))
            is_left = self._serve()
        except Refused as error:
            logger.error("the session %s cannot be served: %s", self._work.session_id, error)
            is_left = False
        except (NotPermitted, Unavailable) as error:
            logger.error("the session %s is left: %s", self._work.session_id, error)
        finally:
            self._lease.end()
            self._give_back(is_left)
            for thread in threads:
                thread.join(_JOIN_SECONDS)

    def _extend(self) -> None:
        try:
            self._lease.extend(self._ensure_permitted)
        finally:
            # Nothing goes on that nobody holds.
            self._lease.end(is_lost=True)

    def _end_all(self) -> None:
        """Nothing goes on without the lease."""
        if (budget := self._budget) is not None:
            budget.cut.cut()
        if (calls := self._calls) is not None:
            calls.cancel()
        self._transcript.wake()

    def _watch(self) -> None:
        """End a call that nobody waits for any more, or that takes too long for a stop."""
        while not self._lease.ended.is_set():
            call, calls, stops_at = self._current, self._calls, self._stops_at
            if call is not None and calls is not None:
                is_late = stops_at is not None and time.monotonic() >= stops_at
                if is_late or self._transcript.is_dropped(call):
                    calls.cancel(call.id)
            self._transcript.wait(_LOOK_SECONDS)

    def _serve(self) -> bool:
        """Carry out calls. Return whether calls are left for another worker."""
        agent = self._client.session(self._work.session_id)
        if agent.is_terminated:
            return False
        self._calls = Calls(self._place, self._environment_id, agent)
        reader = start_thread("claude events", self._read)
        try:
            return self._carry_out_all(self._calls)
        finally:
            self._lease.end()
            reader.join(_JOIN_SECONDS)

    def _carry_out_all(self, calls: Calls) -> bool:
        while not self._lease.ended.is_set() and not self._transcript.is_over:
            call = self._transcript.next_call()
            if self._stops_at is not None:
                # An agent that works may have calls in a moment.
                return call is not None or not self._transcript.is_idle
            if call is None:
                if self._transcript.idle_seconds() >= self._pace.idle:
                    return False
                self._transcript.wait(_LOOK_SECONDS)
                continue
            self._current = call
            try:
                result = self._carry_out(calls, call)
            except NotCarriedOut as error:
                logger.error("the call %s is left: %s", call.id, error)
                return True
            finally:
                self._current = None
            if result is None:
                if not self._transcript.is_dropped(call):
                    return True
            elif not self._lease.ended.is_set() and not self._transcript.is_dropped(call):
                self._answer(call, result)
            self._transcript.note_answered(call)
        return False

    def _carry_out(self, calls: Calls, call: ToolCall) -> Result | None:
        try:
            return calls.carry_out(
                call,
                lambda: self._lease.ended.is_set() or self._stops_at is not None,
                lambda: self._transcript.is_dropped(call),
            )
        except (NotCarriedOut, NotPermitted):
            raise
        except Exception:
            logger.exception("the call %s of an agent failed inside the service", call.id)
            return Result.of_text(_FAULT, is_error=True)

    def _answer(self, call: ToolCall, result: Result) -> None:
        """Tell the agent. Of a call that asks it is told first whether a person allowed it."""
        if call.asks and self._transcript.verdict_of(call) is None:
            verdict: dict[str, Any] = {"type": "user.tool_confirmation", "tool_use_id": call.id}
            if result.is_approved:
                self._send({**verdict, "result": "allow"})
            elif self._send({**verdict, "result": "deny", "deny_message": result.text}):
                return
        answer = {
            "type": "user.tool_result",
            "tool_use_id": call.id,
            "is_error": result.is_error,
            "content": result.content,
        }
        self._send(answer)

    def _send(self, event: dict[str, Any]) -> bool:
        """Whether the server took it. As long as the lease may last it is tried again."""
        until, pause = time.monotonic() + self._lease.seconds, _FIRST_PAUSE
        while True:
            try:
                self._client.send(self._work.session_id, event)
                return True
            except Refused as error:
                logger.error("%s was not taken: %s", event["type"], error)
                return False
            except Unavailable as error:
                if time.monotonic() + pause > until:
                    logger.error("%s was not sent: %s", event["type"], error)
                    return False
            if self._lease.ended.wait(pause * random.uniform(0.5, 1)):  # noqa: S311  not to meet
                return False
            pause = min(pause * 2, _LAST_PAUSE)

    def _read(self) -> None:
        """Read events until the lease ends, anew after each break."""
        pause = _FIRST_PAUSE
        while not self._lease.ended.is_set() and not self._transcript.is_over:
            try:
                self._read_stream()
                pause = _FIRST_PAUSE
            except Unavailable as error:
                logger.info("the events of %s broke off: %s", self._work.session_id, error)
                pause = _FIRST_PAUSE if self._has_read else pause
            except Refused as error:
                logger.error("the events of %s are refused: %s", self._work.session_id, error)
                self._lease.end()
                return
            self._lease.ended.wait(pause)
            pause = min(pause * 2, _LAST_PAUSE)

    def _read_stream(self) -> None:
        self._has_read = False
        self._budget = budget = stream_budget()
        if self._lease.ended.is_set():
            return
        for event in self._client.stream(self._work.session_id, budget):
            if event is None:
                # Behind the opening, so that nothing is missed in between. All or nothing: the
                # result of a call may be on a later page.
                history = self._client.events(self._work.session_id)
                self._transcript.note([slim(each) for each in history])
                self._has_read = True
            else:
                self._transcript.note([slim(event)])

    def _give_back(self, is_left: bool) -> None:
        """Stop an item that is done. One with calls left is another's once its lease is over."""
        if self._lease.is_lost or is_left:
            return
        with suppress(Unavailable):
            try:
                self._client.stop(self._environment_id, self._work)
            except Refused as error:
                logger.error("the item %s was not stopped: %s", self._work.id, error)
