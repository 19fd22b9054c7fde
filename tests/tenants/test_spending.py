"""What executions cost, what a budget stops, and who hears of it."""

from __future__ import annotations

import logging
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.alerts.service import watch
from executions.capabilities.spending.models import Budget, Spending, SpendingAlert
from executions.capabilities.spending.service import spend
from executions.runs.models import Execution
from executions.tasks import watch_spending
from providers.models import ProviderPrice
from tests.conftest import Caller
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("scripted"), pytest.mark.database]

SLEEP = "import time; time.sleep(0.2)"


@pytest.fixture
def price() -> Decimal:
    return ProviderPrice.objects.create(
        provider_id="scripted", per_second=Decimal("0.02")
    ).per_second


def last() -> Execution:
    found = Execution.objects.first()
    assert found is not None
    return found


def test_an_execution_costs_its_seconds_times_the_price(alice: Caller, price: Decimal) -> None:
    answer = run(alice, SLEEP).json()
    execution = last()
    assert execution.cost is not None
    assert execution.start_ms is not None
    assert execution.run_ms is not None
    seconds = Decimal(execution.start_ms + execution.run_ms) / 1000
    assert abs(execution.cost - price * seconds) < Decimal("0.00000001")
    assert Decimal("0.004") <= execution.cost < Decimal("0.04")
    assert answer["cost"] == str(execution.cost)
    row = Spending.objects.get()
    assert (row.tenant_slug, row.amount, row.executions) == ("wonderland", execution.cost, 1)


def test_code_that_fails_costs_too_and_a_sandbox_that_never_was_does_not(
    alice: Caller, price: Decimal
) -> None:
    run(alice, "answer = ExecutionResult('', '', 1, 0.0)")
    assert last().cost is not None
    run(alice, "pass", language="unlucky")
    assert (last().status, last().cost) == ("error", None)
    assert Spending.objects.get().executions == 1


def test_a_provider_without_a_price_costs_nothing(alice: Caller) -> None:
    run(alice, "pass")
    assert last().cost is None
    assert not Spending.objects.exists()


def test_spending_adds_up_by_tenant_and_day(alice: Caller, charlie: Caller) -> None:
    for slug in ("wonderland", "wonderland", "elsewhere"):
        spend(slug, Decimal("0.25"))
    rows = {row.tenant_slug: (row.amount, row.executions) for row in Spending.objects.all()}
    assert rows == {"wonderland": (Decimal("0.5"), 2), "elsewhere": (Decimal("0.25"), 1)}


def test_a_budget_that_is_used_up_stops_its_tenant_and_nobody_else(
    alice: Caller, charlie: Caller
) -> None:
    Budget.objects.create(tenant_slug="wonderland", period="day", limit=Decimal("1"))
    spend("wonderland", Decimal("0.99"))
    assert run(alice, "pass").status_code == 200
    spend("wonderland", Decimal("0.01"))
    response = run(alice, "pass")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "SB008")
    assert "budget for this day" in response.json()["error"]["message"]
    assert 0 < int(response["Retry-After"]) <= 86_400
    assert run(charlie, "pass").status_code == 200
    assert Execution.objects.filter(tenant=alice.tenant).count() == 1


def test_a_budget_for_all_stops_all(alice: Caller, charlie: Caller) -> None:
    Budget.objects.create(limit=Decimal("1"))
    spend("wonderland", Decimal("0.5"))
    assert run(charlie, "pass").status_code == 200
    spend("elsewhere", Decimal("0.5"))
    for caller in (alice, charlie):
        assert run(caller, "pass").json()["error"]["code"] == "SB008"
    assert SpendingAlert.objects.get().kind == "stop"


def test_a_day_does_not_count_what_the_month_does(alice: Caller) -> None:
    today = timezone.now().date()
    Budget.objects.create(period="day", limit=Decimal("1"))
    Spending.objects.create(
        tenant_slug="wonderland", day=today - timedelta(days=1), amount=Decimal("5")
    )
    assert run(alice, "pass").status_code == 200
    Budget.objects.create(period="month", limit=Decimal("4"))
    Spending.objects.update(day=today.replace(day=1))
    assert run(alice, "pass").status_code == 429


def test_a_budget_nearly_used_up_is_told_once_a_day(
    alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    Budget.objects.create(tenant_slug="wonderland", limit=Decimal("10"), warn_percent=50)
    spend("wonderland", Decimal("4.9"))
    assert watch_spending() == 0
    spend("wonderland", Decimal("0.1"))
    with caplog.at_level(logging.WARNING, "executions.capabilities.spending.service"):
        assert (watch_spending(), watch_spending()) == (1, 0)
    assert "5.0000 of 10.0000 for this month spent by wonderland" in caplog.text
    assert SpendingAlert.objects.get().kind == "warning"
    assert run(alice, "pass").status_code == 200


def test_twice_the_daily_average_is_told(alice: Caller) -> None:
    today = timezone.now().date()
    for days, amount in ((1, "1"), (3, "2"), (40, "100")):
        Spending.objects.create(
            tenant_slug="wonderland", day=today - timedelta(days=days), amount=Decimal(amount)
        )
    spend("wonderland", Decimal("3"))
    assert watch_spending() == 0
    spend("wonderland", Decimal("0.01"))
    spend("elsewhere", Decimal("99"))
    assert watch_spending() == 1
    alert = SpendingAlert.objects.get()
    assert (alert.kind, alert.tenant_slug) == ("spike", "wonderland")
    assert "3.0100 today, against 1.5000" in alert.message


def test_a_days_and_a_months_budget_are_each_told(alice: Caller) -> None:
    for period in ("day", "month"):
        Budget.objects.create(tenant_slug="wonderland", period=period, limit=Decimal("10"))
    spend("wonderland", Decimal("9"))
    assert (watch_spending(), watch_spending()) == (2, 0)
    spend("wonderland", Decimal("1"))
    assert "budget for this day" in run(alice, "pass").json()["error"]["message"]
    # The day's is raised, and the month's stops the next.
    Budget.objects.get(period="day").delete()
    assert "budget for this month" in run(alice, "pass").json()["error"]["message"]
    told = SpendingAlert.objects.order_by("kind", "period").values_list("kind", "period")
    assert [*told] == [("stop", "day"), ("stop", "month"), ("warning", "day"), ("warning", "month")]
    assert watch() >= 4
    opened = Alert.objects.filter(rule__startswith="budget_").values_list("rule", "subject")
    assert sorted(opened) == [
        ("budget_nearly_used_up", "wonderland (day)"),
        ("budget_nearly_used_up", "wonderland (month)"),
        ("budget_used_up", "wonderland (day)"),
        ("budget_used_up", "wonderland (month)"),
    ]


def test_two_of_one_kind_and_period_on_one_day_are_one(alice: Caller) -> None:
    told = {"kind": "stop", "tenant_slug": "wonderland", "day": timezone.now().date()}
    # As those have it that were told before periods were.
    SpendingAlert.objects.create(**told)
    SpendingAlert.objects.create(**told, period="day")
    with pytest.raises(IntegrityError), transaction.atomic():
        SpendingAlert.objects.create(**told, period="day")
