"""What waits in the queue for somebody to look at it: asked for, decided, and proved when it runs.

An approval is of one execution and of one request, by the hashes of both its code and its whole.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import chain
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Value
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from executions.capabilities.webhooks import service as webhooks
from executions.ledger.append import append
from executions.ledger.entry import parse
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify_entry
from executions.runs import payloads, queue_wake
from executions.runs.models import Approval, Execution
from executions.runs.record import QUEUE_ALLOWANCE, close_record, error_changes, log_execution
from executions.runs.requests import ExecutionRequest
from executions.sessions.queries import initiators, key_creators
from providers.errors import BLOCKED, InvalidConfiguration
from providers.services import two_person_rule
from providers.services.approvers import persons_behind

DECIDE = "executions.decide_approval"
# What nobody has looked at by then is not run.
WAITS = timedelta(days=1)
# How the idempotency key of a request begins whose agent asks before it runs.
ASKED = "cofferdam-asked:"

Status = Approval.Status
_KIND = "approval"


class AlreadyDecided(InvalidConfiguration):
    """It was decided before, has ended, or is not what was looked at. Nothing was changed."""


class AskedBySame(InvalidConfiguration):
    """Whoever wants to approve it has asked for it, or made the key. Nothing was changed."""


def ask_for(execution: Execution, request: ExecutionRequest, findings: list[Any]) -> None:
    """Have a queued execution wait, and its webhook told so, in the transaction that inserts it.

    Where its door has asked before, the findings of the policy are added.
    """
    Approval.objects.update_or_create(
        execution=execution,
        defaults={
            "tenant_slug": execution.tenant_slug,
            "code_hash": request.code_hash,
            "request_hash": request.run_hash(),
            "findings": findings,
        },
    )
    # It may be approved for as long as it could be taken, and for a day at least.
    execution.deadline = max(execution.deadline, execution.created_at + WAITS)
    Execution.objects.filter(pk=execution.pk).update(deadline=execution.deadline)
    webhooks.tell_waiting(execution.pk)


def verdict_on(execution: Execution) -> str:
    """Return the status of its approval; "" where none was asked for."""
    found = Approval.objects.filter(execution=execution.pk)
    return found.values_list("status", flat=True).first() or ""


def approved(execution: Execution, request: ExecutionRequest) -> dict[str, str] | None:
    """Who approved just this, and when, as a record has it; None where nobody did."""
    found = Approval.objects.filter(
        execution=execution.pk,
        status=Status.APPROVED,
        code_hash=request.code_hash,
        request_hash=request.run_hash(),
    ).first()
    if found is None or (at := _entered_at(found)) is None:
        return None
    return {"by": found.decided_by, "at": at, "code_hash": found.code_hash}


def _entered_at(approval: Approval) -> str | None:
    """When the ledger says that it was approved, by a signature that is trusted: anybody who gets
    at the database could write the row.
    """
    subject = str(approval.execution_id)
    said = {
        "actor": approval.decided_by,
        "decision": Status.APPROVED.value,
        "code_hash": approval.code_hash,
        "request_hash": approval.request_hash,
        "subject": subject,
        "kind": _KIND,
    }
    approvals = LedgerEntry.objects.filter(kind=_KIND)
    # Reads all of them only if the index has none: somebody may have changed the column.
    for entry in chain(approvals.filter(subject=subject), approvals.iterator()):
        stated = parse(entry.statement) or {}
        is_of_it = all(stated.get(name) == value for name, value in said.items())
        if is_of_it and not verify_entry(entry):
            return str(stated["at"])
    return None


def request_of(approval: Approval) -> ExecutionRequest | None:
    """What would be run, exactly; None where that is not what was asked for, or is gone."""
    execution = Execution.objects.filter(pk=approval.execution_id).first()
    if execution is None or execution.status != Execution.Status.QUEUED:
        return None
    request = ExecutionRequest.from_stored(payloads.read(execution))
    bound = (approval.code_hash, approval.request_hash)
    return request if (request.code_hash, request.run_hash()) == bound else None


def ensure_not_requester(execution_id: UUID, person: Any) -> None:
    """Raise AskedBySame for the account that began it, or that made the key it was sent with; under
    the two-person rule for every account that counts as the same person.
    """
    mine = persons_behind(person.pk) if two_person_rule() else {person.pk}

    def is_one_of(accounts: list[int]) -> bool:
        if two_person_rule():
            return any(mine & persons_behind(account) for account in accounts)
        return person.pk in accounts

    if is_one_of(initiators(execution_id)):
        raise AskedBySame("You requested it yourself. Another person must approve it.")
    if is_one_of(key_creators(execution_id)):
        raise AskedBySame(
            "It was sent with a key that you created or rotated, or of which you were shown a "
            "token. Another person must approve it."
        )


def decide(approval: Approval, person: Any, *, approve: bool, request_hash: str) -> None:
    """Let it run, or end it as blocked, in the name of somebody signed in.

    `request_hash` is what was shown. Raises PermissionDenied, AlreadyDecided, and AskedBySame.
    """
    if not person.has_perm(DECIDE):
        raise PermissionDenied
    if approve:
        ensure_not_requester(approval.execution_id, person)
    by, now = f"user:{person.get_username()}"[:200], timezone.now()
    verdict = Status.APPROVED if approve else Status.REJECTED
    with transaction.atomic():
        waiting = Approval.objects.filter(
            pk=approval.pk, status=Status.WAITING, request_hash=request_hash
        )
        if not waiting.update(status=verdict, decided_by=by, decided_at=now):
            raise AlreadyDecided("It was already decided, or differs from what you reviewed.")
        queued = Execution.objects.filter(
            pk=approval.execution_id, status=Execution.Status.QUEUED, finished_at=None
        )
        if approve:
            _refuse_without_key(queued.select_related("api_key").defer("pending").first())
            begins = Greatest(Coalesce("run_at", Value(now)), Value(now))
            is_open = bool(queued.update(deadline=begins + QUEUE_ALLOWANCE))
        else:
            # Nobody could read what is rejected, whose key may be lost.
            is_open = _end(queued.defer("pending").first(), by)
        if not is_open:
            raise AlreadyDecided("It has ended meanwhile.")
        # Last: whoever ends an execution takes its row before the ledger, too.
        content = {
            "actor": by,
            "decision": verdict.value,
            "code_hash": approval.code_hash,
            "request_hash": request_hash,
        }
        append(_KIND, str(approval.execution_id), content)
        # A worker may take it now.
        queue_wake.notify_on_commit()


def _refuse_without_key(execution: Execution | None) -> None:
    """Revoking a key is the immediate stop, of what waits for somebody's word as well."""
    key = execution.api_key if execution is not None else None
    if key is not None and not key.is_valid(timezone.now()):
        raise AlreadyDecided(
            "The key of the request was revoked or has expired meanwhile. Reject it."
        )


def _end(execution: Execution | None, by: str) -> bool:
    if execution is None:
        return False
    message = f"The policy requires an approval, and {by} rejected the request."
    changes = error_changes(BLOCKED.code, message, "code")
    won = close_record(
        execution, Execution.Status.BLOCKED, changes, only_if=Execution.Status.QUEUED
    )
    if won:
        log_execution(execution)
    return won
