"""`rotate_keys` moves every encrypted value to the newest key and loses none."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from providers import aes_gcm
from providers.models import ProviderConfig
from providers.services import encrypted_fields, rotate, rotation

pytestmark = [pytest.mark.django_db, pytest.mark.database]

CONTEXT = "providers_providerconfig.config"
OLD, NEW = "the old key", "the new key"


def run(*arguments: str) -> tuple[str, str]:
    out, progress = StringIO(), StringIO()
    call_command("rotate_keys", *arguments, stdout=out, stderr=progress)
    return out.getvalue(), progress.getvalue()


def columns(printed: str) -> dict[str, Any]:
    return {
        f"{entry['model']}.{entry['column']}": entry for entry in json.loads(printed)["columns"]
    }


@pytest.fixture
def rows(settings: Any) -> list[ProviderConfig]:
    """Three rows written under the old key; the new key is first now."""
    settings.FERNET_KEYS = [OLD]
    made = [
        ProviderConfig.objects.create(provider_id=name, config={"token": f"tok-{name}"})
        for name in ("a", "b", "c")
    ]
    settings.FERNET_KEYS = [NEW, OLD]
    return made


def tokens() -> list[bytes]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT config FROM providers_providerconfig ORDER BY id")
        return [bytes(row[0]) for row in cursor.fetchall()]


def test_afterwards_the_old_key_is_not_needed(rows: list[ProviderConfig], settings: Any) -> None:
    run()
    settings.FERNET_KEYS = [NEW]
    found = {row.provider_id: row.config for row in ProviderConfig.objects.all()}
    assert found == {name: {"token": f"tok-{name}"} for name in ("a", "b", "c")}


def test_a_rotation_is_no_new_version(rows: list[ProviderConfig]) -> None:
    before = list(ProviderConfig.objects.values_list("version", "updated_at"))
    run()
    assert list(ProviderConfig.objects.values_list("version", "updated_at")) == before


def test_the_second_run_finds_everything_done(rows: list[ProviderConfig]) -> None:
    entry = columns(run("--json")[0])["providers.ProviderConfig.config"]
    assert (entry["rotated"], entry["current"], entry["failed"]) == (3, 0, [])
    once = tokens()
    entry = columns(run("--json")[0])["providers.ProviderConfig.config"]
    assert (entry["rotated"], entry["current"]) == (0, 3)
    assert tokens() == once


def test_a_dry_run_counts_and_changes_nothing(rows: list[ProviderConfig]) -> None:
    before = tokens()
    printed, _ = run("--dry-run", "--json")
    assert json.loads(printed)["dry_run"] is True
    assert columns(printed)["providers.ProviderConfig.config"]["rotated"] == 3
    assert tokens() == before
    assert "nothing was changed" in run("--dry-run")[0]


def test_a_row_no_key_decrypts_is_named_and_the_others_rotate(
    rows: list[ProviderConfig], settings: Any
) -> None:
    settings.FERNET_KEYS = ["a key nobody has"]
    foreign = aes_gcm.seal(settings.FERNET_KEYS, CONTEXT, b"{}")
    settings.FERNET_KEYS = [NEW, OLD]
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE providers_providerconfig SET config = %s WHERE id = %s", [foreign, rows[1].pk]
        )
    out = StringIO()
    with pytest.raises(CommandError, match=rf"providers\.ProviderConfig {rows[1].pk}\b") as caught:
        call_command("rotate_keys", "--json", stdout=out, stderr=StringIO())
    assert caught.value.returncode == 1
    entry = columns(out.getvalue())["providers.ProviderConfig.config"]
    assert (entry["rotated"], entry["failed"]) == (2, [str(rows[1].pk)])
    settings.FERNET_KEYS = [NEW]
    assert ProviderConfig.objects.get(pk=rows[2].pk).config == {"token": "tok-c"}
    assert tokens()[1] == foreign


def test_progress_is_told_after_each_batch(
    rows: list[ProviderConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "BATCH", 2)
    _, progress = run()
    lines = [line for line in progress.splitlines() if "ProviderConfig.config" in line]
    assert [line.split(": ")[1].split(" rotated")[0] for line in lines] == ["2", "3"]


def test_a_value_written_meanwhile_is_not_overwritten(
    rows: list[ProviderConfig], settings: Any
) -> None:
    """Another process, still with the old key first, saves between our read and our write."""
    pending = [ProviderConfig.objects.filter(pk=rows[0].pk)]

    def write_first(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and pending:
            settings.FERNET_KEYS = [OLD]
            pending.pop().update(config={"token": "tok-meanwhile"})
            settings.FERNET_KEYS = [NEW, OLD]
        return execute(sql, params, many, context)

    with connection.execute_wrapper(write_first):
        run()
    settings.FERNET_KEYS = [NEW]
    assert ProviderConfig.objects.get(pk=rows[0].pk).config == {"token": "tok-meanwhile"}


def test_every_encrypted_column_of_every_app_is_found(settings: Any) -> None:
    found = {f"{model._meta.label}.{column.name}" for model, column in encrypted_fields()}
    assert {"providers.ProviderConfig.config", "executions.Execution.pending"} <= found


def test_what_is_stored_is_under_the_first_key(rows: list[ProviderConfig], settings: Any) -> None:
    field = ProviderConfig._meta.get_field("config")
    result = rotate(ProviderConfig, field, using="default")
    assert result.rotated == 3
    opened = [aes_gcm.unseal([NEW], CONTEXT, token) for token in tokens()]
    assert [json.loads(text)["token"] for text in opened] == [
        "tok-a",
        "tok-b",
        "tok-c",
    ]
