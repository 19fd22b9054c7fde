"""The ledger: one signed entry for whatever happens, in the transaction that makes it happen."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.core import checks
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client

from executions.capabilities.spending.models import Budget
from executions.ledger import checkpoints
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable, keyring
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key, revoke
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import create_tenant
from providers.models import ProviderConfig, ProviderPrice, Route
from providers.signals import configuration_changed
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.refusing_table import refusing_rows
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def stated(kind: str) -> list[dict[str, Any]]:
    """What the entries of a kind say, oldest first."""
    return [entry.stated for entry in LedgerEntry.objects.filter(kind=kind).order_by("sequence")]


@pytest.fixture
def broken_ledger(transactional_db: None) -> Iterator[None]:
    """A database that takes no entry of an execution."""
    ours = "NEW.kind IN ('execution', 'tenant', 'role')"
    with refusing_rows("executions_ledgerentry", "no room", ours):
        yield


def test_an_execution_is_entered_with_what_came_of_it(scripted: object, alice: Caller) -> None:
    answer = run(
        alice,
        "answer = ExecutionResult('out', 'err', 3, 0.0,"
        " {'runtime': 'odd', 'image_digest': 'sha256:abc'})",
    ).json()

    (said,) = stated("execution")
    record = Execution.objects.get()
    assert said["subject"] == answer["id"] == str(record.pk)
    assert (said["tenant"], said["status"], said["exit_code"]) == ("wonderland", "failed", 3)
    assert (said["provider"], said["config_version"]) == ("scripted", record.config_version)
    assert (said["runtime"], said["image_digest"]) == ("odd", "sha256:abc")
    assert said["code_hash"] == record.code_hash


def test_each_entry_names_the_one_before(scripted: object, alice: Caller) -> None:
    for _ in range(3):
        run(alice, "pass")

    entries = list(LedgerEntry.objects.order_by("sequence"))
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
    assert entries[0].stated["previous"] == "0" * 64
    for before, after in pairwise(entries):
        assert after.stated["previous"] == before.digest
    assert verify().is_intact


def test_no_outcome_is_given_out_when_it_cannot_be_entered(
    scripted: object, alice: Caller, broken_ledger: None
) -> None:
    answer = run(alice, "answer = ExecutionResult('the outcome', '', 0, 0.0)")

    assert answer.status_code == 500
    assert b"the outcome" not in answer.content
    record = Execution.objects.get()
    assert (record.status, record.stdout, record.finished_at) == ("running", "", None)


def test_without_a_key_nothing_is_given_out_and_the_answer_says_why(
    scripted: object, alice: Caller, transactional_db: None, settings: Any, tmp_path: Path
) -> None:
    settings.LEDGER_KEYS, settings.DATA_DIR = [], tmp_path

    answer = run(alice, "answer = ExecutionResult('the outcome', '', 0, 0.0)")

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "SB009"
    assert "LEDGER_KEYS" in answer.json()["error"]["message"]
    assert Execution.objects.get().finished_at is None


def test_a_change_that_cannot_be_entered_is_not_made(broken_ledger: None) -> None:
    user = get_user_model().objects.create_user("carol")
    (group,) = Group.objects.bulk_create([Group(name="Inspector")])
    with pytest.raises(Exception, match="no room"):
        Tenant.objects.create(slug="late", name="Late")
    with pytest.raises(Exception, match="no room"):
        user.groups.add(group)

    assert not Tenant.objects.exists()
    assert not user.groups.exists()


def test_what_was_rolled_back_leaves_no_entry(transactional_db: None) -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        append("note", "x", {})
        raise RuntimeError
    append("note", "y", {})

    assert [said["subject"] for said in stated("note")] == ["y"]
    assert verify().is_intact


def test_threads_make_one_sequence(transactional_db: None) -> None:
    def enter(number: int) -> None:
        try:
            append("note", str(number), {})
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(40)))

    assert {said["subject"] for said in stated("note")} == {str(number) for number in range(40)}
    assert list(LedgerEntry.objects.order_by("sequence").values_list("sequence", flat=True)) == [
        *range(1, 42)
    ]
    assert verify().is_intact


_APPEND_30 = """
import django
django.setup()
from django.conf import settings
settings.LEDGER_CHECKPOINTS = {folder!r}
settings.DATABASES["default"]["NAME"] = {name!r}
from executions.ledger.append import append
for number in range(30):
    append("note", {prefix!r} + str(number), {{}})
