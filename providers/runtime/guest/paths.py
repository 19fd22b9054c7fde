"""Paths of files: what is one, and how to get there by descriptor.

A path is relative to the workspace, and no link is followed on the way; or it is absolute, and
leads where it leads a shell of the same user. The second has ROOT for its first component.

Going through the folders below one, while a program may change them.
"""

import errno
import os
import stat

from .kept import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# The most components of a path, and bytes of it and of one of them.
MOST_DEPTH, PATH_BYTES, NAME_BYTES = 64, 4096, 255
_MOST_SHOWN = 200
# Of the metadata of all files together.
METADATA_BYTES = 4 * 1024 * 1024
ROOT = "/"

# What file systems take their times from (CLOCK_REALTIME_COARSE). Until it has ticked a file may
# change again and have the same times.
FILE_CLOCK = 5

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# A place on the way: whoever may go through it need not be able to read it.
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_EXHAUSTED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.EAGAIN, errno.EMLINK),
)


def refusal(error: OSError, field: str) -> Refused:
    """What to say of a call that failed for what stands in the workspace."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _EXHAUSTED:
        return Refused(reason, code="exhausted")
    if error.errno == errno.ENOENT:
        return Refused(reason, field, "missing")
    if error.errno == errno.ELOOP:
        reason = "The path has a symbolic link, and links are not followed"
    return Refused(reason, field)


def parse(path: object, field: str = "path") -> "list[str]":
    """The components of a path below the workspace; none for the workspace itself.

    Raises Refused for what is none, leads out of it, or no file system can have.
    """
    if not isinstance(path, str):
        raise Refused("Must be text.", field)
    if "\0" in path or path.startswith("/"):
        raise Refused("Must be relative to the workspace, without NUL.", field)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Refused("Must not contain `..`.", field)
    try:
        longest = max([len(os.fsencode(part)) for part in parts], default=0)
        # An archive has a slash behind the longest path of a folder.
        whole = len(os.fsencode("/".join(parts)))
    except UnicodeEncodeError:
        raise Refused("Contains characters that a file name cannot have.", field) from None
    if longest > NAME_BYTES or whole > PATH_BYTES or len(parts) > MOST_DEPTH:
        raise Refused("Is too long or too deep.", field)
    return parts


def parse_anywhere(path: object, field: str = "path") -> "list[str]":
    """The same for a path that may also be absolute: then ROOT and the components below it."""
    if isinstance(path, str) and path.startswith(ROOT):
        return [ROOT, *parse(path.lstrip(ROOT), field)]
    return parse(path, field)


def named_anywhere(path: object, field: str = "path") -> "list[str]":
    """The same, but neither the workspace nor the root."""
    parts = parse_anywhere(path, field)
    if parts in ([], [ROOT]):
        raise Refused("Must name something in a folder.", field)
    return parts


def is_absolute(parts: "list[str]") -> bool:
    return parts[:1] == [ROOT]


def joined(parts: "list[str]") -> str:
    """The path of these components."""
    return ROOT + "/".join(parts[1:]) if is_absolute(parts) else "/".join(parts)


def shown(path: str) -> str:
    """As errors have it, in front of the reason: all of it would leave no room for that."""
    return repr(path) if len(path) <= _MOST_SHOWN else f"{path[:_MOST_SHOWN]!r}…"


def named(path: object, field: str = "path") -> "list[str]":
    """The same, but not the workspace itself."""
    parts = parse(path, field)
    if not parts:
        raise Refused("Must name something in the workspace.", field)
    return parts


def open_folder(parent: int, name: str) -> int:
    """Descriptor of a folder in another. Raises OSError, also for a link to one."""
    before = os.lstat(name, dir_fd=parent)
    if stat.S_ISLNK(before.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISDIR(before.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return _same(os.open(name, FOLDER, dir_fd=parent), before)


def is_empty(parent: int, name: str) -> bool:
    """Whether a folder in another has nothing in it; False where nobody can tell."""
    try:
        fd = open_folder(parent, name)
    except OSError:
        return False
    try:
        with os.scandir(fd) as entries:
            return next(entries, None) is None
    except OSError:
        return False
    finally:
        os.close(fd)


def is_too_long(path: str) -> bool:
    """Whether nothing could be done with a file of this path."""
    return len(path) > PATH_BYTES // 4 and len(os.fsencode(path)) > PATH_BYTES


def open_file(parent: int, name: str, *, follow: bool = False) -> "tuple[int, os.stat_result]":
    """Descriptor and state of a regular file. Raises Refused for what is none, and OSError.

    With `follow` a link leads to its file, but to none of those in which the kernel tells of this
    process or its parent, which are no program's. gVisor opens the second's for everybody.
    """
    before = os.stat(name, dir_fd=parent, follow_symlinks=follow)
    if not stat.S_ISREG(before.st_mode):
        raise Refused(f"Not a regular file ({kind(before)}).", "path")
    flags = _FILE & ~os.O_NOFOLLOW if follow else _FILE
    fd = _same(os.open(name, flags, dir_fd=parent), before)
    if follow and _tells_of_us(fd):
        os.close(fd)
        raise Refused(os.strerror(errno.EACCES), "path")
    return fd, os.fstat(fd)


def _tells_of_us(fd: int) -> bool:
    ours = tuple(f"/proc/{pid}/" for pid in (os.getpid(), os.getppid()))
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(ours)
    except OSError:
        return True


def _same(fd: int, before: os.stat_result) -> int:
    """`fd`, when it is of what was looked at before it was opened.

    gVisor follows a link in spite of O_NOFOLLOW when O_DIRECTORY is set too; and whoever looks
    first may be given something else to open.
    """
    now = os.fstat(fd)
    if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return fd


def reach(base: int, parts: "list[str]", *, make: bool = False) -> int:
    """A new descriptor of a folder below `base`, or of an absolute place. With `make` what is not
    there is made."""
    if is_absolute(parts):
        return _reach_anywhere(parts, make)
    fd = os.dup(base)
    try:
        for name in parts:
            if make:
                try:
                    os.mkdir(name, dir_fd=fd)
                except FileExistsError:
                    pass
            below = open_folder(fd, name)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reach_anywhere(parts: "list[str]", make: bool) -> int:
    """The kernel goes there, with our rights, through links as well."""
    try:
        return os.open(joined(parts), _WAY)
    except FileNotFoundError:
        if not make or parts == [ROOT]:
            raise
    above = _reach_anywhere(parts[:-1], make)
    try:
        try:
            os.mkdir(parts[-1], dir_fd=above)
        except FileExistsError:
            pass
        return os.open(parts[-1], _WAY, dir_fd=above)
    finally:
        os.close(above)


def kind(status: os.stat_result) -> str:
    return kind_of(status.st_mode)


def kind_of(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


class Metadata:
    """What clients say about files, by name, as long as this process runs.

    Sandboxes have no extended attributes: the filter of system calls refuses them, as their kernel
    memory is not counted. A file is known by its device and number, so that its metadata stays with
    it when it is renamed. The file systems of sandboxes are in memory, and use no number again.
    """

    def __init__(self) -> None:
        self._known: "dict[tuple[int, int], tuple[str, dict[str, str]]]" = {}
        self._size = 0

    def of(self, status: os.stat_result) -> "dict[str, str]":
        """The metadata of this file."""
        return self._known.get((status.st_dev, status.st_ino), ("", {}))[1]

    def put(self, status: os.stat_result, path: str, metadata: "dict[str, str]") -> None:
        """Replace the metadata of this file. Raises Refused if there is no room."""
        self._drop((status.st_dev, status.st_ino))
        if not metadata:
            return
        size = _size(metadata)
        if self._size + size > METADATA_BYTES:
            self._drop_lost()
        if self._size + size > METADATA_BYTES:
            reason = f"The metadata of all files together may have {METADATA_BYTES} bytes."
            raise Refused(reason, "metadata", "exhausted")
        self._known[status.st_dev, status.st_ino] = (path, metadata)
        self._size += size

    def _drop(self, key: "tuple[int, int]") -> None:
        former = self._known.pop(key, None)
        if former is not None:
            self._size -= _size(former[1])

    def _drop_lost(self) -> None:
        """Drop the metadata of files that are no longer at their path."""
        for key, (path, _) in list(self._known.items()):
            try:
                status = os.lstat(path)
            except OSError:
                self._drop(key)
                continue
            if (status.st_dev, status.st_ino) != key:
                self._drop(key)


def _size(metadata: "dict[str, str]") -> int:
    """About the bytes of memory that a file's metadata takes."""
    return 500 + sum(len(name) + len(value) + 200 for name, value in metadata.items())


