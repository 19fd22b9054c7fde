"""What has changed in the workspace since somebody last asked, told at the cost of what changed.

A full look at everything is what is right. Between two of them the kernel's notices say where to
look, as long as none was lost. They say nothing of a write through a memory mapping before it ends,
nor through a descriptor whose name has gone while the file has another one: a full look is there
for that, and tells of every file that is mapped for writing, because times do not.

What is known of the workspace's files, and since when: any number of readers, each with a mark.

A mark is the epoch of this memory and a generation, which counts the looks that found something.
"""

import os
import stat
import time

from . import notices
from .file_operations import INTERNAL, Event
from .kept import Refused
from .mappings import mapped_for_writing
from .paths import (
    AT_ONCE,
    FILE_CLOCK,
    MOST_DEPTH,
    is_empty,
    is_too_long,
    kind_of,
    open_folder,
    reach,
    walk,
)
from .protocol import CHUNK_BYTES, KNOWN_CHARACTERS, MOST_KNOWN, MOST_UNSEEN, UNSEEN_CHARACTERS
from .wire import dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    State = tuple[int, int, int, int, int, str]
    from collections.abc import Generator, Iterable, Iterator
    from typing import Any

    from .file_operations import Steps


# Folders that are watched; a workspace with more of them is looked at as a whole.
MOST_WATCHED = 2_000
# Names that are looked at one by one rather than all, and files with several names.
MOST_HEEDED, MOST_LINKED = 2_000, 500
_MARK_LENGTH = 100
_TURN_SECONDS = 0.005


class _Unsure(Exception):
    """The notices do not say enough."""


