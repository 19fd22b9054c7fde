"""Code that calls its caller's tools: over real servers, answered by whoever has it run."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.support.processes import ROOT, clean_environment
from tests.support.raw_http import Answer, ask
from tests.support.sandboxes import long_enough
from tests.support.site import EXECUTIONS, MANAGE, Site
from tests.support.streaming import Events, streamed

SEARCH = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "maxLength": 20}},
        "required": ["query"],
        "additionalProperties": False,
    },
}
DELETE = {"name": "delete", "parameters": {"type": "object"}, "writes": True}
ASKS = "from tools import search\nprint(search(query='x'))"


Shell = Callable[[str], str]
# Runs each line of its input, a JSON string, and says what `said` is then.
SHELL = """
import json, sys
for line in sys.stdin:
    names = {}
    exec(json.loads(line), names)
    print("said:" + str(names.get("said")), flush=True)
"""


@pytest.fixture(scope="module")
def shell(streaming_site: Site) -> Iterator[Shell]:
    """Runs code within the service's environment."""
    process = subprocess.Popen(
        [*MANAGE, "shell", "-c", SHELL],
        env=clean_environment(streaming_site.data_dir),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def run(code: str) -> str:
        stdin.write(json.dumps(code) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("said:"):
                return line.removeprefix("said:").strip()
        raise AssertionError("the shell has ended")

    yield run
    stdin.close()
    assert process.wait(60) == 0
    stdout.close()


@pytest.fixture(scope="module")
def colleague(shell: Shell) -> str:
    return shell(
        "from executions.models import Tenant\n"
        "from executions.tenants.keys import create_api_key\n"
        "said = create_api_key(Tenant.objects.get(slug='wonderland'), 'colleague')[1]"
    )


class Run:
    """A run that is followed, and the calls that it makes."""

    def __init__(self, site: Site, events: Events) -> None:
        self.site = site
        self.events = events
        self.id = next(events)["id"]
        self.seen: list[dict[str, Any]] = []

    def until(self, kind: str) -> dict[str, Any]:
        for event in self.events:
            self.seen.append(event)
            if event["type"] == kind:
                return event
        raise AssertionError(f"no {kind} among {self.seen}")

    def done(self) -> dict[str, Any]:
        execution: dict[str, Any] = self.until("done")["execution"]
        return execution

    def answer(self, call: str, body: Any, key: str = "") -> Answer:
        path = f"{EXECUTIONS}/{self.id}/tool_calls/{call}"
        return ask(self.site.service, "POST", path, body, key=key or self.site.alice)

    def calls(self, key: str = "") -> Answer:
        path = f"{EXECUTIONS}/{self.id}/tool_calls"
        return ask(self.site.service, "GET", path, key=key or self.site.alice)


@contextmanager
def run(site: Site, code: str, *tools: Any, path: str = EXECUTIONS, **body: Any) -> Iterator[Run]:
    sent = {"code": code, "tools": tools or (SEARCH,), "timeout": 30, **body}
    with streamed(site.service, path, site.alice, sent) as events:
        yield Run(site, events)


def post(site: Site, body: Any, path: str = EXECUTIONS) -> Answer:
    return ask(site.service, "POST", path, body, key=site.alice, Accept="application/x-ndjson")


def entries(site: Site, execution_id: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(site.data_dir / "cofferdam.sqlite3", timeout=20)) as database:
        query = "SELECT statement FROM executions_ledgerentry WHERE kind = 'tool_call' ORDER BY sequence"
        found = [json.loads(statement) for (statement,) in database.execute(query)]
    return [each for each in found if each["subject"] == execution_id]


def test_a_call_is_told_on_the_stream_and_its_answer_comes_back(streaming_site: Site) -> None:
    with run(streaming_site, f"{ASKS}\ndef main(): return search(query='again')") as found:
        first = found.until("tool_call")
        assert (first["name"], first["arguments"]) == ("search", {"query": "x"})
        assert found.answer(first["id"], {"result": ["a", 1]}).status == 200
        second = found.until("tool_call")
        assert found.answer(second["id"], {"result": None}).json["state"] == "answered"
        done = found.done()

    assert (done["status"], done["stdout"]) == ("succeeded", "['a', 1]\n")
    assert (done["has_result"], done["result"]) == (True, None)
    said = entries(streaming_site, done["id"])
    assert [each["step"] for each in said] == ["called", "answered"] * 2
    assert said[1]["actor"].startswith("key:")
    assert said[0]["arguments_hash"] == said[1]["arguments_hash"]
    assert [each["state"] for each in found.calls().json["results"]] == ["answered", "answered"]


def test_javascript_calls_tools(streaming_site: Site) -> None:
    code = "const { search } = require('tools')\nconst main = () => search({ query: 'x' })"
    with run(streaming_site, code, language="javascript") as found:
        call = found.until("tool_call")
        assert call["arguments"] == {"query": "x"}
        assert found.answer(call["id"], {"result": ["a", 1]}).status == 200
        assert found.done()["result"] == ["a", 1]


def test_a_cell_calls_tools_and_the_next_one_does_not(streaming_site: Site) -> None:
    site = streaming_site
    session = ask(site.service, "POST", "/api/v1/sessions", {}, key=site.alice).json["id"]
    path = f"/api/v1/sessions/{session}/executions"
    with run(site, ASKS, path=path) as found:
        found.answer(found.until("tool_call")["id"], {"error": "none there"})
        assert (
            "tools.ToolError" in found.done()["stderr"]
            or "none there" in found.seen[-1]["execution"]["stderr"]
        )
    with run(site, "search(query='y')", {**SEARCH, "name": "other"}, path=path) as found:
        assert "not a tool of this run" in found.done()["stderr"]
    ask(site.service, "DELETE", f"/api/v1/sessions/{session}", key=site.alice)


def test_nobody_else_answers(streaming_site: Site, colleague: str) -> None:
    with run(streaming_site, ASKS) as found:
        call = found.until("tool_call")["id"]
        # A stranger is not told that there is one, and a colleague sees it.
        assert found.answer(call, {"result": 1}, streaming_site.charlie).status == 404
        assert found.calls(streaming_site.charlie).status == 404
        assert found.answer(call, {"result": 1}, colleague).status == 403
        assert found.calls(colleague).json["results"][0]["id"] == call
        assert found.answer(call, {"result": "mine"}).status == 200
        assert found.done()["stdout"] == "mine\n"


def test_an_answer_counts_once_and_only_while_it_is_waited_for(streaming_site: Site) -> None:
    with run(streaming_site, ASKS) as found:
        call = found.until("tool_call")["id"]
        assert found.answer(call.replace(call[:4], "0000"), {"result": 1}).status == 404
        for wrong in ({"result": 1, "error": "x"}, {"results": 1}, {"error": ""}, [], {"error": 1}):
            assert found.answer(call, wrong).status == 400
        large = found.answer(call, {"result": "x" * 300_000})
        assert (large.status, large.json["error"]["field"]) == (400, "result")
        assert [found.answer(call, {"result": 1}).status for _ in range(2)] == [200, 200]
        assert found.answer(call, {"result": 2}).status == 409
        assert found.done()["stdout"] == "1\n"
        assert found.answer(call, {"result": 2}).status == 409


def test_what_ends_the_run_ends_its_calls(streaming_site: Site) -> None:
    def outlast(seconds: float) -> tuple[str, list[int]]:
        with run(streaming_site, ASKS, timeout=seconds) as found:
            status = found.done()["status"]
            calls = [event["id"] for event in found.seen if event["type"] == "tool_call"]
            return status, [found.answer(call, {"result": 1}).status for call in calls]

    assert long_enough(outlast, lambda found: bool(found[1]), 1) == ("timed_out", [409])
    with run(streaming_site, ASKS) as found:
        call = found.until("tool_call")["id"]
        cancel = f"{EXECUTIONS}/{found.id}/cancel"
        ended = ask(streaming_site.service, "POST", cancel, key=streaming_site.alice)
        assert ended.json["status"] == "cancelled"
        assert found.answer(call, {"result": 1}).status == 409


def test_arguments_that_the_schema_refuses_do_not_go_out(streaming_site: Site) -> None:
    code = (
        "from tools import search, ToolError\n"
        "for arguments in ({}, {'query': 1}, {'query': 'x' * 21}, {'query': 'x', 'more': 1}):\n"
        "    try: search(**arguments)\n"
        "    except ToolError as error: print(str(error)[:40])"
    )
    with run(streaming_site, code) as found:
        done = found.done()

    assert done["stdout"] == "the arguments do not match the schema of\n" * 4
    assert all(event["type"] != "tool_call" for event in found.seen)
    assert [each["step"] for each in entries(streaming_site, done["id"])] == ["refused"] * 4
    assert {each["state"] for each in found.calls().json["results"]} == {"refused"}


def decided(shell: Shell, call: str, *, approve: bool) -> str:
    return shell(
        "from django.contrib.auth import get_user_model\n"
        "from executions.models import ToolCall\n"
        "from executions.capabilities.tools.calls import decide\n"
        "who = dict(username='boss', is_staff=True, is_superuser=True)\n"
        "person, _ = get_user_model().objects.get_or_create(**who)\n"
        f"call = ToolCall.objects.get(pk={call!r})\n"
        "said = call.arguments_hash\n"
        f"decide(call, person, approve={approve}, arguments_hash=said)"
    )


def test_a_tool_that_writes_waits_for_an_approval_of_just_this_call(
    streaming_site: Site, shell: Shell
) -> None:
    site = streaming_site
    code = (
        "from tools import delete, ToolError\n"
        "print(delete(path='a'))\n"
        "try: delete(path='b')\n"
        "except ToolError as error: print(error)"
    )
    with run(site, code, DELETE, timeout=60) as found:
        held = found.until("tool_call_held")
        assert "arguments" not in held
        assert found.answer(held["id"], {"result": 1}).status == 409
        assert found.calls().json["results"][0]["arguments"] is None
        assert decided(shell, held["id"], approve=True) == held["arguments_hash"]
        call = found.until("tool_call")
        assert (call["id"], call["arguments"]) == (held["id"], {"path": "a"})
        assert found.answer(call["id"], {"result": "gone"}).status == 200
        second = found.until("tool_call_held")
        decided(shell, second["id"], approve=False)
        done = found.done()

    assert done["stdout"] == "gone\na person reviewed the call and rejected it\n"
    steps = [each["step"] for each in entries(site, done["id"])]
    assert steps == ["called", "approved", "answered", "called", "rejected"]


def test_who_writes_the_row_approves_and_answers_nothing(streaming_site: Site) -> None:
    site = streaming_site

    def write(call: str, values: str) -> None:
        with closing(sqlite3.connect(site.data_dir / "cofferdam.sqlite3", timeout=20)) as database:
            pk = call.replace("-", "")
            database.execute(f"UPDATE executions_toolcall SET {values} WHERE id = ?", [pk])
            database.commit()

    code = (
        "from tools import search, delete, ToolError\n"
        "for one in search, delete:\n"
        "    try: one(query='x')\n"
        "    except ToolError as error: print(error)"
    )
    with run(site, code, SEARCH, DELETE) as found:
        call = found.until("tool_call")["id"]
        write(
            call,
            "state = 'answered', answer = '{\"result\":1}', answered_by = 'x', answered_at = asked_at",
        )
        held = found.until("tool_call_held")["id"]
        write(held, "state = 'waiting', writes = 0")
        assert found.answer(held, {"result": 1}).status == 409
        assert found.done()["stdout"] == "the call does not match the ledger\n" * 2
    assert [event["type"] for event in found.seen].count("tool_call") == 1


def test_an_asynchronous_run_is_answered_from_another_process(streaming_site: Site) -> None:
    site = streaming_site
    queued = post(site, {"code": ASKS, "tools": [SEARCH], "mode": "async", "timeout": 30}).json
    events = f"{EXECUTIONS}/{queued['id']}/events"
    with streamed(site.service, events, site.alice) as told:
        found = Run(site, told)
        call = found.until("tool_call")
        assert found.answer(call["id"], {"result": "far"}).status == 200
        assert found.done()["stdout"] == "far\n"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({**SEARCH, "name": "import"}, "cannot be the name"),
        ({**SEARCH, "name": "ToolError"}, "cannot be the name"),
        ({**SEARCH, "parameters": {}}, "of type object"),
        ({**SEARCH, "parameters": {"type": "object", "pattern": "(a+)+$"}}, "supported keyword"),
        ({**SEARCH, "parameters": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/"}}}}, "$defs"),
        (
            {**SEARCH, "parameters": {"type": "object", "$ref": "#/$defs/a/default"}},
            "#/$defs/NAME",
        ),
        ({**SEARCH, "parameters": {"type": "object", "items": {"$schema": "x"}}}, "supported keyword"),
        ({**SEARCH, "parameters": {"type": "object", "properties": 1}}, "not a valid schema"),
        ({**SEARCH, "parameters": {"type": "object", "title": "x" * 20_000}}, "bytes"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused_before_anything_runs(
    streaming_site: Site, tool: Any, said: str
) -> None:
    refused = post(streaming_site, {"code": "1", "tools": [tool]})

    assert (refused.status, refused.json["error"]["field"]) == (400, "tools")
    assert said in refused.json["error"]["message"]


def test_who_could_not_answer_is_told_so_and_other_languages_have_none(
    streaming_site: Site,
) -> None:
    site = streaming_site
    for body in ({"tools": [SEARCH, SEARCH]}, {"tools": [SEARCH], "language": "bash"},
                 {"tools": [SEARCH], "entrypoint": "main"}):  # fmt: skip
        assert post(site, {"code": "1", **body}).status == 400
    plain = ask(site.service, "POST", EXECUTIONS, {"code": "1", "tools": [SEARCH]}, key=site.alice)
    assert (plain.status, plain.json["error"]["field"]) == (400, "tools")
