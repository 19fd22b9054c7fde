"""What this service writes is its own user's alone, from the first byte on."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

UMASK = 0o077
# The guest's code, images and the roots of sandboxes are for other users to read, from inside. No
# secret is in them, and the folder around them is closed.
_READ_BY_SANDBOXES = ("guest-", "gvisor-", "runc-", "crun-", "sha256-")


def write_privately(*places: Path) -> None:
    """Let nobody else read what this process writes from now on, nor these folders and files.

    Of a folder also what lies in it, not below; `tighten` does the rest.
    """
    os.umask(UMASK)
    for place in places:
        _close(place)
        if place.is_dir() and not place.is_symlink():
            for entry in _entries(place):
                _close(entry)


def tighten(folder: Path) -> None:
    """Take from everybody else what they may do with whatever is below `folder`."""
    _close(folder)
    for entry in _entries(folder):
        if entry.name.startswith(_READ_BY_SANDBOXES):
            continue
        if entry.is_dir() and not entry.is_symlink():
            tighten(entry)
        else:
            _close(entry)


def is_open_to_others(place: Path) -> bool:
    """Whether anybody but its owner may do anything with it. What is not there is not open."""
    try:
        return bool(place.stat().st_mode & 0o077)
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError as error:
        logger.warning("%s cannot be read: %s", folder, error.strerror)


def _close(place: Path) -> None:
    """One file or folder; a link leads elsewhere, and what is there is not ours."""
    if place.name.startswith(_READ_BY_SANDBOXES):
        return
    try:
        found = place.lstat()
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077 and not stat.S_ISLNK(found.st_mode):
            place.chmod(mode & 0o700)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be made private: %s", place, error.strerror)
