"""The program of a standby (`executions.runs.standby`): it waits, and beats while it hears nothing.

Every process that serves has one, so it loads what it needs to beat only when it has to. Arguments:
the process beside it, and after how many seconds of silence to beat. On standard input it has how
to reach the database, then a lease for each beat of the other process, one a line.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

from executions.kernel.own_process import die_with_parent

# How long a process that lives may show no beat of its own before it counts as dead.
HELD_SECONDS = 150.0

_BEAT = "UPDATE executions_process SET beat = beat + 1 WHERE id = %s AND ended_at IS NULL"


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


def _beat_of(line: str) -> Callable[[str], None]:
    is_ready = False

    def beat(lease: str) -> None:
        nonlocal is_ready
        import json
        import logging

        import django
        from django.conf import settings
        from django.db import Error, connection

        from executions.kernel.postgresql import expect_answers_within

        if not is_ready:
            first = json.loads(line)
            settings.configure(DATABASES={"default": first["database"]}, LOGGING=first["logs"])
            django.setup()
            expect_answers_within(first["answer_seconds"])
            is_ready = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(_BEAT, [lease])
        except Error as problem:
            logger = logging.getLogger("executions.runs.standby")
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
        raise_beats(stdin, _beat_of(line), silence_seconds=float(sys.argv[2]))


if __name__ == "__main__":
    main()
