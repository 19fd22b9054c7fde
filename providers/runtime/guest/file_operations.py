"""What can be done to files, each as a generator that never blocks for long.

It is given the workspace's descriptor and the operation's header, and yields an `Event`; None, so
that others have their turn; a number of seconds to be left alone for; or TAKE, and is sent what
the host sends next: bytes, or None at the end. What it returns is said in `done`. It raises
Refused, or OSError, which is then about the path.
"""

import errno
import os
import stat

from . import wire
from .kept import Refused
from .paths import (
    AT_ONCE,
    METADATA,
    MOST_DEPTH,
    ROOT,
    Found,
    end_of,
    entry,
    is_absolute,
    joined,
    kind,
    named_anywhere,
    open_file,
    open_folder,
    parse_anywhere,
    reach,
    refusal,
    walk,
)
from .protocol import CHUNK_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    Steps = Generator[Any, "bytes | None", "dict[str, object]"]

TAKE = object()

# What our own files are called in the workspace, for as long as they are there.
INTERNAL = ".cofferdam-"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A file of the kernel's has no size that is known before it is read. Some never end.
_UNSIZED_BYTES = 1024 * 1024
# How often a folder that is being removed may be found filled again.
_PASSES = 50


class Event:
    """Something for the host: a name, fields, and bytes, which go in the part `data`."""

    __slots__ = ("data", "fields", "name")

    def __init__(self, name: str, fields: "dict[str, object]", data: bytes = b"") -> None:
        self.name, self.fields, self.data = name, fields, data


def number(header: "dict[str, object]", field: str, most: int, default: "int | None") -> int:
    """A whole number of an operation. Raises Refused."""
    value = header.get(field)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value <= most:
        raise Refused(f"Must be a whole number from 0 to {most}.", field)
    return value


def list_folder(base: int, header: "dict[str, object]") -> "Steps":
    parts = parse_anywhere(header.get("path"))
    depth = number(header, "depth", 64, 1) or 1
    folder = reach(base, parts)
    count = size = 0
    lines: "list[bytes]" = []
    try:
        for found in walk(folder, depth):
            if found is None:
                yield None
                continue
            line = wire.dumps(described(parts, found)).encode("utf-8", "backslashreplace")
            if size + len(line) > CHUNK_BYTES - 2:
                yield Event("entries", {}, b"[" + b",".join(lines) + b"]")
                lines.clear()
                size = 0
            count += 1
            lines.append(line)
            size += len(line) + 1
    finally:
        os.close(folder)
    if lines:
        yield Event("entries", {}, b"[" + b",".join(lines) + b"]")
    return {"count": count}


def described(parts: "list[str]", found: Found) -> "dict[str, object]":
    """The entry of something below the folder of `parts`."""
    path = joined([*parts, found.path])
    if found.status is None:
        return {"path": path, "type": "other", "size": 0, "mode": 0, "modified": 0.0, "target": ""}
    return entry(path, found.status, found.folder, found.name)


def stat_one(base: int, header: "dict[str, object]") -> "Steps":
    parts = parse_anywhere(header.get("path"))
    yield None
    try:
        return {"entry": _look(base, parts)}
    except FileNotFoundError:
        return {"entry": None}


def _look(base: int, parts: "list[str]") -> "dict[str, object]":
    if not parts:
        return entry("", os.fstat(base))
    if parts == [ROOT]:
        return entry(ROOT, os.stat(ROOT))
    folder = reach(base, parts[:-1])
    try:
        name = parts[-1]
        return entry(joined(parts), os.lstat(name, dir_fd=folder), folder, name)
    finally:
        os.close(folder)


def make_folder(base: int, header: "dict[str, object]") -> "Steps":
    parts = named_anywhere(header.get("path"))
    yield None
    try:
        there = _look(base, parts)
    except FileNotFoundError:
        os.close(reach(base, parts, make=True))
        return {"found": False}
    end: "dict[str, object]" = there.get("end", there)  # type: ignore[assignment]
    if end["type"] != "directory":
        raise Refused("Something else has this name.", "path")
    return {"found": True}


