"""When the machine is short of memory the kernel ends sandboxes before the service."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.launchers.oci import GvisorLauncher, RuncLauncher
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.values import Job, SandboxLimits
from tests.conftest import require
from tests.support.sandboxes import family, started_by

LAUNCHERS: dict[str, tuple[str, Callable[[Path], Launcher]]] = {
    "bubblewrap": ("bwrap", BubblewrapLauncher),
    "gvisor": ("runsc", lambda folder: GvisorLauncher(folder, "systrap")),
    "runc": ("runc", lambda folder: RuncLauncher(folder, "runc")),
}
# What it says of itself, and whether it may put itself behind the service.
CODE = """
with open("/proc/self/oom_score_adj") as file:
    print(file.read().strip())
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")
    print("moved")
except OSError:
    print("refused")
"""


def _children() -> set[int]:
    """What this thread and its children have started: other threads have pools of other tests."""
    own = started_by(threading.get_native_id())
    return own.union(*map(family, own))


def _may_set_bounds() -> bool:
    """Whether this process has CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_process_of_a_sandbox_is_ended_first(name: str, tmp_path: Path) -> None:
    program, make = LAUNCHERS[name]
    require(program)
    if name == "runc" and os.geteuid() != 0:
        pytest.skip("runc makes containers as root")
    before = _children()
    own = Path("/proc/self/oom_score_adj").read_text()

    async def scenario() -> list[str]:
        launcher = make(tmp_path)
        try:
            await launcher.prepare()
            template = make_template("python", "python", launcher, SandboxLimits(), ())
            sandbox = await Sandbox.start(launcher, template)
            try:
                told = Path(f"/proc/self/fdinfo/{sandbox._guest._pidfd}").read_text()  # type: ignore[attr-defined]
                # That of runc has no parent of ours.
                first = int(told.partition("Pid:")[2].split()[0])
                pids = {first, *_children()} - before
                found = {pid: Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in pids}
                assert set(found.values()) == {"500\n"}, found
                result = await sandbox.run(Job(CODE, "python"))
            finally:
                await sandbox.destroy()
        finally:
            launcher.close()
        return result.stdout.split()

    seen, moved = asyncio.run(scenario())
    # gVisor has files of its own there, which say nothing to this machine's kernel.
    if name != "gvisor":
        assert seen == "500"
        # The kernel keeps what was set with this capability from being taken back without it.
        assert moved == ("refused" if _may_set_bounds() else "moved")
    assert Path("/proc/self/oom_score_adj").read_text() == own
