"""What is known of the workspace's files, and since when: any number of readers, each with a mark.

A mark is the epoch of this memory and a generation, which counts the looks that found something.
"""

import os
import stat

from .kept import Refused
from .paths import kind_of
from .protocol import KNOWN_CHARACTERS, MOST_KNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    # Mode, inode, size, modified and changed in nanoseconds, target of a link.
    State = tuple[int, int, int, int, int, str]

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
