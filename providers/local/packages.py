"""An environment of packages for programs in Python on this machine.

It exists before its packages do: sandboxes see its folder whole, so a package is there for every
new sandbox from the moment it is installed, and nothing has to be started anew.

The packages lie beside `site-packages`: pip lets a program install another version of one for
itself then, because what the program has installed comes first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from providers.errors import ProviderUnavailable
from providers.runtime.launchers.guest_files import find_python
from providers.values import Packages

LOCK_FILE = Path(__file__).with_suffix(".txt")
# Those that install others. Programs run them, and import others.
_INSTALLERS = frozenset(("pip", "setuptools", "uv", "wheel"))
_COMMANDS = ("pip", "pip3", "uv", "uvx")
# The folder of the packages, and what has interpreters look there, and for a program's own before.
_FOLDER, _POINTER = "packages", "packages.pth"
_POINTS = (
    "import os, site, sys; own = site.getusersitepackages(); sys.path += "
    "[own] if os.path.isdir(own) and not sys.flags.no_user_site and own not in sys.path else []\n"
    f"../{_FOLDER}\n"
)
# The npm packages, which Node.js finds by NODE_PATH.
NODE_MODULES = "node_modules"
# Files of the environment: why the last installation failed, and the lock of what is installed.
_REASON, _INSTALLED = "failed.txt", "installed.txt"

# What pip says of each try to reach a registry. Its last line then says that no version was found.
_UNREACHED = "after connection broken by"

# Sandboxes have another user, who reads all of it.
_UMASK = 0o022


class InstallationFailed(Exception):
    """The packages could not be installed; the text says why, in one line."""


def create(folder: Path) -> Path:
    """Make an environment without packages of its own, where there is none; return its interpreter.

    The packages of the system's interpreter are seen in it. Raises ProviderUnavailable where
    sandboxes could not see the folder, or no interpreter can make one.
    """
    python = folder / "bin" / "python"
    if not _is_whole(python):
        command = [find_python(), "-m", "venv", "--clear", "--without-pip"]
        made = subprocess.run(
            [*command, "--system-site-packages", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            umask=_UMASK,
        )
        if made.returncode:
            raise ProviderUnavailable(f"No environment for packages: {_last_line(made.stderr)}")
        _point(folder)
    # Before sandboxes are started: what is in it is there for all of them at once.
    modules = folder / NODE_MODULES
    modules.mkdir(exist_ok=True)
    modules.chmod(0o755)
    try:
        return Path(find_python(str(python)))
    except ProviderUnavailable:
        shutil.rmtree(folder)
        raise


def open_to_read(folder: Path) -> None:
    """Let users of sandboxes read all that is in a folder."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def is_installed(folder: Path, lock_file: Path = LOCK_FILE) -> bool:
    """Tell whether the environment holds what the lock file names."""
    try:
        return (folder / _INSTALLED).read_bytes() == lock_file.read_bytes()
    except OSError:
        return False


def install(folder: Path, lock_file: Path = LOCK_FILE) -> None:
    """Install the packages of the lock file into the environment, all at once at the end.

    Raises InstallationFailed. A second installation at the same time waits for the first.
    """
    with alone(folder):
        if is_installed(folder, lock_file):
            return
        staging = folder / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        installed = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")),
                *("install", "--quiet", "--disable-pip-version-check", "--no-input"),
                *("--no-deps", "--require-hashes", "--only-binary", ":all:"),
                *("--target", str(staging), "--requirement", str(lock_file)),
            ],
            capture_output=True,
            text=True,
            check=False,
            umask=_UMASK,
        )
        if installed.returncode:
            reason = _last_line(installed.stderr)
            if _UNREACHED in installed.stderr:
                reason = f"no package registry could be reached ({reason})"
            (folder / _REASON).write_text(reason)
            raise InstallationFailed(reason)
        (place,) = folder.glob(f"lib/python*/{_FOLDER}")
        former = folder / "former"
        shutil.rmtree(former, ignore_errors=True)
        place.rename(former)
        staging.rename(place)
        shutil.rmtree(former)
        (folder / _INSTALLED).write_bytes(lock_file.read_bytes())
        (folder / _REASON).unlink(missing_ok=True)


def look(folder: Path) -> Packages:
    """Return what is in an environment, also in one that somebody else made."""
    versions = dict[str, str]()
    for place in folder.glob("lib/python*/*packages"):
        try:
            versions |= _versions(place, place.stat().st_mtime_ns)
        except FileNotFoundError:
            # An installation is just putting another folder in its place.
            continue
    installed = _installed(folder)
    if _is_running(folder):
        return Packages("preparing", "", versions, *installed)
    try:
        return Packages("failed", (folder / _REASON).read_text(), versions, *installed)
    except OSError:
        return Packages("ready", "", versions, *installed)


def _installed(folder: Path) -> tuple[str, float]:
    """The SHA-256 of the lock whose packages are there, "" where none was installed, and when."""
    try:
        with (folder / _INSTALLED).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_mtime
    except OSError:
        return "", 0.0


@lru_cache(maxsize=4)
def _versions(place: Path, changed_ns: int) -> dict[str, str]:
    """Read the versions by name, anew when the folder has changed: each package is a file."""
    found = metadata.distributions(path=[str(place)])
    named = sorted((each.name, each.version) for each in found)
    return {name: version for name, version in named if name not in _INSTALLERS}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Install alone: what else installs into the environment waits."""
    fd = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _lock_of(folder: Path) -> Path:
    """Beside the folder: whoever can read a file can lock it, and programs read all that is in."""
    return folder.with_name(f"{folder.name}.lock")


def _is_running(folder: Path) -> bool:
    try:
        lock = _lock_of(folder).open()
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _point(folder: Path) -> None:
    """Have an environment look for packages where they will be, and for the commands among them."""
    (place,) = folder.glob("lib/python*/site-packages")
    made = place.with_name(_FOLDER)
    made.mkdir()
    made.chmod(0o755)
    for name in _COMMANDS:
        (folder / "bin" / name).symlink_to(f"../{made.relative_to(folder)}/bin/{name}")
    # Last: without it the environment is not whole.
    pointer = place / _POINTER
    pointer.write_text(_POINTS)
    pointer.chmod(0o644)


def _is_whole(python: Path) -> bool:
    """Tell whether it looks for packages where they are installed, which it does not after the
    system's interpreter became another version."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False
    pointer = Path(found.stdout.strip()) / _POINTER
    return found.returncode == 0 and pointer.is_file() and pointer.read_text() == _POINTS


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "pip gave no reason"
