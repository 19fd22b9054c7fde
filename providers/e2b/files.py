"""The workspace of a kept E2B sandbox, through the SDK's file system interface.

The sandbox is one tenant's own machine: its code may link out of the workspace, and whoever reads
through a link sees what that code could have read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from e2b import CommandExitException, EntryInfo, FilesystemEventType, FileType, NotFoundException

from providers.archives import pack
from providers.e2b.machine import HOME
from providers.errors import InvalidConfiguration, SandboxError
from providers.remote.sandbox import workspace_path
from providers.sandbox import FileChange, FileEntry, Files

if TYPE_CHECKING:
    from providers.e2b.machine import E2BMachine
    from providers.remote.service import AccountClient

_TYPES = {FileType.FILE: "file", FileType.DIR: "directory", FileType.SYMLINK: "symlink"}
_CHANGES = {
    FilesystemEventType.CREATE: "created",
    FilesystemEventType.WRITE: "modified",
    FilesystemEventType.REMOVE: "deleted",
    FilesystemEventType.RENAME: "moved",
}
# How often is asked for what has changed: the SDK keeps no stream open for it.
_LOOK_SECONDS = 0.5


class E2BFiles(Files):
    def __init__(self, machine: E2BMachine, service: AccountClient) -> None:
        self._files = machine.sandbox.files
        self._commands = machine.sandbox.commands
        self._service = service

    def list(self, path: str = "", depth: int = 1) -> Sequence[FileEntry]:
        folder = _place(path)
        found = self._ask_there(path, lambda: self._files.list(folder, depth=depth))
        return sorted(map(_entry, found), key=lambda entry: entry.path)

    def stat(self, path: str) -> FileEntry | None:
        place = _place(path)
        try:
            return _entry(self._ask_there(path, lambda: self._files.get_info(place)))
        except _Missing:
            return None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """E2B reads from a file's beginning: what is before `offset` is fetched and dropped."""
        entry = self.stat(path)
        if entry is None:
            raise _Missing(path)
        if entry.type != "file":
            raise InvalidConfiguration(f"path: {path!r} is not a regular file.", field="path")
        place, left = _place(path), entry.size - offset if length is None else length
        stream = self._ask_there(path, lambda: self._files.read(place, format="stream"))
        with self._service.translated(), stream:
            for chunk in stream:
                piece = chunk[offset : offset + left]
                offset -= min(offset, len(chunk))
                left -= len(piece)
                if piece:
                    yield bytes(piece)
                if left <= 0:
                    return

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
            raise InvalidConfiguration("metadata: E2B does not store it.", field="metadata")
        if mode is not None:
            raise InvalidConfiguration("mode: E2B chooses the mode of a file.", field="mode")
        place = _place(path)
        beside = f"{place}.{uuid4().hex[:12]}.part"
        with self._service.translated():
            try:
                self._files.write(beside, iter(content))
                return _entry(self._files.rename(beside, place))
            except BaseException:
                with suppress(Exception):
                    self._files.remove(beside)
                raise

    def make_directory(self, path: str) -> bool:
        place = _place(path)
        return bool(self._ask_there(path, lambda: self._files.make_dir(place)))

    def move(self, source: str, target: str) -> FileEntry:
        before, after = self.stat(source), self.stat(target)
        if before is None:
            raise _Missing(source)
        if after is not None and (before.type, after.type) != ("file", "file"):
            raise InvalidConfiguration(f"path: {target!r} exists already.", field="path")
        old, new = _place(source), _place(target)
        return _entry(self._ask_there(source, lambda: self._files.rename(old, new)))

    def remove(self, path: str) -> bool:
        if self.stat(path) is None:
            return False
        if not workspace_path(path):
            raise InvalidConfiguration(
                "path: The workspace itself cannot be moved or removed.", field="path"
            )
        place = _place(path)
        self._ask_there(path, lambda: self._files.remove(place))
        return True

    def watch(self, path: str = "") -> Iterator[FileChange | None]:
        place = _place(path)
        handle = self._ask_there(path, lambda: self._files.watch_dir(place, recursive=True))
        return self._changes(path, handle)

    def _changes(self, path: str, handle: Any) -> Iterator[FileChange | None]:
        import time

        try:
            while True:
                for event in self._service.ask(handle.get_new_events):
                    if kind := _CHANGES.get(event.type):
                        name = f"{workspace_path(path)}/{event.name}".strip("/")
                        yield FileChange(kind, name)  # type: ignore[arg-type]
                yield None
                time.sleep(_LOOK_SECONDS)
        finally:
            with suppress(SandboxError):
                self._service.ask(handle.stop)

    def read_archive(self, path: str = "", only: Sequence[str] = ()) -> Iterator[bytes]:
        if only:
            return pack(self, path, only)
        packed = f"/tmp/cofferdam-{uuid4().hex}.tar"  # noqa: S108  in the sandbox
        self._tar(f"tar -cf {packed} -C {shlex.quote(_place(path))} .", path)
        return self._archive(packed)

    def _archive(self, packed: str) -> Iterator[bytes]:
        try:
            stream = self._service.ask(lambda: self._files.read(packed, format="stream"))
            with self._service.translated(), stream:
                for chunk in stream:
                    yield bytes(chunk)
        finally:
            with suppress(SandboxError):
                self._service.ask(self._files.remove, packed)

    def write_archive(self, content: Iterable[bytes], path: str = "") -> int:
        folder = _place(path)
        packed = f"/tmp/cofferdam-{uuid4().hex}.tar"  # noqa: S108  in the sandbox
        try:
            with self._service.translated():
                self._files.write(packed, iter(content))
            if workspace_path(path):
                self.make_directory(path)
            # It takes no absolute name and none with "..".
            told = self._tar(f"tar -xvf {packed} -C {shlex.quote(folder)} | wc -l", path)
        finally:
            with suppress(SandboxError):
                self._service.ask(self._files.remove, packed)
        return int(told) if told.strip().isdecimal() else 0

    def _tar(self, text: str, path: str) -> str:
        def run() -> str:
            try:
                return str(self._commands.run(f"set -o pipefail; {text}").stdout)
            except CommandExitException as failed:
                raise InvalidConfiguration(
                    f"path: {path!r} is not a folder, or tar failed in it: {failed.stderr[-200:]}",
                    field="path",
                ) from None

        return self._service.ask(run)

    def _ask_there(self, path: str, call: Any) -> Any:
        def asked() -> Any:
            try:
                return call()
            except NotFoundException:
                raise _Missing(path) from None

        return self._service.ask(asked)


class _Missing(InvalidConfiguration):
    def __init__(self, path: str) -> None:
        super().__init__(f"path: {path!r} does not exist.", field="path")


def _place(path: str) -> str:
    return f"{HOME}/{workspace_path(path)}".rstrip("/")


def _entry(info: EntryInfo) -> FileEntry:
    return FileEntry(
        info.path.removeprefix(f"{HOME}/"),
        _TYPES.get(info.type, "other"),  # type: ignore[arg-type]
        info.size,
        info.mode,
        info.modified_time.timestamp(),
        info.symlink_target or "",
    )
