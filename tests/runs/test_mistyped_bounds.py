"""Languages and providers of keys and policies that there are not are refused, with what there is."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from executions.capabilities.policies.models import Policy
from executions.runs.models import Execution
from executions.tenants.models import ApiKey
from providers.models import ProviderConfig
from tests.conftest import Caller

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

ADD_KEY = reverse("admin:executions_apikey_add")
ADD_POLICY = reverse("admin:executions_policy_add")
KEY: dict[str, Any] = {"name": "k", "scopes": ["execute"]}
POLICY: dict[str, Any] = {"analysis": "off"}


def refused(answer: Any, field: str) -> str:
    assert answer.status_code == 200
    (told,) = answer.context["adminform"].form.errors[field]
    return str(told)


@pytest.mark.parametrize(("page", "sent"), [(ADD_KEY, KEY), (ADD_POLICY, POLICY)])
def test_a_mistyped_name_is_refused_with_what_there_is(
    alice: Caller, admin_client: Client, page: str, sent: dict[str, Any]
) -> None:
    sent = {**sent, "tenant": alice.tenant.pk}
    told = refused(admin_client.post(page, {**sent, "languages": "python pyton"}), "languages")
    assert told.startswith("pyton: Unknown name. Available: bash, command, go,")
    told = refused(admin_client.post(page, {**sent, "providers": "\u202elocla"}), "providers")
    assert told.startswith("[U+202E]locla: Unknown name")
    assert "local" in told.split(", ")
    assert ApiKey.objects.count() == 1
    assert not Policy.objects.exists()


def test_what_there_is_may_be_chosen(alice: Caller, admin_client: Client) -> None:
    ProviderConfig.objects.create(provider_id="e2b@eu")
    ran = {
        "tenant_slug": "gone",
        "code_hash": "sha256:" + "0" * 64,
        "deadline": "2030-01-01T00:00Z",
        "status": "succeeded",
        "finished_at": "2030-01-01T00:00Z",
    }
    Execution.objects.create(language="datascience", entrypoint="auto", timeout=1, **ran)
    # By an alias, commands, and a template that has run by its name.
    sent = {**POLICY, "languages": "js command datascience", "providers": "e2b@eu local"}
    assert admin_client.post(ADD_POLICY, sent).status_code == 302
    policy = Policy.objects.get()
    assert policy.languages == "command datascience nodejs"


def test_what_a_row_has_is_kept_and_what_is_added_is_looked_at(
    alice: Caller, admin_client: Client
) -> None:
    policy = Policy.objects.create(languages="cobol", providers="e2b@gone", draft=True)
    page = reverse("admin:executions_policy_change", args=[policy.pk])
    had = {"languages": "cobol", "providers": "e2b@gone"}
    assert admin_client.post(page, {**POLICY, **had, "name": "kept"}).status_code == 302
    policy.refresh_from_db()
    assert (policy.name, policy.languages) == ("kept", "cobol")
    more = {**POLICY, **had, "providers": "e2b@gone e2b@lost"}
    assert refused(admin_client.post(page, more), "providers").startswith("e2b@lost: ")


def test_the_tenant_of_a_policy_is_chosen(alice: Caller, admin_client: Client) -> None:
    shown = admin_client.get(ADD_POLICY).content.decode()
    assert f'<option value="{alice.tenant.slug}">' in shown
    answer = admin_client.post(ADD_POLICY, {**POLICY, "tenant_slug": "nobody"})
    assert "nobody" in refused(answer, "tenant_slug")
