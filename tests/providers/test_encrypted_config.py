"""A stored configuration is ciphertext everywhere but in the hands of who has the key."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import FieldError, ImproperlyConfigured
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.db.models import F

from providers import registry
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError
from providers.models import ProviderConfig
from providers.services import ConfigurationConflict, activate, remove_config, save_config
from tests.support.provider_package import Packages, install_probe

pytestmark = pytest.mark.django_db

TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path, monkeypatch), f"encrypted_{tmp_path.name}")
    yield
    registry.refresh()


def make(**values: Any) -> ProviderConfig:
    return ProviderConfig.objects.create(**({"provider_id": "probe", "config": GOOD} | values))


def raw_columns() -> list[bytes]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT config FROM providers_providerconfig ORDER BY id")
        return [bytes(row[0]) for row in cursor.fetchall()]


def assert_ciphertext(*configs: dict[str, Any]) -> None:
    """The rows hold exactly `configs`, and raw SQL shows none of it."""
    field = ProviderConfig._meta.get_field("config")
    columns = raw_columns()
    for column in columns:
        assert column.startswith(b"A256GCM1")
        assert b"tok-" not in column
    assert [field.from_db_value(column, None, connection) for column in columns] == list(configs)
    assert [row.config for row in ProviderConfig.objects.order_by("pk")] == list(configs)


def test_save_stores_ciphertext() -> None:
    row = make()
    assert_ciphertext(GOOD)
    row.config = GOOD | {"size": 5}
    row.save()
    assert_ciphertext(GOOD | {"size": 5})


def test_bulk_create_stores_ciphertext() -> None:
    ProviderConfig.objects.bulk_create(
        [ProviderConfig(provider_id=name, config={"token": f"tok-{name}"}) for name in ("a", "b")]
    )
    assert_ciphertext({"token": "tok-a"}, {"token": "tok-b"})


def test_bulk_update_stores_ciphertext_of_each_value() -> None:
    rows = [make(provider_id="a"), make(provider_id="b")]
    for row in rows:
        row.config = {"token": f"tok-{row.provider_id}"}
    ProviderConfig.objects.bulk_update(rows, ["config"])
    assert_ciphertext({"token": "tok-a"}, {"token": "tok-b"})


def test_update_stores_ciphertext() -> None:
    make()
    ProviderConfig.objects.update(config={"token": "tok-new"})
    assert_ciphertext({"token": "tok-new"})


def test_update_from_another_column_copies_its_ciphertext() -> None:
    make()
    before = raw_columns()
    ProviderConfig.objects.update(config=F("config"))
    assert raw_columns() == before


def test_json_types_survive() -> None:
    config = {"a": True, "b": None, "c": 1.5, "d": 10**30, "e": {"f": ["ü", "\ud800", "\0"]}}
    make(config=config)
    assert ProviderConfig.objects.get().config == config


@pytest.mark.parametrize("value", [[1], "text", 5, {"a": float("nan")}])
def test_what_is_no_json_object_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)), transaction.atomic():
        make(config=value)
    assert not ProviderConfig.objects.exists()


def test_an_encrypted_column_cannot_be_searched() -> None:
    with pytest.raises(FieldError, match="does not support lookups"):
        ProviderConfig.objects.filter(config={"a": 1}).exists()


def test_a_lost_key_names_the_setting_and_spares_the_list(settings: Any) -> None:
    make()
    settings.FERNET_KEYS = ["another key"]
    with pytest.raises(DecryptionError, match=r"ProviderConfig\.config .* FERNET_KEYS") as caught:
        ProviderConfig.objects.get()
    assert TOKEN not in str(caught.value)
    assert ProviderConfig.objects.defer("config").get().provider_id == "probe"


def test_an_old_key_behind_the_new_one_still_decrypts(settings: Any) -> None:
    make()
    settings.FERNET_KEYS = ["another key", *settings.FERNET_KEYS]
    assert ProviderConfig.objects.get().config == GOOD


@pytest.mark.parametrize("keys", [None, []])
def test_nothing_is_encrypted_with_the_secret_key(settings: Any, keys: Any) -> None:
    settings.FERNET_KEYS = keys
    with pytest.raises(ImproperlyConfigured, match="FERNET_KEYS"), transaction.atomic():
        make()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (None, "providers.E001"),
        ([], "providers.E001"),
        ("one long key", "providers.E002"),
        (["good", " "], "providers.E003"),
        (["too short"], "providers.W001"),
    ],
)
def test_the_system_check_refuses_missing_keys(settings: Any, keys: Any, expected: str) -> None:
    assert not [found for found in run_checks() if found.id.startswith("providers.")]
    settings.FERNET_KEYS = keys or []
    if keys is None:
        del settings.FERNET_KEYS
    from providers.checks import check_fernet_keys

    assert [found.id for found in check_fernet_keys()] == [expected]


@pytest.mark.parametrize("form", ["json", "xml", "jsonl"])
def test_a_fixture_holds_ciphertext_and_loads_again(form: str, tmp_path: Path) -> None:
    make()
    fixture = tmp_path / f"dump.{form}"
    call_command("dumpdata", "providers", format=form, output=str(fixture), verbosity=0)
    assert "tok-" not in fixture.read_text()
    assert "aes256gcm:QTI1NkdDTT" in fixture.read_text()
    ProviderConfig.objects.all().delete()
    call_command("loaddata", str(fixture), verbosity=0)
    assert_ciphertext(GOOD)


def test_a_fixture_of_another_key_does_not_load(settings: Any, tmp_path: Path) -> None:
    make()
    fixture = tmp_path / "dump.json"
    call_command("dumpdata", "providers", output=str(fixture), verbosity=0)
    settings.FERNET_KEYS = ["another key"]
    with pytest.raises(Exception, match="FERNET_KEYS"):
        call_command("loaddata", str(fixture), verbosity=0)


def test_cleaning_a_value_never_decrypts_it() -> None:
    row = make()
    token = "aes256gcm:" + base64.b64encode(raw_columns()[0]).decode()
    assert ProviderConfig._meta.get_field("config").clean(token, row) == token


def test_no_representation_shows_the_configuration() -> None:
    row = make()
    assert str(row) == "probe"
    shown = f"{row!r} {row} {ProviderConfig.objects.all()!r} {[row]}"
    assert TOKEN not in shown
    assert "http://a" not in shown


def test_at_most_one_row_is_active() -> None:
    make(provider_id="a", is_active=True)
    make(provider_id="b")
    with pytest.raises(IntegrityError), transaction.atomic():
        make(provider_id="c", is_active=True)
    with pytest.raises(IntegrityError), transaction.atomic():
        ProviderConfig.objects.filter(provider_id="b").update(is_active=True)


def test_a_provider_has_one_configuration() -> None:
    make()
    with pytest.raises(IntegrityError), transaction.atomic():
        make()


def test_saving_the_model_takes_a_new_version_even_from_a_stale_copy() -> None:
    row = make()
    stale = ProviderConfig.objects.get()
    row.config = GOOD | {"size": 1}
    row.save()
    stale.config = GOOD | {"size": 2}
    stale.save(update_fields=["config"])
    assert (row.version, stale.version, ProviderConfig.objects.get().version) == (2, 3, 3)


def test_saving_other_columns_keeps_the_version() -> None:
    make()
    row = ProviderConfig.objects.defer("config").get()
    row.save()
    row.save(update_fields=["is_active"])
    assert ProviderConfig.objects.get().version == 1


def test_save_config_validates_and_fills_in_defaults() -> None:
    row = save_config("probe", GOOD)
    assert (row.version, row.is_active) == (1, False)
    assert row.config["size"] == 10
    with pytest.raises(InvalidConfiguration) as caught:
        save_config("probe", GOOD | {"size": True, "memory": "2g"})
    assert set(caught.value.errors) == {"size", "memory"}
    assert ProviderConfig.objects.get().version == 1


def test_save_config_asks_the_provider_too() -> None:
    with pytest.raises(InvalidConfiguration, match="HTTP address"):
        save_config("probe", GOOD | {"endpoint": "ftp://a"})
    assert not ProviderConfig.objects.exists()


def test_save_config_refuses_an_unknown_provider() -> None:
    with pytest.raises(InvalidConfiguration, match="nope"):
        save_config("nope", {})


def test_each_change_is_a_version_and_no_change_is_none() -> None:
    save_config("probe", GOOD)
    assert save_config("probe", GOOD | {"size": 5}).version == 2
    assert save_config("probe", GOOD | {"size": 5}).version == 2
    assert save_config("probe", GOOD | {"size": 6}).version == 3


@pytest.mark.parametrize("posted", [{}, {"token": ""}, {"token": "••••wxyz"}])
def test_an_untouched_secret_is_kept(posted: dict[str, Any]) -> None:
    save_config("probe", GOOD)
    row = save_config("probe", {"endpoint": "HTTP://A:80/", "size": 5, **posted})
    assert (row.config["size"], row.config["token"]) == (5, TOKEN)


def test_a_secret_is_removed_only_by_name() -> None:
    save_config("probe", GOOD | {"proxy_password": "pass-word"})
    assert save_config("probe", GOOD).config["proxy_password"] == "pass-word"
    assert save_config("probe", GOOD, clear=["proxy_password"]).config["proxy_password"] is None
    with pytest.raises(InvalidConfiguration) as caught:
        save_config("probe", {"endpoint": "http://a"}, clear=["token"])
    assert caught.value.errors == {"token": "This field is required."}


def test_the_second_of_two_admins_gets_a_conflict() -> None:
    version = save_config("probe", GOOD).version
    save_config("probe", GOOD | {"size": 1}, expected_version=version)
    with pytest.raises(ConfigurationConflict, match="Another user changed"):
        save_config("probe", GOOD | {"size": 2}, expected_version=version)
    assert ProviderConfig.objects.get().config["size"] == 1


def just_before_the_update(change: Callable[[], Any]) -> Any:
    """Have somebody else make `change` after all was read and before the first UPDATE."""
    pending = [change]

    def intrude(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and pending:
            pending.pop()()
        return execute(sql, params, many, context)

    return connection.execute_wrapper(intrude)


def test_a_change_between_reading_and_writing_is_not_overwritten() -> None:
    save_config("probe", GOOD)
    other = {"config": GOOD | {"size": 1}, "version": 2}
    with (
        just_before_the_update(lambda: ProviderConfig.objects.update(**other)),
        pytest.raises(ConfigurationConflict),
    ):
        save_config("probe", GOOD | {"size": 2})
    assert ProviderConfig.objects.get().config["size"] == 1


def test_what_is_activated_is_what_was_validated() -> None:
    save_config("local", {})
    activate("local")
    save_config("probe", GOOD)
    other = {"config": {"endpoint": "nobody checked this"}, "version": 2}
    probe = ProviderConfig.objects.filter(provider_id="probe")
    with (
        just_before_the_update(lambda: probe.update(**other)),
        pytest.raises(ConfigurationConflict),
    ):
        activate("probe")
    assert ProviderConfig.objects.get(is_active=True).provider_id == "local"


def test_a_first_configuration_conflicts_with_another_first_one() -> None:
    save_config("probe", GOOD, expected_version=0)
    with pytest.raises(ConfigurationConflict):
        save_config("probe", GOOD | {"size": 2}, expected_version=0)


def test_a_deleted_configuration_conflicts_with_its_change() -> None:
    version = save_config("probe", GOOD).version
    ProviderConfig.objects.all().delete()
    with pytest.raises(ConfigurationConflict):
        save_config("probe", GOOD, expected_version=version)


def test_what_cannot_be_decrypted_is_replaced_by_nothing(settings: Any) -> None:
    save_config("probe", GOOD)
    given = settings.FERNET_KEYS
    settings.FERNET_KEYS = ["another key"]
    complete = {"endpoint": "http://b", "token": "tok-again"}
    for config in ({"endpoint": "http://b"}, complete):
        with pytest.raises(InvalidConfiguration, match=r"was not changed.*FERNET_KEYS"):
            save_config("probe", config)
    settings.FERNET_KEYS = given
    assert ProviderConfig.objects.get().config["token"] == TOKEN


def test_whoever_removes_it_says_that_its_key_is_lost(settings: Any) -> None:
    save_config("probe", GOOD)
    settings.FERNET_KEYS = ["another key"]
    remove_config(ProviderConfig.objects.defer("config").get())
    row = save_config("probe", {"endpoint": "http://b", "token": "tok-again"})
    assert row.config["token"] == "tok-again"


def test_activating_one_provider_deactivates_the_other() -> None:
    save_config("local", {})
    save_config("probe", GOOD)
    assert activate("local").is_active
    assert activate("probe").is_active
    assert ProviderConfig.objects.get(is_active=True).provider_id == "probe"


def test_activation_needs_a_stored_configuration() -> None:
    with pytest.raises(InvalidConfiguration, match="no configuration yet"):
        activate("probe")


def test_activation_needs_a_configuration_that_fits_the_schema_of_today() -> None:
    save_config("local", {})
    activate("local")
    make(config={"endpoint": "http://a", "token": TOKEN, "dropped_option": 1})
    with pytest.raises(InvalidConfiguration) as caught:
        activate("probe")
    assert caught.value.errors == {"dropped_option": "Unknown field."}
    assert ProviderConfig.objects.get(is_active=True).provider_id == "local"


def test_activation_needs_the_key(settings: Any) -> None:
    make()
    settings.FERNET_KEYS = ["another key"]
    with pytest.raises(InvalidConfiguration, match="FERNET_KEYS"):
        activate("probe")


def test_the_serialized_list_of_configurations_is_not_plain_text() -> None:
    make()
    out = io.StringIO()
    call_command("dumpdata", "providers", stdout=out)
    assert TOKEN not in out.getvalue()
    assert json.loads(out.getvalue())[0]["fields"]["provider_id"] == "probe"
