"""A conversation in a session: state is kept, in order, recorded like every other run."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

import pytest

from executions.kernel import background as saving_threads
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.active_runs import wait_for_ends
from executions.runs.models import Execution
from executions.sessions import session_sandbox
from providers.leases import lease_of, lease_of_version
from providers.manager import manager
from providers.services import save_config
from providers.values import Job
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.sessions import URL, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("kept_here"), pytest.mark.database]


def test_a_session_has_exactly_the_documented_shape(alice: Caller) -> None:
    session = opened(alice, name="notebook", metadata={"run": 7}, env={"TOKEN": "hidden"})
    assert {name: session[name] for name in ("name", "state", "provider", "runtime")} == {
        "name": "notebook",
        "state": "open",
        "provider": "kept_here",
        "runtime": "here",
    }
    assert (session["isolation"], session["sharing"]) == ("namespaces", "session")
    assert session["contexts"] == [{"id": "default", "language": "python", "cwd": ""}]
    assert session["metadata"] == {"run": 7}
    assert session["created_at"] <= session["used_at"] < session["expires_at"]
    again = alice.client.get(f"{URL}/{session['id']}")
    assert again.json() == session
    assert "hidden" not in again.content.decode()
    assert "secret-ref" not in again.content.decode()


def test_what_a_cell_leaves_is_there_for_the_next_and_each_is_an_execution(
    alice: Caller, bob: Caller
) -> None:
    session = opened(alice)
    first = cell(alice, session, "x = 41").json()
    second = cell(bob, session, "print(x + 1)").json()
    assert (first["status"], second["stdout"]) == ("succeeded", "42\n")
    assert (second["session"], second["context"], second["context_kept"]) == (
        session["id"],
        "default",
        True,
    )
    assert second["sharing"] == "session"
    assert second["receipt"]["session"] == session["id"]
    assert [e.turn for e in Execution.objects.order_by("pk")] == [1, 2]
    failed = cell(alice, session, "y = 1\n1 / 0").json()
    assert (failed["status"], failed["exit_code"]) == ("failed", 1)
    assert cell(alice, session, "print(x, y)").json()["stdout"] == "41 1\n"
    assert [str(finding) for finding in verify().findings] == []


def test_the_executions_endpoint_runs_in_a_session_too(alice: Caller, charlie: Caller) -> None:
    session = opened(alice)
    body = {"code": "z = 3", "session": session["id"]}
    assert alice.client.post("/api/v1/executions", body).json()["session"] == session["id"]
    assert charlie.client.post("/api/v1/executions", body).status_code == 404
    assert alice.client.post("/api/v1/executions", {**body, "session": "x"}).status_code == 400
    alone = alice.client.post("/api/v1/executions", {"code": "1", "context": "default"})
    assert (alone.status_code, alone.json()["error"]["field"]) == (400, "context")


def test_a_language_that_is_not_the_contexts_is_refused_and_nothing_runs(alice: Caller) -> None:
    session = opened(alice)
    body = {"code": "print(1)", "session": session["id"], "language": "javascript"}
    refused = alice.client.post("/api/v1/executions", body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "language")
    assert not Execution.objects.exists()
    for name in ("python", "py"):
        ran = alice.client.post("/api/v1/executions", {**body, "language": name}).json()
        assert (ran["language"], ran["stdout"]) == ("python", "1\n")
    none = alice.client.post("/api/v1/executions", {"code": "1", "language": ""})
    assert (none.status_code, none.json()["error"]["field"]) == (400, "language")


def test_requests_run_in_the_order_in_which_they_came(alice: Caller) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    gate = sandbox.folder / "gate"
    slow = f"import os, time\nseen = ['first']\nwhile not os.path.exists({str(gate)!r}): time.sleep(.01)"
    threads = [in_thread(lambda: cell(alice, session, slow))]
    for name in ("second", "third"):
        before = len(threads)
        wait_for(lambda n=before: row(session).turns == n)
        threads.append(in_thread(lambda name=name: cell(alice, session, f"seen.append({name!r})")))
    wait_for(lambda: row(session).turns == 3)
    gate.touch()
    for thread in threads:
        thread.join()
    assert cell(alice, session, "print(seen)").json()["stdout"] == "['first', 'second', 'third']\n"


def test_who_waits_too_long_for_his_turn_is_told_and_nothing_of_his_runs(
    alice: Caller, settings: Any
) -> None:
    session = opened(alice)
    code = "import time; open('begun', 'w').close(); time.sleep(30)"
    thread = in_thread(lambda: cell(alice, session, code, timeout=60))
    (sandbox,) = kept_here.sandboxes()
    # Before that an interrupt might come too early for it.
    wait_for((sandbox.folder / "begun").exists)
    settings.SESSION_QUEUE_TIMEOUT = 0.2
    refused = cell(alice, session, "x = 1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    late = Execution.objects.get(pk=refused.json()["id"])
    assert (late.status, late.retryable) == ("error", True)
    assert alice.client.post(f"{URL}/{session['id']}/interrupt").status_code == 202
    thread.join()
    first = Execution.objects.order_by("pk")[0]
    assert (first.status, first.exit_code) == ("failed", 130)
    assert cell(alice, session, "print('x' in globals())").json()["stdout"] == "False\n"


def test_a_cell_that_is_cancelled_when_it_has_just_ended_leaves_the_next_one(
    alice: Caller,
) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    sandbox.holds_answers = threading.Event()
    ended = in_thread(lambda: cell(alice, session, "open('ended', 'w').close()"))
    interpreter = sandbox.known["default"][1]
    wait_for(lambda: (sandbox.folder / "ended").exists() and not interpreter.busy)
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    results: list[Any] = []
    job = Job(code, timeout=30, context="default", run="next")
    following = in_thread(lambda: results.append(sandbox.run(job)))
    wait_for(lambda: interpreter.run_now == "next")
    execution = Execution.objects.get()
    cancelled = alice.client.post(f"/api/v1/executions/{execution.pk}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    ended.join()
    # What ends the cell does so behind the answer.
    assert wait_for_ends()
    (sandbox.folder / "go").touch()
    sandbox.holds_answers.set()
    following.join()
    assert [result.exit_code for result in results] == [0]


def test_another_context_need_not_wait(alice: Caller) -> None:
    session = opened(alice)
    made = alice.client.post(f"{URL}/{session['id']}/contexts", {"language": "python", "cwd": "b"})
    assert (made.status_code, made.json()["cwd"]) == (201, "b")
    thread = in_thread(lambda: cell(alice, session, "import time; time.sleep(30)"))
    (sandbox,) = kept_here.sandboxes()
    wait_for(lambda: sandbox.known["default"][1].busy)
    beside = cell(alice, session, "print(1)", context=made.json()["id"]).json()
    assert (beside["stdout"], beside["context"]) == ("1\n", made.json()["id"])
    alice.client.post(f"{URL}/{session['id']}/interrupt")
    thread.join()


def test_contexts_are_made_listed_restarted_and_ended(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}/contexts"
    one = alice.client.post(url, {"language": "python"}).json()["id"]
    assert [each["id"] for each in alice.client.get(url).json()["results"]] == ["default", one]
    cell(alice, session, "x = 1", context=one)
    assert alice.client.post(f"{url}/{one}/restart").status_code == 200
    assert cell(alice, session, "x", context=one).json()["status"] == "failed"
    assert alice.client.delete(f"{url}/{one}").status_code == 204
    assert alice.client.delete(f"{url}/{one}").status_code == 404
    assert alice.client.post(f"{url}/{one}/restart").status_code == 404
    unknown = cell(alice, session, "x", context=one)
    assert (unknown.status_code, unknown.json()["error"]["field"]) == (400, "context")
    assert alice.client.post(url, {"language": "cobol"}).status_code == 400


def test_reset_forgets_variables_and_keeps_files(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, "x = 1; open('kept.txt', 'w').write('here')")
    answer = alice.client.post(f"{URL}/{session['id']}/reset")
    assert (answer.status_code, answer.json()["id"]) == (200, session["id"])
    after = cell(alice, session, "print('x' in globals(), open('kept.txt').read())").json()
    assert after["stdout"] == "False here\n"
    actions = [
        e.stated["action"] for e in LedgerEntry.objects.filter(kind="session").order_by("pk")
    ]
    assert actions == ["created", "opened", "reset"]


def test_a_session_keeps_the_configuration_that_it_was_opened_with(alice: Caller) -> None:
    first = save_config("kept_here", {"mark": "first"}).version
    manager.close()
    session = opened(alice)
    cell(alice, session, "x = 1")
    save_config("kept_here", {"mark": "another"})
    manager.close()
    ran = cell(alice, session, "print(x)").json()
    assert ran["stdout"] == "1\n"
    assert Execution.objects.get(pk=ran["id"]).config_version == first
    with lease_of_version("kept_here", first) as lease:
        assert (lease.config_version, lease.provider.mark) == (first, "first")  # type: ignore[attr-defined]
    with lease_of("kept_here") as lease:
        assert lease.provider.mark == "another"  # type: ignore[attr-defined]


def test_a_process_lets_go_of_sessions_that_nobody_uses_in_it(alice: Caller) -> None:
    first = opened(alice)
    cell(alice, first, "x = 1")
    assert saving_threads.wait_for_keyed_work()
    session_sandbox._renewed[UUID(first["id"])] -= session_sandbox.LEASE_SECONDS + 1

    second = opened(alice)
    cell(alice, second, "x = 2")
    known = {each for sandboxes in session_sandbox._attached.values() for each in sandboxes}
    assert UUID(first["id"]) not in known | set(session_sandbox._renewed)
    assert cell(alice, first, "print(x)").json()["stdout"] == "1\n"
