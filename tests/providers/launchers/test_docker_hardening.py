"""What a container is like, seen from the program in it, under runc and under gVisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from providers.runtime.pool.hardening import GVISOR, RUNC, Hardening
from tests.support.docker_engine import Containers

# Number of the call on x86-64 by name; all of them with arguments that mean nothing.
_FORBIDDEN_CALLS = {
    "mount": 165, "pivot_root": 155, "unshare": 272, "setns": 308, "ptrace": 101, "bpf": 321,
    "keyctl": 250, "add_key": 248, "userfaultfd": 323, "perf_event_open": 298, "init_module": 175,
    "kexec_load": 246, "io_uring_setup": 425, "open_by_handle_at": 304, "process_vm_readv": 310,
}  # fmt: skip

LOOKS = {
    "the user": """
        import json, os
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print(json.dumps({
            "ids": [*os.getresuid(), *os.getresgid()],
            "seccomp": int(status["Seccomp"]),
            "groups": sorted(set(os.getgroups()) - {os.getgid()}),
            "capabilities": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff")],
        }))
    """,
    "privileges": """
        import ctypes, json, os
        PR_GET_NO_NEW_PRIVS = 39
        can = []
        for uid in (0, 1, 1000):
            try:
                os.setuid(uid)
                can.append(uid)
            except PermissionError:
                pass
        print(json.dumps([ctypes.CDLL(None).prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), can]))
    """,
    "system calls": f"""
        import ctypes, json, platform
        assert platform.machine() == "x86_64"
        libc = ctypes.CDLL(None, use_errno=True)
        outcome = {{}}
        for name, number in {_FORBIDDEN_CALLS!r}.items():
            libc.syscall(number, 0, 0, 0, 0, 0)
            outcome[name] = ctypes.get_errno()
        print(json.dumps(outcome))
    """,
    "network": """
        import json, socket
        def attempt(family, address):
            try:
                with socket.socket(family) as probe:
                    probe.settimeout(2)
                    probe.connect(address)
                return "connected"
            except OSError as error:
                return "refused"
        try:
            socket.getaddrinfo("debian.org", 443)
            name = "resolved"
        except OSError:
            name = "refused"
        print(json.dumps({
            "interfaces": [name for _, name in socket.if_nameindex()],
            "outside": attempt(socket.AF_INET, ("1.1.1.1", 53)),
            "gateway": attempt(socket.AF_INET, ("172.17.0.1", 2375)),
            "name": name,
        }))
    """,
    "what can be written": """
        import json, os
        written = []
        for folder in ("/", "/etc", "/usr/bin", "/usr/lib/python3", "/var", "/root", "/home",
                       "/dev", "/proc", "/proc/sys/kernel", "/sys", "/sys/fs/cgroup", "/run",
                       "/workspace", "/tmp", "/dev/shm"):
            try:
                with open(folder + "/mark", "w") as file:
                    file.write("x")
                written.append(folder)
            except OSError:
                pass
        print(json.dumps(written))
    """,
    "sockets and mounts": """
        import json, os, stat
        sockets = []
        for folder, _, names in os.walk("/"):
            if folder.startswith(("/proc", "/sys")):
                continue
            for name in names:
                try:
                    if stat.S_ISSOCK(os.lstat(os.path.join(folder, name)).st_mode):
                        sockets.append(os.path.join(folder, name))
                except OSError:
                    pass
        shared = [
            line.split()[1] for line in open("/proc/mounts")
            if line.split()[2] in ("ext4", "xfs", "btrfs", "9p", "overlay", "zfs")
        ]
        nameservers = open("/etc/resolv.conf").read()
        print(json.dumps([sockets, sorted(shared), nameservers.split()]))
    """,
    "the channel": """
        import json, os
        own = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)} | {OUTPUT}
        opened = []
        try:
            numbers = os.listdir("/proc/1/fd")
        except PermissionError:
            numbers = []
        for number in numbers:
            path = f"/proc/1/fd/{number}"
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                try:
                    os.close(os.open(path, flags | os.O_NONBLOCK))
                except OSError:
                    continue
                if os.readlink(path) not in own:
                    opened.append(os.readlink(path))
        for name in ("mem", "root", "cwd", "exe"):
            try:
                os.open(f"/proc/1/{name}", os.O_RDONLY)
                opened.append(name)
            except OSError:
                pass
        print(json.dumps(opened))
    """,
    "the environment": "import json, os; print(json.dumps(dict(os.environ)))",
    # The last one: it may end what all of them run in.
    "the supervisor": """
        import json, os, signal
        delivered = []
        for number in sorted(signal.Signals):
            try:
                os.kill(1, number)
                delivered.append(number.name)
            except PermissionError:
                pass
        print(json.dumps([os.stat("/proc/1").st_uid, os.getuid(), delivered]))
    """,
}


@dataclass(frozen=True)
class Seen:
    """What programs in a container have seen, and how the engine describes the container."""

    by: dict[str, Any]
    attributes: dict[str, Any]
    is_gvisor: bool


@pytest.fixture(scope="module", params=["runc", "runsc"])
def seen(request: pytest.FixtureRequest, containers_of: Callable[[str], Containers]) -> Seen:
    containers = containers_of(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COFFERDAM_TEST_SECRET", "must stay outside")
        sandbox = containers.start()
        (container,) = containers.present()
        try:
            by = containers.look_at_all_in(sandbox, LOOKS)
        finally:
            containers.loop.call(sandbox.destroy())
    return Seen(by, container.attrs, containers.launcher.runtime == "gvisor")


def test_the_program_is_an_own_user_without_any_capability(seen: Seen) -> None:
    found = dict(seen.by["the user"])
    ids = set(found.pop("ids"))
    assert len(ids) == 1
    if seen.is_gvisor:
        # This user is gVisor's.
        assert ids == {65534}
    else:
        assert min(ids) >= 1_900_000_000
    assert found == {"seccomp": 2, "groups": [], "capabilities": [0, 0, 0]}


def test_no_two_containers_share_a_user(under_runc: Containers) -> None:
    """What the kernel counts per user is counted over all containers."""
    users = {under_runc.run("import os; print(os.getuid())").stdout for _ in range(2)}
    assert len(users) == 2


def test_an_engine_that_maps_users_has_few_of_them() -> None:
    hardening = Hardening.of(RUNC)
    assert 10_000 <= hardening.choose_user(maps_users=True) < 60_000
    assert hardening.choose_user(maps_users=False) >= 1_900_000_000
    assert Hardening.of(GVISOR).choose_user(maps_users=True) == 0


def test_no_new_privileges_can_be_had(seen: Seen) -> None:
    assert seen.by["privileges"] == [1, []]


def test_system_calls_that_reach_into_the_kernel_are_refused(seen: Seen) -> None:
    assert seen.by["system calls"] == dict.fromkeys(_FORBIDDEN_CALLS, 1)


def test_there_is_no_network(seen: Seen) -> None:
    found = dict(seen.by["network"])
    assert found.pop("interfaces") in (["lo"], [])
    assert set(found.values()) == {"refused"}


def test_nothing_but_the_workspace_and_temporary_files_can_be_written(seen: Seen) -> None:
    assert seen.by["what can be written"] == ["/workspace", "/tmp", "/dev/shm"]


def test_the_environment_holds_nothing_of_the_host(seen: Seen) -> None:
    found = seen.by["the environment"]
    assert "must stay outside" not in str(found)
    assert set(found) <= {
        "PATH", "HOME", "LANG", "TMPDIR", "HOSTNAME", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS",
        "MATPLOTLIBRC", "NODE_PATH", "LOGNAME", "MPLBACKEND", "MPLCONFIGDIR", "LC_CTYPE", "PWD",
    }  # fmt: skip
    assert found["HOSTNAME"] == "sandbox"


def test_no_path_and_no_socket_of_the_host_is_inside(seen: Seen) -> None:
    sockets, shared, nameservers = seen.by["sockets and mounts"]
    assert sockets == []
    # The three that the engine writes itself for every container, read-only.
    assert shared == ["/", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]
    assert nameservers == ["nameserver", "127.0.0.1"]
    assert seen.attributes["Mounts"] == []
    assert seen.attributes["HostConfig"]["Binds"] is None
    assert seen.attributes["HostConfig"]["Privileged"] is False


def test_the_program_cannot_end_its_supervisor(seen: Seen) -> None:
    """Ended, it would have told nothing."""
    if seen.is_gvisor:
        # There process 1 is open to every signal of its own user, so it is another one.
        assert seen.by["the supervisor"] == [0, 65534, []]
    else:
        assert seen.by["the supervisor"]


def test_the_channel_to_the_host_is_out_of_reach(seen: Seen) -> None:
    """gVisor shows process 1's descriptors, but opens none that is not the program's own."""
    assert seen.by["the channel"] == []


@pytest.mark.parametrize("language", ["nodejs", "bash"])
def test_other_languages_are_held_in_the_same_way(containers: Containers, language: str) -> None:
    code = {
        "nodejs": """
            const fs = require('fs')
            let root = 'refused'
            try { fs.writeFileSync('/mark', 'x'); root = 'written' } catch {}
            function main () { return [process.getuid(), root] }
        """,
        "bash": '(echo x > /mark) 2>/dev/null && root=written; echo "$(id -u) ${root:-refused}"',
    }[language]
    result = containers.run(code, language)
    if language == "nodejs":
        user, root = result.result
    else:
        user, root = result.stdout.split()
    assert (int(user) != 0, root) == (True, "refused"), result.stderr
    assert result.metadata["runtime"] == containers.launcher.runtime
