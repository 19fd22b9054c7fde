"""Sandboxes in containers of our own: `runc` or `crun` on a bundle each. No daemon, no image.

What the Docker launcher promises holds here too: a root that cannot be written to, no privilege
and no way to any, a user of the container's own, no network, the kernel's own bounds. They see this
machine's programs instead of an image's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

from providers.errors import CreationFailed, ProviderUnavailable
from providers.runtime.guest.kernel import TERMINALS
from providers.runtime.guest.root import TERMINAL_OPTIONS, group, passwd
from providers.runtime.launchers.host_programs import HostProgramsLauncher
from providers.runtime.launchers.oci_bundle import (
    NAMESPACES,
    Home,
    Seen,
    bind,
    make_root,
    mount,
    process_of,
    with_devices,
    write_bundle,
)
from providers.runtime.pool.cgroup import ROOT, Cgroup, memory_keeper, own_groups
from providers.runtime.pool.hardening import RUNC, Hardening
from providers.runtime.pool.launcher import (
    Guest,
    PidfdGuest,
    end_of,
    read_complaint,
    start_failure,
    start_process,
)
from providers.runtime.pool.seccomp import build_filter
from providers.runtime.pool.template import WORKSPACE, Template

START_SECONDS = 20.0

# Of the tool while it makes a container that nobody waits for. It cannot be in the container's
# group, from which it reckons where that is to be.
STARTING_NICE = 10

# What of /proc tells of the machine, or could change it: as container engines have it.
_MASKED = (
    *("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi"),
    *("timer_list", "timer_stats"),
)
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")

# Terminals: those that programs make, and those of commands.
_TERMINALS = [
    with_devices(mount(path, "devpts", "noexec", *TERMINAL_OPTIONS.split(",")))
    for path in ("/dev/pts", TERMINALS)
]

_numbers = itertools.count()


class RuncLauncher(HostProgramsLauncher):
    """Starts each sandbox by `tool`, which is `runc` or `crun`, as root."""

    def __init__(self, data_dir: Path, tool: str, python: str = "") -> None:
        super().__init__(tool, data_dir, python, rest_seconds=0.015)
        self._tool = ""
        self._filter = b""
        self._hardening = Hardening.of(RUNC)
        self._mounts: dict[int, list[dict[str, Any]]] = {}
        self._hurried = True

    async def prepare(self) -> None:
        self._tool = find_tool(self.runtime)
        check_rights()
        self._find_programs()
        self._make_folder()
        self._make_group()
        if self._cgroups is None:
            raise ProviderUnavailable(
                f"{self.runtime} needs a cgroup for each sandbox, and none can be made here."
            )
        program = build_filter(uncounted_memory=True)
        self._filter = program or b""
        self.enforced_by = {
            **memory_keeper(self._cgroups),
            "processes": f"cgroup v{self._cgroups.version}",
            "users": "uid per sandbox",
            "system_calls": "seccomp" if program else "nothing",
        }

    def hurry(self, *, is_wanted: bool) -> None:
        super().hurry(is_wanted=is_wanted)
        self._hurried = is_wanted

    def close(self) -> None:
        if self._cgroups:
            for folder in self._groups_of_others(self._cgroups.path.name):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            self._cgroups.remove()
        self._remove_folder()

    async def start(self, template: Template) -> Guest:
        if self._folder is None or self._cgroups is None:
            raise CreationFailed(f"{self.runtime}: the launcher was not prepared.")
        folder = self._folder / str(next(_numbers))
        cgroup: Cgroup | None = None
        channel, theirs = socket.socketpair()
        channel.setblocking(False)
        stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
        try:
            folder.mkdir(mode=0o700)
            cgroup = self._cgroups.new(template.limits.memory_bytes)
            self._write(folder, template, cgroup)
            await self._run(folder, theirs, stderr)
            pidfd = os.pidfd_open(int((folder / "pid").read_text()))
        except BaseException as error:
            channel.close()
            complaint = read_complaint(stderr)
            os.close(stderr)
            _end_by_file(folder / "pid")
            if cgroup:
                await self._remove(cgroup, folder)
            if isinstance(error, OSError | ValueError | TimeoutError):
                raise start_failure(self.runtime, error, complaint) from error
            raise
        finally:
            theirs.close()
        at_end = partial(self._forget, folder, cgroup.path.name)
        return RuncGuest(channel, pidfd, cgroup, stderr, at_end)

    async def _run(self, folder: Path, channel: socket.socket, stderr: int) -> None:
        """Have the container made; its first process has the channel then. Raises OSError."""
        command = [self._tool, "--root", f"{folder}/state", "run", "--detach"]
        command += ["--pid-file", f"{folder}/pid", "--bundle", str(folder), _id_of(folder)]
        process = start_process(command, channel, stderr, {"PATH": os.defpath})
        _be_nice(process.pid, 0 if self._hurried else STARTING_NICE)
        try:
            async with asyncio.timeout(START_SECONDS):
                await end_of(process)
        finally:
            process.kill()
            code = process.wait()
        if code:
            raise OSError(f"exit code {code}")
        # The tool's own work is over. From here on the group's weight says who yields.
        _be_nice(int((folder / "pid").read_text()), 0)

    def _write(self, folder: Path, template: Template, cgroup: Cgroup) -> None:
        settings = self._hardening.settings
        uid = self._hardening.choose_user(maps_users=False)
        for name, text in (("passwd", passwd(uid)), ("group", group(uid))):
            (folder / name).write_text(text)
            (folder / name).chmod(0o644)
        argument = template.guest_argument(workspace=WORKSPACE, watch_memory=False)
        process = process_of(self._python, "container", [argument, self._filter.hex()], uid=uid)
        linux: dict[str, Any] = {
            "cgroupsPath": self._path_of(cgroup),
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "pids": {"limit": template.limits.processes + settings["extra_processes"]},
            },
            "maskedPaths": [*(f"/proc/{name}" for name in _MASKED), "/sys"],
            "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
            "sysctl": dict(settings["sysctls"]),
        }
        size = template.limits.workspace_bytes
        root = Path(self._folder or "") / f"root-{size}"
        mounts = self._mounts.get(size)
        if mounts is None:
            seen = Seen(self._python, self._guest_dir, self._hidden)
            try:
                room = [f"nr_inodes={settings['inodes']}"]
                # crun may open what is to be mounted before the new root has its mounts.
                home: Home = "mount" if self.runtime == "runc" else "link"
                mounts = make_root(root, seen, size, _TERMINALS, room=room, home=home)
            except OSError:
                # Or it would be in the way of every other try.
                shutil.rmtree(root, ignore_errors=True)
                raise
            self._mounts[size] = mounts
        own = [bind(str(folder / name), f"/etc/{name}") for name in ("passwd", "group")]
        write_bundle(folder, process, [*mounts, *own], root, linux, (*NAMESPACES, "cgroup"))

    def _path_of(self, cgroup: Cgroup) -> str:
        """Our own group, as these tools are told of one: on version 1 below where we are."""
        if cgroup.version == 2:
            return f"/{cgroup.path.relative_to(ROOT)}"
        return f"{cgroup.path.parent.name}/{cgroup.path.name}"

    def _forget(self, folder: Path, number: str) -> None:
        """Remove what the tool has left; its own command for that would take longer than a run."""
        shutil.rmtree(folder, ignore_errors=True)
        if self._cgroups:
            for group_folder in self._groups_of_others(f"{self._cgroups.path.name}/{number}"):
                with contextlib.suppress(OSError):
                    group_folder.rmdir()

    async def _remove(self, cgroup: Cgroup, folder: Path) -> None:
        await cgroup.remove()
        self._forget(folder, cgroup.path.name)

    def _groups_of_others(self, path: str) -> list[Path]:
        """The groups of this path that the tool has made for what we do not bound ourselves."""
        if self._cgroups is None or self._cgroups.version == 2:
            return []
        found = []
        for controller, own in own_groups(Path("/proc")).items():
            name = controller.removeprefix("name=")
            found.append(ROOT / (name or "unified") / own.lstrip("/") / path)
        return found


class RuncGuest(PidfdGuest):
    """A container whose first process we hold, as the tool that made it has ended."""

    def __init__(
        self, channel: socket.socket, pidfd: int, cgroup: Cgroup, stderr: int, at_end: Any
    ) -> None:
        super().__init__(channel, pidfd, cgroup, at_end)
        self._stderr = stderr

    def complaint(self) -> str:
        return read_complaint(self._stderr)

    async def _end(self) -> None:
        await super()._end()
        os.close(self._stderr)


def _be_nice(pid: int, nice: int) -> None:
    """Let others go first, or no longer. Where sessions are scheduled as groups, that of `pid`."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children")
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        for child in children.read_text().split():
            os.setpriority(os.PRIO_PROCESS, int(child), nice)
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def _id_of(folder: Path) -> str:
    return f"cofferdam-{os.getpid()}-{folder.name}-{secrets.token_hex(4)}"


def _end_by_file(path: Path) -> None:
    """End the container whose process 1 this file names, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(path.read_text()), signal.SIGKILL)


def check_rights() -> None:
    """Raises ProviderUnavailable with the remedy."""
    if os.geteuid() != 0:
        raise ProviderUnavailable(
            "runc and crun need root here, for a user of each sandbox's own. Run the pool as root, "
            "or with POOL_LAUNCHER=bubblewrap."
        )


def find_tool(name: str) -> str:
    """Path of runc or crun. Raises ProviderUnavailable with the remedy."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise ProviderUnavailable(
            f"{name} is not installed (Debian, Ubuntu: apt-get install {name})."
        )
    return path
