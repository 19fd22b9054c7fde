"""Images for sandboxes without an engine: root file systems that archives were unpacked into, once.

DATA_DIR/images has a folder for each image, by the digest of its configuration, which has those of
its layers, and `names.json`. Names change and folders are made and removed by whoever has the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.languages import language_of
from providers.runtime.launchers.guest_files import TEMPLATE
from providers.runtime.launchers.image_archive import FAILURES, Archive, resolve, unpack

IMPORT_COMMAND = "manage.py pool_images import"

# The guest is written for 3.9 or newer.
OLDEST_PYTHON = 9

_NAME = re.compile(r"\w[\w.:/@-]{0,299}", re.ASCII)
_PYTHON = re.compile(r"python3\.(\d+)", re.ASCII)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """A root file system, and the environment that its programs expect.

    `folder` has the files of a template that sandboxes are given with it.
    """

    name: str
    digest: str
    root: Path
    environment: Mapping[str, str]
    folder: Path | None = None

    @property
    def path(self) -> str:
        own = self.environment.get("PATH", _PATH)
        return f"{TEMPLATE}/bin:{own}" if self.folder else own

    def interpreter(self, language: str) -> str | None:
        """The path of a language's interpreter in the image, None where it has none of use."""
        if language == "python" and self.folder and (self.folder / "bin" / "python").is_symlink():
            # An environment of the one in the image.
            return f"{TEMPLATE}/bin/python"
        known = language_of(language)
        for name in known.interpreters if known else ():
            for folder in self.path.split(":"):
                path = f"{folder}/{name}"
                if folder.startswith("/") and self._is_program(path, language):
                    return path
        return None

    def version(self, language: str) -> str:
        """Such as `python 3.12`, empty where the names of its files do not tell."""
        python = replace(self, folder=None).interpreter(language) or ""
        minor = self._minor(python) if language == "python" else None
        return f"python 3.{minor}" if minor else ""

    def hold(self) -> int:
        """Keep its files as long as this descriptor is open. Raises ProviderUnavailable."""
        folder = self.root.parent
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(held), os.stat(folder)):
                    return held
            os.close(held)
        raise _missing(self.name)

    def _is_program(self, path: str, language: str) -> bool:
        found = resolve(self.root, path)
        if found is None or not found.is_file() or not os.stat(found).st_mode & 0o111:
            return False
        return language != "python" or (self._minor(path) or 0) >= OLDEST_PYTHON

    def _minor(self, python: str) -> int | None:
        """N of Python 3.N, which the last of its links is named after, or else its library."""
        found = resolve(self.root, python)
        names = [found.name] if found else []
        if found and names == ["python3"]:
            prefix = found.relative_to(self.root).parent.parent
            library = resolve(self.root, f"{prefix}/lib")
            names = os.listdir(library) if library and library.is_dir() else []
        known = [named[1] for name in names if (named := _PYTHON.fullmatch(name))]
        return int(known[0]) if len(known) == 1 else None


class ImageStore:
    """The images that were imported into a data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "images"

    def list(self) -> Sequence[Image]:
        """All of them, by name."""
        found = []
        for name, digest in sorted(self._names().items()):
            with contextlib.suppress(FileNotFoundError):
                found.append(self._open(name, digest))
        return found

    def find(self, name: str) -> Image:
        """The image of this name. Raises ProviderUnavailable with the remedy."""
        digest = self._names().get(name)
        try:
            return self._open(name, digest or "")
        except OSError:
            raise _missing(name) from None

    def add(self, name: str, archive: Path) -> Image:
        """Unpack an image, which has this name from now on. Raises InvalidConfiguration."""
        if not _NAME.fullmatch(name):
            raise InvalidConfiguration(f"{name!r} is not the name of an image.")
        with self._alone():
            try:
                with Archive(archive) as opened:
                    digest = opened.digest
                    if not self._place(digest).exists():
                        self._make(opened)
            except FAILURES as error:
                reason = getattr(error, "strerror", "") or str(error) or type(error).__name__
                raise InvalidConfiguration(f"{archive} cannot be imported: {reason}") from error
            self._write({**self._names(), name: digest})
            self._prune()
        return self.find(name)

    def remove(self, name: str) -> None:
        """Remove a name, and the image that has no other. What a pool uses goes later: with the
        next import or removal. Raises InvalidConfiguration."""
        with self._alone():
            names = self._names()
            if name not in names:
                raise InvalidConfiguration(f"There is no image {name!r}.")
            del names[name]
            self._write(names)
            self._prune()

    def _open(self, name: str, digest: str) -> Image:
        """Raises OSError."""
        place = self._place(digest)
        environment = json.loads((place / "environment.json").read_text())
        return Image(name, f"sha256:{digest}", place / "rootfs", environment)

    def _place(self, digest: str) -> Path:
        return self._folder / f"sha256-{digest}"

    def _names(self) -> dict[str, str]:
        try:
            names: dict[str, str] = json.loads((self._folder / "names.json").read_text())
        except FileNotFoundError:
            return {}
        return names

    def _write(self, names: Mapping[str, str]) -> None:
        draft = self._folder / "names.draft"
        draft.write_text(json.dumps(names))
        draft.replace(self._folder / "names.json")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one who changes the store, without what killed ones have left."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in self._folder.glob("staging-*"):
                shutil.rmtree(left)
            yield
        finally:
            os.close(lock)

    def _make(self, archive: Archive) -> None:
        staging = Path(tempfile.mkdtemp(prefix="staging-", dir=self._folder))
        try:
            unpack(archive, staging)
            _sync(staging)
            staging.rename(self._place(archive.digest))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _prune(self) -> None:
        """Remove the images that have no name, and that no pool holds."""
        named = {self._place(digest) for digest in self._names().values()}
        for place in set(self._folder.glob("sha256-*")) - named:
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place.rename(self._folder / f"staging-{place.name}"))
            except BlockingIOError:
                continue
            finally:
                os.close(handle)


def _sync(folder: Path) -> None:
    """Write out the file system of a folder: a machine that fails must not leave a whole image
    without its contents. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Not `os.sync`, which waits for all file systems, also for those that do not answer.
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(handle)


def _missing(name: str) -> ProviderUnavailable:
    return ProviderUnavailable(
        f"There is no image {name!r} here. Import it: {IMPORT_COMMAND} {name} ARCHIVE"
    )
