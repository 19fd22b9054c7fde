"""Preparing a data directory: everything once, nothing twice."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import authenticate, get_user_model
from django.core.management import call_command
from django_q.models import Schedule

from executions.tenants import keys as api_keys
from executions.tenants.models import Tenant
from providers.models import ConfigVersion, ProviderConfig
from providers.runtime.service.docker_check import Docker, find_docker
from providers.services import activate
from sandbox_site import bootstrap as bootstrap_module
from sandbox_site import keys
from sandbox_site.bootstrap import CREDENTIALS, ensure_accounts, ensure_provider
from tests.support.processes import NO_DOCKER, ROOT, clean_environment


def bootstrap(data_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "bootstrap"],
        env=clean_environment(data_dir),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.database
@pytest.mark.django_db
def test_the_first_accounts_work_and_are_kept_for_their_owner_only(tmp_path: Path) -> None:
    created = ensure_accounts(tmp_path)
    user = authenticate(username=created["ADMIN_USER"], password=created["ADMIN_PASSWORD"])
    assert user is not None
    assert user.is_superuser
    assert api_keys.authenticate(created["API_KEY"]).tenant.slug == "demo"
    kept = tmp_path / CREDENTIALS
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert dict(line.split("=", 1) for line in kept.read_text().splitlines()) == created


@pytest.mark.database
@pytest.mark.django_db
def test_nothing_is_created_twice(tmp_path: Path) -> None:
    ensure_accounts(tmp_path)
    kept = (tmp_path / CREDENTIALS).read_text()
    assert ensure_accounts(tmp_path) == {}
    assert (tmp_path / CREDENTIALS).read_text() == kept
    assert get_user_model().objects.count() == Tenant.objects.count() == 1


@pytest.mark.database
@pytest.mark.django_db
def test_a_deleted_demo_tenant_does_not_come_back_beside_others(tmp_path: Path) -> None:
    ensure_accounts(tmp_path)
    Tenant.objects.create(slug="real", name="Real")
    Tenant.objects.get(slug="demo").delete()
    assert ensure_accounts(tmp_path) == {}


@pytest.mark.database
@pytest.mark.django_db
def test_a_new_administrator_is_added_to_the_kept_credentials(tmp_path: Path) -> None:
    first = ensure_accounts(tmp_path)
    get_user_model().objects.all().delete()
    second = ensure_accounts(tmp_path)
    assert set(second) == {"ADMIN_USER", "ADMIN_PASSWORD"}
    text = (tmp_path / CREDENTIALS).read_text()
    assert first["API_KEY"] in text
    assert second["ADMIN_PASSWORD"] in text


@pytest.mark.database
@pytest.mark.django_db
def test_local_runs_the_code_until_another_provider_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    ensure_provider()
    ensure_provider()
    assert ProviderConfig.objects.get().provider_id == "local"
    other = ProviderConfig.objects.create(provider_id="other", config={})
    ProviderConfig.objects.filter(provider_id="local").update(is_active=False)
    ProviderConfig.objects.filter(pk=other.pk).update(is_active=True)
    ensure_provider()
    assert ProviderConfig.objects.get(is_active=True).provider_id == "other"


@pytest.mark.database
@pytest.mark.django_db
def test_a_pool_service_on_another_machine_runs_the_code(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    settings.POOL_HOST, settings.POOL_TOKEN = "pool", "a token"
    settings.PROVIDER_ALLOWED_NETWORKS = settings.PROVIDER_PLAIN_HTTP = ["pool:9385"]
    ensure_provider()
    row = ProviderConfig.objects.get(is_active=True)
    assert row.provider_id == "self_managed"
    assert row.config["endpoint"] == "http://pool:9385"
    assert row.config["token"] == "a token"
    settings.POOL_HOST = "127.0.0.1"
    ensure_provider()
    assert ProviderConfig.objects.get(is_active=True).provider_id == "local"


@pytest.mark.database
@pytest.mark.django_db
def test_a_pool_service_on_another_machine_has_the_images_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    settings.POOL_HOST, settings.POOL_TOKEN = "pool", "a token"
    settings.PROVIDER_ALLOWED_NETWORKS = settings.PROVIDER_PLAIN_HTTP = ["pool:9385"]
    settings.POOL_IMAGES = {"python": "registry.example/python:1", "nodejs": ""}
    ensure_provider()
    config = ProviderConfig.objects.get(is_active=True).config
    assert config["base_python_image"] == "registry.example/python:1"
    assert not config.get("base_nodejs_image")


@pytest.mark.database
@pytest.mark.django_db
def test_a_change_of_the_provider_is_told_and_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when images were built, or the engine went away, between two starts."""
    found = [Docker.ABSENT]
    monkeypatch.setattr(bootstrap_module, "find_docker", lambda: found[0])
    assert ensure_provider() == ""
    found[0] = Docker.READY
    told = ensure_provider()
    assert "provider self_managed, no longer at local" in told
    assert "No provider was chosen" in told
    assert ConfigVersion.objects.filter(subject="self_managed").latest("version").reason in told
    assert ensure_provider() == ""
    # A service that may not ask the engine knows nothing better.
    found[0] = Docker.FORBIDDEN
    assert ensure_provider() == ""
    assert ProviderConfig.objects.get(is_active=True).provider_id == "self_managed"
    found[0] = Docker.ABSENT
    assert "provider local, no longer at self_managed" in ensure_provider()
    # Somebody has chosen.
    activate("local", author="alice")
    found[0] = Docker.READY
    assert ensure_provider() == ""
    assert ProviderConfig.objects.get(is_active=True).provider_id == "local"


