"""What a policy asks for waits in the queue until somebody has approved just that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.alerts.service import QUIET, watch
from executions.capabilities.policies import approvals
from executions.capabilities.policies.models import Policy
from executions.capabilities.retention import service as retention
from executions.client import execute_code
from executions.ledger.entry import write
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import queue_wake
from executions.runs.models import Approval, Execution
from executions.runs.orphaned_runs import end_stale_executions
from executions.tenants.keys import revoke
from providers.errors import SandboxError
from providers.services.settings_cache import forget_all
from tests.conftest import Caller
from tests.support.approvals import ANSWER, ASKED, RULES, decided, page, signed_in
from tests.support.policies import in_force
from tests.support.routing import last_execution
from tests.support.running import run, run_queued
from tests.support.sessions import cell, opened

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("policies_forgotten"),
    pytest.mark.database,
]


@pytest.fixture
def approver(db: None) -> Client:
    return signed_in("ada", "view_approval", "decide_approval")


def asked(caller: Caller, code: str = ASKED, **body: Any) -> Approval:
    answer = run(caller, code, **body)
    assert (answer.status_code, answer.json()["status"]) == (202, "queued"), answer.content
    return Approval.objects.get(execution=answer.json()["id"])


def test_a_known_idempotency_key_stands_for_its_record_whatever_policy_came_or_went(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    first = run(alice, ASKED, idempotency_key="before").json()
    in_force(alice.tenant.slug, **RULES)
    waiting = run(alice, ASKED, idempotency_key="under it")
    for key, known in (("before", first), ("under it", waiting.json())):
        assert run(alice, ASKED, idempotency_key=key).json()["id"] == known["id"]
        other = run(alice, f"{ASKED} ", idempotency_key=key)
        assert (other.status_code, other.json()["error"]["field"]) == (409, "idempotency_key")
    Policy.objects.all().delete()
    forget_all()
    again = run(alice, ASKED, idempotency_key="under it")
    assert (again.status_code, again.json()["id"]) == (202, waiting.json()["id"])
    assert Execution.objects.count() == 2


def test_what_is_approved_runs_and_its_record_says_by_whom(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller, approver: Client
) -> None:
    in_force(alice.tenant.slug, **RULES)
    assert run(alice, ANSWER).json()["status"] == "succeeded"
    assert run(charlie, ASKED).json()["status"] == "succeeded"
    ran = len(scripted())
    # Who asked and what is told of it decide nothing about what runs.
    approval = asked(
        alice,
        f"# \u202e hidden\n{ASKED}",
        arguments={"n": 1},
        agent="a",
        priority="high",
        mode="async",
    )
    other = run(charlie, ANSWER, mode="async").json()["id"]
    run_queued()
    assert last_execution().pk == Execution.objects.get(pk=other).pk
    assert run_queued() is None

    shown = approver.get(page("change", approval)).content.decode()
    for part in ("[U+202E] hidden", "line 2:", "n&quot;: 1", approval.request_hash):
        assert part.replace(": 1", ":1") in shown.replace(": 1", ":1"), part
    execution = decided(approver, approval, "approve")
    assert (approval.status, approval.decided_by, execution.status) == (
        "approved", "user:ada", "queued",
    )  # fmt: skip
    before = len(scripted())
    run_queued()
    assert len(scripted()) > before > ran
    told = alice.client.get(f"/api/v1/executions/{execution.pk}").json()
    assert told["status"] == "succeeded"
    assert told["policy"]["approved"]["by"] == "user:ada"
    assert told["policy"]["approved"]["code_hash"] == execution.code_hash
    assert told["receipt"]["approved"] == told["policy"]["approved"]
    [entry] = LedgerEntry.objects.filter(kind="approval")
    assert (entry.stated["actor"], entry.stated["decision"]) == ("user:ada", "approved")
    assert verify().is_intact
    # An approval is of one execution.
    asked(alice, f"# \u202e hidden\n{ASKED}", arguments={"n": 1})


@pytest.mark.django_db(transaction=True)
def test_a_worker_is_notified_of_what_is_approved(
    scripted: object,
    alice: Caller,
    approver: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice)
    notices: list[str] = []
    monkeypatch.setattr(queue_wake, "notify", lambda: notices.append("notice"))
    decided(approver, approval, "approve")
    assert notices == ["notice"]


@pytest.mark.django_db(transaction=True)
def test_a_decision_that_cannot_be_entered_leaves_the_request_where_it_is(
    scripted: object,
    alice: Caller,
    approver: Client,
    tmp_path: Path,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings.DATA_DIR = tmp_path
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice, f"#{'x' * 100_000}\n{ASKED}")
    [file] = (tmp_path / "queue").iterdir()

    def fail(*args: object) -> None:
        raise OperationalError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(approvals, "append", fail)
        said = {"reject": "1", "request_hash": approval.request_hash}
        assert approver.post(page("decide", approval), said).status_code == 503
    assert file.exists()
    decided(approver, approval, "reject")
    assert not file.exists()


def test_that_approvals_are_waited_for_is_one_alert_until_none_is(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller, approver: Client
) -> None:
    def messages() -> list[str]:
        return [alert.message for alert in Alert.objects.filter(rule="approval_waits")]

    in_force(**RULES)
    watch()
    assert messages() == []
    waiting = [asked(alice), asked(charlie), asked(alice)]
    watch()
    watch()
    told = "Executions wait for an approval: elsewhere (1), wonderland (2)."
    assert messages() == [told]
    for each in waiting[:2]:
        decided(approver, each, "approve")
    cancelled = f"/api/v1/executions/{waiting[2].execution_id}/cancel"
    assert alice.client.post(cancelled).status_code == 200
    watch(timezone.now() + QUIET + timedelta(minutes=1))
    assert Alert.objects.get(rule="approval_waits").state == "resolved"


def test_nothing_is_approved_by_the_power_of_a_key_that_was_revoked(
    scripted: object, alice: Caller, approver: Client
) -> None:
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice)
    revoke(alice.api_key)
    execution = decided(approver, approval, "approve")
    assert (approval.status, execution.status) == ("waiting", "queued")
    execution = decided(approver, approval, "reject")
    assert (approval.status, execution.status) == ("rejected", "blocked")


@pytest.mark.parametrize("entered", [False, True], ids=["row", "row and unsigned entry"])
def test_an_approval_that_nobody_signed_lets_nothing_run(
    scripted: Callable[[], list[str]], alice: Caller, entered: bool
) -> None:
    """Whoever writes to the database approves nothing."""
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice)
    now = timezone.now()
    Approval.objects.update(status="approved", decided_by="user:ada", decided_at=now)
    Execution.objects.update(deadline=now + timedelta(minutes=5))
    if entered:
        # In the place of an earlier one: nothing can be entered behind what nobody signed.
        earlier = LedgerEntry.objects.order_by("sequence")[0]
        said = {
            **earlier.stated,
            "actor": "user:ada",
            "decision": "approved",
            "kind": "approval",
            "code_hash": approval.code_hash,
            "request_hash": approval.request_hash,
            "subject": str(approval.execution_id),
        }
        forged = LedgerEntry.objects.filter(pk=earlier.pk)
        forged.update(
            kind="approval", subject=said["subject"], statement=write(said), execution_id=None
        )
    before = len(scripted())
    run_queued()
    row = Execution.objects.get(pk=approval.execution_id)
    assert (row.status, row.error_code) == ("blocked", "SB007")
    assert len(scripted()) == before


def test_what_is_rejected_changed_or_left_alone_does_not_run(
    scripted: Callable[[], list[str]], alice: Caller, approver: Client
) -> None:
    in_force(alice.tenant.slug, **RULES)
    rejected = decided(approver, asked(alice), "reject")
    assert (rejected.status, rejected.error_code) == ("blocked", "SB007")
    assert "user:ada rejected the request" in rejected.error_message

    # What was approved and is something else by the time it is run.
    changed = asked(alice)
    decided(approver, changed, "approve")
    row = Execution.objects.get(pk=changed.execution_id)
    row.pending = {**row.pending, "code": f"print('y')\n{ANSWER}"}
    row.save()
    run_queued()
    row.refresh_from_db()
    assert (row.status, row.error_code) == ("blocked", "SB007")

    # What is something else by the time it is looked at.
    moved = asked(alice)
    row = Execution.objects.get(pk=moved.execution_id)
    row.pending = {**row.pending, "arguments": {"n": 2}}
    row.save()
    told = approver.get(page("change", moved)).content.decode()
    assert "The execution has ended, or differs from the request. It will not run." in told
    decided(approver, moved, "approve", request_hash="0" * 64)
    assert moved.status == "waiting"

    late = asked(alice)
    Execution.objects.update(deadline=timezone.now() - timedelta(hours=1))
    end_stale_executions()
    execution = decided(approver, late, "approve")
    assert (late.status, execution.status) == ("waiting", "error")
    assert "No one approved" in execution.error_message
    assert not scripted()


def test_nobody_approves_without_the_right_and_nobody_twice(
    scripted: Callable[[], list[str]], alice: Caller, approver: Client
) -> None:
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice)
    body = {"approve": "1", "request_hash": approval.request_hash}
    for client in (signed_in("eve", "view_approval"), signed_in("mallory")):
        assert client.post(page("decide", approval), body).status_code == 403
    assert Client().post(page("decide", approval), body).status_code == 302
    assert b">Approve<" not in signed_in("eva", "view_approval").get(
        page("change", approval)
    ).content  # fmt: skip
    assert approver.get(page("decide", approval)).status_code == 403
    approval.refresh_from_db()
    assert approval.status == "waiting"
    decided(approver, approval, "reject")
    decided(approver, approval, "approve")
    assert approval.status == "rejected"
    assert LedgerEntry.objects.filter(kind="approval").count() == 1


def test_what_cannot_wait_is_blocked_and_every_run_can_be_asked_for(
    scripted: Callable[[], list[str]], alice: Caller, approver: Client
) -> None:
    in_force(alice.tenant.slug, ask_always=True)
    approval = asked(alice, ANSWER)
    assert approval.findings == []
    queued = asked(alice, ANSWER, mode="async")
    decided(approver, queued, "approve")
    run_queued()
    assert last_execution().status == "succeeded"
    stream = alice.client.post(
        "/api/v1/executions", {"code": ANSWER}, HTTP_ACCEPT="application/x-ndjson"
    )
    assert b'"blocked"' in b"".join(stream)
    in_force(**RULES)
    with pytest.raises(SandboxError, match="needs an approval"):
        execute_code("print(1)")
    assert timedelta(hours=1) < approvals.WAITS


def test_a_cell_waits_too(kept_here: None, alice: Caller, approver: Client) -> None:
    session = opened(alice)
    in_force(alice.tenant.slug, **RULES)
    answer = cell(alice, session, "print(6 * 7)")
    assert answer.status_code == 202
    approval = Approval.objects.get(execution=answer.json()["id"])
    assert session["id"] in approver.get(page("change", approval)).content.decode()
    decided(approver, approval, "approve")
    run_queued()
    told = alice.client.get(f"/api/v1/executions/{approval.execution_id}").json()
    assert (told["status"], told["stdout"]) == ("succeeded", "42\n")


def test_what_a_policy_found_goes_with_the_code_that_it_names(
    scripted: object, alice: Caller, approver: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice)
    decided(approver, approval, "reject")
    assert "print" in str(approval.findings)
    alice.tenant.keep_code_days = 1
    alice.tenant.save()
    clock = SimpleNamespace(now=lambda: timezone.now() + timedelta(days=10))
    monkeypatch.setattr(retention, "timezone", clock)

    retention.apply_retention()

    approval.refresh_from_db()
    assert (approval.findings, approval.execution.code) == ([], "")
    assert approval.code_hash == approval.execution.code_hash
