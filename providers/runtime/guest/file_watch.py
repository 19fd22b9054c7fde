"""Tells what changes below a folder: by the kernel's notices, or by looking again and again.

Programs cannot have notices in sandboxes that share a kernel with others, whose count is one for
all (launchers/seccomp.py); this process has them (notices.py), for the folders of the
workspace's own file system. Where there are none, or more folders than are watched, a look at all
of it is compared with the former one: what came and went between two is not seen.
"""

import os
import stat
import time

from . import notices
from .file_operations import INTERNAL, Event
from .kept import Refused
from .paths import entry, joined, parse_anywhere, reach, walk
from .protocol import CHUNK_BYTES
from .wire import dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from typing import Any

    from .file_operations import Steps

    # Type with mode, inode, and what a write changes.
    State = tuple[int, int, int, int]
    States = dict[str, State]
    Change = dict[str, object]

MOST_WATCHED = 20_000
# Folders with notices; below one with more of them it is looked.
MOST_NOTICED = 2_000
# The same for all watches and for what is saved together: a kernel counts them for each user.
MOST_IN_ALL = 6_000
_PAUSE_SECONDS = 0.25
# A look may take this part of the time.
_SHARE = 20
# How often it is looked whether the folder itself is there, and how long the second half of a move
# may be in coming.
_IDLE_SECONDS, _HALF_SECONDS = 5.0, 0.02


class _Unsure(Exception):
    """The notices do not say enough: a look says what is there."""


def watch(base: int, header: "dict[str, object]") -> "Steps":
    """`ready` once, then `changes`, lists in JSON. Raises Refused when there is too much below."""
    parts = parse_anywhere(header.get("path"))
    folder = reach(base, parts)
    prefix = joined([*parts, ""]) if parts else ""
    told: "notices.Notices | None" = header["notices"]  # type: ignore[assignment]
    # Other file systems may be those of others as well.
    listener = None
    if told is not None and os.fstat(folder).st_dev == os.fstat(base).st_dev:
        listener = told.beside()
    try:
        watched = _Watched(folder, prefix, listener)
        yield from watched.look()
        yield Event("ready", {})
        while True:
            yield watched.pause()
            if os.fstat(folder).st_nlink == 0:
                raise Refused("The folder is gone.", "path", "missing")
            found = yield from watched.changes()
            yield from _tell(found)
    finally:
        if listener is not None:
            listener.close()
        os.close(folder)


def _tell(changes: "Iterable[Change]") -> "Iterator[Event]":
    lines: "list[bytes]" = []
    size = 0
    for change in changes:
        line = dumps(change).encode("utf-8", "backslashreplace")
        if lines and size + len(line) > CHUNK_BYTES - 2:
            yield Event("changes", {}, b"[" + b",".join(lines) + b"]")
            lines.clear()
            size = 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield Event("changes", {}, b"[" + b",".join(lines) + b"]")


