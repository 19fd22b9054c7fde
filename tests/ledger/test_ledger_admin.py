"""The ledger in the admin: for reading only, and quick over many entries."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from executions.admin.ledger import KINDS
from executions.ledger.append import append
from executions.ledger.bindings import BASELINE, BINDINGS
from executions.ledger.erasures import ERASURE
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import KEY
from tests.support.processes import ROOT

pytestmark = pytest.mark.django_db

LIST = "/admin/executions/ledgerentry/"


def test_an_entry_can_be_neither_added_changed_nor_deleted(admin_client: Client) -> None:
    entry = append("note", "x", {})
    for path in (f"{LIST}add/", f"{LIST}{entry.pk}/change/", f"{LIST}{entry.pk}/delete/"):
        assert admin_client.post(path, {"kind": "other", "post": "yes"}).status_code == 403
    deletion = {"action": "delete_selected", "_selected_action": entry.pk, "post": "yes"}
    admin_client.post(LIST, deletion)
    assert LedgerEntry.objects.get(pk=entry.pk).kind == "note"


def test_the_list_is_filtered_and_searched(admin_client: Client) -> None:
    append("export", "one <b>", {})
    entry = append("replay", "other\u202e", {})
    page = admin_client.get(LIST, {"kind": "export"}).content.decode()
    assert "one &lt;b&gt;" in page
    assert "other" not in page
    for term in (str(entry.sequence), entry.digest):
        page = admin_client.get(LIST, {"q": term}).content.decode()
        assert "other[U+202E]" in page
        assert "one &lt;b&gt;" not in page


def test_every_kind_that_is_entered_can_be_filtered_by(admin_client: Client, alice: Any) -> None:
    page = admin_client.get(LIST).content.decode()
    for kind in set(LedgerEntry.objects.values_list("kind", flat=True)):
        assert kind in KINDS
        assert f'<option value="{kind}">' in page


def test_every_kind_that_the_code_enters_can_be_filtered_by() -> None:
    kinds = {binding.kind for binding in BINDINGS.values()} | {BASELINE, ERASURE, KEY}
    for folder in ("executions", "sandbox_site"):
        for path in (ROOT / folder).rglob("*.py"):
            kinds |= set(re.findall(r'(?<![.\w])append\(\s*"(\w+)"', path.read_text("utf-8")))
    assert {"alert", "cancellation", "refusal"} <= kinds
    assert sorted(kinds - set(KINDS)) == []


def test_a_forged_entry_is_marked(admin_client: Client) -> None:
    entry = append("note", "x", {})
    path = f"{LIST}{entry.pk}/change/"
    assert "does not fit" not in admin_client.get(path).content.decode()
    LedgerEntry.objects.filter(pk=entry.pk).update(signature="AAAA")
    assert "signature does not fit" in admin_client.get(path).content.decode()


def test_the_list_costs_the_same_over_many_entries(admin_client: Client) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert admin_client.get(LIST).status_code == 200
        return len(queries)

    append("note", "x", {})
    # The menu's counts are looked up once for some seconds.
    statements()
    few = statements()
    for number in range(60):
        append("note", str(number), {})
    assert statements() == few <= 8
