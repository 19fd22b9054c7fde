"""A PostgreSQL of a test's own, which may be stopped, paused and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from tests.conftest import require
from tests.support.processes import free_port

USER = "postgres"


class PostgresServer:
    """In a folder of its own below /tmp, which the server's user can read. Without passwords: it
    listens on this machine alone, for as long as a test runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._programs = _programs()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.geteuid() == 0:
            shutil.chown(folder, USER)
        options = ("--pgdata", str(self.data), "--username", "cofferdam", "--no-sync")
        subprocess.run(
            [self._programs / "initdb", *options, "--encoding", "UTF8", "--locale", "C.UTF-8"],
            check=True,
            capture_output=True,
            cwd=folder,
            **self._as_user(),
        )

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgres://cofferdam@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = ("-D", str(self.data), "-p", str(self.port), "-c", "fsync=off")
        ways = ("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=")
        self.process = subprocess.Popen(
            [self._programs / "postgres", *options, *ways],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._as_user(),
        )
        deadline = time.monotonic() + 60
        while True:
            assert self.process.poll() is None, "PostgreSQL did not start"
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, "PostgreSQL did not start"
                time.sleep(0.05)

    def stop(self) -> None:
        """At once, as when its host dies: connections are cut, nothing is answered."""
        if self.process is not None:
            self.resume()
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(60)
            self.process = None

    def pause(self) -> None:
        """It takes connections and bytes from now on, and answers none of them."""
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        """The one that listens first, so that no other is added meanwhile."""
        assert self.process is not None
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]

    def _as_user(self) -> dict[str, str]:
        """PostgreSQL refuses to be root."""
        return {"user": USER, "group": USER} if os.geteuid() == 0 else {}


def _programs() -> Path:
    """Debian has them outside of PATH, one folder for each version."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return (installed[-1] if installed else Path(os.path.realpath(require("postgres")))).parent


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """Running, and empty at first. A test that stops it starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="cofferdam-postgres-"))
    folder.chmod(0o711)
    server = PostgresServer(folder / "server")
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
