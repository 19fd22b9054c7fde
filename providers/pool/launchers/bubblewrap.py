"""Sandboxes as bubblewrap processes: namespaces, an empty root, seccomp, limits. No daemon."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from providers.errors import CreationFailed, ProviderUnavailable
from providers.pool.cgroup import CgroupParent
from providers.pool.guest_files import BOOT, INSIDE, PACKAGE, find_python, install_guest
from providers.pool.launcher import Guest, ProcessGuest
from providers.pool.seccomp import build_filter
from providers.pool.template import LANGUAGES, WORKSPACE, Template

REMEDY = "Install it (Debian, Ubuntu: apt-get install bubblewrap)."
OLDEST = (0, 8)

# Above every range that distributions hand out to users, containers and dynamic services.
_FIRST_UID, _UIDS = 1_900_000_000, 200_000_000

_INTERPRETERS = {"nodejs": "node", "bash": "bash"}


class BubblewrapLauncher:
    """Starts each sandbox as `bwrap ... python3 supervisor`.

    As root every sandbox gets a user id of its own, which the supervisor takes before it forks;
    a user namespace would map all of them to root. Otherwise bubblewrap makes a user namespace.
    """

    def __init__(self, data_dir: Path) -> None:
        self.runtime = "bubblewrap"
        self._data_dir = data_dir
        self._as_root = os.geteuid() == 0
        self._bwrap = ""
        self._python = ""
        self._guest_dir = Path()
        self._filter_path: Path | None = None
        self._cgroups: CgroupParent | None = None

    async def prepare(self) -> None:
        self._bwrap = find_bubblewrap()
        self._python = find_python()
        self._guest_dir = install_guest(self._python, self._data_dir / "run")
        program = build_filter()
        if program:
            self._filter_path = self._guest_dir / "seccomp.bpf"
            self._filter_path.write_bytes(program)
        self._cgroups = CgroupParent.create()

    def languages(self) -> list[str]:
        return [name for name in LANGUAGES if self.interpreter(name)]

    def interpreter(self, language: str) -> str | None:
        if language == "python":
            return self._python
        return shutil.which(_INTERPRETERS[language], path="/usr/local/bin:/usr/bin:/bin")

    def guest_path(self) -> str:
        return f"{INSIDE}/{PACKAGE}"

    def close(self) -> None:
        if self._cgroups:
            self._cgroups.remove()

    async def start(self, template: Template) -> Guest:
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if self._as_root else None
        command = [
            *self._isolation(template),
            *("--", self._python, "-I", "-S", "-X", "utf8", "-c", BOOT),
            template.guest_argument(
                workspace=WORKSPACE, watch_memory=self._cgroups is None, uid=uid
            ),
        ]
        pass_fds: tuple[int, ...] = ()
        cgroup = None
        if self._filter_path:
            pass_fds = (os.open(self._filter_path, os.O_RDONLY | os.O_CLOEXEC),)
            command[1:1] = ["--seccomp", str(pass_fds[0])]
        try:
            if self._cgroups:
                cgroup = self._cgroups.new(template.limits.memory_bytes)
                join = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', cgroup.procs]
                command = join + command
            return ProcessGuest(command, cgroup, pass_fds)
        except OSError as error:
            raise CreationFailed(f"bubblewrap: {error}") from error
        finally:
            for fd in pass_fds:
                os.close(fd)

    def _isolation(self, template: Template) -> list[str]:
        workspace = str(template.limits.workspace_bytes)
        arguments = [self._bwrap, "--die-with-parent", "--new-session", "--as-pid-1"]
        if self._as_root:
            arguments += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
            arguments += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            arguments += ["--unshare-all", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000"]
        arguments += ["--hostname", "sandbox", "--clearenv"]
        for name, value in (
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", WORKSPACE),
            ("LANG", "C.UTF-8"),
            ("TMPDIR", "/tmp"),
        ):
            arguments += ["--setenv", name, value]
        arguments += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = f"/{name}"
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                arguments += ["--ro-bind", path, path]
        # bubblewrap makes missing parents readable to their owner only, who is not the program.
        arguments += ["--dir", "/etc"]
        for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/fonts"):
            arguments += ["--ro-bind-try", path, path]
        if not self._python.startswith("/usr/"):
            prefix = str(Path(self._python).parent.parent)
            arguments += ["--ro-bind", prefix, prefix]
        arguments += ["--ro-bind", str(self._guest_dir), INSIDE, "--proc", "/proc", "--dev", "/dev"]
        for path, size in ((WORKSPACE, workspace), ("/tmp", workspace), ("/dev/shm", workspace)):
            arguments += ["--size", size, "--perms", "1777", "--tmpfs", path]
        return [*arguments, "--remount-ro", "/", "--chdir", "/"]


def find_bubblewrap() -> str:
    """Path of a usable bwrap. Raises ProviderUnavailable with the remedy."""
    path = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if path is None:
        raise ProviderUnavailable(
            f"The local provider needs bubblewrap, which is not installed. {REMEDY}"
        )
    output = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    version = tuple(int(number) for number in re.findall(r"\d+", output)[:2])
    if version < OLDEST:
        raise ProviderUnavailable(
            f"bubblewrap {'.'.join(map(str, version))} is too old, 0.8 is needed. {REMEDY}"
        )
    return path
