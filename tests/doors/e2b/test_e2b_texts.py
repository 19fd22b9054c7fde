"""What is no text that a database or a file system can hold is refused at the door for E2B's SDKs:
the database would fail, and the provider be blamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rest_framework.test import APIClient

from tests.conftest import Caller
from tests.support.e2b_door import envelope

pytestmark = [pytest.mark.database, pytest.mark.usefixtures("kept_here")]
# {} is what is no such text.
CALLS = [
    ("/execute", {"code": "1", "language": "{}"}, 400),
    ("/execute", {"code": "1", "context_id": "{}"}, 404),
    ("/contexts", {"language": "{}"}, 400),
    ("/contexts", {"cwd": "{}"}, 400),
    ("/filesystem.Filesystem/Stat", {"path": "a/{}"}, 400),
    ("/filesystem.Filesystem/ListDir", {"path": "{}"}, 400),
    ("/filesystem.Filesystem/MakeDir", {"path": "{}"}, 400),
    ("/filesystem.Filesystem/Move", {"source": "a", "destination": "{}"}, 400),
    ("/filesystem.Filesystem/Remove", {"path": "{}"}, 400),
    ("/filesystem.Filesystem/CreateWatcher", {"path": "{}"}, 400),
    ("/filesystem.Filesystem/GetWatcherEvents", {"watcherId": "{}"}, 404),
    ("/process.Process/SendSignal", {"process": {"pid": 1, "tag": "{}"}, "signal": "{}"}, 404),
]
STARTED = [
    {"cmd": "{}"},
    {"cmd": "true", "args": ["{}"]},
    {"cmd": "true", "cwd": "{}"},
    {"cmd": "true", "envs": {"A": "{}"}},
    {"cmd": "bash", "args": ["-l", "-c", "{}"], "cwd": "/"},
    {"cmd": "bash", "args": ["-l", "-c", "true"], "cwd": "/{}"},
]
CREATED = [
    {"templateID": "{}"},
    {"metadata": {"{}": "1"}},
    {"metadata": {"a": "{}"}},
    {"envVars": {"A": "{}"}},
]


@pytest.mark.parametrize("text", ["\ud800", "\0"])
def test_what_is_no_text_is_refused_wherever_it_is_sent(alice: Caller, text: str) -> None:
    made = alice.client.post("/v2/sandboxes", {}).json()
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    client = APIClient(raise_request_exception=False)

    def posted(path: str, content: bytes, kind: str = "application/json") -> int:
        return int(client.post(path, content, content_type=kind, headers=headers).status_code)

    for is_paused in (False, True):
        if is_paused:
            url = f"/sandboxes/{made['sandboxID']}/pause"
            assert alice.client.post(url, {}).status_code == 204
        for path, body, status in CALLS:
            assert posted(path, json.dumps(_with(text, body)).encode()) == status, (path, body)
        for process in STARTED:
            content = envelope({"process": _with(text, process)})
            status = posted("/process.Process/Start", content, "application/connect+json")
            assert status == 400, process


@pytest.mark.parametrize("text", ["\ud800", "\0"])
def test_no_sandbox_is_made_of_what_is_no_text(alice: Caller, text: str) -> None:
    for body in CREATED:
        content = json.dumps(_with(text, body))
        answer = alice.client.post("/v2/sandboxes", content, content_type="application/json")
        assert answer.status_code == 400, body


def _with(text: str, body: Any) -> Any:
    return json.loads(json.dumps(body).replace("{}", json.dumps(text)[1:-1]))
