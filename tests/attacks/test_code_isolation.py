"""What a program tries to learn or to leave behind where it shares a kernel with others."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from django.conf import settings

from providers.runtime.pool.pool import PoolSettings
from tests.conftest import require
from tests.support.docker_engine import Containers
from tests.support.sandboxes import Local, LocalProcess
from tests.support.warm_pools import WarmPool
from tests.support.without_root import without_root


@pytest.fixture(scope="module")
def ordinary() -> Iterator[LocalProcess]:
    """Sandboxes in bubblewrap of a user who is not root."""
    require("bwrap")
    with without_root(launcher="bubblewrap", pool_size=1) as process:
        yield process


@pytest.fixture(params=["bubblewrap", "bubblewrap without root", "runc"])
def shared(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """What a program prints in each kind of sandbox that shares the machine's kernel."""
    if request.param == "runc":
        containers: Containers = request.getfixturevalue("under_runc")
        yield lambda code: containers.run(code).stdout
        return
    require("bwrap")
    if request.param == "bubblewrap":
        local: Local = request.getfixturevalue("bubblewrap")
        yield lambda code: local.run(code).stdout
        return
    process: LocalProcess = request.getfixturevalue("ordinary")

    def run(code: str) -> str:
        printed: str = process.run(code)["stdout"]
        return printed

    yield run


WATCHING = {
    "inotify": "libc.inotify_init1(0)",
    "inotify, the older call": "libc.syscall(253)",
    "fanotify": "libc.fanotify_init(0, 0)",
    "dnotify": "fcntl.fcntl(os.open('/usr/lib', os.O_RDONLY), 1026, 1)",
    "a lease": "fcntl.fcntl(os.open('/usr/bin/env', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "what of a file is in memory": "libc.syscall(451, 3, 0, 0, 0)",
    "events of devices": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15).fileno()",
    "asynchronous requests": "libc.syscall(206, 100, ctypes.byref(ctypes.c_long(0)))",
    "keys": "libc.syscall(248, b'user', b'x', b'y', 1, -3)",
    "counters of the processor": "libc.syscall(298, 0, 0, -1, -1, 0)",
    "page faults": "libc.syscall(323, 0)",
    "requests on a ring": "libc.syscall(425, 8, 0)",
}  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are x86-64's")
def test_what_others_do_cannot_be_watched(shared: Callable[[str], str]) -> None:
    """Some inodes are the whole machine's, and so are the counts of what watches them."""
    printed = shared(
        f"""
        import ctypes, fcntl, os, socket
        libc = ctypes.CDLL(None, use_errno=True)
        for name, attempt in {WATCHING!r}.items():
            try:
                if eval(attempt) >= 0:
                    print(name)
            except OSError:
                pass
        print("tried")
        """
    )
    assert printed == "tried\n"


def test_a_watcher_works_where_the_kernel_is_the_sandboxs_own(gvisor: Local) -> None:
    result = gvisor.run(
        """
        import ctypes, os, struct
        libc = ctypes.CDLL(None)
        fd = libc.inotify_init1(0)
        assert libc.inotify_add_watch(fd, b"/workspace", 0x100) > 0
        open("/workspace/new", "w").close()
        print(os.read(fd, 4096)[16:].rstrip(b"\\0").decode())
        """
    )
    assert result.stdout == "new\n", result.stderr


LOCKED = ["/usr/bin/env", "/usr", "/", "/etc/hosts", "/cofferdam"]


@pytest.mark.parametrize("which", ["bubblewrap", "ordinary", "gvisor"])
def test_a_lock_on_a_shared_program_is_nobody_elses(
    which: str, request: pytest.FixtureRequest
) -> None:
    """Held here, it would keep whoever locks the same file waiting: the machine, or a sandbox."""
    require({"gvisor": "runsc"}.get(which, "bwrap"))
    code = f"""
        import fcntl, os
        for path in {LOCKED!r}:
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("locked")
        """
    with ExitStack() as held:
        for path in LOCKED[:2]:
            fd = os.open(path, os.O_RDONLY)
            held.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        printed = request.getfixturevalue(which).run(code)
    assert (printed if isinstance(printed, dict) else vars(printed))["stdout"] == "locked\n"


def test_two_sandboxes_hold_the_same_locks_at_the_same_time(bubblewrap: Local) -> None:
    code = f"""
        import fcntl, os, time
        paths = {LOCKED!r} + ["/dev/null", "/dev/urandom", "/proc/keys"]
        fds = [os.open(path, os.O_RDONLY) for path in paths]
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(1.5)
        print("held")
        """
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(bubblewrap.run, [code, code]))
    assert [result.stdout for result in results] == ["held\n"] * 2, results[0].stderr


