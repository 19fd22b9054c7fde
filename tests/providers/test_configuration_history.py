"""Every change of a configuration is a version: attributed, comparable, restorable, provable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, transaction

from executions.runs.models import Execution
from providers import registry
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services import (
    ConfigurationConflict,
    NotPermitted,
    activate,
    approve,
    history,
    reject,
    remove_config,
    request_change,
    request_rollback,
    save_config,
)
from providers.signals import configuration_changed
from tests.conftest import Caller
from tests.support.provider_package import Packages, install_probe
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]

TOKEN = "tok-0123456789-wxyz"
NEW_TOKEN = "tok-9876543210-1234"
GOOD = {"endpoint": "http://a", "token": TOKEN}
Action = PendingChange.Action


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path, monkeypatch), f"history_{tmp_path.name}")
    yield
    registry.refresh()


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """What a receiver of `configuration_changed` is told."""
    told: list[dict[str, Any]] = []

    def receiver(sender: Any, signal: Any, **sent: Any) -> None:
        told.append(sent)

    configuration_changed.connect(receiver)
    yield told
    configuration_changed.disconnect(receiver)


def versions() -> list[ConfigVersion]:
    return list(ConfigVersion.objects.defer("content").order_by("version"))


def test_each_change_is_a_version_with_author_and_reason() -> None:
    save_config("probe", GOOD, author="user:ann", reason="First.")
    save_config("probe", GOOD | {"size": 20}, author="user:ben", reason="More room.")
    save_config("probe", GOOD | {"size": 20}, author="user:ben", reason="Nothing new.")

    assert [(v.version, v.author, v.reason) for v in versions()] == [
        (1, "user:ann", "First."),
        (2, "user:ben", "More room."),
    ]
    assert ProviderConfig.objects.get().version == 2
    assert history.summary(versions()[1].diff) == "Pool size 10 → 20"


def test_a_diff_shows_no_more_of_a_secret_than_its_last_four_characters() -> None:
    save_config("probe", GOOD)
    save_config("probe", GOOD | {"token": NEW_TOKEN, "proxy_password": "short"})

    diff = versions()[1].diff
    assert history.summary(diff) == "Proxy password added; Token changed, ends in 1234"
    for version in versions():
        text = json.dumps([version.diff, version.content_hash])
        assert TOKEN not in text
        assert NEW_TOKEN not in text
        assert "short" not in text


def test_a_version_is_ciphertext_in_the_database() -> None:
    save_config("probe", GOOD)
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM providers_configversion")
        assert TOKEN not in str(
            [bytes(c) if isinstance(c, memoryview) else c for row in cursor.fetchall() for c in row]
        )


def test_any_two_versions_can_be_compared() -> None:
    for size in (1, 2, 3):
        save_config("probe", GOOD | {"size": size})
    first, second, third = versions()

    assert history.summary(history.compare_versions(first, third)) == "Pool size 1 → 3"
    assert history.compare_versions(second, second) == []
    save_config("local", {})
    other = ConfigVersion.objects.get(subject="local")
    with pytest.raises(InvalidConfiguration, match="one provider"):
        history.compare_versions(first, other)


def test_a_rollback_restores_everything_as_a_new_version() -> None:
    save_config("probe", GOOD)
    changed = {"token": NEW_TOKEN, "size": 50, "proxy_password": "pass-word"}
    save_config("probe", GOOD | changed)

    request_rollback(versions()[0], author="user:ann")

    row = ProviderConfig.objects.get()
    assert (row.version, row.config["token"], row.config["size"]) == (3, TOKEN, 10)
    assert row.config["proxy_password"] is None
    assert versions()[2].reason == "Rolled back to version 1."


def test_a_version_altered_behind_our_back_is_not_restored() -> None:
    save_config("probe", GOOD)
    save_config("probe", GOOD | {"size": 2})
    first = versions()[0]
    altered = ConfigVersion.objects.get(pk=first.pk).content
    altered["config"]["endpoint"] = "http://evil"
    ConfigVersion.objects.filter(pk=first.pk).update(content=altered)

    with pytest.raises(InvalidConfiguration, match="altered"):
        request_rollback(first, author="user:ann")
    assert ProviderConfig.objects.get().version == 2


def test_history_survives_removal_and_its_versions_are_never_used_again() -> None:
    row = save_config("probe", GOOD)
    remove_config(row, author="user:ann")
    assert not ProviderConfig.objects.exists()
    again = save_config("probe", GOOD)

    assert again.version == 3
    assert [v.version for v in versions()] == [1, 2, 3]
    assert {entry["change"] for entry in versions()[1].diff} == {"removed"}
    with pytest.raises(InvalidConfiguration, match="nothing to restore"):
        request_rollback(versions()[1], author="user:ann")


def test_each_change_is_announced_with_masked_secrets(heard: list[dict[str, Any]]) -> None:
    save_config("local", {})
    activate("local")
    row = save_config("probe", GOOD, author="user:ann", reason="Why.")
    activate("probe", author="user:ann", reason="Because.")

    _, _, saved, activated = heard
    assert set(saved) == {
        "config_id", "provider_id", "version", "author", "reason", "diff", "content_hash",
    }  # fmt: skip
    assert (saved["provider_id"], saved["version"], saved["author"]) == ("probe", 1, "user:ann")
    assert saved["content_hash"] == ConfigVersion.objects.get(subject="probe").content_hash
    assert (activated["config_id"], activated["diff"][0]["before"]) == (row.pk, "local")
    assert TOKEN not in json.dumps(heard)


def test_a_receiver_that_fails_undoes_the_change() -> None:
    def receiver(**sent: Any) -> None:
        raise RuntimeError("the ledger is full")

    save_config("probe", GOOD)
    configuration_changed.connect(receiver)
    try:
        with pytest.raises(RuntimeError):
            save_config("probe", GOOD | {"size": 2})
        with pytest.raises(RuntimeError):
            activate("probe")
        with pytest.raises(RuntimeError):
            remove_config(ProviderConfig.objects.get())
    finally:
        configuration_changed.disconnect(receiver)
    row = ProviderConfig.objects.get()
    assert (row.version, row.config["size"], row.is_active) == (1, 10, False)
    assert len(versions()) == 1


def test_an_execution_names_the_version_it_ran_under(scripted: object, alice: Caller) -> None:
    run(alice, "pass")
    assert (
        Execution.objects.get().config_version == ProviderConfig.objects.get(is_active=True).version
    )


class TestTwoPersonRule:
    @pytest.fixture(autouse=True)
    def _rule(self, settings: Any) -> None:
        settings.TWO_PERSON_RULE = True
        self.ann = User.objects.create_superuser("ann")
        self.ben = User.objects.create_superuser("ben")

    def ask(self, **values: Any) -> PendingChange:
        change = request_change(
            "probe",
            Action.SAVE_AND_ACTIVATE,
            GOOD | values,
            author="user:ann",
            author_id=self.ann.pk,
            reason="Please.",
        )
        assert isinstance(change, PendingChange)
        return change

    def test_a_change_waits_until_somebody_else_approves(self) -> None:
        change = self.ask()
        assert not ProviderConfig.objects.exists()

        approve(change, approver=self.ben)

        row = ProviderConfig.objects.get()
        assert row.is_active
        version = versions()[0]
        assert (version.author, version.approved_by) == ("user:ann", "user:ben")
        change.refresh_from_db()
        assert (change.status, change.config) == ("approved", None)

    def test_its_author_cannot_approve_it_not_even_in_sql(self) -> None:
        change = self.ask()
        with pytest.raises(NotPermitted):
            approve(change, approver=self.ann)
        with pytest.raises(IntegrityError), transaction.atomic():
            PendingChange.objects.update(
                status="approved", decided_by="user:anna", decided_by_id=self.ann.pk, config=None
            )
        assert not ProviderConfig.objects.exists()

    def test_it_is_decided_once(self) -> None:
        change = self.ask()
        reject(change, decider=self.ann)
        with pytest.raises(NotPermitted, match="already"):
            approve(change, approver=self.ben)
        assert not ProviderConfig.objects.exists()

    def test_what_changed_meanwhile_is_not_overwritten(self) -> None:
        first, second = self.ask(size=1), self.ask(size=2)
        approve(first, approver=self.ben)
        with pytest.raises(ConfigurationConflict):
            approve(second, approver=self.ben)
        assert ProviderConfig.objects.get().config["size"] == 1
        second.refresh_from_db()
        assert second.status == "waiting"

    def test_a_rollback_and_a_removal_wait_too(self) -> None:
        approve(self.ask(), approver=self.ben)
        save_config("probe", {"size": 5, **GOOD})
        restored = request_rollback(versions()[0], author="user:ann", author_id=self.ann.pk)
        removal = request_change("probe", Action.REMOVE, author="user:ann", author_id=self.ann.pk)
        assert isinstance(restored, PendingChange)
        assert isinstance(removal, PendingChange)
        assert ProviderConfig.objects.get().config["size"] == 5

        reject(restored, decider=self.ben)
        approve(removal, approver=self.ben)
        assert not ProviderConfig.objects.exists()

    def test_what_would_be_refused_is_refused_when_it_is_asked_for(self) -> None:
        with pytest.raises(InvalidConfiguration):
            self.ask(size=0)
        assert not PendingChange.objects.exists()
