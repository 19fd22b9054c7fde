"""How far a verification is, in lines for whoever waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from executions.ledger.models import Verification

_EVERY_SECONDS = 1.0
_EVERY_PERCENT = 10


class Progress:
    """Writes lines of how far the verification of a ledger is, whose newest entry is `newest`.

    To a terminal it writes at most one a second, otherwise one for each 10 %.
    """

    def __init__(
        self,
        newest: int,
        write: Callable[[str], object],
        *,
        is_terminal: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._newest = newest
        self._write = write
        self._is_terminal = is_terminal
        self._now = now
        self._began = self._written_at = now()
        self._percent = 0

    def __call__(self, found: Verification) -> None:
        """Write a line where one is due."""
        now = self._now()
        begin = found.mark.sequence if found.mark is not None else 0
        # Entries may be added meanwhile.
        total = max(self._newest - begin, found.entries, 1)
        percent = 100 * found.entries // total
        if self._is_terminal:
            is_due = now - self._written_at >= _EVERY_SECONDS
        else:
            is_due = percent // _EVERY_PERCENT > self._percent // _EVERY_PERCENT
        if not is_due:
            return
        self._written_at, self._percent = now, percent
        a_second = found.entries / max(now - self._began, 1e-3)
        left = (total - found.entries) / a_second
        findings = len(found.findings) + found.omitted
        self._write(
            f"{found.entries} of {total} entries, {percent} %, {findings} findings, "
            f"{a_second:.0f} entries a second, {left:.0f} seconds left"
        )