def test_an_engine_that_this_user_may_not_ask_is_no_absent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    assert find_docker() is Docker.ABSENT
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert find_docker() is Docker.FORBIDDEN


def test_migrating_a_fresh_folder_first_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    migrate = [sys.executable, "manage.py", "migrate"]
    environment = clean_environment(tmp_path)
    # It says what is missing, and leaves a database without a table.
    assert subprocess.run(migrate, env=environment, cwd=ROOT, capture_output=True).returncode == 1
    assert (tmp_path / "cofferdam.sqlite3").exists()
    first = bootstrap(tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("Created, and shown only this once:")
    # With the keys in the environment it makes the tables, which nothing is in.
    other = tmp_path / "other"
    other.mkdir()
    names = ("SECRET_KEY", "FERNET_KEYS", "LEDGER_KEYS")
    given = clean_environment(other, **{name: secrets.token_urlsafe(32) for name in names})
    assert subprocess.run(migrate, env=given, cwd=ROOT, capture_output=True).returncode == 0
    assert bootstrap(other).returncode == 0
    # From then on there is something that new keys would not open.
    (tmp_path / keys.FILE_NAME).unlink()
    assert "Restore the file" in bootstrap(tmp_path).stderr


def test_the_command_shows_the_credentials_once_and_keeps_the_keys(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    first = bootstrap(data_dir)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("Created, and shown only this once:")  # nothing is from before
    generated = (data_dir / keys.FILE_NAME).read_text()
    for line in (data_dir / CREDENTIALS).read_text().splitlines():
        assert line in first.stdout
    second = bootstrap(data_dir)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert (data_dir / keys.FILE_NAME).read_text() == generated
    assert stat.S_IMODE((data_dir / keys.FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700


def test_a_database_does_not_get_new_keys_when_its_own_are_gone(tmp_path: Path) -> None:
    (tmp_path / "cofferdam.sqlite3").touch()
    refused = bootstrap(tmp_path)
    assert refused.returncode == 1
    assert "Restore the file" in refused.stderr
    assert not (tmp_path / keys.FILE_NAME).exists()


def test_generated_keys_differ_between_installations_and_stay(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there, here):
        place.mkdir(exist_ok=True)
        keys.create(place)
    assert set(keys.read(here)) == {"SECRET_KEY", "FERNET_KEYS", "LEDGER_KEYS"}
    assert not set(keys.read(here).values()) & set(keys.read(there).values())
    assert [path.name for path in here.iterdir()] == [keys.FILE_NAME]


@pytest.mark.database
@pytest.mark.django_db
def test_what_is_due_is_done_from_the_first_start_on() -> None:
    call_command("bootstrap", stdout=StringIO())
    call_command("bootstrap", stdout=StringIO())
    assert sorted(task.func for task in Schedule.objects.all()) == [
        "executions.tasks.apply_retention",
        "executions.tasks.begin_schedules",
        "executions.tasks.build_templates",
        "executions.tasks.check_ledger",
        "executions.tasks.collect_blobs",
        "executions.tasks.discard_unfinished_uploads",
        "executions.tasks.end_stale_executions",
        "executions.tasks.export_ledger",
        "executions.tasks.export_metrics",
        "executions.tasks.follow_credential_sources",
        "executions.tasks.forget_events",
        "executions.tasks.give_space_back",
        "executions.tasks.index_new_code",
        "executions.tasks.make_reports",
        "executions.tasks.remove_tenants",
        "executions.tasks.remove_unused_templates",
        "executions.tasks.tend_sessions",
        "executions.tasks.tend_webhooks",
        "executions.tasks.watch_alerts",
        "executions.tasks.watch_spending",
        "executions.tasks.write_ledger_checkpoint",
        "providers.tasks.check_health",
        "providers.tasks.sweep_leftovers",
    ]
