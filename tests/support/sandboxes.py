"""Local providers for tests: a short way to run code, and a look at what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from django.conf import settings
from django.test import override_settings

from providers.leases import close_all
from providers.local.provider import LocalProvider
from providers.manager import manager
from providers.runtime.pool.background import BackgroundLoop
from providers.values import ExecutionResult
from tests.conftest import require
from tests.support.service_here import ServiceHere
from tests.support.waiting import wait_until

T = TypeVar("T")

# How much later than its deadline a run may end on a machine that is busy with other things.
GRACE_SECONDS = 60.0


class Local:
    """A LocalProvider over one launcher, and the processes it has on this machine."""

    def __init__(self, launcher: str, **config: Any) -> None:
        self.launcher = launcher
        self.provider = LocalProvider()
        # A service of its own, so that its processes are told from those of others.
        self._folder = tempfile.TemporaryDirectory()
        data_dir = Path(self._folder.name)
        self.service = ServiceHere(data_dir, settings.DATA_DIR)
        chosen = {"launcher": launcher, "gvisor_platform": "ptrace", "queue_timeout": 60, **config}
        try:
            with override_settings(DATA_DIR=data_dir):
                self.provider.initialize(LocalProvider.check_config(chosen))
        except BaseException:
            self.service.close()
            raise
        self.runtime: str = self.stats()["runtime"]
        self._thread = thread_of(self.service.loop)

    def run(
        self, code: str, language: str = "python", *, timeout: float = 60, **options: Any
    ) -> ExecutionResult:
        """Run dedented code in a sandbox of its own, which must end in time whatever it does."""
        instance = self.provider.create_instance(language)
        began = time.monotonic()
        try:
            return self.provider.execute_code(
                instance.instance_id, textwrap.dedent(code), language, timeout, **options
            )
        finally:
            took = time.monotonic() - began
            self.provider.destroy_instance(instance.instance_id)
            assert took < timeout + GRACE_SECONDS

    def survive(self, code: str, language: str = "python", **options: Any) -> ExecutionResult:
        """Run code that means harm; nothing of it may be left and the next run must not notice."""
        result = self.run(code, language, **options)
        following = self.run("print('undisturbed')")
        assert (following.stdout, following.exit_code) == ("undisturbed\n", 0)
        self.assert_nothing_is_left()
        return result

    def stats(self) -> dict[str, Any]:
        health = self.provider.health_check()
        assert health.details, health.message
        return health.details

    def assert_nothing_is_left(self) -> None:
        """Only the warm sandboxes may have processes."""

        def only_warm() -> bool:
            stats = self.stats()
            if stats["busy"] or stats["creating"]:
                return False
            unused = stats["idle"] + stats["kept"]
            return self._processes() == unused * self._processes_per_sandbox

        wait_until(only_warm, seconds=60)

    @property
    def _processes_per_sandbox(self) -> int:
        # Under gVisor the number of host processes varies, so whole containers are counted.
        return {"bubblewrap": 2, "none": 2, "gvisor": 1}[self.runtime]

    def _processes(self) -> int:
        if self.runtime == "gvisor":
            prefix = f"cofferdam-{os.getpid()}-"
            words = {word for pid in self.tools() for word in command(pid)}
            return len({word for word in words if word.startswith(prefix)})
        if self.runtime == "bubblewrap":
            zygotes = {child for tool in self.tools() for child in children(tool)}
            return sum(len(family(zygote)) for zygote in zygotes)
        return sum(len({tool} | family(tool)) for tool in self.tools())

    def tools(self) -> set[int]:
        """The processes that were started for us, without what they have started themselves."""
        name = {"bubblewrap": "bwrap", "gvisor": "runsc", "none": "python3"}[self.runtime]
        found = started_by(self._thread)
        return {pid for pid in found if os.path.basename(command(pid)[0]) == name}

    def close(self) -> None:
        """Close the provider; nothing of it may go on running."""
        tools = self.tools()
        running = tools.union(*map(family, tools))
        self.provider.close()
        self.service.close()
        self._folder.cleanup()
        wait_until_gone(running)

    def is_running(self) -> bool:
        """Whether a program runs in one of its sandboxes."""
        return any(each.running for each in list(self.service.pool._busy))


class LocalProcess:
    """A process of its own with a local provider in it; see tests/support/local_process.py."""

    def __init__(
        self,
        data_dir: Path,
        env: dict[str, str] | None = None,
        *,
        project: Path | None = None,
        **config: Any,
    ) -> None:
        argument = json.dumps({"data_dir": str(data_dir), **config})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.local_process", argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
            cwd=project,
        )
        self.greeting = self.read()

    def read(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(self.process.stderr.read())
        facts: dict[str, Any] = json.loads(line)
        return facts

    def start(self, code: str, language: str = "python", timeout: float = 10) -> None:
        """Have it run code; returns when the code is about to be sent."""
        assert self.process.stdin is not None
        job = {"code": textwrap.dedent(code), "language": language, "timeout": timeout}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.read() == {"started": True}

    def run(self, code: str, language: str = "python", timeout: float = 10) -> dict[str, Any]:
        self.start(code, language, timeout)
        return self.read()

    def __enter__(self) -> LocalProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by itself, and see to it that nothing of it is left."""
        running = family(self.process.pid)
        self.process.communicate(timeout=300)
        wait_until_gone(running)


