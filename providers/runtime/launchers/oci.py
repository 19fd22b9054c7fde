"""Sandboxes by the tools of the Open Container Initiative: runc, crun and gVisor's runsc.

Each has a bundle: a root of this machine's programs or of an image, and who runs what in it. There
is no daemon. What the Docker launcher promises holds here too: a root that cannot be written to, no
privilege and no way to any, a user of the container's own, no network, the kernel's own bounds.

runc and crun have a bundle for each sandbox, whose first process is held when the tool has ended.
`runsc run` is the sandbox, on a bundle made once per template.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from providers.errors import CreationFailed, ProviderUnavailable
from providers.runtime.guest.child import NO_CORE
from providers.runtime.guest.kernel import TERMINALS
from providers.runtime.guest.processes import read_small
from providers.runtime.guest.root import TERMINAL_OPTIONS, group, passwd
from providers.runtime.guest.wire import LISTENER
from providers.runtime.launchers import guest_files
from providers.runtime.launchers.bundle import (
    NAMESPACES,
    Home,
    Seen,
    bind,
    make_root,
    mount,
    mounts_over,
    process_of,
    with_devices,
    write_bundle,
)
from providers.runtime.launchers.host_programs import HostProgramsLauncher
from providers.runtime.launchers.images import Image
from providers.runtime.launchers.seccomp import build_filter, build_profile
from providers.runtime.launchers.tenant_kernel import TenantKernels
from providers.runtime.launchers.warm_images import WarmImages
from providers.runtime.pool.cgroup import (
    ROOT,
    Cgroup,
    CgroupParent,
    ResourceUsage,
    memory_keeper,
    own_groups,
)
from providers.runtime.pool.hardening import RUNC, Hardening
from providers.runtime.pool.launcher import (
    NOTHING,
    Guest,
    PidfdGuest,
    ProcessGuest,
    Starter,
    ToolStderr,
    end_of,
    killed_first,
    receive_descriptor,
    start_deadline,
    start_failure,
    start_process,
)
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


class ImagesLauncher(HostProgramsLauncher):
    """Gives sandboxes of some templates the programs of an image in place of this machine's."""

    def __init__(
        self,
        runtime: str,
        data_dir: Path,
        python: str,
        rest_seconds: float,
        images: Mapping[str, Image],
        image: Image | None = None,
    ) -> None:
        """`images` are by name of the template. With `image` all have that."""
        super().__init__(runtime, data_dir, python, rest_seconds)
        self._images = dict(images)
        self._image = image
        self._images_held: list[int] = []

    def image_of(self, template: str) -> Image | None:
        """Return the image whose programs sandboxes of a template have, None for this machine's."""
        return self._image or self._images.get(template)

    def interpreter(self, language: str, template: str = "") -> str | None:
        image = self.image_of(template or language)
        return image.interpreter(language) if image else super().interpreter(language)

    def version(self, language: str, template: str) -> str:
        image = self.image_of(template)
        return image.version(language) if image else super().version(language, template)

    def _hold_images(self) -> None:
        """Raises ProviderUnavailable."""
        own = [self._image] if self._image else []
        for image in (*self._images.values(), *own):
            self._images_held.append(image.hold())

    def _release_images(self) -> None:
        while self._images_held:
            os.close(self._images_held.pop())

    def _facts(self, image: Image | None) -> Mapping[str, Any]:
        return {"image_digest": image.digest} if image else NOTHING


