"""Sandboxes in bubblewrap: namespaces, an empty root, seccomp, limits. No daemon, no image."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import select
import shutil
import socket
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from providers.errors import CreationFailed, ProviderUnavailable
from providers.runtime.guest import root
from providers.runtime.guest.wire import LISTENER, STARTED
from providers.runtime.launchers.guest_files import (
    INSIDE,
    NOTHING,
    boot,
    interpreter_options,
    node_path,
    program_folders,
    search_path,
)
from providers.runtime.launchers.host_programs import HostProgramsLauncher
from providers.runtime.launchers.seccomp import build_filter
from providers.runtime.launchers.subordinate_users import SubordinateUsers, remedy_for
from providers.runtime.pool.cgroup import CgroupParent, memory_keeper
from providers.runtime.pool.launcher import (
    Guest,
    PidfdGuest,
    ToolStderr,
    killed_first,
    receive_descriptor,
    start_failure,
    start_process,
)
from providers.runtime.pool.template import NPM_RETRIES, WORKSPACE, Template

REMEDY = "Install it (Debian, Ubuntu: apt-get install bubblewrap)."
OLDEST = (0, 8)

# Above every range that distributions hand out to users, containers and dynamic services.
_FIRST_UID, _UIDS = 1_900_000_000, 200_000_000

# How long the zygote may take to hand over a sandbox, on a machine whose disk is late as well. Its
# own start is 0.1 s of that.
START_SECONDS = 30.0
_PROBE_SECONDS = 5.0


class BubblewrapLauncher(HostProgramsLauncher):
    """Has one bubblewrap with a zygote in it, and has the zygote fork each sandbox.

    As root every sandbox gets a user id of its own, and so it does where subordinate users are
    lent to us. Otherwise bubblewrap makes a user namespace and the zygote another one for every
    sandbox.
    """

    def __init__(
        self, data_dir: Path, python: str = "", *, has_foreign_packages: bool = False
    ) -> None:
        """`has_foreign_packages` says that no privileged process may load packages of `python`."""
        super().__init__("bubblewrap", data_dir, python, rest_seconds=0.015)
        self._as_root = os.geteuid() == 0
        self._users: SubordinateUsers | None = None
        self._has_foreign_packages = has_foreign_packages
        self._bwrap = ""
        self._seccomp = -1
        self._zygote: _Zygote | None = None

    async def prepare(self) -> None:
        self._bwrap = find_bubblewrap()
        self._find_programs()
        # Files elsewhere than below /usr may be closed to everybody but us.
        if not self._as_root and self._python.startswith("/usr/"):
            self._users = SubordinateUsers.find(self._bwrap)
        self._cgroups = CgroupParent.create()
        self.enforced_by = {
            **memory_keeper(self._cgroups),
            "processes": "rlimit per sandbox",
            "users": self._who_separates_users(),
            "system_calls": "seccomp",
        }
        self._seccomp = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        program = build_filter(uncounted_memory=self._cgroups is not None)
        if program is None:
            self.enforced_by["system_calls"] = "nothing"
        os.write(self._seccomp, program or b"")

    def _who_separates_users(self) -> str:
        if self._users:
            return "uid per sandbox (subordinate)"
        return "uid per sandbox" if self._as_root else "user namespace per sandbox"

    def close(self) -> None:
        if self._zygote:
            self._zygote.end()
            self._zygote = None
        if self._cgroups:
            self._cgroups.remove()
        if self._users:
            self._users.close()
        if self._seccomp >= 0:
            os.close(self._seccomp)
            self._seccomp = -1

    async def start(self, template: Template) -> Guest:
        if self._seccomp < 0:
            raise CreationFailed("bubblewrap: the launcher was not prepared, or is closed.")
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if self._as_root else None
        at_end = None
        if self._users:
            uid = self._users.take()
            at_end = partial(self._users.give_back, uid)
        argument = template.guest_argument(
            workspace=WORKSPACE, watch_memory=self._cgroups is None, uid=uid
        )
        cgroup = None
        with ExitStack() as given_up, ExitStack() as handed_over:
            if at_end:
                # What did start ends with its channel, long before it is this user's turn again.
                given_up.callback(at_end)
            try:
                channel, theirs = socket.socketpair()
                given_up.callback(channel.close)
                handed_over.callback(theirs.close)
                channel.setblocking(False)
                fds = [theirs.fileno()]
                # A description of its own, whose offset no other sandbox moves.
                places = [(f"/proc/self/fd/{self._seccomp}", os.O_RDONLY)]
                if self._cgroups:
                    cgroup = self._cgroups.new(template.limits.memory_bytes)
                    places += [(path, os.O_WRONLY) for path in cgroup.procs]
                for path, how in places:
                    fds.append(os.open(path, how))
                    handed_over.callback(os.close, fds[-1])
                self._living_zygote().request(argument.encode(), fds)
                handed_over.close()
                pidfd = await receive_descriptor(channel, STARTED, START_SECONDS)
                given_up.callback(os.close, pidfd)
                fd = await receive_descriptor(channel, LISTENER, START_SECONDS)
                listener = socket.socket(fileno=fd)
            except BaseException as error:
                given_up.close()
                if cgroup:
                    await cgroup.remove()
                if isinstance(error, ConnectionResetError) and self._is_listening():
                    # It was too poor to take the channel, or what it forked was ended.
                    error = OSError(errno.EAGAIN, "the start was broken off")
                if isinstance(error, OSError | TimeoutError):
                    complaint = self._zygote.complaint() if self._zygote else ""
                    if not self._as_root:
                        complaint = remedy_for(complaint)
                    raise start_failure("bubblewrap", error, complaint) from error
                raise
            given_up.pop_all()
        return PidfdGuest(channel, pidfd, cgroup, at_end, listener)

    def _is_listening(self) -> bool:
        return self._zygote is not None and self._zygote.listening

    def _living_zygote(self) -> _Zygote:
        if self._zygote and not self._zygote.alive:
            self._zygote.end()
            self._zygote = None
        if self._zygote is None:
            self._zygote = _Zygote(self._command())
        return self._zygote

    def _command(self) -> list[str]:
        arguments = self._users.prefix if self._users else []
        arguments = [*arguments, self._bwrap, "--die-with-parent", "--new-session", "--as-pid-1"]
        # The zygote's own privileges; what it forks gives them up before user code exists.
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        if self._as_root or self._users:
            arguments += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
            arguments += ["--unshare-cgroup-try", "--cap-add", "CAP_SETUID"]
            arguments += ["--cap-add", "CAP_SETGID", "--cap-add", "CAP_NET_ADMIN"]
            # In a user namespace nobody can make a device.
            arguments += ["--cap-add", "CAP_MKNOD"] if self._as_root else []
        else:
            arguments += ["--unshare-all", "--uid", "1000", "--gid", "1000"]
        arguments += ["--hostname", "sandbox", "--clearenv"]
        for name, value in (
            ("PATH", search_path(self._python)),
            ("HOME", WORKSPACE),
            ("LANG", "C.UTF-8"),
            ("TMPDIR", "/tmp"),
            *node_path(self._python),
            (NPM_RETRIES, "0"),
        ):
            arguments += ["--setenv", name, value]
        # bubblewrap makes missing parents readable to their owner only, who is not the program.
        views = [*program_folders(self._python), INSIDE]
        for path in program_folders(self._python):
            for parent in reversed(Path(path).parents):
                arguments += ["--dir", str(parent)]
            arguments += ["--ro-bind", path, path]
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = f"/{name}"
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                arguments += ["--ro-bind", path, path]
                views.append(path)
        arguments += ["--ro-bind", str(self._guest_dir), INSIDE, "--proc", "/proc"]
        arguments += ["--symlink", f"{INSIDE}/etc", "/etc"]
        # As root every sandbox has devices of its own.
        for name, _, _ in root.DEVICES[:1] if self._as_root else root.DEVICES:
            arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for path in (root.NEW, "/tmp"):
            arguments += ["--dir", path]
        arguments += ["--tmpfs", root.MASKS, "--remount-ro", "/"]
        layout = {
            # What lies in another view is in that one.
            "views": [path for path in views if not _is_below(path, views)],
            "hidden": [str(path) for path in self._hidden],
            "etc": f"{INSIDE}/etc",
            "nothing": f"{INSIDE}/{NOTHING}",
            "own_devices": self._as_root,
            "loads_packages": not self._has_foreign_packages,
        }
        program = [*interpreter_options(self._python), boot(INSIDE, "zygote"), json.dumps(layout)]
        return killed_first([*arguments, "--chdir", "/", "--", *program])


def _is_below(path: str, others: list[str]) -> bool:
    return any(path.startswith(f"{other}/") for other in others)


class _Zygote:
    """The running bubblewrap and the control socket of the zygote in it."""

    def __init__(self, command: list[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = ToolStderr()
        try:
            self._process = start_process(command, theirs, self._stderr, {})
        except BaseException:
            self._control.close()
            self._stderr.close()
            raise
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def listening(self) -> bool:
        """Whether anybody has the other end. Known before what waited there is dropped."""
        poll = select.poll()
        poll.register(self._control, 0)
        return self.alive and not poll.poll(0)

    def request(self, template: bytes, fds: list[int]) -> None:
        """Ask for one sandbox. Raises OSError when the zygote is gone."""
        socket.send_fds(self._control, [template], fds)

    def complaint(self) -> str:
        return self._stderr.read()

    def end(self) -> None:
        """End the zygote, and with it whatever it started."""
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._stderr.close()


def find_bubblewrap() -> str:
    """Path of a usable bwrap. Raises ProviderUnavailable with the remedy."""
    path = shutil.which("bwrap")
    if path is None:
        raise ProviderUnavailable(f"bubblewrap is not installed. {REMEDY}")
    output = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    version = tuple(int(number) for number in re.findall(r"\d+", output)[:2])
    if version < OLDEST:
        raise ProviderUnavailable(
            f"bubblewrap {'.'.join(map(str, version))} is too old, 0.8 is needed. {REMEDY}"
        )
    return path


def check_start() -> None:
    """Start /bin/true in bubblewrap, as sandboxes are started. Raises ProviderUnavailable with the
    remedy."""
    as_root = os.geteuid() == 0
    kind = "--unshare-net" if as_root else "--unshare-all"
    command = [find_bubblewrap(), kind, "--ro-bind", "/", "/", "--", "/bin/true"]
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderUnavailable(f"bubblewrap does not start: {error}") from error
    if tried.returncode:
        complaint = tried.stderr.strip()[:500] or f"exit code {tried.returncode}"
        if not as_root:
            complaint = remedy_for(complaint)
        raise ProviderUnavailable(f"bubblewrap does not start: {complaint}")
