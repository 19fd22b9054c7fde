"""Files of templates as they come from strangers: written below one folder, within a bound."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from providers.errors import CreationFailed
from providers.runtime.guest.names import problem
from providers.templates.base import PACKAGES

MOST_FILES = 100_000
PIECE_BYTES = 1 << 20


class BuildFailed(CreationFailed):
    """A template could not be built; the message says why, and names the package."""


class Room:
    """The bytes and files that a template may still take."""

    def __init__(self, most_bytes: int, most_files: int = MOST_FILES) -> None:
        self.bytes, self.files = most_bytes, most_files

    def take_file(self, package: str) -> None:
        self.files -= 1
        if self.files < 0:
            raise BuildFailed(f"{package}: The template has too many files.")

    def take(self, size: int, package: str) -> None:
        self.bytes -= size
        if self.bytes < 0:
            raise no_room(package)


def no_room(package: str) -> BuildFailed:
    """Return the error for a package that is too large for its template."""
    return BuildFailed(
        f"{package}: The template takes more room than templates may. Name fewer packages, or have "
        "an administrator raise TEMPLATE_MAX_MB."
    )


def write(path: Path, pieces: Iterator[bytes], package: str, room: Room, mode: int = 0o644) -> None:
    """Write a new file. Raises BuildFailed."""
    room.take_file(package)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            for piece in pieces:
                room.take(len(piece), package)
                file.write(piece)
            os.fchmod(file.fileno(), mode)
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise BuildFailed(f"{package}: {path.name!r} is there twice.") from None


def pieces(content: IO[bytes]) -> Iterator[bytes]:
    """Yield what is left of a file."""
    while piece := content.read(PIECE_BYTES):
        yield piece


# Links to the interpreter, and what says that the folder is an environment: this machine's own.
INTERPRETER = ("python", "python3")
ENVIRONMENT = "pyvenv.cfg"


def environment_of(python: str) -> str:
    """Return what says that a folder is a virtual environment of an interpreter."""
    return f"home = {os.path.dirname(python)}\ninclude-system-site-packages = true\n"


def members(folder: Path) -> Iterator[Path]:
    """Yield all files but those of the interpreter. Raises BuildFailed for a link."""
    for path, folders, files in os.walk(folder):
        here = Path(path)
        for name in (*folders, *files):
            each = here / name
            if each.is_symlink():
                if here == folder / "bin" and name in INTERPRETER:
                    continue
                raise BuildFailed(f"{each.relative_to(folder)} is a link.")
            if name in files and not (here == folder and name == ENVIRONMENT):
                yield each


def describe(folder: Path) -> tuple[str, int]:
    """Return the digest of all files in a folder, with their names and modes, and their size."""
    digest, size = hashlib.sha256(), 0
    for path in sorted(members(folder)):
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
            about = os.fstat(file.fileno())
        size += about.st_size
        mode = "x" if about.st_mode & 0o100 else "-"
        digest.update(f"{name}\0{mode}\0{content}\n".encode())
    return digest.hexdigest(), size


def pack(
    folder: Path, prefix: str = "", is_wanted: Callable[[Path], bool] = lambda _: True
) -> Iterator[bytes]:
    """Yield a tar archive of the files in a folder that are wanted, with `prefix` before their
    names."""
    for path in filter(is_wanted, sorted(members(folder))):
        entry = tarfile.TarInfo(prefix + path.relative_to(folder).as_posix())
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            entry.size, entry.mode = about.st_size, 0o755 if about.st_mode & 0o100 else 0o644
            yield entry.tobuf(tarfile.PAX_FORMAT)
            yield from pieces(file)
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def image_archive(
    folder: Path, place: str, release: str = "", interpreter: str = ""
) -> Iterator[bytes]:
    """Yield the tar archive that puts a template's files below `place` of an image.

    The image's own Python, of this release, finds the packages by a file in its folders for them.
    Those of the template come first. With an `interpreter` the files are a virtual environment of
    that one. Packages of Debian are left out.
    """
    parts = place.split("/")
    for number in range(len(parts)):
        yield _directory("/".join(parts[: number + 1]))
    for path in sorted(each for each in folder.rglob("*") if each.is_dir()):
        yield _directory(f"{place}/{path.relative_to(folder).as_posix()}")
    line = (
        "import sys; sys.path.insert(next((at for at, each in enumerate(sys.path) if each.endswith("
        f"'-packages')), len(sys.path)), '/{place}/lib/python{release}/site-packages')\n"
    )
    for name in ("site-packages", "dist-packages") if release else ():
        yield _text(f"usr/local/lib/python{release}/{name}/cofferdam-template.pth", line)
    if interpreter:
        yield _text(f"{place}/{ENVIRONMENT}", environment_of(interpreter))
    for name in INTERPRETER if interpreter else ():
        entry = tarfile.TarInfo(f"{place}/bin/{name}")
        entry.type, entry.linkname = tarfile.SYMTYPE, interpreter
        yield entry.tobuf(tarfile.PAX_FORMAT)
    packages = folder / PACKAGES
    yield from pack(folder, f"{place}/", lambda path: packages not in path.parents)


def _text(name: str, text: str) -> bytes:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    padding = bytes(-entry.size % tarfile.BLOCKSIZE)
    return entry.tobuf(tarfile.PAX_FORMAT) + content + padding


def _directory(name: str) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    return entry.tobuf(tarfile.PAX_FORMAT)


def unpack_workspace(
    archive: IO[bytes], folder: Path, room: Room, tell: Callable[[str], None]
) -> None:
    """Unpack what commands have left in a workspace: its files. Raises BuildFailed."""
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as opened:
            for entry in opened:
                if entry.isdir():
                    continue
                content = opened.extractfile(entry) if entry.isreg() else None
                if content is None or problem(entry.name):
                    tell(f"{entry.name[:100]!r} is left out: it is no plain file")
                    continue
                mode = 0o755 if entry.mode & 0o100 else 0o644
                write(folder / entry.name, pieces(content), "workspace", room, mode)
    except (tarfile.TarError, EOFError, UnicodeDecodeError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        raise BuildFailed(f"The archive is damaged ({type(error).__name__}).") from None


def unpack(archive: IO[bytes], folder: Path, room: Room) -> None:
    """Unpack what `pack` has made. Raises BuildFailed for any other archive."""
    try:
        with tarfile.open(fileobj=archive, mode="r|") as opened:
            for entry in opened:
                content = opened.extractfile(entry) if entry.isreg() else None
                if content is None or problem(entry.name):
                    raise BuildFailed("The archive is not that of a template.")
                mode = 0o755 if entry.mode & 0o100 else 0o644
                write(folder / entry.name, pieces(content), "template", room, mode)
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise BuildFailed(f"The archive is damaged ({type(error).__name__}).") from None
