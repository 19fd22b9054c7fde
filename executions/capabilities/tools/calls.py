"""Calls of tools while code runs: asked, approved, sent to the caller, and answered.

Each step of a call is one UPDATE and one entry of the ledger. The entry is what counts: whoever
hands a call out, or its answer in, reads there what was approved and by whom it was answered, and
believes no row that says otherwise.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Annotated, Any, TypedDict
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseFailure
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from executions.capabilities.policies.approvals import DECIDE, AlreadyDecided, ensure_not_requester
from executions.capabilities.tools.models import ToolCall
from executions.capabilities.webhooks.models import WebhookDelivery
from executions.capabilities.webhooks.service import (
    MOST,
    MOST_OF_ONE,
    Message,
    NotSent,
    in_force,
    send,
    signed_headers,
)
from executions.kernel.background import Shares
from executions.kernel.bodies import Choices, JsonObject, Time, UuidText
from executions.kernel.text import from_json, to_json, uuid7
from executions.ledger.append import append
from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify_entry
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.runs.tool_schemas import Tool
from executions.tenants.models import ApiKey, Tenant
from providers import waiting
from providers.fields import DecryptionError
from providers.runtime.guest.protocol import MOST_CALLS, MOST_WAITING_CALLS
from providers.threads import Loop, NoThreadLeft, reset_after_fork, start_thread
from providers.values import Event

logger = logging.getLogger(__name__)


KIND = "tool_call"
State = ToolCall.State


class ToolCallShape(TypedDict):
    id: UuidText
    name: str
    arguments: Annotated[JsonObject | None, "Null unless the call may be carried out."]
    arguments_hash: str
    writes: Annotated[bool, "Whether the tool changes data. Then each call needs approval."]
    state: Annotated[
        str,
        Choices(tuple((each.value, str(each.label)) for each in State)),
        "`held`: it waits for approval. `given_up`: the run ended before its answer.",
    ]
    asked_at: Time
    answered_at: Time | None


REJECTED = "a person reviewed the call and rejected it"


def hash_of(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def mark_of(key: ApiKey | None) -> str:
    """What stands for a key's own text, as an entry may have it; "" for none."""
    return hash_of(key.key_hash) if key is not None else ""


def open_call(execution: Execution, tool: Tool, sent: bytes) -> ToolCall:
    """Record that code has called it: to be handed out, held until somebody approves it, or
    refused, with why in its `answer`."""
    # With it comes jsonschema, for which no start of this service is to wait.
    from executions.capabilities.tools.arguments import read_arguments

    arguments, problem = read_arguments(tool, sent)
    call = ToolCall(
        id=uuid7(),
        execution=execution,
        tenant_slug=execution.tenant_slug,
        name=tool.name,
        arguments=arguments,
        arguments_hash=hash_of(arguments),
        writes=tool.writes,
        state=State.REFUSED if problem else State.HELD if tool.writes else State.WAITING,
        answer=to_json({"error": f"the arguments do not match the schema of the tool: {problem}"})
        if problem
        else "",
    )
    with transaction.atomic():
        # Rows before the ledger, as everywhere.
        call.save(force_insert=True)
        step = "refused" if problem else "called"
        _note(call, _enter(call, step, "code", writes=tool.writes))
    return call


def answer_call(execution: Execution, call_id: UUID, key: ApiKey, answer: str) -> ToolCall | None:
    """Answer it, with {"result": ...} or {"error": ...} as JSON; None where there is no such call.

    The same answer sent again is no second one. Raises PermissionDenied for another key than the
    one that has the code run, and Conflict for what does not wait for an answer.
    """
    call = ToolCall.objects.filter(pk=call_id, execution=execution).first()
    if call is None:
        return None
    if execution.api_key_id != key.pk:
        raise PermissionDenied
    if call.state == State.WAITING and not is_entered(call):
        raise Conflict("The call does not match the ledger, and cannot be answered.")
    by, now = f"key:{key.prefix}", timezone.now()
    with transaction.atomic():
        # The execution's row before the ledger, as whoever ends it has them.
        is_open = Execution.objects.filter(pk=execution.pk, finished_at=None).exists()
        waiting = ToolCall.objects.filter(pk=call.pk, state=State.WAITING)
        if is_open and waiting.update(
            state=State.ANSWERED, answer=answer, answered_by=by, answered_at=now
        ):
            said = {"answer_hash": hash_of(answer), "key": mark_of(key)}
            _note(call, _enter(call, "answered", by, **said))
            call.refresh_from_db()
            return call
    call.refresh_from_db()
    if call.state == State.ANSWERED and (call.answer, call.answered_by) == (answer, by):
        return call
    if call.state == State.HELD:
        raise Conflict("The call needs an approval first.")
    raise Conflict(f"The call does not wait for an answer: {call.get_state_display().lower()}.")