class _Watched:
    """A folder as it was when it was last looked at, and what was noticed since."""

    def __init__(self, folder: int, prefix: str, listener: "notices.Notices | None") -> None:
        self._folder, self._prefix, self._listener = folder, prefix, listener
        self._known: "States" = {}
        # By their numbers, the folders with notices; none where it is looked.
        self._noticed: "dict[int, str]" = {}
        self._took = 0.0
        # The first half of a move whose second has not come: its name, and whether it is a folder.
        self._halves: "dict[int, tuple[str, bool]]" = {}
        self._changes: "list[Change]" = []

    def pause(self) -> "notices.Pause | float":
        """What to wait for before `changes` may have something to tell."""
        if self._noticed and self._listener is not None:
            seconds = _HALF_SECONDS if self._halves else _IDLE_SECONDS
            return notices.Pause(self._listener, seconds)
        return max(_PAUSE_SECONDS, self._took * _SHARE)

    def look(self) -> "Generator[Any, Any, None]":
        """See what is there, and have notices of what changes from now on."""
        began = time.monotonic()
        self._known = yield from self._look()
        self._took = time.monotonic() - began

    def changes(self) -> "Generator[Any, Any, list[Change]]":
        """What happened since the last time, in its order where the kernel told of it."""
        self._changes = []
        if self._noticed and self._listener is not None:
            try:
                self._hear(self._listener.read())
                return self._changes
            except (_Unsure, notices.TooMany):
                # Whatever was seen of it by now is known, and not told a second time.
                self._halves.clear()
        before = dict(self._known)
        yield from self.look()
        self._compare(before)
        return self._changes

    # By notices.

    def _hear(self, told: "list[notices.Notice]") -> None:
        waited = list(self._halves)
        for number, mask, name, cookie in told:
            folder = self._noticed.get(number)
            if mask & notices.IS_GONE:
                self._noticed.pop(number, None)
            elif folder is not None and name:
                path = f"{folder}/{name}" if folder else name
                self._notice(mask, path, name.startswith(INTERNAL), cookie)
        for cookie in waited:
            # Its other half lies elsewhere.
            self._leave(cookie)

    def _notice(self, mask: int, path: str, is_internal: bool, cookie: int) -> None:
        is_folder = bool(mask & notices.IS_FOLDER)
        if mask & notices.MOVED_FROM:
            self._halves[cookie] = ("" if is_internal else path, is_folder)
        elif mask & notices.MOVED_TO:
            former = self._halves.pop(cookie, None)
            if is_internal:
                if former is not None and former[0]:
                    self._gone(*former)
            elif former is None:
                self._came(path, is_written=not is_folder)
            elif not former[0]:
                # A file that is put in place when it is whole, by us.
                is_new = path not in self._known
                self._came(path, is_written=not is_folder)
                if is_new:
                    self._tell("attributes", path)
            else:
                self._moved(former[0], path, is_folder)
        elif is_internal:
            return
        elif mask & notices.CREATE:
            self._came(path, is_written=False)
        elif mask & notices.DELETE:
            self._gone(path, is_folder)
        elif mask & notices.MODIFY:
            self._tell("modified", path)
        elif mask & notices.ATTRIB:
            self._tell("attributes", path)

    def _came(self, path: str, *, is_written: bool) -> None:
        """Something new has this name, or, where it had one, other content."""
        former = self._known.get(path)
        state = self._see(path)
        if state is None:
            # It has gone again, which is told as well.
            self._tell("created", path)
            return
        if former is None:
            self._tell("created", path)
        if is_written:
            self._tell("modified", path)
        if former is None and stat.S_ISDIR(state[0]):
            self._enter(path)

    def _enter(self, path: str) -> None:
        """Have notices of a new folder, and tell what is in it by now."""
        try:
            fd = reach(self._folder, path.split("/"))
        except OSError:
            return
        try:
            for found in walk(
                fd,
                64,
                without=INTERNAL,
                entering=lambda below, inner: self._listen(
                    below, f"{path}/{inner}" if inner else path
                ),
            ):
                if found is None or found.status is None:
                    continue
                inner = f"{path}/{found.path}"
                if inner in self._known:
                    continue
                self._know(inner, _state(found.status))
                self._tell("created", inner)
                if found.status.st_size and stat.S_ISREG(found.status.st_mode):
                    self._tell("modified", inner)
        finally:
            os.close(fd)

    def _moved(self, former: str, path: str, is_folder: bool) -> None:
        self._known.pop(path, None)
        for old in self._below(former) if is_folder else [former]:
            state = self._known.pop(old, None)
            if state is not None:
                self._known[path + old[len(former) :]] = state
        for number, folder in self._noticed.items():
            if folder == former or folder.startswith(f"{former}/"):
                self._noticed[number] = path + folder[len(former) :]
        self._see(path)
        self._tell("moved", path, former)

    def _leave(self, cookie: int) -> None:
        former = self._halves.pop(cookie, None)
        if former is not None and former[0]:
            self._gone(*former)

    def _gone(self, path: str, is_folder: bool) -> None:
        gone = self._below(path) if is_folder else [path]
        for each in gone:
            self._known.pop(each, None)
            self._changes.append({"type": "deleted", "path": self._prefix + each})
        if is_folder and self._listener is not None:
            for number, folder in list(self._noticed.items()):
                if folder == path or folder.startswith(f"{path}/"):
                    del self._noticed[number]
                    self._listener.drop(number)

    def _below(self, folder: str) -> "list[str]":
        """A folder and all that is known to be in it."""
        inside = [path for path in self._known if path.startswith(f"{folder}/")]
        return sorted([folder, *inside])

    def _tell(self, kind: str, path: str, former: str = "") -> None:
        """One change, with what it is about where that is still there."""
        change: "Change" = {"type": kind, "path": self._prefix + path}
        if former:
            change["former"] = self._prefix + former
        if self._changes and self._changes[-1]["path"] == change["path"]:
            last = self._changes[-1]
            if last["type"] == kind:
                return
            if "entry" in last and kind != "modified":
                change["entry"] = last["entry"]
        if "entry" not in change:
            self._describe(path, change)
        self._changes.append(change)

    def _describe(self, path: str, change: "Change") -> None:
        folder, _, name = path.rpartition("/")
        try:
            fd = reach(self._folder, folder.split("/") if folder else [])
            try:
                status = os.lstat(name, dir_fd=fd)
                change["entry"] = entry(self._prefix + path, status, fd, name)
            finally:
                os.close(fd)
        except OSError:
            # It is gone by now.
            return
        self._know(path, _state(status))

    def _see(self, path: str) -> "State | None":
        folder, _, name = path.rpartition("/")
        try:
            fd = reach(self._folder, folder.split("/") if folder else [])
            try:
                state = _state(os.lstat(name, dir_fd=fd))
            finally:
                os.close(fd)
        except OSError:
            return None
        self._know(path, state)
        return state

    def _know(self, path: str, state: "State") -> None:
        self._known[path] = state
        if len(self._known) > MOST_WATCHED:
            raise _Unsure

    def _listen(self, folder: int, path: str) -> None:
        if (
            self._listener is None
            or len(self._noticed) >= MOST_NOTICED
            or self._listener.in_all >= MOST_IN_ALL
        ):
            raise _Unsure
        try:
            self._noticed[self._listener.watch(folder)] = path
        except OSError:
            # The kernel has no more of them.
            raise _Unsure from None

    # By looks.

    def _look(self) -> "Generator[Any, Any, States]":
        seen: "States" = {}
        if self._listener is not None:
            self._listener.begin()
        self._noticed.clear()
        may_listen = self._listener is not None

        def enter(fd: int, path: str) -> None:
            nonlocal may_listen
            try:
                if may_listen:
                    self._listen(fd, path)
            except _Unsure:
                may_listen = False

        for found in walk(self._folder, 64, without=INTERNAL, entering=enter):
            if found is None:
                yield None
            elif len(seen) >= MOST_WATCHED:
                raise Refused(
                    f"More than {MOST_WATCHED} entries cannot be watched.", code="exhausted"
                )
            elif found.status is None:
                seen[found.path] = (0, 0, 0, 0)
            else:
                seen[found.path] = _state(found.status)
        if not may_listen:
            for number in list(self._noticed):
                del self._noticed[number]
                if self._listener is not None:
                    self._listener.drop(number)
        return seen

    def _compare(self, before: "States") -> None:
        now = self._known
        gone = {state: path for path, state in before.items() if path not in now}
        moved = {}
        for path, state in now.items():
            if path not in before and state in gone:
                moved[path] = gone.pop(state)
        came_from = set(moved.values())
        for path in sorted(path for path in before if path not in now and path not in came_from):
            self._changes.append({"type": "deleted", "path": self._prefix + path})
        for path in sorted(now):
            if path in moved:
                if not _went_along(path, moved):
                    self._tell("moved", path, moved[path])
            elif path not in before:
                self._tell("created", path)
                if now[path][3] and stat.S_ISREG(now[path][0]):
                    self._tell("modified", path)
            elif now[path][1:] != before[path][1:]:
                self._tell("modified", path)
            elif now[path] != before[path]:
                self._tell("attributes", path)


def _state(status: os.stat_result) -> "State":
    # A folder's size and time change with what is in it, which is told by itself.
    is_folder = stat.S_ISDIR(status.st_mode)
    written = (0, 0) if is_folder else (status.st_mtime_ns, status.st_size)
    return (status.st_mode, status.st_ino, *written)


def _went_along(path: str, moved: "dict[str, str]") -> bool:
    """Whether it was only the folder around it that was moved."""
    folder, _, name = path.rpartition("/")
    return folder in moved and moved[path] == f"{moved[folder]}/{name}"
