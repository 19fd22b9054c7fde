"""Containers of our own by runc: what the Docker launcher promises, without its daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers.errors import ProviderUnavailable
from providers.runtime.launchers.oci import RuncLauncher, find_tool
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.template import Template
from providers.values import SandboxLimits
from tests.support.cgroups import groups_named
from tests.support.warm_pools import WarmPool

MEMORY = 64 << 20

# One program looks at all of it: to start a container for each would take longer than to look.
LOOK = """
import ctypes, json, os, socket

def tried(action, *arguments):
    try:
        action(*arguments)
    except Exception as error:
        return type(error).__name__
    return "done"

def writes(path):
    with open(path, "w") as file:
        file.write("x")

def status(name):
    with open("/proc/self/status") as lines:
        return [line.split()[1] for line in lines if line.startswith(name + ":")][0]

def connects(address):
    with socket.socket() as one:
        one.settimeout(1)
        one.connect(address)

libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({
    "uid": os.getuid(),
    "groups": os.getgroups(),
    "capabilities": [status(name) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status("NoNewPrivs"),
    "seccomp": status("Seccomp"),
    "processes": sorted(name for name in os.listdir("/proc") if name.isdigit()) <= ["1", "2", "3"],
    "root": {path: tried(writes, path) for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/cofferdam/x")},
    "proc": tried(writes, "/proc/sys/kernel/core_pattern"),
    "kcore": os.path.exists("/proc/kcore") and tried(lambda: open("/proc/kcore", "rb").read(1) or 1 / 0),
    "keys": len(open("/proc/keys").read()) if os.path.exists("/proc/keys") else 0,
    "sys": os.path.exists("/sys/kernel"),
    "devices": sorted(name for name in os.listdir("/dev") if not os.path.islink("/dev/" + name)),
    "network": [name for _, name in socket.if_nameindex()],
    "outside": tried(connects, ("1.1.1.1", 53)),
    "user_namespace": libc.unshare(0x10000000),
    "mount": libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "ptrace_of_1": libc.ptrace(16, 1, 0, 0),
    "signal_to_1": (os.kill(1, 9), os.getpid() > 1)[1],
    "nice": os.nice(0),
    "hostname": socket.gethostname(),
    "name": __import__("pwd").getpwuid(os.getuid()).pw_name,
    "environment": sorted(os.environ),
}))
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    if os.geteuid() != 0:
        pytest.skip("runc makes containers as root")
    try:
        find_tool("runc")
    except ProviderUnavailable as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("runc")
    (folder / "run").mkdir()
    limits = SandboxLimits(memory_bytes=MEMORY, processes=24)
    templates = {"python": Template("python", "python", limits=limits)}
    try:
        opened = WarmPool(PoolSettings(size=1, capacity=3), templates, RuncLauncher(folder, "runc"))
    except ProviderUnavailable as error:
        pytest.skip(error.message)
    with opened:
        yield opened


def groups(pool: WarmPool) -> list[Path]:
    name = pool.launcher._cgroups.path.name  # type: ignore[attr-defined]
    return [procs for group in groups_named(name) for procs in group.glob("*/cgroup.procs")]


def test_a_program_has_no_privilege_and_sees_nothing_of_the_machine(pool: WarmPool) -> None:
    seen = json.loads(pool.run(LOOK).stdout)
    assert seen["uid"] >= 1_900_000_000
    assert seen["groups"] in ([], [seen["uid"]])
    assert set(seen["capabilities"]) == {"0000000000000000"}
    assert (seen["no_new_privileges"], seen["seccomp"]) == ("1", "2")
    assert "done" not in seen["root"].values()
    assert seen["proc"] != "done"
    assert seen["kcore"] in (False, "PermissionError", "ZeroDivisionError")
    assert (seen["keys"], seen["sys"]) == (0, False)
    allowed = {
        "full",
        "mqueue",
        "null",
        "pts",
        "random",
        "shm",
        "terminals",
        "tty",
        "urandom",
        "zero",
        "console",
    }
    assert set(seen["devices"]) <= allowed
    assert seen["network"] == ["lo"]
    assert seen["outside"] != "done"
    assert (seen["user_namespace"], seen["mount"], seen["ptrace_of_1"]) == (-1, -1, -1)
    assert seen["signal_to_1"]
    assert (seen["nice"], seen["hostname"], seen["name"]) == (0, "sandbox", "sandbox")
    assert not [name for name in seen["environment"] if "COFFERDAM" in name or "KEY" in name]


def test_memory_and_processes_are_bounded_by_the_kernel(pool: WarmPool) -> None:
    eaten = pool.run("x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1")
    assert eaten.out_of_memory
    forked = pool.run(
        """
        import os
        count = 0
        try:
            for _ in range(200):
                if os.fork() == 0:
                    import time; time.sleep(60)
                count += 1
        except OSError:
            pass
        print(count)
        """
    )
    assert int(forked.stdout or 0) < 30


def test_two_containers_share_neither_a_user_nor_a_file_and_leave_nothing(pool: WarmPool) -> None:
    code = "import os; print(os.getuid(), os.listdir('/tmp')); open('/tmp/x', 'w').write('1')"
    first, second = pool.run(code).stdout, pool.run(code).stdout
    assert first != second
    assert first.endswith("[]\n")
    assert second.endswith("[]\n")
    pool.resize(PoolSettings(size=0, capacity=1))
    pool.settle(idle=0, busy=0, ending=0, creating=0)
    folder = pool.launcher._folder  # type: ignore[attr-defined]
    assert [each.name for each in folder.iterdir() if not each.name.startswith("root-")] == []
    assert groups(pool) == []


def test_without_the_tool_it_says_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderUnavailable, match="crunless is not installed"):
        find_tool("crunless")
