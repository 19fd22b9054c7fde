"""What runs in the background of a session costs its time, once, whoever records its end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone

from executions.capabilities.spending.models import Budget, Spending
from executions.ledger.verification import verify
from executions.runs import event_log
from executions.runs.models import Execution
from executions.sessions import cells
from executions.sessions.ending import end_leftovers
from executions.sessions.maintenance import maintain
from providers.errors import ProviderUnavailable
from providers.models import ProviderPrice
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.sessions import URL, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("kept_here"), pytest.mark.database]

PRICE = Decimal("0.02")


def started(caller: Caller, session: dict[str, Any]) -> Execution:
    """Begun an hour ago, as its record says."""
    body = {"command": ["sleep", "600"], "background": True}
    answer = caller.client.post(f"{URL}/{session['id']}/processes", body)
    assert answer.status_code == 201, answer.content
    execution = Execution.objects.get(pk=answer.json()["execution"])
    begun = timezone.now() - timedelta(hours=1)
    Execution.objects.filter(pk=execution.pk).update(created_at=begun, started_at=begun)
    return execution


def kill() -> None:
    (sandbox,) = kept_here.sandboxes()
    sandbox.processes.signal(1, "SIGKILL")
    wait_for(lambda: sandbox.processes.list()[0].exit_code is not None)


def ends_and_is_recorded_by_the_schedule(caller: Caller, session: dict[str, Any], pk: Any) -> None:
    kill()
    maintain()


def is_cancelled(caller: Caller, session: dict[str, Any], pk: Any) -> None:
    assert caller.client.post(f"/api/v1/executions/{pk}/cancel").status_code == 200


def is_cancelled_and_does_not_answer(caller: Caller, session: dict[str, Any], pk: Any) -> None:
    def refuse(pid: int, name: str) -> bool:
        raise ProviderUnavailable("It does not answer.")

    (sandbox,) = kept_here.sandboxes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox.processes, "signal", refuse)
        is_cancelled(caller, session, pk)


def has_its_session_closed(caller: Caller, session: dict[str, Any], pk: Any) -> None:
    assert caller.client.delete(f"{URL}/{session['id']}").status_code == 204


def has_its_session_reset(caller: Caller, session: dict[str, Any], pk: Any) -> None:
    assert caller.client.post(f"{URL}/{session['id']}/reset").status_code == 200


def loses_its_sandbox(caller: Caller, session: dict[str, Any], pk: Any) -> None:
    for sandbox in kept_here.sandboxes():
        sandbox.close()
    maintain()


@pytest.mark.parametrize(
    "what_happens",
    [
        ends_and_is_recorded_by_the_schedule,
        is_cancelled,
        is_cancelled_and_does_not_answer,
        has_its_session_closed,
        has_its_session_reset,
        loses_its_sandbox,
    ],
    ids=lambda each: each.__name__,
)
def test_it_costs_its_time_once_whoever_records_its_end(
    alice: Caller,
    monkeypatch: pytest.MonkeyPatch,
    what_happens: Callable[[Caller, dict[str, Any], Any], None],
) -> None:
    monkeypatch.setattr(event_log.shares, "of_one", 0)
    monkeypatch.setattr(cells, "TERM_SECONDS", 0.2)
    ProviderPrice.objects.create(provider_id="kept_here", per_second=PRICE)
    session = opened(alice)
    pk = started(alice, session).pk
    what_happens(alice, session, pk)
    for _ in range(2):
        maintain()
        end_leftovers(row(session))
    execution = Execution.objects.get(pk=pk)
    assert execution.run_ms is not None
    assert execution.run_ms >= 3_600_000
    assert execution.cost is not None
    assert abs(execution.cost - PRICE * Decimal(execution.run_ms) / 1000) < Decimal("0.00000001")
    spent = Spending.objects.get()
    assert (spent.tenant_slug, spent.amount, spent.executions) == (
        "wonderland",
        execution.cost,
        1,
    )
    assert [str(finding) for finding in verify().findings] == []


def test_it_uses_up_a_budget_which_then_refuses_the_next(alice: Caller) -> None:
    """Also where it is followed, as it is where nothing is in the way."""
    ProviderPrice.objects.create(provider_id="kept_here", per_second=0, per_run=Decimal("1"))
    Budget.objects.create(tenant_slug="wonderland", limit=Decimal("1"))
    session = opened(alice)
    execution = started(alice, session)
    kill()
    wait_for(lambda: Execution.objects.get(pk=execution.pk).finished_at is not None)
    assert Spending.objects.get().executions == 1
    body = {"command": ["true"], "background": True}
    refused = alice.client.post(f"{URL}/{session['id']}/processes", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")


def test_one_that_was_not_started_costs_nothing(alice: Caller) -> None:
    ProviderPrice.objects.create(provider_id="kept_here", per_second=0, per_run=Decimal("1"))
    body = {"command": ["/no/such"], "background": True}
    refused = alice.client.post(f"{URL}/{opened(alice)['id']}/processes", body)
    assert refused.status_code == 400
    assert Execution.objects.get().cost is None
    assert not Spending.objects.exists()
