"""`import_settings` and `export_settings`: the records of a `system_settings.json`."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from providers import registry
from providers.models import ConfigVersion, ProviderConfig
from providers.services import save_config
from tests.support.processes import ROOT
from tests.support.provider_package import Packages, install_probe
from tests.support.settings_files import record

pytestmark = pytest.mark.django_db

EXAMPLE = ROOT / "conf" / "system_settings.json"
TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path / "packages", monkeypatch), f"settings_{tmp_path.name}")
    yield
    registry.refresh()


def imported(tmp_path: Path, *records: dict[str, str]) -> Any:
    file = tmp_path / "system_settings.json"
    file.write_text(json.dumps({"system_settings": records}))
    out = io.StringIO()
    call_command("import_settings", str(file), stdout=out)
    return json.loads(out.getvalue())


def exported(**options: Any) -> dict[str, str]:
    out = io.StringIO()
    call_command("export_settings", stdout=out, **options)
    return {
        entry["name"]: entry["value"] for entry in json.loads(out.getvalue())["system_settings"]
    }


def test_a_file_configures_and_activates(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        record("sandbox.provider_type", "probe"),
        record("sandbox.probe", GOOD | {"size": 20}),
        record("mail.server", "elsewhere"),
    )
    assert done == {"saved": ["probe"], "skipped": {}, "active": "probe"}
    row = ProviderConfig.objects.get()
    assert (row.is_active, row.config["size"], row.config["token"]) == (True, 20, TOKEN)
    version = ConfigVersion.objects.get()
    assert version.author == "command:import_settings"
    assert version.reason == "Imported from system_settings.json."


def test_a_template_nobody_filled_in_is_skipped(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        record("sandbox.provider_type", "local"),
        record("sandbox.local", {"pool_size": 3}),
        record("sandbox.probe", {"endpoint": "", "token": "", "size": 5}),
        record("sandbox.nowhere", {"api_key": ""}),
    )
    assert (done["saved"], done["active"]) == (["local"], "local")
    assert set(done["skipped"]) == {"probe", "nowhere"}
    assert "endpoint, token" in done["skipped"]["probe"]


@pytest.mark.parametrize(
    "records",
    [
        [record("sandbox.probe", GOOD | {"size": 0})],
        [record("sandbox.probe", "{")],
        [record("sandbox.probe", "[]")],
        [record("sandbox.probe", GOOD), record("sandbox.probe", GOOD)],
        [
            record("sandbox.probe", {"endpoint": "", "token": ""}),
            record("sandbox.provider_type", "probe"),
        ],
        [record("sandbox.provider_type", "probe")],
        [{"name": "sandbox.probe", "value": 5}],
        [{"value": "x"}],
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_taken_over(
    tmp_path: Path, records: list[dict[str, str]]
) -> None:
    save_config("local", {"pool_size": 2})
    with pytest.raises(CommandError):
        imported(tmp_path, record("sandbox.local", {"pool_size": 7}), *records)
    assert ProviderConfig.objects.get().config["pool_size"] == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"system_settings": {}}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(CommandError):
        call_command("import_settings", str(file))
    with pytest.raises(CommandError):
        call_command("import_settings", str(tmp_path / "missing.json"))


def test_an_export_is_redacted_and_comes_back_without_loss(tmp_path: Path) -> None:
    save_config("probe", GOOD)
    records = exported()
    assert "••••wxyz" in records["sandbox.probe"]
    assert TOKEN not in json.dumps(records)

    imported(tmp_path, *(record(name, value) for name, value in records.items() if value))
    assert ProviderConfig.objects.get().config["token"] == TOKEN
    assert ConfigVersion.objects.count() == 1


def test_secrets_are_exported_when_asked_for_into_a_file_of_ones_own(tmp_path: Path) -> None:
    save_config("probe", GOOD)
    assert TOKEN in exported(secrets=True)["sandbox.probe"]
    file = tmp_path / "export.json"
    call_command("export_settings", "--secrets", "--output", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert TOKEN in file.read_text()
    with pytest.raises(CommandError, match="exists"):
        call_command("export_settings", "--output", str(file))


def test_a_lost_key_is_an_error_and_no_gap(settings: Any) -> None:
    save_config("probe", GOOD)
    settings.FERNET_KEYS = ["another key"]
    with pytest.raises(CommandError, match="FERNET_KEYS"):
        exported()


def test_the_example_that_is_shipped_imports_as_it_is() -> None:
    out = io.StringIO()
    call_command("import_settings", str(EXAMPLE), stdout=out)
    done = json.loads(out.getvalue())
    assert (done["saved"], done["active"]) == (["self_managed"], "self_managed")
    assert set(done["skipped"]) == {"aliyun_codeinterpreter", "e2b"}
    row = ProviderConfig.objects.get(is_active=True)
    assert (row.config["pool_size"], row.config["max_memory"]) == (20, "512m")


def test_the_example_fits_another_host_once_its_name_is_allowed(
    tmp_path: Path, settings: Any
) -> None:
    text = EXAMPLE.read_text().replace("127.0.0.1:9385", "sandbox-internal:9385")
    file = tmp_path / "system_settings.json"
    file.write_text(text)
    with pytest.raises(CommandError, match=r"sandbox\.self_managed"):
        call_command("import_settings", str(file), stdout=io.StringIO())
    settings.PROVIDER_PLAIN_HTTP = settings.PROVIDER_ALLOWED_NETWORKS = ["sandbox-internal:9385"]
    call_command("import_settings", str(file), stdout=io.StringIO())
    row = ProviderConfig.objects.get(is_active=True)
    assert row.config["endpoint"] == "http://sandbox-internal:9385"
