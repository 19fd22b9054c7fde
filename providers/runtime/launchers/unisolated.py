"""No isolation at all: the explicit opt-out for a developer's own machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from providers.languages import OURS, version_of
from providers.runtime.launchers.guest_files import (
    PACKAGE,
    boot,
    find_program,
    find_python,
    install_guest,
    interpreter_options,
    search_path,
)
from providers.runtime.pool.launcher import (
    Guest,
    Launcher,
    ProcessGuest,
    killed_first,
    start_failure,
)
from providers.runtime.pool.template import Template


class UnisolatedLauncher(Launcher):
    """Runs the guest as an ordinary process of ours. Time, memory and output stay bounded."""

    # The loopback of its sandboxes is the machine's.
    has_network = False

    def __init__(self, data_dir: Path, python: str = "") -> None:
        self.runtime = "none"
        self.rest_seconds = 0.015
        self.enforced_by = {
            "memory": "supervisor",
            "cpu_seconds": "supervisor",
            "processes": "nothing",
            "users": "nothing",
            "system_calls": "nothing",
        }
        self._data_dir = data_dir
        self._chosen = python
        self._python = ""
        self.guest_dir = Path()

    async def prepare(self) -> None:
        self._python = find_python(self._chosen)
        self.guest_dir = install_guest(self._python, self._data_dir / "run")

    def languages(self) -> list[str]:
        return [name for name in OURS if self.interpreter(name)]

    def interpreter(self, language: str, template: str = "") -> str | None:
        if language == "python":
            return self._python
        return find_program(language)

    def version(self, language: str, template: str) -> str:
        return version_of(language, self.interpreter(language) or "")

    def node_runner(self) -> list[str]:
        return [str(self.guest_dir / PACKAGE / "node_runner.js")]

    def close(self) -> None:
        """Nothing is held between sandboxes."""

    async def start(self, template: Template) -> Guest:
        workspace = tempfile.mkdtemp(prefix="cofferdam-unisolated-")
        argument = template.guest_argument(
            workspace=workspace, watch_memory=True, bound_processes=False
        )
        program = boot(str(self.guest_dir), "supervisor")
        command = [*interpreter_options(self._python), program, argument]
        system = os.environ.get("PATH", os.defpath)
        path = search_path(self._python, str(self.guest_dir), system)
        env = {"PATH": path, "HOME": workspace, "LANG": "C.UTF-8"}
        try:
            return _UnisolatedGuest(killed_first(command), workspace, env)
        except OSError as error:
            shutil.rmtree(workspace)
            raise start_failure("unisolated", error) from error


class _UnisolatedGuest(ProcessGuest):
    def __init__(self, command: list[str], workspace: str, env: dict[str, str]) -> None:
        self._workspace = workspace
        super().__init__(command, None, env)

    async def _end(self) -> None:
        # The supervisor ends the program when the channel has closed; killed, it could not.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._wait_for_end()
        await super()._end()
        shutil.rmtree(self._workspace, ignore_errors=True)