"""


def test_processes_make_one_sequence_and_one_head(
    transactional_db: None, tmp_path: Path, settings: Any
) -> None:
    settings.LEDGER_CHECKPOINTS = str(tmp_path)
    name = str(connection.settings_dict["NAME"])
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _APPEND_30.format(folder=str(tmp_path), name=name, prefix=prefix),
            ],
            cwd=ROOT,
            env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix in "abc"
    ]
    for process in processes:
        _, said = process.communicate()
        assert process.returncode == 0, said

    assert LedgerEntry.objects.filter(kind="note").count() == 90
    found = verify()
    assert (found.is_intact, found.entries, found.checkpoints) == (True, 91, 1)
    head = checkpoints.head()
    assert head is not None
    assert (head.sequence, head.digest) == (91, found.head)
    assert not (tmp_path / "checkpoints.jsonl").exists()


def test_tenants_and_keys_are_entered_without_the_key(db: None) -> None:
    tenant = create_tenant("acme")
    api_key, key_text = create_api_key(tenant, "first")
    assert revoke(api_key)
    assert not revoke(api_key)
    ApiKey.objects.all().delete()
    tenant.is_active = False
    tenant.save()
    tenant.delete()

    assert [(said["action"], said["name"]) for said in stated("api_key")] == [
        ("created", "first"),
        ("revoked", "first"),
        ("deleted", "first"),
    ]
    assert "expires_at" in stated("api_key")[0]
    assert [(said["action"], said["is_active"]) for said in stated("tenant")] == [
        ("created", True),
        ("changed", False),
        ("deleted", False),
    ]
    said = "".join(LedgerEntry.objects.values_list("statement", flat=True))
    assert key_text not in said
    assert api_key.key_hash not in said


def test_a_role_given_or_taken_is_entered_with_who_did_it(admin_client: Client) -> None:
    user = get_user_model().objects.create_user("dora", is_staff=True)
    group = Group.objects.create(name="Inspector")
    values = {"username": "dora", "is_active": "on", "is_staff": "on"}
    dates = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    path = f"/admin/auth/user/{user.pk}/change/"

    admin_client.post(path, {**values, **dates, "groups": [group.pk]})
    admin_client.post(path, {**values, **dates})

    assert [
        (said["action"], said["subject"], said["others"], said["actor"])
        for said in stated("role")
        if "others" in said
    ] == [
        ("added", "dora", ["Inspector"], "user:admin"),
        ("removed", "dora", ["Inspector"], "user:admin"),
    ]
    assert [said["object"] for said in stated("admin_action")] == ["dora", "dora"]


def test_a_role_under_another_name_changes_nobody_behind_our_back(db: None) -> None:
    user = get_user_model().objects.create_user("dora")
    group = Group.objects.create(name="Inspector")
    user.groups.add(group)
    entered = len(stated("user"))
    group.save()
    assert len(stated("user")) == entered
    group.name = "Reader"
    group.save()
    assert [said["subject"] for said in stated("user")[entered:]] == ["dora"]
    assert [str(finding) for finding in verify().findings] == []


def test_roles_are_entered_from_either_side_and_when_cleared(db: None) -> None:
    user = get_user_model().objects.create_user("dora")
    group = Group.objects.create(name="Inspector")
    group.user_set.add(user)
    group.user_set.clear()
    permission = Permission.objects.first()
    assert permission is not None
    group.permissions.add(permission)
    user.groups.add(group)
    user.groups.clear()

    said = [
        (entry["action"], entry["subject"], entry["others"])
        for entry in stated("role")
        if "others" in entry
    ]
    assert said == [
        ("added", "Inspector", ["dora"]),
        ("removed", "Inspector", ["dora"]),
        ("added", "Inspector", [str(permission)]),
        ("added", "dora", ["Inspector"]),
        ("removed", "dora", ["Inspector"]),
    ]


def test_rights_of_a_user_are_entered_and_a_login_is_not(client: Client) -> None:
    user = get_user_model().objects.create_user("dora", password="correct horse")
    user.is_superuser = True
    user.save()
    client.login(username="dora", password="correct horse")

    assert [(said["action"], said["is_superuser"]) for said in stated("user")] == [
        ("created", False),
        ("changed", True),
    ]


def test_a_changed_configuration_is_entered(db: None) -> None:
    configuration_changed.send(
        sender=None,
        config_id=1,
        provider_id="local",
        version=4,
        author="admin",
        reason="more room",
        diff=[{"field": "pool_size", "before": 2, "after": 2.5}],
        content_hash="sha256:00",
    )

    (said,) = stated("configuration")
    assert (said["subject"], said["version"], said["author"]) == ("local", 4, "admin")
    assert said["diff"] == [{"field": "pool_size", "before": 2, "after": 2.5}]


def test_routes_prices_and_budgets_are_entered(db: None) -> None:
    route = Route.objects.create(owner="acme", strategy="cheapest")
    route.steps.create(provider=ProviderConfig.objects.create(provider_id="local"), weight=3)
    price = ProviderPrice.objects.create(provider_id="local", per_second=Decimal("0.0001"))
    Budget.objects.create(tenant_slug="acme", limit=5)
    price.per_second = Decimal("0.2")
    price.save()
    route.delete()

    entered = LedgerEntry.objects.filter(kind="setting").order_by("sequence")
    said = [(e.stated["subject"].split()[0], e.stated["action"]) for e in entered]
    assert said == [
        ("route", "created"),
        ("local", "created"),
        ("routestep", "created"),
        ("providerprice", "created"),
        ("budget", "created"),
        ("providerprice", "changed"),
        ("routestep", "deleted"),
        ("route", "deleted"),
    ]
    assert entered[0].stated["strategy"] == "cheapest"
    assert [entered[n].stated["per_second"] for n in (3, 5)] == ["0.0001", "0.2"]
    assert verify().is_intact


def test_a_new_key_is_introduced_by_the_one_before(db: None, settings: Any) -> None:
    append("note", "old", {})
    old = settings.LEDGER_KEYS[0]
    settings.LEDGER_KEYS = [secrets.token_urlsafe(32), old]
    new_id, old_id = keyring()
    append("note", "new", {})
    append("note", "newer", {})

    introductions = stated("ledger_key")
    assert [said["subject"] for said in introductions] == [old_id, new_id, old_id]
    assert introductions[1]["key_id"] == old_id
    assert (introductions[2]["subject"], introductions[2]["key_id"]) == (old_id, new_id)
    assert [said["key_id"] for said in stated("note")] == [old_id, new_id, new_id]
    assert verify().is_intact
    # The old key is not needed any more.
    settings.LEDGER_KEYS = settings.LEDGER_KEYS[:1]
    append("note", "newest", {})
    assert verify().is_intact


def test_a_key_that_nobody_introduces_signs_nothing_until_it_is_adopted(
    transactional_db: None, settings: Any
) -> None:
    append("note", "old", {})
    settings.LEDGER_KEYS = [secrets.token_urlsafe(32)]
    with pytest.raises(LedgerUnavailable, match="adopt_ledger_key"):
        append("note", "new", {})
    assert [finding.kind for finding in verify().findings] == ["untrusted key"]

    out = StringIO()
    call_command("adopt_ledger_key", "--reason", "the disk broke", stdout=out)
    append("note", "new", {})

    assert "signs from here on" in out.getvalue()
    assert stated("ledger_key")[1]["reason"] == "the disk broke"
    assert verify().is_intact


def test_a_key_that_is_none_is_refused_without_showing_it(db: None, settings: Any) -> None:
    settings.LEDGER_KEYS = ["not-a-key-but-secret"]
    with pytest.raises(LedgerUnavailable) as caught:
        append("note", "x", {})
    assert "LEDGER_KEYS" in caught.value.message
    assert "not-a-key" not in str(caught.value)


def test_an_entry_cannot_name_its_own_place(db: None) -> None:
    with pytest.raises(ValueError, match="sequence"):
        append("note", "x", {"sequence": 7})


@pytest.mark.parametrize("keys", [[], ["not-a-key"]])
def test_nothing_serves_without_a_key_to_sign_with(keys: list[str], settings: Any) -> None:
    settings.LEDGER_KEYS = keys
    assert [message.id for message in checks.run_checks(tags=["security"])] == ["executions.E001"]
