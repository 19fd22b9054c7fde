"""An administrator makes a key, sends code with it, and would like to approve that code herself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from executions.capabilities.policies.approvals import AskedBySame, ensure_not_requester
from executions.capabilities.tools import calls
from executions.capabilities.tools.models import ToolCall
from executions.runs.models import Approval, Execution
from executions.runs.record import open_record
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from executions.runs.tool_schemas import Tool
from executions.tenants.models import ApiKey, Tenant
from providers.services.approvers import hold
from tests.attacks.administrators import signed_in, superuser
from tests.conftest import Caller
from tests.support.policies import in_force
from tests.support.running import run, run_queued

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("policies_forgotten")]

KEYS = "/admin/executions/apikey/"
CODE = "print('x')\nanswer = ExecutionResult('', '', 0, 0.0)"


def shown(page: Any, tenant: Tenant) -> Caller:
    found = re.search(r'id="new-key">([^<]+)<', page.content.decode())
    assert found is not None, page.content.decode()[:2000]
    return Caller(tenant.api_keys.latest("pk"), found[1])


def made(client: Client, tenant: Tenant) -> Caller:
    form = {"name": "k", "scopes": ["execute", "read"], "tenant": tenant.pk}
    return shown(client.post(f"{KEYS}add/", form), tenant)


def rotated(client: Client, key: Caller) -> Caller:
    form = {"valid_until": "2099-01-01T10:00"}
    return shown(client.post(f"{KEYS}{key.api_key.pk}/rotate/", form), key.tenant)


def asked(caller: Caller) -> Approval:
    answer = run(caller, CODE)
    assert answer.status_code == 202, answer.content
    return Approval.objects.get(execution=answer.json()["id"])


def approved(client: Client, approval: Approval) -> str:
    """What the page says after it, "" where it was approved."""
    page = client.post(
        reverse("admin:executions_approval_decide", args=[approval.pk]),
        {"approve": "1", "request_hash": approval.request_hash},
        follow=True,
    ).content.decode()
    approval.refresh_from_db()
    if approval.status == Approval.Status.APPROVED:
        return ""
    return page


def test_who_made_a_key_does_not_approve_what_was_sent_with_it(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    for tenant in (alice.tenant, charlie.tenant):
        in_force(tenant.slug, analysis="ask", calls="print")
    eve, ada = signed_in(superuser("eve")), signed_in(superuser("ada"))

    own = asked(made(eve, alice.tenant))
    # A new name makes no other person.
    User.objects.filter(username="eve").update(username="evelyn")
    assert "with a key that you created" in approved(eve, own)
    run_queued()
    assert Execution.objects.get(pk=own.execution_id).status == "queued"

    assert approved(ada, own) == ""
    run_queued()
    assert Execution.objects.get(pk=own.execution_id).status == "succeeded"
    # What others send is hers to approve: a colleague of that key, and a stranger.
    assert approved(eve, asked(alice)) == ""
    assert approved(eve, asked(charlie)) == ""


def test_who_rotated_a_key_or_made_the_one_before_it_does_not_approve_either(
    scripted: object, alice: Caller
) -> None:
    in_force(alice.tenant.slug, analysis="ask", calls="print")
    eve, ada, dora = (signed_in(superuser(name)) for name in ("eve", "ada", "dora"))
    first = made(eve, alice.tenant)
    second = rotated(ada, first)

    approval = asked(second)
    for client in (eve, ada):
        assert "with a key that you created" in approved(client, approval)
    assert approved(dora, approval) == ""
    # The one before is not known to who rotated it.
    assert approved(ada, asked(first)) == ""


@pytest.mark.parametrize("which", ["its own", "the one before"])
def test_nor_who_deletes_the_key_meanwhile(scripted: object, alice: Caller, which: str) -> None:
    in_force(alice.tenant.slug, analysis="ask", calls="print")
    eve = signed_in(superuser("eve"))
    first = made(eve, alice.tenant)
    sent_with = first if which == "its own" else rotated(signed_in(superuser("ada")), first)
    approval = asked(sent_with)
    page = reverse("admin:executions_apikey_delete", args=[first.api_key.pk])
    eve.post(page, {"post": "yes"})
    assert not ApiKey.objects.filter(pk=first.api_key.pk).exists()
    assert "with a key that you created" in approved(eve, approval)
    assert approved(signed_in(superuser("dora")), approval) == ""


def test_nor_does_another_account_of_the_same_person_under_the_two_person_rule(
    scripted: object, alice: Caller, settings: Any
) -> None:
    in_force(alice.tenant.slug, analysis="ask", calls="print")
    eve, bea = superuser("eve"), superuser("bea")
    approval = asked(made(signed_in(eve), alice.tenant))
    hold([bea.pk], eve.pk)
    settings.TWO_PERSON_RULE = True
    assert "with a key that you created" in approved(signed_in(bea), approval)
    assert approved(signed_in(superuser("ada")), approval) == ""


def test_who_made_a_key_does_not_approve_the_calls_of_tools_of_what_was_sent_with_it(
    alice: Caller,
) -> None:
    eve, ada = superuser("eve"), superuser("ada")
    key = made(signed_in(eve), alice.tenant)
    execution, _ = open_record(ExecutionRequest("1"), By.of_key(key.api_key))
    call = calls.open_call(
        execution, Tool(name="delete", parameters={"type": "object"}, writes=True), b"{}"
    )
    assert call.state == ToolCall.State.HELD

    with pytest.raises(AskedBySame, match="a key that you created"):
        calls.decide(call, eve, approve=True, arguments_hash=call.arguments_hash)
    call.refresh_from_db()
    assert call.state == ToolCall.State.HELD
    calls.decide(call, ada, approve=True, arguments_hash=call.arguments_hash)
    call.refresh_from_db()
    assert call.state == ToolCall.State.WAITING


def test_a_line_of_rotated_keys_that_bites_its_tail_has_an_end(alice: Caller) -> None:
    """As whoever writes to the database could make one."""
    execution, _ = open_record(ExecutionRequest("1"), By.of_key(alice.api_key))
    ApiKey.objects.filter(pk=alice.api_key.pk).update(rotated_from=alice.api_key.prefix)
    ensure_not_requester(execution.pk, superuser("ada"))
