"""A worker as a process, for agents of a queue over a real socket, with sandboxes of a service."""

from __future__ import annotations

import base64
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.certificates import Authority
from tests.support.claude_queue import KEY, Queue, queue_over_tls
from tests.support.claude_worker import SECONDS, Workplace, text_of, workplace
from tests.support.codex_door import make_key, manage
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until

_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def key(streaming_site: Site) -> str:
    return make_key(streaming_site, "claude", "worker", scopes="execute sessions files read")


@pytest.fixture(scope="module")
def place(
    streaming_site: Site, key: str, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workplace]:
    """One that the tests of this module share, with a worker."""
    folder = tmp_path_factory.mktemp("claude")
    with queue_over_tls(authority.issue(folder).path) as queue:
        found = workplace(streaming_site, queue, authority, folder, "claude", "shared")
        with found.worker("--network", "none", "--parallel", "16"):
            yield found


@pytest.fixture
def own(
    streaming_site: Site, key: str, authority: Authority, tmp_path: Path
) -> Iterator[Workplace]:
    """One of a test's own, without a worker."""
    with queue_over_tls(authority.issue(tmp_path).path) as queue:
        yield workplace(streaming_site, queue, authority, tmp_path, "claude", tmp_path.name[:50])


@pytest.fixture
def session(place: Workplace, request: pytest.FixtureRequest) -> Iterator[str]:
    """An agent's session of a test's own."""
    name = f"sesn_{abs(hash(request.node.nodeid))}"
    place.queue.add_session(name)
    yield name
    # Its place is for the next one.
    place.queue.say(name, "session.status_terminated")


def run(queue: Queue, session: str, name: str, **given: Any) -> dict[str, Any]:
    return queue.result(queue.call(session, name, **given))


def said(queue: Queue, session: str, name: str, **given: Any) -> str:
    result = run(queue, session, name, **given)
    assert not result["is_error"], result
    return text_of(result)


def failed(queue: Queue, session: str, name: str, **given: Any) -> str:
    result = run(queue, session, name, **given)
    assert result["is_error"], result
    return text_of(result)


def test_a_command_is_an_execution_of_its_agent(place: Workplace, key: str, session: str) -> None:
    call = place.queue.call(session, "bash", command="echo out; echo err >&2; exit 3")
    result = place.queue.result(call)
    assert result["is_error"]
    assert sorted(text_of(result).split()[:2]) == ["err", "out"], text_of(result)
    (record,) = place.records(call)
    assert (record["agent"], record["model"]) == ("helper", "claude-test")
    assert (record["conversation"], record["exit_code"]) == (session, 3)
    assert record["code"] == "echo out; echo err >&2; exit 3"
    path = f"{EXECUTIONS}/{UUID(record['id'])}"
    assert ask(place.site.service, "GET", path, key=key).json["receipt"]


def test_a_shell_keeps_its_state_until_it_is_begun_anew(place: Workplace, session: str) -> None:
    queue = place.queue
    assert said(queue, session, "bash", command="mkdir -p d; cd d; A=1; pwd") == "/workspace/d\n"
    assert said(queue, session, "bash", command='echo "$A"; pwd') == "1\n/workspace/d\n"
    assert said(queue, session, "bash", restart=True)
    assert said(queue, session, "bash", command='echo "<$A>"') == "<>\n"


def test_files_are_the_same_for_all_tools(place: Workplace, session: str) -> None:
    queue = place.queue
    said(queue, session, "bash", command="cd /tmp")
    assert said(queue, session, "write", file_path="d/a.txt", content="one\ntwo\n")
    assert said(queue, session, "read", file_path="/workspace/d/a.txt") == "one\ntwo\n"
    assert said(queue, session, "read", file_path="d/a.txt", view_range=[2, 2]) == "two\n"
    assert said(queue, session, "edit", file_path="d/a.txt", old_string="two", new_string="2")
    assert said(queue, session, "bash", command="cat /workspace/d/a.txt") == "one\n2\n"
    assert said(queue, session, "glob", pattern="**/*.txt") == "/workspace/d/a.txt\n"
    assert said(queue, session, "grep", pattern="^o") == "/workspace/d/a.txt:1:one\n"
    assert "d/no" in failed(queue, session, "read", file_path="d/no")


def test_a_call_for_a_file_is_an_execution_too(place: Workplace, session: str) -> None:
    call = place.queue.call(session, "write", file_path="a", content="of the agent")
    assert not place.queue.result(call)["is_error"]
    (record,) = place.records(call)
    assert '"content": "of the agent"' in record["code"]
    assert (record["status"], record["conversation"]) == ("succeeded", session)