class Memory:
    """The workspace as it was when it was last looked at, and what was noticed since."""

    def __init__(self, base: int, told: "notices.Notices | None") -> None:
        """`base` is the workspace. `told` is for this memory alone, None where there is none."""
        self.known = KnownFiles()
        self.is_looking = False
        self._base = base
        # A second name of a file elsewhere on the same file system could be written unnoticed.
        is_apart = os.fstat(base).st_dev != os.stat("..", dir_fd=base).st_dev
        self._notices = told if is_apart else None
        # Whether they are complete since the last look; by their numbers, which folder it is.
        self._are_heeded = False
        self._watched: "dict[int, str]" = {}
        self._folders = 0
        # What is to be told at the next full look, whatever can be seen of it.
        self._noticed: "set[str]" = set()
        self._young: "set[str]" = set()
        self._mapped: "set[int]" = set()
        # Of a file with several names only one is told of; once it had them it may be open by one.
        self._linked: "dict[str, int]" = {}
        # Folders that could not be looked into at the last full look.
        self._closed: "set[str]" = set()

    @property
    def unseen(self) -> "list[str]":
        """Folders of which nothing is told; "" is the workspace, and stands for too many."""
        size = sum(map(len, self._closed))
        if len(self._closed) > MOST_UNSEEN or size > UNSEEN_CHARACTERS:
            return [""]
        return sorted(self._closed)

    def look(self, *, thorough: bool) -> "Generator[Any, Any, None]":
        """Bring `known` up to date. Raises Refused where there is too much, and OSError."""
        while self.is_looking:
            yield _TURN_SECONDS
        self.is_looking = True
        # Whatever comes between leaves what was noticed lost, and the next look a full one.
        are_heeded, self._are_heeded = self._are_heeded, False
        try:
            try:
                heeded = self._read_notices() if are_heeded else None
                if heeded is not None and not thorough:
                    self._look_where(heeded)
                    self._are_heeded = True
                    return
            except (_Unsure, OSError, Refused):
                # A full look says what is there, whatever it was.
                pass
            yield from self._look_at_all()
        finally:
            self.is_looking = False

    def _read_notices(self) -> "dict[str, set[str]] | None":
        """By folder the names in it of which something was said; None where that is not all.

        What was said is kept for a full look, too, as far as that is bearable.
        """
        if self._notices is None:
            return None
        try:
            told = self._notices.read()
        except notices.TooMany:
            return None
        found: "dict[str, set[str]]" = {}
        is_sure = True
        for number, mask, name, _ in told:
            if mask & notices.IS_GONE:
                # What has gone with its folder was told of there.
                continue
            folder = self._watched.get(number)
            if folder is None or not name:
                is_sure = False
                continue
            if name.startswith(INTERNAL):
                continue
            if mask & notices.IS_FOLDER and mask & _FOLDER_LEFT:
                is_sure = False
            found.setdefault(folder, set()).add(name)
            if len(self._noticed) < MOST_HEEDED:
                self._noticed.add(_below(folder, name))
        if not is_sure or sum(map(len, found.values())) > MOST_HEEDED:
            return None
        return found

    # A look at what was noticed. Nothing comes between its steps.

    def _look_where(self, heeded: "dict[str, set[str]]") -> None:
        for path in self._linked:
            folder, _, name = path.rpartition("/")
            heeded.setdefault(folder, set()).add(name)
        changed: "dict[str, State]" = {}
        gone: "list[str]" = []
        began = time.clock_gettime_ns(FILE_CLOCK)
        for folder, names in heeded.items():
            fd = self._reach(folder)
            try:
                for name in names:
                    self._look_at(fd, folder, name, changed, gone)
            finally:
                os.close(fd)
        self._young -= self._linked.keys()
        self._young |= _young(changed.items(), began)
        if len(self._young) > 2 * MOST_HEEDED or not self.known.has_room(changed):
            raise _Unsure
        self.known.take(changed, gone)
        self._noticed.clear()

    def _reach(self, folder: str) -> int:
        fd = reach(self._base, folder.split("/") if folder else [])
        known = self.known.get(folder)
        if folder and (known is None or os.fstat(fd).st_ino != known[1]):
            os.close(fd)
            raise _Unsure
        return fd

    def _look_at(
        self, fd: int, folder: str, name: str, changed: "dict[str, State]", gone: "list[str]"
    ) -> None:
        path = _below(folder, name)
        try:
            status = os.lstat(name, dir_fd=fd)
        except FileNotFoundError:
            gone.append(path)
            return
        if is_too_long(path):
            raise _Unsure
        state, known = state_of(status, fd, name), self.known.get(path)
        if stat.S_ISDIR(status.st_mode):
            if path in self._closed:
                # It may be open by now, and what is in it was never seen.
                raise _Unsure
            if known is None:
                self._look_into(fd, name, path, changed)
            elif known[1] != state[1]:
                raise _Unsure
            if not is_same(known, state):
                changed[path] = state
            return
        if path in self._linked:
            if state == known and path not in self._noticed and path not in self._young:
                return
        elif status.st_nlink > 1:
            raise _Unsure
        changed[path] = state

    def _look_into(self, fd: int, name: str, path: str, changed: "dict[str, State]") -> None:
        """A new folder, where it does not hold too much to be looked at in one go."""

        closed: "set[str]" = set()

        def enter(below: int, inner: str) -> None:
            closed.discard(_below(path, inner))
            if self._notices is None or len(self._watched) >= MOST_WATCHED:
                raise _Unsure
            self._watched[self._notices.watch(below)] = _below(path, inner).rstrip("/")

        depth = MOST_DEPTH - path.count("/") - 1
        if depth < 1:
            raise _Unsure
        folder = open_folder(fd, name)
        try:
            for found in walk(folder, depth, without=INTERNAL, entering=enter):
                if found is None or found.status is None:
                    raise _Unsure
                is_folder = stat.S_ISDIR(found.status.st_mode)
                if found.status.st_nlink > 1 and not is_folder:
                    raise _Unsure
                inner = _below(path, found.path)
                if is_folder:
                    closed.add(inner)
                if is_too_long(inner):
                    raise _Unsure
                changed[inner] = state_of(found.status, found.folder, found.name)
        finally:
            os.close(folder)
        if closed:
            raise _Unsure

    # A look at everything.

    def _look_at_all(self) -> "Generator[Any, Any, None]":
        self._start_to_watch()
        began = time.clock_gettime_ns(FILE_CLOCK)
        seen: "dict[str, State]" = {}
        linked: "dict[str, int]" = {}
        count = Count()
        entered: "set[str]" = set()
        closed: "set[str]" = set()
        unseen: "set[str]" = set()
        is_deep = False  # nobody watches what is too deep to be looked into

        def enter(fd: int, path: str) -> None:
            entered.add(path)
            self._watch(fd, path)

        folder = os.dup(self._base)
        try:
            for found in walk(folder, MOST_DEPTH, without=INTERNAL, entering=enter):
                if found is None:
                    yield None
                    continue
                path = found.path
                if is_too_long(path):
                    is_deep = True
                    if not is_too_long(above := path.rpartition("/")[0]):
                        unseen.add(above)
                    continue
                if found.status is None:
                    unseen.add(path.rpartition("/")[0])
                state = self._state(path, found.status, found.folder, found.name)
                if state is None:
                    continue
                known = self.known.get(path)
                # One of the two is enough to have.
                seen[path] = state = known if known and is_same(known, state) else state
                count.add(path, state)
                if stat.S_ISDIR(state[0]):
                    is_deep |= (is_last := path.count("/") + 1 == MOST_DEPTH)
                    if not (is_last and is_empty(found.folder, found.name)):
                        closed.add(path)
                elif found.status is not None and (
                    found.status.st_nlink > 1 or self._linked.get(path) == state[1]
                ):
                    linked[path] = state[1]
        finally:
            os.close(folder)
        closed -= entered
        mapped = yield from self._mapped_files()
        told = self._young | self._noticed
        changed = {
            path: state
            for path, state in seen.items()
            if state is not self.known.get(path)
            or path in told
            or (state[1] in mapped and not stat.S_ISDIR(state[0]))
        }
        gone = [
            path for path in self.known.paths() if path not in seen and not _is_in(path, closed)
        ]
        self.known.take(changed, gone)
        self._young = _young(seen.items(), began)
        self._noticed.clear()
        self._linked = linked
        self._closed = unseen | closed
        self._folders = len(entered)
        self._are_heeded = bool(self._watched) and len(linked) <= MOST_LINKED and not is_deep

    def _state(
        self, path: str, status: "os.stat_result | None", folder: int, name: str
    ) -> "State | None":
        """None for what has gone. What cannot be looked at is as it was known."""
        if status is None:
            return self.known.get(path) or (0, 0, 0, 0, 0, "")
        try:
            return state_of(status, folder, name)
        except OSError:
            # A link that is another thing by now. Whatever did it is noticed, or seen next time.
            return None

    def _mapped_files(self) -> "Generator[Any, Any, set[int]]":
        """Those mapped for writing now, and those that were when it was last looked."""
        now: "set[int]" = set()
        for inode in mapped_for_writing(os.fstat(self._base).st_dev):
            if inode is None:
                yield None
            else:
                now.add(inode)
        before, self._mapped = self._mapped, now
        return now | before

    def _start_to_watch(self) -> None:
        """Begin anew: what is said from now on, or has not been read, is heeded the next time."""
        if self._notices is None:
            return
        if self._folders > MOST_WATCHED:
            self._stop_watching()
            return
        self._watched.clear()

    def _watch(self, fd: int, path: str) -> None:
        if self._notices is None or (path and not self._watched):
            return
        if len(self._watched) >= MOST_WATCHED:
            self._stop_watching()
            return
        try:
            self._watched[self._notices.watch(fd)] = path
        except OSError:
            # The kernel has no more of them: without, all is looked at.
            self._stop_watching()
            self._notices = None

    def _stop_watching(self) -> None:
        for number in self._watched:
            if self._notices is not None:
                self._notices.drop(number)
        self._watched.clear()