def move(base: int, header: "dict[str, object]") -> "Steps":
    source = named_anywhere(header.get("path"))
    target = named_anywhere(header.get("target"), "target")
    yield None
    folder = reach(base, source[:-1])
    try:
        moved = os.lstat(source[-1], dir_fd=folder)
        try:
            _move(base, folder, source[-1], moved, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise refusal(error, "target") from None
            _require_removable(folder, moved)
            yield from _move_between(base, folder, source, target)
        else:
            METADATA.put(moved, joined(target), METADATA.of(moved))
        return {"entry": _look(base, target)}
    finally:
        os.close(folder)


def _require_removable(folder: int, moved: os.stat_result) -> None:
    """Raise Refused where a copy would be all that a move does."""
    if moved.st_dev != os.fstat(folder).st_dev:
        raise Refused("A file system is mounted there, which cannot be moved.", "path")
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
        raise Refused("Its folder cannot be changed.", "path")


def _move_between(
    base: int, folder: int, source: "list[str]", target: "list[str]"
) -> "Generator[None, Any, None]":
    """From one file system to another, as `mv` does it: a copy beside the target is put in its
    place, and then the source goes."""
    name = source[-1]
    onto = reach(base, target[:-1])
    draft = temporary_name()
    try:
        try:
            yield from _copy(folder, name, onto, draft, MOST_DEPTH)
            os.rename(draft, target[-1], src_dir_fd=onto, dst_dir_fd=onto)
        except OSError as error:
            raise refusal(error, "target") from None
        finally:
            # Nothing is there where it has its own name by now. Whoever leaves waits for nobody.
            for _ in discard(onto, onto, draft):
                continue
    finally:
        os.close(onto)
    yield from discard(folder if is_absolute(source) else base, folder, name)


def _copy(folder: int, name: str, onto: int, copy: str, depth: int) -> "Generator[None, Any, None]":
    """A file, link or folder, with its mode and time. Raises OSError, and Refused for a folder with
    something else in it, or with more than `depth` in each other."""
    status = os.lstat(name, dir_fd=folder)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=folder), copy, dir_fd=onto)
    elif stat.S_ISREG(status.st_mode):
        yield from _copy_file(folder, name, onto, copy)
    elif stat.S_ISDIR(status.st_mode):
        if not depth:
            raise Refused(f"Is deeper than {MOST_DEPTH} folders.", "path")
        os.mkdir(copy, 0o700, dir_fd=onto)
        below, made = open_folder(folder, name), open_folder(onto, copy)
        try:
            for each in os.listdir(below):
                yield from _copy(below, each, made, each, depth - 1)
            os.fchmod(made, stat.S_IMODE(status.st_mode))
            os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(below)
            os.close(made)
    else:
        raise Refused(f"Is moved within its file system only ({kind(status)}).", "path")


def _copy_file(folder: int, name: str, onto: int, copy: str) -> "Generator[None, Any, None]":
    fd, status = open_file(folder, name)
    try:
        made = os.open(copy, _NEW, 0o600, dir_fd=onto)
        try:
            offset = 0
            size = status.st_size
            while data := os.pread(fd, min(CHUNK_BYTES, size - offset), offset):
                offset += len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(made, view) :]
                yield None
            os.fchmod(made, stat.S_IMODE(status.st_mode))
            os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(made)
    finally:
        os.close(fd)


def _move(base: int, folder: int, name: str, moved: os.stat_result, target: "list[str]") -> None:
    onto = reach(base, target[:-1])
    try:
        try:
            there = os.lstat(target[-1], dir_fd=onto)
        except FileNotFoundError:
            there = None
        if there is not None and not (kind(there) == kind(moved) == "file"):
            raise Refused("A file or folder with this name exists, and is not replaced.", "target")
        os.rename(name, target[-1], src_dir_fd=folder, dst_dir_fd=onto)
    finally:
        os.close(onto)


def remove(base: int, header: "dict[str, object]") -> "Steps":
    parts = named_anywhere(header.get("path"))
    yield None
    try:
        folder = reach(base, parts[:-1])
    except FileNotFoundError:
        return {"found": False}
    try:
        # To move folders side by side takes a place in the same file system.
        heap = folder if is_absolute(parts) else base
        return {"found": (yield from discard(heap, folder, parts[-1]))}
    finally:
        os.close(folder)


def discard(base: int, folder: int, name: str) -> "Generator[None, Any, bool]":
    """Folders are moved side by side into one, however deep they are in each other."""
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            return True
    except FileNotFoundError:
        return False
    trash = temporary_name()
    try:
        os.mkdir(trash, 0o700, dir_fd=base)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _make_room(folder, name)
        os.mkdir(trash, 0o700, dir_fd=base)
    heap = -1
    try:
        heap = open_folder(base, trash)
        waiting, count = [_discard(folder, name, heap, 0)], 1
        while waiting:
            below = open_folder(heap, waiting[-1])
            try:
                for _ in range(_PASSES):
                    names = os.listdir(below)
                    if not names:
                        break
                    for done, each in enumerate(names):
                        if done % AT_ONCE == 0:
                            yield None
                        try:
                            if not stat.S_ISDIR(os.lstat(each, dir_fd=below).st_mode):
                                os.unlink(each, dir_fd=below)
                            else:
                                waiting.insert(0, _discard(below, each, heap, count))
                                count += 1
                        except FileNotFoundError:
                            continue
                else:
                    raise Refused("Another process adds files to it while it is removed.", "path")
            finally:
                os.close(below)
            os.rmdir(waiting.pop(), dir_fd=heap)
    finally:
        if heap >= 0:
            os.close(heap)
        try:
            os.rmdir(trash, dir_fd=base)
        except OSError:
            # What could not be removed is in it, under a name that says whose doing it is.
            pass
    return True


