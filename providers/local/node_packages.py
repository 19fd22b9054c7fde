"""npm packages in the environment of packages, for programs in JavaScript on this machine.

Neither npm nor Node.js takes part: the files of a lock are fetched, compared with their hashes and
unpacked. No code of a package runs. Programs find them by NODE_PATH.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from providers.errors import InvalidConfiguration
from providers.local.packages import NODE_MODULES, InstallationFailed, alone, open_to_read
from providers.templates.files import BuildFailed, Room
from providers.templates.lock import Lock, LockedPackage
from providers.templates.resolve import NPM

LOCK_FILE = Path(__file__).with_suffix(".json")
_INSTALLED = "node-installed.json"
_MOST_BYTES, _FILE_BYTES, _PIECE_BYTES = 512 << 20, 64 << 20, 1 << 20
_SECONDS = 60


def is_installed(folder: Path, lock_file: Path = LOCK_FILE) -> bool:
    """Tell whether the environment holds what the lock file names."""
    try:
        return (folder / _INSTALLED).read_bytes() == lock_file.read_bytes()
    except OSError:
        return False


def install(
    folder: Path,
    registry: str = NPM,
    lock_file: Path = LOCK_FILE,
    source: Path | None = None,
) -> None:
    """Install the packages of the lock file into the environment, all at once at the end.

    They come from the registry, or from the files that `fetch_all` has left in `source`. Raises
    InstallationFailed. A second installation at the same time waits for the first.
    """
    with alone(folder):
        if is_installed(folder, lock_file):
            return
        staging = folder / "node-staging"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            _unpack(_lock_of(lock_file), staging, registry, source)
            (staging / NODE_MODULES).mkdir(exist_ok=True)
            open_to_read(staging / NODE_MODULES)
            place, former = folder / NODE_MODULES, staging / "former"
            with suppress(FileNotFoundError):
                place.rename(former)
            (staging / NODE_MODULES).rename(place)
            (folder / _INSTALLED).write_bytes(lock_file.read_bytes())
            (folder / _INSTALLED).chmod(0o644)
        except (BuildFailed, InvalidConfiguration) as error:
            raise InstallationFailed(error.message) from None
        except OSError as error:
            raise InstallationFailed(f"they cannot be stored: {error.strerror}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def fetch_all(target: Path, registry: str = NPM, lock_file: Path = LOCK_FILE) -> None:
    """Put the files of the lock into a folder, for machines without a registry. Raises
    InstallationFailed."""
    target.mkdir(parents=True, exist_ok=True)
    for package in _lock_of(lock_file).packages:
        with (target / _file_name(package)).open("wb") as file:
            _fetch(package, file, registry, None)


def _lock_of(lock_file: Path) -> Lock:
    """Read a lock, with the addresses that every registry has for its packages."""
    document = json.loads(lock_file.read_bytes())
    for place, described in document["packages"].items():
        if place:
            name = described.get("name") or place.rpartition(f"{NODE_MODULES}/")[2]
            file_name = f"{name.rpartition('/')[2]}-{described['version']}.tgz"
            described.setdefault("resolved", f"{NPM}/{name}/-/{file_name}")
    return Lock.parse("", json.dumps(document))


def _unpack(lock: Lock, staging: Path, registry: str, source: Path | None) -> None:
    # Only here: what runs sandboxes has no use for it.
    from providers.templates import wheels

    staging.mkdir()
    room = Room(_MOST_BYTES)
    for package in lock.packages:
        with tempfile.TemporaryFile(dir=staging) as file:
            _fetch(package, file, registry, source)
            file.seek(0)
            wheels.unpack(file, package, staging, "", room, lambda line: None)


def _fetch(package: LockedPackage, file: IO[bytes], registry: str, source: Path | None) -> None:
    """Write a package's file. Raises InstallationFailed where it is not the locked one."""
    digest, size = hashlib.new(package.algorithm), 0
    try:
        for piece in _pieces(package, registry, source):
            digest.update(piece)
            size += len(piece)
            if size > _FILE_BYTES:
                raise InstallationFailed(f"{package.name}: the file is too large")
            file.write(piece)
    except HTTPError as error:
        raise InstallationFailed(
            f"{package.name}: the registry answers with the status {error.code}"
        ) from None
    except URLError as error:
        raise InstallationFailed(
            f"no package registry could be reached ({package.name}: {error.reason})"
        ) from None
    except (OSError, ValueError) as error:
        raise InstallationFailed(f"{package.name}: {error}") from None
    if digest.hexdigest() != package.hash:
        raise InstallationFailed(f"{package.name}: the file has another hash than its lock")


def _pieces(package: LockedPackage, registry: str, source: Path | None) -> Iterator[bytes]:
    if source is not None:
        stream: IO[bytes] = (source / _file_name(package)).open("rb")
    else:
        address = package.url.replace(NPM, registry.rstrip("/"), 1)
        if not address.startswith(("http://", "https://")):
            raise ValueError("the registry's address begins with neither http nor https")
        stream = urlopen(address, timeout=_SECONDS)  # noqa: S310 (only http and https)
    with stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece


def _file_name(package: LockedPackage) -> str:
    """A name of its own for each: packages of two scopes may have files of the same name."""
    return f"{package.name.replace('/', '+')}-{package.version}.tgz"


def versions(folder: Path) -> Mapping[str, str]:
    """Return the versions by name of what the lock's project asks for, as it is installed."""
    try:
        packages = json.loads((folder / _INSTALLED).read_bytes())["packages"]
        asked = sorted(packages[""]["dependencies"])
        return {name: packages[f"{NODE_MODULES}/{name}"]["version"] for name in asked}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
