"""Alerts of what tenants' code does again and again: of that tenant, and of nobody else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from executions.capabilities.alerts import rules
from executions.capabilities.alerts.models import Alert
from executions.capabilities.alerts.rules import SHARED_CODE
from executions.capabilities.alerts.service import QUIET, watch
from executions.capabilities.network.attempts import store
from executions.kernel.text import first_uuid7
from executions.runs.models import Execution, hour_of
from executions.tenants.models import Tenant
from providers.models import CircuitBreaker, ProviderCheckCount, ProviderConfig
from tests.capabilities.alerts import open_alerts
from tests.conftest import Caller
from tests.support.ended_runs import ended
from tests.support.execution_rows import make_rows

pytestmark = pytest.mark.django_db

MEMORY = {"status": "out_of_memory", "error_code": "SB006"}
TIME = {"status": "timed_out", "error_code": "SB005"}


def test_what_was_asked_for_long_before_counts_when_it_runs(alice: Caller) -> None:
    for _ in range(6):
        run = ended(alice, "failed", observed="sigsys")
        now = timezone.now()
        old = first_uuid7(now - timedelta(days=3)).int + run.pk.int % 2**64
        Execution.objects.filter(pk=run.pk).update(id=UUID(int=old), run_at=now)
    assert watch() == 1


def test_each_rule_opens_beyond_its_threshold_and_names_the_tenant(
    alice: Caller, charlie: Caller
) -> None:
    for status, code, number in (("out_of_memory", "SB006", 20), ("timed_out", "SB005", 20)):
        for _ in range(number):
            ended(alice, status, error_code=code)
    for observed in ("sigsys", "process_limit"):
        for _ in range(5):
            ended(alice, "failed", observed=observed)
    other = f"sha256:{'1' * 64}"
    ended(charlie, "failed", observed="sigsys process_limit process_burst", code_hash=other)
    assert watch() == 0
    ended(alice, "out_of_memory", error_code="SB006")
    ended(alice, "timed_out", error_code="SB005")
    ended(alice, "failed", observed="sigsys")
    ended(alice, "failed", observed="process_burst")
    assert watch() == 4
    assert open_alerts() == {
        "repeated_out_of_memory wonderland": (
            "21 runs of wonderland ran out of memory within an hour, of one program."
        ),
        "repeated_timeouts wonderland": (
            "21 runs of wonderland ran out of time within an hour, of one program."
        ),
        "forbidden_calls wonderland": (
            "6 runs of wonderland had processes ended by SIGSYS within an hour, of one program."
        ),
        "process_bursts wonderland": (
            "6 runs of wonderland started very many processes within an hour, of one program."
        ),
    }
    assert set(Alert.objects.values_list("severity", flat=True)) == {"warning"}
    assert not CircuitBreaker.objects.exists()


def refuse(tenant: Tenant, host: str, number: int, outcome: str = "refused") -> None:
    attempt = {"at": 1.5, "host": host, "port": 443, "outcome": outcome}
    store([attempt] * number, tenant.pk, tenant.slug)


def test_a_tenant_whose_code_asks_for_many_refused_hosts_is_named_with_the_worst(
    alice: Caller, charlie: Caller, settings: Any
) -> None:
    settings.ALERT_THRESHOLDS = {**settings.ALERT_THRESHOLDS, "refused_attempts_per_hour": 10}
    refuse(alice.tenant, "evil.example", 6)
    refuse(alice.tenant, "other.example", 4)
    refuse(alice.tenant, "pypi.org", 100, "allowed")
    refuse(charlie.tenant, "evil.example", 10)
    assert watch() == 0
    refuse(alice.tenant, "evil.example", 1)
    assert watch() == 1
    assert open_alerts() == {
        "refused_hosts wonderland": (
            "11 attempts of wonderland to reach a host were refused within an hour, 7 of them to "
            "evil.example."
        )
    }


def test_code_of_several_tenants_is_one_alert_however_many_programs_it_is(
    alice: Caller, charlie: Caller
) -> None:
    for letter in "abc":
        for slug in ("wonderland", "elsewhere"):
            make_rows(11, **MEMORY, tenant_slug=slug, code_hash=f"sha256:{letter * 64}")
    make_rows(5, **MEMORY, tenant_slug="third", code_hash=f"sha256:{'b' * 64}")
    watch()
    found = open_alerts()
    assert set(found) == {
        f"repeated_out_of_memory {slug}" for slug in ("wonderland", "elsewhere", SHARED_CODE)
    }
    assert found[f"repeated_out_of_memory {SHARED_CODE}"] == (
        f"27 runs of sha256:{'b' * 64}, by 3 tenants, ran out of memory within an hour."
    )
    assert "of 3 programs" in found["repeated_out_of_memory elsewhere"]


def test_what_is_longer_ago_is_no_more_and_what_waited_in_the_queue_is(alice: Caller) -> None:
    now = timezone.now()
    rows = make_rows(21, **TIME)
    made = first_uuid7(now - timedelta(minutes=100)).int
    for number, row in enumerate(rows):
        # Asked for long ago, and ended just now.
        Execution.objects.filter(pk=row.pk).update(id=type(row.pk)(int=made + number))
    assert watch() == 1
    Execution.objects.update(finished_at=now - timedelta(minutes=61))
    Alert.objects.update(seen_at=now - QUIET - timedelta(seconds=1))
    assert watch() == 0
    assert not open_alerts()


def test_of_too_many_subjects_the_worst_are_told_and_how_many_are_not(
    alice: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MOST_SUBJECTS", 3)
    settings.ALERT_THRESHOLDS = {**settings.ALERT_THRESHOLDS, "timed_out_per_hour": 1}
    for number in range(5):
        make_rows(2 + number, **TIME, tenant_slug=f"t{number}", code_hash=f"sha256:{number}")
        # Of this the least is the worst.
        provider = f"p{number}"
        ProviderConfig.objects.create(provider_id=provider)
        ProviderCheckCount.objects.create(
            provider_id=provider, hour=hour_of(timezone.now()), checks=100, good_checks=90 + number
        )
    assert watch() == 3 + 3
    found = open_alerts()
    assert set(found) == {
        *(f"repeated_timeouts t{number}" for number in (4, 3, 2)),
        *(f"provider_availability p{number}" for number in (0, 1, 2)),
    }
    told = [text for text in found.values() if "more" in text]
    assert set(told) == {found["repeated_timeouts t2"], found["provider_availability p2"]}
    assert all("2 more have the same problem" in text for text in told)
