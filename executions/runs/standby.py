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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from executions.runs import standby_process
from executions.runs.standby_process import HELD_SECONDS

__all__ = ["HELD_SECONDS", "SILENCE_SECONDS", "Standby"]

logger = logging.getLogger(__name__)

# A beat of the process is due every two seconds. A watcher waits for ten.
SILENCE_SECONDS = 3.0
# After a standby that could not be started, or that ended.
_RETRY_SECONDS = 30.0

_DATABASE_KEYS = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")


class Standby:
    """The standby of this process. For one thread, with which it ends."""

    def __init__(
        self, database: dict[str, Any], logs: dict[str, Any], answer_seconds: float
    ) -> None:
        first = {
            "database": {key: database[key] for key in _DATABASE_KEYS if key in database},
            "logs": logs,
            "answer_seconds": answer_seconds,
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
        arguments = [standby_process.__name__, str(os.getpid()), str(SILENCE_SECONDS)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=Path(__file__).parents[2], stdin=reads
            )
        finally:
            os.close(reads)
        # One that does not read must not hold the lease's thread.
        os.set_blocking(self._lines, False)
        self._send(self._first)

    def _send(self, line: str) -> None:
        os.write(self._lines, line.encode() + b"\n")
