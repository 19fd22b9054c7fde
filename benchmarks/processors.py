"""What the kernel has counted for all processors together, in ms (/proc/stat, proc(5))."""

from __future__ import annotations

import os
from pathlib import Path

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def busy_ms() -> float:
    """Time in which a processor did something for this machine."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, *_ = _counted()
    return (user + nice + system + interrupts + soft_interrupts) * TICK_MS


def stolen_ms() -> float:
    """Time in which a processor had something to do and the machine's host did not let it."""
    return _counted()[7] * TICK_MS


def _counted() -> list[int]:
    first = Path("/proc/stat").read_text().partition("\n")[0]
    return [int(ticks) for ticks in first.split()[1:]]