def decide(call: ToolCall, person: Any, *, approve: bool, arguments_hash: str) -> None:
    """Have a held call handed out, or refused, in the name of somebody signed in.

    `arguments_hash` is of what was shown. Raises PermissionDenied, AlreadyDecided, and AskedBySame.
    """
    if not person.has_perm(DECIDE):
        raise PermissionDenied
    if approve:
        ensure_not_requester(call.execution_id, person)
        # The row may show other arguments, another name, or another hash than those.
        if call.state == State.HELD and not is_entered(call):
            raise AlreadyDecided("The call does not match the ledger. Reject it.")
    by, now = f"user:{person.get_username()}"[:200], timezone.now()
    with transaction.atomic():
        # Just what was compared with the ledger above, whatever the row says by now.
        held = ToolCall.objects.filter(pk=call.pk, state=State.HELD, arguments_hash=arguments_hash)
        if approve:
            held = held.filter(entry=call.entry, name=call.name, arguments=call.arguments)
        values: dict[str, Any] = {"decided_by": by, "decided_at": now, "state": State.WAITING}
        if not approve:
            values |= {"state": State.REFUSED, "answer": to_json({"error": REJECTED})}
        is_open = Execution.objects.filter(pk=call.execution_id, finished_at=None).exists()
        was_held = call.state == State.HELD
        if not is_open or not was_held or not held.update(**values):
            raise AlreadyDecided(
                "It was already decided, has ended, or differs from what you reviewed."
            )
        _note(call, _enter(call, "approved" if approve else "rejected", by))


def is_entered(call: ToolCall, key: str = "") -> bool:
    """Whether the ledger says what the row does: that it is held, handed out, or answered; where
    `key` is given, by the key of this mark."""
    entry = LedgerEntry.objects.filter(pk=call.entry).first()
    if entry is None or verify_entry(entry) or call.arguments_hash != hash_of(call.arguments):
        return False
    stated = parse(entry.statement) or {}
    said: dict[str, Any] = {
        "kind": KIND,
        "subject": str(call.execution_id),
        "call": str(call.pk),
        "tool": call.name,
        "arguments_hash": hash_of(call.arguments),
    }
    if call.state == State.ANSWERED:
        said |= {"step": "answered", "answer_hash": hash_of(call.answer)}
        said |= {"actor": call.answered_by, **({"key": key} if key else {})}
    elif call.state == State.HELD:
        said |= {"step": "called", "writes": True}
    elif call.state == State.WAITING and stated.get("step") != "approved":
        said |= {"step": "called", "writes": False}
    return all(stated.get(name) == value for name, value in said.items())


def was_handed_out(execution_id: UUID, said: Mapping[str, Any]) -> bool:
    """Whether the ledger says that a call could be told of as just this: an event that another
    process has left in the database, where anybody who writes it could leave one."""
    try:
        call = ToolCall.objects.filter(pk=UUID(str(said.get("id"))), execution=execution_id).first()
        arguments_hash = hash_of(to_json(said.get("arguments")))
    except ValueError:
        return False
    entry = LedgerEntry.objects.filter(pk=call.entry).first() if call else None
    if call is None or entry is None or verify_entry(entry):
        return False
    stated = parse(entry.statement) or {}
    is_of_it = (
        stated.get("kind") == KIND
        and stated.get("subject") == str(execution_id)
        and stated.get("call") == str(call.pk)
        and stated.get("tool") == said.get("name")
        and stated.get("arguments_hash") == arguments_hash
    )
    step = stated.get("step")
    needs_nobody = step == "called" and stated.get("writes") is False
    return is_of_it and (needs_nobody or step in ("approved", "answered"))


def give_up(execution_id: UUID) -> int:
    """Of a run that has ended nothing is waited for. How many there were."""
    still_open = ToolCall.objects.filter(execution=execution_id, state__in=ToolCall.OPEN)
    return still_open.update(state=State.GIVEN_UP)


def described(execution: Execution, calls: Sequence[ToolCall]) -> list[ToolCallShape]:
    """As the API has them. Who ran it may have died before it gave its calls up."""
    is_over = execution.finished_at is not None
    for call in calls:
        if is_over and call.state in ToolCall.OPEN:
            call.state = State.GIVEN_UP
    return [describe(call) for call in calls]


