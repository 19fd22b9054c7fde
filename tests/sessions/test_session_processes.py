"""Commands in a session: waited for or in the background, each with a record that ends."""

from __future__ import annotations

import os
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from executions.ledger.verification import verify
from executions.runs import event_log
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Execution
from executions.runs.orphaned_runs import UnattendedRuns
from executions.sessions import background_commands
from executions.sessions.capacity import suspend
from executions.sessions.maintenance import maintain
from executions.sessions.models import Session
from executions.tenants.keys import create_api_key
from providers.errors import ProviderUnavailable
from providers.sandbox import Process
from providers.services.settings_cache import forget_all
from providers.values import Command
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.policies import in_force
from tests.support.routing import make_route
from tests.support.sessions import URL, aged, cell, opened, row, wait_for

pytestmark = pytest.mark.usefixtures("kept_here")


def command(caller: Caller, session: dict[str, Any], **body: Any) -> Any:
    return caller.client.post(f"{URL}/{session['id']}/processes", body)


def ended(answer: Any) -> Execution:
    """The execution of a background process, once its record is closed."""
    pk = answer.json()["execution"]
    wait_for(lambda: Execution.objects.get(pk=pk).finished_at is not None)
    return Execution.objects.get(pk=pk)


def test_a_command_that_is_waited_for_is_an_execution(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, "open('seen', 'w').write('by both')")
    answer = command(alice, session, shell="cat seen; exit 3")
    assert answer.status_code == 200, answer.content
    body = answer.json()
    assert (body["status"], body["exit_code"], body["stdout"]) == ("failed", 3, "by both")
    assert (body["session"], body["context"], body["pid"]) == (session["id"], None, 1)
    record = Execution.objects.get(pk=body["id"])
    assert (record.code, record.language, record.turn) == ("cat seen; exit 3", "bash", 2)
    listed = command(alice, session, command=["printf", "%s|", "a b", "c"]).json()
    assert listed["stdout"] == "a b|c|"
    assert [str(finding) for finding in verify().findings] == []


def test_a_command_that_is_too_slow_timed_out_with_137(alice: Caller) -> None:
    body = command(alice, opened(alice), shell="sleep 30", timeout=0.2).json()
    assert (body["status"], body["exit_code"]) == ("timed_out", 137)
    assert body["error"]["code"] == "SB005"


def test_a_command_does_not_wait_for_a_cell_nor_the_other_way(alice: Caller) -> None:
    session = opened(alice)
    started = command(alice, session, shell="cat", stdin=True, background=True)
    assert cell(alice, session, "print(1)").json()["stdout"] == "1\n"
    assert command(alice, session, shell="echo 2").json()["stdout"] == "2\n"
    assert Execution.objects.get(pk=started.json()["execution"]).finished_at is None


def test_a_background_process_takes_input_and_ends_with_its_output(alice: Caller) -> None:
    session = opened(alice)
    answer = command(alice, session, shell="tr a-z A-Z", stdin=True, background=True)
    assert (answer.status_code, answer.json()["state"]) == (201, "running")
    url = f"{URL}/{session['id']}/processes/{answer.json()['pid']}"
    sent = alice.client.post(f"{url}/stdin", b"hello ", content_type="application/octet-stream")
    assert sent.status_code == 204
    alice.client.post(f"{url}/stdin?close=1", b"you", content_type="application/octet-stream")
    record = ended(answer)
    assert (record.status, record.stdout, record.exit_code) == ("succeeded", "HELLO YOU", 0)
    assert alice.client.get(f"{URL}/{session['id']}/processes").json()["results"] == [
        {
            "pid": answer.json()["pid"],
            "execution": str(record.pk),
            "state": "exited",
            "exit_code": 0,
        }
    ]
    gone = alice.client.post(f"{url}/signal", {"signal": "SIGTERM"})
    assert gone.json() == {"signalled": False}
    assert alice.client.post(f"{url}/signal", {"signal": "SIGNAL"}).status_code == 400
    assert alice.client.post(f"{url}0/signal", {"signal": "SIGTERM"}).status_code == 404


