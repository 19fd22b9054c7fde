"""No transaction grows with what a tenant has: every endpoint and every task, with little and much.

SQLite has one lock for all who write. What holds it for long ends other tenants' runs. Each act is
measured twice, with ten times as many rows the second time: its largest transaction stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone

from executions import tasks
from executions.capabilities.alerts.models import Alert
from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.search.models import CodeText
from executions.capabilities.tools.models import ToolCall
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.doors.native.authentication import NEEDS
from executions.kernel import background, database
from executions.runs import event_log, worker
from executions.runs.models import Execution, ExecutionEvent, Process, RunSignal
from executions.sessions.models import (
    Blob,
    LooseFile,
    Session,
    Snapshot,
    StoredTotal,
    Workspace,
    WorkspaceFile,
)
from executions.sessions.storage import blobs, drafts, file_saves
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey, Tenant
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import filled, packed, sleeping, stored
from tests.support.sessions import URL, opened, wait_for
from tests.support.transactions import Transactions, Written, recorded

pytestmark = pytest.mark.database

LITTLE, MUCH = 12, 120
# Of one transaction here, so that MUCH is far more than one may write.
BATCH = 6
# Beside the rows of a batch: those of the session, its workspace, the tenant's total, the ledger.
OTHERS = 12

Act = Callable[[], Any]


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Any) -> None:
    settings.DATA_DIR = tmp_path
    settings.DELETE_S3_ON_DELETE = True
    monkeypatch.setattr(database, "MOST_ROWS", BATCH)
    # These bound by their own number, and not by what a tenant has.
    monkeypatch.setattr(file_saves, "_HELD_FILES", BATCH // 2)
    monkeypatch.setattr(blobs, "_AT_ONCE", BATCH // 2)
    monkeypatch.setattr("executions.sessions.storage.changes._HELD_FILES", BATCH // 2)


def awake(caller: Caller, size: int, **body: Any) -> tuple[str, kept_here.Kept]:
    """The address of a session with so many files in its sandbox that nobody has saved."""
    before = set(map(id, kept_here.sandboxes()))
    session = opened(caller, **body)
    (sandbox,) = (each for each in kept_here.sandboxes() if id(each) not in before)
    for number in range(size):
        (sandbox.folder / f"f{number}").write_text(str(number))
    return f"{URL}/{session['id']}", sandbox


def snapshot_of(caller: Caller, size: int) -> Snapshot:
    workspace = Workspace.objects.create(tenant=caller.tenant)
    filled(workspace, size)
    return Snapshot.objects.create(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        source=sleeping(caller, 0).pk,
        workspace=workspace,
        files=size + 1,
        bytes=size,
    )


def run(caller: Caller, size: int) -> Act:
    ended(caller, size)
    body = {"code": "print(1)", "mode": "async"}
    return lambda: caller.client.post("/api/v1/executions", body)


def cancel(caller: Caller, size: int) -> Act:
    ended(caller, size, status="queued", finished_at=None)
    pk = Execution.objects.filter(finished_at=None).first().pk  # type: ignore[union-attr]
    return lambda: caller.client.post(f"/api/v1/executions/{pk}/cancel")


def schedule(verb: str) -> Callable[[Caller, int], Act]:
    body = {"name": "n", "cron": "0 0 1 1 *", "request": {"code": "1"}}

    def prepared(caller: Caller, size: int) -> Act:
        if verb == "post":
            return lambda: caller.client.post("/api/v1/schedules", body)
        made = caller.client.post("/api/v1/schedules", body).json()
        ended(caller, size, schedule_id=made["id"])
        url = f"/api/v1/schedules/{made['id']}"
        return lambda: getattr(caller.client, verb)(url, {"paused": True})

    return prepared


def open_session(caller: Caller, size: int) -> Act:
    """One that begins with the files of a snapshot."""
    snapshot = snapshot_of(caller, size)
    return lambda: caller.client.post(URL, {"from": str(snapshot.pk)})


def at_awake(
    verb: str, suffix: str, body: Any = None, **opening: Any
) -> Callable[[Caller, int], Act]:
    """A call of a session with many unsaved files, and its saving."""

    def prepared(caller: Caller, size: int) -> Act:
        url, _ = awake(caller, size, **opening)
        return lambda: getattr(caller.client, verb)(f"{url}{suffix}", body)

    return prepared


def at_asleep(verb: str, suffix: str, body: Any = None) -> Callable[[Caller, int], Act]:
    def prepared(caller: Caller, size: int) -> Act:
        url = f"{URL}/{sleeping(caller, size).pk}"
        return lambda: getattr(caller.client, verb)(f"{url}{suffix}", body)

    return prepared


def put_file(caller: Caller, size: int) -> Act:
    url = f"{URL}/{sleeping(caller, size).pk}/files/content?path=d/new"
    return lambda: caller.client.put(url, b"new", content_type="application/octet-stream")


def put_archive(caller: Caller, size: int) -> Act:
    url = f"{URL}/{sleeping(caller, size).pk}/files/archive?path="
    members = [(f"e/{number}", str(number).encode(), "") for number in range(size)]
    archive = packed(*members)
    return lambda: caller.client.put(url, archive, content_type="application/x-tar")


def remove_snapshot(caller: Caller, size: int) -> Act:
    pk = snapshot_of(caller, size).pk
    return lambda: caller.client.delete(f"/api/v1/snapshots/{pk}")


ACTS: dict[tuple[str, str], Callable[[Caller, int], Act]] = {
    ("executions", "POST"): run,
    ("execution-cancel", "POST"): cancel,
    ("schedules", "POST"): schedule("post"),
    ("schedule", "PATCH"): schedule("patch"),
    ("schedule", "DELETE"): schedule("delete"),
    ("sessions", "POST"): open_session,
    ("session", "PATCH"): at_asleep("patch", "", {"idle_seconds": 601}),
    ("session", "DELETE"): at_asleep("delete", ""),
    # The first execution of a session that slept wakes it; this one saves it behind the answer.
    ("session-executions", "POST"): at_awake("post", "/executions", {"code": "1"}, saves="answer"),
    ("session-interrupt", "POST"): at_awake("post", "/interrupt", {}),
    ("session-reset", "POST"): at_awake("post", "/reset", {}),
    ("session-network", "PUT"): at_awake("put", "/network", {"mode": "none"}),
    ("session-contexts", "POST"): at_awake("post", "/contexts", {"language": "python"}),
    ("session-context", "DELETE"): at_awake("delete", "/contexts/default"),
    ("session-context-restart", "POST"): at_awake("post", "/contexts/default/restart", {}),
    ("session-processes", "POST"): at_awake("post", "/processes", {"shell": "true"}),
    ("session-files", "DELETE"): at_asleep("delete", "/files?path=d"),
    ("session-file-content", "PUT"): put_file,
    ("session-file-move", "POST"): at_asleep("post", "/files/move", {"from": "d", "to": "e"}),
    ("session-file-mkdir", "POST"): at_asleep("post", "/files/mkdir", {"path": "new"}),
    ("session-file-archive", "PUT"): put_archive,
    ("session-snapshot", "POST"): at_asleep("post", "/snapshot", {}),
    ("snapshot", "DELETE"): remove_snapshot,
}
# Translations: what they write is written by the service of another endpoint.
DOORS = {
    "agent-sandbox-execute": ("session-executions", "POST"),
    "agent-sandbox-reset": ("session-reset", "POST"),
    "agent-sandbox-stop": ("session", "DELETE"),
    "agent-sandbox-upload": ("session-file-content", "PUT"),
    "agent-sandbox-upload-urls": ("session-file-content", "PUT"),
    "e2b-sandboxes": ("sessions", "POST"),
    "e2b-sandboxes-2": ("sessions", "POST"),
    "e2b-sandbox": ("session", "DELETE"),
    "e2b-connect": ("session", "PATCH"),
    "e2b-connect-2": ("session", "PATCH"),
    "e2b-resume": ("session", "PATCH"),
    "e2b-timeout": ("session", "PATCH"),
    "e2b-network": ("session-network", "PUT"),
    # It saves the session thoroughly, as what runs in it does.
    "e2b-pause": ("session-executions", "POST"),
    "e2b-process": ("session-processes", "POST"),
    "e2b-filesystem": ("session-file-move", "POST"),
    "e2b-files": ("session-file-content", "PUT"),
    "e2b-execute": ("session-executions", "POST"),
    "e2b-contexts": ("session-contexts", "POST"),
    "e2b-context": ("session-context", "DELETE"),
    "e2b-context-restart": ("session-context-restart", "POST"),
    "e2b-snapshot-take": ("session-snapshot", "POST"),
    "e2b-snapshot": ("snapshot", "DELETE"),
    # A snapshot, and sessions that begin with it.
    "e2b-fork": ("sessions", "POST"),
    # Each of its tools stands for an endpoint.
    "mcp": ("executions", "POST"),
}
# What writes a few rows, of which none is one of many.
FEW = {
    "templates": "One template and its first version.",
    "template": "One template, and the build that is under way.",
    "template-builds": "One version.",
    "template-version-cancel": "One version.",
    "session-template": "As templates.",
    "e2b-templates": "One template, and one announced build.",
    "e2b-templates-2": "As e2b-templates.",
    "e2b-templates-3": "As e2b-templates.",
    "e2b-template": "One template, and the build that is under way.",
    "e2b-template-build": "One version.",
    "e2b-template-tags": "The tags of one template.",
    "execution-tool-call": "One call of one run.",
    "session-process-stdin": "The bytes go to the sandbox; the session's row says that it was used.",
    "session-process-signal": "As stdin.",
    "session-process-resize": "As stdin.",
    "e2b-secrets": "One secret.",
    "e2b-secret": "One secret, and its version.",
    "e2b-process-list": "Reads.",
    "e2b-process-connect": "Reads.",
    "admin-config": "One configuration, as an administrator saves it.",
    "admin-test": "One trial, as an administrator has it made.",
    "admin-active": "One configuration, as an administrator activates it.",
}


def test_every_endpoint_that_writes_is_here() -> None:
    written = {
        (name, method) for name, methods in NEEDS.items() for method in methods if method != "GET"
    }
    named = {each for each in written if each in ACTS or each[0] in DOORS or each[0] in FEW}
    assert written == named
    assert ACTS.keys() <= written
    assert (DOORS.keys() | FEW.keys()) <= {name for name, _ in written}
    assert set(DOORS.values()) <= ACTS.keys()


def largest(monkeypatch: pytest.MonkeyPatch, act: Act) -> tuple[Written, Transactions, Any]:
    """The transaction that wrote the most, all of them, and what was answered."""
    with recorded(monkeypatch) as found:
        answer = act()
        assert background.wait_for_keyed_work()
        wait_for(lambda: not event_log.ids())
    return found.most, found, answer


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize("named", ACTS, ids=" ".join)
def test_no_transaction_of_an_endpoint_grows_with_what_the_tenant_has(
    named: tuple[str, str], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (LITTLE, MUCH):
        most, _, answer = largest(monkeypatch, ACTS[named](alice, size))
        assert answer.status_code < 300, answer.content
        found.append(most)
    little, much = found
    assert much.rows <= max(little.rows, BATCH) + OTHERS, much
    # What waits for a lock of its own after each row is as long as what writes them all at once.
    assert much.statements <= max(little.statements, BATCH) + OTHERS, much


@pytest.fixture
def _no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MOST_ROWS", 100 * MUCH)
    monkeypatch.setattr(database, "MOST_SECONDS", 3600.0)


@pytest.mark.usefixtures("kept_here", "_no_batches")
@pytest.mark.parametrize("name", ["session-file-move", "session-snapshot"])
def test_these_tests_see_an_endpoint_whose_transaction_grows(
    name: str, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert largest(monkeypatch, ACTS[name, "POST"](alice, MUCH))[0].rows >= MUCH


def ended(caller: Caller, size: int, **facts: Any) -> list[Execution]:
    """Runs that ended long ago, each with what belongs to one."""
    then = timezone.now() - timedelta(days=400)
    status = {"status": "succeeded", "finished_at": then, **facts}
    return Execution.objects.bulk_create(
        Execution(
            tenant=caller.tenant,
            tenant_slug=caller.tenant.slug,
            language="python",
            entrypoint="auto",
            timeout=1,
            code=f"print({number})",
            code_hash=f"sha256:{number:064d}",
            stdout="x",
            provider="kept_here",
            deadline=timezone.now() + timedelta(days=1),
            **status,
        )
        for number in range(size)
    )


def old_rows(caller: Caller, size: int) -> None:
    """So much of everything that a task removes or changes."""
    tenant, then = caller.tenant, timezone.now() - timedelta(days=400)
    runs = ended(caller, size)
    Execution.objects.update(created_at=then)
    ExecutionEvent.objects.bulk_create(
        ExecutionEvent(execution=each, first=1, last=1, bodies="[]") for each in runs
    )
    RunSignal.objects.bulk_create(RunSignal(execution=each, kind="follow") for each in runs)
    ToolCall.objects.bulk_create(
        ToolCall(
            execution=each,
            tenant_slug=tenant.slug,
            name="n",
            arguments="{}",
            writes=False,
            state="given_up",
            entry=1,
        )
        for each in runs
    )
    WebhookDelivery.objects.bulk_create(
        WebhookDelivery(
            tenant=tenant,
            tenant_slug=tenant.slug,
            execution=each,
            url="https://a",
            **({"state": "delivered", "ended_at": then} if number % 2 else {}),
        )
        for number, each in enumerate(runs)
    )
    CodeText.objects.bulk_create(
        (CodeText(code_hash=each.code_hash, code=each.code) for each in runs),
        ignore_conflicts=True,
    )
    Process.objects.bulk_create(
        Process(instance=f"host{number}", kind="web", pid=number, ended_at=then)
        for number in range(size)
    )
    Alert.objects.bulk_create(
        Alert(
            rule="error_rate",
            subject=f"p{number}",
            state="resolved",
            severity="critical",
            message="m",
            opened_at=then,
            seen_at=then,
            resolved_at=then,
        )
        for number in range(size)
    )
    # Saved files of a session that has ended, of nobody, and bytes that nothing names.
    sleeping(caller, size, state=Session.State.CLOSED, closed_at=then, released_at=then)
    nobody = Workspace.objects.create(tenant=tenant)
    filled(nobody, size)
    Workspace.objects.filter(pk=nobody.pk).update(created_at=then)
    stored(tenant, *(f"{number} {size}".encode() for number in range(size)))
    Blob.objects.filter(rows=None).update(kept_until=then)
    LooseFile.objects.bulk_create(
        LooseFile(tenant=tenant, file=f"{tenant.pk}/00/{size}-{number}", size=0, due_at=then)
        for number in range(size)
    )


TASKS = [task for task in worker.recurring_tasks() if task.startswith("executions.tasks.")]


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize("task", TASKS)
def test_no_transaction_of_a_task_grows_with_what_there_is(
    task: str, alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DELETE_S3_ON_CLEANUP = True
    settings.SANDBOX_KEEP_DAYS = dict.fromkeys(settings.SANDBOX_KEEP_DAYS, 1)
    settings.SANDBOX_RECORDS_FLOOR_DAYS = 0
    act = getattr(tasks, task.removeprefix("executions.tasks."))
    found = []
    for size in (LITTLE, MUCH):
        old_rows(alice, size)
        found.append(largest(monkeypatch, act)[0])
    little, much = found
    assert much.rows <= max(little.rows, BATCH) + OTHERS, much
    assert much.statements <= max(little.statements, BATCH) + OTHERS, much


@pytest.mark.usefixtures("kept_here", "_no_batches")
@pytest.mark.parametrize(
    "name", ["forget_events", "tend_sessions", "tend_webhooks", "watch_alerts"]
)
def test_these_tests_see_a_task_whose_transaction_grows(
    name: str, alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DELETE_S3_ON_CLEANUP = True
    old_rows(alice, MUCH)
    assert largest(monkeypatch, getattr(tasks, name))[0].rows >= MUCH // 2


@pytest.mark.usefixtures("kept_here")
def test_a_killed_change_leaves_what_was_saved_and_its_draft_is_collected(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sleeping(alice, MUCH)
    url = f"{URL}/{session.pk}/files"

    class Killed(BaseException):
        pass

    def killed(*given: Any, **values: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(drafts, "swap", killed)
        # A killed process removes nothing behind itself.
        patch.setattr(drafts, "discard", lambda pk: set())
        with pytest.raises(Killed):
            alice.client.post(f"{url}/move", {"from": "d", "to": "e"})
    assert [each["path"] for each in alice.client.get(url).json()["entries"]] == ["d"]
    assert WorkspaceFile.objects.count() == 2 * (MUCH + 1)
    assert drafts.collect() == 0
    left = Workspace.objects.filter(session=None)
    left.update(created_at=timezone.now() - 2 * drafts.GRACE)
    assert drafts.collect() == 1
    assert WorkspaceFile.objects.count() == MUCH + 1 == StoredTotal.objects.get().files
    assert alice.client.post(f"{url}/move", {"from": "d", "to": "e"}).status_code == 200
    assert WorkspaceFile.objects.count() == MUCH + 1 == StoredTotal.objects.get().files


@pytest.mark.usefixtures("kept_here")
def test_of_two_large_changes_at_once_none_undoes_the_other(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sleeping(alice, MUCH)
    url, real = f"{URL}/{session.pk}/files", drafts.add
    others: list[int] = []

    def add(*given: Any) -> None:
        real(*given)
        if not others:
            others.append(1)
            others.append(alice.client.post(f"{url}/mkdir", {"path": "new"}).status_code)

    monkeypatch.setattr(drafts, "add", add)
    assert alice.client.post(f"{url}/move", {"from": "d", "to": "e"}).status_code == 200
    assert others == [1, 201]
    assert [each["path"] for each in alice.client.get(url).json()["entries"]] == ["e", "new"]
    assert WorkspaceFile.objects.count() == MUCH + 2 == StoredTotal.objects.get().files


@pytest.mark.usefixtures("kept_here")
def test_a_snapshot_whose_files_change_meanwhile_is_copied_anew(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sleeping(alice, LITTLE)
    url, real = f"{URL}/{session.pk}", drafts.copy
    others: list[int] = []

    def copy(*given: Any, **values: Any) -> None:
        real(*given, **values)
        if not others:
            others.append(1)
            others.append(alice.client.post(f"{url}/files/mkdir", {"path": "new"}).status_code)

    monkeypatch.setattr(drafts, "copy", copy)
    answer = alice.client.post(f"{url}/snapshot", {})
    assert (answer.status_code, answer.json()["files"]) == (201, LITTLE + 2)
    assert StoredTotal.objects.get().files == 2 * (LITTLE + 2) == WorkspaceFile.objects.count()


def selected(model: str, action: str) -> Callable[[Client], Act]:
    """An action of the admin over all rows of a model, as "select all" has it."""

    def prepared(client: Client) -> Act:
        found = apps.get_model(model)
        url = reverse(f"admin:{found._meta.app_label}_{found._meta.model_name}_changelist")
        first = found._default_manager.order_by("pk").first()
        assert first is not None
        body = {"action": action, "_selected_action": first.pk, "select_across": "1", "index": "0"}
        return lambda: client.post(url, body | {"post": "yes"})

    return prepared


ACTIONS = {
    ("executions.Alert", "acknowledge_alerts"),
    ("executions.ApiKey", "revoke_keys"),
    ("executions.NetworkCredential", "revoke_credentials"),
    ("executions.Schedule", "pause_schedules"),
    ("executions.WebhookSecret", "retire_secrets"),
    ("executions.WebhookDelivery", "send_again"),
    ("axes.AccessAttempt", "delete_selected"),
}
# Of configurations and accounts, which administrators make one by one.
FEW_ACTIONS = {"build_selected", "cancel_selected", "approve_selected", "remove_selected"}
FEW_ACTIONS |= {"compare_selected", "activate_selected", "reset_authenticator", "delete_selected"}


def test_every_action_of_the_admin_is_here(rf: RequestFactory, admin_user: User) -> None:
    request = rf.get("/")
    request.user = admin_user
    found = {
        (model._meta.label, name)
        for model, shown in admin.site._registry.items()
        for name in shown.get_actions(request)
    }
    assert found >= ACTIONS
    assert {name for _, name in found - ACTIONS} <= FEW_ACTIONS


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize(("model", "action"), sorted(ACTIONS), ids=lambda each: each)
def test_no_transaction_of_an_action_grows_with_what_is_selected(
    model: str, action: str, alice: Caller, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tenant = timezone.now(), alice.tenant
    found = []
    for size in (LITTLE, MUCH):
        old_rows(alice, size)
        # Each is entered in the ledger by itself, which takes its time.
        for number in range(size if model == "executions.ApiKey" else 0):
            create_api_key(tenant, f"{size} {number}")
        Schedule.objects.bulk_create(
            Schedule(tenant=tenant, name=f"{size} {n}", cron="* * * * *", request={}, next_at=now)
            for n in range(size)
        )
        WebhookSecret.objects.bulk_create(
            WebhookSecret(tenant=tenant, secret="whsec_") for _ in range(size)
        )
        NetworkCredential.objects.bulk_create(
            NetworkCredential(name=f"{size}-{n}", rules="https://a.test", value={"value": "-"})
            for n in range(size)
        )
        AccessAttempt.objects.bulk_create(
            AccessAttempt(username=f"{size} {n}", ip_address="192.0.2.1", failures_since_start=1)
            for n in range(size)
        )
        most, _, answer = largest(monkeypatch, selected(model, action)(admin_client))
        assert answer.status_code == 302, answer.content
        found.append(most)
    little, much = found
    # Of guarded rows, which are changed together, no more than a page is.
    assert little.rows > 0
    assert much.rows <= max(little.rows, BATCH) + OTHERS, much


def remove_tenant(caller: Caller, client: Client) -> Any:
    """On its page, and then as the schedule goes on with it."""
    page = reverse("admin:executions_tenant_delete", args=[caller.tenant.pk])
    assert client.get(page).status_code == 200
    answer = client.post(page, {"post": "yes"})
    while Tenant.objects.filter(pk=caller.tenant.pk).exists():
        left = sum(model.objects.filter(tenant=caller.tenant).count() for model in OWN)
        tasks.remove_tenants()
        now = sum(model.objects.filter(tenant=caller.tenant).count() for model in OWN)
        assert now < left or not Tenant.objects.filter(pk=caller.tenant.pk).exists()
    return answer


OWN = (Execution, Session, Workspace, Snapshot, Blob, LooseFile, WebhookDelivery, ApiKey)


def tenants_own(caller: Caller, size: int) -> None:
    """So much of everything that goes with a tenant, or is of none after it."""
    old_rows(caller, size)
    snapshot_of(caller, size)
    Execution.objects.filter(tenant=caller.tenant).update(api_key=caller.api_key)
    for number in range(size // LITTLE):
        create_api_key(caller.tenant, str(number))
        Schedule.objects.create(
            tenant=caller.tenant,
            name=str(number),
            cron="* * * * *",
            request={},
            next_at=timezone.now(),
        )
        WebhookSecret.objects.create(tenant=caller.tenant, secret="whsec_")


@pytest.mark.usefixtures("kept_here")
def test_no_transaction_of_a_tenants_removal_grows_with_what_it_has(
    alice: Caller, charlie: Caller, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for caller, size in ((alice, LITTLE), (charlie, MUCH)):
        tenants_own(caller, size)
        act = partial(remove_tenant, caller, admin_client)
        most, _, answer = largest(monkeypatch, act)
        assert answer.status_code == 302, answer.content
        assert not WorkspaceFile.objects.filter(workspace__tenant_id=caller.tenant.pk).exists()
        found.append(most)
    little, much = found
    assert little.rows >= BATCH
    assert much.rows <= max(little.rows, BATCH) + OTHERS, much
    assert much.statements <= max(little.statements, BATCH) + OTHERS, much
    assert Execution.objects.count() == LITTLE + MUCH


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize("on_its_page", [True, False], ids=["page", "action"])
def test_no_transaction_of_a_keys_deletion_grows_with_its_runs(
    on_its_page: bool, alice: Caller, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (BATCH, MUCH):
        key, _ = create_api_key(alice.tenant, f"{size}")
        ended(alice, size, api_key=key)
        url = reverse("admin:executions_apikey_changelist")
        body = {"action": "delete_selected", "_selected_action": [key.pk], "post": "yes"}
        if on_its_page:
            url, body = reverse("admin:executions_apikey_delete", args=[key.pk]), {"post": "yes"}
        most, _, answer = largest(monkeypatch, partial(admin_client.post, url, body, follow=True))
        assert ("Nothing was changed." in answer.content.decode()) == (size == MUCH)
        assert ApiKey.objects.filter(pk=key.pk).exists() == (size == MUCH)
        found.append(most.rows)
    assert found[1] <= found[0]
    assert Execution.objects.filter(api_key=None).count() == BATCH
