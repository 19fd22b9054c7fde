"""The key of an environment: entered once, for one address, for no sandbox, and gone when revoked."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError

from executions.capabilities.network.credentials import (
    all_in_force,
    credentials_in_force,
    put_credential,
    read_in_force,
    revoke,
)
from executions.capabilities.network.models import NetworkCredential
from executions.doors.claude.environment import NoEnvironment, open_environment
from tests.conftest import Caller

KEY = "environment-key-0123456789"


def put(tenant: str = "wonderland", value: str = KEY, **columns: Any) -> NetworkCredential:
    given = {"placement": "claude", "field": "env_1", "rules": "", **columns}
    return put_credential("agents", value, tenant_slug=tenant, **given)


def refused(**columns: Any) -> dict[str, list[str]]:
    with pytest.raises(ValidationError) as error:
        put(**columns)
    found: dict[str, list[str]] = error.value.message_dict
    return found


def test_the_key_goes_to_the_vendor_unless_another_address_is_named(alice: Caller) -> None:
    put()
    found = open_environment("wonderland", "agents")
    assert (found.id, found.address) == ("env_1", "https://api.anthropic.com")
    assert found.key.reveal() == KEY
    assert KEY not in repr(found)


def test_another_address_needs_the_key_again(alice: Caller) -> None:
    row = NetworkCredential.objects.get(pk=put().pk)
    row.rules = "https://evil.example"
    with pytest.raises(ValidationError, match="Enter the value again"):
        row.save()
    put(rules="https://queue.example:8443")
    assert open_environment("wonderland", "agents").address == "https://queue.example:8443"


def test_a_credential_of_sandboxes_becomes_none_without_its_value(alice: Caller) -> None:
    row = put(placement="bearer", field="", rules="https://api.anthropic.com")
    for placement, field in (("claude", "env_1"), ("bearer", "")):
        row = NetworkCredential.objects.get(pk=row.pk)
        row.placement, row.field = placement, field
        with pytest.raises(ValidationError, match="Enter the value again"):
            row.save()
        row = put(placement=placement, field=field, rules="https://api.anthropic.com")


def test_no_sandbox_gets_it(alice: Caller) -> None:
    row = put()
    assert credentials_in_force("wonderland") == ()
    assert str(row.pk) not in all_in_force()
    assert read_in_force(str(row.pk)) is None


def test_it_hides_no_credential_of_the_installation(alice: Caller) -> None:
    put_credential("agents", "another-value", rules="https://api.example.com")
    put()
    (found,) = credentials_in_force("wonderland")
    assert found.value.reveal() == "another-value"


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"tenant": ""}, "placement"),
        ({"field": ""}, "field"),
        ({"field": "../work"}, "field"),
        ({"field": "env 1"}, "field"),
        ({"rules": "http://api.anthropic.com"}, "rules"),
        ({"rules": "api.anthropic.com"}, "rules"),
        ({"rules": "https://*.anthropic.com"}, "rules"),
        ({"rules": "https://api.anthropic.com/v1"}, "rules"),
        ({"rules": "GET https://api.anthropic.com"}, "rules"),
        ({"rules": "https://api.anthropic.com:443,8443"}, "rules"),
        ({"rules": "https://a.example\nhttps://b.example"}, "rules"),
        ({"variable": "API_TOKEN"}, "variable"),
        ({"upstream": "https://api.anthropic.com"}, "upstream"),
        ({"value": "short"}, "value"),
    ],
)
def test_what_is_no_environment_is_refused(
    alice: Caller, columns: dict[str, Any], field: str
) -> None:
    assert field in refused(**columns)


def test_a_revoked_key_serves_nothing(alice: Caller) -> None:
    assert revoke(put())
    with pytest.raises(NoEnvironment, match="revoked"):
        open_environment("wonderland", "agents")


@pytest.mark.parametrize(
    "change",
    [{"rules": "https://evil.example"}, {"field": "env_2"}, {"version": 7}, {"value": None}],
)
def test_a_row_that_was_changed_in_the_database_serves_nothing(
    alice: Caller, change: dict[str, Any]
) -> None:
    row = put()
    if change == {"value": None}:
        other = put_credential(
            "other", "another-value", tenant_slug="wonderland", rules="https://evil.example"
        )
        change = {"value": other.value}
    NetworkCredential.objects.filter(pk=row.pk).update(**change)
    with pytest.raises(NoEnvironment):
        open_environment("wonderland", "agents")


def test_the_environment_of_another_tenant_is_not_found(alice: Caller, charlie: Caller) -> None:
    put()
    with pytest.raises(NoEnvironment):
        open_environment(charlie.tenant.slug, "agents")


def test_a_credential_for_sandboxes_is_no_environment(alice: Caller) -> None:
    put(placement="bearer", field="", rules="https://api.anthropic.com")
    with pytest.raises(NoEnvironment):
        open_environment("wonderland", "agents")


def test_a_row_that_is_entered_anew_is_another_version(alice: Caller) -> None:
    put()
    former = open_environment("wonderland", "agents")
    NetworkCredential.objects.all().delete()
    put()
    assert open_environment("wonderland", "agents").version != former.version
