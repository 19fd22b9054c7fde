"""An instance whose keys or files are not the installation's does not start, and says which."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from executions.ledger.append import append
from executions.ledger.models import LedgerEntry
from sandbox_site import installation
from sandbox_site.installation import DoesNotFit, join, refuse_foreign
from sandbox_site.models import InstallationMark
from tests.support.processes import ROOT, clean_environment, free_port
from tests.support.site import NO_SOCKETS, bootstrapped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]

OTHER = "another key that is as long as Django wants its keys to be"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, settings: Any) -> Path:
    """The first instance's."""
    settings.DATA_DIR = tmp_path / "first"
    settings.DATA_DIR.mkdir()
    return tmp_path


def test_marks_are_made_once_and_cannot_be_read_without_the_keys(settings: Any) -> None:
    join()
    join()

    assert set(InstallationMark.objects.values_list("name", flat=True)) == {
        "FERNET_KEYS",
        "SECRET_KEY",
        "STORAGE_URL",
    }
    with connection.cursor() as cursor:
        cursor.execute("SELECT mark FROM sandbox_site_installationmark")
        raw = b"".join(bytes(row[0]) for row in cursor.fetchall())
    assert settings.SECRET_KEY.encode() not in raw
    assert installation._of_secret_key(settings.SECRET_KEY).encode() not in raw


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SECRET_KEY", OTHER),
        ("FERNET_KEYS", [OTHER]),
        ("LEDGER_KEYS", [secrets.token_urlsafe(32)]),
    ],
)
def test_a_foreign_key_is_refused_by_its_name(name: str, value: Any, settings: Any) -> None:
    append("setting", "first", {})
    join()
    setattr(settings, name, value)
    before = LedgerEntry.objects.count()

    for start in (join, refuse_foreign):
        with pytest.raises(DoesNotFit, match=f"^{name}: "):
            start()
    assert installation.problems().startswith(f"{name}: ")
    with pytest.raises(CommandError, match=name):
        call_command("bootstrap")
    assert LedgerEntry.objects.count() == before


def test_keys_of_a_rotation_are_accepted_while_one_of_them_fits(settings: Any) -> None:
    append("setting", "first", {})
    join()
    secret, fernet, ledger = settings.SECRET_KEY, settings.FERNET_KEYS, settings.LEDGER_KEYS
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = OTHER, [secret]
    settings.FERNET_KEYS = [OTHER, *fernet]
    settings.LEDGER_KEYS = [secrets.token_urlsafe(32), *ledger]
    join()

    call_command("rotate_keys")
    append("setting", "second", {})

    settings.SECRET_KEY_FALLBACKS = []
    settings.FERNET_KEYS = [OTHER]
    settings.LEDGER_KEYS = settings.LEDGER_KEYS[:1]
    join()
    settings.FERNET_KEYS = fernet
    with pytest.raises(DoesNotFit, match=r"^FERNET_KEYS"):
        refuse_foreign()


@pytest.mark.parametrize("name", ["FERNET_KEYS", "SECRET_KEY", "STORAGE_URL"])
def test_whoever_changes_a_mark_stops_instances_and_weakens_nothing(name: str) -> None:
    join()
    # Nobody without the keys can write more than another value that was there, or nonsense.
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sandbox_site_installationmark SET mark = %s WHERE name = %s",
            [b"A256GCM1" + os.urandom(60), name],
        )
    with pytest.raises(DoesNotFit, match="accept_installation"):
        refuse_foreign()

    call_command("accept_installation", "FERNET_KEYS", reason="somebody wrote to the database")

    refuse_foreign()
    entry = LedgerEntry.objects.filter(kind="installation").get().stated
    assert (entry["subject"], entry["reason"]) == ("FERNET_KEYS", "somebody wrote to the database")


def test_a_mark_put_in_the_place_of_another_fits_nobody() -> None:
    join()
    marks = {row.name: row.mark for row in InstallationMark.objects.all()}
    InstallationMark.objects.filter(name="SECRET_KEY").update(mark=marks["STORAGE_URL"])
    with pytest.raises(DoesNotFit, match=r"^SECRET_KEY"):
        refuse_foreign()


