"""Attacks on a worker, by the model that it serves and by the queue that it asks."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.doors.claude.test_claude_worker import (
    authority,
    failed,
    key,
    own,
    place,
    run,
    said,
    session,
)
from tests.support.claude_queue import KEY
from tests.support.claude_worker import SECONDS, Workplace, text_of
from tests.support.codex_door import make_key, manage
from tests.support.waiting import wait_until

__all__ = ["authority", "key", "own", "place", "session"]

_AFTER: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("write", {"file_path": "f", "content": "x\n"}),
    ("read", {"file_path": "f"}),
    ("glob", {"pattern": "*"}),
    ("grep", {"pattern": "x"}),
)


@pytest.mark.parametrize(
    "command",
    [
        "exit 7",
        "kill -9 -1",
        "sleep 600 & disown; (sleep 600; echo late) & trap '' TERM INT; echo now",
        "exec 1>&- 2>&-",
        "head -c 50000000 /dev/zero | tr '\\0' x",
        "python3() { echo mine; }; cat() { echo mine; }; export -f python3 cat",
        "ln -s /etc /workspace/etc; mkfifo /workspace/pipe; touch $'a\\nb' $'\\xff'",
    ],
)
def test_a_command_that_breaks_its_shell_breaks_nothing_else(
    place: Workplace, session: str, command: str
) -> None:
    queue = place.queue
    run(queue, session, "bash", command=command, timeout_ms=10_000)
    for name, given in _AFTER:
        assert said(queue, session, name, **given)
    said(queue, session, "bash", restart=True)
    assert said(queue, session, "bash", command="echo on") == "on\n"


def test_a_file_of_another_kind_is_told_as_an_error(place: Workplace, session: str) -> None:
    queue = place.queue
    said(queue, session, "bash", command="mkfifo pipe; ln -s /etc/passwd link.png")
    assert "regular" in failed(queue, session, "read", file_path="pipe")
    # One of the sandbox, at most.
    assert b"root" not in str(run(queue, session, "read", file_path="no/../../x.png")).encode()
    result = run(queue, session, "read", file_path="/proc/self/environ")
    assert KEY not in text_of(result)


def test_an_edit_that_cannot_be_leaves_the_file(place: Workplace, session: str) -> None:
    queue = place.queue
    said(queue, session, "write", file_path="f", content="a" * 100_000)
    given = {"old_string": "a", "new_string": "b" * 100_000, "replace_all": True}
    assert "characters" in failed(queue, session, "edit", file_path="f", **given)
    assert said(queue, session, "bash", command="wc -c < f") == "100000\n"


def test_a_call_of_an_unknown_tool_that_the_agent_waits_for_is_an_error(
    place: Workplace, session: str
) -> None:
    queue = place.queue
    calls = [queue.call(session, "newer_tool", x=1) for _ in range(2)]
    queue.wait_for_action(session, *calls)
    for call in calls:
        assert "not known" in text_of(queue.result(call))
    assert said(queue, session, "bash", command="echo on") == "on\n"
    assert place.log.count("newer_tool") == 1


def test_a_custom_tool_is_left_to_its_owner(place: Workplace, session: str) -> None:
    queue = place.queue
    call = queue.say(session, "agent.custom_tool_use", name="own", input={})
    queue.wait_for_action(session, call)
    assert said(queue, session, "bash", command="echo on") == "on\n"
    assert queue.said("user.tool_result", call) == []


def test_a_result_that_is_refused_is_told_as_an_error(place: Workplace, session: str) -> None:
    queue = place.queue
    queue.statuses["POST events"] = [413]
    result = run(queue, session, "bash", command="echo much")
    assert result["is_error"]
    assert "refused" in text_of(result)


def test_a_call_whose_permission_changes_runs_once(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_changed")
    with own.worker():
        call = queue.call("sesn_changed", "bash", "ask", command="echo run >> runs")
        own.decide(call, approve=False)
        queue.wait_for("user.tool_confirmation", call)
        queue.forget("sesn_changed", call)
        queue.change("sesn_changed", call, evaluated_permission="allow")
        queue.take_away(item)
        assert "rejected" in text_of(queue.result(call))
        assert len(own.records(call)) == 1
        assert failed(queue, "sesn_changed", "read", file_path="runs")


def test_a_denial_while_no_worker_is_there_holds(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_denied")
    with own.worker():
        call = queue.call("sesn_denied", "bash", "ask", command="echo no")
        own.wait_for_status(call, "queued")
    queue.say("sesn_denied", "user.tool_confirmation", tool_use_id=call, result="deny")
    queue.take_away(item)
    with own.worker():
        own.wait_for_status(call, "cancelled")
        other = queue.call("sesn_denied", "bash", "ask", command="echo later")
        own.wait_for_status(other, "queued")
        queue.say("sesn_denied", "session.deleted")
        own.wait_for_status(other, "cancelled")


def test_a_server_that_is_entered_later_gets_nothing_of_the_former(
    own: Workplace, place: Workplace
) -> None:
    """The same environment id and the same session id, at another address."""
    for number, each in enumerate((own, place)):
        each.queue.add_session("sesn_same")
        if each is own:
            with own.worker():
                said(own.queue, "sesn_same", "bash", command="echo secret > kept")
        else:
            assert failed(each.queue, "sesn_same", "read", file_path="kept"), number


def test_a_killed_worker_is_followed_by_another(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_killed")
    # A worker with no place left polls no more: nothing is given to the dead one.
    with own.worker("--parallel", "1") as process:
        command = "echo run >> /workspace/runs; sleep 600"
        call = queue.call("sesn_killed", "bash", command=command, timeout_ms=300_000)
        own.wait_for_status(call, "running")
        process.kill()
        process.wait()
        process.returncode = 0
    queue.take_away(item)
    with own.worker():
        assert queue.result(call)["is_error"]
        # It may have been killed before its code began, and is not begun again.
        count = said(queue, "sesn_killed", "bash", command="cat runs 2> /dev/null | wc -l")
        assert int(count) <= 1
    (record,) = own.records(call)
    assert (record["status"], record["error_code"]) == ("error", "SB009")


def test_a_key_that_is_narrowed_ends_what_runs(own: Workplace) -> None:
    queue = own.queue
    make_key(own.site, "claude", "narrowed", scopes="execute sessions files")
    queue.add_session("sesn_narrowed")
    with own.worker(key="narrowed"):
        call = queue.call("sesn_narrowed", "bash", command="sleep 600", timeout_ms=300_000)
        own.wait_for_status(call, "running")
        change = (
            "from executions.tenants.models import ApiKey; key = ApiKey.objects.get("
            "name='narrowed'); key.scopes = 'execute'; key.save()"
        )
        manage(own.site, "shell", "-c", change)
        own.wait_for_status(call, "cancelled")
        wait_until(lambda: "lacks the required scope" in own.log, SECONDS)


def test_what_a_queue_says_wrongly_ends_no_worker(own: Workplace) -> None:
    queue = own.queue
    # After each the worker waits twice as long.
    queue.lies["poll"] = [
        b"[" * 1000,
        {"id": "work_1", "data": {"type": "session", "id": "sesn_1"}, "environment_id": "env_b"},
        {"id": "\ud800", "secret": "é" * 1000},
        17,
    ]
    with own.worker() as process:
        wait_until(lambda: not queue.lies["poll"], SECONDS)
        queue.add_session("sesn_true")
        assert said(queue, "sesn_true", "bash", command="echo on") == "on\n"
        assert process.poll() is None
    assert "Traceback" not in own.log
    assert {path for _, path, _ in queue.requests if "sesn_1" in path} == set()


def test_a_history_that_cannot_be_read_ends_its_session_alone(own: Workplace) -> None:
    queue = own.queue
    item = queue.add_session("sesn_bad")
    queue.say("sesn_bad", "user.message", content=[])
    queue.page_after = "\ud800"
    with own.worker("--parallel", "1"):
        queue.wait(lambda: item.is_stopped)
        queue.page_after = ""
        queue.add_session("sesn_good")
        assert said(queue, "sesn_good", "bash", command="echo on") == "on\n"


def test_a_second_signal_ends_at_once(own: Workplace) -> None:
    queue = own.queue
    queue.add_session("sesn_now")
    with own.worker(grace=300) as process:
        call = queue.call("sesn_now", "bash", command="sleep 600", timeout_ms=300_000)
        own.wait_for_status(call, "running")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGQUIT)
        assert process.wait(SECONDS) == 0
        own.wait_for_status(call, "cancelled")
