"""Waiting changes, accounts and recovery codes in Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django_otp.plugins.otp_totp.models import TOTPDevice
from playwright.sync_api import Page, expect

from executions.capabilities.spending.models import Budget
from executions.tenants.models import Tenant
from executions.tenants.service import ADMINISTRATOR, ensure_roles
from providers.models import PendingChange
from sandbox_site import recovery
from tests.support.browser import keep_picture, sign_in, sign_in_quickly
from tests.support.signing_in import code_of


@pytest.fixture(autouse=True)
def _quiet(complaints: list[str]) -> Iterator[None]:
    """No page of this file makes the browser complain."""
    yield
    assert not complaints


def test_a_tenants_change_waits_and_is_approved(
    page: Page, other_page: Page, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    approver = other_page
    sign_in_quickly(approver, "ben")
    page.goto(f"/admin/executions/tenant/{tenant.pk}/change/")
    page.get_by_role("tab", name="Retention").click()
    page.get_by_label("Code retention").fill("30")
    page.get_by_label("Reason").fill("The law.")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("submitted for approval")).to_be_visible()
    change = PendingChange.objects.get()
    page.goto(f"/admin/providers/pendingchange/{change.pk}/change/")
    expect(page.get_by_text("Another administrator must approve it")).to_be_visible()
    approver.goto("/admin/providers/pendingchange/")
    approver.get_by_role("link", name=re.compile("tenant acme")).first.click()
    expect(approver.locator("table.diff")).to_contain_text("30")
    keep_picture(approver, "pending-tenant", whole=True)
    approver.get_by_role("button", name="Approve").click()
    expect(approver.get_by_text("Approved: Save tenant acme.")).to_be_visible()
    tenant.refresh_from_db()
    assert tenant.keep_code_days == 30
    page.goto(f"/admin/executions/tenant/{tenant.pk}/change/")
    expect(page.get_by_role("link", name="Version 2")).to_be_visible()
    page.get_by_role("link", name="Version 1").click()
    page.get_by_role("button", name="Restore version 1").click()
    expect(page.get_by_text("submitted for approval")).to_be_visible()


def test_a_second_account_of_ones_own_is_told_so(
    page: Page, other_page: Page, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    sign_in_quickly(other_page, "ben")
    admin, ben = User.objects.get(username="admin"), User.objects.get(username="ben")
    from providers.services.approvers import hold

    hold([ben.pk], admin.pk)
    page.goto("/admin/executions/budget/add/")
    page.get_by_label("Limit").fill("500")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("submitted for approval")).to_be_visible()
    other_page.goto(f"/admin/providers/pendingchange/{PendingChange.objects.get().pk}/change/")
    expect(other_page.get_by_text("count as one person")).to_be_visible()
    expect(other_page.get_by_role("button", name="Approve")).to_have_count(0)
    other_page.goto(f"/admin/auth/user/{ben.pk}/change/")
    expect(other_page.get_by_text("counts as the same person as")).to_be_visible()
    assert not Budget.objects.exists()


def test_the_list_of_users_and_a_reset(page: Page, settings: Any) -> None:
    ensure_roles()
    ada = User.objects.create_user("ada", password="x", is_staff=True)
    ada.groups.add(Group.objects.get(name=ADMINISTRATOR))
    TOTPDevice.objects.create(user=ada, name="phone", confirmed=True)
    page.goto("/admin/auth/user/")
    keep_picture(page, "users")
    page.get_by_role("row", name=re.compile("ada")).get_by_role("checkbox").check()
    page.locator("select[name=action]").select_option("reset_authenticator")
    page.locator("button[name=index]").first.click()
    expect(page.get_by_text("Authenticators reset: 1.")).to_be_visible()
    assert not TOTPDevice.objects.exists()


def test_recovery_codes_are_shown_when_an_authenticator_is_set_up(
    page: Page, other_page: Page
) -> None:
    page.goto("/admin/authenticator/")
    page.get_by_label("Code", exact=True).fill(code_of(TOTPDevice.objects.get()))
    page.get_by_role("button", name="Set up").click()
    codes = page.locator(".recovery-codes code")
    expect(codes).to_have_count(recovery.CODES)
    keep_picture(page, "recovery-codes", whole=True)
    code = codes.first.inner_text()
    page.goto("/admin/authenticator/")
    expect(codes).to_have_count(0)

    sign_in(other_page, "admin", code=code)
    expect(other_page.get_by_text("A recovery code was used; 9 are left.")).to_be_visible()


def test_the_login_page_itself_leads_to_the_dashboard(page: Page, other_page: Page) -> None:
    again = other_page
    again.goto("/admin/login/")
    again.get_by_label("Username").fill("admin")
    again.get_by_label("Password").fill("correct horse")
    again.get_by_role("button", name="Sign in").click()
    expect(again).to_have_url(re.compile("/admin/$"))
    expect(again.locator("#nav-sidebar")).to_be_attached()
