"""`manage.py settings`: values, where they come from, and no secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_site.environment import StrictEnv
from sandbox_site.settings_page import rows
from sandbox_site.settings_table import SETTINGS
from tests.support.processes import ROOT, clean_environment


def listed(data_dir: Path, *arguments: str, **environment: str) -> dict[str, tuple[str, str]]:
    """The value and the source of each setting that the command prints."""
    printed = subprocess.run(
        [sys.executable, "manage.py", "settings", *arguments],
        env=clean_environment(data_dir, **environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {}
    for line in printed.splitlines():
        name, _, rest = line.partition(" ")
        source = next(
            each for each in ("environment", ".env file", "default") if rest.endswith(f" {each}")
        )
        found[name] = (rest.removesuffix(source).strip(), source)
    return found


def test_every_setting_is_listed_with_its_value_and_source(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.touch(0o600)
    file.write_text("PORT=8123\nTIME_ZONE=Europe/Oslo\nPOOL_TOKEN=tok-in-the-file\n")
    found = listed(
        tmp_path,
        ENV_FILE=str(file),
        PORT="8124",
        HTTPS_ONLY="1",
        SANDBOX_MAX_TIMEOUT_SEC="10",
        METRICS_TOKEN="a-token-of-the-environment",
    )
    assert found.keys() == SETTINGS.keys()
    assert found["DATA_DIR"] == (str(tmp_path), "environment")
    assert found["PORT"] == ("8124", "environment")
    assert found["HTTPS_ONLY"] == ("true", "environment")
    assert found["TIME_ZONE"] == ("Europe/Oslo", ".env file")
    assert found["POOL_TOKEN"] == ("set", ".env file")
    assert found["METRICS_TOKEN"] == ("set", "environment")
    assert found["SECRET_KEY"] == ("generated", "default")
    assert found["REDIS_URL"] == ("not set", "default")
    # In force, not only declared.
    assert found["SANDBOX_TIMEOUT_SEC"] == ("10", "default")
    assert found["WEB_THREADS"] == ("16", "default")


def test_only_those_that_differ_from_the_default_are_listed_if_that_is_asked(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("tok-in-a-file-of-its-own")
    found = listed(
        tmp_path,
        "--changed",
        PORT="8000",
        HOST="",
        SANDBOX_TIMEOUT_SEC="7",
        ALLOW_PRIVATE_URLS="off",
        ALERT_EMAILS="",
        POOL_TOKEN_FILE=str(token),
    )
    expected = {"SANDBOX_TIMEOUT_SEC", "POOL_TOKEN", "DATA_DIR", "ENV_FILE", "DOCKER_HOST"}
    assert found.keys() == expected
    assert found["POOL_TOKEN"] == ("set", "environment")


def test_no_secret_is_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {setting.name for setting in SETTINGS.values() if setting.is_secret}
    for name in names:
        monkeypatch.setenv(name, "hidden-in-no-row")
    found = {row.name: row for row in rows(StrictEnv())}
    assert {found[name].value for name in names} == {"set"}
    assert all(found[name].is_changed for name in names)
    assert "hidden-in-no-row" not in repr(found)


def test_the_page_of_the_settings_is_printed(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "manage.py", "settings", "--markdown"],
        env=clean_environment(tmp_path, PORT="8124"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_what_no_process_would_start_with_is_not_listed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "settings"],
        env=clean_environment(tmp_path, PORT="http"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "Configuration: PORT: 'http' is not a whole number. Correct it, or remove it: the default "
        "is 8000\n"
    )


def test_an_address_that_is_not_in_force_is_not_printed(tmp_path: Path) -> None:
    found = listed(
        tmp_path,
        OTEL_SDK_DISABLED="true",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://user:pass-of-it@collector.internal:4318",
    )
    assert found["OTEL_EXPORTER_OTLP_ENDPOINT"] == ("set, not active", "environment")