class RuncLauncher(ImagesLauncher):
    """Starts each sandbox by `tool`, which is `runc` or `crun`, as root."""

    def __init__(
        self,
        data_dir: Path,
        tool: str,
        python: str = "",
        images: Mapping[str, Image] = MappingProxyType({}),
        image: Image | None = None,
    ) -> None:
        super().__init__(tool, data_dir, python, 0.015, images, image)
        self._tool = ""
        self._filter = b""
        self._hardening = Hardening.of(RUNC)
        self._mounts: dict[Path, list[dict[str, Any]]] = {}
        self._hurried = True

    async def prepare(self) -> None:
        self._tool = find_tool(self.runtime)
        check_rights()
        self._find_programs()
        self._hold_images()
        self._make_folder()
        self._cgroups = CgroupParent.create()
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
        self._release_images()

    async def start(self, template: Template) -> Guest:
        if self._folder is None or self._cgroups is None:
            raise CreationFailed(f"{self.runtime}: the launcher was not prepared.")
        folder = self._folder / str(next(_numbers))
        cgroup: Cgroup | None = None
        channel, theirs = socket.socketpair()
        channel.setblocking(False)
        stderr = ToolStderr()
        try:
            folder.mkdir(mode=0o700)
            cgroup = self._cgroups.new(template.limits.memory_bytes)
            self._write(folder, template, cgroup)
            await self._run(folder, theirs, stderr)
            fd = await receive_descriptor(channel, LISTENER, START_SECONDS)
            listener = socket.socket(fileno=fd)
            pidfd = os.pidfd_open(int((folder / "pid").read_text()))
        except BaseException as error:
            channel.close()
            stderr.close()
            _end_by_file(folder / "pid")
            if cgroup:
                await self._remove(cgroup, folder)
            if isinstance(error, OSError | ValueError | TimeoutError):
                raise start_failure(self.runtime, error, stderr.read()) from error
            raise
        finally:
            theirs.close()
        at_end = partial(self._forget, folder, cgroup.path.name)
        guest = RuncGuest(channel, pidfd, cgroup, stderr, at_end, listener)
        guest.facts = self._facts(self.image_of(template.name))
        return guest

    async def _run(self, folder: Path, channel: socket.socket, stderr: ToolStderr) -> None:
        """Have the container made; its first process has the channel then. Raises OSError."""
        command = [self._tool, "--root", f"{folder}/state", "run", "--detach"]
        command += ["--pid-file", f"{folder}/pid", "--bundle", str(folder), _id_of(folder)]
        process = start_process(command, channel, stderr, {"PATH": os.defpath})
        _be_nice(process.pid, 0 if self._hurried else STARTING_NICE)
        try:
            async with start_deadline(START_SECONDS):
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
        argument = template.guest_argument(
            workspace=WORKSPACE, watch_memory=False, offers_network=True
        )
        image = self.image_of(template.name)
        arguments = [argument, self._filter.hex()]
        process = process_of(self._python, "container", arguments, uid=uid, image=image)
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
        if image and (profile := build_profile()):
            # The guest, which loads its filter itself, runs with a Python that is not ours.
            linux["seccomp"] = profile
            process["rlimits"] = [{"type": "RLIMIT_CORE", "soft": NO_CORE, "hard": NO_CORE}]
        root, mounts = self._root(template.limits.workspace_bytes, image)
        own = [bind(str(folder / name), f"/etc/{name}") for name in ("passwd", "group")]
        write_bundle(folder, process, [*mounts, *own], root, linux, (*NAMESPACES, "cgroup"))

    def _root(self, size: int, image: Image | None) -> tuple[Path, list[dict[str, Any]]]:
        """The root, made for the first of its kind, and its mounts. Raises OSError."""
        seen = Seen(self._python, self._guest_dir, self._hidden)
        room = [f"nr_inodes={self._hardening.settings['inodes']}"]
        if image:
            return image.root, mounts_over(image, seen, size, _TERMINALS, room=room)
        root = Path(self._folder or "") / f"root-{size}"
        mounts = self._mounts.get(root)
        if mounts is None:
            try:
                # crun may open what is to be mounted before the new root has its mounts.
                home: Home = "mount" if self.runtime == "runc" else "link"
                mounts = make_root(root, seen, size, _TERMINALS, room=room, home=home)
            except OSError:
                # Or it would be in the way of every other try.
                shutil.rmtree(root, ignore_errors=True)
                raise
            self._mounts[root] = mounts
        return root, mounts

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
        self,
        channel: socket.socket,
        pidfd: int,
        cgroup: Cgroup,
        stderr: ToolStderr,
        at_end: Any,
        listener: socket.socket,
    ) -> None:
        super().__init__(channel, pidfd, cgroup, at_end, listener)
        self._stderr = stderr

    def complaint(self) -> str:
        return self._stderr.read()

    async def _end(self) -> None:
        await super()._end()
        self._stderr.close()


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


