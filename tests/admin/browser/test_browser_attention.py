"""What calls for attention in Chromium: the inbox, the counts, and a verification that shows itself."""

from __future__ import annotations

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from executions.capabilities.alerts.models import Alert
from executions.ledger.models import LedgerCheck, Verification
from executions.ledger.verification import verify
from executions.runs import heartbeat, ledger_checks
from executions.runs.ledger_checks import carry_out
from executions.runs.models import hour_of
from executions.runs.statistics import TENANT, Increment, add
from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from providers.models import PendingChange
from tests.support.browser import keep_picture


def test_the_front_page_says_what_waits_and_a_verification_shows_itself(
    page: Page,
    complaints: list[str],
    lease: heartbeat.Heartbeat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = timezone.now()
    PendingChange.objects.create(
        subject="local", shown_as="", action="activate", base_version=1, author="user:ada"
    )
    Alert.objects.create(
        rule="error_rate",
        subject="e2b",
        active_key="error_rate e2b",
        severity="critical",
        message="e2b failed at 12.0 % of 400 executions before any code ran.",
        opened_at=now,
        seen_at=now,
    )
    page.goto("/admin/")
    inbox = page.get_by_role("region", name="Needs attention")
    expect(inbox.get_by_role("link", name="Open alerts")).to_be_visible()
    menu = page.locator("#nav-sidebar")
    expect(menu.get_by_role("link", name="Pending changes 1")).to_be_visible()
    ledger = page.locator("section", has=page.get_by_role("heading", name="Ledger"))
    expect(ledger).to_contain_text("Not verified yet.")
    keep_picture(page, "attention")
    page.set_viewport_size({"width": 390, "height": 860})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 860})

    ledger.get_by_role("button", name="Verify").press("Enter")
    expect(ledger).to_contain_text("Verification queued")
    lease.take()

    def seen_halfway(**_: object) -> Verification:
        LedgerCheck.objects.update(entries=430, total=1000)
        expect(ledger.get_by_role("progressbar", name="Entries checked")).to_have_js_property(
            "value", 43
        )
        return verify()

    monkeypatch.setattr(ledger_checks, "verify", seen_halfway)
    check = carry_out()
    assert check is not None
    expect(ledger).to_contain_text("Verified: no problems found")
    expect(ledger.get_by_role("button", name="Verify")).to_be_visible()
    assert complaints == []


def test_a_tenants_page_fits_and_shows_its_use(page: Page, complaints: list[str]) -> None:
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    create_api_key(tenant, "ci")
    add([Increment(TENANT, "acme", hour_of(timezone.now()), "", 41, 0.5)])
    page.goto(f"/admin/executions/tenant/{tenant.pk}/change/")
    expect(page.get_by_role("img", name="Executions by day, the last 30")).to_be_visible()
    expect(page.get_by_role("progressbar", name="Executions per day")).to_be_visible()
    expect(page.locator("#content")).to_contain_text("41 executions")
    page.set_viewport_size({"width": 390, "height": 860})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
