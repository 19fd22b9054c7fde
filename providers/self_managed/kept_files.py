"""The files of a kept sandbox of a pool service, streamed both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from providers.archives import IN_MEMORY_BYTES
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import (
    CHOSEN_BYTES,
    CHUNK_BYTES,
    KNOWN_CHARACTERS,
    MOST_CHOSEN,
)
from providers.runtime.pool import kept_claims
from providers.runtime.service import messages
from providers.sandbox import Changes, FileChange, FileEntry, Files
from providers.self_managed.line import Line

# What a guest may say of a folder: some 70,000 files. Whoever lists it holds all of it in memory.
LISTED_BYTES = 8 * 1024 * 1024

# What a guest may say of changes: its memory of the workspace, each character escaped.
CHANGES_BYTES = 8 * KNOWN_CHARACTERS
# The largest file that is held back until it is known to be whole.
HELD_BYTES = 4 << 30


class ServiceFiles(Files):
    def __init__(self, line: Line) -> None:
        self._line = line

    def list(self, path: str = "", depth: int = 1) -> Sequence[FileEntry]:
        found: list[FileEntry] = []
        size = 0
        with self._line.follow("file.list", path=path, depth=depth) as frames:
            for header, parts in frames:
                if header["event"] == "entries":
                    size += len(data := parts.get("data", b""))
                    if size > LISTED_BYTES:
                        raise InvalidConfiguration(
                            "path: Has too many entries to list at once. List its folders one by "
                            "one, or with less depth.",
                            field="path",
                        )
                    claimed = messages.loads(data)
                    found += kept_claims.several(kept_claims.entry, claimed)
        return sorted(found, key=lambda entry: entry.path)

    def stat(self, path: str) -> FileEntry | None:
        header, _ = self._line.ask("file.stat", path=path)
        claimed = header.get("entry")
        return None if claimed is None else kept_claims.one(kept_claims.entry, claimed)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        return self._pieces("file.read", path=path, offset=offset, length=length)

    def write(
        self,
        path: str,
        content: Iterable[bytes],
        *,
        mode: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FileEntry:
        fields: dict[str, Any] = {"path": path, "mode": mode}
        if metadata:
            fields["metadata"] = dict(metadata)
        header = self._line.write("file.write", content, **fields)
        return kept_claims.one(kept_claims.entry, header.get("entry"))

    def make_directory(self, path: str) -> bool:
        header, _ = self._line.ask("file.mkdir", path=path)
        return header.get("found") is not True

    def move(self, source: str, target: str) -> FileEntry:
        header, _ = self._line.ask("file.move", path=source, target=target)
        return kept_claims.one(kept_claims.entry, header.get("entry"))

    def remove(self, path: str) -> bool:
        header, _ = self._line.ask("file.remove", path=path)
        return header.get("found") is True

    def watch(self, path: str = "") -> Iterator[FileChange | None]:
        changes = self._changes(path)
        # What happens from now on is seen, and what is no folder is told at once.
        next(changes, None)
        return changes

    def changes(self, mark: str = "", *, thorough: bool = False) -> Changes:
        if kept_claims.mark(mark) is None:
            # It was not given out.
            mark = ""
        entries: dict[str, FileEntry] = {}
        removed: set[str] = set()
        size = 0
        with self._line.follow("file.changes", mark=mark, thorough=thorough) as frames:
            for header, parts in frames:
                data = parts.get("data", b"")
                size += len(data)
                if size > CHANGES_BYTES:
                    raise _not_an_answer()
                if header["event"] == "done":
                    now = kept_claims.one(kept_claims.mark, header.get("mark"))
                    is_complete = header.get("complete") is True
                    unseen = kept_claims.one(kept_claims.unseen, header.get("unseen", []))
                elif header["event"] == "entries":
                    for each in _list(data):
                        entry = kept_claims.one(kept_claims.workspace_entry, each)
                        entries[entry.path] = entry
                else:
                    for each in _list(data):
                        removed.add(kept_claims.one(kept_claims.workspace_path, each))
        if removed and (is_complete or not removed.isdisjoint(entries)):
            raise _not_an_answer()
        told = [entries[path] for path in sorted(entries)]
        return Changes(now, told, sorted(removed), is_complete, unseen)

    def read_archive(self, path: str = "", only: Sequence[str] = ()) -> Iterator[bytes]:
        if not only:
            return self._pieces("file.pack", path=path)
        named = wire.dumps(list(only)).encode("utf-8", "backslashreplace")
        if len(only) > MOST_CHOSEN or len(named) > CHOSEN_BYTES:
            raise InvalidConfiguration(
                f"only: Name {MOST_CHOSEN} paths at most, and fewer of long ones.", field="only"
            )
        pieces = self._whole_files(path, named)
        return chain([next(pieces, b"")], pieces)

    def write_archive(self, content: Iterable[bytes], path: str = "") -> int:
        header = self._line.write("file.unpack", content, path=path)
        return kept_claims.one(kept_claims.count, header.get("count"))

    def _pieces(self, name: str, **fields: Any) -> Iterator[bytes]:
        """The first frame is waited for: what is not there is told before any is taken."""
        pieces = self._stream(name, fields)
        return chain([next(pieces, b"")], pieces)

    def _stream(self, name: str, fields: dict[str, Any]) -> Iterator[bytes]:
        with self._line.follow(name, **fields) as frames:
            for header, parts in frames:
                if header["event"] == "data":
                    yield parts.get("data", b"")

    def _whole_files(self, path: str, only: bytes) -> Iterator[bytes]:
        """What is sure. The rest is held back until it is, beyond a little on the disk."""
        with (
            SpooledTemporaryFile(IN_MEMORY_BYTES) as held,
            self._line.follow("file.pack", [("only", only)], path=path) as frames,
        ):
            is_too_large = False
            for header, parts in frames:
                event, data = header["event"], parts.get("data", b"")
                if event == "data":
                    yield data
                elif event == "held":
                    is_too_large = is_too_large or held.tell() + len(data) > HELD_BYTES
                    if is_too_large:
                        # The others are had all the same. Whoever asks has a time for all of it.
                        yield b""
                    else:
                        _hold(held, data)
                elif event in ("kept", "dropped"):
                    is_whole, is_too_large = event == "kept" and not is_too_large, False
                    if is_whole:
                        held.seek(0)
                        while piece := held.read(CHUNK_BYTES):
                            yield piece
                    held.seek(0)
                    held.truncate()

    def _changes(self, path: str) -> Iterator[FileChange | None]:
        """None once it has begun to look, and whenever there has been nothing for a while."""
        is_ready = False
        with self._line.follow("file.watch", also_alive=True, path=path) as frames:
            for header, parts in frames:
                if header["event"] == "ready" or (is_ready and header["event"] == "alive"):
                    is_ready = True
                    yield None
                elif header["event"] == "changes":
                    yield from kept_claims.several(
                        kept_claims.change, _list(parts.get("data", b""))
                    )


def _hold(held: IO[bytes], data: bytes) -> None:
    try:
        held.write(data)
    except OSError as error:
        raise ProviderUnavailable(
            f"A file of a sandbox cannot be stored on this machine's disk: {error.strerror}."
        ) from error


def _list(data: bytes) -> list[Any]:
    try:
        claimed = messages.loads(data)
    except InvalidConfiguration:
        raise _not_an_answer() from None
    if not isinstance(claimed, list):
        raise _not_an_answer()
    return claimed


def _not_an_answer() -> ProviderUnavailable:
    return ProviderUnavailable("The sandbox gave an invalid answer.", started=True)