class GvisorLauncher(ImagesLauncher):
    """Starts each sandbox as `runsc run`, whose processes end with it.

    `platform` is gVisor's own choice of systrap, ptrace or kvm. ptrace is the faster one on
    virtual machines, systrap on bare metal.
    """

    def __init__(
        self,
        data_dir: Path,
        platform: str,
        python: str = "",
        images: Mapping[str, Image] = MappingProxyType({}),
        image: Image | None = None,
    ) -> None:
        super().__init__("gvisor", data_dir, python, 0.03, images, image)
        self._platform = platform
        self._runsc = ""
        self._bundles: dict[Hashable, Path] = {}
        self._kernels: TenantKernels | None = None
        self._warm: WarmImages | None = None

    async def prepare(self) -> None:
        self._runsc = find_runsc()
        self._find_programs()
        self._hold_images()
        self._make_folder()
        self._cgroups = CgroupParent.create()
        self.enforced_by = {
            **memory_keeper(self._cgroups),
            "processes": "rlimit in gVisor",
            "users": "gVisor's kernel",
            "system_calls": "gVisor",
        }
        if self._cgroups:
            self._kernels = TenantKernels(self._start_kernel, self.enforced_by, self._digest_of)
        if self._folder:
            self._warm = WarmImages(
                self._folder / "images", self._runsc, self._begin_image, self._root_of
            )

    def close(self) -> None:
        if self._kernels:
            self._kernels.close()
        self._remove_folder()
        if self._cgroups:
            self._cgroups.remove()
        self._release_images()

    def _digest_of(self, template: Template) -> str:
        """What tells the kernels of one owner apart."""
        image = self.image_of(template.name)
        return image.digest if image else ""

    def _root_of(self, template: Template) -> str:
        """Where the files lie that a sandbox has in its root."""
        image = self.image_of(template.name)
        return str(image.root) if image else ""

    @property
    def counts(self) -> dict[str, int]:
        """How many sandboxes were restored from an image, and how often one failed."""
        warm = self._warm
        return {"restored": warm.restored, "failed_restores": warm.failed} if warm else {}

    async def start(self, template: Template) -> Guest:
        if self._warm and self._warm.are_for(template):
            restored = await self._warm.start(template)
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
        size = template.limits.workspace_bytes
        return self._run(kind, template, process, size, memory_bytes, image=image)

    def for_owner(self, owner: str) -> Starter:
        if self._kernels is None:
            raise ProviderUnavailable(
                "isolation: tenant-kernel needs a cgroup around each tenant's kernel, and none can "
                "be made here. Run the pool as root, or with one delegated to it (systemd-run "
                "--user --scope -p Delegate=yes).",
                field="isolation",
            )
        return self._kernels.of(owner)

    def _start_kernel(self, template: Template, memory_bytes: int) -> GvisorGuest:
        """A sandbox that has runs made in it later. Raises SandboxError."""
        # What can be written to is laid over anew for each of them, and /run, too.
        place = mount("/run", "tmpfs", "ro")
        kind = "tenant kernel", self._digest_of(template)
        return self._run(kind, template, self._zygote(template), 4096, memory_bytes, [place])

    def _run(
        self,
        kind: Hashable,
        template: Template,
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
            bundle = self._make_bundle(template, process, workspace_bytes, more)
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
            guest = GvisorGuest(killed_first(command), cgroup, state, tool)
        except OSError as error:
            if cgroup:
                cgroup.remove_now()
            raise start_failure("gVisor", error) from error
        guest.facts = self._facts(self.image_of(template.name))
        return guest

    def _make_bundle(
        self,
        template: Template,
        process: dict[str, Any],
        workspace_bytes: int,
        more: Sequence[dict[str, Any]],
    ) -> Path:
        """Raises SandboxError, and has then left nothing in the way of the next try."""
        folder = Path(self._folder or "") / "bundles" / str(len(self._bundles))
        seen = Seen(self._python, self._guest_dir, self._hidden)
        root = folder / "rootfs"
        try:
            if image := self.image_of(template.name):
                root = image.root
                folder.mkdir(parents=True)
                mounts = mounts_over(image, seen, workspace_bytes, more)
            else:
                mounts = make_root(root, seen, workspace_bytes, more, home="folder")
            write_bundle(folder, process, mounts, root)
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
        base = self.image_of(template.name)
        return process_of(self._python, "supervisor", [argument], kept, image=base)

    def _zygote(self, template: Template) -> dict[str, Any]:
        program = build_filter() or b""
        argument = json.dumps({"filter": program.hex()}, separators=(",", ":"))
        # To make namespaces and to mount, in gVisor's kernel alone.
        kept = [*_CAPABILITIES, "CAP_SYS_ADMIN"]
        base = self.image_of(template.name)
        return process_of(self._python, "tenant_kernel", [argument], kept, image=base)


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
            self._stderr.close()
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
