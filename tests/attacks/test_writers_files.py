"""Whoever else has an account on the machine reads nothing of what the service keeps."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sandbox_site.private_files import is_open_to_others, tighten, write_privately
from tests.conftest import require
from tests.support.processes import ROOT, Service, clean_environment, free_port, started

# Read by sandboxes' users, through a mount: code that is public, below a folder that is closed.
SANDBOX_FOLDERS = ("guest-", "gvisor-")


def open_to_others(folder: Path) -> list[str]:
    found = []
    for place in (folder, *folder.rglob("*")):
        inside = place.relative_to(folder).parts
        if any(part.startswith(SANDBOX_FOLDERS) for part in inside) or place.is_symlink():
            continue
        try:
            mode = stat.S_IMODE(place.lstat().st_mode)
        except FileNotFoundError:
            continue
        if mode & 0o077:
            found.append(f"{'/'.join(inside) or '.'} {mode:o}")
    return found


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """A data directory as an operator may have made it, with what an older version left there."""
    folder = tmp_path / "data"
    (folder / "ledger").mkdir(parents=True)
    (folder / "run").mkdir()
    for place in (folder / "ledger" / "old.jsonl", folder / "run" / "old", folder / "old.log"):
        place.write_text("x")
        place.chmod(0o644)
    for place in (folder, folder / "ledger", folder / "run"):
        place.chmod(0o755)
    return folder


def with_loose_umask(command: list[str]) -> list[str]:
    return ["/bin/sh", "-c", 'umask 022; exec "$@"', "sh", *command]


@pytest.fixture
def service(loose: Path, tmp_path: Path) -> Iterator[Service]:
    require("bwrap")
    elsewhere = tmp_path / "checkpoints"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    environment = clean_environment(loose, PORT=str(free_port()), LEDGER_CHECKPOINTS=str(elsewhere))
    bootstrap = with_loose_umask([sys.executable, "manage.py", "bootstrap"])
    subprocess.run(bootstrap, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert open_to_others(loose) == []
    up = with_loose_umask([sys.executable, "manage.py", "up"])
    with started(up, environment, ROOT, tmp_path / "log") as running:
        running.wait_until_ready(90)
        yield running


def test_nothing_in_the_data_directory_is_open_to_others(
    service: Service, loose: Path, tmp_path: Path
) -> None:
    keys = dict(line.split("=", 1) for line in (loose / "credentials.txt").read_text().splitlines())
    code = "import os\nopen('artifacts/a.txt', 'w').write('kept')\nprint(open('/etc/passwd').read() if os.path.exists('/etc/passwd') else '')"
    request = urllib.request.Request(
        f"{service.url}/api/v1/executions",
        data=json.dumps({"code": code}).encode(),
        headers={"X-API-Key": keys["API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=90) as answered:
        answer: Any = json.load(answered)
    assert (answer["status"], len(answer["artifacts"])) == ("succeeded", 1), answer

    names = {path.name for path in loose.rglob("*")}
    assert {"cofferdam.sqlite3", "cofferdam.sqlite3-wal", "secrets.env", "artifacts"} <= names
    assert open_to_others(loose) == []
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"head.json"}
    assert open_to_others(tmp_path / "checkpoints") == []


def test_what_a_process_of_ours_writes_is_private_from_its_first_byte(tmp_path: Path) -> None:
    """Watched by a thread of another process, which looks much faster than a file is written."""
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    seen: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.0002):
            for name in ("", "-wal", "-shm"):
                with suppress(OSError):
                    seen.add(os.stat(data_dir / f"cofferdam.sqlite3{name}").st_mode & 0o777)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        bootstrap = with_loose_umask([sys.executable, "manage.py", "bootstrap"])
        environment = clean_environment(data_dir)
        subprocess.run(bootstrap, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    finally:
        done.set()
        thread.join()
    assert seen == {0o600}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    outside.chmod(0o644)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    tighten(folder)
    assert outside.stat().st_mode & 0o777 == 0o644


def test_a_database_elsewhere_is_closed_as_well(tmp_path: Path) -> None:
    database = tmp_path / "elsewhere.sqlite3"
    database.touch()
    database.chmod(0o664)
    environment = clean_environment(tmp_path / "data") | {
        "DATABASE_URL": f"sqlite:///{database}",
        "DJANGO_SETTINGS_MODULE": "sandbox_site.settings",
    }
    subprocess.run(
        [sys.executable, "-c", "import sandbox_site.settings"],
        env=environment,
        cwd=ROOT,
        check=True,
    )
    assert database.stat().st_mode & 0o777 == 0o600


def test_a_data_directory_that_stays_open_is_refused(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.core import checks

    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o750)
    settings.DATA_DIR = folder
    assert is_open_to_others(folder)
    assert "sandbox_site.E003" in {message.id for message in checks.run_checks(tags=["security"])}
    before = os.umask(0o022)
    try:
        write_privately(folder)
    finally:
        os.umask(before)
    assert "sandbox_site.E003" not in {
        message.id for message in checks.run_checks(tags=["security"])
    }
