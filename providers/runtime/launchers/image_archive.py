"""Reads archives of images, and unpacks one into the root file system that its layers make.

An archive is what `docker save` or `skopeo copy` to docker-archive writes, or an OCI image layout
in a tar. Whoever made it may be hostile. A path is resolved as from inside, so that no link leads
out; every digest is verified; what is unpacked is bounded, belongs to us, and is read by everybody.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from providers.runtime.guest.root import HOME
from providers.runtime.launchers.guest_files import INSIDE
from providers.runtime.pool.template import WORKSPACE

# Of all layers together, unpacked.
MOST_BYTES = 32 << 30
MOST_ENTRIES = 1_000_000
MOST_LAYERS = 128
# Files of an archive: each layer has up to three.
MOST_MEMBERS = 2000

_DOCUMENT_BYTES = 8 << 20
# Of one entry. tarfile reads some headers into memory whole, whatever size they say they have.
_HEADER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
# To remove a folder takes a call for each level.
_MOST_DEPTH, _MOST_LINKS = 200, 40

_DIGEST = re.compile(r"(?:^|[/:])([0-9a-f]{64})(?:\.json|\.tar|\.tar\.gz)?$")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_HIDES, _OPAQUE = ".wh.", ".wh..wh..opq"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

# What sandboxes have file systems and files of their own over.
_FOLDERS = (*("proc", "dev", "sys", "run", "root", "etc", "home"), INSIDE.lstrip("/"))
_WRITABLE = ("tmp", WORKSPACE.lstrip("/"))
OWN_FILES = ("etc/passwd", "etc/group", "etc/hosts")

# What reading an archive raises.
FAILURES = (
    *(tarfile.TarError, OSError, EOFError, zlib.error, RecursionError),
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
)


class Archive:
    """An archive with one image in it. Raises one of FAILURES."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            self._members = self._list()
            name, self.layers = self._read_manifest()
            content = self._read(name)
            self.digest = hashlib.sha256(content).hexdigest()
            config = json.loads(content)
            self._diff_ids = [_digest(each) for each in config["rootfs"]["diff_ids"]]
            self.environment = _environment((config.get("config") or {}).get("Env") or ())
            if config.get("architecture") != _architecture() or config.get("os") != "linux":
                raise ValueError(f"it is not for linux/{_architecture()}")
            if not len(self.layers) == len(self._diff_ids) <= MOST_LAYERS:
                raise ValueError(f"it has more than {MOST_LAYERS} layers, or unknown ones")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _list(self) -> dict[str, tarfile.TarInfo]:
        headers = _Headers(self._file)
        self._tar = tarfile.open(fileobj=cast("IO[bytes]", headers), mode="r:")  # noqa: SIM115
        members, left = {}, MOST_MEMBERS
        while (member := self._tar.next()) is not None:
            headers.left = _HEADER_BYTES
            left -= 1
            if member.size < 0 or left < 0:
                raise ValueError(f"it has more than {MOST_MEMBERS} files, or one without size")
            members[member.name.removeprefix("./")] = member
        headers.left = sys.maxsize
        return members

    def _read_manifest(self) -> tuple[str, list[str]]:
        """The names of the image's configuration, whose digest is the image's, and layers."""
        if "manifest.json" in self._members:
            manifests = json.loads(self._read("manifest.json"))
            if len(manifests) != 1:
                raise ValueError("it has not exactly one image")
            return manifests[0]["Config"], list(manifests[0]["Layers"])
        if "index.json" not in self._members:
            raise ValueError("it is no image: write one with `docker save` or `skopeo copy`")
        manifest = json.loads(self._read("index.json"))
        for _ in range(2):
            if "manifests" in manifest:
                manifest = json.loads(self._read(_blob(_only_image(manifest["manifests"]))))
        return _blob(manifest["config"]), [_blob(each) for each in manifest["layers"]]

    def _open(self, name: str) -> io.BufferedReader:
        """A file, whose digest is verified where its name has one."""
        member = self._members.get(name)
        found = self._tar.extractfile(member) if member else None
        if found is None:
            raise ValueError(f"it has no file {name[:200]!r}")
        file = cast("io.BufferedReader", found)
        if named := _DIGEST.search(name):
            if hashlib.file_digest(file, "sha256").hexdigest() != named[1]:
                raise ValueError(f"{name!r} has another sha256")
            file.seek(0)
        return file

    def _read(self, name: str) -> bytes:
        with self._open(name) as file:
            content = file.read(_DOCUMENT_BYTES + 1)
        if len(content) > _DOCUMENT_BYTES:
            raise ValueError(f"{name!r} is too large")
        return content

    def copy_layer(self, number: int, target: IO[bytes], most: int) -> int:
        """Unpack a layer's own archive; return its size."""
        with self._open(self.layers[number]) as file:
            start = file.read(4)
            file.seek(0)
            if start == _ZSTD:
                raise ValueError("its layers are compressed by zstd: write them plain or by gzip")
            plain = gzip.GzipFile(fileobj=file) if start.startswith(_GZIP) else file
            digest, size = hashlib.sha256(), 0
            while chunk := plain.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > most:
                    raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
                digest.update(chunk)
                target.write(chunk)
        if digest.hexdigest() != self._diff_ids[number]:
            raise ValueError(f"layer {number + 1} has another sha256 than its image says")
        target.flush()
        return size


def _digest(text: str) -> str:
    found = re.fullmatch(r"sha256:([0-9a-f]{64})", text)
    if not found:
        raise ValueError(f"{text[:200]!r} is no sha256")
    return found[1]


def _blob(descriptor: Mapping[str, Any]) -> str:
    return f"blobs/sha256/{_digest(descriptor['digest'])}"


