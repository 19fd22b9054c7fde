"""`?fields=`: an answer with the fields that its caller selects, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executions.runs.models import Execution
from tests.conftest import Caller
from tests.runs.execution_shape import SHAPE
from tests.support.sessions import URL, cell, opened

RUNS = "/api/v1/executions"
PROGRAM = {"code": "print('hello')\nprint('gone wrong')"}


def post(caller: Caller, path: str, **headers: str) -> Any:
    return caller.client.post(path, PROGRAM, headers=headers)


def test_a_run_answers_with_the_selected_fields_in_their_usual_order(
    local_active: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    answer = post(alice, f"{RUNS}?fields=stdout,id,stdout,status")
    assert (answer.status_code, list(answer.json())) == (200, ["id", "status", "stdout"])
    place = f"{RUNS}/{answer.json()['id']}"
    assert list(alice.client.get(place).json()) == list(SHAPE)
    assert bob.client.get(f"{place}?fields=exit_code").json() == {"exit_code": 0}
    assert charlie.client.get(f"{place}?fields=exit_code").status_code == 404


def test_a_stream_ends_with_the_selected_fields(local_active: None, alice: Caller) -> None:
    answer = post(alice, f"{RUNS}?fields=status", Accept="application/x-ndjson")
    events = [json.loads(line) for line in b"".join(answer.streaming_content).splitlines()]
    assert events[0]["type"] == "started"
    assert events[-1]["execution"] == {"status": "succeeded"}
    execution = Execution.objects.get()
    followed = alice.client.get(f"{RUNS}/{execution.pk}/events?fields=stderr")
    last = b"".join(followed.streaming_content).splitlines()[-1]
    assert json.loads(last)["execution"] == {"stderr": ""}


@pytest.mark.usefixtures("kept_here")
def test_a_cell_and_a_command_answer_with_them_too(alice: Caller) -> None:
    session = opened(alice)
    path = f"{URL}/{session['id']}"
    assert list(post(alice, f"{path}/executions?fields=status").json()) == ["status"]
    command = alice.client.post(f"{path}/processes?fields=exit_code", {"command": ["true"]})
    assert (command.status_code, command.json()) == (200, {"exit_code": 0})
    assert list(cell(alice, session, "1").json()) == list(SHAPE)


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
@pytest.mark.parametrize("given", ["nonsense", "id,", "", "id,%00", ",".join(["id"] * 400)])
def test_an_unknown_field_is_refused_before_anything_runs(
    given: str, accept: str, alice: Caller
) -> None:
    session = opened(alice)
    counted = Execution.objects.count()
    for path in (RUNS, f"{URL}/{session['id']}/executions", f"{URL}/{session['id']}/processes"):
        body = {"command": ["true"]} if path.endswith("processes") else PROGRAM
        answer = alice.client.post(f"{path}?fields={given}", body, headers={"Accept": accept})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "fields"), path
    assert Execution.objects.count() == counted


def test_the_refusal_names_the_fields_that_there_are(alice: Caller) -> None:
    message = post(alice, f"{RUNS}?fields=nonsense").json()["error"]["message"]
    assert "Unknown field 'nonsense'" in message
    assert message.endswith(f"Known are: {', '.join(SHAPE)}.")
