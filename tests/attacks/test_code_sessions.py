"""What one program of a session can do to another, whose output is signed as that one's alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.guest.protocol import CREDIT
from providers.pool.background import BackgroundLoop
from providers.pool.kept import Kept
from providers.pool.launcher import Launcher
from providers.pool.launchers.bubblewrap import BubblewrapLauncher
from providers.pool.launchers.gvisor import GvisorLauncher
from providers.pool.launchers.runc import RuncLauncher
from providers.pool.requests import make_template
from providers.pool.sandbox import Sandbox
from providers.values import ExecutionResult, Job, SandboxLimits
from tests.conftest import require
from tests.docker_engine import Containers

# What docs/security.md lists as not apart. Whatever else can be reached is a fault.
_WITH_LANDLOCK = {"signal", "limits"}
_IN_GVISOR = {"signal", "limits", "environment", "layout"}
NOT_APART = {
    "bubblewrap": _WITH_LANDLOCK,
    "runc": _WITH_LANDLOCK,
    "gvisor": _IN_GVISOR,
    "docker with runc": _WITH_LANDLOCK | {"terminal by name"},
    "docker with runsc": _IN_GVISOR,
}

# Each program that is attacked writes its number down, under its name.
VICTIMS = ("terminal", "pipes", "shell", "python", "default")

LOOK = f"""
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
found = set()

def attempt(name, action):
    try:
        action()
    except OSError:
        return
    found.add(name)

def opens(path, flags):
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))

def says(path):
    os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), b"FORGED")

def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")

def remote(pid, number):
    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    room = ctypes.create_string_buffer(8)
    area = open(f"/proc/{{pid}}/maps").readline().split("-")[0]
    here, there = Piece(ctypes.addressof(room), 8), Piece(int(area, 16), 8)
    call(libc.syscall(number, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))

for folder in ("/dev/pts", "/dev/terminals"):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.isdigit():
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                attempt("terminal by name", lambda: opens(f"{{folder}}/{{name}}", flags))
            attempt("terminal by name", lambda: says(f"{{folder}}/{{name}}"))
