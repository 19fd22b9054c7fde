"""The files of a sandbox that is a folder of this machine, for tests of what is above it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from providers.archives import pack
from providers.errors import InvalidConfiguration, KeptSandboxLost
from providers.sandbox import FileChange, FileEntry, Files, below_workspace


@contextmanager
def _refused() -> Iterator[None]:
    """What stands in the way is the caller's to know."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InvalidConfiguration(f"path: {error.strerror}.", field="path") from error


class FolderFiles(Files):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _at(self, path: str) -> Path:
        below = below_workspace(path)
        if below is None:
            raise InvalidConfiguration("path: Lies outside of the workspace.", field="path")
        return self._folder / below

    def _entry(self, path: Path) -> FileEntry:
        seen = path.lstat()
        return FileEntry(
            str(path.relative_to(self._folder)),
            "directory" if path.is_dir() else "file",
            seen.st_size,
            seen.st_mode & 0o777,
            seen.st_mtime,
        )

    def list(self, path: str = "", depth: int = 1) -> Sequence[FileEntry]:
        if not self._at(path).is_dir():
            raise InvalidConfiguration("path: There is no such folder.", field="path")
        found = list(self._at(path).rglob("*"))
        near = [each for each in found if len(each.relative_to(self._at(path)).parts) <= depth]
        return [self._entry(each) for each in sorted(near)]

    def stat(self, path: str) -> FileEntry | None:
        return self._entry(self._at(path)) if self._at(path).exists() else None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        if not self._at(path).is_file():
            raise InvalidConfiguration("path: There is no such file.", field="path")
        with self._at(path).open("rb") as stream:
            stream.seek(offset)
            left = length if length is not None else 1 << 62
            while left > 0 and (data := stream.read(min(left, 65536))):
                left -= len(data)
                yield data

    def write(
        self,
        path: str,
        content: Iterable[bytes],
        *,
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FileEntry:
        with _refused():
            self._at(path).parent.mkdir(parents=True, exist_ok=True)
            with self._at(path).open("wb") as stream:
                for piece in content:
                    stream.write(piece)
        return self._entry(self._at(path))

    def make_directory(self, path: str) -> bool:
        was_there = self._at(path).is_dir()
        with _refused():
            self._at(path).mkdir(parents=True, exist_ok=True)
        return not was_there

    def move(self, source: str, target: str) -> FileEntry:
        with _refused():
            self._at(source).rename(self._at(target))
        return self._entry(self._at(target))

    def remove(self, path: str) -> bool:
        if not self._at(path).exists():
            return False
        if self._at(path).is_dir():
            shutil.rmtree(self._at(path))
        else:
            self._at(path).unlink()
        return True

    def watch(self, path: str = "") -> Iterator[FileChange | None]:
        if not self._at(path).is_dir():
            raise InvalidConfiguration("path: There is no such folder.", field="path")
        return self._changes(self.list(path, 99), path)

    def _changes(self, known: Sequence[FileEntry], path: str) -> Iterator[FileChange | None]:
        while self._folder.is_dir():
            now = self.list(path, 99)
            for entry in now:
                if entry.path not in {each.path for each in known}:
                    yield FileChange("created", entry.path)
            known = now
            yield None
            time.sleep(0.02)
        raise KeptSandboxLost("The sandbox is gone.")

    def read_archive(self, path: str = "", only: Sequence[str] = ()) -> Iterator[bytes]:
        if only:
            yield from pack(self, path, only)
            return
        if not self._at(path).is_dir():
            raise InvalidConfiguration("path: Is no folder.", field="path")
        packed = subprocess.run(
            ["tar", "-C", str(self._at(path)), "-cf", "-", "."], capture_output=True, check=True
        )
        yield packed.stdout

    def write_archive(self, content: Iterable[bytes], path: str = "") -> int:
        if not (packed := b"".join(content)):
            return 0
        unpacked = subprocess.run(
            ["tar", "-C", str(self._at(path)), "-xvf", "-"],
            input=packed,
            capture_output=True,
            check=False,
        )
        if unpacked.returncode:
            raise InvalidConfiguration("content: Is no tar archive.", field="content")
        return len(unpacked.stdout.splitlines())
