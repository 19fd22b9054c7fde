"""An installation that a module's tests back up, and its backup."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support import backups
from tests.support.backups import SCRIPT, manage, succeeded
from tests.support.site import NO_SOCKETS, kept_folder, prepare


@pytest.fixture(scope="session")
def backed_up() -> Path:
    """A folder with `data`, a data directory with two executions and their artifacts, and
    `backup.tar` of it. The same for all: a test that changes it has a copy."""
    require("bwrap")
    return kept_folder("backed-up", _back_up, Path(backups.__file__), Path(__file__))


def _back_up(folder: Path) -> None:
    data_dir = folder / "data"
    prepare(data_dir)
    (folder / "script.py").write_text(SCRIPT)
    for _ in range(2):
        succeeded(manage(data_dir, "execute", str(folder / "script.py"), "--language", "python"))
    succeeded(manage(data_dir, "backup", str(folder / "backup.tar")))


@pytest.fixture
def installation(backed_up: Path) -> Path:
    return backed_up / "data"


@pytest.fixture
def data_dir(installation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(installation, tmp_path / "data", ignore=NO_SOCKETS))


@pytest.fixture
def archive(backed_up: Path) -> Path:
    return backed_up / "backup.tar"
