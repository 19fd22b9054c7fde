"""Going through the folders below one, while a program may change them."""

import os
import stat

from .kept import Refused
from .paths import FOLDER, MOST_DEPTH, open_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How many names are held at most, and how many are looked at before others have their turn.
MOST_NAMES, AT_ONCE = 200_000, 500


class Found:
    """A name in a folder, and what it was when it was looked at. `folder` is open until the next.

    `status` is None where the folder may be read and not entered.
    """

    __slots__ = ("folder", "name", "path", "status")

    def __init__(self, path: str, folder: int, name: str, status: "os.stat_result | None") -> None:
        self.path, self.folder, self.name, self.status = path, folder, name, status


def walk(
    folder: int,
    depth: int,
    *,
    complete: bool = False,
    without: str = "",
    entering: "Callable[[int, str], None] | None" = None,
) -> "Iterator[Found | None]":
    """Everything below `folder`, `depth` levels deep; None where others may have their turn.

    Names that begin as `without` does are as if they were not there. `entering` is called with
    each folder's descriptor and path before its names are read, `folder` itself as "".

    Names of one folder come sorted, each followed by what is in it. What goes meanwhile is left
    out. With `complete` nothing else is: raises OSError for a folder that cannot be read and
    Refused for one that is too deep.
    """
    levels: "list[tuple[int, str, list[str]]]" = []
    held = looked = 0
    try:
        # Not a duplicate: how far it was read would be shared with others who read it.
        opened: "int | None" = os.open(".", FOLDER, dir_fd=folder)
        prefix = ""
        while True:
            if opened is not None:
                names: "list[str]" = []
                levels.append((opened, prefix, names))
                if entering is not None:
                    entering(opened, prefix[:-1])
                for each in _names(opened, complete or len(levels) == 1):
                    if without and each.startswith(without):
                        continue
                    names.append(each)
                    held += 1
                    if held > MOST_NAMES:
                        raise Refused(f"Has more than {MOST_NAMES} entries.", code="exhausted")
                    if held % AT_ONCE == 0:
                        yield None
                names.sort(reverse=True)
            fd, prefix, names = levels[-1]
            opened = None
            if not names:
                levels.pop()
                os.close(fd)
                if not levels:
                    return
                continue
            name = names.pop()
            held -= 1
            looked += 1
            if looked % AT_ONCE == 0:
                yield None
            try:
                status: "os.stat_result | None" = os.lstat(name, dir_fd=fd)
            except (FileNotFoundError, ProcessLookupError):
                continue
            except PermissionError:
                status = None
            path = f"{prefix}{name}"
            yield Found(path, fd, name, status)
            if status is not None and stat.S_ISDIR(status.st_mode):
                opened = _enter(fd, name, path, len(levels) < depth, complete)
                prefix = f"{path}/"
    finally:
        for fd, _, _ in levels:
            os.close(fd)


def _names(folder: int, complete: bool) -> "Iterator[str]":
    """Those in an open folder. The kernel lets some be opened and not be read, as in /proc."""
    try:
        with os.scandir(folder) as entries:
            for each in entries:
                yield each.name
    except OSError:
        if complete:
            raise


def _enter(folder: int, name: str, path: str, wanted: bool, complete: bool) -> "int | None":
    if not wanted:
        if complete:
            raise Refused(f"{path!r} is deeper than {MOST_DEPTH} folders.", "path")
        return None
    try:
        return open_folder(folder, name)
    except FileNotFoundError:
        return None
    except OSError:
        if complete:
            raise
        return None