def _architecture() -> str:
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def _only_image(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one for this machine, where each says for which one it is."""
    fit = [
        each
        for each in manifests
        if (each.get("platform") or {}).get("architecture") in (None, _architecture())
    ]
    if len(fit) != 1:
        raise ValueError(f"it has not exactly one image for {_architecture()}")
    return fit[0]


def _environment(lines: Sequence[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines if "\0" not in line)
    return {name: value for name, sign, value in pairs if name and sign}


def unpack(archive: Archive, staging: Path) -> None:
    """Make the root file system of an image. Raises one of FAILURES."""
    root = staging / "rootfs"
    _make_folder(root)
    left, budget = MOST_BYTES, _Budget(MOST_ENTRIES)
    for number in range(len(archive.layers)):
        with tempfile.TemporaryFile(dir=staging) as layer:
            left -= archive.copy_layer(number, layer, left)
            _apply(layer, root, budget)
    for name in (*_FOLDERS, *_WRITABLE):
        place = root / name
        if place.is_symlink() or not place.is_dir():
            _remove(place)
            _make_folder(place)
        place.chmod(0o1777 if name in _WRITABLE else 0o755)
    for name in OWN_FILES:
        place = root / name
        if place.is_symlink() or not place.is_file():
            _remove(place)
            place.touch()
            place.chmod(0o644)
    home = root / HOME.lstrip("/")
    if home.is_symlink() or not home.is_dir() or not any(home.iterdir()):
        _remove(home)
        home.symlink_to(WORKSPACE)
    (staging / "environment.json").write_text(json.dumps(archive.environment))


@dataclass
class _Budget:
    """How many entries there may still be, and folders that no entry of an archive names."""

    left: int

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"it has more than {MOST_ENTRIES} entries")


def _apply(layer: IO[bytes], root: Path, budget: _Budget) -> None:
    """Lay one layer over the root, after removing what it hides."""
    for _, parts in _entries(layer):
        budget.spend()
        if parts[-1].startswith(_HIDES):
            _hide(root, parts)
    for member, parts in _entries(layer):
        if not parts[-1].startswith(_HIDES):
            _put(layer, member, root, parts, budget)


def _entries(layer: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, list[str]]]:
    """The entries below the root, with the parts of their names."""
    layer.seek(0)
    headers = _Headers(layer)
    with tarfile.open(fileobj=cast("IO[bytes]", headers), mode="r:") as tar:
        while (member := tar.next()) is not None:
            headers.left = _HEADER_BYTES
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
            if member.size < 0 or member.issparse():
                raise ValueError(f"{member.name[:200]!r} has no size that layers can have")
            if parts := _parts(member.name):
                yield member, parts


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{name[:200]!r} leaves the root")
    return parts


def _hide(root: Path, parts: Sequence[str]) -> None:
    folder = resolve(root, "/".join(parts[:-1]))
    if parts[-1] == _OPAQUE:
        for path in folder.iterdir() if folder and folder.is_dir() else ():
            _remove(path)
        return
    name = parts[-1].removeprefix(_HIDES)
    if name in ("", ".", ".."):
        raise ValueError(f"{parts[-1]!r} hides no name")
    if folder and not name.startswith(_HIDES):
        _remove(folder / name)


def _put(
    layer: IO[bytes],
    member: tarfile.TarInfo,
    root: Path,
    parts: Sequence[str],
    budget: _Budget,
) -> None:
    folder = resolve(root, "/".join(parts[:-1]), budget) or root
    place = folder / parts[-1]
    if member.isdir():
        if place.is_symlink() or not place.is_dir():
            _remove(place)
            resolve(root, "/".join(parts), budget)
    elif member.issym():
        _remove(place)
        place.symlink_to(member.linkname)
    elif member.islnk():
        *above, name = _parts(member.linkname)
        _remove(place)
        os.link((resolve(root, "/".join(above)) or root) / name, place, follow_symlinks=False)
    elif member.isreg():
        _remove(place)
        layer.seek(member.offset_data)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(place, flags, 0o600), "wb") as file:
            _copy(layer, file, member.size)
            # Neither another user's rights nor a file that only its owner may read.
            os.fchmod(file.fileno(), 0o755 if member.mode & 0o111 else 0o644)


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size:
        chunk = source.read(min(size, _CHUNK_BYTES))
        if not chunk:
            raise EOFError("a file ends too early")
        target.write(chunk)
        size -= len(chunk)


def _make_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def resolve(root: Path, path: str, making: _Budget | None = None) -> Path | None:
    """The file that a path leads to for who has this root: no link leads out. None where there is
    none; with a budget its folders are made. Raises ValueError."""
    found: list[str] = []
    left = path.split("/")[::-1]
    links = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del found[-1:]
            continue
        here = root.joinpath(*found, part)
        try:
            mode = here.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if making is None:
                return None
            making.spend()
            _make_folder(here)
            mode = stat.S_IFDIR
        if stat.S_ISLNK(mode):
            links += 1
            if links > _MOST_LINKS:
                raise ValueError(f"{path[:200]!r} has too many links")
            target = os.readlink(here)
            found = [] if target.startswith("/") else found
            left += target.split("/")[::-1]
            continue
        found.append(part)
        if len(found) > _MOST_DEPTH:
            raise ValueError(f"{path[:200]!r} lies too deep")
    return root.joinpath(*found)


class _Headers:
    """A file as tarfile reads it, so much of it for one entry."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.left = _HEADER_BYTES
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        self.left -= size
        if size < 0 or self.left < 0:
            raise tarfile.ReadError("an entry has a header that is too large")
        return self._file.read(size)
