"""Whoever can write to the database has an honest change cover up what he wrote: it stays found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher, make_password
from django.contrib.auth.models import Group, Permission, User
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, models, transaction
from django.test import Client
from django.urls import reverse
from django_otp.oath import totp
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.capabilities.schedules.models import Schedule
from executions.ledger.append import enter_row, look_at, record_baseline
from executions.ledger.bindings import ALTERED, BASELINE, BINDINGS, model_of
from executions.ledger.entry import write
from executions.ledger.erasures import hold_scopes_in_ledger
from executions.ledger.models import LedgerEntry, LegalHold
from executions.ledger.verification import verify
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from providers.models import ConfigVersion, ProviderConfig
from providers.services.configuration import activate, save_config
from providers.services.guarded_rows import NotAllowed
from sandbox_site.models import RecoveryCode
from sandbox_site.recovery import _digest, issue_codes, use_code
from tests.attacks.administrators import STRONG, superuser
from tests.attacks.test_writers_records import (
    change,
    columns_bound,
    twin_of,
    undone,
    without_checks,
)

pytestmark = [pytest.mark.one_database, pytest.mark.django_db]


def alterations() -> list[str]:
    return [each.detail for each in verify().findings if each.kind == "altered outside"]


def others() -> list[str]:
    return [str(each) for each in verify().findings if each.kind != "altered outside"]


def sign_in(name: str, password: str = STRONG, code: str = "") -> Client | None:
    """A client that is signed in, None where the login was refused."""
    client = Client()
    form = {"username": name, "password": password, "otp_token": code}
    answer = client.post(reverse("admin:login"), form)
    if answer.status_code == 302:
        return client
    assert "Please enter the correct username and password" in answer.content.decode()
    return None


def weak(password: str) -> str:
    """A hash that the first login writes anew."""
    return PBKDF2PasswordHasher().encode(password, "salt" * 6, iterations=10)


@pytest.fixture(autouse=True)
def _stock() -> None:
    record_baseline()


@pytest.fixture
def _hashers(settings: Any) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.PBKDF2PasswordHasher"]


def inserted(name: str) -> User:
    """A superuser of whom no signal tells."""
    User.objects.bulk_create(
        [User(username=name, password=weak(STRONG), is_superuser=True, is_staff=True)]
    )
    return User.objects.get(username=name)


@pytest.mark.usefixtures("_hashers")
def test_a_superuser_who_was_inserted_does_not_sign_in_and_stays_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    honest = superuser("erin")
    forged = inserted("mallory")
    assert sign_in("mallory") is None
    assert (
        f"auth.user {forged.pk} was changed outside the service: it has no entry" in alterations()
    )
    alerts = [getattr(record, "alert", "") for record in caplog.records]
    assert "account_altered_outside" in alerts
    # Neither for being entered by now, nor for an honest save by somebody else.
    forged.refresh_from_db()
    forged.first_name = "M"
    forged.save()
    assert sign_in("mallory") is None
    assert len(alterations()) == 1
    assert others() == []
    assert sign_in("erin") is not None
    assert honest.is_superuser


@pytest.mark.usefixtures("_hashers")
def test_a_hash_that_was_overwritten_lets_nobody_in_and_stays_found() -> None:
    user = superuser("erin")
    User.objects.filter(pk=user.pk).update(password=weak("another long phrase"))
    assert sign_in("erin") is None
    assert sign_in("erin", "another long phrase") is None
    (found,) = alterations()
    assert found.startswith(f"auth.user {user.pk} ")
    assert others() == []


def test_a_right_that_was_taken_and_the_own_password_changed_stays_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    user = User.objects.create_user("mallory", password=STRONG, is_staff=True)
    client = sign_in("mallory")
    assert client is not None
    User.objects.filter(pk=user.pk).update(is_superuser=True)
    new = "an even longer and stranger phrase"
    form = {"old_password": STRONG, "new_password1": new, "new_password2": new}
    assert client.post(reverse("admin:password_change"), form).status_code == 302
    user.refresh_from_db()
    assert user.check_password(new)
    (found,) = alterations()
    assert found.startswith(f"auth.user {user.pk} ")
    entry = LedgerEntry.objects.filter(statement__contains=f'"{ALTERED}"').get()
    assert entry.stated["differs"] == ["is_superuser"]
    assert others() == []
    assert sign_in("mallory", new) is None


def test_a_row_that_is_put_back_as_it_was_before_its_last_entry_stays_found() -> None:
    """With the newest entry hidden, as long as the login takes."""
    user = superuser("erin")
    former = user.password
    user.set_password("an even longer and stranger phrase")
    user.save()
    newest = LedgerEntry.objects.latest("sequence")
    User.objects.filter(pk=user.pk).update(password=former)
    LedgerEntry.objects.filter(pk=newest.pk).update(bound_row="")
    user.refresh_from_db()
    user.first_name = "E"
    user.save()
    LedgerEntry.objects.filter(pk=newest.pk).update(bound_row=newest.bound_row)
    (found,) = alterations()
    assert f"it was not as entry {newest.sequence} left it" in found
    assert others() == []


def test_who_hides_that_stock_was_taken_is_found_afterwards() -> None:
    LedgerEntry.objects.filter(kind=BASELINE).update(kind="hidden")
    forged = inserted("mallory")
    forged.save()
    LedgerEntry.objects.filter(kind="hidden").update(kind=BASELINE)
    (found,) = alterations()
    assert found.startswith(f"auth.user {forged.pk} ")
    assert others() == []


@pytest.mark.parametrize("column", ["key", "user"])
def test_an_authenticator_that_was_written_lets_nobody_in(column: str) -> None:
    user, other = superuser("erin"), superuser("frank")
    owner = user if column == "key" else other
    device = TOTPDevice.objects.create(user=owner, name="phone", confirmed=True)
    values = {"key": "00" * 20} if column == "key" else {"user": user}
    TOTPDevice.objects.filter(pk=device.pk).update(**values)
    device.refresh_from_db()
    assert sign_in("erin", code=f"{totp(device.bin_key):06}") is None
    assert sign_in("erin") is None
    assert [each.startswith(f"otp_totp.totpdevice {device.pk} ") for each in alterations()] == [
        True
    ]
    assert others() == []


@pytest.mark.parametrize("how", ["removed", "given away"])
def test_an_authenticator_that_was_taken_away_lets_nobody_in_without_it(how: str) -> None:
    user, other = superuser("erin"), superuser("frank")
    device = TOTPDevice.objects.create(user=user, name="phone", confirmed=True)
    honest = TOTPDevice.objects.create(user=other, name="phone", confirmed=True)
    row = models.QuerySet(TOTPDevice).filter(pk=device.pk)
    if how == "removed":
        row._raw_delete("default")
    else:
        row.update(user=other)
    assert sign_in("erin") is None
    assert [each.startswith(f"otp_totp.totpdevice {device.pk} ") for each in alterations()] == [
        True
    ]
    call_command("accept_row", "otp_totp.totpdevice", str(device.pk), "--reason", "a lost phone")
    assert sign_in("erin") is not None
    # Nobody is locked out by an authenticator that was removed honestly.
    honest.delete()
    if how == "removed":
        assert sign_in("frank") is not None
    assert len(alterations()) == 1
    assert others() == []


def test_a_removal_is_accepted_once_and_lifts_no_hold() -> None:
    hold = LegalHold.objects.create(tenant_slug="held", reason="a case")
    models.QuerySet(LegalHold).filter(pk=hold.pk)._raw_delete("default")
    accept = ("accept_row", "executions.legalhold", str(hold.pk), "--reason", "an accident")
    call_command(*accept)
    assert hold_scopes_in_ledger(thorough=True)["held"].everything
    with pytest.raises(CommandError, match="no row"):
        call_command(*accept)
    with pytest.raises(CommandError, match="no row"):
        call_command("accept_row", "executions.tenant", "no number", "--reason", "none")
    assert [each.startswith(f"executions.legalhold {hold.pk} ") for each in alterations()] == [True]
    assert others() == []


def test_a_recovery_code_that_was_written_is_worth_nothing() -> None:
    user = superuser("erin")
    device = TOTPDevice.objects.create(user=user, name="phone", confirmed=True)
    honest = issue_codes(device)[-1]
    code = RecoveryCode.objects.order_by("pk")[0]
    forged = "aaaa-bbbb-cccc-dddd"
    models.QuerySet(RecoveryCode).filter(pk=code.pk).update(digest=_digest(forged))
    assert sign_in("erin", code=forged) is None
    assert use_code(user, honest) == device
    (found,) = alterations()
    assert found.startswith(f"sandbox_site.recoverycode {code.pk} ")
    assert others() == []


def test_an_account_that_somebody_accepts_signs_in_and_stays_found() -> None:
    user = superuser("erin")
    User.objects.filter(pk=user.pk).update(first_name="E")
    assert sign_in("erin") is None
    call_command("accept_row", "auth.user", str(user.pk), "--reason", "the operator did it")
    assert sign_in("erin") is not None
    user.refresh_from_db()
    user.save()
    assert sign_in("erin") is not None
    assert len(alterations()) == 1
    assert others() == []
    User.objects.filter(pk=user.pk).update(first_name="F")
    assert sign_in("erin") is None
    assert len(alterations()) == 2


def test_without_stock_taken_accounts_of_before_sign_in() -> None:
    """As after an upgrade from a version that entered no accounts."""
    LedgerEntry.objects.filter(kind=BASELINE).delete()
    User.objects.bulk_create([User(username="erin", password=make_password(STRONG), is_staff=True)])
    user = User.objects.get(username="erin")
    assert sign_in("erin") is not None
    user.save()
    assert sign_in("erin") is not None
    assert alterations() == []


def honest_save(row: Any) -> None:
    """Whatever the service writes to the row, by its own way."""
    if isinstance(row, Session):
        with transaction.atomic():
            enter_row(row, "changed", look_at(Session, row.pk))
    else:
        type(row)._base_manager.get(pk=row.pk).save()


def done(work: Callable[[], object]) -> bool:
    """Whether it could be done: not where what was written makes the row unfit."""
    try:
        with transaction.atomic():
            work()
    except (IntegrityError, ValidationError, ValueError, TypeError, NotAllowed):
        return False
    return True


def test_every_column_that_was_written_stays_found_behind_an_honest_save(
    everything: None,
) -> None:
    """One column of every model at a time."""
    without_checks()
    bound: list[Any] = [model_of(label) for label in BINDINGS]
    rows = {model: list(model._base_manager.order_by("pk")) for model in bound}
    missed, saved = [], set()
    for columns in zip_longest(*map(columns_bound, bound)):
        with undone():
            written = [
                (row, column)
                for model, column in zip(bound, columns, strict=True)
                if column is not None and not column.primary_key
                for row in next(
                    ([row] for row in reversed(rows[model]) if change(model, column, row)), []
                )
            ]
            kept = [each for each in written if done(lambda row=each[0]: honest_save(row))]
            found = alterations()
        for row, column in kept:
            label = row._meta.label_lower
            saved.add(label)
            if not any(each.startswith(f"{label} {row.pk} ") for each in found):
                missed.append(f"{label}.{column.attname}")
    assert missed == []
    assert saved == set(BINDINGS)


def test_every_row_that_was_written_stays_found_behind_its_honest_removal(
    everything: None, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = False
    without_checks()
    missed, gone = [], set()
    for label in BINDINGS:
        model: Any = model_of(label)
        for column in columns_bound(model):
            row = model._base_manager.order_by("pk").last()
            if column.primary_key or isinstance(column, models.ForeignKey):
                continue
            with undone():
                rows = model._base_manager.filter(pk=row.pk)
                if not change(model, column, row) or not done(lambda rows=rows: rows[0].delete()):
                    continue
                gone.add(label)
                if not any(each.startswith(f"{label} {row.pk} ") for each in alterations()):
                    missed.append(f"{label}.{column.attname}")
            break
    assert missed == []
    assert gone == set(BINDINGS)


def test_every_row_that_was_added_stays_found_behind_an_honest_save(everything: None) -> None:
    without_checks()
    missed, saved = [], set()
    for label in BINDINGS:
        model: Any = model_of(label)
        with undone():
            twin = twin_of(model._base_manager.order_by("pk").first())
            if label == "providers.routestep":
                continue
            models.QuerySet(model).bulk_create([twin])
            if not done(lambda twin=twin: honest_save(twin)):
                continue
            saved.add(label)
            if not any(each.startswith(f"{label} {twin.pk} ") for each in alterations()):
                missed.append(label)
    assert missed == []
    # A step has its route's place, which one alone may have; a policy and a network list are of a
    # tenant that there is, and so is a credential, whose value is sealed for it.
    of_a_tenant = {
        *("executions.policy", "executions.networklist", "executions.networkcredential"),
    }
    assert {*BINDINGS} - saved == {"providers.routestep", *of_a_tenant}


def test_a_row_that_was_removed_and_is_made_again_stays_found(everything: None) -> None:
    tenant = Tenant.objects.create(slug="brief", name="Brief")
    values = {field.attname: getattr(tenant, field.attname) for field in tenant._meta.fields}
    Tenant.objects.filter(pk=tenant.pk)._raw_delete("default")
    Tenant.objects.create(**values)
    (found,) = alterations()
    assert found == f"executions.tenant {tenant.pk} was changed outside the service: it was removed"
    assert others() == []


def test_memberships_that_were_written_stay_found_behind_honest_ones(everything: None) -> None:
    user, role = User.objects.get(username="dora"), Group.objects.get(name="Inspector")
    other = Group.objects.exclude(pk=role.pk).order_by("name")[0]
    allowed = Permission.objects.order_by("pk")[7]
    forged = Permission.objects.order_by("pk")[9]
    member, may = User.groups.through, Group.permissions.through
    of_user = [
        lambda: member._default_manager.bulk_create([member(user_id=user.pk, group_id=other.pk)]),
        lambda: member._default_manager.filter(user_id=user.pk)._raw_delete("default"),
        lambda: models.QuerySet(Permission).filter(user=user).update(codename="forged"),
    ]
    of_role = [
        lambda: may._default_manager.bulk_create([may(group_id=role.pk, permission_id=forged.pk)]),
        lambda: may._default_manager.filter(group_id=role.pk)._raw_delete("default"),
    ]
    changes_of_user = [
        lambda: user.groups.add(Group.objects.create(name="New")),
        lambda: user.groups.remove(role),
        lambda: user.groups.clear(),
        lambda: user.groups.set([role, other]),
        lambda: user.user_permissions.add(allowed),
        lambda: role.user_set.remove(user),
        lambda: role.user_set.clear(),
        lambda: Group.objects.get(pk=role.pk).delete(),
    ]
    changes_of_role = [
        lambda: role.permissions.add(allowed),
        lambda: role.permissions.clear(),
        lambda: allowed.group_set.add(role),
        lambda: Permission.objects.filter(group=role).delete(),
        lambda: role.save(),
    ]
    cases = [(user, of_user, changes_of_user), (role, of_role, changes_of_role)]
    missed = []
    for row, attacks, changes in cases:
        for number, attack in enumerate(attacks):
            for place, honest in enumerate(changes):
                name = f"{row._meta.label_lower} {row.pk} "
                with undone():
                    attack()
                    honest()
                    found = [each.detail for each in verify().findings]
                if not any(each.startswith(name) for each in found):
                    missed.append((name, number, place))
    assert missed == []


def test_an_update_of_several_rows_covers_up_none(everything: None) -> None:
    """The one that makes another provider the active one."""
    row = ProviderConfig.objects.get(provider_id="local")
    models.QuerySet(ProviderConfig).filter(pk=row.pk).update(version=row.version + 7)
    activate("local")
    (found,) = alterations()
    assert found.startswith(f"providers.providerconfig {row.pk} ")


def test_who_hides_the_last_entry_while_another_is_made_is_found_afterwards(
    everything: None,
) -> None:
    """By a column, or by a statement that no key has signed: then nothing can be compared."""
    user = User.objects.get(username="dora")
    last = LedgerEntry.objects.filter(bound_row=f"auth.user {user.pk}").latest("sequence")
    stated = {**last.stated, "key_id": "0" * 16}
    for hidden in (
        {"bound_row": ""},
        {"statement": write(stated), "key_id": "0" * 16},
        {"statement": write(stated)},
    ):
        honest = {name: getattr(last, name) for name in hidden}
        with undone():
            models.QuerySet(User).filter(pk=user.pk).update(is_superuser=True)
            models.QuerySet(LedgerEntry).filter(pk=last.pk).update(**hidden)
            done(lambda: User.objects.get(pk=user.pk).save())
            models.QuerySet(LedgerEntry).filter(pk=last.pk).update(**honest)
            found = [each.detail for each in verify().findings]
        assert any(each.startswith(f"auth.user {user.pk} ") for each in found), hidden


def test_text_that_nobody_can_decrypt_hides_no_change_beside_it(everything: None) -> None:
    """Whether a key was lost, or somebody wrote it, nobody can tell by the text alone."""
    schedule = Schedule.objects.order_by("pk")[0]
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {Schedule._meta.db_table} SET request = %s, cron = '1 1 1 1 *' WHERE id = %s",
            [b"nothing", schedule.pk.hex],
        )
    Schedule.objects.defer("request").get(pk=schedule.pk).delete()
    assert alterations() == [
        f"executions.schedule {schedule.pk} was changed outside the service: it was changed"
    ]


def test_a_configuration_that_was_exchanged_stays_found_while_its_version_is_away(
    everything: None,
) -> None:
    row = ProviderConfig.objects.get(provider_id="local")
    version = ConfigVersion.objects.get(subject="local", version=row.version)
    other = ConfigVersion.objects.filter(subject="local").exclude(pk=version.pk)[0]
    content, forged = version.content, {**other.content, "salt": "0"}
    models.QuerySet(ProviderConfig).filter(pk=row.pk).update(config={"pool_size": 77})
    models.QuerySet(ConfigVersion).filter(pk=version.pk).update(content=forged)
    save_config("local", {"max_sandboxes": 80})
    models.QuerySet(ConfigVersion).filter(pk=version.pk).update(content=content)
    assert any(each.startswith(f"providers.providerconfig {row.pk} ") for each in alterations())
