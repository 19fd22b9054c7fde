"""The disk: no new run when it is nearly full, so that those that run can still be recorded."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from django.conf import settings
from django.db import connection

from providers.errors import ProviderUnavailable

logger = logging.getLogger(__name__)

# A stat costs microseconds, but there may be a thousand requests a second.
LOOKED_AT_SECONDS = 1.0
# Files that can still be made. A disk without room for one more cannot be told from a full one.
INODES = 1_000
_RETRY_SECONDS = 30.0

_looked_at: tuple[float, str] = (float("-inf"), "")
_told = False


def ensure_disk_space() -> None:
    """Raise ProviderUnavailable, naming the disk, when less than DISK_RESERVE_MIB is free."""
    if problem := disk_problem():
        raise ProviderUnavailable(problem, retry_after=_RETRY_SECONDS)


def disk_problem() -> str:
    """Why nothing new should be stored, "" while there is room. At most a second old."""
    global _looked_at
    now = time.monotonic()
    if now - _looked_at[0] > LOOKED_AT_SECONDS:
        _looked_at = (now, _look())
        _tell(_looked_at[1])
    return _looked_at[1]


def look_again_at_disk() -> None:
    """Trust nothing that was seen before."""
    global _looked_at
    _looked_at = (float("-inf"), "")


def _tell(problem: str) -> None:
    """Once when it begins and once when it is over, however often it is looked at."""
    global _told
    is_news, _told = bool(problem) != _told, bool(problem)
    if is_news and problem:
        logger.critical(
            "ALERT: %s No new code is run; running executions are still recorded.",
            problem,
            extra={"alert": "disk_nearly_full"},
        )
    elif is_news:
        logger.warning("the disk has enough free space again")


def _look() -> str:
    for name, folder in _folders().items():
        try:
            disk = os.statvfs(folder)
        except OSError as error:
            return f"The disk of {name} cannot be read: {error.strerror}."
        free = disk.f_bavail * disk.f_frsize // (1024 * 1024)
        if free < settings.DISK_RESERVE_MIB:
            return (
                f"The disk of {name} is nearly full: {free} MiB are free, and DISK_RESERVE_MIB "
                f"keeps {settings.DISK_RESERVE_MIB}. Free some of it, or move {name}."
            )
        if settings.DISK_RESERVE_MIB and disk.f_files and disk.f_favail < INODES:
            return (
                f"The disk of {name} has room for {disk.f_favail} more files only. "
                f"Remove some, or move {name}."
            )
    return ""


def _folders() -> dict[str, Path]:
    """Where we write, by the name of what moves it."""
    folders = {"DATA_DIR": Path(settings.DATA_DIR)}
    if settings.STORAGE_FOLDER:
        folders["STORAGE_URL"] = Path(settings.STORAGE_FOLDER)
    if connection.vendor == "sqlite":
        database = Path(str(connection.settings_dict["NAME"])).parent
        if database != folders["DATA_DIR"] and database.is_dir():
            folders["DATABASE_URL"] = database
    return folders
