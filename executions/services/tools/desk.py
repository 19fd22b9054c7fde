"""Between the code that calls tools and those who answer: of each run a desk, in its process.

A provider tells of a call in a thread of its own, which must not wait. One thread of the process
records calls for all desks, hands them out, and looks for what was approved and answered, by
whatever process that was heard.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import close_old_connections, connection

from executions.kernel.text import from_json, to_json
from executions.models.tool_call import ToolCall
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from executions.services.tools import calls
from executions.services.tools.declaring import Tool
from executions.services.tools.telling import tell
from providers import waiting
from providers.guest.protocol import MOST_CALLS, MOST_WAITING_CALLS
from providers.values import Event

logger = logging.getLogger(__name__)

# How often it is looked for answers while calls wait for them. Where the process that runs the code
# is the one that is given the answer, at once.
LOOK_SECONDS = 0.1

# Of the calls of a run that are not taken, so many are told so. Sandboxes of ours tell of none.
MOST_TOLD = 16

# Of a row, whatever comes of it.
_NEVER_CHANGE = ("execution_id", "name", "arguments", "arguments_hash", "writes")

State = ToolCall.State
Answer = Callable[[int, bytes], Any]


class Desk:
    """The calls of one run. `answer` hands the sandbox what a call is answered with, and waits."""

    def __init__(
        self, execution: Execution, tools: Sequence[Tool], log: EventLog | None, answer: Answer
    ) -> None:
        self.execution = execution
        self.open: dict[UUID, ToolCall] = {}
        self.is_closed = False
        # As it is now: the row of the run, and the key's, may name somebody else by then.
        self._key = calls.mark_of(execution.api_key)
        self._tools = {tool.name: tool for tool in tools}
        self._log = log
        self._answer = answer
        self._numbers: dict[UUID, int] = {}
        self._lock = threading.Lock()
        self._taken = 0
        self._not_taken = 0
        self._under_way = 0

    def take(self, event: Event) -> None:
        """What a provider says the code calls. Never raises and never waits."""
        call = event.call
        if call is None or type(call.number) is not int or not isinstance(call.arguments, bytes):
            return
        tool = self._tools.get(call.name) if isinstance(call.name, str) else None
        with self._lock:
            # A sandbox of ours has bounds of its own, and would not tell of more.
            is_one = (
                tool is not None
                and not self.is_closed
                and self._taken < MOST_CALLS
                and self._under_way < MOST_WAITING_CALLS
            )
            if is_one:
                self._taken += 1
                self._under_way += 1
            else:
                self._not_taken += 1
        number, arguments = call.number, call.arguments
        if tool is None or not is_one:
            if self._not_taken <= MOST_TOLD:
                self._send(number, to_json({"error": "the call was not accepted"}))
            return
        _clerk.do(self, lambda: self._record(tool, number, arguments))

    @property
    def taken(self) -> int:
        """How many calls were recorded, those that were refused among them."""
        return self._taken

    def close(self) -> None:
        """The run is over: nobody waits for an answer any more."""
        with self._lock:
            self.is_closed = True
            if not self._taken:
                return
        _clerk.do(self, self._give_up)

    # In the clerk's thread.

    def look(self, found: ToolCall) -> None:
        """Go on with a call of ours, as its row is now."""
        known = self.open.get(found.pk)
        if known is None or known.state == found.state:
            return
        if found.state == State.REFUSED:
            self._settle(found, to_json({"error": calls.REJECTED}))
        elif found.state == State.GIVEN_UP:
            self._settle(found, "")
        elif not calls.is_entered(found, self._key) or any(
            getattr(known, name) != getattr(found, name) for name in _NEVER_CHANGE
        ):
            logger.error(
                "the row of tool call %s does not match the ledger",
                found.pk,
                extra={"alert": "tool_call_altered"},
            )
            self._settle(found, to_json({"error": "the call does not match the ledger"}))
        elif found.state == State.ANSWERED:
            self._settle(found, found.answer)
        else:
            self.open[found.pk] = found
            self._hand_out(found)

    def _record(self, tool: Tool, number: int, arguments: bytes) -> None:
        try:
            call = calls.open_call(self.execution, tool, arguments)
        except Exception:
            # Fail closed: what is not recorded goes nowhere.
            logger.exception("a call of a tool by %s could not be recorded", self.execution.pk)
            self._end_one()
            self._send(number, to_json({"error": "the service could not record the call"}))
            return
        self._numbers[call.pk] = number
        self.open[call.pk] = call
        if call.state == State.REFUSED:
            self._settle(call, call.answer)
        elif call.state == State.HELD:
            said = {"id": str(call.pk), "name": call.name, "arguments_hash": call.arguments_hash}
            self._say("tool_call_held", said)
        else:
            self._hand_out(call)
        if self.is_closed:
            self._give_up()

    def _hand_out(self, call: ToolCall) -> None:
        arguments = from_json(call.arguments)
        self._say("tool_call", {"id": str(call.pk), "name": call.name, "arguments": arguments})
        tell(call, lambda: call.pk in self.open and not self.is_closed)

    def _say(self, kind: str, said: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.say(kind, said)

    def _settle(self, call: ToolCall, answer: str) -> None:
        self.open.pop(call.pk, None)
        number = self._numbers.pop(call.pk, None)
        self._end_one()
        if number is not None and answer:
            self._send(number, answer)

    def _end_one(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _give_up(self) -> None:
        self.open.clear()
        calls.give_up(self.execution.pk)

    def _send(self, number: int, answer: str) -> None:
        if self.is_closed:
            return
        sent = waiting.submit(lambda: self._answer(number, answer.encode(errors="replace")))
        sent.add_done_callback(_note_failure)


def _note_failure(sent: Any) -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        # Most likely the run has ended meanwhile, of which its own path tells.
        logger.info("a result could not be sent to its sandbox: %s", error)


def look_now() -> None:
    """What was answered or decided here may be of a run of this process."""
    _clerk.wake.set()


class _Clerk:
    """The one thread, as long as there is something to do. Tenants have turns of it, and answers
    are looked for however much there is to record."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self._lock = threading.Lock()
        # What is to be done for each tenant, whose turn it is first.
        self._todo: dict[str, deque[Callable[[], None]]] = {}
        self._desks: set[Desk] = set()
        self._is_working = False

    def do(self, desk: Desk, what: Callable[[], None]) -> None:
        with self._lock:
            self._todo.setdefault(desk.execution.tenant_slug, deque()).append(what)
            self._desks.add(desk)
            if not self._is_working:
                try:
                    threading.Thread(target=self._work, name="tools", daemon=True).start()
                    self._is_working = True
                except RuntimeError as error:
                    # The next call tries again.
                    logger.error("no thread for tool calls: %s", error)
        self.wake.set()

    def _work(self) -> None:
        looked_at = -LOOK_SECONDS
        try:
            while self._goes_on():
                self._try(close_old_connections)
                self.wake.clear()
                if what := self._next():
                    self._try(what)
                if self._todo and time.monotonic() - looked_at < LOOK_SECONDS:
                    continue
                self._try(self._look)
                looked_at = time.monotonic()
                if not self._todo:
                    self.wake.wait(LOOK_SECONDS)
        except BaseException:
            with self._lock:
                self._is_working = False
            raise
        finally:
            connection.close()

    def _next(self) -> Callable[[], None] | None:
        """The next thing to do of the tenant whose turn it is, who is then the last."""
        with self._lock:
            if not self._todo:
                return None
            tenant = next(iter(self._todo))
            waiting = self._todo.pop(tenant)
            what = waiting.popleft()
            if waiting:
                self._todo[tenant] = waiting
            return what

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._todo:
                self._desks = {desk for desk in self._desks if desk.open}
            self._is_working = bool(self._desks or self._todo)
            return self._is_working

    def _look(self) -> None:
        wanted = {pk: desk for desk in list(self._desks) for pk in desk.open}
        states = {pk: desk.open[pk].state for pk, desk in wanted.items() if pk in desk.open}
        for found in ToolCall.objects.filter(pk__in=states).only("pk", "state"):
            if found.state != states[found.pk]:
                # By itself: what is wrong with one row keeps no other call waiting.
                self._try(partial(self._go_on, wanted[found.pk], found.pk))

    def _go_on(self, desk: Desk, pk: UUID) -> None:
        desk.look(ToolCall.objects.get(pk=pk))

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except DatabaseFailure as failure:
            logger.info("tool calls wait for the database: %s", failure)
        except Exception:
            logger.exception("a tool call could not be continued")


_clerk = _Clerk()


def _start_afresh() -> None:
    """The parent's thread is not in the child."""
    global _clerk
    _clerk = _Clerk()


os.register_at_fork(after_in_child=_start_afresh)
