"""The workspace of a kept Aliyun sandbox, through the SDK's calls for files.

The sandbox is one tenant's own machine: its code may link out of the workspace, and whoever reads
through a link sees what that code could have read. The SDK has each file whole in memory.
"""

from __future__ import annotations

import shlex
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

from providers.aliyun_codeinterpreter.machine import HOME, is_missing
from providers.archives import pack
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
)
from providers.remote.bounded import MAX_RESPONSE_BYTES
from providers.remote.sandbox import workspace_path
from providers.remote.service import REQUEST_SECONDS, SandboxGone
from providers.sandbox import FileChange, FileEntry, Files

if TYPE_CHECKING:
    from providers.aliyun_codeinterpreter.machine import AliyunMachine
    from providers.remote.service import AccountClient

# Of a file or an archive, either way.
MOST_BYTES = MAX_RESPONSE_BYTES - 1024 * 1024
_PIECE_BYTES = 64 * 1024
_TYPES = {"file": "file", "directory": "directory", "dir": "directory", "symlink": "symlink"}
# The first letter of the permissions, as Go and as ls write it.
_LETTERS = {"-": "file", "d": "directory", "L": "symlink", "l": "symlink"}
_SPARE_SECONDS = 5.0


class AliyunFiles(Files):
    def __init__(self, machine: AliyunMachine, service: AccountClient) -> None:
        self._machine = machine
        self._service = service

    def list(self, path: str = "", depth: int = 1) -> Sequence[FileEntry]:
        folder = _place(path)
        told = self._ask_there(path, lambda: self._machine.data().list_directory(folder, depth))
        entries = told.get("entries") if isinstance(told, dict) else None
        if not isinstance(entries, list):
            raise ConnectionFailed("Aliyun's answer has no entries of a folder.")
        found = [_entry(each, _path_of(each, workspace_path(path))) for each in entries]
        return sorted(found, key=lambda entry: entry.path)

    def stat(self, path: str) -> FileEntry | None:
        place = _place(path)
        try:
            told = self._ask_there(path, lambda: self._machine.data().stat(place))
        except _Missing:
            return None
        entry = told.get("entry", told) if isinstance(told, dict) else None
        return _entry(entry, workspace_path(path))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Aliyun hands a file over whole: what is before `offset` is fetched and dropped."""
        entry = self.stat(path)
        if entry is None:
            raise _Missing(path)
        if entry.type != "file":
            raise InvalidConfiguration(f"path: {path!r} is not a regular file.", field="path")
        _check_size(entry.size)
        return self._pieces(path, offset, length)

    def _pieces(self, path: str, offset: int, length: int | None) -> Iterator[bytes]:
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            target = Path(folder) / "download"
            self._download(path, _place(path), target)
            with target.open("rb") as file:
                file.seek(offset)
                left = MOST_BYTES if length is None else length
                while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
                    left -= len(piece)
                    yield piece

    def write(
        self,
        path: str,
        content: Iterable[bytes],
        *,
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FileEntry:
        """Written beside it first, and then renamed, so that nobody sees half a file."""
        if metadata:
            raise InvalidConfiguration("metadata: Aliyun does not store it.", field="metadata")
        if mode is not None:
            raise InvalidConfiguration("mode: Aliyun chooses the mode of a file.", field="mode")
        place = _file_place(path)
        before = self.stat(path)
        if before is not None and before.type == "directory":
            raise InvalidConfiguration(f"path: {path!r} is a folder.", field="path")
        # Of a name that is not hidden, which the service would not make.
        beside = f"{place.rpartition('/')[0]}/cofferdam-{uuid4().hex[:12]}.part"
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            source = Path(folder) / "upload"
            _spool(content, source)
            self._service.ask(lambda: self._machine.data().upload_file(str(source), beside))
        try:
            return self._renamed(beside, place, path)
        except BaseException:
            self._drop(beside)
            raise

    def make_directory(self, path: str) -> bool:
        found = self.stat(path)
        if found is not None:
            if found.type != "directory":
                raise InvalidConfiguration(f"path: {path!r} is not a folder.", field="path")
            return False
        self._service.ask(lambda: self._machine.data().mkdir(_place(path)))
        return True

    def move(self, source: str, target: str) -> FileEntry:
        old, new = _file_place(source), _file_place(target)
        before, after = self.stat(source), self.stat(target)
        if before is None:
            raise _Missing(source)
        if after is not None and (before.type, after.type) != ("file", "file"):
            raise InvalidConfiguration(f"path: {target!r} exists already.", field="path")
        return self._renamed(old, new, target)

    def _renamed(self, old: str, new: str, path: str) -> FileEntry:
        def rename() -> Any:
            try:
                return self._machine.data().move_file(old, new)
            except Exception as error:
                if getattr(error, "status_code", None) != 409:
                    raise
                # It replaces nothing: for a moment there is none.
                self._machine.data().remove_file(new)
                return self._machine.data().move_file(old, new)

        told = self._ask_there(path, rename)
        return _entry(told.get("entry") if isinstance(told, dict) else None, workspace_path(path))

    def remove(self, path: str) -> bool:
        place = _file_place(path)
        if self.stat(path) is None:
            return False
        self._service.ask(lambda: self._machine.data().remove_file(place))
        return True

    def watch(self, path: str = "") -> Iterator[FileChange | None]:
        raise InvalidConfiguration("Aliyun does not report changes. List the folder.", field="path")

    def read_archive(self, path: str = "", only: Sequence[str] = ()) -> Iterator[bytes]:
        folder = _place(path)
        if only:
            return pack(self, path, only)
        packed = f"/tmp/cofferdam-{uuid4().hex}.tar"  # noqa: S108  in the sandbox
        try:
            self._tar(f"tar -cf {packed} -C {shlex.quote(folder)} .", path)
        except BaseException:
            self._drop(packed)
            raise
        return self._archive(path, packed)

    def _archive(self, path: str, packed: str) -> Iterator[bytes]:
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            target = Path(folder) / "download"
            try:
                self._download(path, packed, target)
            finally:
                self._drop(packed)
            with target.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece

    def write_archive(self, content: Iterable[bytes], path: str = "") -> int:
        folder = _place(path)
        packed = f"/tmp/cofferdam-{uuid4().hex}.tar"  # noqa: S108  in the sandbox
        if workspace_path(path):
            self.make_directory(path)
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as spool:
            source = Path(spool) / "upload"
            _spool(content, source)
            try:
                self._service.ask(lambda: self._machine.data().upload_file(str(source), packed))
                # It takes no absolute name and none with "..".
                told = self._tar(f"tar -xvf {packed} -C {shlex.quote(folder)}", path)
            finally:
                self._drop(packed)
        return told.count("\n")

    def _tar(self, text: str, path: str) -> str:
        seconds = REQUEST_SECONDS - _SPARE_SECONDS
        code, told, said = self._service.ask(self._machine.command, text, HOME, seconds)
        if code:
            raise InvalidConfiguration(
                f"path: {path!r} is not a folder, or tar failed in it: {said[-200:]}", field="path"
            )
        return told

    def _drop(self, place: str) -> None:
        """Remove what only we have put there, as far as the service can be asked."""
        with suppress(SandboxError):
            self._service.ask(lambda: self._machine.data().remove_file(place))

    def _download(self, path: str, place: str, target: Path) -> None:
        def fetch() -> None:
            if not self._machine.download(place, target):
                self._missing(path)

        self._service.ask(fetch)

    def _ask_there(self, path: str, call: Callable[[], Any]) -> Any:
        def asked() -> Any:
            try:
                return call()
            except Exception as error:
                if not is_missing(error):
                    raise
                self._missing(path)

        return self._service.ask(asked)

    def _missing(self, path: str) -> NoReturn:
        """For what is being asked of the service: it tells a sandbox that has gone as lost."""
        if not self._machine.is_there():
            raise SandboxGone(f"There is no Aliyun sandbox {self._machine.ref!r} any more.")
        raise _Missing(path)


class _Missing(InvalidConfiguration):
    def __init__(self, path: str) -> None:
        super().__init__(f"path: {path!r} does not exist.", field="path")


def _place(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidConfiguration("path: Must be UTF-8 for Aliyun.", field="path") from None
    return f"{HOME}/{workspace_path(path)}".rstrip("/")


def _file_place(path: str) -> str:
    if not workspace_path(path):
        raise InvalidConfiguration(
            "path: The workspace itself cannot be moved or removed.", field="path"
        )
    return _place(path)


def _spool(content: Iterable[bytes], target: Path) -> None:
    size = 0
    with target.open("wb") as file:
        for piece in content:
            size += len(piece)
            _check_size(size)
            file.write(piece)


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise InvalidConfiguration(
            f"path: Aliyun transfers at most {MOST_BYTES >> 20} MiB at once.",
            field="path",
        )


def _path_of(said: Any, folder: str) -> str:
    """A listed entry's path in the workspace, which may be told below a folder above it."""
    told = said.get("path") if isinstance(said, dict) else None
    _, found, path = str(told).partition(f"{HOME}/")
    inside = path.startswith(f"{folder}/") if folder else bool(path)
    try:
        is_plain = workspace_path(path) == path
    except InvalidConfiguration:
        is_plain = False
    if not (found and inside and is_plain):
        raise ConnectionFailed("Aliyun's answer lists entries that are not in the folder.")
    return path


def _entry(said: Any, path: str) -> FileEntry:
    if not isinstance(said, dict):
        raise ConnectionFailed("Aliyun's answer has no entry of a file.")
    size, mode = said.get("size"), said.get("mode")
    if type(size) is not int or size < 0:
        raise ProviderUnavailable("Aliyun's answer has no size of a file.")
    kind = _TYPES.get(str(said.get("type")), "other")
    if letter := str(said.get("permissions") or "")[:1]:
        kind = _LETTERS.get(letter, "other")
    modified = 0.0
    with suppress(ValueError, OverflowError):
        modified = datetime.fromisoformat(str(said.get("modifiedTime"))).timestamp()
    permissions = stat.S_IMODE(mode) if type(mode) is int and mode >= 0 else 0
    return FileEntry(path, kind, size, permissions, modified)  # type: ignore[arg-type]
