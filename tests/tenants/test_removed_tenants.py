"""Removing a tenant in the admin: closed at once, gone with the last of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from executions.capabilities.retention import service
from executions.kernel.storage import WORKSPACES, file_store
from executions.ledger.models import LedgerEntry, LegalHold
from executions.runs.models import Execution
from executions.sessions.models import Blob, Session, Snapshot, Workspace
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import create_tenant
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion, PendingChange
from providers.services.approval import approve
from providers.services.guarded_rows import NotAllowed, restore
from tests.conftest import Caller
from tests.support.saved_files import sleeping
from tests.support.sessions import URL

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.database,
    pytest.mark.usefixtures("own_storage", "kept_here"),
]

LIST = "/api/v1/executions"


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal has its time, however slow the machine is; `seconds=0` is none."""
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def ann() -> User:
    return User.objects.create_superuser("ann", password="a long password of hers")


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def remove(user: User, tenant: Tenant) -> str:
    """What the list says after it."""
    page = reverse("admin:executions_tenant_delete", args=[tenant.pk])
    answer: Any = signed_in(user).post(page, {"post": "yes"}, follow=True)
    assert answer.status_code == 200
    return str(answer.content.decode())


def filled(caller: Caller, files: int = 5) -> Session:
    """A session with saved files, a snapshot of them and a run."""
    session = sleeping(caller, files)
    assert caller.client.post(f"{URL}/{session.pk}/snapshot").status_code == 201
    Execution.objects.create(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        api_key=caller.api_key,
        language="python",
        entrypoint="auto",
        timeout=1,
        code="1",
        status="succeeded",
        finished_at=timezone.now(),
        deadline=timezone.now(),
    )
    return session


def test_records_stay_and_everything_else_of_it_is_gone(
    alice: Caller, charlie: Caller, ann: User
) -> None:
    session, others = filled(alice), filled(charlie)
    told = remove(ann, alice.tenant)
    assert "is closed and being deleted. It disappears from the list when done." in told
    assert not Tenant.objects.filter(pk=alice.tenant.pk).exists()
    assert not ApiKey.objects.filter(pk=alice.api_key.pk).exists()
    session.refresh_from_db()
    assert (session.tenant_id, session.api_key_id, session.tenant_slug) == (
        *(None, None),
        "wonderland",
    )
    snapshot = Snapshot.objects.get(tenant_slug="wonderland")
    assert (snapshot.tenant_id, snapshot.workspace_id) == (None, None)
    execution = Execution.objects.get(tenant_slug="wonderland")
    assert (execution.tenant_id, execution.api_key_id) == (None, None)
    # Of the neighbour nothing is missing, in storage neither.
    assert set(Workspace.objects.values_list("tenant__slug", flat=True)) == {"elsewhere"}
    assert charlie.client.get(f"{URL}/{others.pk}/files").status_code == 200
    assert {each.name for each in file_store(WORKSPACES).entries()} == set(
        Blob.objects.values_list("file", flat=True)
    )
    assert set(Blob.objects.values_list("tenant__slug", flat=True)) == {"elsewhere"}
    entries = LedgerEntry.objects.filter(kind__in=("tenant", "api_key")).order_by("sequence")
    told = [(each.kind, each.stated["subject"], each.stated["action"]) for each in entries]
    assert told[-3:] == [
        ("tenant", "wonderland", "changed"),
        ("api_key", alice.api_key.prefix, "deleted"),
        ("tenant", "wonderland", "deleted"),
    ]
    last = ConfigVersion.objects.filter(subject=f"executions.tenant:{alice.tenant.pk}").latest(
        "version"
    )
    assert (last.author, last.reason) == ("system", "Removed with its tenant.")