def long_enough(run: Callable[[float], T], has_begun: Callable[[T], bool], seconds: float) -> T:
    """Return the result of code that ends only at its deadline, which is `seconds` at first.

    A slow machine may need all of that before the code has begun. It is then run once more with
    four times as long.
    """
    result = run(seconds)
    while not has_begun(result) and seconds < 60:
        seconds *= 4
        result = run(seconds)
    return result


def wait_until_gone(pids: set[int], seconds: float = 60) -> None:
    """Wait until all of them have ended. Raises AssertionError with the commands of the rest."""
    deadline = time.monotonic() + seconds
    while not gone(pids):
        if time.monotonic() > deadline:
            rest = {pid: " ".join(command(pid)) for pid in pids if not gone({pid})}
            raise AssertionError(f"they still run: {rest}")
        time.sleep(0.01)


def _parents() -> dict[int, int]:
    """The parent of every living process; zombies are dead."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text("utf-8", "replace")
            except OSError:
                continue
            state, parent, *_ = text.rpartition(") ")[2].split()
            if state not in "ZX":
                parents[int(entry)] = int(parent)
    return parents


def family(pid: int) -> set[int]:
    """Every living process that descends from `pid`."""
    parents = _parents()
    found: set[int] = set()
    newest = {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest} - found
        found |= newest
    return found


def gone(pids: set[int]) -> bool:
    """Whether none of them lives any more; zombies do not."""
    return not pids & _parents().keys()


def children(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid}


def thread_of(loop: BackgroundLoop) -> int:
    """Return the kernel's number of the thread that a loop runs in."""

    async def number() -> int:
        return threading.get_native_id()

    return loop.call(number())


def started_by(thread: int) -> set[int]:
    """Return the living processes that one thread of this process has started.

    Pools of other tests start theirs at any time, each in the thread of its own loop.
    """
    try:
        listed = Path(f"/proc/self/task/{thread}/children").read_text()
    except FileNotFoundError:
        return set()
    return set(map(int, listed.split())) & children(os.getpid())


def command(pid: int) -> list[str]:
    """The argument list of a process. What has ended has [""], zombies included."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except OSError:
        text = ""
    return text.rstrip("\0").split("\0")


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Local]:
    """A provider that the test may damage."""
    require("bwrap")
    local = Local("bubblewrap", **{"pool_size": 1, **getattr(request, "param", {})})
    yield local
    local.close()


@pytest.fixture(scope="session")
def _opened() -> Iterator[Callable[[str], Local]]:
    opened: dict[str, Local] = {}

    def get(launcher: str) -> Local:
        # What these keep from one test to the next would be counted as processes of the others.
        close_all()
        manager.close()
        if launcher not in opened:
            size = 1 if launcher == "gvisor" else 2
            opened[launcher] = Local(launcher, pool_size=size)
        return opened[launcher]

    yield get
    close_all()
    manager.close()
    for local in opened.values():
        local.close()


@pytest.fixture
def bubblewrap(_opened: Callable[[str], Local]) -> Local:
    """Sandboxes in bubblewrap, shared by all tests."""
    require("bwrap")
    return _opened("bubblewrap")


@pytest.fixture
def gvisor(_opened: Callable[[str], Local]) -> Local:
    """Sandboxes under gVisor, shared by all tests."""
    require("runsc")
    return _opened("gvisor")


@pytest.fixture(params=["bubblewrap", "gvisor"])
def local(request: pytest.FixtureRequest) -> Local:
    """Each test twice: in bubblewrap and under gVisor."""
    chosen: Local = request.getfixturevalue(request.param)
    return chosen