def describe(call: ToolCall) -> ToolCallShape:
    """One, with its arguments only where they may be acted upon: of one that writes, once somebody
    has approved it."""
    is_approved = call.state in (State.WAITING, State.ANSWERED, State.GIVEN_UP) and call.decided_by
    may_see = bool(call.arguments) and bool(is_approved or not call.writes)
    if call.state == State.WAITING:
        may_see = is_entered(call)
    return {
        "id": str(call.pk),
        "name": call.name,
        "arguments": from_json(call.arguments) if may_see else None,
        "arguments_hash": call.arguments_hash,
        "writes": call.writes,
        "state": call.state,
        "asked_at": call.asked_at.isoformat(),
        "answered_at": call.answered_at.isoformat() if call.answered_at else None,
    }


def _note(call: ToolCall, entry: LedgerEntry) -> None:
    call.entry = entry.sequence
    ToolCall.objects.filter(pk=call.pk).update(entry=entry.sequence)


def _enter(call: ToolCall, step: str, actor: str, **more: Any) -> LedgerEntry:
    content = {
        "actor": actor,
        "call": str(call.pk),
        "tool": call.name,
        "step": step,
        "arguments_hash": hash_of(call.arguments),
        **more,
    }
    return append(KIND, str(call.execution_id), content)


def tool_calls_of(tenant: Tenant) -> QuerySet[ToolCall]:
    return ToolCall.objects.filter(execution__tenant=tenant)


EVENT = "execution.tool_call"
# Seconds before each try.
WAITS = (0.0, 1.0, 5.0, 20.0)
# Of one tenant in one process: each may have as many bytes as arguments of a call.
MOST_WAITING = 256
IDLE_SECONDS = 5.0


def tell(call: ToolCall, still_waits: Callable[[], bool]) -> None:
    """Begin to send it, where its execution has a webhook. Raises what the database does."""
    delivery = WebhookDelivery.objects.filter(execution=call.execution_id).first()
    if delivery is None:
        return
    try:
        message = _message(call, delivery)
    except DecryptionError:
        logger.warning("webhook of tool call %s cannot be decrypted", call.pk)
        return
    if message is not None:
        _sender.take(_Notification(time.monotonic(), next(_numbers), call, message, still_waits))


def _message(call: ToolCall, delivery: WebhookDelivery) -> Message | None:
    secrets = [each.secret for each in in_force(delivery.tenant_id)]
    if not secrets:
        return None
    data = {"execution": str(call.execution_id), "call": describe(call)}
    said = {"type": EVENT, "timestamp": call.asked_at.isoformat(), "data": data}
    body = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    headers = signed_headers(secrets, f"msg_{call.pk.hex}", int(time.time()), body)
    return Message(delivery.url, {**headers, "Content-Type": "application/json"}, body)


_numbers = itertools.count()


@dataclass(order=True)
class _Notification:
    """What is to be sent, once it is due."""

    due: float
    number: int
    call: ToolCall = field(compare=False)
    message: Message = field(compare=False)
    still_waits: Callable[[], bool] = field(compare=False)
    tries: int = field(default=0, compare=False)


class _Sender:
    """As many threads as there is to send at once, MOST at most; one without work ends.

    No `Executor`: what is sent again has its time, which is waited for.
    """

    def __init__(self) -> None:
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        self._changed = threading.Condition()
        # What waits of each tenant, whose turn it is first; and how much of it is under way.
        self._waiting: dict[str, list[_Notification]] = {}
        self._under_way = Shares(MOST, MOST_OF_ONE)
        self._threads = self._idle = 0

    def take(self, telling: _Notification) -> None:
        tenant = telling.call.tenant_slug
        with self._changed:
            waiting = self._waiting.setdefault(tenant, [])
            if len(waiting) >= MOST_WAITING:
                logger.info("no webhook is sent for tool call %s: too many wait", telling.call.pk)
                return
            heappush(waiting, telling)
            if self._idle < sum(map(len, self._waiting.values())) and self._threads < MOST:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        try:
            start_thread("tool-webhook", self._work)
            self._threads += 1
        except NoThreadLeft as error:
            logger.error("%s", error.message)

    def _work(self) -> None:
        while (telling := self._next()) is not None:
            is_over = not telling.still_waits() or _is_told(telling)
            self._has_tried(telling, is_over=is_over)

    def _next(self) -> _Notification | None:
        """What is due of the tenant whose turn it is; None once there was nothing for a while."""
        until = time.monotonic() + IDLE_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                for tenant, waiting in self._waiting.items():
                    if waiting and waiting[0].due <= now and self._under_way.take(tenant):
                        # Whose turn it was is the last.
                        self._waiting[tenant] = self._waiting.pop(tenant)
                        return heappop(waiting)
                self._waiting = {each: some for each, some in self._waiting.items() if some}
                if now >= until and not self._waiting:
                    self._threads -= 1
                    return None
                # Of a tenant with as many under way as may be, the end of one of these is told.
                dues = [
                    waiting[0].due
                    for tenant, waiting in self._waiting.items()
                    if self._under_way.has_room(tenant)
                ]
                self._idle += 1
                self._changed.wait(min([IDLE_SECONDS, *(due - now for due in dues)]))
                self._idle -= 1

    def _has_tried(self, telling: _Notification, *, is_over: bool) -> None:
        tenant = telling.call.tenant_slug
        with self._changed:
            self._under_way.give_back(tenant)
            telling.tries += 1
            if not is_over and telling.tries < len(WAITS):
                telling.due = time.monotonic() + WAITS[telling.tries]
                heappush(self._waiting.setdefault(tenant, []), telling)
            self._changed.notify()


