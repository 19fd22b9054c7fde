"""Which process a remote sandbox belongs to, so that what a dead one left can be told and ended."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path


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
