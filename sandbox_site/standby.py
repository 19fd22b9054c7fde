"""A small process beside one that has a lease. It raises the lease's beat while that one cannot.

The beat of a process comes from a thread of it, and no thread goes on while a long call holds the
interpreter. So each process that serves tells its standby of every beat. Where it tells nothing for
a moment, the standby raises the beat itself: it is a process of its own, has no requests, and ends
with the one beside it. It opens the database only then.

A process that was stopped, or whose thread hangs, lives too. So the standby ends its help after
HELD_SECONDS, and the lease is then taken as one of a dead process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Nothing more of the project: every process that serves has a standby, which holds what it imports.
from sandbox_site.processes import die_with_parent

logger = logging.getLogger("sandbox_site.standby")

_PROJECT = Path(__file__).resolve().parent.parent

# How long a process that lives may show no beat of its own before it counts as dead.
HELD_SECONDS = 150.0
# A beat of the process is due every two seconds. A watcher waits for ten.
SILENCE_SECONDS = 3.0
# After a standby that could not be started, or that ended.
_RETRY_SECONDS = 30.0

_DATABASE_KEYS = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")
_BEAT = "UPDATE executions_process SET beat = beat + 1 WHERE id = %s AND ended_at IS NULL"


class Standby:
    """The standby of this process. For one thread, with which it ends."""

    def __init__(
        self, database: dict[str, Any], logs: dict[str, Any], answer_seconds: float
    ) -> None:
        first = {
            "database": {key: database[key] for key in _DATABASE_KEYS if key in database},
            "logs": logs,
            "answer_seconds": answer_seconds,
            "silence_seconds": SILENCE_SECONDS,
        }
        # By a pipe and not as an argument: it has the password.
        self._first = json.dumps(first)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = -1
        self._retry_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def tell(self, lease: str) -> None:
        """Say that the lease, as the database has its id, was renewed just now.

        Starts the process where there is none. That it cannot be started is logged.
        """
        try:
            if self._process is None:
                if time.monotonic() < self._retry_at:
                    return
                self._start()
            self._send(lease)
        except OSError as problem:
            logger.warning(
                "the standby process for the lease's heartbeat cannot be used: %s", problem
            )
            self.stop()
            self._retry_at = time.monotonic() + _RETRY_SECONDS

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._lines >= 0:
            os.close(self._lines)
            self._lines = -1

    def _start(self) -> None:
        reads, self._lines = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid())], cwd=_PROJECT, stdin=reads
            )
        finally:
            os.close(reads)
        # One that does not read must not hold the lease's thread.
        os.set_blocking(self._lines, False)
        self._send(self._first)

    def _send(self, line: str) -> None:
        os.write(self._lines, line.encode() + b"\n")


def raise_beats(
    lines: int,
    beat: Callable[[str], None],
    *,
    silence_seconds: float,
    held_seconds: float = HELD_SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Call `beat` with the last line of the file `lines` whenever no other came for a moment.

    For `held_seconds` after that line. Returns at the end of the file.
    """
    lease, told_at, rest = "", now(), b""
    while True:
        if select.select([lines], [], [], silence_seconds)[0]:
            if not (piece := os.read(lines, 4096)):
                return
            *whole, rest = (rest + piece).split(b"\n")
            if whole:
                lease, told_at = whole[-1].decode(), now()
        elif lease and now() - told_at < held_seconds:
            beat(lease)


def _read_line(lines: int) -> str:
    line = b""
    while (byte := os.read(lines, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _beat_of(first: dict[str, Any]) -> Callable[[str], None]:
    is_ready = False

    def beat(lease: str) -> None:
        nonlocal is_ready
        import django
        from django.conf import settings
        from django.db import Error, connection

        from sandbox_site.postgresql import expect_answers_within

        if not is_ready:
            settings.configure(DATABASES={"default": first["database"]}, LOGGING=first["logs"])
            django.setup()
            expect_answers_within(first["answer_seconds"])
            is_ready = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(_BEAT, [lease])
        except Error as problem:
            logger.warning("the standby process cannot send the lease's heartbeat: %s", problem)
        finally:
            connection.close()

    return beat


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    # A service that is told to stop goes on for a while, and needs its lease until the end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    stdin = sys.stdin.fileno()
    if line := _read_line(stdin):
        first = json.loads(line)
        raise_beats(stdin, _beat_of(first), silence_seconds=first["silence_seconds"])


if __name__ == "__main__":
    main()
