"""Unpacks the files of packages: wheels (PEP 427) and npm's tarballs. No code of theirs runs.

The bytes come from strangers and only their hash is known to be right. So every name and size in
them is checked: nothing lies outside of the folder, nothing is a link or a device, and nothing
takes more room than is left.
"""

from __future__ import annotations

import configparser
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    canonicalize_version,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion

from providers.runtime.guest.names import problem
from providers.templates.base import PACKAGES
from providers.templates.files import BuildFailed, Room, pieces, write
from providers.templates.lock import LockedPackage

_MOST_TEXT = 1 << 20
# How an archive of `ar` begins, which each of Debian's packages is.
_DEB = b"!<arch>\ndebian-binary"
_SCRIPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TARGET = re.compile(r"(?P<module>[A-Za-z_][\w.]*)\s*:\s*(?P<call>[A-Za-z_][\w.]*)(\s*\[.*\])?")
# Programs that a template must not replace.
_INTERPRETER = re.compile(r"(python|pypy|node)[0-9.t-]*", re.IGNORECASE)
# Of a wheel's data only what programs read. Its programs lie in scripts.
_DATA = ("share", "etc")
# Python imports them at every start, before the program, also in processes of ours.
_AT_START = ("sitecustomize", "usercustomize")


def tags_for(python: str, platforms: Sequence[str] | None = None) -> frozenset[Tag]:
    """Return the tags of the wheels that this Python release, such as 3.11, can use here, or on
    other platforms."""
    release = tuple(int(part) for part in python.split("."))
    interpreter = f"cp{''.join(python.split('.'))}"
    if platforms is None:
        return frozenset((*cpython_tags(release), *compatible_tags(release, interpreter)))
    # Without one the functions take those of this machine.
    some = [*platforms, "any"]
    tags = (
        *cpython_tags(release, platforms=some),
        *compatible_tags(release, interpreter, some),
    )
    return frozenset(tags)


def unpack(
    source: IO[bytes],
    package: LockedPackage,
    folder: Path,
    python: str,
    room: Room,
    tell: Callable[[str], None],
    platforms: Sequence[str] | None = None,
) -> None:
    """Unpack a package's file into a folder that is a template's.

    `python` is the release that it is for, `platforms` what wheels may be for other than this
    machine. A package of Debian stays packed. Raises BuildFailed.
    """
    try:
        if package.kind == "python":
            _check_wheel_name(package, python, platforms)
            _unpack_wheel(source, package, folder, python, room, tell)
        elif package.kind == "apt":
            _place_deb(source, package, folder, room)
        else:
            _unpack_tarball(source, package, folder, room)
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        zlib.error,
        EOFError,
        NotImplementedError,
        UnicodeDecodeError,
        configparser.Error,
    ) as error:
        raise BuildFailed(
            f"{package.name}: The file is damaged ({type(error).__name__})."
        ) from None


def _unpack_wheel(
    source: IO[bytes],
    package: LockedPackage,
    folder: Path,
    python: str,
    room: Room,
    tell: Callable[[str], None],
) -> None:
    site = folder / "lib" / f"python{python}" / "site-packages"
    with zipfile.ZipFile(source) as archive:
        entries = [each for each in archive.infolist() if not each.is_dir()]
        names = [each.filename for each in entries]
        if len(set(names)) != len(names):
            raise BuildFailed(f"{package.name}: The wheel has a file twice.")
        for entry in entries:
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG):
                raise BuildFailed(f"{package.name}: {entry.filename!r} is no plain file.")
            path = _place(entry.filename, site, folder)
            if path is None:
                continue
            if _runs_at_start(path, site):
                tell(f"{package.name}: {entry.filename} is left out, it would run at every start")
                continue
            with archive.open(entry) as content:
                if path.parent == folder / "bin":
                    write(path, _script(pieces(content)), package.name, room, 0o755)
                else:
                    write(path, pieces(content), package.name, room)
        for name, text in _entry_points(archive, names):
            write(folder / "bin" / name, iter([text]), package.name, room, 0o755)


def _place_deb(source: IO[bytes], package: LockedPackage, folder: Path, room: Room) -> None:
    """It is unpacked where its scripts run: in a container of the image."""
    if source.read(len(_DEB)) != _DEB:
        raise BuildFailed(f"{package.name}: {package.file_name!r} is no package of Debian.")
    source.seek(0)
    # One name may be there for two kinds of machines.
    path = folder / PACKAGES / f"{package.name}_{package.hash[:16]}.deb"
    write(path, pieces(source), package.name, room)


