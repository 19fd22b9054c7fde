"""Which files are in the memory of processes."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# A program may have as many mappings as it likes.
_MOST_BYTES = 1024 * 1024


def mapped_for_writing(device: int) -> "Iterator[int | None]":
    """Inodes of `device` in the memory of processes that write through it; None now and then.

    A file system need not put down in a file's times that it is written so.
    Only of processes that we may look into, which are those of our user.
    """
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        yield None
        for line in _maps(pid).split(b"\n"):
            fields = line.split(maxsplit=5)
            # Address, rights, offset, device, inode, and what of it is a file's path.
            if len(fields) < 6 or fields[1][1:2] != b"w" or fields[1][3:4] != b"s":
                continue
            major, _, minor = fields[3].partition(b":")
            if os.makedev(int(major, 16), int(minor, 16)) == device:
                yield int(fields[4])


def mapped_files() -> "set[bytes]":
    """Paths of the files that are in this process's memory."""
    lines = [line.split(maxsplit=5) for line in _maps("self").split(b"\n")]
    return {fields[5] for fields in lines if len(fields) == 6 and fields[5].startswith(b"/")}


def _maps(pid: str) -> bytes:
    data = b""
    try:
        fd = os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # It has ended, or is none of ours.
        return b""
    try:
        while len(data) < _MOST_BYTES and (piece := os.read(fd, 1 << 16)):
            data += piece
    except OSError:
        return data
    finally:
        os.close(fd)
    return data
