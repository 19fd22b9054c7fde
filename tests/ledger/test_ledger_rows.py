"""Honest changes of bound rows, however they meet, are never taken for alterations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import IntegrityError, connection, transaction
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.capabilities.spending.models import Budget
from executions.ledger import append
from executions.ledger.append import look_at, record_baseline
from executions.ledger.bindings import columns_of
from executions.ledger.models import LedgerEntry
from executions.tenants.keys import revoke, rotate
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import ensure_roles
from providers.models import ProviderConfig
from providers.services.configuration import activate, remove_config, save_config
from tests.conftest import Caller
from tests.ledger.ledger_entries import verify
from tests.support.processes import ROOT
from tests.support.sessions import in_thread

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def findings() -> list[str]:
    return [str(finding) for finding in verify().findings]


@pytest.fixture(autouse=True)
def _stock(request: pytest.FixtureRequest) -> None:
    ensure_roles()
    record_baseline()


@pytest.fixture
def post_save_first() -> Iterator[Callable[[Any], None]]:
    """Have a receiver hear of a saved row before the ledger does."""
    former = list(post_save.receivers)

    def put(receiver: Any) -> None:
        post_save.connect(receiver, weak=False)
        post_save.receivers.insert(0, post_save.receivers.pop())
        post_save.sender_receivers_cache.clear()

    yield put
    post_save.receivers[:] = former
    post_save.sender_receivers_cache.clear()


def test_each_way_to_change_a_row_is_an_entry_with_the_hash_of_the_row_before() -> None:
    budget = Budget.objects.create(tenant_slug="wonderland", limit=5)
    budget.limit = 6
    budget.save()
    budget.save(update_fields=["limit"])
    budget.delete()
    entries = [
        entry.stated for entry in LedgerEntry.objects.filter(bound_row__startswith="executions.bu")
    ][::-1]
    assert [stated["action"] for stated in entries] == ["created", "changed", "changed", "deleted"]
    hashes = [stated["row_hash"] for stated in entries]
    assert [stated["before"] for stated in entries] == [None, *hashes[:-1]]
    assert findings() == []


@pytest.mark.parametrize("other", ["same", "new"])
def test_a_receiver_that_saves_the_row_again_is_no_alteration(
    post_save_first: Callable[[Any], None], other: str
) -> None:
    """It is called before the first change is entered."""
    seen = []

    def again(sender: Any, instance: Any, **sent: Any) -> None:
        if sender is Tenant and len(seen) < 2:
            seen.append(instance)
            row = instance if other == "same" else Tenant.objects.get(pk=instance.pk)
            row.name += "+"
            row.save()

    post_save_first(again)
    tenant = Tenant.objects.create(slug="nested", name="Nested")
    assert len(seen) == 2
    seen.clear()
    tenant.refresh_from_db()
    tenant.name = "Changed"
    tenant.save()
    assert len(seen) == 2
    assert findings() == []


def test_what_was_undone_leaves_nothing_behind() -> None:
    user = User.objects.create_user("erin")
    other = User.objects.create_user("frank")
    for _ in range(2):
        with pytest.raises(IntegrityError), transaction.atomic():
            user.first_name = "E"
            user.save()
            user.groups.add(Group.objects.all()[0])
            other.username = "erin"
            other.save()
    user.refresh_from_db()
    user.last_name = "E"
    user.save()
    user.groups.add(Group.objects.all()[1])
    assert findings() == []


def test_several_changes_of_one_row_in_one_transaction_are_none() -> None:
    user, role = User.objects.create_user("erin"), Group.objects.create(name="New")
    first, second = Permission.objects.all()[:2]
    with transaction.atomic():
        role.permissions.add(first, second)
        user.user_permissions.add(first, second)
        user.groups.add(role)
        user.save()
        role.name = "Newer"
        role.save()
        # Both are part of both rows.
        Permission.objects.filter(pk__in=(first.pk, second.pk)).delete()
        user.save()
    assert findings() == []
    role.user_set.clear()
    User.objects.filter(pk=user.pk).delete()
    Group.objects.all().delete()
    assert findings() == []


def test_the_services_own_updates_are_none(alice: Caller, settings: Any) -> None:
    settings.TWO_PERSON_RULE = False
    row = save_config("local", {"pool_size": 2}, author="dora")
    save_config("local", {"pool_size": 3}, author="dora")
    activate("local", author="dora")
    new, _ = rotate(alice.api_key, timezone.now())
    revoke(new)
    row.refresh_from_db()
    remove_config(row, author="dora")
    save_config("local", {"pool_size": 2}, author="dora")
    Tenant.objects.filter(pk=alice.tenant.pk).delete()
    assert findings() == []


def test_a_column_that_is_bound_later_is_no_alteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever changes a row before stock is taken of the column, or afterwards."""
    fewer = [name for name in columns_of(User) if name != "last_name"]
    real = columns_of
    with monkeypatch.context() as patch:
        patch.setattr(append, "columns_of", lambda model: fewer if model is User else real(model))
        first, second = User.objects.create_user("erin"), User.objects.create_user("frank")
        User.objects.filter(username__in=("erin", "frank")).update(last_name="L")
    first.refresh_from_db()
    first.save()
    compared = look_at(User, second.pk)
    assert append.record_baseline() == 0
    second.refresh_from_db()
    second.save()
    assert compared.altered_at is None
    assert findings() == []


