"""Commands that a person has to approve: whoever comes first decides, and nothing else starts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from executions.kernel.coroutines import run_sync
from executions.runs import payloads
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Approval, Execution
from executions.runs.orphaned_runs import UnattendedRuns
from executions.runs.queue import claim, claim_next, queue_state
from executions.runs.requests import Caller as Asker
from executions.runs.requests import Conflict, ExecutionRequest
from executions.sessions.requests import CommandRequest, TerminalSize
from executions.sessions.waiting_commands import (
    Asked,
    ask_first,
    decision_on,
    start_approved,
    withdraw,
)
from providers.errors import RateLimited, SandboxError
from providers.sandbox import Process
from providers.values import Command
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.approvals import decided, signed_in
from tests.support.policies import in_force
from tests.support.sessions import opened, row, wait_for

pytestmark = [
    pytest.mark.usefixtures("kept_here", "policies_forgotten"),
    pytest.mark.database,
]


@pytest.fixture(autouse=True)
def asks(kept_here: None, policies_forgotten: None, alice: Caller) -> None:
    in_force(alice.tenant.slug, ask_always=True)


def asked(caller: Caller, session: dict[str, Any], **wanted: Any) -> Asked:
    command = CommandRequest(background=True, **{"shell": "exit 3", **wanted})
    found = run_sync(ask_first(row(session), command, Asker(caller.tenant)))
    assert found is not None
    return found


def start(caller: Caller, session: dict[str, Any], found: Asked) -> Execution:
    return run_sync(
        start_approved(
            row(session), found.execution.pk, Asker(caller.tenant), on_start=lambda log: None
        )
    )


def approve(found: Asked, how: str = "approve") -> None:
    person = signed_in(f"ada-{found.approval_id}", "view_approval", "decide_approval")
    decided(person, Approval.objects.get(pk=found.approval_id), how)


def test_no_worker_takes_it_and_it_starts_once(alice: Caller) -> None:
    session = opened(alice)
    found = asked(alice, session)
    with pytest.raises(Conflict):
        start(alice, session, found)
    approve(found)
    assert claim_next() is None
    assert claim(found.execution.pk) is None
    assert queue_state(timezone.now()).waiting == 0
    execution = start(alice, session, found)
    with pytest.raises(Conflict):
        start(alice, session, found)
    wait_for(lambda: Execution.objects.get(pk=execution.pk).finished_at is not None)
    record = Execution.objects.get(pk=execution.pk)
    assert (record.exit_code, record.status, record.background) == (3, "failed", True)
    assert record.meta["policy"]["approved"]["by"].startswith("user:ada")
    assert Execution.objects.count() == 1


def test_what_is_withdrawn_first_never_starts(alice: Caller, tmp_path: Path) -> None:
    session = opened(alice)
    found = asked(alice, session, shell=f"touch {tmp_path}/ran")
    approve(found)
    assert run_sync(withdraw(found.execution.pk, "tests"))
    with pytest.raises(Conflict):
        start(alice, session, found)
    assert Execution.objects.get().status == "cancelled"
    assert not (tmp_path / "ran").exists()


def test_what_is_withdrawn_between_its_claim_and_its_start_does_not_start(
    alice: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    found = asked(alice, session, shell=f"touch {tmp_path}/ran")
    approve(found)

    def claim_and_withdraw(pk: Any, *, background: bool) -> Execution | None:
        claimed = claim(pk, background=background)
        assert run_sync(withdraw(found.execution.pk, "tests"))
        return claimed

    monkeypatch.setattr("executions.sessions.waiting_commands.claim", claim_and_withdraw)
    with pytest.raises(Conflict):
        start(alice, session, found)
    assert Execution.objects.get().status == "cancelled"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "other",
    [
        {"cwd": "elsewhere"},
        {"stdin": True},
        {"env": {"LD_PRELOAD": "/workspace/x.so"}},
        {"pty": TerminalSize(cols=80, rows=24)},
        {"shell": "", "command": ["bash", "-c", "exit 3"]},
        {"shell": "exit 4"},
    ],
)
def test_an_approval_is_of_the_whole_command(alice: Caller, other: dict[str, Any]) -> None:
    session = opened(alice)
    found, another = asked(alice, session), asked(alice, session, **other)
    hashes = set(Approval.objects.values_list("request_hash", flat=True))
    assert len(hashes) == 2
    approve(found)
    # Somebody who gets at the database exchanges what would run.
    Execution.objects.filter(pk=found.execution.pk).update(
        pending=Execution.objects.get(pk=another.execution.pk).pending
    )
    with pytest.raises(SandboxError, match="needs an approval"):
        start(alice, session, found)
    assert Execution.objects.get(pk=found.execution.pk).status == "blocked"


def test_a_stored_request_that_is_no_command_is_an_error(alice: Caller) -> None:
    session = opened(alice)
    found = asked(alice, session)
    approve(found)
    request = ExecutionRequest.from_stored(payloads.read(Execution.objects.get()))
    broken = replace(request, arguments={"command": []})
    Execution.objects.filter(pk=found.execution.pk).update(pending=broken.to_stored())
    with pytest.raises(SandboxError, match="cannot be read"):
        start(alice, session, found)
    assert Execution.objects.get().status == "error"


def test_those_that_wait_count_for_the_queue_of_the_tenant(alice: Caller) -> None:
    session = opened(alice)
    alice.tenant.max_queued = 1
    alice.tenant.save()
    asked(alice, session)
    with pytest.raises(RateLimited):
        asked(alice, session)


def test_one_that_waited_for_long_has_as_long_to_start_and_costs_no_more(
    alice: Caller, lease: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    found = asked(alice, session)
    approve(found)
    rows = Execution.objects.filter(pk=found.execution.pk)
    rows.update(created_at=timezone.now() - timedelta(hours=20))
    (sandbox,) = kept_here.sandboxes()
    begin = sandbox.processes.start
    closed: list[int] = []

    def look(wanted: Command) -> Process:
        assert rows.get().process_id == lease.mine()
        closed.append(UnattendedRuns().close(lease.mine(), seconds=0))
        return begin(wanted)

    monkeypatch.setattr(sandbox.processes, "start", look)
    start(alice, session, found)
    assert closed == [0]
    wait_for(lambda: rows.get().finished_at is not None)
    record = rows.get()
    assert record.exit_code == 3
    assert record.run_ms is not None
    assert record.run_ms < 3_600_000


def test_what_the_database_has_no_number_of_does_not_run_on(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    found = asked(alice, session, shell="sleep 600")
    approve(found)

    def fail(*given: object) -> bool:
        raise OperationalError("away")

    monkeypatch.setattr("executions.sessions.cells._has_number", fail)
    with pytest.raises(OperationalError):
        start(alice, session, found)
    (sandbox,) = kept_here.sandboxes()
    wait_for(lambda: [each.exit_code for each in sandbox.processes.list()] == [137])
    assert Execution.objects.get().pid is None


@pytest.mark.parametrize("how", ["approve", "reject"])
def test_a_decision_is_heard_of(alice: Caller, how: str) -> None:
    found = asked(alice, opened(alice))
    with decision_on(found.execution.pk) as decision:
        assert not decision.done()
        approve(found, how)
        decision.result(60)


def test_the_person_sees_all_that_decides_how_it_runs(alice: Caller) -> None:
    found = asked(alice, opened(alice), cwd="sub", stdin=True, env={"SECRET": "hunter2"})
    person = signed_in("bob", "view_approval", "decide_approval")
    shown = person.get(found.page).content.decode()
    for part in ("exit 3", "sub", "stdin", "SECRET"):
        assert part in shown
    assert "hunter2" not in shown
