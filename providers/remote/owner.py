"""Which process a remote sandbox belongs to, so that what a dead one left can be told and ended."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

# Of another host nothing is known, unless somebody says so: `learn_of_ends`.
_has_ended_elsewhere: Callable[[str], bool] = lambda tag: False  # noqa: E731


def process_tag() -> str:
    """This process, as lower case letters, digits and dashes: HOST-PID-START.

    HOST stands for the machine since its last start and its process namespace, because a process
    id means nothing outside of them.
    """
    pid = os.getpid()
    return f"{_host()}-{pid}-{_start(pid)}"


def is_orphan(tag: str) -> bool:
    """Whether the process is known to have ended. One of another host is never known to have."""
    parts = tag.split("-")
    if len(parts) != 3 or not parts[1].isdigit() or parts[0] != _host():
        return False
    return _start(int(parts[1])) != parts[2]


def learn_of_ends(has_ended: Callable[[str], bool]) -> None:
    """Have `has_ended` asked of processes of other hosts, by tag. True is for known ends alone."""
    global _has_ended_elsewhere
    _has_ended_elsewhere = has_ended


def is_known_orphan(tag: str) -> bool:
    """As `is_orphan`, and of other hosts by what is known of them. May ask the database."""
    return is_orphan(tag) or (not tag.startswith(f"{_host()}-") and _has_ended_elsewhere(tag))


@lru_cache(maxsize=1)
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    text = f"{socket.gethostname()} {boot} {namespace}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _start(pid: int) -> str:
    """When a living process was started, in the kernel's ticks; "0" when it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
    except OSError:
        return "0"
    return "0" if fields[0] in "ZX" else fields[19]