def test_a_number_that_was_given_out_in_two_sandboxes_is_that_of_the_later_execution(
    alice: Caller,
) -> None:
    session = opened(alice)
    former = command(alice, session, shell="true", background=True).json()
    ended_before = Execution.objects.filter(pk=former["execution"], finished_at__isnull=False)
    wait_for(ended_before.exists)
    assert suspend(row(session).pk, "a test")
    later = command(alice, session, shell="sleep 60", background=True).json()
    Execution.objects.filter(pk=former["execution"]).update(pid=later["pid"])
    (found,) = alice.client.get(f"{URL}/{session['id']}/processes").json()["results"]
    assert (found["execution"], found["state"]) == (later["execution"], "running")


def test_the_ends_of_two_commands_are_recorded_on_one_connection(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, used = opened(alice), []
    complete = background_commands.complete_externally

    def note(*given: Any) -> bool:
        connection.ensure_connection()
        used.append(connection.connection)
        return complete(*given)

    monkeypatch.setattr(background_commands, "complete_externally", note)
    for _ in "12":
        ended(command(alice, session, shell="true", background=True))
    assert used[0] is used[1] is not None


def test_a_signal_ends_it_as_128_and_its_number(alice: Caller) -> None:
    session = opened(alice)
    answer = command(alice, session, command=["sleep", "60"], background=True)
    url = f"{URL}/{session['id']}/processes/{answer.json()['pid']}/signal"
    assert alice.client.post(url, {"signal": "SIGTERM"}).json() == {"signalled": True}
    record = ended(answer)
    assert (record.status, record.exit_code) == ("failed", 143)


# How it ends, and a shell that ends so. Its group is its children's, too.
@pytest.mark.parametrize(
    ("exit_code", "shell"),
    [
        (143, "echo said; sleep 60 & touch ready; wait"),
        (137, "trap '' TERM; echo said; touch ready; while :; do sleep 60; done"),
        (7, "trap 'exit 7' TERM; echo said; touch ready; while :; do sleep 0.05; done"),
    ],
)
@pytest.mark.parametrize("is_followed", [True, False])
def test_cancelling_a_background_process_ends_it_and_records_how(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, exit_code: int, shell: str, is_followed: bool
) -> None:
    # That nobody follows it, or that it ignores the signal, is seen when this is over.
    seconds = 0.3 if exit_code == 137 else 30.0 if is_followed else 1.0
    monkeypatch.setattr("executions.sessions.cells.TERM_SECONDS", seconds)
    if not is_followed:
        monkeypatch.setattr("executions.runs.event_log.shares.of_one", 0)
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    started = command(alice, session, shell=shell, background=True).json()
    wait_for((sandbox.folder / "ready").exists)
    cancelled = alice.client.post(f"/api/v1/executions/{started['execution']}/cancel")
    assert cancelled.status_code == 200, cancelled.content
    body = cancelled.json()
    assert (body["status"], body["exit_code"]) == ("cancelled", exit_code)
    # A shell may say there that what it ran was ended.
    assert body["stdout"].startswith("said\n")
    record = Execution.objects.get(pk=started["execution"])
    assert record.error_message == f"Cancelled by key:{alice.api_key.prefix}."
    process = sandbox.processes.of(started["pid"])
    assert process.poll() is not None
    wait_for(lambda: not is_there(process.pid))
    assert [str(finding) for finding in verify().findings] == []


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_background_process_whose_sandbox_does_not_answer_is_not_said_to_have_ended(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = command(alice, opened(alice), command=["sleep", "60"], background=True).json()
    (sandbox,) = kept_here.sandboxes()

    def refuse(pid: int, name: str) -> bool:
        raise ProviderUnavailable("It does not answer.")

    monkeypatch.setattr(sandbox.processes, "signal", refuse)
    body = alice.client.post(f"/api/v1/executions/{started['execution']}/cancel").json()
    assert (body["status"], body["exit_code"]) == ("cancelled", None)
    record = Execution.objects.get(pk=body["id"])
    assert "Whether its process has ended is not known." in record.error_message


def test_one_that_is_cancelled_while_it_is_started_is_ended(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    start = sandbox.processes.start

    def start_slowly(wanted: Command) -> Process:
        started = start(wanted)
        execution = Execution.objects.get()
        alice.client.post(f"/api/v1/executions/{execution.pk}/cancel")
        return started

    monkeypatch.setattr(sandbox.processes, "start", start_slowly)
    answer = command(alice, session, command=["sleep", "60"], background=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    wait_for(lambda: sandbox.processes.of(1).poll() is not None)
    assert Execution.objects.get().status == "cancelled"


@pytest.mark.parametrize("how", ["delete", "reset"])
def test_what_runs_in_the_background_ends_as_cancelled_with_its_session(
    alice: Caller, how: str
) -> None:
    session = opened(alice)
    answer = command(alice, session, shell="echo said; sleep 60", background=True)
    (sandbox,) = kept_here.sandboxes()
    execution = answer.json()["execution"]
    if how == "delete":
        assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    else:
        assert alice.client.post(f"{URL}/{session['id']}/reset").status_code == 200
    assert sandbox.processes.list()[0].exit_code is not None
    assert Execution.objects.get(pk=execution).status == "cancelled"


def test_while_it_is_started_in_the_background_it_is_its_processs_and_not_given_up(
    alice: Caller, lease: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which it is closed where that process dies before it has a number."""
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    start = sandbox.processes.start
    seen: list[tuple[UUID | None, int]] = []

    def look(wanted: Command) -> Process:
        found = Execution.objects.get().process_id
        seen.append((found, UnattendedRuns().close(lease.mine(), seconds=0)))
        return start(wanted)

    monkeypatch.setattr(sandbox.processes, "start", look)
    answer = command(alice, session, shell="sleep 60", background=True)
    assert answer.status_code == 201
    assert seen == [(lease.mine(), 0)]
    record = Execution.objects.get()
    assert (record.process, record.finished_at) == (None, None)


def test_background_processes_stand_outside_the_bound_of_what_runs(alice: Caller) -> None:
    alice.tenant.max_running = 1
    alice.tenant.save()
    session = opened(alice)
    for _ in range(2):
        assert command(alice, session, shell="sleep 60", background=True).status_code == 201
    assert cell(alice, session, "1").status_code == 200


def test_background_processes_take_no_thread_that_others_wait_in(
    alice: Caller, charlie: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PROVIDER_WAITS = 3
    monkeypatch.setattr("providers.waiting._threads", None)
    monkeypatch.setattr("executions.runs.event_log.shares.of_one", 2)
    session, other = opened(alice), opened(charlie)
    started = [command(alice, session, shell="read x", stdin=True, background=True) for _ in "1234"]
    assert [answer.status_code for answer in started] == [201] * 4
    followed = [event_log.has(UUID(answer.json()["execution"])) for answer in started]
    assert followed == [True, True, False, False]
    assert cell(charlie, other, "1").status_code == 200
    for answer in started:
        url = f"{URL}/{session['id']}/processes/{answer.json()['pid']}/signal"
        assert alice.client.post(url, {"signal": "SIGKILL"}).status_code == 200
    assert ended(started[0]).status == "failed"
    (sandbox, _) = kept_here.sandboxes()
    wait_for(lambda: all(each.exit_code is not None for each in sandbox.processes.list()))
    maintain()
    assert ended(started[3]).status == "failed"


def test_one_that_no_process_of_ours_follows_any_more_is_recorded_by_the_schedule(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executions.runs.event_log.shares.of_one", 0)
    session = opened(alice)
    answer = command(alice, session, shell="cat; echo done", stdin=True, background=True)
    execution = answer.json()["execution"]
    assert not event_log.has(execution)
    maintain()
    assert Execution.objects.get(pk=execution).finished_at is None
    url = f"{URL}/{session['id']}/processes/{answer.json()['pid']}/stdin?close=1"
    alice.client.post(url, b"", content_type="application/octet-stream")
    (sandbox,) = kept_here.sandboxes()
    wait_for(lambda: sandbox.processes.list()[0].exit_code is not None)
    maintain()
    record = Execution.objects.get(pk=execution)
    assert (record.status, record.stdout) == ("succeeded", "done\n")


@pytest.mark.parametrize(("saves", "state"), [("never", "closed"), ("background", "asleep")])
def test_an_idle_session_ends_whatever_runs_in_the_background(
    alice: Caller, saves: str, state: str
) -> None:
    session = opened(alice, saves=saves)
    answer = command(alice, session, shell="sleep 60", background=True)
    aged(session, used_at=700)
    maintain()
    assert row(session).state == state
    assert Execution.objects.get(pk=answer.json()["execution"]).status == "cancelled"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ({"shell": "a", "command": ["b"]}, "command"),
        ({"command": "ls"}, "command"),
        ({"command": ["a\0"]}, "command"),
        ({"shell": "ls", "env": {"A=": "b"}}, "env"),
        ({"shell": "ls", "pty": {"cols": 80}}, "pty"),
        ({"shell": "ls", "background": "yes"}, "background"),
        ({"shell": "ls", "background": True, "timeout": 5}, "timeout"),
        ({"shell": "ls", "timeout": -1}, "timeout"),
        ({"shell": "ls", "root": True}, "root"),
    ],
)
def test_a_bad_command_is_refused_by_name_and_nothing_is_started(
    alice: Caller, body: dict[str, Any], field: str
) -> None:
    refused = command(alice, opened(alice), **body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)
    assert not Execution.objects.exists()


@pytest.mark.usefixtures("policies_forgotten")
@pytest.mark.parametrize("who", ["deployment", "tenant", "policy", "route"])
def test_in_the_background_as_elsewhere_a_floor_holds_that_was_raised_since_it_was_opened(
    alice: Caller, settings: Any, who: str
) -> None:
    session = opened(alice)
    if who == "deployment":
        settings.MINIMUM_ISOLATION = "gvisor"
    elif who == "tenant":
        type(alice.tenant).objects.update(minimum_isolation="gvisor")
    elif who == "policy":
        in_force(minimum_isolation="gvisor")
    else:
        make_route("kept_here", language="bash", minimum_isolation="gvisor")
    # What is in force is known for a moment longer.
    forget_all()
    for background in (False, True):
        refused = command(alice, session, shell="true", background=background)
        assert refused.status_code == 503, refused.content
        assert refused.json()["error"]["field"] == "minimum_isolation"
    assert {(e.status, e.error_field) for e in Execution.objects.all()} == {
        ("error", "minimum_isolation")
    }
    (sandbox,) = kept_here.sandboxes()
    assert not sandbox.processes.list()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_command_is_held_to_the_sandbox_that_is_woken_for_it(
    alice: Caller, is_lost: bool
) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, "open('f', 'w').close()")
    (sandbox,) = kept_here.sandboxes()
    if is_lost:
        sandbox.close()
    else:
        assert suspend(row(session).pk, "a test")
    # The former one was better than what its provider has now.
    Session.objects.update(isolation="microvm")
    strict = Caller(*create_api_key(alice.tenant, "strict", None, minimum_isolation="microvm"))
    refused = command(strict, session, shell="true", background=True)
    assert (refused.status_code, refused.json()["error"]["field"]) == (503, "minimum_isolation")
    (sandbox,) = kept_here.sandboxes()
    assert not sandbox.processes.list()
    assert Execution.objects.get(background=True).status == "error"
    assert command(alice, session, shell="true", background=True).status_code == 201


def test_one_that_cannot_be_started_is_recorded_so(alice: Caller) -> None:
    session = opened(alice)
    for background in (False, True):
        refused = command(alice, session, command=["/no/such"], background=background)
        assert refused.status_code == 400
    assert {e.status for e in Execution.objects.all()} == {"error"}
    assert Execution.objects.count() == 2


def test_more_processes_than_there_can_be_are_no_answer(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    claimed = [Process(pid, [], "") for pid in range(1, 300_000)]
    monkeypatch.setattr(sandbox.processes, "list", lambda: claimed)
    answer = alice.client.get(f"{URL}/{session['id']}/processes")
    assert answer.status_code == 503
