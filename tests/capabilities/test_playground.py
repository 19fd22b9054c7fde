"""The playground runs code by hand as a tenant: recorded, held to what the tenant is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from executions.capabilities.spending.models import Budget, Spending
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Approval, Execution
from executions.tenants.service import ADMINISTRATOR, AUDITOR, OPERATOR
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services.approvers import hold
from tests.conftest import Caller, require
from tests.support.approvals import signed_in
from tests.support.playground import HELLO, JSON, PAGE, sent
from tests.support.policies import in_force
from tests.support.roles import member
from tests.support.running import LOCAL, run, run_queued

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("policies_forgotten")]

ANSWER = "answer = ExecutionResult('', '', 0, 0.0)"


@pytest.fixture
def operator(db: None) -> Client:
    return member(OPERATOR)


def refused(answer: Any, field: str, status: int = 400) -> str:
    assert answer.status_code == status, answer.content
    error = answer.json()["error"]
    assert error["field"] == field, error
    assert not Execution.objects.filter(subject__startswith="playground").exists()
    message: str = error["message"]
    return message


def test_what_is_run_is_recorded_as_any_other_and_says_who_asked(
    scripted: Callable[[], list[str]], alice: Caller, operator: Client
) -> None:
    answer = sent(operator, arguments='{"a": 1}', timeout="7", entrypoint="script")

    assert answer.status_code == 202
    told = answer.json()
    execution = Execution.objects.get(pk=told["id"])
    assert told["events"] == f"/api/v1/executions/{execution.pk}/events"
    assert told["cancel"] == f"/admin/executions/execution/{execution.pk}/cancel"
    assert told["waits_for_approval"] is False
    assert execution.status == "queued"
    run_queued()
    execution.refresh_from_db()
    assert (execution.status, execution.stdout, execution.provider) == (
        *("succeeded", "hello", "scripted"),
    )
    assert (execution.tenant_slug, execution.api_key) == ("wonderland", None)
    assert (execution.subject, execution.client_address) == (
        *("playground by user:operator", "127.0.0.1"),
    )
    assert (execution.arguments, execution.timeout, execution.entrypoint) == (
        '{"a":1}',
        7,
        "script",
    )
    assert LedgerEntry.objects.filter(execution_id=execution.pk).exists()
    assert verify().is_intact
    noted = LogEntry.objects.get(object_id=str(execution.pk))
    assert (noted.user.username, noted.change_message) == ("operator", "Ran it in the playground.")
    # Whoever may look follows it, as the page does.
    events = b"".join(operator.get(told["events"], headers={"accept": "text/event-stream"}))
    assert b"hello" in events
    assert b"event: done" in events


def test_without_script_the_run_leads_to_its_page_and_a_mistake_back_to_what_was_typed(
    scripted: object, alice: Caller, operator: Client
) -> None:
    body = {"code": "\r\nanswer = 1\r\n", "tenant": "wonderland", "language": "python"}
    answer = operator.post(PAGE + "run", body)
    execution = Execution.objects.get()
    assert answer.headers["Location"] == f"/admin/executions/execution/{execution.pk}/change/"
    assert execution.code == "\nanswer = 1\n"

    for arguments in ("{a: 1}", "[1]", '{"a": NaN}'):
        answer = operator.post(PAGE + "run", {**body, "arguments": arguments, "timeout": "8"})
        page = answer.content.decode()
        assert answer.status_code == 400
        assert 'id="error-arguments">arguments: Must be' in page
        # The line feed after the tag is the form's own.
        assert "\n\nanswer = 1\n</textarea>" in page
        assert 'name="timeout" id="play-timeout" value="8"' in page
    assert Execution.objects.count() == 1


def test_only_who_has_the_permission_and_may_look_runs_anything(
    scripted: object, alice: Caller
) -> None:
    execution = run(alice, ANSWER).json()["id"]
    change = f"/admin/executions/execution/{execution}/change/"
    for client in (
        member(AUDITOR),
        signed_in("looks", "view_execution"),
        signed_in("blind", "use_playground"),
    ):
        assert client.get(PAGE).status_code == 403
        for to in ("run", "session", "snippets"):
            assert sent(client, to=to).status_code == 403
        for page in ("/admin/", change):
            assert b"playground" not in client.get(page).content
    for client in (member(OPERATOR), member(ADMINISTRATOR)):
        assert client.get(PAGE).status_code == 200
        assert f"{PAGE}?execution={execution}".encode() in client.get(change).content
    assert "/login/" in Client().get(PAGE).headers["Location"]
    assert Execution.objects.count() == 1


def test_nobody_is_made_to_run_something_by_another_site(alice: Caller) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("admin"))
    for to in ("run", "session", "snippets"):
        assert sent(client, to=to).status_code == 403
        assert client.get(PAGE + to).status_code == 404
    assert not Execution.objects.exists()


def test_a_tenant_that_is_not_there_or_not_active_runs_nothing(
    scripted: object, alice: Caller, operator: Client
) -> None:
    assert "no tenant" in refused(sent(operator, tenant="nobody"), "tenant")
    assert "slug" in refused(sent(operator, tenant="a\0b"), "tenant")
    alice.tenant.is_active = False
    alice.tenant.save()
    assert "not active" in refused(sent(operator), "tenant")
    assert b'value="wonderland"' not in operator.get(PAGE).content


def test_quotas_and_budgets_of_the_tenant_hold(
    scripted: object, alice: Caller, operator: Client
) -> None:
    alice.tenant.max_queued = 1
    alice.tenant.save()
    assert sent(operator).status_code == 202
    assert sent(operator).status_code == 429
    assert Execution.objects.count() == 1
    run_queued()
    Budget.objects.create(tenant_slug="wonderland", limit=1, period="day")
    Spending.objects.create(tenant_slug="wonderland", day=timezone.now().date(), amount=2)
    answer = sent(operator)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "SB008")
    assert Execution.objects.count() == 1


def test_a_policy_blocks_here_too(scripted: object, alice: Caller, operator: Client) -> None:
    in_force("wonderland", languages="bash")
    assert sent(operator).status_code == 202
    run_queued()
    execution = Execution.objects.get()
    assert (execution.status, execution.error_code) == ("blocked", "SB007")


def test_what_takes_an_approval_waits_and_is_approved_by_somebody_else(
    scripted: object, alice: Caller, settings: Any
) -> None:
    in_force("wonderland", analysis="ask", calls="print")
    may = ("view_approval", "decide_approval", "use_playground", "view_execution")
    asker, other = signed_in("ann", *may), signed_in("ada", *may)

    body = {"code": f"print('x')\n{HELLO}", "provider": "scripted"}
    assert sent(asker, **body).json()["waits_for_approval"] is True

    approval = Approval.objects.get()
    # A new name makes no other person.
    User.objects.filter(username="ann").update(username="anna")
    decide = f"/admin/executions/approval/{approval.pk}/decide/"
    body = {"approve": "1", "request_hash": approval.request_hash}
    page = other.get(f"/admin/executions/approval/{approval.pk}/change/").content.decode()
    assert all(text in page for text in ("playground by user:ann", "Provider", "scripted"))
    said = asker.post(decide, body, follow=True).content.decode()
    assert "Another person must approve it" in said
    # Nor does another account of the same person, where two persons are asked for.
    settings.TWO_PERSON_RULE = True
    ann, second = User.objects.get(username="anna"), signed_in("bea", *may)
    hold([User.objects.get(username="bea").pk], ann.pk)
    assert "Another person" in second.post(decide, body, follow=True).content.decode()
    run_queued()
    assert Execution.objects.get().status == "queued"
    other.post(decide, body)
    run_queued()
    assert Execution.objects.get().status == "succeeded"


def test_a_provider_is_chosen_among_all_that_are_configured_and_the_floor_holds_there(
    scripted: object, alice: Caller, operator: Client
) -> None:
    require("bwrap")
    ProviderConfig(pk=2, provider_id="local", config=LOCAL, version=3).save(force_insert=True)
    assert "no configuration" in refused(sent(operator, provider="e2b"), "provider")

    sent(operator, "print('here')", provider="local")
    run_queued()
    execution = Execution.objects.get()
    assert (execution.provider, execution.stdout) == ("local", "here\n")

    alice.tenant.minimum_isolation = "microvm"
    alice.tenant.save()
    sent(operator, "print('here')", provider="local")
    run_queued()
    last = Execution.objects.first()
    assert last is not None
    assert (last.status, last.error_field, last.stdout) == ("error", "minimum_isolation", "")


def test_under_the_two_person_rule_one_person_chooses_no_other_provider(
    scripted: object, alice: Caller, operator: Client, settings: Any
) -> None:
    ProviderConfig(pk=2, provider_id="local", config=LOCAL, version=3).save(force_insert=True)
    queued = sent(operator, provider="local").json()["id"]
    settings.TWO_PERSON_RULE = True
    answer = sent(operator, provider="local")
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "provider")
    # What was asked for before does not go there either.
    run_queued()
    execution = Execution.objects.get(pk=queued)
    assert (execution.status, execution.error_field) == ("error", "provider")
    assert sent(operator, provider="scripted").status_code == 202
    run_queued()
    assert Execution.objects.first().provider == "scripted"  # type: ignore[union-attr]
    assert not PendingChange.objects.exists()
    assert not ConfigVersion.objects.exists()


def test_nobody_chooses_a_provider_with_a_key(scripted: object, alice: Caller) -> None:
    error = run(alice, ANSWER, provider="scripted").json()["error"]
    assert error["field"] == "provider"


def test_files_come_along_by_their_last_name_and_not_without_bound(
    scripted: object, alice: Caller, operator: Client
) -> None:
    answer = uploaded(operator, {"../../etc/passwd": b"x", "data.csv": b"y"})
    assert answer.status_code == 202
    facts = Execution.objects.get().input_files
    assert [each["path"] for each in facts] == ["passwd", "data.csv"]
    Execution.objects.all().delete()
    assert "Another file" in refused(uploaded(operator, {"a/x": b"x", "b/x": b"x"}), "files")
    big = {f"f{n}": b"\0" * (10 << 20) for n in range(5)}
    assert "bytes together" in refused(uploaded(operator, big), "files")


def uploaded(client: Client, files: dict[str, bytes]) -> Any:
    """Sent with paths for names, as no browser does."""
    fields = {"code": HELLO, "tenant": "wonderland", "language": "python"}
    parts = [f'name="{name}"\r\n\r\n{text}'.encode() for name, text in fields.items()]
    parts += [
        f'name="files"; filename="{name}"\r\n\r\n'.encode() + content
        for name, content in files.items()
    ]
    body = b"".join(b"--cut\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    kind = "multipart/form-data; boundary=cut"
    return client.generic("POST", PAGE + "run", body + b"--cut--\r\n", kind, headers=JSON)


def test_a_run_is_filled_in_again_as_text_whatever_its_code_is(
    scripted: object, alice: Caller, operator: Client
) -> None:
    hostile = "# </textarea></script><script>alert(1)</script>\n" + ANSWER
    execution = run(alice, hostile, arguments={"a": "</textarea>"}).json()["id"]

    page = operator.get(f"{PAGE}?execution={execution}").content.decode()

    assert "# &lt;/textarea&gt;&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert "alert(1)</script>" not in page
    assert "{&quot;a&quot;:&quot;&lt;/textarea&gt;&quot;}" in page
    assert 'value="wonderland"' in page
    Execution.objects.filter(pk=execution).update(code="", input_files=[{"path": "a"}])
    page = operator.get(f"{PAGE}?execution={execution}").content.decode()
    assert "Not stored for that run: its code and its files." in page
    for wrong in ("x", "00000000-0000-0000-0000-000000000000"):
        assert operator.get(f"{PAGE}?execution={wrong}").status_code == 404
