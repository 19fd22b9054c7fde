"""Calls of tools as rows: asked, approved, answered. Each step is one UPDATE and one entry.

The entry is what counts: whoever hands a call out, or its answer in, reads there what was approved
and by whom it was answered, and believes no row that says otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from executions.capabilities.policies.approvals import DECIDE, AlreadyDecided, ensure_not_requester
from executions.capabilities.tools.models import ToolCall
from executions.kernel.bodies import Choices, JsonObject, Time, UuidText
from executions.kernel.text import from_json, to_json, uuid7
from executions.ledger.append import append
from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify_entry
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.runs.tool_schemas import Tool
from executions.tenants.models import ApiKey, Tenant

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
