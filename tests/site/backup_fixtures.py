"""An installation that a module's tests back up, and its backup."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.backups import SCRIPT, manage, succeeded


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two executions and their artifacts."""
    require("bwrap")
    folder = tmp_path_factory.mktemp("installation")
    data_dir = folder / "data"
    succeeded(manage(data_dir, "bootstrap"))
    (folder / "script.py").write_text(SCRIPT)
    for _ in range(2):
        succeeded(manage(data_dir, "execute", str(folder / "script.py"), "--language", "python"))
    return data_dir


@pytest.fixture
def data_dir(installation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(installation, tmp_path / "data"))


@pytest.fixture(scope="module")
def archive(installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("backups") / "backup.tar"
    succeeded(manage(installation, "backup", str(target)))
    return target
