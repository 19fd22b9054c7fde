"""One agent's session, while its item of the queue is leased to this worker.

One thread extends the lease, one reads events, and one carries out calls, each in its turn. Once
the lease is lost nothing runs any more and nothing is answered: another worker has the session.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
from executions.doors.claude.transcript import ToolCall, TooManyCalls, Transcript
from executions.doors.unknown_names import log_unknown
from executions.kernel.http import Budget
from providers.threads import start_thread

logger = logging.getLogger(__name__)

# Until the server has said otherwise: how often a lease is extended, and how long it lasts.
BEAT_SECONDS, LEASE_SECONDS = 30.0, 90.0
# It is taken as lost after this, whatever the server said.
_LONGEST_LEASE = 600.0
# Between attempts to read events, and to send a result.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 10.0
_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 70.0
_FAULT = "The call failed inside the service. Its log has the cause."
_UNKNOWN = "The tool is not known here. The tools are: {}."
_NOT_TAKEN = "The result was refused, so that it cannot be shown. The call has ended."
_UNKNOWN_TOOL = "an agent used a tool that is not known: %s"


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
        self._begins = time.monotonic()

    def end(self, *, is_lost: bool = False) -> None:
        """End it. What came first holds."""
        with self._lock:
            if self.ended.is_set():
                return
            self.is_lost = is_lost
            self.ended.set()
        self._on_end()

    def end_if_over(self) -> None:
        """End it as lost where it was not extended in time: an answer may be late."""
        if time.monotonic() - self._begins > self.seconds:
            self.end(is_lost=True)

    def extend(self, ensure_permitted: Callable[[], object]) -> None:
        """Extend it until it ends. `ensure_permitted` raises what ends it, too."""
        last, interval = NO_HEARTBEAT, BEAT_SECONDS
        while not self.ended.is_set():
            sent_at = time.monotonic()
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
                logger.warning("a heartbeat of %s failed: %s", self._work.id, error)
                self.end_if_over()
            else:
                last, self._begins = beat.last, sent_at
                if beat.seconds:
                    self.seconds = min(beat.seconds, _LONGEST_LEASE)
                    interval = min(beat.seconds / 3, BEAT_SECONDS)
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

    def stop(self, seconds: float) -> None:
        """Have it come to an end: what runs has so many seconds, and nothing new begins."""
        self._stops_at = min(self._stops_at or math.inf, time.monotonic() + seconds)
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
        except (NotCarriedOut, NotPermitted, Unavailable) as error:
            logger.error("the session %s is left: %s", self._work.session_id, error)
        finally:
            # Also where the service fails: what is left is another's once the lease is over.
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
        """End a call that nobody waits for any more, or that takes too long for a stop, and the
        lease when its time is over."""
        try:
            while not self._lease.ended.is_set():
                self._lease.end_if_over()
                call, calls = self._current, self._calls
                if (
                    call is not None
                    and calls is not None
                    and (self._is_late or self._transcript.is_dropped(call))
                ):
                    calls.cancel(call.id)
                self._transcript.wait(_LOOK_SECONDS)
        finally:
            # Nothing goes on that is not watched.
            self._lease.end(is_lost=True)

    @property
    def _is_late(self) -> bool:
        stops_at = self._stops_at
        return stops_at is not None and time.monotonic() >= stops_at

    def _serve(self) -> bool:
        """Carry out calls. Return whether calls are left for another worker."""
        agent = self._client.session(self._work.session_id)
        self._calls = Calls(self._place, self._client.address, self._environment_id, agent)
        if agent.is_terminated:
            self._calls.withdraw()
            return False
        reader = start_thread("claude events", self._read)
        try:
            is_left = self._carry_out_all(self._calls)
            if self._transcript.is_over:
                self._calls.withdraw()
            return is_left
        finally:
            self._lease.end()
            reader.join(_JOIN_SECONDS)

    def _carry_out_all(self, calls: Calls) -> bool:
        while not self._lease.ended.is_set() and not self._transcript.is_over:
            if closed := self._transcript.take_closed():
                calls.withdraw(closed)
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
            finally:
                self._current = None
            if result is None:
                if not self._transcript.is_dropped(call):
                    return True
            elif not (
                self._lease.ended.is_set()
                or self._transcript.is_dropped(call)
                or self._answer(call, result)
            ):
                # Its record has the result: it is sent the next time.
                continue
            self._transcript.note_answered(call)
        return False

    def _carry_out(self, calls: Calls, call: ToolCall) -> Result | None:
        if not self._transcript.is_ours(call):
            log_unknown(logger, _UNKNOWN_TOOL, call.name)
            return Result.of_text(_UNKNOWN.format(", ".join(TOOLS)), is_error=True)
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

    def _answer(self, call: ToolCall, result: Result) -> bool:
        """Tell the agent. Return whether there is nothing more to tell. Of a call that asks it is
        told first whether a person allowed it."""
        if call.asks and self._transcript.verdict_of(call) is None:
            verdict: dict[str, Any] = {"type": "user.tool_confirmation", "tool_use_id": call.id}
            try:
                if not result.is_approved:
                    return self._send({**verdict, "result": "deny", "deny_message": result.text})
                if not self._send({**verdict, "result": "allow"}):
                    return False
            except Refused as error:
                logger.error("a decision about the call %s was not taken: %s", call.id, error)
        answer = {"type": "user.tool_result", "tool_use_id": call.id}
        try:
            return self._send({**answer, "is_error": result.is_error, "content": result.content})
        except Refused as error:
            logger.error("the result of the call %s was not taken: %s", call.id, error)
        try:
            # The agent would wait for ever.
            content = Result.of_text(_NOT_TAKEN).content
            return self._send({**answer, "is_error": True, "content": content})
        except Refused:
            return True

    def _send(self, event: dict[str, Any]) -> bool:
        """Return whether the server took it. As long as the lease may last it is tried again.
        Raises Refused."""
        until, pause = time.monotonic() + self._lease.seconds, _FIRST_PAUSE
        while True:
            try:
                self._client.send(self._work.session_id, event)
                return True
            except Unavailable as error:
                if self._is_late or time.monotonic() + pause > until:
                    logger.error("%s was not sent: %s", event["type"], error)
                    return False
            if self._lease.ended.wait(pause * random.uniform(0.5, 1)):  # noqa: S311  not to meet
                return False
            pause = min(pause * 2, _LAST_PAUSE)

    def _read(self) -> None:
        """Read events until the lease ends, anew after each break."""
        pause = _FIRST_PAUSE
        try:
            while not self._lease.ended.is_set() and not self._transcript.is_over:
                try:
                    self._read_stream()
                except Unavailable as error:
                    logger.info("the events of %s broke off: %s", self._work.session_id, error)
                pause = _FIRST_PAUSE if self._has_read else min(pause * 2, _LAST_PAUSE)
                self._lease.ended.wait(pause)
        except (Refused, TooManyCalls) as error:
            logger.error("the events of %s are refused: %s", self._work.session_id, error)
            self._lease.end()
        finally:
            # Nothing goes on of which nothing is heard.
            if not self._transcript.is_over:
                self._lease.end(is_lost=True)

    def _read_stream(self) -> None:
        self._has_read = False
        self._budget = budget = stream_budget()
        if self._lease.ended.is_set():
            return
        for event in self._client.stream(self._work.session_id, budget):
            if event is None:
                # Behind the opening, so that nothing is missed in between.
                self._transcript.note_history(self._history())
            else:
                self._transcript.note(event)
                # A stream that breaks off without an event is opened again ever more slowly.
                self._has_read = True

    def _history(self) -> Iterator[Mapping[str, Any]]:
        for event in self._client.events(self._work.session_id):
            if self._lease.ended.is_set():
                raise Unavailable("The lease has ended.")
            yield event

    def _give_back(self, is_left: bool) -> None:
        """Stop an item that is done. One with calls left is another's once its lease is over."""
        if self._lease.is_lost or is_left:
            return
        with suppress(Unavailable):
            try:
                self._client.stop(self._environment_id, self._work)
            except Refused as error:
                logger.error("the item %s was not stopped: %s", self._work.id, error)
