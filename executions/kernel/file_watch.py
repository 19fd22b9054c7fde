"""Files of this machine by which one process wakes others. Linux only (inotify)."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_IN_ATTRIB = 0x4
_libc = ctypes.CDLL(None, use_errno=True)


def touch(path: Path) -> None:
    """Wake who watches the file. Raises OSError, as where there is no file."""
    os.utime(path)


class FileWatch:
    """What `select` finds readable from the moment that another process touches the file."""

    def __init__(self, path: Path) -> None:
        """Make the file where there is none. Raises OSError, as where the system has no watch
        left."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not Path.touch: who watches already has nothing to look at.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_ATTRIB))
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        return self._fd

    def clear(self) -> None:
        """Forget what was touched before."""
        with suppress(BlockingIOError):
            while os.read(self._fd, 64 * 1024):
                pass

    def close(self) -> None:
        os.close(self._fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
