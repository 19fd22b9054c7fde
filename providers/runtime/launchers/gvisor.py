"""Sandboxes under gVisor without a daemon: `runsc run` on a bundle made once per template."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from providers.errors import CreationFailed, ProviderUnavailable
from providers.runtime.guest.processes import read_small
from providers.runtime.launchers.host_programs import HostProgramsLauncher
from providers.runtime.launchers.oci_bundle import Seen, make_root, mount, process_of, write_bundle
from providers.runtime.launchers.tenant_kernel import TenantKernels
from providers.runtime.launchers.warm_images import WarmImages
from providers.runtime.pool import guest_files
from providers.runtime.pool.cgroup import Cgroup, ResourceUsage, memory_keeper
from providers.runtime.pool.launcher import (
    Guest,
    ProcessGuest,
    Starter,
    killed_first,
    start_failure,
)
from providers.runtime.pool.seccomp import build_filter
from providers.runtime.pool.template import WORKSPACE, Template

REMEDY = (
    "Install gVisor's runsc (Debian 13, Ubuntu 24.04: apt-get install runsc) "
    "or set the provider's isolation to bubblewrap."
)

# Who user code is inside. gVisor lets a process signal process 1 of the same user, so the guest
# supervisor is root there, with what it takes to look after its child: gVisor's root, not ours.
_USER = guest_files.NOBODY

# Without a cgroup: gVisor's kernel and file server have some 80 MiB when they have little to do.
KERNEL_BYTES = 256 << 20
KERNEL_CHECK_SECONDS = 0.1

# For a supervisor to look after a child of another user.
_CAPABILITIES = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_DAC_OVERRIDE"]

_numbers = itertools.count()


class GvisorLauncher(HostProgramsLauncher):
    """Starts each sandbox as `runsc run`, whose processes end with it.

    `platform` is gVisor's own choice of systrap, ptrace or kvm. ptrace is the faster one on
    virtual machines, systrap on bare metal.
    """

    def __init__(self, data_dir: Path, platform: str, python: str = "") -> None:
        super().__init__("gvisor", data_dir, python, rest_seconds=0.03)
        self._platform = platform
        self._runsc = ""
        self._bundles: dict[Hashable, Path] = {}
        self._kernels: TenantKernels | None = None
        self._images: WarmImages | None = None

    async def prepare(self) -> None:
        self._runsc = find_runsc()
        self._find_programs()
        self._make_folder()
        self._make_group()
        self.enforced_by = {
            **memory_keeper(self._cgroups),
            "processes": "rlimit in gVisor",
            "users": "gVisor's kernel",
            "system_calls": "gVisor",
        }
        if self._cgroups:
            self._kernels = TenantKernels(self._start_kernel, self.enforced_by)
        if self._folder:
            self._images = WarmImages(self._folder / "images", self._runsc, self._begin_image)

    def close(self) -> None:
        if self._kernels:
            self._kernels.close()
        self._remove_folder()
        if self._cgroups:
            self._cgroups.remove()

    @property
    def counts(self) -> dict[str, int]:
        """How many sandboxes were restored from an image, and how often one failed."""
        images = self._images
        return {"restored": images.restored, "failed_restores": images.failed} if images else {}

    async def start(self, template: Template) -> Guest:
        if self._images and self._images.are_for(template):
            restored = await self._images.start(template)
            if restored:
                return restored
        return self._start(template, template, self._supervisor(template))

    def _begin_image(self, template: Template, image: Path | None) -> GvisorGuest:
        """A sandbox that stops once it has loaded its modules, or one that goes on from there."""
        process = self._supervisor(template, image=True)
        return self._start((template, "image"), template, process, image)

    def _start(
        self,
        kind: Hashable,
        template: Template,
        process: dict[str, Any],
        image: Path | None = None,
    ) -> GvisorGuest:
        # The kernel inside needs memory of its own beside what the program may use.
        memory_bytes = template.limits.memory_bytes + (64 << 20)
        return self._run(kind, process, template.limits.workspace_bytes, memory_bytes, image=image)

    def for_owner(self, owner: str) -> Starter:
        if self._kernels is None:
            raise ProviderUnavailable(
                "isolation: tenant-kernel needs a cgroup around each tenant's kernel, and none can "
                "be made here. Run the pool as root, or with one delegated to it (systemd-run "
                "--user --scope -p Delegate=yes).",
                field="isolation",
            )
        return self._kernels.of(owner)

    def _start_kernel(self, _: Template, memory_bytes: int) -> GvisorGuest:
        """A sandbox that has runs made in it later. Raises SandboxError."""
        # What can be written to is laid over anew for each of them, and /run, too.
        place = mount("/run", "tmpfs", "ro")
        return self._run("tenant kernel", self._zygote(), 4096, memory_bytes, [place])

    def _run(
        self,
        kind: Hashable,
        process: dict[str, Any],
        workspace_bytes: int,
        memory_bytes: int,
        more: Sequence[dict[str, Any]] = (),
        image: Path | None = None,
    ) -> GvisorGuest:
        """`runsc run`, or `runsc restore` from an image, whose bundle, with `more` mounts, is made
        for the first of a kind. Raises SandboxError."""
        if self._folder is None:
            raise CreationFailed("gVisor: the launcher was not prepared.")
        bundle = self._bundles.get(kind)
        if bundle is None:
            bundle = self._make_bundle(process, workspace_bytes, more)
            self._bundles[kind] = bundle
        name = f"cofferdam-{os.getpid()}-{next(_numbers)}"
        state = self._folder / name
        tool = [
            *(self._runsc, "--root", str(state), "--network=none", "--ignore-cgroups"),
            *(f"--platform={self._platform}", "--host-uds=none", "--overlay2=none"),
            *(() if os.geteuid() == 0 else ("--rootless",)),
        ]
        how = ["restore", "--image-path", str(image)] if image else ["run"]
        command = [*tool, *how, "--bundle", str(bundle), name]
        cgroup = None
        try:
            if self._cgroups:
                cgroup = self._cgroups.new(memory_bytes)
                for path in cgroup.procs:
                    command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', path, *command]
            return GvisorGuest(killed_first(command), cgroup, state, tool)
        except OSError as error:
            if cgroup:
                cgroup.remove_now()
            raise start_failure("gVisor", error) from error

    def _make_bundle(
        self, process: dict[str, Any], workspace_bytes: int, more: Sequence[dict[str, Any]]
    ) -> Path:
        """Raises SandboxError, and has then left nothing in the way of the next try."""
        folder = Path(self._folder or "") / "bundles" / str(len(self._bundles))
        seen = Seen(self._python, self._guest_dir, self._hidden)
        try:
            mounts = make_root(folder / "rootfs", seen, workspace_bytes, more, home="folder")
            write_bundle(folder, process, mounts)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise start_failure("gVisor", error) from error
        return folder

    def _supervisor(self, template: Template, *, image: bool = False) -> dict[str, Any]:
        argument = template.guest_argument(
            workspace=WORKSPACE,
            watch_memory=self._cgroups is None,
            uid=_USER,
            image=image,
            binds_home=True,
        )
        # It gives up the right to mount, which is one in gVisor's kernel alone, before all else.
        kept = [*_CAPABILITIES, "CAP_SYS_ADMIN"]
        return process_of(self._python, "supervisor", [argument], kept)

    def _zygote(self) -> dict[str, Any]:
        program = build_filter() or b""
        argument = json.dumps({"filter": program.hex()}, separators=(",", ":"))
        # To make namespaces and to mount, in gVisor's kernel alone.
        kept = [*_CAPABILITIES, "CAP_SYS_ADMIN"]
        return process_of(self._python, "tenant_kernel", [argument], kept)


class GvisorGuest(ProcessGuest):
    """A gVisor kernel with all in it. By `tool` and `name` more can be asked of it."""

    # Its group can be made larger at any time.
    most_bytes: int | None = None

    def __init__(
        self, command: list[str], cgroup: Cgroup | None, state: Path, tool: Sequence[str]
    ) -> None:
        self.tool = tool
        self.name = state.name
        self._state = state
        self._out_of_memory = False
        super().__init__(command, cgroup)
        self._watch = (
            asyncio.get_running_loop().create_task(self._watch_the_kernel())
            if cgroup is None
            else None
        )

    def evidence(self) -> ResourceUsage:
        seen = super().evidence()
        return replace(seen, out_of_memory=seen.out_of_memory or self._out_of_memory)

    async def _watch_the_kernel(self) -> None:
        """End the sandbox when gVisor itself has too much, as for what lies in sockets.

        The supervisor inside bounds all that it has given to programs.
        """
        while True:
            await asyncio.sleep(KERNEL_CHECK_SECONDS)
            if _private_bytes(self._process.pid) > KERNEL_BYTES:
                self._out_of_memory = True
                self._process.kill()
                return

    async def connect(self) -> socket.socket:
        """The channel, for who speaks to more than one supervisor over it."""
        return self._channel

    def decode(self, data: bytes) -> bytes:
        return data

    def resize(self, memory_bytes: int) -> None:
        """Let it have so much memory from now on, where a cgroup bounds that. Raises OSError."""
        if self._cgroup:
            self._cgroup.resize(memory_bytes)

    async def _end(self) -> None:
        if self._watch:
            self._watch.cancel()
        await super()._end()
        shutil.rmtree(self._state, ignore_errors=True)

    def destroy_now(self) -> None:
        """End everything in it without an event loop that could wait."""
        if self._watch:
            self._watch.cancel()
        self._process.kill()
        self._process.wait()
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self._gone.set_result(None)
            self._channel.close()
            os.close(self._pidfd)
            self._close_stderr()
            shutil.rmtree(self._state, ignore_errors=True)
            if self._cgroup:
                self._cgroup.remove_now()


def _private_bytes(pid: int) -> int:
    """What a process and all below it have to themselves: gVisor's kernel and its file server.

    What programs have lies in a file in memory, which is shared.
    """
    try:
        words = read_small(f"/proc/{pid}/status").partition(b"RssAnon:")[2].split()
        # Go starts a process from whichever thread it likes.
        threads = os.listdir(f"/proc/{pid}/task")
        below = [read_small(f"/proc/{pid}/task/{each}/children").split() for each in threads]
    except OSError:  # it is about to end
        return 0
    own = int(words[0]) * 1024 if words else 0
    return own + sum(_private_bytes(int(child)) for group in below for child in group)


def find_runsc() -> str:
    """Path of runsc. Raises ProviderUnavailable with the remedy."""
    path = shutil.which("runsc")
    if path is None:
        raise ProviderUnavailable(f"gVisor is not installed. {REMEDY}")
    return path
