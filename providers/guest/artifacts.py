"""Take the files a program left behind, without being led astray by it.

Runs when every process of the program has been killed, so nothing changes underneath. Links are
never followed, neither files nor folders; devices, sockets and pipes are not opened.
"""

import os
import stat

DEPTH_LIMIT = 4
SCAN_LIMIT = 2000


def collect(
    root: str, limits: "dict[str, int]"
) -> "tuple[list[tuple[str, bytes]], list[list[str]]]":
    """The regular files below `root` as (relative name, content), and what was left out and why.

    When there is nothing in it, `root` is removed: that is the quickest way to know.
    """
    try:
        os.rmdir(root)
        return [], []
    except OSError:
        return _collect(root, limits)


def _collect(
    root: str, limits: "dict[str, int]"
) -> "tuple[list[tuple[str, bytes]], list[list[str]]]":
    found: "list[tuple[str, bytes]]" = []
    skipped: "list[list[str]]" = []
    room = limits["artifacts_total_bytes"]
    folders = [(root, "", 0)]
    scanned = 0
    while folders and scanned <= SCAN_LIMIT:
        path, prefix, depth = folders.pop(0)
        try:
            # gVisor follows a link in spite of O_NOFOLLOW when O_DIRECTORY is set too.
            if not _is_folder(path):
                continue
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            _skip(skipped, prefix, "unreadable")
            continue
        try:
            names = _names(folder)
        except OSError:
            _skip(skipped, prefix, "unreadable")
            names = []
        for name in names:
            scanned += 1
            try:
                if not _is_plain(name):
                    _skip(skipped, prefix, "name is not plain text")
                elif _is_folder(name, folder) and depth < DEPTH_LIMIT:
                    folders.append((f"{path}/{name}", f"{prefix}{name}/", depth + 1))
                elif len(found) >= limits["artifact_count"]:
                    _skip(skipped, prefix + name, "too many files")
                else:
                    content = _read(name, folder, min(limits["artifact_bytes"], room))
                    if isinstance(content, str):
                        _skip(skipped, prefix + name, content)
                        continue
                    room -= len(content)
                    found.append((prefix + name, content))
            except OSError:
                # Of a folder that may be read and not entered, the entries cannot be looked at.
                _skip(skipped, prefix + name, "unreadable")
        os.close(folder)
    if scanned > SCAN_LIMIT:
        _skip(skipped, "", "too many entries")
    return found, skipped


def _skip(skipped: "list[list[str]]", name: str, reason: str) -> None:
    if len(skipped) < 50:
        skipped.append([name[:200], reason])


def _names(folder: int) -> "list[str]":
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > SCAN_LIMIT:
                break
    return sorted(names)


def _is_folder(name: str, folder: "int | None" = None) -> bool:
    return stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)


def _is_plain(name: str) -> bool:
    try:
        return name.isprintable() and bool(name.encode())
    except UnicodeEncodeError:
        return False


def _read(name: str, folder: int, bound: int) -> "bytes | str":
    """The content, or the reason why it is left out."""
    if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
        return "not a regular file"
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return "unreadable"
    try:
        chunks: "list[bytes]" = []
        room = bound + 1
        while room > 0:
            chunk = os.read(fd, min(room, 1 << 20))
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            room -= len(chunk)
        return "too large"
    finally:
        os.close(fd)
