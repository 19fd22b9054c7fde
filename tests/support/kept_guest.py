"""A kept sandbox without the host's half: raw frames to a real guest, and what comes back."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import select
import socket
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from providers.runtime.guest import wire
from providers.runtime.guest.protocol import CREDIT
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.launchers.oci import GvisorLauncher
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.requests import make_template
from providers.values import SandboxLimits
from tests.conftest import require
from tests.support.sandboxes import children

# Longer than anything here takes on a busy machine.
PATIENCE = 60.0

LIMITS = {
    "output_bytes": 200_000,
    "result_bytes": 100_000,
    "artifact_count": 20,
    "artifact_bytes": 1_000_000,
    "artifacts_total_bytes": 2_000_000,
    "rich_output_count": 20,
    "rich_output_bytes": 1_000_000,
}

Frame = tuple[dict[str, Any], dict[str, bytes]]


class Cell:
    """What came of a run: its events in order, and its answer."""

    def __init__(self, frames: list[Frame]) -> None:
        *self.events, (self.header, self.parts) = frames
        self.failed = self.header["event"] == "failed"
        self.exit_code = self.header.get("exit_code")
        self.context_kept = self.header.get("context_kept")
        self.stdout = self.parts.get("stdout", b"").decode()
        self.stderr = self.parts.get("stderr", b"").decode()
        self.result = self.parts.get("result", b"").decode()

    @property
    def shown(self) -> list[str]:
        """The text of each rich output."""
        return [
            content.decode()
            for name, content in self.parts.items()
            if name.startswith("output:") and name.endswith(":text/plain")
        ]

    @property
    def artifacts(self) -> dict[str, bytes]:
        names = [name for name in self.parts if name.startswith("artifact:")]
        return {name.removeprefix("artifact:"): self.parts[name] for name in names}


class KeptGuest:
    """One kept sandbox. `begin` sends an operation, `wait` reads up to its last frame."""

    def __init__(self, channel: socket.socket, commands: dict[str, list[str]]) -> None:
        self._channel = channel
        self._channel.settimeout(PATIENCE)
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._arrived: list[Frame] = []
        self._frames: dict[int, list[Frame]] = {}
        self._numbers = itertools.count(secrets.randbits(32))
        self._commands = commands
        self.limits = LIMITS
        assert self.next()[0]["type"] == "ready"

    def keep(self, memory_bytes: int = 256 * 2**20, **fields: Any) -> Cell:
        given = {
            "environment": {},
            "commands": self._commands,
            "memory_bytes": memory_bytes,
            "start_seconds": PATIENCE - 10,
        }
        return self.ask("keep", **{**given, **fields})

    def send(self, header: dict[str, Any], *parts: tuple[str, bytes]) -> None:
        self._channel.sendall(wire.pack(header, list(parts)))

    def send_raw(self, data: bytes) -> None:
        self._channel.sendall(data)

    def hang_up(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)

    def begin(self, op: str, *parts: tuple[str, bytes], **fields: Any) -> int:
        number = next(self._numbers)
        self._frames[number] = []
        self.send({"id": number, "op": op, **fields}, *parts)
        return number

    def ask(self, op: str, *parts: tuple[str, bytes], **fields: Any) -> Cell:
        return self.wait(self.begin(op, *parts, **fields))

    def begin_run(
        self,
        code: str,
        *parts: tuple[str, bytes],
        timeout: float = 20,
        keeps_indent: bool = False,
        **fields: Any,
    ) -> int:
        limits = {**LIMITS, **fields.pop("limits", {})}
        given = {"context": "default", "credit": CREDIT, **fields}
        text = (code if keeps_indent else textwrap.dedent(code)).encode()
        return self.begin("run", ("code", text), *parts, timeout=timeout, limits=limits, **given)

    def run(self, code: str, *parts: tuple[str, bytes], **fields: Any) -> Cell:
        return self.wait(self.begin_run(code, *parts, **fields))

    def run_late(self, before: str, code: str, seconds: float = 0.3) -> Cell:
        """Run `code`, which goes on until its deadline, after `before`.

        A machine that is too busy to stop it within a second loses the context. Both are then run
        again, five times at most.
        """
        for _ in range(5):
            self.run(before)
            late = self.run(code, timeout=seconds)
            if late.context_kept:
                break
        return late

    def wait(self, number: int) -> Cell:
        """All frames of an operation, once the last is there."""
        self.read_until(lambda: self.is_over(number))
        return Cell(self._frames.pop(number))

    def is_over(self, number: int) -> bool:
        frames = self._frames[number]
        return bool(frames) and frames[-1][0]["event"] in ("done", "failed")

    def events(self, number: int) -> list[Frame]:
        return self._frames[number]

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            header, parts = self.next()
            frames = self._frames[header["id"]]
            assert header["seq"] == len(frames)
            frames.append((header, parts))

    def next(self) -> Frame:
        """The next frame of any operation. Raises EOFError when the guest has ended."""
        while not self._arrived:
            data = self._channel.recv(1 << 16)
            if not data:
                raise EOFError
            self._arrived += self._parser.feed(data)
        return self._arrived.pop(0)

    def ended(self) -> bool:
        """Whether the guest ends."""
        try:
            while True:
                self.next()
        except (EOFError, ConnectionResetError):
            return True


class Guests:
    """Starts kept sandboxes of one launcher, and ends them."""

    def __init__(self, kind: str, data_dir: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self.launcher: Launcher = (
            BubblewrapLauncher(data_dir)
            if kind == "bubblewrap"
            else GvisorLauncher(data_dir, "ptrace")
        )
        self._loop.run_until_complete(self.launcher.prepare())
        self._started: list[Any] = []

    def warm(self, language: str = "python", **limits: int) -> KeptGuest:
        """A warm guest that nothing was said to."""
        bounds = replace(SandboxLimits(), **limits)
        templates = {
            name: make_template(name, name, self.launcher, bounds)
            for name in self.launcher.languages()
        }
        guest = self._loop.run_until_complete(self.launcher.start(templates[language]))
        self._started.append(guest)
        commands = {name: list(each.command) for name, each in templates.items()}
        channel: socket.socket = guest._channel  # type: ignore[attr-defined]
        return KeptGuest(channel, commands)

    def kept(self, language: str = "python", **limits: int) -> KeptGuest:
        guest = self.warm(language, **limits)
        memory = limits.get("memory_bytes", SandboxLimits().memory_bytes)
        kept = guest.keep(memory)
        assert not kept.failed, kept.header
        return guest

    def first_processes(self) -> list[int]:
        """A hold on the first process of each sandbox."""
        return [os.dup(guest._pidfd) for guest in self._started]

    def all_end(self, pidfds: list[int]) -> bool:
        """Whether they end."""
        for pidfd in pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            ended = poll.poll(PATIENCE * 1000)
            os.close(pidfd)
            if not ended:
                return False
        return True

    def nothing_runs(self) -> bool:
        """Whether no sandbox has a process beside its first."""
        return not any(map(children, self.supervisors()))

    def supervisors(self) -> list[int]:
        """The first process of each sandbox, as this machine numbers it."""
        pids = []
        for guest in self._started:
            text = Path(f"/proc/self/fdinfo/{guest._pidfd}").read_text()
            pids.append(int(text.partition("Pid:")[2].split()[0]))
        return pids

    def end_all(self) -> None:
        for guest in self._started:
            self._loop.run_until_complete(guest.destroy())
        self._started.clear()

    def close(self) -> None:
        self.end_all()
        self.launcher.close()
        self._loop.close()


@pytest.fixture(scope="module")
def _bubblewrap_guests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guests]:
    require("bwrap")
    guests = Guests("bubblewrap", tmp_path_factory.mktemp("kept"))
    yield guests
    guests.close()


@pytest.fixture(scope="module")
def _gvisor_guests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guests]:
    require("runsc")
    guests = Guests("gvisor", tmp_path_factory.mktemp("kept"))
    yield guests
    guests.close()


@pytest.fixture
def guests(_bubblewrap_guests: Guests) -> Iterator[Guests]:
    """Sandboxes in bubblewrap, as many as a test wants."""
    yield _bubblewrap_guests
    _bubblewrap_guests.end_all()


@pytest.fixture
def kept(guests: Guests) -> KeptGuest:
    """A kept Python sandbox in bubblewrap."""
    return guests.kept()
