"""Reading executions again: one whole, and the list with what it filters, orders and leaves out."""

from __future__ import annotations

import pytest

from tests.conftest import Caller
from tests.support.running import run

pytestmark = pytest.mark.database


def test_a_recorded_execution_can_be_read_again(local_active: None, alice: Caller) -> None:
    ran = run(alice, "def main():\n    return [1, 'two']").json()

    answer = alice.client.get(f"/api/v1/executions/{ran['id']}")

    assert answer.status_code == 200
    assert answer.json() == ran


def test_the_list_is_newest_first_and_leaves_out_what_is_large(
    local_active: None, alice: Caller
) -> None:
    ids = [run(alice, f"print({number})").json()["id"] for number in range(3)]

    body = alice.client.get("/api/v1/executions").json()

    assert [item["id"] for item in body["results"]] == ids[::-1]
    assert body["next"] is None
    assert not {"stdout", "stderr", "result", "code"} & set(body["results"][0])


def test_the_list_is_paged_by_cursor(scripted: object, alice: Caller) -> None:
    ids = [run(alice, "answer = ExecutionResult('', '', 0, 0.0)").json()["id"] for _ in range(5)]
    seen = []
    url = "/api/v1/executions?limit=2"
    pages = 0
    while url:
        body = alice.client.get(url).json()
        seen += [item["id"] for item in body["results"]]
        url, pages = body["next"], pages + 1

    assert seen == ids[::-1]
    assert pages == 3


def test_the_list_is_filtered(scripted: object, alice: Caller) -> None:
    good = run(alice, "pass").json()["id"]
    bad = run(alice, "answer = ExecutionResult('', '', 1, 0.0)").json()["id"]
    unlucky = run(alice, "pass", language="unlucky").json()["id"]

    def listed(**query: str) -> list[str]:
        return [
            item["id"] for item in alice.client.get("/api/v1/executions", query).json()["results"]
        ]

    assert listed(status="succeeded") == [good]
    assert listed(status="failed") == [bad]
    assert listed(language="unlucky") == [unlucky]
    assert listed(provider="scripted", status="error") == [unlucky]
    assert listed(provider="elsewhere") == []


@pytest.mark.parametrize(
    "query",
    [{"status": "odd"}, {"limit": "0"}, {"limit": "201"}, {"cursor": "x"}, {"colour": "red"}],
)
def test_a_bad_list_parameter_is_refused_by_name(query: dict[str, str], alice: Caller) -> None:
    answer = alice.client.get("/api/v1/executions", query)

    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == next(iter(query))
