"""POST /v1/execute, as clients of Agent Sandbox expect it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.test import Client

from executions.runs.models import Execution
from executions.sessions.models import Session
from providers.runtime.guest.display import TEXT_LIMIT
from providers.values import RunLimits
from tests.conftest import Caller
from tests.support.agent_sandbox import content, download_url, execute, listed, output
from tests.support.rich import require_module

pytestmark = pytest.mark.one_database

pytest_plugins = ["tests.support.agent_sandbox"]

PATH = "/v1/execute"


def test_variables_stay_and_the_last_expression_is_printed_after_the_output(
    conversations: None, alice: Caller
) -> None:
    answer = execute(alice, "x = 5\nprint(x * 2)\nx")
    assert (answer.status_code, answer.json()) == (200, {"output": "10\n5\n", "artifacts": []})
    assert output(alice, "x += 5\nx") == "10\n"
    assert output(alice, "'a\\nb'") == "'a\\nb'\n"
    assert output(alice, "None") == ""
    assert Session.objects.count() == 1


def test_output_holds_stdout_the_value_stderr_and_the_traceback(
    conversations: None, alice: Caller
) -> None:
    found = output(alice, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n1 / 0")
    assert found.startswith("out\nerr\n")
    assert "ZeroDivisionError" in found
    assert output(alice, "import sys\nprint('e', file=sys.stderr)\n7") == "7\ne\n"


def test_a_figure_is_not_printed_and_a_value_is_printed_once(
    conversations: None, alice: Caller
) -> None:
    require_module("matplotlib")
    draw = (
        "import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as plt\nplt.plot([1])"
    )
    found = output(alice, f"{draw}; plt.show()\nprint('out', end='')\n[7]")
    assert found == "out\n[7]\n"
    found = output(alice, draw)
    assert (found.count("\n"), found[:26]) == (1, "[<matplotlib.lines.Line2D ")


def test_code_that_runs_too_long_keeps_its_output_and_the_variables(
    conversations: None, alice: Caller, settings: Any
) -> None:
    settings.AGENT_SANDBOX = _but(settings.AGENT_SANDBOX, execution_seconds=1)
    output(alice, "x = 1")
    found = output(alice, "print('before', flush=True)\nwhile True: pass")
    assert found.startswith("before\n")
    assert "SB005: " in found
    assert output(alice, "x") == "1\n"


def test_its_time_is_not_that_of_our_own_api(
    conversations: None, alice: Caller, settings: Any
) -> None:
    settings.SANDBOX_TIMEOUT_SEC = 1
    assert output(alice, "import time; time.sleep(1.1); print('done')") == "done\n"


def test_output_is_cut_where_it_may_be_no_longer(
    conversations: None, alice: Caller, settings: Any
) -> None:
    assert output(alice, "'x' * 150_000") == f"'{'x' * 150_000}'\n"
    settings.AGENT_SANDBOX = _but(settings.AGENT_SANDBOX, output_bytes=1_000_000)
    cut = f"[cut: the first {TEXT_LIMIT} characters are kept]"
    longest = f"'{'x' * (TEXT_LIMIT - 1)}\n{cut}"
    assert output(alice, "'x' * 300_000") == f"{longest}\n[output truncated]\n"
    too_many = f"for n in range({RunLimits().rich_output_count + 1}): display(n)"
    assert output(alice, too_many).endswith("\n[output truncated]\n")
    settings.AGENT_SANDBOX = _but(settings.AGENT_SANDBOX, output_bytes=11)
    assert output(alice, "print('x' * 5000)") == "x" * 11 + "\n[output truncated]\n"
    assert output(alice, "print('\\u00e4' * 50)") == "\u00e4" * 5 + "\n[output truncated]\n"


def test_artifacts_are_what_this_run_has_changed_with_links_that_need_no_key(
    conversations: None, alice: Caller
) -> None:
    first = execute(alice, "open('a b.txt', 'w').write('hello')\nopen('c', 'w').write('c')\n1")
    assert [each["path"] for each in first.json()["artifacts"]] == ["a b.txt", "c"]
    artifact = first.json()["artifacts"][0]
    url = artifact.pop("download_url")
    assert artifact == {"path": "a b.txt", "size_bytes": 5, "mime_type": "text/plain"}
    assert url.startswith("http://testserver/")
    assert content(url) == b"hello"
    assert execute(alice, "1").json()["artifacts"] == []
    changed = execute(alice, "open('c', 'w').write('d'); import os; os.remove('a b.txt')").json()
    assert [each["path"] for each in changed["artifacts"]] == ["c"]
    assert content(changed["artifacts"][0]["download_url"]) == b"d"
    # A link goes on being of what it was made for.
    assert content(url) == b"hello"
    assert listed(alice) == ["c"]


def test_a_link_lives_as_long_as_was_asked(
    conversations: None, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "open('x.txt', 'w').write('x')"
    asked = time.time()
    short = execute(alice, code).json()["artifacts"][0]["download_url"]
    again = download_url(alice, "x.txt", expires_in=600).json()
    assert (again["status"], again["path"], again["expires_in"]) == ("success", "x.txt", 600)
    answered = time.time()
    for url, seconds in ((short, 300), (again["download_url"], 600)):
        for now, status in ((asked + seconds - 2, 200), (answered + seconds + 1, 404)):
            with monkeypatch.context() as patched:
                patched.setattr("executions.runs.artifacts.time.time", lambda: now)  # noqa: B023
                assert Client().get(url).status_code == status
    middle = len(short) - 20
    other = "A" if short[middle] != "A" else "B"
    assert Client().get(short[:middle] + other + short[middle + 1 :]).status_code == 404


def test_inputs_are_saved_files_of_the_conversation(conversations: None, alice: Caller) -> None:
    missing = execute(alice, "1", inputs=["in/data.csv"])
    assert missing.status_code == 200
    assert missing.json() == {"error": "inputs: There is no file 'in/data.csv'."}
    output(alice, "import os; os.mkdir('in'); open('in/data.csv', 'w').write('1')")
    runs = Execution.objects.count()
    assert output(alice, "open('in/data.csv').read()", inputs=["/in/data.csv"]) == "'1'\n"
    assert execute(alice, "1", inputs=["in/data.csv", "in"]).json()["error"]
    assert execute(alice, "1", user_id="bob", inputs=["in/data.csv"]).json()["error"]
    assert Execution.objects.count() == runs + 1


def test_the_record_says_whom_it_was_for_and_is_found_by_a_header(
    conversations: None, alice: Caller
) -> None:
    answer = execute(alice, "1", user_id="somebody")
    record = alice.client.get(f"/api/v1/executions/{answer['X-Execution-ID']}").json()
    assert record["receipt"]["subject"] == answer["X-Execution-ID"]
    assert record["files_saved"] is True
    assert Execution.objects.get().subject == "somebody"


def test_no_provider_is_a_200_with_an_error(no_provider: None, alice: Caller) -> None:
    answer = execute(alice, "1")
    assert answer.status_code == 200
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith("SB001")


def test_a_provider_without_sessions_is_a_200_with_an_error(
    scripted: object, alice: Caller
) -> None:
    answer = execute(alice, "pass")
    assert answer.status_code == 200
    assert answer.json()["error"].startswith("SB002: ")


@pytest.mark.parametrize("key_text", [None, "wrong"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", PATH),
        ("post", "/v1/sandbox/reset"),
        ("post", "/v1/sandbox/stop"),
        ("post", "/v1/files/upload"),
        ("post", "/v1/files/upload-urls"),
        ("get", "/v1/files/list"),
        ("get", "/v1/files/download-url"),
    ],
)
def test_a_wrong_key_is_401_in_that_apis_words(
    db: None, key_text: str | None, method: str, path: str
) -> None:
    headers = {"X-API-Key": key_text} if key_text else {}
    answer = getattr(Client(), method)(path, {"user_id": "a", "code": "1"}, headers=headers)
    assert (answer.status_code, answer.json()) == (401, {"detail": "Invalid API key"})


def test_health_needs_no_key(db: None) -> None:
    answer = Client().get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "body",
    [
        {"user_id": None},
        {"user_id": ""},
        {"user_id": 5},
        {"user_id": "x" * 4097},
        {"session_id": "x" * 4097},
        {"session_id": 5},
        {"code": None},
        {"code": ""},
        {"code": "a\0b"},
        {"presign_expires_in": 0},
        {"presign_expires_in": 604801},
        {"presign_expires_in": True},
        {"presign_expires_in": "300"},
        {"presign_expires_in": 1.5},
        {"inputs": "a.csv"},
        {"inputs": ["../a"]},
        {"inputs": ["a\0b"]},
        {"inputs": ["a//b"]},
        {"inputs": ["a"] * 1001},
        {"sesion_id": "x"},
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_is_not_understood_is_refused_and_nothing_is_opened(
    body: dict[str, Any], no_provider: None, alice: Caller
) -> None:
    answer = alice.client.post(PATH, {"user_id": "alice", "code": "1", **body})
    assert answer.status_code == 400
    assert list(answer.json()) == ["detail"]
    assert next(iter(body)) in answer.json()["detail"]
    assert (Session.objects.count(), Execution.objects.count()) == (0, 0)


def test_malformed_json_and_other_methods_are_refused(alice: Caller) -> None:
    answer = alice.client.generic("POST", PATH, "{", content_type="application/json")
    assert (answer.status_code, list(answer.json())) == (400, ["detail"])
    answer = alice.client.get(PATH)
    assert (answer.status_code, list(answer.json())) == (405, ["detail"])


def _but(given: Any, **changed: Any) -> Any:
    from dataclasses import replace

    return replace(given, **changed)