@pytest.mark.parametrize("which", ["bubblewrap", "ordinary", "gvisor"])
def test_no_path_of_the_machine_is_told(which: str, request: pytest.FixtureRequest) -> None:
    require({"gvisor": "runsc"}.get(which, "bwrap"))
    code = """
        import os
        for name in ("mountinfo", "mounts", "mountstats", "maps", "cgroup", "environ", "cmdline"):
            try:
                print(open(f"/proc/self/{name}", errors="replace").read())
            except OSError:
                pass
        print(os.path.exists("/usr/local") and os.listdir("/usr/local") or [])
        """
    printed = request.getfixturevalue(which).run(code)
    told = (printed if isinstance(printed, dict) else vars(printed))["stdout"]
    assert "/workspace" in told
    assert told.endswith("[]\n")
    for path in (str(settings.DATA_DIR), "cofferdam-unprivileged-", "/dev/vda", "/dev/sda", "ext4"):
        assert path not in told


def test_what_the_kernel_tells_of_the_whole_machine_is_hidden(bubblewrap: Local) -> None:
    result = bubblewrap.run(
        """
        import os
        for name in ("cmdline", "diskstats", "key-users", "keys"):
            assert open(f"/proc/{name}").read() == "", name
        print(os.listdir("/proc/pressure") if os.path.exists("/proc/pressure") else [])
        """
    )
    assert result.stdout == "[]\n", result.stderr


def test_a_crash_starts_nothing_on_the_machine(shared: Callable[[str], str]) -> None:
    """Where core dumps are piped to a program, a limit of 0 does not hold; one of 1 does."""
    printed = shared(
        """
        import resource
        for wanted in ((0, 1), (0, 0)):
            try:
                resource.setrlimit(resource.RLIMIT_CORE, wanted)
            except ValueError:
                pass
        print(resource.getrlimit(resource.RLIMIT_CORE))
        """
    )
    assert printed == "(1, 1)\n"


def test_access_lists_that_no_cgroup_counts_cannot_be_made(shared: Callable[[str], str]) -> None:
    """3,000 of them were 190 MB of the kernel's memory, and 7 MB of the sandbox's."""
    printed = shared(
        """
        import os
        open("file", "w").close()
        for name in ("system.posix_acl_access", "user.x"):
            try:
                os.setxattr("file", name, b"")
                print("made")
            except OSError as error:
                print(error.errno)
        """
    )
    assert printed == "95\n95\n"


# What a program may make of a node, and what not: null, a terminal, fuse, tun, a disk.
MAKING = """
    import os, stat
    made = []
    devices = ((1, 3), (5, 0), (10, 229), (10, 200), (8, 0))
    for place in ("/workspace", "/tmp", "/dev/shm"):
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            for major, minor in devices:
                try:
                    os.mknod(f"{place}/device", kind | 0o666, os.makedev(major, minor))
                except PermissionError:
                    continue
                made.append((place, kind, major, minor))
        os.mkfifo(f"{place}/pipe")
        os.mknod(f"{place}/socket", stat.S_IFSOCK | 0o666)
        os.mknod(f"{place}/file", stat.S_IFREG | 0o666)
    print(made)
"""


def test_no_program_makes_a_device(shared: Callable[[str], str]) -> None:
    assert shared(MAKING) == "[]\n"


@pytest.mark.parametrize("which", ["gvisor", "under_gvisor"])
def test_no_program_makes_a_device_in_a_kernel_that_would_let_everybody(
    which: str, request: pytest.FixtureRequest
) -> None:
    require("runsc")
    result = request.getfixturevalue(which).run(MAKING)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_terminals_are_left_for_others(bubblewrap: Local) -> None:
    code = """
        import os
        made = 0
        try:
            while made < 100:
                os.openpty()
                made += 1
        except OSError:
            print(made)
    """
    assert 1 < int(bubblewrap.run(code).stdout) <= 16


def test_marks_on_folders_and_io_priority_do_not_pass_to_the_next_run() -> None:
    require("bwrap")
    level = PoolSettings(size=1, capacity=2, isolation="tenant")
    look = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        marks = ctypes.c_long(0)
        fd = os.open("/tmp", os.O_RDONLY)
        libc.ioctl(fd, 0x80086601, ctypes.byref(marks))
        print(marks.value, libc.syscall(252, 1, 1))
        """
    leave = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        os.mkdir("/tmp/own")
        for path in ("/tmp/own", "/tmp", "/workspace", "/dev/shm"):
            fd = os.open(path, os.O_RDONLY)
            print(libc.ioctl(fd, 0x40086602, ctypes.byref(ctypes.c_long(0xC0))))
        print(libc.syscall(251, 1, 1, 3 << 13))
        """
    with WarmPool(level) as pool:
        before = pool.run(look, "alice").stdout
        assert pool.run(leave, "alice").stdout == "-1\n" * 5
        assert pool.run(look, "alice").stdout == before