def _make_room(folder: int, name: str) -> None:
    """Where there is room for nothing new, remove one thing of what is to be removed."""
    below = open_folder(folder, name)
    try:
        for found in walk(below, MOST_DEPTH):
            if found is not None and found.status is not None:
                try:
                    if not stat.S_ISDIR(found.status.st_mode):
                        os.unlink(found.name, dir_fd=found.folder)
                    else:
                        os.rmdir(found.name, dir_fd=found.folder)
                except OSError:
                    continue
                return
    finally:
        os.close(below)


def _discard(folder: int, name: str, heap: int, count: int) -> str:
    """Move a folder to the heap, opened for us. Its name there."""
    before = os.lstat(name, dir_fd=folder)
    if before.st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=folder)
    os.rename(name, str(count), src_dir_fd=folder, dst_dir_fd=heap)
    return str(count)


def temporary_name() -> str:
    return INTERNAL + os.urandom(8).hex()


def read(base: int, header: "dict[str, object]") -> "Steps":
    parts = named_anywhere(header.get("path"))
    offset = number(header, "offset", 1 << 62, 0)
    length = number(header, "length", 1 << 62, 1 << 62)
    folder = reach(base, parts[:-1])
    try:
        fd, status = open_file(folder, parts[-1], follow=is_absolute(parts))
    finally:
        os.close(folder)
    try:
        # What is added from now on is not ours to wait for: it may never end.
        size = status.st_size or (_UNSIZED_BYTES if _is_of_kernel(status) else 0)
        end = min(size, offset + length)
        while offset < end:
            data = os.pread(fd, min(CHUNK_BYTES, end - offset), offset)
            if not data:
                break
            offset += len(data)
            yield Event("data", {}, data)
    finally:
        os.close(fd)
    return {"entry": entry(joined(parts), status)}


def _is_of_kernel(status: os.stat_result) -> bool:
    return status.st_dev == os.stat("/proc").st_dev


def write(base: int, header: "dict[str, object]") -> "Steps":
    parts = named_anywhere(header.get("path"))
    mode = None if header.get("mode") is None else number(header, "mode", 0o777, None)
    metadata = _metadata_in(header)
    place = _end_of_link(parts) if is_absolute(parts) else parts
    folder = reach(base, place[:-1], make=True)
    try:
        draft = Draft(folder, place[-1])
        try:
            while (data := (yield TAKE)) is not None:
                draft.add(data)
            METADATA.put(os.fstat(draft.fd), joined(place), metadata)
            status = draft.finish(mode)
        finally:
            draft.drop()
    finally:
        os.close(folder)
    said = entry(joined(parts), status)
    return {"entry": {**said, "metadata": metadata} if metadata else said}


def _end_of_link(parts: "list[str]") -> "list[str]":
    """Where a shell would write that is told to write there."""
    path = joined(parts)
    if not os.path.islink(path):
        return parts
    try:
        end = end_of(path)
    except FileNotFoundError:
        # So the links are no more than the kernel follows.
        end = os.path.realpath(path)
    return named_anywhere(end)


def _metadata_in(header: "dict[str, object]") -> "dict[str, str]":
    given = header.get("metadata") or {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise Refused("Must be texts by name.", "metadata")
    return given


class Draft:
    """A file being written beside the one that it is to replace. Raises Refused and OSError."""

    def __init__(self, folder: int, name: str) -> None:
        self._former: "int | None" = None
        try:
            there = os.lstat(name, dir_fd=folder)
            if not stat.S_ISREG(there.st_mode):
                raise Refused(f"Not a regular file ({kind(there)}).", "path")
            self._former = stat.S_IMODE(there.st_mode)
        except FileNotFoundError:
            pass
        self._folder, self._name, self._hidden = folder, name, temporary_name()
        self.fd = os.open(self._hidden, _NEW, 0o600, dir_fd=folder)
        self._left = True
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if data == bytes(len(data)):
            # It takes no room, as it may have taken none where it comes from.
            os.lseek(self.fd, self._size, os.SEEK_SET)
            return
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def finish(self, mode: "int | None") -> os.stat_result:
        """Put it in place, with `mode` or that of the former file. What it is then."""
        if mode is None:
            mode = 0o644 if self._former is None else self._former
        os.fchmod(self.fd, mode)
        os.ftruncate(self.fd, self._size)
        os.rename(self._hidden, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._left = False
        status = os.fstat(self.fd)
        now = os.lstat(self._name, dir_fd=self._folder)
        if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
            raise Refused("Another process replaced the file in the meantime.", "path")
        return status

    def drop(self) -> None:
        """Give the descriptor back, and what was not finished."""
        os.close(self.fd)
        if self._left:
            try:
                os.unlink(self._hidden, dir_fd=self._folder)
            except OSError:
                # The program was quicker.
                pass
