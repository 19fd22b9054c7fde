"""Cancelling: queued or running, here or elsewhere; what ends first stands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connections
from django.test import Client

from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import active_runs
from executions.runs import service as runs
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Execution, LateResult, RunSignal
from executions.runs.queue import claim_next
from executions.runs.worker import run_claimed
from tests.conftest import Caller
from tests.support.held import ended, opened
from tests.support.running import run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.database

EXECUTIONS = "/api/v1/executions"


def cancel(caller: Caller, execution_id: object) -> Any:
    return caller.client.post(f"{EXECUTIONS}/{execution_id}/cancel")


def cancellations() -> list[dict[str, Any]]:
    entries = LedgerEntry.objects.filter(kind="cancellation").order_by("sequence")
    return [entry.stated for entry in entries]


class ElsewhereRun:
    """A run as the process that has it knows it."""

    log = None
    handed_over = True

    def __init__(self, execution_id: UUID) -> None:
        self.execution_id = execution_id
        self.cancelled_by: list[str] = []

    def lose(self) -> None:
        raise AssertionError

    def end_with_error(self, error: object) -> None:
        raise AssertionError

    def cancel(self, asked_by: str) -> None:
        self.cancelled_by.append(asked_by)


@pytest.mark.django_db(transaction=True)
def test_what_is_queued_is_never_run(alice: Caller) -> None:
    execution = opened(alice, "async")

    answer = cancel(alice, execution.pk)

    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert answer.json()["receipt"]
    assert claim_next() is None
    assert [(each["subject"], each["actor"]) for each in cancellations()] == [
        (str(execution.pk), f"key:{alice.api_key.prefix}")
    ]
    assert verify().is_intact


@pytest.mark.django_db(transaction=True)
def test_it_is_the_tenants_to_cancel(alice: Caller, bob: Caller, charlie: Caller) -> None:
    execution = opened(alice, "async")

    assert cancel(charlie, execution.pk).status_code == 404
    assert cancel(charlie, "0" * 32).status_code == 404
    assert Execution.objects.get().status == "queued"
    assert cancel(bob, execution.pk).json()["status"] == "cancelled"


@pytest.mark.django_db(transaction=True)
def test_again_it_is_the_same_and_entered_once(alice: Caller) -> None:
    execution = opened(alice, "async")

    first = cancel(alice, execution.pk).json()

    assert cancel(alice, execution.pk).json() == first
    assert len(cancellations()) == 1


@pytest.mark.django_db(transaction=True)
def test_what_has_ended_is_a_conflict(alice: Caller) -> None:
    execution = opened(alice)
    ended(execution)

    answer = cancel(alice, execution.pk)

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert answer.json()["id"] == str(execution.pk)
    assert cancellations() == []


@pytest.mark.django_db(transaction=True)
def test_the_process_that_runs_it_is_told(alice: Caller, lease: Heartbeat) -> None:
    execution, other = opened(alice), opened(alice)
    active_runs.post_request(execution.pk, RunSignal.Kind.CANCEL, "key:x")

    runs = ElsewhereRun(execution.pk), ElsewhereRun(other.pk)
    with active_runs.track(runs[0]), active_runs.track(runs[1]):
        active_runs.deliver_requests(lease.mine())

    assert [run.cancelled_by for run in runs] == [["key:x"], []]


@pytest.mark.django_db(transaction=True)
def test_what_its_process_does_not_end_is_closed_and_its_result_comes_late(
    scripted: Callable[[], list[str]], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its process hangs: the run here goes on, because it cannot be broken off."""
    monkeypatch.setattr(runs, "PATIENCE_SECONDS", 0.0)
    code = (
        "from executions.models import Execution\n"
        "from executions.runs.service import cancel\n"
        "from executions.kernel.coroutines import run_sync\n"
        "told = run_sync(cancel(Execution.objects.get(), 'key:x'))\n"
        "answer = ExecutionResult(told.status, '', 0, 0.0)"
    )

    body = run(alice, code).json()

    assert body["status"] == "cancelled"
    assert body["stdout"] == ""
    assert Execution.objects.get().error_message == "Cancelled by key:x."
    assert LateResult.objects.get().stdout == "cancelled"
    assert body["late_result"]["stdout"] == "cancelled"


@pytest.mark.django_db(transaction=True)
def test_a_result_that_was_first_stands(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    execution = opened(alice)

    def end_meanwhile(*_: object) -> bool:
        ended(Execution.objects.get())
        return True

    monkeypatch.setattr(active_runs, "post_request", end_meanwhile)

    assert cancel(alice, execution.pk).status_code == 409
    assert Execution.objects.get().status == "succeeded"


@pytest.mark.django_db(transaction=True)
def test_a_run_of_this_process_ends_at_once_and_its_sandbox_with_it(
    local_active: None, alice: Caller
) -> None:
    execution = opened(alice, "async", code="import time; time.sleep(60)", timeout=70)

    def work() -> None:
        claimed = claim_next()
        assert claimed is not None
        run_claimed(claimed)
        connections.close_all()

    worker = threading.Thread(target=work)
    worker.start()
    wait_until(lambda: any(each.handed_over for each in active_runs.runs()), 60)

    answer = cancel(alice, execution.pk)
    worker.join(60)

    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert answer.json()["provider"] == "local"
    assert not worker.is_alive()
    assert active_runs.wait_for_ends(20)
    assert verify().is_intact


@pytest.mark.django_db(transaction=True)
def test_the_admin_needs_the_permission(alice: Caller) -> None:
    execution = opened(alice, "async")
    user = get_user_model().objects.create_user("operator", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="view_execution"))
    client = Client()
    client.force_login(user)
    page = f"/admin/executions/execution/{execution.pk}"

    assert client.post(f"{page}/cancel").status_code == 403
    assert "Cancel this execution</button>" not in client.get(f"{page}/change/").content.decode()
    user.user_permissions.add(Permission.objects.get(codename="cancel_execution"))
    assert client.get(f"{page}/cancel").status_code == 404
    assert "Cancel this execution</button>" in client.get(f"{page}/change/").content.decode()
    assert client.post(f"{page}/cancel").status_code == 302

    assert Execution.objects.get().error_message == "Cancelled by user:operator."
    assert "Cancelled by user:operator." in client.get(f"{page}/change/").content.decode()
    assert [each["actor"] for each in cancellations()] == ["user:operator"]
