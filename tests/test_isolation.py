"""A program in a sandbox sees nothing of this machine, and can do nothing to it."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from tests.conftest import require
from tests.sandboxes import Local

TRY = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, function, *arguments):
    try:
        outcome = function(*arguments)
    except (OSError, ValueError):
        return
    if outcome != -1:
        print("succeeded:", name)
"""


def trying(code: str) -> str:
    """Code that may `attempt` things and says which of them succeeded."""
    return TRY + textwrap.dedent(code)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of this machine's loopback that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            yield port


def test_there_is_no_network_but_an_empty_loopback(local: Local) -> None:
    result = local.run("import socket\nprint([name for _, name in socket.if_nameindex()])")
    assert result.stdout == "['lo']\n"


def test_nothing_of_the_host_can_be_reached(local: Local, listener: int) -> None:
    addresses = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None)}
    with socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0cofferdam-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
            import socket
            for address in {sorted(addresses | {"127.0.0.1", "8.8.8.8", "169.254.169.254"})!r}:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                with socket.socket(family) as connection:
                    connection.settimeout(1)
                    try:
                        connection.connect((address, {listener}))
                        print("reached", address)
                    except OSError:
                        pass
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect({name!r})
                    print("reached the abstract socket")
                except OSError:
                    pass
            try:
                socket.getaddrinfo("example.com", 80)
                print("resolved a name")
            except OSError:
                print("alone")
        """
        assert local.run(code).stdout == "alone\n"


def test_only_ordinary_sockets_can_be_made(local: Local) -> None:
    """A VSOCK one would reach the hypervisor: that family has no namespaces."""
    code = """
        import socket
        for family in range(50):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                try:
                    socket.socket(family, kind)
                except OSError:
                    continue
                print(socket.AddressFamily(family).name)
                break
    """
    made = set(local.run(code).stdout.split())
    assert made <= {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}
    assert "AF_UNIX" in made


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_nothing_of_our_environment_is_passed_on(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[launcher])
    monkeypatch.setenv("PLANTED", "planted-secret")
    local = Local(launcher, pool_size=1)
    try:
        assert "planted-secret" not in local.run("export; cat /proc/self/environ", "bash").stdout
        code = "import glob, os\nprint(sorted(os.environ))\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try: print(open(path).read())\n    except OSError: pass"  # fmt: skip
        seen = local.run(code).stdout
    finally:
        local.close()
    assert "planted-secret" not in seen
    allowed = {"PATH", "HOME", "LANG", "TMPDIR", "PWD", "LC_CTYPE"}
    assert set(eval(seen.splitlines()[0])) <= allowed


def test_no_file_of_this_machine_is_there_but_its_programs(local: Local) -> None:
    paths = [
        *("/root", "/home", "/etc/passwd", "/etc/shadow", "/etc/hostname", "/var", "/run", "/boot"),
        *("/opt", "/srv", "/mnt", "/media"),
        str(django_settings.DATA_DIR),
        str(django_settings.BASE_DIR),
        __file__,
        "/proc/1/root/etc/passwd",
        "/proc/1/cwd/..",
    ]
    if local.launcher == "bubblewrap":  # gVisor's own devices are none of the host's
        paths += ["/dev/kmsg", "/dev/mem", "/dev/sda", "/dev/vda", "/dev/fuse"]
    code = f"import os\nprint([path for path in {paths!r} if os.path.lexists(path)])"
    assert local.run(code).stdout == "[]\n"


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_a_data_directory_among_the_programs_is_hidden(launcher: str, settings: Any) -> None:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[launcher])
    if not os.access("/usr/local", os.W_OK):
        pytest.skip("only for whoever may write below /usr")
    with tempfile.TemporaryDirectory(dir="/usr/local", prefix="cofferdam-test-") as folder:
        settings.DATA_DIR = Path(folder)
        secret = Path(folder, "secret")
        secret.write_text("secret")
        for path in (Path(folder), secret):
            path.chmod(0o755)
        local = Local(launcher, pool_size=1)
        try:
            code = f"import os\nprint(os.path.exists({folder!r}) and os.listdir({folder!r}) or [])"
            result = local.run(code)
            assert (result.stdout, result.stderr) == ("[]\n", "")
        finally:
            local.close()


def test_only_the_own_places_can_be_written_to(local: Local) -> None:
    code = """
        import os
        for folder, folders, names in os.walk("/"):
            folders[:] = [name for name in folders if name not in ("proc", "sys") and folder.count("/") < 2]
            try:
                with open(os.path.join(folder, ".probe"), "w"):
                    print(folder)
                os.unlink(os.path.join(folder, ".probe"))
                folders.clear()
            except OSError:
                pass
            for name in names:
                path = os.path.join(folder, name)
                if not path.startswith("/dev/") and not os.path.islink(path) and os.access(path, os.W_OK):
                    print(path)
    """
    written = local.run(code, timeout=30).stdout.split()
    assert {"/workspace", "/tmp", "/dev/shm"} <= set(written)
    assert set(written) <= {"/workspace", "/tmp", "/dev/shm", "/workspace/main.py"}


def test_no_setting_of_the_kernel_can_be_written(local: Local) -> None:
    code = """
        import os
        for folder, folders, names in os.walk("/proc"):
            # Whoever may read /proc/pressure may ask there to be woken.
            folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self", "pressure")]
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path) and os.access(path, os.W_OK):
                    try:
                        fd = os.open(path, os.O_RDWR)
                        os.pwrite(fd, os.pread(fd, 4096, 0), 0)
                        print(path)
                    except OSError:
                        pass
        print("looked")
    """
    assert local.run(code, timeout=30).stdout == "looked\n"


def test_only_the_own_processes_are_there(local: Local) -> None:
    code = "import os\nprint(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))"
    assert local.run(code).stdout == "[1, 2]\n"


def test_a_program_shares_its_process_group_with_nobody(local: Local) -> None:
    """A group that began outside of the sandbox would be shown as 0."""
    result = local.run("import os\nprint(0 in (os.getpgrp(), os.getsid(0)))")
    assert result.stdout == "False\n"


def test_the_program_is_nobody_in_particular(local: Local) -> None:
    code = """
        import os
        print(os.getresuid()[0] * 3 == sum(os.getresuid()), 0 in os.getresuid(), 0 in os.getresgid(), os.getgroups())
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print([status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(status.get(name, "0"), 16)])
        print(status.get("NoNewPrivs", "1").strip(), status.get("Seccomp", "2").strip())
    """
    ids, capabilities, flags = local.run(code).stdout.splitlines()
    assert ids == "True False False []"
    assert capabilities == "[]"
    assert flags in ("1 2", "1 0" if local.launcher == "gvisor" else "")


def test_privileges_cannot_be_had_back(local: Local) -> None:
    code = """
        for number in (0, 1000, 65534, 1):
            if number != os.getuid():
                attempt(f"setuid {number}", os.setuid, number)
                attempt(f"setgid {number}", os.setgid, number)
        attempt("setgroups", os.setgroups, [0])
        attempt("chown", os.chown, "artifacts", 0, 0)
        attempt("chroot", os.chroot, "/tmp")
        attempt("sethostname", socket.sethostname, "elsewhere")
        attempt("mount", libc.mount, b"tmpfs", b"/tmp", b"tmpfs", 0, None)
        attempt("bind mount", libc.mount, b"/usr", b"/tmp", None, 4096, None)
        attempt("remount", libc.mount, None, b"/usr", None, 32, None)
        attempt("umount", libc.umount2, b"/workspace", 2)
        attempt("umount proc", libc.umount2, b"/proc", 2)
        attempt("ptrace the supervisor", libc.ptrace, 16, 1, 0, 0)
        attempt("reboot", libc.reboot, 0xfee1dead)
        attempt("swapon", libc.swapon, b"/tmp", 0)
        attempt("oom score of the supervisor", lambda: open("/proc/1/oom_score_adj", "wb", 0).write(b"1000"))
        print("tried")
    """
    result = local.run(trying(code))
    assert (result.stdout, result.exit_code) == ("tried\n", 0), result.stderr


def test_the_hosts_scheduler_and_devices_cannot_be_asked_for_more(bubblewrap: Local) -> None:
    """Under gVisor these would concern its own kernel alone."""
    code = """
        attempt("oom score", lambda: open("/proc/self/oom_score_adj", "wb", 0).write(b"-999"))
        attempt("nice", os.nice, -5)
        attempt("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
        attempt("mknod", os.mknod, "/tmp/null", 0o20666, os.makedev(1, 3))
        print("tried")
    """
    result = bubblewrap.run(trying(code))
    assert (result.stdout, result.exit_code) == ("tried\n", 0), result.stderr


# Numbers of what the C library has no function for.
_CALLS = {
    "x86_64": {"keyctl": 250, "add_key": 248, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "perf_event_open": 298, "pidfd_getfd": 438, "open_tree": 428, "clone3": 435, "kcmp": 312},
    "aarch64": {"keyctl": 219, "add_key": 217, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "perf_event_open": 241, "pidfd_getfd": 438, "open_tree": 428, "clone3": 435, "kcmp": 272},
}  # fmt: skip


def test_calls_that_reach_into_the_kernel_are_denied(bubblewrap: Local) -> None:
    calls = _CALLS.get(platform.machine(), {})
    code = f"""
        for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
            attempt(f"unshare {{flag:x}}", libc.unshare, flag)
        for name, number in {calls!r}.items():
            for argument in (0, 1, -1):
                if libc.syscall(number, argument, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):
                    print(name, ctypes.get_errno())
        attempt("ptrace a child", libc.ptrace, 0, 0, 0, 0)
        attempt("personality", libc.personality, 0x0040000)
        attempt("setns", libc.setns, os.open("/proc/self/ns/net", os.O_RDONLY), 0)
        attempt("process_vm_readv", libc.process_vm_readv, 1, 0, 0, 0, 0, 0)
        print("tried")
    """
    result = bubblewrap.run(trying(code))
    assert (result.stdout, result.exit_code) == ("tried\n", 0), result.stderr


def test_a_user_namespace_cannot_be_cloned(bubblewrap: Local) -> None:
    number = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
    code = f"""
        pid = libc.syscall({number}, 0x10000000 | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        print(pid, ctypes.get_errno())
    """
    assert bubblewrap.run(trying(code)).stdout == "-1 1\n"


def test_the_supervisor_cannot_be_looked_into(bubblewrap: Local) -> None:
    code = """
        import os
        for name in ("mem", "environ", "maps", "auxv", "stack", "syscall", "pagemap", "io"):
            try:
                with open(f"/proc/1/{name}", "rb") as file:
                    if file.read(1): print("read", name)
            except OSError:
                pass
        for name in ("fd", "map_files", "fdinfo"):
            try:
                if os.listdir(f"/proc/1/{name}"): print("listed", name)
            except OSError:
                pass
        for name in ("root", "cwd", "exe", "fd/0", "fd/3", "ns/net"):
            try:
                print("followed", name, os.readlink(f"/proc/1/{name}"))
            except OSError:
                pass
    """
    assert bubblewrap.run(code).stdout == ""


def test_gvisor_keeps_the_supervisor_out_of_reach(gvisor: Local) -> None:
    code = """
        own = [os.stat("/dev/null").st_ino, os.fstat(1).st_ino, os.fstat(2).st_ino]
        def take(fd, flags):
            if os.fstat(os.open(f"/proc/1/fd/{fd}", flags)).st_ino in own:
                raise OSError("only what the program has anyway")
        for fd in range(20):
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                attempt(f"descriptor {fd}", take, fd, flags)
        for turn in ("as itself", "as root of a namespace"):
            attempt(f"memory {turn}", lambda: open("/proc/1/mem", "rb").read(1))
            attempt(f"kill {turn}", os.kill, 1, 9)
            attempt(f"stop {turn}", os.kill, 1, 19)
            attempt(f"ptrace {turn}", libc.ptrace, 16, 1, 0, 0)
            libc.unshare(0x10000000)
        print("tried")
    """
    result = gvisor.run(trying(code))
    assert (result.stdout, result.exit_code) == ("tried\n", 0), result.stderr


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os\nfor fd in os.listdir('/proc/self/fd'):\n    if os.path.lexists(f'/proc/self/fd/{fd}'): print(fd, os.readlink(f'/proc/self/fd/{fd}'))"),
        ("bash", "for fd in /proc/$$/fd/*; do echo ${fd##*/} $(readlink $fd); done"),
        ("nodejs", "for (const fd of fs.readdirSync('/proc/self/fd')) { try { console.log(fd, fs.readlinkSync('/proc/self/fd/' + fd)) } catch {} }"),
    ],
)  # fmt: skip
def test_the_channel_is_not_among_the_programs_descriptors(
    bubblewrap: Local, language: str, code: str
) -> None:
    if language == "nodejs":
        require("node")
        code = f"const fs = require('fs'); {code}"
    lines = bubblewrap.run(code, language).stdout.splitlines()
    targets = {line.split()[1].partition(":")[0] for line in lines if len(line.split()) > 1}
    assert targets
    anonymous = {"pipe", "anon_inode", "/dev/null", "/proc/2/fd", "/proc/self/fd", "/workspace/main.sh"}  # fmt: skip
    assert targets <= anonymous


def test_gvisor_keeps_the_channel_from_the_program_too(gvisor: Local) -> None:
    code = """
        import os, stat
        for fd in range(1024):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode): print(fd)
            except OSError:
                pass
    """
    assert gvisor.run(code).stdout == ""


def test_two_sandboxes_share_nothing_one_after_the_other(local: Local) -> None:
    places = ("/workspace", "/tmp", "/dev/shm")
    local.run(f"for place in {places!r}: open(place + '/left', 'w').write('secret')")
    for _ in range(3):
        result = local.run(f"import os\nprint([os.listdir(place) for place in {places!r}])")
        assert result.stdout in ("[['main.py', 'artifacts'], [], []]\n", "[['artifacts', 'main.py'], [], []]\n")  # fmt: skip


def test_two_sandboxes_share_nothing_at_the_same_time(local: Local) -> None:
    code = """
        import ctypes, os, socket, sys, time
        libc = ctypes.CDLL(None)
        for place in ("/workspace", "/tmp", "/dev/shm"):
            open(f"{place}/{number}", "w").close()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\\0name-{number}")
        server = socket.create_server(("127.0.0.1", 5000))
        libc.shmget(1000 + number, 4096, 0o1666)
        time.sleep(1)
        other = 1 - number
        seen = [place for place in ("/workspace", "/tmp", "/dev/shm") if os.path.exists(f"{place}/{other}")]
        try:
            socket.socket(socket.AF_UNIX).connect(f"\\0name-{other}")
            seen.append("abstract socket")
        except OSError:
            pass
        if libc.shmget(1000 + other, 4096, 0) != -1:
            seen.append("shared memory")
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
        print(seen, len(processes))
    """
    ready = threading.Barrier(2)

    def run(number: int) -> str:
        ready.wait()
        return local.run(f"number = {number}\n{textwrap.dedent(code)}").stdout

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == ["[] 2\n", "[] 2\n"]


def test_two_sandboxes_draw_different_random_numbers(local: Local) -> None:
    """They may come of one and the same process."""
    code = "import os, random, secrets, uuid\nprint(random.random(), uuid.uuid4(), secrets.token_hex(8))"
    drawn = [local.run(code).stdout.split() for _ in range(3)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3


def test_the_namespaces_are_not_the_hosts(bubblewrap: Local) -> None:
    kinds = ["cgroup", "ipc", "mnt", "net", "pid", "uts"]
    if os.geteuid() != 0:
        # As root every sandbox has a user id of its own instead.
        kinds.append("user")
    code = f"import os\nfor kind in {kinds!r}: print(os.readlink(f'/proc/self/ns/{{kind}}'))"
    inside = bubblewrap.run(code).stdout.split()
    assert len(inside) == len(kinds)
    assert not set(inside) & {os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}


def test_every_sandbox_has_a_user_of_its_own(bubblewrap: Local) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can hand out users")
    users = [int(bubblewrap.run("import os\nprint(os.getuid())").stdout) for _ in range(3)]
    assert len(set(users)) == 3
    assert all(1_900_000_000 <= user < 2_100_000_000 for user in users)


def test_every_result_says_what_isolated_it(local: Local) -> None:
    for code in ("print(1)", "raise ValueError", "while True: pass"):
        assert local.run(code, timeout=0.6).metadata["runtime"] == local.launcher


def test_gvisor_is_really_in_between(gvisor: Local) -> None:
    code = """
        import ctypes
        buffer = ctypes.create_string_buffer(10_000)
        ctypes.CDLL(None).klogctl(3, buffer, len(buffer))
        print(buffer.value.decode())
    """
    assert "Starting gVisor" in gvisor.run(code).stdout


def test_the_kernel_is_the_hosts_in_bubblewrap(bubblewrap: Local) -> None:
    """The counterpart of the test above: it can tell the two apart."""
    result = bubblewrap.run("print(open('/proc/sys/kernel/osrelease').read().strip())")
    assert result.stdout.strip() == platform.release()
