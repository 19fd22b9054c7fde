"""Take the files a program left behind, without being led astray by it.

Links are never followed, neither files nor folders; devices, sockets and pipes are not opened. Of a
single run every process has been killed before, but in a kept sandbox a program may change what is
looked at: so each folder is entered from the one above it, and what was opened is looked at again.
"""

import os
import stat

from .names import Omissions, escape, problem, too_large, too_many

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from collections.abc import Iterator

    # Size, time of the last change in nanoseconds, inode.
    Mark = tuple[int, int, int]
    # What there was, and what could not be looked at.
    Look = tuple[dict[str, Mark], list[list[str]]]

# How deep a file may lie, how deep it is looked for those that lie deeper, and at how many entries.
DEPTH_LIMIT, LOOK_LIMIT = 4, 16
SCAN_LIMIT = 2000
# Of all names together: they stand in the header of an answer.
NAMES_BYTES = 64 * 1024


def collect(
    root: str, limits: "dict[str, int]"
) -> "tuple[list[tuple[str, bytes]], list[list[str]]]":
    """The regular files below `root` as (relative name, content), and what was left out and why.

    Names are as `names.escape` has them. When there is nothing in it, `root` is removed: that is
    the quickest way to know.
    """
    try:
        os.rmdir(root)
        return [], []
    except OSError:
        return _collect(root, limits, ({}, []))


def look(root: str) -> "Look":
    """What is below `root` now, for `collect_new` to compare with."""
    marks: "dict[str, Mark]" = {}
    unseen = Omissions()
    for name, _, status in _walk(root, unseen):
        marks[name] = _mark(status)
    # That there is too much is said again: something new may be among it.
    return marks, [entry for entry in unseen.entries if entry[0]]


def collect_new(
    root: str, limits: "dict[str, int]", before: "Look"
) -> "tuple[list[tuple[str, bytes]], list[list[str]]]":
    """The same as `collect` of what was added or changed since `before`. Nothing is removed."""
    return _collect(root, limits, before)


def _mark(status: os.stat_result) -> "Mark":
    return status.st_size, status.st_mtime_ns, status.st_ino


def _collect(
    root: str, limits: "dict[str, int]", before: "Look"
) -> "tuple[list[tuple[str, bytes]], list[list[str]]]":
    marks, known = before
    found: "list[tuple[str, bytes]]" = []
    skipped, unseen = Omissions(), Omissions()
    room, names = limits["artifacts_total_bytes"], NAMES_BYTES
    for name, folder, status in _walk(root, unseen):
        if marks.get(name) == _mark(status):
            continue
        text = escape(name)
        content: "bytes | str" = _kind_problem(name, status) or problem(text)
        if not content and len(found) >= limits["artifact_count"]:
            content = too_many(limits["artifact_count"])
        if not content and len(text.encode()) > names:
            content = "the names are too long in total"
        if not content:
            content = _read(name.rpartition("/")[2], folder, limits, room)
        if isinstance(content, str):
            skipped.add(text, content)
            continue
        room -= len(content)
        names -= len(text.encode())
        found.append((text, content))
    skipped.add_claimed([entry for entry in unseen.entries if entry not in known])
    return found, skipped.entries


def _kind_problem(name: str, status: os.stat_result) -> str:
    """Why this is nothing that can be kept, "" where it is a file that lies where one may."""
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link: links are not followed"
    if name.count("/") > DEPTH_LIMIT:
        return f"too deep: a kept file has at most {DEPTH_LIMIT} folders above it"
    return "" if stat.S_ISREG(status.st_mode) else "not a regular file"


def _walk(root: str, skipped: Omissions) -> "Iterator[tuple[str, int, os.stat_result]]":
    """Everything below `root` but folders that are entered: name, its open folder, its status."""
    folders: "list[list[str]]" = [[]]
    scanned = 0
    while folders and scanned <= SCAN_LIMIT:
        path = folders.pop(0)
        prefix = "".join(f"{name}/" for name in path)
        try:
            folder = _open_folder([root, *path])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            skipped.add(escape(prefix), "unreadable")
            continue
        try:
            try:
                names = _names(folder)
            except OSError:
                skipped.add(escape(prefix), "unreadable")
                names = []
            for name in names:
                scanned += 1
                try:
                    status = os.lstat(name, dir_fd=folder)
                except FileNotFoundError:
                    continue
                except OSError:
                    # Of a folder that may be read and not entered, nothing can be looked at.
                    skipped.add(escape(prefix + name), "unreadable")
                    continue
                if stat.S_ISDIR(status.st_mode) and len(path) < LOOK_LIMIT:
                    folders.append([*path, name])
                else:
                    yield prefix + name, folder, status
        finally:
            os.close(folder)
    if scanned > SCAN_LIMIT:
        skipped.add("", f"too many entries: only {SCAN_LIMIT} were read")


def _open_folder(path: "list[str]") -> int:
    """Open a folder by way of those above it. Raises OSError, also for a link in any place."""
    above: "int | None" = None
    try:
        for name in path:
            status = os.lstat(name, dir_fd=above)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(name)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            if above is not None:
                os.close(above)
            above = folder
            # gVisor follows a link in spite of O_NOFOLLOW when O_DIRECTORY is set too.
            opened = os.fstat(folder)
            if (opened.st_dev, opened.st_ino) != (status.st_dev, status.st_ino):
                raise NotADirectoryError(name)
    except BaseException:
        if above is not None:
            os.close(above)
        raise
    assert above is not None
    return above


def _names(folder: int) -> "list[str]":
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > SCAN_LIMIT:
                break
    return sorted(names)


def _read(name: str, folder: int, limits: "dict[str, int]", left: int) -> "bytes | str":
    """The content, or the reason why it is left out. `left` is what all files may still have."""
    most = limits["artifact_bytes"]
    bound = min(most, left)
    try:
        if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
            return "not a regular file"
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return "unreadable"
    try:
        opened = os.fstat(fd)
        if not stat.S_ISREG(opened.st_mode):
            return "not a regular file"
        chunks: "list[bytes]" = []
        room = bound + 1
        while room > 0:
            chunk = os.read(fd, min(room, 1 << 20))
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            room -= len(chunk)
        if bound == most or opened.st_size > most:
            return too_large(most)
        return too_large(limits["artifacts_total_bytes"], "files")
    finally:
        os.close(fd)
