"""No page lets a script run that is not a file of ours, and no file of ours evaluates text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.staticfiles import finders
from django.test import Client

from tests.support.processes import ROOT

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

PAGES = (
    "/admin/",
    "/admin/login/",
    "/admin/pool/",
    "/admin/playground/",
    "/admin/authenticator/",
    "/admin/providers/providerconfig/",
    "/admin/providers/providerconfig/add/",
    "/admin/providers/providerconfig/add/?provider=local",
    "/admin/providers/configversion/",
    "/admin/providers/pendingchange/",
    "/admin/executions/execution/",
    "/admin/executions/tenant/add/",
    "/admin/executions/apikey/add/",
    "/admin/auth/user/add/",
    "/admin/auth/group/add/",
    "/admin/admin/logentry/",
    "/admin/axes/accessattempt/",
)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_holds_nothing_inline_and_its_policy_allows_nothing_inline(
    path: str, admin_client: Client
) -> None:
    client = Client() if "login" in path else admin_client
    answer = client.get(path)
    assert answer.status_code == 200
    policy = dict(
        part.strip().split(" ", 1)
        for part in answer["Content-Security-Policy"].split(";")
        if " " in part.strip()
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["style-src"] == "'self'"
    assert policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    page = answer.content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*type=\"application/json\")", page)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)


def test_the_docs_allow_styles_but_no_script_inline() -> None:
    answer = Client().get("/api/docs")
    policy = answer["Content-Security-Policy"]
    assert "script-src 'self';" in f"{policy};"
    assert not re.search(r"<script(?![^>]*\bsrc=)", answer.content.decode())


def test_the_scripts_of_the_pages_evaluate_no_text(admin_client: Client) -> None:
    page = admin_client.get("/admin/").content.decode()
    sources = re.findall(r'<script src="/static/([^"]+)"', page)
    assert "unfold/js/alpine/alpine.js" in sources
    for source in sources:
        text = Path(str(finders.find(source))).read_text(encoding="utf-8")
        if "htmx" in source:
            # htmx asks its setting before it evaluates anything.
            assert '"allowEval": false' in page
            continue
        assert not re.search(r"\bAsyncFunction\b|new Function\(|\beval\(", text), source


def test_alpine_is_the_build_that_needs_no_eval() -> None:
    found = finders.find("unfold/js/alpine/alpine.js")
    assert Path(str(found)).is_relative_to(ROOT / "static")
