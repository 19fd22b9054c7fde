"""The commands work wherever whoever calls them stands, as a systemd unit without a folder does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.processes import ROOT, clean_environment, free_port, started
from tests.support.site import prepare

MANAGE = str(ROOT / "manage.py")
SLASH = Path("/")


def manage(data_dir: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, MANAGE, *arguments],
        env=clean_environment(data_dir),
        cwd=SLASH,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_and_the_service_run_code(tmp_path: Path) -> None:
    require("bwrap")
    data_dir = tmp_path / "data"
    prepare(data_dir)
    # It has nothing left to do, and finds all of it.
    manage(data_dir, "bootstrap")
    manage(data_dir, "check")
    key = manage(data_dir, "create_api_key", "demo", "--name", "any").strip()
    script = tmp_path / "script.py"
    script.write_text("print(6 * 7)\n")
    assert "42" in manage(data_dir, "execute", str(script))
    environment = clean_environment(data_dir, PORT=str(free_port()))
    with started([sys.executable, MANAGE, "up"], environment, SLASH, tmp_path / "log") as service:
        service.wait_until_ready()
        for mode, expected in (("sync", 200), ("async", 202)):
            request = urllib.request.Request(
                f"{service.url}/api/v1/executions",
                data=json.dumps({"code": "print(6 * 7)", "mode": mode}).encode(),
                headers={"X-API-Key": key, "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == expected
        service.look()
        os.killpg(service.process.pid, signal.SIGINT)
        service.wait_for_end()
        assert service.survivors() == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("DATABASE_URL", "sqlite:///records.sqlite3", "DATABASES['default']['NAME']"),
        ("LEDGER_CHECKPOINTS", "checkpoints", "LEDGER_CHECKPOINTS"),
        ("FERNET_KEYS_FILE", "manage.py", "FERNET_KEYS_FILE.path"),
    ],
)
def test_a_path_in_a_setting_starts_from_the_projects_folder(
    tmp_path: Path, name: str, value: str, shown: str
) -> None:
    """Whoever starts a process is not always whoever wrote the setting."""
    code = f"from sandbox_site import settings; print(settings.{shown})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(tmp_path, PYTHONPATH=str(ROOT)) | {name: value},
        cwd=SLASH,
        capture_output=True,
        text=True,
        check=False,
    )
    assert Path(done.stdout.strip()) == ROOT / value.removeprefix("sqlite:///"), done.stderr


def test_make_may_be_told_the_folder(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["make", "-C", str(ROOT), "help"],
        env=clean_environment(tmp_path),
        cwd=SLASH,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "make run " in listed.stdout
