"""The record, tenants and keys in the admin: readable, harmless, quick over many rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.runs.models import Artifact, Execution
from executions.tenants.models import ApiKey, Tenant
from providers.admin_lists import MOST
from tests.conftest import Caller
from tests.support.execution_rows import LIST, make_rows, shown
from tests.support.running import run

KEYS = "/admin/executions/apikey/"


def test_code_and_output_are_shown_as_they_were_and_escaped(
    scripted: object, alice: Caller, auditor: Client
) -> None:
    code = (
        "# <script>alert('code')</script>\n"
        "answer = ExecutionResult('<b>out</b>\\n  indented', '<i>err</i>', 0, 0.0,"
        " stdout_truncated=True)"
    )
    body = run(alice, code, arguments={"a": "<u>arg</u>"}).json()

    page = auditor.get(f"{LIST}{body['id']}/change/").content.decode()

    assert "<script>alert(" not in page
    assert "# &lt;script&gt;alert('code')&lt;/script&gt;</span>\n" in page
    assert "&lt;b&gt;out&lt;/b&gt;\n  indented</pre>" in page
    assert "&lt;i&gt;err&lt;/i&gt;</pre>" in page
    assert "&lt;u&gt;arg&lt;/u&gt;" in page
    # Code, arguments, stdout, stderr and what was left out.
    assert page.count('<pre class="record') == 5
    assert page.count("Truncated: the rest exceeded the limit.") == 1
    assert "wonderland" in page
    assert "alice" in page


def test_the_pages_hold_no_inline_script_or_style(
    scripted: object, alice: Caller, auditor: Client, admin_client: Client
) -> None:
    execution_id = run(alice, "pass").json()["id"]
    created = admin_client.post(f"{KEYS}add/", {"tenant": alice.tenant.pk, "name": "new"})

    pages = [
        auditor.get(LIST).content.decode(),
        auditor.get(f"{LIST}{execution_id}/change/").content.decode(),
        created.content.decode(),
    ]

    for page in pages:
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*type=\"application/json\")", page)
        assert not re.search(r"<style|\sstyle=|\son\w+=", page)


def test_a_record_can_be_neither_added_changed_nor_deleted(
    scripted: object, alice: Caller, admin_client: Client
) -> None:
    execution_id = run(alice, "pass").json()["id"]
    path = f"{LIST}{execution_id}/"

    assert admin_client.get(f"{LIST}add/").status_code == 403
    assert admin_client.post(f"{LIST}add/", {}).status_code == 403
    assert admin_client.post(f"{path}change/", {"status": "failed"}).status_code == 403
    assert admin_client.post(f"{path}delete/", {"post": "yes"}).status_code == 403
    deletion = {"action": "delete_selected", "_selected_action": execution_id, "post": "yes"}
    admin_client.post(LIST, deletion)

    assert Execution.objects.get().status == "succeeded"
    assert "delete_selected" not in admin_client.get(LIST).content.decode()


@pytest.mark.parametrize(
    ("values", "query"),
    [
        ({"tenant_slug": "other"}, {"tenant_slug": "other"}),
        ({"status": "failed"}, {"status__exact": "failed"}),
        ({"provider": "e2b"}, {"provider": "e2b"}),
        ({"language": "bash"}, {"language": "bash"}),
        ({"status": "timed_out", "error_code": "SB005"}, {"error_code": "SB005"}),
    ],
)
def test_the_list_is_filtered(
    values: dict[str, str], query: dict[str, str], auditor: Client
) -> None:
    make_rows(2)
    wanted = make_rows(2, **values)

    assert shown(auditor, **query) == {str(row.pk) for row in wanted}
    for name, value in query.items():
        page = auditor.get(LIST).content.decode()
        assert f'name="{name}"' in page
        assert f'<option value="{value}">' in page


def test_the_list_is_filtered_by_date(auditor: Client) -> None:
    make_rows(1, created_at=timezone.now() - timedelta(days=30))
    today = make_rows(1)
    since = (timezone.now() - timedelta(days=7)).isoformat()

    assert shown(auditor, created_at__gte=since) == {str(today[0].pk)}


def test_the_list_is_searched_by_id_and_code_hash(auditor: Client) -> None:
    make_rows(2)
    digest = "ab" * 32
    wanted = make_rows(1, code_hash=f"sha256:{digest}")[0]

    for term in (str(wanted.pk), wanted.pk.hex, digest, f"sha256:{digest}", f" {digest.upper()} "):
        assert shown(auditor, q=term) == {str(wanted.pk)}, term
    for term in ("ab", "acme", "%", "sha256:"):
        assert shown(auditor, q=term) == set(), term


def test_the_list_costs_the_same_over_many_rows(auditor: Client) -> None:
    def statements() -> list[str]:
        with CaptureQueriesContext(connection) as queries:
            assert auditor.get(LIST).status_code == 200
        return [query["sql"] for query in queries]

    make_rows(1)
    few = statements()
    make_rows(300, tenant_slug="other", status="failed", language="bash", provider="e2b")
    many = statements()

    assert len(few) == len(many) <= 11
    counts = [sql for sql in many if "COUNT(" in sql.upper()]
    assert len(counts) == 1
    assert f"LIMIT {MOST + 1}" in counts[0]
    listed = next(sql for sql in many if 'ORDER BY "executions_execution"."id" DESC LIMIT' in sql)
    for column in ("code", "stdout", "stderr", "result", "arguments", "pending"):
        assert f'"executions_execution"."{column}"' not in listed


def test_an_artifact_is_a_link_for_staff_and_for_nobody_else(
    scripted: Callable[[], list[str]], alice: Caller, auditor: Client, db: None
) -> None:
    run(
        alice,
        "answer = ExecutionResult('', '', 0, 0.0,"
        " artifacts=[ArtifactFile('<a>.html', 'text/html', b'<p>')])",
    )
    artifact = Artifact.objects.get()
    url = f"{LIST}{artifact.execution_id}/artifacts/{artifact.pk}"

    page = auditor.get(f"{LIST}{artifact.execution_id}/change/").content.decode()
    assert f'<a href="{url}">&lt;a&gt;.html</a>' in page
    download = auditor.get(url)
    assert download.getvalue() == b"<p>"
    assert download["Content-Disposition"].startswith("attachment")
    assert auditor.get(f"{LIST}{make_rows(1)[0].pk}/artifacts/{artifact.pk}").status_code == 404

    assert Client().get(url).status_code == 302
    clerk = Client()
    clerk.force_login(get_user_model().objects.create_user("clerk", is_staff=True))
    assert clerk.get(url).status_code == 403
    assert clerk.get(LIST).status_code == 403


def test_a_tenants_slug_stays_what_records_know_it_by(alice: Caller, admin_client: Client) -> None:
    path = f"/admin/executions/tenant/{alice.tenant.pk}/change/"

    admin_client.post(path, {"slug": "renamed", "name": "New name", "is_active": ""})

    tenant = Tenant.objects.get()
    assert (tenant.slug, tenant.name, tenant.is_active) == ("wonderland", "New name", False)


def test_a_tenant_and_its_keys_can_be_deleted_and_the_record_stays(
    scripted: object, alice: Caller, admin_client: Client
) -> None:
    run(alice, "pass")

    admin_client.post(f"/admin/executions/tenant/{alice.tenant.pk}/delete/", {"post": "yes"})

    assert (Tenant.objects.count(), ApiKey.objects.count()) == (0, 0)
    assert Execution.objects.get().tenant_slug == "wonderland"
