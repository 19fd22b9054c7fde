"""The endpoints of templates, for the owner, a colleague and a stranger."""

from __future__ import annotations

from typing import Any

import pytest

from executions.capabilities.templates.models import Template, TemplateVersion
from executions.ledger.models import LedgerEntry
from executions.tenants.keys import create_api_key
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.package_index import PackageIndex
from tests.support.templates import SCOPES, URL, builder, built, finished, resolves

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten", "resolver")]

BODY: dict[str, Any] = {
    "name": "science",
    "description": "Numbers",
    "declaration": {"python": ["tinymath"], "environment": {"COLOUR": "blue"}},
}


@pytest.fixture(autouse=True)
def _packages(index: PackageIndex, resolver: Liar) -> None:
    index.add("tinymath")
    resolves(resolver, index)


def refused(answer: Any, status: int, field: str | None = None) -> str:
    assert answer.status_code == status, answer.content
    error = answer.json()["error"]
    assert error["field"] == field, error
    return str(error["message"])


def test_a_template_is_created_built_and_told_of(alice: Caller, bob: Caller) -> None:
    owner = builder(alice).client
    answer = owner.post(URL, BODY)
    assert answer.status_code == 202, answer.content
    assert answer.json()["state"] == "queued"
    place = answer["Location"]
    finished(TemplateVersion.objects.get())
    for client in (owner, bob.client):
        version = client.get(place).json()
        assert (version["state"], version["problem"]) == ("ready", None)
        assert [each["name"] for each in version["packages"]] == ["tinymath"]
        assert version["packages"][0]["licence"] == "MIT"
        assert version["declaration"]["environment"] == {"COLOUR": "blue"}
        assert "tinymath" in client.get(f"{place}/log").json()["log"]
        (listed,) = client.get(URL).json()["results"]
        assert (listed["name"], listed["scope"], listed["latest"]) == ("science", "tenant", 1)
        assert client.get(f"{URL}/science").json() == listed


def test_a_stranger_sees_and_changes_nothing_of_it(alice: Caller, charlie: Caller) -> None:
    built(alice.tenant)
    stranger = builder(charlie).client
    assert stranger.get(URL).json()["results"] == []
    one = f"{URL}/science"
    for answer in (
        stranger.get(one),
        stranger.delete(one),
        stranger.post(f"{one}/builds", {}),
        stranger.get(f"{one}/versions/1"),
        stranger.get(f"{one}/versions/1/log"),
        stranger.post(f"{one}/versions/1/cancel"),
    ):
        refused(answer, 404)
    assert Template.objects.get().removed_at is None
    # Its own may have the same name.
    assert stranger.post(URL, BODY).status_code == 202


def test_the_installations_template_is_there_for_all_and_changed_by_none(alice: Caller) -> None:
    built(None)
    owner = builder(alice).client
    assert owner.get(f"{URL}/science").json()["scope"] == "installation"
    assert owner.get(f"{URL}/science/versions/1").json()["state"] == "ready"
    one = f"{URL}/science"
    for answer in (
        owner.delete(one),
        owner.post(f"{one}/builds", {}),
        owner.get(f"{one}/versions/1/log"),
        owner.post(f"{one}/versions/1/cancel"),
    ):
        refused(answer, 404)


def test_a_colleague_may_build_cancel_and_remove(alice: Caller, bob: Caller) -> None:
    built(alice.tenant)
    colleague = builder(bob).client
    declaration = {"python": ["tinymath"], "environment": {"COLOUR": "red"}}
    again = colleague.post(f"{URL}/science/builds", {"declaration": declaration})
    assert again.status_code == 202, again.content
    refused(colleague.post(f"{URL}/science/builds", {}), 409)
    cancelled = colleague.post(f"{URL}/science/versions/2/cancel")
    assert cancelled.json()["state"] == "cancelled"
    refused(colleague.post(f"{URL}/science/versions/2/cancel"), 409)
    assert colleague.delete(f"{URL}/science").status_code == 204
    refused(colleague.get(f"{URL}/science"), 404)
    # Its name is free again.
    assert colleague.post(URL, BODY).status_code == 202


def test_a_key_without_the_scope_changes_nothing(alice: Caller) -> None:
    built(alice.tenant)
    one = f"{URL}/science"
    for answer in (
        alice.client.post(URL, BODY),
        alice.client.delete(one),
        alice.client.post(f"{one}/builds", {}),
        alice.client.post(f"{one}/versions/1/cancel"),
    ):
        assert answer.status_code == 403, answer.content
    assert alice.client.get(one).status_code == 200


def test_a_key_that_is_held_to_a_template_does_not_change_what_it_is(alice: Caller) -> None:
    built(alice.tenant)
    key = create_api_key(alice.tenant, "held", scopes=SCOPES, templates="science")
    held = Caller(*key).client
    one = f"{URL}/science"
    for answer in (
        held.post(URL, {**BODY, "name": "other"}),
        held.delete(one),
        held.post(f"{one}/builds", {}),
        held.post(f"{one}/versions/1/cancel"),
    ):
        refused(answer, 403, "template")
    assert TemplateVersion.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "Science!"}, "name"),
        ({"name": ""}, "name"),
        ({"declaration": {}}, "declaration"),
        ({"declaration": {"python": ["evil @ https://evil.test/x.whl"]}}, "declaration"),
        ({"declaration": {"python": ["--index-url=https://evil.test"]}}, "declaration"),
        ({"declaration": {"npm": ["git+https://evil.test/x"]}}, "declaration"),
        ({"declaration": {"environment": {"LD_PRELOAD": "/x.so"}}}, "declaration"),
        ({"declaration": {"files": {"../x": "1"}}}, "declaration"),
        ({"declaration": {"python": ["a"], "limits": {"timeout": 0}}}, "declaration"),
        ({"declaration": {"python": ["a"], "limits": {"memory_mb": 9}}}, "declaration"),
        ({"declaration": {"limits": {"timeout": 5}}}, "declaration"),
        ({"declaration": {"python": ["a"], "base": "ubuntu"}}, "declaration"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_is_no_template_is_refused(change: dict[str, Any], field: str, alice: Caller) -> None:
    refused(builder(alice).client.post(URL, {**BODY, **change}), 400, field)
    assert not Template.objects.exists()


def test_a_name_is_there_once(alice: Caller) -> None:
    owner = builder(alice).client
    assert owner.post(URL, BODY).status_code == 202
    refused(owner.post(URL, BODY), 409, "name")


def test_who_created_and_removed_it_is_in_the_ledger(alice: Caller) -> None:
    caller = builder(alice)
    caller.client.post(URL, BODY)
    caller.client.delete(f"{URL}/science")
    said = [each.stated for each in LedgerEntry.objects.filter(kind="template").order_by("pk")]
    assert [each["action"] for each in said] == ["created", "removed"]
    by = f"key:{caller.api_key.prefix}"
    assert (said[0]["created_by"], said[1]["by"]) == (by, by)