METADATA = Metadata()


def entry(
    path: str, status: os.stat_result, folder: int = -1, name: str = ""
) -> "dict[str, object]":
    """What is said of a file. The target of a link is read where `folder` and `name` lead to it.

    Of an absolute path it is also said where a link leads in the end, and the file's metadata.
    """
    said: "dict[str, object]" = {
        "path": path,
        "type": kind(status),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "modified": status.st_mtime,
        "target": "",
    }
    if name and stat.S_ISLNK(status.st_mode):
        try:
            said["target"] = os.readlink(name, dir_fd=folder)
        except OSError:
            # It is another thing by now.
            said["target"] = ""
    if path.startswith(ROOT):
        if stat.S_ISLNK(status.st_mode):
            _say_where_it_leads(said, path)
        elif metadata := METADATA.of(status):
            said["metadata"] = metadata
    return said


def end_of(path: str) -> str:
    """Where a path leads. Raises OSError, also for more links than the kernel follows.

    Python would follow them all, each with thousands of steps, and in each other.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _say_where_it_leads(said: "dict[str, object]", path: str) -> None:
    try:
        end = end_of(path)
        status = os.lstat(end)
    except OSError:
        return
    is_place = end.startswith(ROOT) and not stat.S_ISLNK(status.st_mode)
    if is_place and not is_too_long(end):
        said["end"] = {"path": end, "type": kind(status), "mode": stat.S_IMODE(status.st_mode)}


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