def _check_wheel_name(package: LockedPackage, python: str, platforms: Sequence[str] | None) -> None:
    """Whether the file is of the package that was asked for, and for this Python."""
    try:
        name, version, _, tags = parse_wheel_filename(package.file_name)
    except (InvalidWheelFilename, InvalidVersion):
        raise BuildFailed(f"{package.name}: {package.file_name!r} is no wheel.") from None
    if name != canonicalize_name(package.name) or canonicalize_version(
        version
    ) != canonicalize_version(package.version):
        raise BuildFailed(
            f"{package.name}: The file {package.file_name!r} is of another package or version than "
            f"{package.name} {package.version}."
        )
    if not tags & tags_for(python, platforms):
        where = "here" if platforms is None else "in the image"
        raise BuildFailed(
            f"{package.name}: {package.file_name!r} is not for Python {python} {where}."
        )


def _place(name: str, site: Path, folder: Path) -> Path | None:
    """Return where an entry goes; None for what is left out. Raises BuildFailed."""
    if reason := problem(name):
        raise BuildFailed(f"{name[:100]!r}: {reason}")
    parts = PurePosixPath(name).parts
    if "__pycache__" in parts or name.endswith(".pyc"):
        # It is compiled anew from the text that people can read.
        return None
    if not parts[0].endswith(".data"):
        return site / name
    scheme, rest = (parts[1], parts[2:]) if len(parts) > 2 else ("", ())
    if scheme in ("purelib", "platlib"):
        return site.joinpath(*rest)
    if scheme == "scripts" and len(rest) == 1 and _is_script(rest[0]):
        return folder / "bin" / rest[0]
    if scheme == "data" and len(rest) > 1 and rest[0] in _DATA:
        return folder.joinpath(*rest)
    return None


def _is_script(name: str) -> bool:
    return bool(_SCRIPT.fullmatch(name)) and not _INTERPRETER.fullmatch(name)


def _runs_at_start(path: Path, site: Path) -> bool:
    """Whether Python would run it when it starts: a `.pth` file or a module of these names."""
    if not path.is_relative_to(site):
        return False
    first = path.relative_to(site).parts[0]
    return first.lower().endswith(".pth") or first.partition(".")[0].lower() in _AT_START


def _entry_points(archive: zipfile.ZipFile, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Return the scripts that the wheel declares, as name and text."""
    found = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/entry_points\.txt", name)]
    if not found:
        return
    if archive.getinfo(found[0]).file_size > _MOST_TEXT:
        raise BuildFailed("entry_points.txt is too large.")
    parser = configparser.RawConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(archive.read(found[0]).decode())
    if not parser.has_section("console_scripts"):
        return
    for name, target in parser.items("console_scripts"):
        match = _TARGET.fullmatch(target.strip())
        if match is None or not _is_script(name):
            continue
        first = match["call"].partition(".")[0]
        yield (
            name,
            (
                "#!/usr/bin/env python3\nimport sys\n"
                f"from {match['module']} import {first}\nsys.exit({match['call']}())\n"
            ).encode(),
        )


def _script(content: Iterator[bytes]) -> Iterator[bytes]:
    """A script that starts with the Python of the sandbox, as installers have it."""
    for number, piece in enumerate(content):
        yield _portable(piece) if number == 0 else piece


def _portable(start: bytes) -> bytes:
    """Have a script start with the Python of the sandbox, as installers do."""
    line, rest = start[: start.find(b"\n") + 1], start[start.find(b"\n") + 1 :]
    return b"#!/usr/bin/env python3\n" + rest if re.match(rb"#!.*python", line) else start


def _unpack_tarball(source: IO[bytes], package: LockedPackage, folder: Path, room: Room) -> None:
    """npm's tarballs have one folder on top, whose name says nothing."""
    target = folder / package.place
    with tarfile.open(fileobj=source, mode="r|gz") as archive:
        for entry in archive:
            room.take_file(package.name)
            if entry.isdir() or entry.type == tarfile.XGLTYPE:
                continue
            if not entry.isreg():
                raise BuildFailed(f"{package.name}: {entry.name[:100]!r} is no plain file.")
            _, _, name = entry.name.removeprefix("./").partition("/")
            if reason := problem(name):
                raise BuildFailed(f"{package.name}: {entry.name[:100]!r}: {reason}")
            content = archive.extractfile(entry)
            if content is None:
                raise BuildFailed(f"{package.name}: {entry.name[:100]!r} is no plain file.")
            # Programs of a package are started by node, or by a file of `.bin` that is ours.
            write(target / name, pieces(content), package.name, room)