def test_what_a_killed_process_left_is_gone_on_with(
    alice: Caller, charlie: Caller, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(alice)

    def killed(*given: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(service, "_remove_own", killed)
        with pytest.raises(Killed):
            remove(ann, alice.tenant)
    tenant = Tenant.objects.get(slug="wonderland")
    assert (tenant.is_active, tenant.removal_began_at is None) == (False, False)
    assert not Workspace.objects.filter(tenant=tenant).exists()
    # Seen by administrators, closed for its callers, and its name is its own.
    client = signed_in(ann)
    listed = client.get(reverse("admin:executions_tenant_changelist")).content.decode()
    assert listed.count("deletion started") == 1
    page = reverse("admin:executions_tenant_change", args=[tenant.pk])
    assert "deletion started" in client.get(page).content.decode()
    assert client.post(page, {"name": "Kept", "is_active": "on"}).status_code == 403
    assert alice.client.get(LIST).status_code == 401
    assert charlie.client.get(LIST).status_code == 200
    with pytest.raises(InvalidConfiguration):
        create_tenant("wonderland")
    assert service.go_on() == 1
    assert not Tenant.objects.filter(slug="wonderland").exists()
    assert create_tenant("wonderland").is_active
    assert service.go_on() == 0
    assert set(Tenant.objects.values_list("slug", flat=True)) == {"wonderland", "elsewhere"}
    # Records of the former one are not the new one's.
    assert not Execution.objects.filter(tenant__slug="wonderland").exists()


def test_a_removal_whose_time_is_over_is_gone_on_with(alice: Caller) -> None:
    filled(alice)
    service.begin(alice.tenant)
    for _ in range(2):
        assert service.go_on(seconds=0) == 0
        assert Execution.objects.filter(tenant=alice.tenant).exists()
    assert service.go_on() == 1


def test_a_hold_refuses_the_removal_and_stops_one_that_has_begun(alice: Caller, ann: User) -> None:
    filled(alice)
    hold = LegalHold.objects.create(tenant_slug="wonderland", reason="Case 7.")
    assert "under a legal hold" in remove(ann, alice.tenant)
    alice.tenant.refresh_from_db()
    assert (alice.tenant.is_active, alice.tenant.removal_began_at) == (True, None)
    assert alice.client.get(LIST).status_code == 200
    hold.delete()
    service.begin(alice.tenant)
    hold = LegalHold.objects.create(tenant_slug="wonderland", reason="Case 8.")
    assert service.go_on() == 0
    assert Workspace.objects.filter(tenant=alice.tenant).exists()
    assert ApiKey.objects.filter(tenant=alice.tenant).exists()
    hold.delete()
    assert service.go_on() == 1


def test_a_removal_waits_for_a_second_person(alice: Caller, ann: User, settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    ben = User.objects.create_superuser("ben", password="a long password of his")
    filled(alice)
    assert "Change submitted for approval" in remove(ann, alice.tenant)
    assert Workspace.objects.filter(tenant=alice.tenant).count() == 2
    assert alice.client.get(LIST).status_code == 200
    change = PendingChange.objects.get()
    assert {each["field"] for each in change.diff} == {"is_active", "removal_began_at"}
    approve(change, approver=ben)
    assert alice.client.get(LIST).status_code == 401
    assert service.go_on() == 1
    assert not Tenant.objects.filter(slug="wonderland").exists()


def test_a_hold_that_was_placed_meanwhile_refuses_the_approval(
    alice: Caller, ann: User, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    ben = User.objects.create_superuser("ben", password="a long password of his")
    remove(ann, alice.tenant)
    LegalHold.objects.create(tenant_slug="wonderland", reason="Case 7.")
    with pytest.raises(NotAllowed, match="under a legal hold"):
        approve(PendingChange.objects.get(), approver=ben)
    alice.tenant.refresh_from_db()
    assert alice.tenant.removal_began_at is None


def test_a_tenant_that_is_being_removed_is_not_kept_after_all(alice: Caller, ann: User) -> None:
    alice.tenant.name = "Other"
    service.begin(alice.tenant)
    pk = alice.tenant.pk
    with pytest.raises(IntegrityError), transaction.atomic():
        Tenant.objects.filter(pk=pk).update(is_active=True)
    alice.tenant.removal_began_at, alice.tenant.is_active = None, True
    with pytest.raises(NotAllowed, match="is being removed"):
        alice.tenant.save()
    assert service.go_on() == 1
    # Nor is one made anew that goes at once.
    marked = ConfigVersion.objects.filter(subject=f"executions.tenant:{pk}").order_by("version")
    with pytest.raises(NotAllowed, match="Restore an earlier one"):
        restore(ann, marked[0])


def test_what_was_added_meanwhile_goes_with_the_next_turn(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = service._remove_own

    def add(*given: Any) -> None:
        real(*given)
        create_api_key(alice.tenant, "late")

    service.begin(alice.tenant)
    with monkeypatch.context() as patch:
        patch.setattr(service, "_remove_own", add)
        assert service.go_on() == 0
    assert Tenant.objects.filter(pk=alice.tenant.pk).exists()
    assert service.go_on() == 1
    assert not ApiKey.objects.filter(name="late").exists()


def test_whoever_may_not_delete_its_keys_does_not_remove_it(alice: Caller) -> None:
    from django.contrib.auth.models import Permission

    clerk = User.objects.create_user("clerk", is_staff=True)
    for name in ("view_tenant", "delete_tenant"):
        clerk.user_permissions.add(Permission.objects.get(codename=name))
    page = reverse("admin:executions_tenant_delete", args=[alice.tenant.pk])
    answer = signed_in(clerk).post(page, {"post": "yes"})
    assert answer.status_code == 403
    assert Tenant.objects.filter(slug="wonderland", is_active=True).exists()
