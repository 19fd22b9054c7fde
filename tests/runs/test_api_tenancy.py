"""What a colleague sees, and a stranger does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.running import run

WITH_FILE = (
    "answer = ExecutionResult('', '', 0, 0.0,"
    " artifacts=[ArtifactFile('plot.txt', 'text/plain', b'data')])"
)


@pytest.fixture
def paths(scripted: Callable[[], list[str]], alice: Caller) -> list[str]:
    execution_id = run(alice, WITH_FILE).json()["id"]
    execution = f"/api/v1/executions/{execution_id}"
    return [execution, f"{execution}/artifacts/plot.txt"]


def test_an_execution_belongs_to_the_tenant_and_not_to_the_key(
    paths: list[str], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    for path in paths:
        assert alice.client.get(path).status_code == 200
        assert bob.client.get(path).status_code == 200
        assert charlie.client.get(path).status_code == 404


def test_a_strangers_404_is_that_of_what_does_not_exist(paths: list[str], charlie: Caller) -> None:
    missing = "/api/v1/executions/01a1fd3e-5869-7be3-b4ad-c3848c823008"

    for path in paths:
        stranger, nobody = charlie.client.get(path), charlie.client.get(missing)
        assert stranger.json() == nobody.json()


def test_the_list_holds_the_tenants_own(
    paths: list[str], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    run(bob, "pass")
    run(charlie, "pass")

    def count(caller: Caller) -> int:
        return len(caller.client.get("/api/v1/executions").json()["results"])

    assert (count(alice), count(bob), count(charlie)) == (2, 2, 1)


def test_a_cursor_of_another_tenant_opens_nothing(
    paths: list[str], alice: Caller, charlie: Caller
) -> None:
    run(alice, "pass")
    following = alice.client.get("/api/v1/executions?limit=1").json()["next"]

    assert charlie.client.get(following).json()["results"] == []


def test_an_idempotency_key_is_the_tenants_own(
    scripted: Callable[[], list[str]], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    ids = [
        run(caller, "pass", idempotency_key="same").json()["id"] for caller in (alice, bob, charlie)
    ]

    assert ids[0] == ids[1]
    assert ids[2] != ids[0]


def test_a_sandbox_is_made_for_the_tenant(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller
) -> None:
    run(alice, "pass")
    run(charlie, "pass")

    assert [event for event in scripted() if event.startswith("create")] == [
        "create python for wonderland",
        "create python for elsewhere",
    ]


def test_the_record_says_which_key_it_was(
    scripted: Callable[[], list[str]], alice: Caller, bob: Caller
) -> None:
    run(bob, "pass")

    record = Execution.objects.get()
    assert (record.tenant, record.api_key) == (alice.tenant, bob.api_key)
    assert (record.api_key_name, record.api_key_prefix) == ("bob", bob.key_text[:10])


def test_nobody_without_a_key_reads_anything(paths: list[str]) -> None:
    for path in [*paths, "/api/v1/executions"]:
        assert Client().get(path).status_code == 401
