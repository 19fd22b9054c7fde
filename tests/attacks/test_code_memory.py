"""What a program tries to hold beyond its bound of memory where no cgroup counts it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.support.sandboxes import LocalProcess
from tests.support.without_root import without_root


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "lent"])
def ordinary(request: pytest.FixtureRequest) -> Iterator[LocalProcess]:
    """Sandboxes in bubblewrap of a user who is not root and has no cgroup."""
    require("bwrap")
    with without_root(lent=request.param, launcher="bubblewrap", pool_size=1) as process:
        yield process


# Each holds more than the 256 MiB it may have.
TAKES_TOO_MUCH = {
    "files in all places": """
        for place in ("/workspace", "/tmp", "/dev/shm"):
            for number in range(2):
                with open(f"{place}/{number}", "wb") as file:
                    for _ in range(45):
                        file.write(bytes(2**20))
        """,
    "a deleted file that stays open": """
        kept = []
        for place in ("/workspace", "/tmp", "/dev/shm"):
            for number in range(2):
                kept.append(open(f"{place}/{number}", "wb", buffering=0))
                os.unlink(f"{place}/{number}")
                for _ in range(45):
                    kept[-1].write(bytes(2**20))
        time.sleep(60)
        """,
    "what lies in sockets": """
        import socket
        for _ in range(12):
            if os.fork() == 0:
                kept = []
                try:
                    while True:
                        one, other = socket.socketpair()
                        kept += [one, other]
                        for each in (one, other):
                            each.setblocking(False)
                            try:
                                while True: each.send(bytes(65536))
                            except BlockingIOError:
                                pass
                except OSError:
                    time.sleep(100)
        time.sleep(100)
        """,
    "what lies in connections": """
        import socket
        server = socket.create_server(("127.0.0.1", 0), backlog=4096)
        for _ in range(12):
            if os.fork() == 0:
                kept = []
                try:
                    while True:
                        kept.append(socket.create_connection(server.getsockname()))
                        kept[-1].setblocking(False)
                        try:
                            while True: kept[-1].send(bytes(65536))
                        except BlockingIOError:
                            pass
                except OSError:
                    time.sleep(100)
        time.sleep(100)
        """,
    "page tables": """
        import mmap
        for _ in range(8):
            if os.fork() == 0:
                m = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
                m.madvise(mmap.MADV_NOHUGEPAGE)
                sum(m[at] for at in range(0, 64 << 30, 2 << 20))
                time.sleep(100)
        time.sleep(100)
        """,
    "memory areas": """
        import ctypes, mmap
        libc = ctypes.CDLL(None)
        for _ in range(30):
            if os.fork() == 0:
                m = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
                base = ctypes.addressof(ctypes.c_char.from_buffer(m))
                for at in range(0, 128 << 20, 8192):
                    libc.mprotect(ctypes.c_void_p(base + at), 4096, 1)
                time.sleep(100)
        time.sleep(100)
        """,
    "locks on parts of files": """
        import fcntl
        for number in range(20):
            if os.fork() == 0:
                files = [open(f"{number}-{one}", "wb") for one in range(100)]
                for part in range(400):
                    for file in files:
                        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * part)
                time.sleep(100)
        time.sleep(100)
        """,
}  # fmt: skip


@pytest.mark.parametrize("code", TAKES_TOO_MUCH.values(), ids=TAKES_TOO_MUCH)
def test_without_root_nothing_goes_past_the_bound_of_memory(
    ordinary: LocalProcess, code: str
) -> None:
    result = ordinary.run("import os, time\n" + textwrap.dedent(code), timeout=240)
    assert (result["out_of_memory"], result["exit_code"]) == (True, None), result
    assert ordinary.run("print('undisturbed')")["stdout"] == "undisturbed\n"


# What would belong to no process and no file is refused, each with the number of its error.
CANNOT_BE_HAD = {
    "a shared mapping without a file": ("mmap.mmap(-1, 1 << 20)", 12),
    "a shared mapping of zeros": (
        "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
        19,
    ),
    "huge pages": ("mmap.mmap(-1, 2 << 20, flags=0x40022)", 12),
    "pages moved into a pipe": ("check(libc.syscall(278, 1, 0, 0, 0))", 38),
    "a pipe of a megabyte": ("fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", 1),
    "a message queue": ("check(libc.msgget(0, 0o1600))", 38),
    "semaphores": ("check(libc.semget(0, 30000, 0o1600))", 38),
    "an access list": ("os.setxattr('main.py', 'system.posix_acl_access', b'')", 95),
}


@pytest.mark.parametrize(("make", "expected"), CANNOT_BE_HAD.values(), ids=CANNOT_BE_HAD)
def test_without_root_memory_that_belongs_to_nobody_cannot_be_had(
    ordinary: LocalProcess, make: str, expected: int
) -> None:
    result = ordinary.run(
        f"""
        import ctypes, fcntl, mmap, os
        libc = ctypes.CDLL(None, use_errno=True)
        def check(answer):
            if answer < 0:
                raise OSError(ctypes.get_errno(), "refused")
        try:
            {make}
            print("had")
        except OSError as error:
            print(error.errno)
        """
    )
    assert result["stdout"] == f"{expected}\n", result["stderr"]


def test_sockets_buffers_stay_as_they_are(ordinary: LocalProcess) -> None:
    result = ordinary.run(
        """
        import socket
        one, other = socket.socketpair()
        before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        print(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before)
        """
    )
    assert result["stdout"] == "True\n"


def test_empty_files_are_bounded_too(ordinary: LocalProcess) -> None:
    result = ordinary.run(
        """
        import os
        for place in ("/workspace", "/tmp", "/dev/shm"):
            made = 0
            try:
                while made < 50_000:
                    os.close(os.open(f"{place}/{made}", os.O_CREAT | os.O_WRONLY))
                    made += 1
            except OSError as error:
                print(error.errno, 10_000 < made < 17_000)
        """,
        timeout=20,
    )
    assert result["stdout"] == "28 True\n" * 3


UNDER_GVISOR = {
    "a shared mapping that is let go of": """
        import mmap
        m = mmap.mmap(-1, 1600 << 20)
        for at in range(0, 1600 << 20, 8 << 20):
            m[at : at + (8 << 20)] = b"x" * (8 << 20)
            m.madvise(mmap.MADV_DONTNEED)
        """,
    "memory that is a file": """
        for number in range(30):
            fd = os.memfd_create(f"hidden-{number}")
            for _ in range(7):
                os.write(fd, b"x" * (8 << 20))
        """,
    "what lies in sockets": TAKES_TOO_MUCH["what lies in sockets"],
}


@pytest.mark.parametrize("code", UNDER_GVISOR.values(), ids=UNDER_GVISOR)
def test_without_root_gvisor_bounds_all_memory_too(code: str) -> None:
    require("runsc")
    with without_root(launcher="gvisor", gvisor_platform="ptrace", pool_size=1) as process:
        result = process.run("import os, time\n" + textwrap.dedent(code), timeout=240)
        assert (result["out_of_memory"], result["exit_code"]) == (True, None), result
