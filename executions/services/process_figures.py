"""What a process says of its pools and of its host with each beat of its lease.

A provider that lives in each process has a pool in each: nobody else can tell of it. The row of the
process has it, so that whoever is asked for `/metrics` tells of all of them.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from django.conf import settings

from providers.figures import NUMBERS, figures_of
from providers.manager import loaded

logger = logging.getLogger(__name__)


_latest: dict[str, Any] = {}
_looking = threading.Lock()


def latest_figures() -> dict[str, Any]:
    """What was found last, while the next look is begun: a beat waits for no disk and no provider.

    Empty before the first one.
    """
    if _looking.acquire(blocking=False):
        try:
            threading.Thread(target=_look, name="figures", daemon=True).start()
        except RuntimeError as error:
            _looking.release()
            logger.error("no thread to collect metrics: %s", error)
    return _latest


def _look() -> None:
    global _latest
    try:
        _latest = process_figures()
    finally:
        _looking.release()


def _after_fork() -> None:
    global _latest, _looking
    _latest, _looking = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def process_figures() -> dict[str, Any]:
    """`host` and `pools`, by provider. Asks memory, the kernel and each provider."""
    return {"host": host_figures(), "pools": _pools()}


def host_figures() -> dict[str, float]:
    """Of this host: load and processors, memory and the disk of DATA_DIR in bytes.

    What cannot be read is left out.
    """
    found: dict[str, float] = {}
    for look in (_load, _memory, _disk):
        try:
            found |= look()
        except (OSError, ValueError):
            # The kernel of a sandboxed service may hide it.
            continue
    return found


def _pools() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for lease in loaded():
        try:
            own = figures_of(lease.provider.pool_figures())
        except Exception:
            # Whoever wrote the provider: the beat that asks must not fail because of it.
            logger.exception(
                "provider %s does not report the metrics of its pool", lease.provider_id
            )
            continue
        if not own:
            continue
        # It may be loaded twice for a moment, or with another configuration beside it.
        known = found.setdefault(lease.provider_id, {})
        for name, value in own.items():
            is_sum = name in NUMBERS and name != "creation_ms"
            known[name] = known.get(name, 0) + value if is_sum else value
    return found


def _load() -> dict[str, float]:
    return {"load1": round(os.getloadavg()[0], 2), "processors": os.cpu_count() or 1}


def _memory() -> dict[str, float]:
    wanted = {"MemTotal": "memory_bytes", "MemAvailable": "memory_free_bytes"}
    found: dict[str, float] = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in wanted:
                found[wanted[name]] = int(rest.split()[0]) * 1024
            if len(found) == len(wanted):
                break
    return found


def _disk() -> dict[str, float]:
    disk = os.statvfs(settings.DATA_DIR)
    return {
        "disk_bytes": disk.f_blocks * disk.f_frsize,
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
    }