_FOLDER_LEFT = notices.MOVED_FROM | notices.MOVED_TO | notices.DELETE


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_in(path: str, folders: "set[str]") -> bool:
    """Whether it is below one of them, whatever is in there now."""
    while folders and "/" in path:
        path = path.rpartition("/")[0]
        if path in folders:
            return True
    return False


def _young(states: "Iterable[tuple[str, State]]", began: int) -> "set[str]":
    return {path for path, state in states if state[4] >= began}


# This process has one workspace.
_memory: "Memory | None" = None


def changes(base: int, header: "dict[str, object]") -> "Steps":
    """`entries` and `removed`, as lists in JSON. `notices` are those of this process, or None."""
    global _memory
    mark, thorough = header.get("mark", ""), header.get("thorough", False)
    if not isinstance(mark, str) or len(mark) > _MARK_LENGTH:
        raise Refused("Must be a mark from an earlier answer, or empty.", "mark")
    if not isinstance(thorough, bool):
        raise Refused("Must be true or false.", "thorough")
    if _memory is None:
        told: "notices.Notices | None" = header["notices"]  # type: ignore[assignment]
        _memory = Memory(base, None if told is None else told.beside())
    memory = _memory
    yield from memory.look(thorough=thorough)
    entries, removed, is_complete = memory.known.since(mark)
    now, unseen = memory.known.mark, memory.unseen
    yield from _tell("entries", entries)
    yield from _tell("removed", removed)
    counts = {"count": len(entries), "gone": len(removed)}
    return {"mark": now, "complete": is_complete, **counts, "unseen": unseen}


