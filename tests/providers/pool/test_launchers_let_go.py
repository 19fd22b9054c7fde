"""Whatever keeps a launcher from being used, nothing is held of it, and a pool tries again."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from providers.errors import ProviderUnavailable
from providers.launcher_names import KINDS
from providers.runtime.launchers import guest_files, host_programs
from providers.runtime.launchers.oci import GvisorLauncher, RuncGuest
from providers.runtime.pool.launcher import Launcher, ProcessGuest, ToolStderr
from providers.runtime.service.launchers import LauncherChoice, try_out
from providers.runtime.service.pool_manager import PoolManager, open_revision
from providers.runtime.service.settings import ServiceSettings
from tests.conftest import require
from tests.support.impostor_pools import until
from tests.support.impostors import Impostor

SETTINGS = ServiceSettings(pool_size=1, max_sandboxes=2)
FULL = OSError(errno.ENOSPC, "No space left on device", "/where/nobody/looks")


@dataclass
class Held(Impostor):
    """One that is seen to be closed."""

    unprepared: BaseException | None = None
    unnamed: Exception | None = None
    closed: int = 0

    async def prepare(self) -> None:
        if self.unprepared:
            raise self.unprepared

    def version(self, language: str, template: str) -> str:
        if self.unnamed:
            raise self.unnamed
        return ""

    def close(self) -> None:
        self.closed += 1


@dataclass(frozen=True)
class Choice(LauncherChoice):
    launchers: list[Any] = field(default_factory=list)

    def make(self, kind: str, settings: ServiceSettings) -> Launcher:
        return self.launchers.pop(0)


def choice_of(folder: Path, *launchers: Held) -> Choice:
    return Choice("bubblewrap", folder, "test", minimum_isolation="none", launchers=list(launchers))


@pytest.mark.parametrize(
    "error",
    [FULL, subprocess.CalledProcessError(1, ["python3"]), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_one_that_cannot_be_prepared_is_closed(tmp_path: Path, error: BaseException) -> None:
    launcher = Held(unprepared=error)
    with pytest.raises(type(error)):
        asyncio.run(choice_of(tmp_path, launcher).open(SETTINGS))
    assert launcher.closed == 1


def test_one_that_no_pool_can_be_made_over_is_closed_where_it_is_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = Held(unnamed=FULL)
        with pytest.raises(OSError, match="No space"):
            await open_revision(choice_of(tmp_path, launcher), SETTINGS)
        assert launcher.closed == 1

        used = Held()
        choice = choice_of(tmp_path, used)
        former = await open_revision(choice, SETTINGS)
        used.unnamed = FULL
        with pytest.raises(OSError, match="No space"):
            await open_revision(choice, SETTINGS, former)
        assert used.closed == 0
        await former.pool.close()

    asyncio.run(scenario())


def test_a_pool_says_why_it_is_not_there_and_opens_once_it_can(tmp_path: Path) -> None:
    async def scenario() -> str:
        manager = PoolManager(choice_of(tmp_path, Held(unprepared=FULL), Held()), SETTINGS)
        manager.open()
        try:
            await until(lambda: manager.problem() != "The pool is starting.", 60)
            problem = manager.problem()
            with pytest.raises(ProviderUnavailable, match="No space left"):
                await manager.current()
            await until(lambda: not manager.problem(), 60)
            return problem
        finally:
            await manager.close()

    problem = asyncio.run(scenario())
    assert "No space left on device" in problem
    assert "log of the pool service" in problem
    assert "nobody" not in problem


@pytest.mark.parametrize("kind", KINDS[1:])
def test_one_that_was_never_prepared_can_be_closed(tmp_path: Path, kind: str) -> None:
    LauncherChoice(kind, tmp_path, "test").make(kind, SETTINGS).close()


def no_lock_of_its_own(folder: Path) -> Callable[[Path, int], int]:
    lock = host_programs._lock

    def locked(path: Path, how: int) -> int:
        if path != folder:
            raise FULL
        return lock(path, how)

    return locked


def test_no_folder_is_left_of_one_that_was_half_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("runsc")
    run = tmp_path / "run"
    monkeypatch.setattr(host_programs, "_lock", no_lock_of_its_own(run))
    choice = LauncherChoice("gvisor", tmp_path, "test")
    with pytest.raises(OSError, match="No space"):
        asyncio.run(choice.open(SETTINGS))
    assert list(run.glob("gvisor-*")) == []


def test_no_draft_is_left_of_guest_files_that_cannot_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        guest_files.install_guest("/bin/false", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_is_given_up_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        may_end, ends = asyncio.Event(), asyncio.Event()
        ended = []
        end = ProcessGuest._end

        async def late(guest: ProcessGuest) -> None:
            ends.set()
            await may_end.wait()
            await end(guest)
            ended.append(guest)

        launcher = Impostor()
        monkeypatch.setattr(ProcessGuest, "_end", late)
        trial = asyncio.create_task(try_out(launcher))
        await ends.wait()
        trial.cancel()
        asyncio.get_running_loop().call_soon(may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await trial
        assert ended == launcher.guests

    asyncio.run(scenario())


def test_what_the_local_provider_asked_for_is_closed_if_it_cannot_be_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = []

    async def prepare(launcher: GvisorLauncher) -> None:
        raise FULL

    monkeypatch.setattr(GvisorLauncher, "prepare", prepare)
    monkeypatch.setattr(GvisorLauncher, "close", lambda launcher: closed.append(launcher))
    with pytest.raises(OSError, match="No space"):
        asyncio.run(
            LauncherChoice("auto", tmp_path, "x")
            .for_local("gvisor", "ptrace")
            .open(ServiceSettings())
        )
    assert len(closed) == 1


def test_the_complaint_of_a_sandbox_that_has_ended_is_its_own() -> None:
    """The number of its descriptor may be that of another sandbox's afterwards."""

    async def end() -> str:
        channel, theirs = socket.socketpair()
        stderr = ToolStderr()
        os.write(stderr.fileno(), b"no room")
        with theirs, socket.socket() as listener, subprocess.Popen(["sleep", "100"]) as process:
            pidfd = os.pidfd_open(process.pid)
            guest = RuncGuest(channel, pidfd, None, stderr, None, listener)  # type: ignore[arg-type]
            await guest.destroy()
        others = [os.memfd_create("stderr", os.MFD_CLOEXEC) for _ in range(50)]
        for other in others:
            os.write(other, b"a secret of another")
        complaint = guest.complaint()
        for other in others:
            os.close(other)
        return complaint

    assert asyncio.run(end()) == "no room"
