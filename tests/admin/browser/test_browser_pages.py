"""Every other page of the admin in Chromium: it opens, works under the policy, and fits."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.contrib.auth.models import Group, User
from django.db.models.functions import Now
from django_otp.plugins.otp_totp.models import TOTPDevice
from playwright.sync_api import Page, expect

from executions.runs.models import Process
from executions.tenants.keys import authenticate, create_api_key
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import AUDITOR, ensure_roles
from providers.services import save_config
from tests.support.browser import PASSWORD, keep_picture, open_group, sign_in
from tests.support.signing_in import code_of


@pytest.fixture(autouse=True)
def _quiet(complaints: list[str]) -> Iterator[None]:
    """No page of this file makes the browser complain."""
    yield
    assert not complaints


def test_a_tenant_and_a_key_are_made_and_the_key_is_shown_once(page: Page) -> None:
    page.goto("/admin/executions/tenant/add/")
    page.get_by_label("Slug").fill("acme")
    page.get_by_label("Name").fill("Acme")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was added successfully")).to_be_visible()
    keep_picture(page, "tenants")

    page.get_by_role("link", name="acme", exact=True).last.click()
    expect(page.locator("#content")).to_contain_text("Stored bytes per day")
    expect(page.get_by_label("Max concurrent executions")).to_have_attribute("placeholder", "10")
    page.get_by_label("Max concurrent executions").fill("3")
    keep_picture(page, "tenant", whole=True)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was changed successfully")).to_be_visible()
    assert Tenant.objects.get().max_running == 3

    create_api_key(Tenant.objects.get(), "older")
    page.goto("/admin/executions/apikey/add/")
    page.locator("#id_tenant").locator("xpath=following-sibling::span").click()
    page.get_by_role("option", name="acme").click()
    page.get_by_label("Name").fill("ci")
    page.get_by_label("Configure providers").check()
    keep_picture(page, "api-key-add")
    page.get_by_role("button", name="Save", exact=True).click()
    shown = page.locator("#new-key")
    expect(shown).to_have_text(re.compile("cfd_"))
    assert authenticate(shown.inner_text()).has_scope("admin")
    page.get_by_role("button", name="Copy key").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    expect(page.locator("#example-call")).to_contain_text(shown.inner_text())
    page.goto("/admin/executions/apikey/")
    expect(page.get_by_role("row", name=re.compile("cfd_.* ci\\b"))).to_be_visible()
    page.get_by_role("row", name=re.compile("older")).get_by_role("checkbox").check()
    page.locator("select[name=action]").select_option("revoke_keys")
    page.locator("button[name=index]").first.click()
    expect(page.get_by_text("1 key was revoked.")).to_be_visible()
    keep_picture(page, "api-keys")
    assert ApiKey.objects.get(name="older").revoked_at is not None


def test_a_user_is_made_an_auditor_who_can_only_look(page: Page, other_page: Page) -> None:
    ensure_roles()
    row = save_config("local", {"pool_size": 2})
    page.goto("/admin/auth/user/add/")
    page.get_by_label("Username").fill("ada")
    page.locator("#id_password1").fill("a long and strange phrase")
    page.locator("#id_password2").fill("a long and strange phrase")
    page.get_by_role("button", name="Save", exact=True).click()
    ada = User.objects.get(username="ada")
    expect(page).to_have_url(re.compile(f"/auth/user/{ada.pk}/change/"))
    keep_picture(page, "user")
    ada.is_staff = True
    ada.save()
    ada.groups.add(Group.objects.get(name=AUDITOR))

    auditor = other_page
    sign_in(auditor, "ada", "a long and strange phrase")
    auditor.goto(f"/admin/providers/providerconfig/{row.pk}/change/")
    expect(auditor.get_by_text("Idle sandboxes")).to_be_visible()
    expect(auditor.get_by_role("button", name="Save", exact=True)).to_have_count(0)
    expect(auditor.get_by_role("button", name="Test connection")).to_have_count(0)
    keep_picture(auditor, "provider-auditor")


def test_roles_and_the_log_of_what_was_done(page: Page) -> None:
    ensure_roles()
    page.goto("/admin/auth/group/")
    expect(page.get_by_role("link", name="Auditor")).to_be_visible()
    keep_picture(page, "roles")
    page.goto("/admin/executions/tenant/add/")
    page.get_by_label("Slug").fill("acme")
    page.get_by_label("Name").fill("Acme")
    page.get_by_role("button", name="Save", exact=True).click()
    page.goto("/admin/admin/logentry/")
    expect(page.get_by_role("row", name=re.compile("acme"))).to_contain_text("Added.")
    keep_picture(page, "admin-actions")


def test_an_authenticator_is_set_up_and_asked_for(page: Page, other_page: Page) -> None:
    page.goto("/admin/authenticator/")
    expect(page.get_by_alt_text("QR code of the authenticator's secret")).to_be_visible()
    assert page.locator(".qr").evaluate("image => image.naturalWidth") > 0
    keep_picture(page, "authenticator")
    device = TOTPDevice.objects.get()
    page.get_by_label("Code", exact=True).fill(code_of(device))
    page.get_by_role("button", name="Set up").click()
    expect(page.get_by_text("The authenticator was set up.")).to_be_visible()

    again = other_page
    again.goto("/admin/")
    keep_picture(again, "login")
    again.get_by_label("Username").fill("admin")
    again.get_by_label("Password").fill(PASSWORD)
    again.get_by_role("button", name="Sign in").click()
    expect(again.get_by_text("Please enter the correct username and password")).to_be_visible()
    TOTPDevice.objects.update(last_t=-1)
    sign_in(again, "admin", code=code_of(device))


def test_who_guesses_is_told_to_wait(page: Page, other_page: Page) -> None:
    guessing = other_page
    for _ in range(5):
        guessing.goto("/admin/")
        guessing.get_by_label("Username").fill("admin")
        guessing.get_by_label("Password").fill("wrong")
        guessing.get_by_role("button", name="Sign in").click()
    expect(guessing.get_by_role("heading", name="Too many attempts")).to_be_visible()
    keep_picture(guessing, "locked-out")
    page.goto("/admin/axes/accessattempt/")
    expect(page.get_by_role("row", name=re.compile("admin"))).to_be_visible()
    keep_picture(page, "login-attempts")


def test_the_keyboard_reaches_the_menu_and_the_form(page: Page) -> None:
    row = save_config("local", {"pool_size": 2})
    page.goto(f"/admin/providers/providerconfig/{row.pk}/change/")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
    assert {"id_launcher", "id_pool_size", "test-connection"} <= reached
    assert any("Dashboard" in text for text in reached)

    # The theme opens these by a click alone.
    for name, shown in (("admin", "Log out"), ("All applications", "")):
        opener = page.get_by_role("button", name=name, exact=False).last
        opener.focus()
        page.keyboard.press("Enter")
        if shown:
            expect(page.get_by_role("button", name=shown)).to_be_visible()
            page.keyboard.press("Enter")
            expect(page.get_by_role("button", name=shown)).to_be_hidden()
    expect(page.get_by_role("link", name="Legal holds").last).to_be_visible()


def test_the_processes_are_listed_and_open_nothing(page: Page) -> None:
    Process.objects.create(instance="web-2", kind="web", pid=4711, beat=3)
    Process.objects.create(instance="web-1", kind="worker", pid=12, ended_at=Now())
    page.goto("/admin/")
    open_group(page, "System")
    page.get_by_role("link", name="Processes").first.click()

    expect(page.get_by_role("row").filter(has_text="web-2")).to_contain_text("serving")
    expect(page.get_by_role("row").filter(has_text="web-1")).to_contain_text("ended")
    expect(page.get_by_role("row").get_by_role("link", name="web-2")).to_have_count(0)
    keep_picture(page, "processes")
    # What was opened stays so on other pages.
    page.goto("/admin/")
    expect(page.get_by_role("link", name="Processes").first).to_be_visible()


def test_the_sign_of_what_the_ledger_does_not_cover_opens_by_mouse_and_keyboard(
    page: Page, complaints: list[str]
) -> None:
    page.goto("/admin/executions/process/")
    sign = page.get_by_role("button", name="Not covered by the ledger")
    note = page.get_by_role("note", name="Not covered by the ledger")
    told = "Current state, updated every few seconds."
    expect(sign).to_be_visible()
    expect(note).to_be_hidden()
    sign.click()
    expect(note).to_contain_text(told)
    expect(note).to_be_in_viewport(ratio=1)
    sign.click()
    expect(note).to_be_hidden()
    # A click elsewhere closes it too.
    sign.click()
    expect(note).to_be_visible()
    page.mouse.click(1200, 800)
    expect(note).to_be_hidden()

    page.set_viewport_size({"width": 390, "height": 860})
    page.get_by_role("button", name="Menu").and_(page.locator(":visible")).focus()
    # Links to the pages above this one come before it.
    for _ in range(6):
        page.keyboard.press("Tab")
        if sign.evaluate("sign => sign === document.activeElement"):
            break
    expect(sign).to_be_focused()
    page.keyboard.press("Enter")
    expect(note).to_contain_text(told)
    expect(note).to_be_in_viewport(ratio=1)
    page.keyboard.press("Escape")
    expect(note).to_be_hidden()
    expect(sign).to_be_focused()
    page.keyboard.press("Space")
    expect(note).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 860})

    # A column is named where the rest of its page is covered, and a covered page has no sign.
    page.goto("/admin/executions/schedule/")
    sign.click()
    expect(note).to_contain_text("Next run: Updated for each run, and checked against the schedule")
    page.goto("/admin/executions/tenant/")
    expect(page.locator("h1")).to_be_visible()
    expect(sign).to_have_count(0)
    assert complaints == []