def _tell(name: str, values: "Iterable[object]") -> "Iterator[Event | None]":
    lines: "list[bytes]" = []
    size = 0
    for number, value in enumerate(values):
        if number % AT_ONCE == AT_ONCE - 1:
            yield None
        line = dumps(value).encode("utf-8", "backslashreplace")
        if lines and size + len(line) > CHUNK_BYTES - 2:
            yield Event(name, {}, b"[" + b",".join(lines) + b"]")
            lines.clear()
            size = 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield Event(name, {}, b"[" + b",".join(lines) + b"]")


# Paths that are remembered to be gone.
MOST_GONE = 20_000


def state_of(status: os.stat_result, folder: int, name: str) -> "State":
    """What is remembered of a file. Raises OSError where a link is something else by now."""
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return (mode, status.st_ino, 0, status.st_mtime_ns, 0, "")
    target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(mode) else ""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (mode, status.st_ino, status.st_size, *times, target)


def is_same(known: "State | None", state: "State") -> bool:
    """Whether nothing is to be told. A folder's time, which changes with its content, is not."""
    if known is not None and stat.S_ISDIR(state[0]):
        return known[:2] == state[:2]
    return known == state


class KnownFiles:
    """Paths with their states, those that changed last at the end."""

    def __init__(self) -> None:
        self._epoch = os.urandom(8).hex()
        self._generation = 0
        # Since when this memory has everything that is gone.
        self._gone_since = 0
        self._known: "dict[str, tuple[int, State]]" = {}
        self._gone: "dict[str, int]" = {}
        self._characters = 0

    @property
    def mark(self) -> str:
        return f"{self._epoch}:{self._generation}"

    def get(self, path: str) -> "State | None":
        found = self._known.get(path)
        return None if found is None else found[1]

    def paths(self) -> "Iterable[str]":
        return self._known.keys()

    def has_room(self, changed: "dict[str, State]") -> bool:
        """Whether as much can be remembered, were all of it new."""
        characters = sum(len(path) + len(state[5]) for path, state in changed.items())
        return (
            len(self._known) + len(changed) <= MOST_KNOWN
            and self._characters + characters <= KNOWN_CHARACTERS
        )

    def take(self, changed: "dict[str, State]", gone: "Iterable[str]") -> None:
        """Remember the next generation."""
        gone = [path for path in gone if path in self._known]
        if not changed and not gone:
            return
        self._generation += 1
        for path in gone:
            self._drop(path)
            self._gone.pop(path, None)
            self._gone[path] = self._generation
        for path, state in changed.items():
            # At the end, where the latest are.
            self._drop(path)
            self._known[path] = (self._generation, state)
            self._characters += len(path) + len(state[5])
            self._gone.pop(path, None)
        if len(self._gone) > MOST_GONE:
            self._gone.clear()
            self._gone_since = self._generation

    def _drop(self, path: str) -> None:
        former = self._known.pop(path, None)
        if former is not None:
            self._characters -= len(path) + len(former[1][5])

    def since(self, mark: str) -> "tuple[list[dict[str, object]], list[str], bool]":
        """Entries and paths that are gone, each sorted, and whether the entries are all."""
        generation = self._known_generation(mark)
        found: "list[tuple[str, State]]" = []
        for path in reversed(self._known):
            when, state = self._known[path]
            if generation is not None and when <= generation:
                break
            found.append((path, state))
        gone: "list[str]" = []
        if generation is not None:
            for path in reversed(self._gone):
                if self._gone[path] <= generation:
                    break
                gone.append(path)
        entries = [_entry(path, state) for path, state in sorted(found)]
        return entries, sorted(gone), generation is None

    def _known_generation(self, mark: str) -> "int | None":
        epoch, _, number = mark.partition(":")
        if epoch != self._epoch or not (number.isascii() and number.isdecimal()):
            return None
        generation = int(number)
        return generation if self._gone_since <= generation <= self._generation else None


class Count:
    """How much there is to remember. Raises Refused when it is too much."""

    def __init__(self) -> None:
        self._entries = self._characters = 0

    def add(self, path: str, state: "State") -> None:
        self._entries += 1
        self._characters += len(path) + len(state[5])
        if self._entries > MOST_KNOWN or self._characters > KNOWN_CHARACTERS:
            raise Refused(
                f"Has more than {MOST_KNOWN} entries or {KNOWN_CHARACTERS} characters of names: "
                "too many to report changes. List its folders one by one.",
                "path",
            )


def _entry(path: str, state: "State") -> "dict[str, object]":
    mode, _, size, modified, _, target = state
    return {
        "path": path,
        "type": kind_of(mode),
        "size": size,
        "mode": stat.S_IMODE(mode),
        # As os.stat has it.
        "modified": modified // 10**9 + modified % 10**9 * 1e-9,
        "target": target,
    }
