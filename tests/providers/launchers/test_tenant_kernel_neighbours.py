"""What code can do to another run of its own tenant, in the gVisor kernel that both are in."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator

import pytest

from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from tests.attacks.test_code_isolation import MAKING
from tests.conftest import require
from tests.providers.launchers.tenant_kernels import Going, Kernels
from tests.support.docker_engine import new_pool_id

# Nobody's text has it, but a program can look for it in pieces.
MARK = "K" + "EY-"
SECRET = MARK + secrets.token_hex(16)
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()

VICTIM = f"""
    import ctypes, os, socket, time
    secret = "{SECRET}"
    for place in ("/workspace", "/tmp", "/dev/shm"):
        with open(f"{{place}}/of-the-victim", "w") as file:
            file.write(secret)
        os.chmod(f"{{place}}/of-the-victim", 0o666)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\\0of-the-victim")
    abstract.listen()
    server = socket.create_server(("127.0.0.1", 5000))
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(4711, 4096, 0o1666)
    assert segment >= 0, os.strerror(ctypes.get_errno())
    print("ready", flush=True)
    while not os.path.exists("/tmp/go"):
        time.sleep(0.05)
"""

LOOK = f"""
    import ctypes, hashlib, os, re, socket
    libc = ctypes.CDLL(None, use_errno=True)
    mark = bytes({list(MARK.encode())})
    def is_it(data):
        return any(
            hashlib.sha256(data[at.start():at.start() + {len(SECRET)}]).hexdigest() == "{DIGEST}"
            for at in re.finditer(re.escape(mark), data)
        )
    found = []
    for folder, folders, names in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys", "usr", "cofferdam")]
        for name in names:
            path = os.path.join(folder, name)
            if name == "of-the-victim":
                found.append(path)
            if os.path.isfile(path) and os.stat(path).st_size < 100_000:
                try:
                    if is_it(open(path, "rb").read()):
                        found.append(path)
                except OSError:
                    pass
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    if pids != [1, os.getpid()]:
        found.append(pids)
    for pid in pids:
        for name in ("environ", "cmdline", "cwd/of-the-victim", "root/of-the-victim"):
            try:
                if is_it(open(f"/proc/{{pid}}/{{name}}", "rb").read()):
                    found.append((pid, name))
            except OSError:
                pass
    looked = 0
    for pid in (1, "self"):
        try:
            memory = open(f"/proc/{{pid}}/mem", "rb", 0)
            areas = open(f"/proc/{{pid}}/maps").read().splitlines()
        except OSError:
            continue
        for area in areas:
            bounds, rights = area.split()[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if "r" not in rights:
                continue
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, OverflowError, ValueError):
                continue
            looked += len(data)
            if is_it(data):
                found.append(("memory", pid, area))
    assert looked > 1_000_000, looked
    for path in [f"/proc/{{pid}}/fd/{{number}}" for pid in (1, "self") for number in range(64)]:
        try:
            if "socket" in os.readlink(path):
                os.close(os.open(path, os.O_RDWR))
                found.append(path)
        except OSError:
            pass
    try:
        socket.socket(socket.AF_UNIX).connect("\\0of-the-victim")
        found.append("abstract socket")
    except ConnectionRefusedError:
        pass
    try:
        socket.create_connection(("127.0.0.1", 5000), timeout=2)
        found.append("loopback")
    except ConnectionRefusedError:
        pass
    if libc.shmget(4711, 4096, 0) != -1:
        found.append("shared memory")
    for path in ("/dev/runs", "/run"):
        if set(os.listdir(path)) - {{"passwd", "group"}}:
            found.append((path, os.listdir(path)))
    print(found)
"""


@pytest.fixture(scope="module", params=["runsc", pytest.param("docker", marks=pytest.mark.slow)])
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernels]:
    """A kernel is the same wherever it runs, and so has to be what holds in it."""
    require("runsc")
    launcher = None
    if request.param == "docker":
        request.getfixturevalue("engine")
        launcher = DockerLauncher(DockerSettings(runtime="runsc", pool_id=new_pool_id()))
    kernels = Kernels(tmp_path_factory.mktemp("kernels"), launcher)
    yield kernels
    kernels.close()


@pytest.fixture(scope="module")
def victim(kernels: Kernels) -> Iterator[Going]:
    """A run of the same tenant that goes on, and has all that one can have."""
    victim = kernels.begin(
        "alice", VICTIM, timeout=120, environment={"TOKEN": SECRET}, arguments=None
    )
    assert victim.came is None
    yield victim
    victim.end()


def test_sockets_of_a_neighbour_are_listed_and_nothing_else_is(
    kernels: Kernels, victim: Going
) -> None:
    """gVisor's /proc/net is that of the whole kernel, and what docs/security.md says of it."""
    result = kernels.run(
        "alice",
        """
        import os, socket
        listed = set()
        for name in sorted(os.listdir("/proc/self/net")):
            text = open(f"/proc/self/net/{name}").read()
            if "of-the-victim" in text or "0100007F:1388" in text:
                listed.add(name)
        print(sorted(listed))
        for make in (
            lambda: socket.socket(socket.AF_UNIX).connect("\\0of-the-victim"),
            lambda: socket.create_connection(("127.0.0.1", 5000), timeout=2),
        ):
            try:
                make()
                print("reached")
            except ConnectionRefusedError:
                pass
        """,
    )
    assert (result.stdout, result.stderr) == ("['tcp', 'unix']\n", "")


def test_no_run_makes_a_device(kernels: Kernels) -> None:
    result = kernels.run("alice", MAKING)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_nothing_of_a_neighbour_can_be_found(kernels: Kernels, victim: Going) -> None:
    result = kernels.run("alice", LOOK)
    assert (result.stdout, result.stderr) == ("[]\n", "")
    assert "memory" in kernels.run("alice", f"    own = '{SECRET}'\n{LOOK}").stdout