def test_a_picture_is_told_as_one(place: Workplace, session: str) -> None:
    queue = place.queue
    said(queue, session, "bash", command=f"echo {_PNG} | base64 -d > a.png")
    (block,) = run(queue, session, "read", file_path="a.png")["content"]
    assert block["type"] == "image"
    assert base64.b64decode(block["source"]["data"]).startswith(b"\x89PNG")
    assert "No such file" in failed(queue, session, "read", file_path="no.png")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("bash", {}),
        ("bash", {"command": ["x"]}),
        ("bash", {"command": "echo \0"}),
        ("bash", {"command": "x" * 2_000_000}),
        ("read", {"file_path": 3}),
        ("write", {"file_path": "a", "content": "x" * 2_000_000}),
        ("edit", {"file_path": "a"}),
        ("glob", {"pattern": "/etc/*"}),
        ("grep", {"pattern": "("}),
        ("read", {"file_path": "/proc/self/mem"}),
    ],
)
def test_what_a_model_asks_wrongly_is_told_to_it(
    place: Workplace, session: str, name: str, given: dict[str, Any]
) -> None:
    assert failed(place.queue, session, name, **given)
    assert said(place.queue, session, "bash", command="echo on") == "on\n"


def test_there_is_nothing_of_the_host_in_it(place: Workplace, session: str) -> None:
    queue = place.queue
    assert said(queue, session, "bash", command="env; cat /proc/net/dev | wc -l").find(KEY) == -1
    failed(queue, session, "read", file_path=str(place.ca_file))
    failed(queue, session, "bash", command="curl -sS --max-time 5 https://localhost || exit 1")


def test_tools_of_others_are_not_answered(place: Workplace, session: str) -> None:
    queue = place.queue
    other = queue.call(session, "web_search", query="x")
    assert said(queue, session, "bash", command="echo on") == "on\n"
    assert queue.said("user.tool_result", other) == []


def test_a_call_that_asks_runs_once_it_is_approved(
    place: Workplace, key: str, session: str
) -> None:
    queue = place.queue
    call = queue.call(session, "bash", "ask", command="echo approved")
    place.wait_for_status(call, "queued")
    assert queue.said("user.tool_result", call) == []
    place.decide(call, approve=True)
    assert text_of(queue.result(call)) == "approved\n"
    assert queue.wait_for("user.tool_confirmation", call)["result"] == "allow"
    (record,) = place.records(call)
    path = f"{EXECUTIONS}/{UUID(record['id'])}"
    detail = ask(place.site.service, "GET", path, key=key).json
    assert detail["policy"]["approved"]["by"] == "user:judge"


def test_a_call_that_is_rejected_never_runs(place: Workplace, session: str) -> None:
    queue = place.queue
    call = queue.call(session, "write", "ask", file_path="rejected", content="x")
    place.decide(call, approve=False)
    denied = queue.wait_for("user.tool_confirmation", call)
    assert denied["result"] == "deny"
    assert "rejected" in denied["deny_message"]
    assert "judge" not in denied["deny_message"]
    assert failed(queue, session, "read", file_path="rejected")
    assert queue.said("user.tool_result", call) == []


def test_a_call_that_the_vendor_denies_waits_for_nobody(place: Workplace, session: str) -> None:
    queue = place.queue
    call = queue.call(session, "bash", "ask", command="echo no")
    place.wait_for_status(call, "queued")
    queue.say(session, "user.tool_confirmation", tool_use_id=call, result="deny")
    place.wait_for_status(call, "cancelled")
    assert said(queue, session, "bash", command="echo on") == "on\n"
    assert queue.said("user.tool_result", call) == []


def test_a_word_of_the_vendor_alone_does_not_approve(place: Workplace, session: str) -> None:
    queue = place.queue
    call = queue.call(session, "bash", "ask", command="echo yes")
    queue.say(session, "user.tool_confirmation", tool_use_id=call, result="allow")
    place.wait_for_status(call, "queued")
    place.decide(call, approve=True)
    assert text_of(queue.result(call)) == "yes\n"


def test_a_restart_that_asks_is_denied(place: Workplace, session: str) -> None:
    queue = place.queue
    assert said(queue, session, "bash", command="A=kept")  # nothing is put out
    call = queue.call(session, "bash", "ask", restart=True)
    assert queue.wait_for("user.tool_confirmation", call)["result"] == "deny"
    assert said(queue, session, "bash", command="echo $A") == "kept\n"


