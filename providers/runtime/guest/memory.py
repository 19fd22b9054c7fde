"""What a sandbox has of the machine's memory, looked at where no cgroup counts it.

The system call filter (launchers/seccomp.py) rules out what belongs to no process and no file.
What is left is counted here: processes with their page tables, files with their inodes, sockets,
memory areas and locks. The kernel itself bounds pipes, 64 MiB and two pages for each further one.
"""

import os

from .processes import others, read_small

# A tmpfs inode with its names, in bytes: 0.6 to 1 KiB on Linux 6.
INODE_BYTES = 1024
# The most that one socket can hold: 208 KiB sent (net.core.wmem_default), 128 KiB of options
# (net.core.optmem_max), and what the kernel rounds up.
SOCKET_BYTES = 384 * 1024
# The kernel's account of one memory area, and how many of its lines are read at most. A line has
# 73 bytes at least; who has more areas than that is taken to have all that the kernel allows.
AREA_BYTES, AREAS_READ, AREAS_MOST = 256, 512 * 1024, 65_530
# No program needs as many locks as fill this, some 8,000.
LOCKS_READ = 512 * 1024

# Areas and locks are dear to look at, and slow to make.
RARELY = 8


class Memory:
    """The memory that everything in the sandbox but this process uses."""

    def __init__(self, places: "list[str]", usage: "int | None" = None) -> None:
        """`places` are the file systems in memory that are the sandbox's own.

        `usage` is the file of a memory cgroup of gVisor's that holds the sandbox alone.
        """
        self._places = [place for place in places if os.path.isdir(place)]
        self._looks = 0
        self._areas = 0
        self._sentry = os.path.exists("/proc/sentry-meminfo")
        self._usage = usage
        self._before = self._given_out() if self._sentry else 0

    def in_use(self, limit: int) -> int:
        """Bytes now.

        The cheap figure counts what processes share once per process, so above `limit` the exact
        one is asked for.
        """
        if self._sentry:
            return max(0, self._given_out() - self._before)
        pids = others()
        files = sum(map(_file_bytes, self._places))
        besides = _socket_bytes() if self._places else 0
        if self._looks % RARELY == 0:
            self._areas = sum(map(_area_bytes, pids)) + (_lock_bytes(limit) if self._places else 0)
        self._looks += 1
        besides += self._areas
        rough = _together(map(_resident_bytes, pids), files) + besides
        if rough <= limit:
            return rough
        return _together(map(_proportional_bytes, pids), files) + besides

    def _given_out(self) -> int:
        """By gVisor's kernel: to the sandbox's cgroup, or in all where the kernel is its own."""
        if self._usage is not None:
            return int(os.pread(self._usage, 64, 0))
        return _sentry_bytes()


def _together(each: "map[tuple[int, int]]", files: int) -> int:
    """What processes have, and files. A file that is mapped is in both, and counted once."""
    private = shared = 0
    for own, mapped in each:
        private += own
        shared += mapped
    return private + max(shared, files)


def _resident_bytes(pid: int) -> "tuple[int, int]":
    """What a process has to itself, and of shared memory."""
    names = (b"RssAnon", b"RssShmem", b"VmPTE", b"VmSwap", b"VmRSS")
    sizes = _sizes(f"/proc/{pid}/status", names)
    all_resident = sizes.pop(b"VmRSS", 0)
    if b"RssAnon" not in sizes:
        return all_resident, 0
    shared = sizes.pop(b"RssShmem", 0)
    return sum(sizes.values()), shared


def _proportional_bytes(pid: int) -> "tuple[int, int]":
    """What is shared is divided among those who share it."""
    sizes = _sizes(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon", b"Pss_Shmem", b"SwapPss"))
    if not sizes:
        return _resident_bytes(pid)
    shared = sizes.pop(b"Pss_Shmem", 0)
    tables = _sizes(f"/proc/{pid}/status", (b"VmPTE",))
    return sum(sizes.values()) + sum(tables.values()), shared


def _sizes(path: str, names: "tuple[bytes, ...]") -> "dict[bytes, int]":
    """The named lines of such a file of /proc in bytes, as far as they are there."""
    sizes = {}
    try:
        with open(path, "rb") as lines:
            for line in lines:
                name, _, value = line.partition(b":")
                if name in names:
                    sizes[name] = int(value.split()[0]) * 1024
    except OSError:
        return {}
    return sizes


def _file_bytes(place: str) -> int:
    found = os.statvfs(place)
    blocks = (found.f_blocks - found.f_bfree) * found.f_frsize
    return blocks + (found.f_files - found.f_ffree) * INODE_BYTES


def _socket_bytes() -> int:
    """All sockets of our network namespace at the most that they can hold."""
    try:
        used = read_small("/proc/net/sockstat").partition(b"sockets: used")[2].split()
    except OSError:
        return 0
    return int(used[0]) * SOCKET_BYTES if used else 0


def _area_bytes(pid: int) -> int:
    """The kernel's own notes on the memory areas of a process."""
    try:
        found = _read(f"/proc/{pid}/maps", AREAS_READ)
    except OSError:
        return 0
    return AREA_BYTES * (AREAS_MOST if len(found) >= AREAS_READ else found.count(b"\n"))


def _lock_bytes(limit: int) -> int:
    """More than `limit` where there are more locks on files than anybody needs."""
    try:
        return limit + 1 if len(_read("/proc/locks", LOCKS_READ)) >= LOCKS_READ else 0
    except OSError:
        return 0


def _read(path: str, most: int) -> bytes:
    """A file of /proc up to `most` bytes. The kernel hands out a page or so at a time."""
    found = []
    fd = os.open(path, os.O_RDONLY)
    try:
        while most > 0 and (part := os.read(fd, min(most, 1 << 16))):
            found.append(part)
            most -= len(part)
    finally:
        os.close(fd)
    return b"".join(found)


def _sentry_bytes() -> int:
    """What gVisor's kernel has given out: memory of processes, shared memory, and files."""
    sizes = _sizes("/proc/meminfo", (b"MemTotal", b"MemFree"))
    return sizes.get(b"MemTotal", 0) - sizes.get(b"MemFree", 0)


def disk_in_use() -> "dict[str, int]":
    """What the files here take, and may take, in bytes."""
    try:
        told = os.statvfs(".")
    except OSError:
        return {}
    size = told.f_frsize
    return {"disk": (told.f_blocks - told.f_bfree) * size, "disk_total": told.f_blocks * size}