def _is_told(telling: _Notification) -> bool:
    """Whether nothing more is to be done for it."""
    try:
        status = send(telling.message)
    except NotSent as problem:
        logger.info("the webhook of tool call %s could not be sent: %s", telling.call.pk, problem)
        return False
    except Exception as error:
        # Not its text, which may have the URL or the signature.
        logger.error(
            "the webhook of tool call %s could not be sent: %s",
            telling.call.pk,
            type(error).__name__,
        )
        return True
    return 200 <= status < 300


_sender = _Sender()


# How often it is looked for answers while calls wait for them. Where the process that runs the code
# is the one that is given the answer, at once.
LOOK_SECONDS = 0.1

# Of the calls of a run that are not taken, so many are told so. Sandboxes of ours tell of none.
MOST_TOLD = 16

# Of a row, whatever comes of it.
_NEVER_CHANGE = ("execution_id", "name", "arguments", "arguments_hash", "writes")

Answer = Callable[[int, bytes], Any]


class ToolCallDispatcher:
    """The calls of one run. `answer` hands the sandbox what a call is answered with, and waits."""

    def __init__(
        self, execution: Execution, tools: Sequence[Tool], log: EventLog | None, answer: Answer
    ) -> None:
        self.execution = execution
        self.open: dict[UUID, ToolCall] = {}
        self.is_closed = False
        # As it is now: the row of the run, and the key's, may name somebody else by then.
        self._key = mark_of(execution.api_key)
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
            self._settle(found, to_json({"error": REJECTED}))
        elif found.state == State.GIVEN_UP:
            self._settle(found, "")
        elif not is_entered(found, self._key) or any(
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
            call = open_call(self.execution, tool, arguments)
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
        give_up(self.execution.pk)

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
    _clerk.loop.wake()


class _Clerk:
    """The one thread, as long as there is something to do. Tenants have turns of it, and answers
    are looked for however much there is to record."""

    def __init__(self) -> None:
        self.loop = Loop("tools", self._work)
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        # What is to be done for each tenant, whose turn it is first.
        self._todo: dict[str, deque[Callable[[], None]]] = {}
        self._desks: set[ToolCallDispatcher] = set()
        self._looked_at = -LOOK_SECONDS

    def do(self, desk: ToolCallDispatcher, what: Callable[[], None]) -> None:
        with self._lock:
            self._todo.setdefault(desk.execution.tenant_slug, deque()).append(what)
            self._desks.add(desk)
        # Without a thread the next call tries again.
        self.loop.start_if_possible()
        self.loop.wake()

    def _work(self) -> float | None:
        with self._lock:
            if not self._todo:
                self._desks = {desk for desk in self._desks if desk.open}
                if not self._desks:
                    return None
        if what := self._next():
            self._try(what)
        if not self._todo or time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._try(self._look)
            self._looked_at = time.monotonic()
        return 0.0 if self._todo else LOOK_SECONDS

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

    def _look(self) -> None:
        wanted = {pk: desk for desk in list(self._desks) for pk in desk.open}
        states = {pk: desk.open[pk].state for pk, desk in wanted.items() if pk in desk.open}
        for found in ToolCall.objects.filter(pk__in=states).only("pk", "state"):
            if found.state != states[found.pk]:
                # By itself: what is wrong with one row keeps no other call waiting.
                self._try(partial(self._go_on, wanted[found.pk], found.pk))

    def _go_on(self, desk: ToolCallDispatcher, pk: UUID) -> None:
        desk.look(ToolCall.objects.get(pk=pk))

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except DatabaseFailure as failure:
            logger.info("tool calls wait for the database: %s", failure)
        except Exception:
            logger.exception("a tool call could not be continued")


_clerk = _Clerk()