def test_a_session_is_found_again_by_its_agent(place: Workplace, session: str) -> None:
    queue = place.queue
    said(queue, session, "bash", command="echo kept > kept")
    first = place.queue.items[-1]
    queue.take_away(first)
    assert said(queue, session, "bash", command="cat kept") == "kept\n"
    calls = [each["id"] for each in queue.events[session] if each["type"] == "agent.tool_use"]
    assert len({place.records(call)[0]["session_id"] for call in calls}) == 1


def test_a_result_that_is_not_taken_at_once_is_sent_again(place: Workplace, session: str) -> None:
    place.queue.statuses["events"] = [500, 503]
    assert said(place.queue, session, "bash", command="echo on") == "on\n"


def test_a_lost_lease_ends_what_runs_and_nothing_runs_twice(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_lost")
    with own.worker("--parallel", "2"):
        command = "echo run >> /workspace/runs; sleep 600"
        call = queue.call("sesn_lost", "bash", command=command, timeout_ms=300_000)
        own.wait_for_status(call, "running")
        queue.take_away(item)
        own.wait_for_status(call, "cancelled")
        # Whoever has the lease now tells what came of it.
        assert queue.result(call)["is_error"]
        assert said(queue, "sesn_lost", "bash", command="cat /workspace/runs") == "run\n"
        assert len(own.records(call)) == 1
        assert len(queue.said("user.tool_result", call)) == 1


def test_workers_share_the_work(own: Workplace) -> None:
    queue = own.queue
    with own.worker("--parallel", "1"), own.worker("--parallel", "1"):
        items = [queue.add_session("sesn_a"), queue.add_session("sesn_b")]
        for session in ("sesn_a", "sesn_b"):
            assert said(queue, session, "bash", command="echo $$")
        assert items[0].workers != items[1].workers


def test_one_worker_serves_no_more_sessions_than_it_may(own: Workplace) -> None:
    queue = own.queue
    with own.worker("--parallel", "1"):
        first, second = queue.add_session("sesn_a"), queue.add_session("sesn_b")
        assert said(queue, "sesn_a", "bash", command="echo a") == "a\n"
        assert second.state == "queued"
        queue.say("sesn_a", "session.status_terminated")
        assert said(queue, "sesn_b", "bash", command="echo b") == "b\n"
        assert first.is_stopped


def test_a_worker_that_stops_answers_what_it_ended(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_stop")
    with own.worker() as process:
        call = queue.call("sesn_stop", "bash", command="sleep 600", timeout_ms=300_000)
        own.wait_for_status(call, "running")
        process.send_signal(signal.SIGTERM)
        assert queue.result(call)["is_error"]
        assert process.wait(SECONDS) == 0
    # The agent goes on, with another worker.
    assert not item.is_stopped
    own.wait_for_status(call, "cancelled")


def test_a_worker_that_stops_ends_the_item_of_an_idle_agent(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_idle")
    with own.worker() as process:
        queue.end_turn("sesn_idle")
        queue.wait(lambda: len(item.beats) > 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert item.is_stopped


def test_a_worker_that_stops_leaves_what_waits_to_another(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_wait")
    with own.worker() as process:
        call = queue.call("sesn_wait", "bash", "ask", command="echo later")
        own.wait_for_status(call, "queued")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert not item.is_stopped
    queue.take_away(item)
    with own.worker():
        own.decide(call, approve=True)
        assert text_of(queue.result(call)) == "later\n"
    assert len(own.records(call)) == 1


def test_a_revoked_key_ends_what_runs(own: Workplace) -> None:
    queue = own.queue
    queue.add_session("sesn_revoked")
    with own.worker():
        call = queue.call("sesn_revoked", "bash", command="sleep 600", timeout_ms=300_000)
        own.wait_for_status(call, "running")
        manage(own.site, "network_credential", own.name, "--tenant", "claude", "--revoke")
        own.wait_for_status(call, "cancelled")
        queue.add_session("sesn_after")
        asked = len([each for each in queue.requests if each[1].endswith("/poll")])
    assert queue.items[-1].state == "queued", asked


def test_a_key_that_lacks_a_scope_serves_nothing(own: Workplace) -> None:
    make_key(own.site, "claude", "weak", scopes="execute")
    own.queue.add_session("sesn_weak")
    with own.worker(key="weak"):
        wait_until(lambda: "lacks the required scope" in own.log, SECONDS)
    assert own.queue.requests == []


def test_the_key_is_in_no_log(place: Workplace, session: str) -> None:
    said(place.queue, session, "bash", command="echo on")
    assert KEY not in place.log
    assert "token-of-" not in place.log
    assert KEY not in place.site.service.output
