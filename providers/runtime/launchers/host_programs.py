"""What launchers have in common that give sandboxes this machine's own programs to run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from providers.languages import OURS, version_of
from providers.runtime.launchers.guest_files import (
    INSIDE,
    PACKAGE,
    find_program,
    find_python,
    hidden_folders,
    install_guest,
)
from providers.runtime.pool.cgroup import CgroupParent
from providers.runtime.pool.launcher import Launcher


class HostProgramsLauncher(Launcher):
    """Knows the programs, the guest's files and the group that sandboxes are in."""

    def __init__(self, runtime: str, data_dir: Path, python: str, rest_seconds: float) -> None:
        self.runtime = runtime
        self.rest_seconds = rest_seconds
        self.enforced_by: dict[str, str] = {}
        self._data_dir = data_dir
        self._chosen = python
        self._python = ""
        self._hidden: list[Path] = []
        self._guest_dir = Path()
        self._cgroups: CgroupParent | None = None
        self._folder: Path | None = None
        self._folder_held = -1

    def _find_programs(self) -> None:
        """Raises ProviderUnavailable where there is no Python for sandboxes."""
        self._python = find_python(self._chosen)
        self._hidden = hidden_folders(self._python, self._data_dir)
        self._guest_dir = install_guest(self._python, self._data_dir / "run", self._hidden)

    def _make_folder(self) -> None:
        """One for the tool's files, ours as long as we live; those of killed processes are removed.

        Of each launcher's own, as the one it replaces may still be running what it has.
        """
        run = self._data_dir / "run"
        making = _lock(run, fcntl.LOCK_EX)
        try:
            for path in run.glob(f"{self.runtime}-*-*"):
                _remove_unheld(path)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{self.runtime}-{os.getpid()}-", dir=run))
            self._folder_held = _lock(self._folder, fcntl.LOCK_EX)
        finally:
            os.close(making)

    def _remove_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._folder_held >= 0:
            os.close(self._folder_held)
            self._folder_held = -1

    def languages(self) -> list[str]:
        return [name for name in OURS if self.interpreter(name)]

    def interpreter(self, language: str, template: str = "") -> str | None:
        if language == "python":
            return self._python
        return find_program(language, self._hidden)

    def version(self, language: str, template: str) -> str:
        return version_of(language, self.interpreter(language) or "")

    def node_runner(self) -> list[str]:
        return [f"{INSIDE}/{PACKAGE}/node_runner.js"]

    def hurry(self, *, is_wanted: bool) -> None:
        if self._cgroups:
            self._cgroups.hurry(is_wanted=is_wanted)


def _lock(folder: Path, how: int) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, how)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _remove_unheld(folder: Path) -> None:
    try:
        handle = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
