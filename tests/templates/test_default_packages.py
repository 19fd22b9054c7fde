"""The template `data`: the default packages of a provider, which no one declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from executions.capabilities.playground.service import replay_sync
from executions.capabilities.templates.models import Template
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from providers.values import Packages
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.package_index import PackageIndex
from tests.support.running import run
from tests.support.sessions import cell, opened
from tests.support.templates import URL, again, builder, built

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

DIGEST = "ab" * 32
INSTALLED = Packages("ready", "", {"numpy": "2.1", "pandas": "2.2"}, DIGEST, 1_700_000_000.0)
USED = {"name": "data", "version": None, "digest": DIGEST}


@pytest.fixture
def packages(resolver: Liar) -> Liar:
    """A provider with default packages, which this process has loaded."""
    resolver.does("get_packages", lambda: INSTALLED)
    resolver.answers(stdout="1\n")
    return resolver


def test_a_run_names_it_and_the_record_has_its_digest(alice: Caller, packages: Liar) -> None:
    answer = run(alice, "1", template="data")
    assert answer.status_code == 200, answer.content
    assert answer.json()["template"] == USED
    # The sandbox is the plain one.
    assert packages.module.specs[-1].digest == ""
    replayed = replay_sync(Execution.objects.get())
    assert replayed.execution.meta["template"] == USED


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (None, "has no default packages"),
        (Packages("preparing"), "being installed now. Try again"),
        (Packages("failed", "no registry"), "(no registry). An administrator can run manage.py"),
        # An environment of an administrator's own.
        (Packages("ready", "", {"numpy": "1.0"}), "manage.py packages"),
    ],
)
def test_while_they_are_not_there_the_run_says_so_and_does_not_begin(
    known: Packages | None, told: str, alice: Caller, packages: Liar
) -> None:
    packages.does("get_packages", lambda: known)
    answer = run(alice, "1", template="data")
    error = answer.json()["error"]
    assert (answer.status_code >= 400, error["field"]) == (True, "template")
    assert told in error["message"]
    assert packages.module.jobs == []


def test_new_packages_serve_while_newer_ones_are_installed(alice: Caller, packages: Liar) -> None:
    packages.does("get_packages", lambda: replace(INSTALLED, state="preparing"))
    assert run(alice, "1", template="data").json()["template"] == USED


def test_it_has_no_versions_and_no_other_tags(alice: Caller, packages: Liar) -> None:
    assert run(alice, "1", template="data:latest").json()["template"] == USED
    for name in ("data@1", "data:stable"):
        answer = run(alice, "1", template=name)
        assert answer.status_code == 400, answer.content
        assert "Available: data" in answer.json()["error"]["message"]


def test_no_one_makes_one_of_this_name(alice: Caller, packages: Liar) -> None:
    owner = builder(alice).client
    body = {"name": "data", "declaration": {"environment": {"A": "1"}}}
    answer = owner.post(URL, body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "name")
    for answer in (
        owner.delete(f"{URL}/data"),
        owner.post(f"{URL}/data/builds", {}),
        owner.post(f"{URL}/data/versions/1/cancel"),
    ):
        assert answer.status_code == 404
    assert not Template.objects.exists()


def test_it_is_listed_last_with_its_packages_where_they_are_installed(
    alice: Caller, packages: Liar
) -> None:
    run(alice, "1")
    built(alice.tenant, "one")
    built(alice.tenant, "two")
    names: list[str] = []
    address: str | None = f"{URL}?limit=2"
    while address:
        page = alice.client.get(address).json()
        assert len(page["results"]) <= 2
        names += [each["name"] for each in page["results"]]
        address = page["next"]
    assert names == ["two", "one", "data"]
    one = alice.client.get(f"{URL}/data").json()
    assert (one["scope"], one["latest"], one["versions"]) == ("installation", None, [])
    assert one["packages"] == {"numpy": "2.1", "pandas": "2.2"}
    assert one["created_at"].startswith("2023-11-14T")
    packages.does("get_packages", lambda: Packages("preparing"))
    assert [each["name"] for each in alice.client.get(URL).json()["results"]] == ["two", "one"]
    assert alice.client.get(f"{URL}/data").status_code == 404


def test_a_key_may_be_held_to_it(alice: Caller, packages: Liar) -> None:
    held = Caller(*create_api_key(alice.tenant, "held", templates="data"))
    assert run(held, "1", template="data").status_code == 200
    assert run(held, "1").status_code == 403
    other = Caller(*create_api_key(alice.tenant, "other", templates="science"))
    assert run(other, "1", template="data").status_code == 403


def test_e2b_lists_it_and_begins_with_its_packages(alice: Caller, packages: Liar) -> None:
    run(alice, "1")
    client = builder(alice).client
    (listed,) = client.get("/templates").json()
    assert (listed["templateID"], listed["public"]) == ("data", True)
    assert client.get("/templates/data").json()["names"] == ["data"]
    assert client.post("/v3/templates", {"name": "data"}).status_code == 400
    announced = client.post("/v3/templates", {"name": "mine"}).json()
    place = f"/v2/templates/mine/builds/{announced['buildID']}"
    answer = client.post(place, {"fromTemplate": "data", "steps": []})
    assert answer.status_code == 202, answer.content
    (version,) = Template.objects.get().versions.all()
    assert version.declared.python == ("numpy==2.1", "pandas==2.2")


def test_a_session_has_it(
    alice: Caller, kept_here: Any, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    assert session["template"] in (None, "")
    from providers.manager import loaded

    (provider,) = {type(lease.provider) for lease in loaded()}
    monkeypatch.setattr(provider, "get_packages", lambda self: INSTALLED)
    session = opened(alice, template="data")
    assert session["template"] == "data"
    assert cell(alice, session, "1").json()["template"] == USED
    monkeypatch.setattr(provider, "get_packages", lambda self: None)
    answer = alice.client.post("/api/v1/sessions", {"template": "data"})
    assert answer.json()["error"]["field"] == "template"
    assert "has no default packages" in answer.json()["error"]["message"]


def test_other_templates_are_as_before(alice: Caller, packages: Liar) -> None:
    first = built(alice.tenant)
    assert again(first.template, environment={"A": "2"}).number == 2
    assert run(alice, "1", template="science").json()["template"]["version"] == 2