def test_another_directory_is_noticed_and_a_shared_one_is_not(folder: Path, settings: Any) -> None:
    join()
    first = settings.DATA_DIR
    settings.DATA_DIR = folder / "second"
    settings.DATA_DIR.mkdir()
    for start in (join, refuse_foreign):
        with pytest.raises(DoesNotFit, match=r"^STORAGE_URL: the location in DATA_DIR is empty"):
            start()
    (settings.DATA_DIR / installation.FILE_NAME).write_text("of another installation")
    with pytest.raises(DoesNotFit, match="belongs to another"):
        join()

    call_command("accept_installation", "STORAGE_URL", reason="moved to a new disk")

    refuse_foreign()
    settings.DATA_DIR = first
    with pytest.raises(DoesNotFit, match="belongs to another"):
        refuse_foreign()


def test_a_folder_of_checkpoints_that_is_not_shared_is_noticed(folder: Path, settings: Any) -> None:
    settings.LEDGER_CHECKPOINTS = str(folder / "checkpoints")
    join()
    settings.LEDGER_CHECKPOINTS = str(folder / "others")
    with pytest.raises(DoesNotFit, match=r"^LEDGER_CHECKPOINTS"):
        join()


def test_of_many_first_instances_with_directories_of_their_own_one_starts(
    folder: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes cannot have two settings here, so each thread brings its own directory."""
    places = threading.local()
    monkeypatch.setattr(
        installation, "_places", lambda: iter([("STORAGE_URL", places.mine)]), raising=True
    )
    barrier = threading.Barrier(6)
    outcomes: list[str] = []

    def start(number: int) -> None:
        places.mine = installation.Folder(root=str(folder / f"own {number}"))
        barrier.wait()
        try:
            join()
            outcomes.append("started")
        except DoesNotFit as error:
            outcomes.append(str(error).partition(":")[0])
        finally:
            connections.close_all()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == ["STORAGE_URL"] * 5 + ["started"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a whole installation, as `manage.py bootstrap` makes it."""
    data_dir = tmp_path_factory.mktemp("installation") / "embedded"
    bootstrapped(data_dir)
    return clean_environment(data_dir, PORT=str(free_port()))


def manage(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def entries(environment: dict[str, str]) -> int:
    database = Path(environment["DATA_DIR"]) / "cofferdam.sqlite3"
    with closing(sqlite3.connect(database)) as opened:
        found: int = opened.execute("SELECT COUNT(*) FROM executions_ledgerentry").fetchone()[0]
        return found


@pytest.mark.parametrize("command", ["up", "qcluster", "web", "create_tenant", "execute"])
def test_every_way_to_start_refuses_a_foreign_key(embedded: dict[str, str], command: str) -> None:
    before = entries(embedded)
    foreign = embedded | {"SECRET_KEY": OTHER}
    if command == "web":
        web = [sys.executable, "-m", "gunicorn", "--config", "python:sandbox_site.gunicorn_conf"]
        done = subprocess.run(
            [*web, "--bind", f"127.0.0.1:{embedded['PORT']}", "sandbox_site.asgi:application"],
            env=foreign | {"DJANGO_SETTINGS_MODULE": "sandbox_site.settings"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    else:
        more = {"create_tenant": ["new"], "execute": ["tests/__init__.py"]}.get(command, [])
        done = manage(foreign, command, *more)

    assert done.returncode != 0
    assert "SECRET_KEY: this database is used with another key" in done.stdout + done.stderr
    assert entries(embedded) == before


def test_the_embedded_default_needs_nothing_even_after_its_files_were_moved(
    embedded: dict[str, str], tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(embedded["DATA_DIR"], moved, ignore=NO_SOCKETS)
    (moved / installation.FILE_NAME).unlink()
    environment = embedded | {"DATA_DIR": str(moved)}

    assert manage(environment, "check").returncode == 0
    assert manage(environment, "bootstrap").returncode == 0
    assert (moved / installation.FILE_NAME).exists()


def test_looking_makes_no_database(tmp_path: Path) -> None:
    environment = clean_environment(tmp_path / "new", SECRET_KEY=OTHER, FERNET_KEYS=OTHER * 2)
    environment["LEDGER_KEYS"] = secrets.token_urlsafe(32)
    assert manage(environment, "check").returncode == 0
    assert not (tmp_path / "new" / "cofferdam.sqlite3").exists()
