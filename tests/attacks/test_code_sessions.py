"""What one program of a session can do to another, whose output is signed as that one's alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.launchers.oci import GvisorLauncher, RuncLauncher
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.values import ExecutionResult, Job, SandboxLimits
from tests.conftest import require
from tests.support.docker_engine import Containers

# What docs/security.md lists as not apart. Whatever else can be reached is a fault.
_WITH_LANDLOCK = {"signal", "limits", "mode of the terminal"}
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
            attempt("mode of the terminal", lambda: os.chmod(f"{{folder}}/{{name}}", 0o620))
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


@pytest.fixture(scope="module", params=NOT_APART)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, BackgroundLoop, Launcher]]:
    """A kind, and a launcher of it that is ready."""
    kind: str = request.param
    if kind in ("bubblewrap", "runc", "docker with runc"):
        _need_landlock()
    if kind.startswith("docker"):
        get: Callable[[str], Containers] = request.getfixturevalue("containers_of")
        containers = get(kind.removeprefix("docker with "))
        yield kind, containers.loop, containers.launcher
        return
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "run").mkdir()
    launcher, loop = _launcher(kind, folder), BackgroundLoop("session")
    loop.call(launcher.prepare())
    yield kind, loop, launcher

    async def close() -> None:
        launcher.close()

    loop.call(close())
    loop.stop()


@pytest.fixture
def session(launched: tuple[str, BackgroundLoop, Launcher]) -> Iterator[Session]:
    session = Session(*launched)
    yield session
    session.close()


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


def test_a_program_opens_its_own_pipes_and_terminals_by_name(session: Session) -> None:
    own = "cat /dev/stdin; echo out > /dev/stdout; echo err > /dev/stderr"
    pid = session.spawn(shell=own, stdin=True)
    session.write(pid, b"in\n")
    assert session.follow(pid) == ({"stdout": b"in\nout\n", "stderr": b"err\n"}, 0)
    # gVisor has no /dev/tty.
    tty = "/dev/stdout" if "gvisor" in session.kind or "runsc" in session.kind else "/dev/tty"
    pid = session.spawn(shell=f'echo a > "$(tty)"; echo b > {tty}; {own}', pty=[80, 24])
    session.write(pid, b"in\n")
    printed = session.follow(pid)[0]["stdout"]
    # The line is echoed when it comes, whatever runs then.
    assert printed.replace(b"in\r\n", b"", 1) == b"a\r\nb\r\nin\r\nout\r\nerr\r\n"
    for context, language in (("python", "python"), ("default", "python"), ("shell", "bash")):
        if context != "default":
            session.ask("context.create", context=context, language=language)
        code = (
            own.partition("; ")[2]
            if language == "bash"
            else (
                "open('/dev/stdout', 'w').write('out\\n'); open('/dev/stderr', 'w').write('err\\n'); None"
            )
        )
        ran = session.run(code, context)
        assert (ran.stdout, ran.stderr) == ("out\n", "err\n"), context


def test_programs_make_terminals_of_their_own(session: Session) -> None:
    """By the library, and as those do that open the other end by its name."""
    code = """
import os, pty
child, terminal = pty.fork()
if child == 0:
    os.write(1, os.ttyname(0).encode())
    os._exit(0)
assert os.read(terminal, 100).startswith(b"/dev/pts/")
first, second = os.openpty()
third = os.open(os.ttyname(second), os.O_RDWR | os.O_NOCTTY)
os.write(third, b"said")
print(os.read(first, 100).decode())
"""
    for ran in (session.run(code).stdout, session.follow(session.spawn("python3", "-c", code))[0]):
        assert (ran if isinstance(ran, str) else ran["stdout"].decode()) == "said\n"


def test_programs_of_a_session_share_files_and_may_end_one_another(session: Session) -> None:
    """Which is what a session is for, and what docs/security.md says."""
    pid = session.spawn(shell="umask 077; mkdir d; echo $$ > d/number; exec sleep 1000")
    ran = session.run(
        "import os, signal, time\n"
        "while not (os.path.exists('d/number') and open('d/number').read()): time.sleep(0.01)\n"
        "number = int(open('d/number').read())\n"
        "open('d/more', 'w').write('x'); os.rename('d/more', 'moved')\n"
        "os.kill(number, signal.SIGTERM)"
    )
    assert ran.stderr == ""
    assert session.follow(pid)[1] == 128 + 15
    assert session.follow(session.spawn(shell="cat moved; rm -r d moved"))[0]["stdout"] == b"x"


def test_what_a_program_has_open_it_opens_again(session: Session) -> None:
    """Files without a name, and the program itself, which may come from a root that is gone."""
    code = """
import os, tempfile
unnamed = tempfile.TemporaryFile(dir="/tmp")
unnamed.write(b"text"); unnamed.flush()
memory = os.memfd_create("memory")
os.write(memory, b"text")
with open("gone", "w") as gone: gone.write("text")
gone = open("gone"); os.remove("gone")
for each in (unnamed.fileno(), memory, gone.fileno()):
    assert open(f"/proc/self/fd/{each}").read() == "text"
for path in ("/proc/self/exe", "/proc/self/maps", "/etc/passwd", "/dev/null", "/dev/urandom"):
    os.close(os.open(path, os.O_RDONLY))
print("opened")
"""
    ran = session.run(code)
    assert (ran.stdout, ran.stderr) == ("opened\n", "")
    assert session.follow(session.spawn("python3", "-c", code))[0]["stdout"] == b"opened\n"