def test_rows_that_cannot_be_decrypted_go_and_are_no_alteration(settings: Any) -> None:
    settings.TWO_PERSON_RULE = False
    row = save_config("local", {"pool_size": 2}, author="dora")
    settings.FERNET_KEYS = ["another key, for the first one was lost"]
    remove_config(ProviderConfig.objects.defer("config").get(pk=row.pk), author="dora")
    settings.FERNET_KEYS = list(settings.FERNET_KEYS)
    assert not [each for each in verify().findings if each.kind == "altered outside"]


def test_what_is_not_bound_is_written_without_an_entry() -> None:
    user = User.objects.create_user("erin")
    before = LedgerEntry.objects.count()
    with CaptureQueriesContext(connection) as taken:
        user.save(update_fields=["last_login"])
    assert LedgerEntry.objects.count() == before
    assert not [each for each in taken.captured_queries if "ledgerentry" in each["sql"]]


def test_the_last_entry_is_found_by_an_index(alice: Caller) -> None:
    with connection.cursor() as cursor, CaptureQueriesContext(connection) as taken:
        append.last_entry("executions.tenant", str(alice.tenant.pk))
        [looked] = [each["sql"] for each in taken.captured_queries if "bound_row" in each["sql"]]
        if connection.vendor == "postgresql":
            # Of so few rows it would read all, one by one or in the order of another index.
            cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off")
        explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
        cursor.execute(f"{explain} {looked}")
        assert "ledger_bound_row" in str(cursor.fetchall()), looked


class _Race:
    """Two threads that begin at once, so often."""

    def __init__(self, *works: Callable[[], object], times: int = 12) -> None:
        self.failed: list[BaseException] = []
        gate = threading.Barrier(len(works))

        def often(work: Callable[[], object]) -> None:
            for _ in range(times):
                gate.wait(60)
                try:
                    work()
                except BaseException as error:
                    self.failed.append(error)

        threads = [in_thread(lambda work=work: often(work)) for work in works]
        for thread in threads:
            thread.join()


@pytest.mark.django_db(transaction=True)
def test_two_who_change_one_row_at_once_alter_nothing(alice: Caller) -> None:
    key = alice.api_key

    def rename(name: str) -> None:
        row = ApiKey.objects.get(pk=key.pk)
        row.name = name
        row.save()

    race = _Race(
        lambda: rename("one"),
        lambda: rename("two"),
        lambda: ApiKey.objects.filter(pk=key.pk).update(last_used_at=None),
    )
    assert race.failed == []
    assert findings() == []


@pytest.mark.django_db(transaction=True)
def test_memberships_and_rows_that_change_at_once_alter_nothing() -> None:
    user = User.objects.create_user("erin")
    one, two = Group.objects.create(name="One"), Group.objects.create(name="Two")

    def save() -> None:
        row = User.objects.get(pk=user.pk)
        row.first_name += "x"
        row.save()

    def enter_and_leave() -> None:
        user.groups.add(one)
        user.groups.remove(one)

    def from_the_other_side() -> None:
        two.user_set.add(user)
        two.user_set.clear()

    race = _Race(save, enter_and_leave, from_the_other_side)
    assert race.failed == []
    assert findings() == []


@pytest.mark.django_db(transaction=True)
def test_a_role_that_is_renamed_while_somebody_enters_it_alters_nothing() -> None:
    user, role = User.objects.create_user("erin"), Group.objects.create(name="One")

    def rename() -> None:
        row = Group.objects.get(pk=role.pk)
        row.name += "x"
        row.save()

    def enter_and_leave() -> None:
        user.groups.add(role)
        user.groups.remove(role)

    race = _Race(rename, enter_and_leave)
    assert race.failed == []
    assert findings() == []


@pytest.mark.django_db(transaction=True)
def test_two_who_remove_or_save_a_row_at_once_alter_nothing() -> None:
    for number in range(6):
        budget = Budget.objects.create(tenant_slug=f"t{number}", limit=5)
        twin = Budget.objects.get(pk=budget.pk)
        _Race(budget.delete, lambda twin=twin: twin.save(), times=1)
    assert findings() == []


def test_no_update_of_our_own_passes_by_the_ledger() -> None:
    """`tests.support.bound_updates` refuses an update of bound columns, by code of ours, that does not look
    at the row first; in every test."""
    tenant = Tenant.objects.create(slug="here", name="Here")
    source = "def forgetful(rows):\n    rows.update(name='There')\n"
    space: dict[str, Any] = {}
    exec(compile(source, str(ROOT / "executions" / "made_up.py"), "exec"), space)
    with pytest.raises(AssertionError, match="look_at"):
        space["forgetful"](Tenant.objects.filter(pk=tenant.pk))


@pytest.mark.django_db(transaction=True)
def test_permissions_are_saved_outside_of_a_transaction_too() -> None:
    record_baseline()
    role, person = Group.objects.create(name="role"), User.objects.create(username="erin")
    permission = Permission.objects.create(
        codename="own", name="Own", content_type=ContentType.objects.get_for_model(User)
    )
    role.permissions.add(permission)
    person.user_permissions.add(permission)
    for name in ("name", "codename"):
        setattr(permission, name, "another")
        permission.save()
    assert verify().findings == []
    permission.delete()
    assert verify().findings == []