for victim in {VICTIMS!r}:
    pid = int(open(f"/tmp/{{victim}}").read())
    for number in (*range(12), 250, 251):
        path = f"/proc/{{pid}}/fd/{{number}}"
        try:
            if os.readlink(path) == "/dev/null":
                continue
        except OSError:
            pass
        for flags in (os.O_RDONLY, os.O_WRONLY):
            attempt(f"{{number}} of {{victim}}", lambda: opens(path, flags))
        attempt(f"{{number}} of {{victim}}", lambda: says(path))
    attempt("memory", lambda: opens(f"/proc/{{pid}}/mem", os.O_RDONLY))
    attempt("memory", lambda: opens(f"/proc/{{pid}}/mem", os.O_RDWR))
    attempt("memory", lambda: remote(pid, 310))
    attempt("memory", lambda: remote(pid, 311))
    attempt("memory", lambda: call(libc.ptrace(16, pid, 0, 0)))
    attempt("memory", lambda: call(libc.syscall(438, os.pidfd_open(pid), 1, 0)))
    attempt("folders", lambda: os.listdir(f"/proc/{{pid}}/cwd"))
    attempt("environment", lambda: opens(f"/proc/{{pid}}/environ", os.O_RDONLY))
    attempt("layout", lambda: opens(f"/proc/{{pid}}/maps", os.O_RDONLY))
    attempt("limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
    attempt("signal", lambda: os.kill(pid, 0))
print(sorted(found))
"""


class Session:
    """A kept sandbox of a launcher, with commands and contexts in it."""

    def __init__(self, kind: str, loop: BackgroundLoop, launcher: Launcher) -> None:
        self.kind, self._loop = kind, loop
        template = make_template("python", "python", launcher, SandboxLimits())
        self._sandbox = loop.call(Sandbox.start(launcher, template))
        commands = {"python": list(template.command), "bash": ["/bin/bash"]}
        self._kept = loop.call(Kept.open(self._sandbox, {}, commands))

    def ask(self, name: str, **fields: Any) -> dict[str, Any]:
        header, _ = self._loop.call(self._kept.ask(name, fields))
        return dict(header)

    def spawn(self, *argv: str, **fields: Any) -> int:
        pid: int = self.ask("spawn", **({"argv": argv} if argv else {}), **fields)["pid"]
        return pid

    def run(self, code: str, context: str = "default") -> ExecutionResult:
        return self._loop.call(self._kept.run(Job(code, context=context), lambda frame: None))

    def write(self, pid: int, data: bytes) -> None:
        self._loop.call(self._kept.write_stdin(pid, data, close=True))

    def follow(self, pid: int) -> tuple[dict[str, bytes], int]:
        """Both streams until the end, and the exit code."""

        async def read() -> tuple[dict[str, bytes], int]:
            streams = {"stdout": b"", "stderr": b""}
            code = -1
            async for header, parts in self._kept.stream("follow", {"pid": pid, "after": 0}):
                if header["event"] == "done":
                    code = header["process"]["exit_code"]  # type: ignore[index, call-overload]
                else:
                    streams[str(header["event"])] += parts["data"]
            return streams, code

        return self._loop.call(read())

    def close(self) -> None:
        self._loop.call(self._sandbox.destroy())


def _launcher(kind: str, folder: Path) -> Launcher:
    if kind == "gvisor":
        require("runsc")
        return GvisorLauncher(folder, "ptrace")
    if kind == "runc":
        if os.geteuid() != 0:
            pytest.skip("runc makes containers as root")
        require("runc")
        return RuncLauncher(folder, "runc")
    require("bwrap")
    return BubblewrapLauncher(folder)


@pytest.fixture(params=NOT_APART)
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    kind: str = request.param
    if kind in ("bubblewrap", "runc", "docker with runc"):
        _need_landlock()
    if kind.startswith("docker"):
        get: Callable[[str], Containers] = request.getfixturevalue("containers_of")
        containers = get(kind.removeprefix("docker with "))
        session = Session(kind, containers.loop, containers.launcher)
        yield session
        session.close()
        return
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "run").mkdir()
    launcher, loop = _launcher(kind, folder), BackgroundLoop("session")
    loop.call(launcher.prepare())
    session = Session(kind, loop, launcher)
    yield session
    session.close()

    async def close() -> None:
        launcher.close()

    loop.call(close())
    loop.stop()


def _need_landlock() -> None:
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 2:
        pytest.skip("needs a kernel with Landlock")


def test_no_program_writes_into_the_record_of_another(session: Session) -> None:
    """Neither a context nor a command, neither by a name nor through /proc; and what is left to
    each is what the documentation says."""
    wait = "while read line; do echo got $line; done; echo end >&2"
    terminal = session.spawn(shell=f"echo $$ > /tmp/terminal; echo ready; {wait}", pty=[80, 24])
    pipes = session.spawn(shell=f"echo $$ > /tmp/pipes; echo ready; {wait}", stdin=True)
    for context, language in (("shell", "bash"), ("python", "python"), ("attacker", "python")):
        session.ask("context.create", context=context, language=language)
    session.run("echo $$ > /tmp/shell", "shell")
    for context in ("python", "default"):
        session.run(f"import os; open('/tmp/{context}', 'w').write(str(os.getpid()))", context)
    session.run(
        "import os, time\n"
        "while not all(os.path.exists(f'/tmp/{name}') for name in ('terminal', 'pipes')):\n"
        "    time.sleep(0.01)"
    )
    expected = f"{sorted(NOT_APART[session.kind])}\n"

    looked = session.run(LOOK, "attacker")
    assert (looked.stdout, looked.stderr) == (expected, "")
    session.ask("context.restart", context="default")
    session.run("import os; open('/tmp/default', 'w').write(str(os.getpid()))")
    command = session.spawn("python3", "-c", LOOK)
    assert session.follow(command) == ({"stdout": expected.encode(), "stderr": b""}, 0)

    for context in ("python", "default"):
        assert session.run("print('mine')", context).stdout == "mine\n"
    assert session.run("echo mine", "shell").stdout == "mine\n"
    session.write(pipes, b"a line\n")
    assert session.follow(pipes) == ({"stdout": b"ready\ngot a line\n", "stderr": b"end\n"}, 0)
    session.write(terminal, b"a line\n")
    printed = session.follow(terminal)[0]["stdout"]
    if "terminal by name" in NOT_APART[session.kind]:
        assert b"FORGED" in printed
    else:
        assert printed == b"ready\r\na line\r\ngot a line\r\nend\r\n"
