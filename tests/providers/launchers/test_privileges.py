"""A program in a sandbox has no privileges, and cannot get at what watches over it."""

from __future__ import annotations

import os
import platform
import textwrap

import pytest

from tests.conftest import require
from tests.support.sandboxes import Local

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


def test_every_sandbox_has_a_user_of_its_own(bubblewrap: Local) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can hand out users")
    users = [int(bubblewrap.run("import os\nprint(os.getuid())").stdout) for _ in range(3)]
    assert len(set(users)) == 3
    assert all(1_900_000_000 <= user < 2_100_000_000 for user in users)
