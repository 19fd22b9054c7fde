"""Whether a process of this machine lives, told from another one that has its number by now.

A process that is hidden from us lives: /proc shows no others' where it is mounted so (`hidepid`,
systemd's ProtectProc), and the kernel then still says whether the number is in use.
"""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path

_UNKNOWN = "0"
# The kernel's number for the time namespace that is there from the start.
_FIRST_CLOCK = "time:[4026531834]"


def birth(pid: int) -> str:
    """When it was started, in the kernel's ticks since the boot; "0" where that cannot be read."""
    return _read(pid) or _UNKNOWN


def has_ended(pid: int, born: str) -> bool:
    """Whether the process that was started then has ended. False where that cannot be seen."""
    found = _read(pid)
    if found and born != _UNKNOWN:
        return found != born
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def lives(pid: int, born: str) -> bool:
    """Whether the process that was started then is seen to live. False where it is hidden."""
    return born != _UNKNOWN and _read(pid) == born


@cache
def here() -> tuple[str, str]:
    """This boot of this machine, and the namespaces in which process ids and times of birth mean
    anything.

    Where that is not known, or /proc is another namespace's, it is what nobody else has.
    """
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return boot, os.readlink("/proc/self/ns/pid") + _clock()
    except OSError:
        pass
    return secrets.token_hex(16), ""


def _clock() -> str:
    """The time namespace where it is not the machine's first: births are told in its time."""
    try:
        found = os.readlink("/proc/self/ns/time")
    except OSError:
        # The kernel has none.
        return ""
    return "" if found == _FIRST_CLOCK else found


# What the parent does not know a child must not share with its siblings. Not by
# `providers.threads`, which needs Django: launchers import this module without it.
os.register_at_fork(after_in_child=here.cache_clear)


def _read(pid: int) -> str:
    """As `birth`, empty where it cannot be read, and a word that is no birth for one that is dead
    and still has its number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    state, *fields = text.rpartition(") ")[2].split()
    # The state is its first thread's, which may have ended before the others.
    is_dead = state in "ZX" and int(fields[16]) <= 1
    return "dead" if is_dead else fields[18]
