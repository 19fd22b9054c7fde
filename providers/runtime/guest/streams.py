"""The standard streams of a context, which one cell may close or replace and the next one needs."""

import fcntl
import io
import os
import resource
import sys

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any

# The program may replace what is in `os`.
_dup2, _fstat = os.dup2, os.fstat
_NAMES = ((1, "stdout"), (2, "stderr"))
# How deep a stream is looked for in what was put around it.
_MOST_AROUND = 3


class Streams:
    """Holds on to where the output of a context goes."""

    def __init__(self) -> None:
        # Programs take the first descriptors themselves.
        least = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 256) - 6
        self._kept = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least) for fd, _ in _NAMES}
        self._places = {_place(fd) for fd, _ in _NAMES}

    def restore(self) -> None:
        """Have what the next cell prints be its output.

        A stream that an earlier cell has put in place of one stays where it writes on to it.
        """
        for fd, name in _NAMES:
            if _place(fd) not in self._places:
                try:
                    _dup2(self._kept[fd], fd)
                except OSError:
                    # The program has closed all descriptors.
                    continue
            first = f"__{name}__"
            if not self._reaches(getattr(sys, first, None), _MOST_AROUND):
                setattr(sys, first, _fresh(fd))
            if not self._reaches(getattr(sys, name, None), _MOST_AROUND):
                # The same one: whoever wraps it must not be left alone with what it writes to.
                setattr(sys, name, getattr(sys, first))

    def _reaches(self, stream: "Any", depth: int) -> bool:
        """Whether what is written to it comes out here, as far as can be seen."""
        try:
            if stream is None or getattr(stream, "closed", False):
                return False
            return _place(stream.fileno()) in self._places
        except BaseException:
            # Code of the program's. It has no descriptor; it may have a stream that has.
            return depth > 0 and any(
                self._reaches(inner, depth - 1)
                for inner in _inner(stream)
                if hasattr(inner, "write")
            )


def _inner(stream: "Any") -> "list[Any]":
    """What an object holds that may be a stream."""
    found = []
    for held in list(getattr(stream, "__dict__", {}).values()):
        found += list(held)[:10] if isinstance(held, (list, tuple)) else [held]
    return found


def _place(fd: int) -> "tuple[int, int] | None":
    try:
        found = _fstat(fd)
    except (OSError, TypeError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _fresh(fd: int) -> "io.TextIOWrapper":
    errors = "strict" if fd == 1 else "backslashreplace"
    raw = io.open(fd, "wb", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