def test_nothing_of_a_run_before_can_be_found(kernels: Kernels) -> None:
    kernels.run("alice", f"kept = ['{SECRET}' for _ in range(1000)]")
    result = kernels.run("alice", LOOK)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_a_neighbour_cannot_be_ended_or_slowed(kernels: Kernels, victim: Going) -> None:
    result = kernels.run(
        "alice",
        """
        import os, resource
        done = []
        for pid in [*range(1, 400), -1]:
            if pid == os.getpid():
                continue
            for what in (
                lambda: os.kill(pid, 9),
                lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
                lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)),
            ):
                try:
                    what()
                    done.append(pid)
                except (OSError, OverflowError, ValueError):
                    pass
        print(done)
        """,
    )
    assert result.stdout == "[]\n", result.stderr
    assert victim.came is None


def test_no_right_in_the_kernel_can_be_had(kernels: Kernels) -> None:
    result = kernels.run(
        "alice",
        """
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        NEW = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000}
        done = []
        def tried(name, status):
            if status != -1:
                done.append(name)
                if name.startswith("clone") and status == 0:
                    os._exit(0)
        for name, flag in NEW.items():
            tried(f"unshare {name}", libc.unshare(flag))
            tried(f"clone {name}", libc.syscall(56, flag | 17, 0, 0, 0, 0))
            tried(f"setns {name}", libc.setns(os.open(f"/proc/self/ns/{name[:3].replace('mou', 'mnt')}", 0), 0)
                  if os.path.exists(f"/proc/self/ns/{name[:3].replace('mou', 'mnt')}") else -1)
        tried("clone3", libc.syscall(435, b"\\0" * 64, 64))
        tried("umount", libc.umount2(b"/workspace", 2))
        tried("umount proc", libc.umount2(b"/proc", 2))
        tried("mount", libc.mount(b"proc", b"/tmp", b"proc", 0, None))
        tried("cgroup", libc.mount(b"memory", b"/tmp", b"cgroup", 0, b"memory"))
        tried("ptrace", libc.ptrace(16, 1, 0, 0))
        tried("keyctl", libc.syscall(250, 0, -3, 1))
        tried("add_key", libc.syscall(248, b"user", b"name", b"text", 4, -3))
        tried("inotify", libc.inotify_init1(0))
        tried("chroot", libc.chroot(b"/tmp"))
        tried("setuid", libc.setuid(0))
        tried("sethostname", libc.sethostname(b"x", 1))
        for path in ("/", "/etc", "/run", "/dev", "/dev/runs", "/usr", "/sys", "/proc/sys/kernel"):
            try:
                open(f"{path}/x", "w")
                done.append(path)
            except OSError:
                pass
        status = open("/proc/self/status").read()
        print(done, os.getuid() >= 20000, os.getgroups(), "CapEff:\\t0000000000000000" in status)
        import pwd
        print(pwd.getpwuid(os.getuid()).pw_name)
        """,
    )
    assert result.stdout == "[] True [] True\nsandbox\n", result.stderr


def test_a_nuisance_ends_and_its_neighbours_do_not_notice(kernels: Kernels, victim: Going) -> None:
    """Memory, processes, files and output: each is bounded for one run, by its own doing."""
    bomb = kernels.run("alice", "held = []\nwhile True: held.append(bytearray(1 << 20))")
    assert (bomb.out_of_memory, bomb.exit_code) == (True, None)
    shared = kernels.run(
        "alice",
        """
        import mmap, os
        for _ in range(4):
            if os.fork() == 0: break
        area = mmap.mmap(-1, 100 << 20)
        while True:
            for at in range(0, 100 << 20, 4096): area[at] = 1
        """,
    )
    assert shared.out_of_memory
    forks = kernels.run(
        "alice",
        """
        import os, time
        made = 0
        try:
            while made < 500:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                made += 1
        except OSError as error:
            print(made < 100, error.errno)
        """,
    )
    # Each process has memory of its own.
    assert forks.out_of_memory or forks.stdout == "True 11\n", forks
    disk = kernels.run(
        "alice",
        """
        try:
            with open("/dev/shm/filler", "wb") as file:
                while True: file.write(bytes(1 << 20))
        except OSError as error:
            print(error.errno)
        """,
    )
    assert disk.out_of_memory or disk.stdout in ("27\n", "28\n"), disk
    assert victim.came is None
    assert kernels.run("alice", "print('undisturbed')").stdout == "undisturbed\n"


def test_a_run_that_nobody_listens_to_holds_up_itself_alone(kernels: Kernels) -> None:
    """Its frames stay with it once its credit is used up; the stream is free for the others."""
    flood = "import os\nwhile True: os.write(1, b'x' * 65536)"
    silent = kernels.start("alice")
    lane = silent.guest.lane

    async def stop_listening() -> None:
        lane._transport.pause_reading()
        # As if the host's own side had no room.
        lane.pause_writing()

    going = Going(kernels, silent, flood, timeout=15)
    assert going.spoken.wait(60)
    kernels.loop.call(stop_listening())
    for _ in range(3):
        assert kernels.run("alice", "print('x' * 150_000)").stdout.count("x") == 150_000
    assert lane._granted >= 0
    going.end()


def test_two_tenants_are_in_two_kernels(kernels: Kernels, victim: Going) -> None:
    boot = "print(open('/proc/sentry-meminfo').read() != '', __import__('os').uname().nodename)"
    assert kernels.run("bob", boot).stdout == "True sandbox\n"
    assert kernels.kernel("bob").sentry is not kernels.kernel("alice").sentry
    assert kernels.run("bob", LOOK).stdout == "[]\n"
