"""Chromium for tests, signed in to the admin, which notes every complaint of the page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from tests.conftest import Caller, require

PASSWORD = "correct horse"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("dark", "light")
# A page of a busy machine takes its time; what never comes is waited for only where a test fails.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for a folder: its event loop stays in this thread, where other tests start their own."""
    chromium = require("chromium")
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        # Playwright keeps an event loop in this thread, which Django takes for asynchronous code.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield playwright.chromium.launch(
            executable_path=chromium,
            args=[
                *("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"),
                # There is none, and a process for it is one more. No renderer is kept in reserve.
                *("--disable-gpu", "--in-process-gpu", "--renderer-process-limit=1"),
            ],
        )


@pytest.fixture(scope="package")
def contexts(browser: Browser, live_server: object) -> Iterator[tuple[BrowserContext, ...]]:
    """Two, for two people. Scripts and styles stay loaded in them from test to test."""
    made = [
        browser.new_context(base_url=str(live_server), viewport={"width": 1280, "height": 860})
        for _ in range(2)
    ]
    yield tuple(made)
    for context in made:
        context.close()


@contextmanager
def opened_page(context: BrowserContext) -> Iterator[Page]:
    """A page in `context`, without what an earlier test has left there."""
    context.clear_cookies()
    context.clear_permissions()
    page = context.new_page()
    # What the theme has stored belongs to the address, which only a page of it may clear. A page
    # without an icon of its own would have the browser complain that there is none.
    page.goto("/admin/login/")
    page.evaluate("localStorage.clear()")
    yield page
    page.close()


@pytest.fixture
def complaints() -> list[str]:
    """Errors in the console of `page`: a refused script, a broken expression, a missing file."""
    return []


@pytest.fixture
def page(
    contexts: tuple[BrowserContext, ...], transactional_db: None, complaints: list[str]
) -> Iterator[Page]:
    """A page of a superuser, admin."""
    with opened_page(contexts[0]) as page:
        sign_in_quickly(page, "admin")
        note_complaints(page, complaints)
        yield page


@pytest.fixture
def own_page(
    browser: Browser, live_server: object, transactional_db: None, complaints: list[str]
) -> Iterator[Page]:
    """As `page`, in a context of its own: for what cannot be undone there, such as its clock."""
    context = browser.new_context(
        base_url=str(live_server), viewport={"width": 1280, "height": 860}
    )
    with opened_page(context) as page:
        sign_in_quickly(page, "admin")
        note_complaints(page, complaints)
        yield page
    context.close()


@pytest.fixture
def other_page(contexts: tuple[BrowserContext, ...], transactional_db: None) -> Iterator[Page]:
    """A page of somebody who is not signed in."""
    with opened_page(contexts[1]) as page:
        yield page


def sign_in_quickly(page: Page, name: str) -> None:
    """A new superuser, without the form, which has tests of its own."""
    user = User.objects.create_superuser(name, password=PASSWORD)
    client = Client()
    client.force_login(user)
    cookie = settings.SESSION_COOKIE_NAME
    value = client.cookies[cookie].value
    server = page.url.removesuffix("/admin/login/")
    page.context.add_cookies([{"name": cookie, "value": value, "url": server}])


def note_complaints(page: Page, complaints: list[str]) -> None:
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))


@pytest.fixture
def caller(transactional_db: None) -> Caller:
    require("bwrap")
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    return Caller(*create_api_key(tenant, "alice"))


def sign_in(page: Page, name: str, password: str = PASSWORD, code: str = "") -> None:
    page.goto("/admin/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password)
    if code:
        page.get_by_label("Authenticator code").fill(code)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#nav-sidebar")).to_be_attached()


def open_group(page: Page, name: str) -> None:
    """Open a closed group of the menu by the keyboard."""
    group = page.locator("#nav-sidebar details", has=page.get_by_text(name, exact=True))
    expect(group).not_to_have_attribute("open", "")
    group.locator("summary").press("Enter")
    expect(group).to_have_attribute("open", "")


def keep_picture(page: Page, name: str, *, whole: bool = False) -> None:
    """With SCREENSHOTS=folder, a picture of the page."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=whole)


def look_on_every_screen(page: Page, name: str, *, is_list: bool = False) -> None:
    """Hold that nothing makes the page wider than the screen but a list, which scrolls by itself;
    and keep its pictures.
    """
    page.wait_for_load_state()
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 860})
        if not is_list:
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        for scheme in SCHEMES if "SCREENSHOTS" in os.environ else ():
            # As the page's own script does it, once.
            page.evaluate(
                "is_dark => document.documentElement.classList.toggle('dark', is_dark)",
                scheme == "dark",
            )
            keep_picture(page, f"{name}-{width}-{scheme}", whole=True)
