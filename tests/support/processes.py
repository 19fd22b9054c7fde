"""Starting the real service for a test, and seeing what is left of it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0
NO_DOCKER = "unix:///nowhere/docker.sock"


# Below those that the kernel gives to sockets without a wish: none of these takes the port of a
# service that is about to start, or to start again.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {_PORTS} is free")


def clean_environment(data_dir: Path, **extra: str) -> dict[str, str]:
    """What a newcomer's shell has: none of this project's variables, but DATA_DIR.

    The newcomer has no Docker, and `make run` installs no packages, unless `extra` says so.
    """
    inherited = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in inherited if name in os.environ}
    environment |= {"DOCKER_HOST": NO_DOCKER, "ENV_FILE": os.devnull, "PACKAGES": "no"}
    return environment | {"DATA_DIR": str(data_dir)} | extra


def web_server(port: str, application: str = "sandbox_site.asgi:application") -> list[str]:
    """The command of the web server alone: `up` starts a worker and a pool service too."""
    return [
        *(sys.executable, "-m", "gunicorn", "--config", "python:sandbox_site.gunicorn_conf"),
        *("--bind", f"127.0.0.1:{port}", application),
    ]


class Service:
    """A running service: its address, its output so far and everything it has started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._seen: set[tuple[int, str]] = set()

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self, seconds: float = 120) -> float:
        """Seconds until /healthz answered 200."""
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            assert self.process.poll() is None, self.output
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=seconds) as answer:
                    assert answer.status == 200
                    return time.monotonic() - started
            except ConnectionError:
                time.sleep(0.02)
            except OSError as error:
                if not isinstance(getattr(error, "reason", None), ConnectionError):
                    raise
                time.sleep(0.02)
        raise AssertionError(f"not ready after {seconds} s:\n{self.output}")

    def look(self) -> list[int]:
        """The process ids of everything below us, remembered for `survivors`."""
        pids = _descendants(self.process.pid)
        self._seen |= {(pid, stat) for pid in pids if (stat := _started(pid))}
        return pids

    def find(self, wanted: Callable[[str], bool]) -> int:
        """The first process whose command line `wanted` accepts, waiting for it to appear."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for pid in self.look():
                if wanted(_command_line(pid)):
                    return pid
            time.sleep(0.05)
        raise AssertionError("no such process")

    def survivors(self) -> list[str]:
        """The command lines of what `look` has seen and is still running."""
        return [_command_line(pid) for pid, stat in self._seen if _started(pid) == stat]

    def kill(self) -> None:
        """Kill every process of it, as a machine that loses its power does, and wait for them."""
        self.look()
        os.killpg(self.process.pid, signal.SIGKILL)
        self._end_survivors()
        self.process.wait()
        while self.survivors():
            time.sleep(0.01)

    def _end_survivors(self) -> None:
        for pid, stat in self._seen:
            if _started(pid) == stat:
                # It may be ending just now, as everything does whose parent has died.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait_for_end(self) -> tuple[int, float]:
        """Exit code and seconds."""
        started = time.monotonic()
        code = self.process.wait(120)
        return code, time.monotonic() - started


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path
) -> Iterator[Service]:
    """The service under `command`, in a process group of its own as a shell would start it."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    service = Service(process, int(environment["PORT"]), log)
    try:
        yield service
    finally:
        service.look()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        service._end_survivors()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *_descendants(child)]
    return found


def end_tree(pid: int) -> None:
    """Kill a process with everything that came of it."""
    for each in (*_descendants(pid), pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _started(pid: int) -> str | None:
    """When the process started, in clock ticks, None when it is gone or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]


def command_line(pid: int) -> bytes:
    """The words of a process, a zero after each; nothing where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _command_line(pid: int) -> str:
    return command_line(pid).replace(b"\0", b" ").decode().strip()
