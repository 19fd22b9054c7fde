"""A bound on processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def bound_on_processes(pid: int) -> Iterator[Callable[[str], None]]:
    """Put a process and what it forks into a cgroup; answers what sets its bound."""
    places = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    home = next((place for place in places if (place / "cgroup.procs").exists()), None)
    folder = home / f"cofferdam-test-{os.getpid()}" if home else None
    try:
        assert folder is not None
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(pid))
    except (OSError, AssertionError) as error:
        pytest.skip(f"no cgroup that counts processes can be made here: {error}")
    before = Path(f"/proc/{os.getpid()}/cgroup")
    assert before.exists()

    def bound(most: str) -> None:
        current = int((folder / "pids.current").read_text())
        (folder / "pids.max").write_text(most.replace("now", str(current)))

    try:
        yield bound
    finally:
        (folder / "pids.max").write_text("max")
        for each in (folder / "cgroup.procs").read_text().split():
            (home / "cgroup.procs").write_text(each)  # type: ignore[operator]
        folder.rmdir()
