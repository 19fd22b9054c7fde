"""A file by which one process wakes others."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from executions.kernel.file_watch import FileWatch, touch
from tests.support.processes import ROOT

_TOUCH = """
import sys
from pathlib import Path
from executions.kernel.file_watch import touch
touch(Path(sys.argv[1]))
"""


def is_readable(watch: FileWatch, seconds: float = 0) -> bool:
    return bool(select.select([watch], [], [], seconds)[0])


def test_another_process_that_touches_the_file_wakes_all_that_watch_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "queued"
    watches = [FileWatch(path), FileWatch(path)]
    assert not any(map(is_readable, watches))
    subprocess.run([sys.executable, "-c", _TOUCH, str(path)], cwd=ROOT, check=True, timeout=60)
    assert all(is_readable(watch, 60) for watch in watches)
    watches[0].clear()
    assert [is_readable(watch) for watch in watches] == [False, True]
    for watch in watches:
        watch.close()


def test_a_file_that_is_not_there_is_not_made_by_a_touch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        touch(tmp_path / "queued")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_watched_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        FileWatch(tmp_path / "file" / "queued")
