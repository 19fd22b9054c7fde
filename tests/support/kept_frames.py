"""A kept sandbox's commands and files, over the raw frames of `kept_guest`."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from providers.runtime.guest import protocol, wire
from tests.support.kept_guest import Guests


class Failed(Exception):
    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__(said["reason"])
        self.reason, self.code, self.field = said["reason"], said["code"], said.get("field")


@dataclass
class Told:
    """What has changed since a mark."""

    mark: str = ""
    complete: bool = False
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """Paths that are there, `-` before those that are gone."""
        return set(self.entries) | {f"-{path}" for path in self.removed}


class Rooms:
    """A host that speaks with the rooms of one kept sandbox, and renews what it has read."""

    def __init__(self, guests: Guests, **limits: int) -> None:
        self.channel = guests.kept(**limits)._channel
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._arrived: dict[int, deque[tuple[dict[str, Any], dict[str, bytes]]]] = {}
        self._sequence: dict[int, int] = {}
        # Not those that the sandbox was kept with.
        self._numbers = itertools.count(1 << 40)

    # Frames.

    def send(self, header: dict[str, Any], parts: list[tuple[str, bytes]] | None = None) -> None:
        self.channel.settimeout(20)
        self.channel.sendall(wire.pack(header, parts or []))

    def begin(self, op: str, parts: dict[str, bytes] | None = None, **header: Any) -> int:
        """Send an operation; its number."""
        number = next(self._numbers)
        self._arrived[number] = deque()
        self.send({"id": number, "op": op, **header}, list((parts or {}).items()))
        return number

    def _next(self, number: int, seconds: float = 60) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The next frame for an operation."""
        deadline = time.monotonic() + seconds
        while not self._arrived[number]:
            self.channel.settimeout(max(0.01, deadline - time.monotonic()))
            data = self.channel.recv(1 << 20)
            assert data, "the supervisor ended"
            for header, parts in self._parser.feed(data):
                assert header["seq"] == self._sequence.get(header["id"], 0)
                self._sequence[header["id"]] = header["seq"] + 1
                self._arrived[header["id"]].append((header, parts))
        return self._arrived[number].popleft()

    def has_arrived(self, number: int) -> bool:
        """Whether a frame for an operation came beside those that were waited for."""
        return bool(self._arrived[number])

    def event(self, number: int, seconds: float = 60) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The next event. Raises Failed."""
        header, parts = self._next(number, seconds)
        if header["event"] == "failed":
            raise Failed(header)
        return header, parts

    def events(self, number: int) -> Iterator[tuple[dict[str, Any], dict[str, bytes]]]:
        """All events, `done` as the last; the credit is renewed."""
        while True:
            header, parts = self.event(number)
            yield header, parts
            if header["event"] == "done":
                return
            cost = sum(map(len, parts.values())) + protocol.EVENT_COST
            self.send({"op": "credit", "target": number, "bytes": cost})

    def call(self, op: str, parts: dict[str, bytes] | None = None, **header: Any) -> dict[str, Any]:
        """An operation that is only done or failed."""
        header, _ = self.event(self.begin(op, parts, **header))
        assert header["event"] == "done"
        return header

    # Files.

    def list(self, path: str = "", depth: int = 1) -> list[dict[str, Any]]:
        number = self.begin("file.list", path=path, depth=depth, credit=protocol.CREDIT)
        found: list[dict[str, Any]] = []
        for header, parts in self.events(number):
            if header["event"] == "entries":
                found += json.loads(parts["data"])
            else:
                assert header["count"] == len(found)
        return found

    def stream(self, op: str, **header: Any) -> Iterator[bytes]:
        """The data of `file.read` or `file.pack`."""
        number = self.begin(op, credit=protocol.CREDIT, **header)
        for said, parts in self.events(number):
            if said["event"] == "data":
                assert len(parts["data"]) <= protocol.CHUNK_BYTES
                yield parts["data"]

    def read(self, path: str, **header: Any) -> bytes:
        return b"".join(self.stream("file.read", path=path, **header))

    def changes(self, mark: str = "", *, thorough: bool = False) -> Told:
        number = self.begin("file.changes", mark=mark, thorough=thorough, credit=protocol.CREDIT)
        told = Told()
        for header, parts in self.events(number):
            assert len(parts.get("data", b"")) <= protocol.CHUNK_BYTES
            if header["event"] == "entries":
                told.entries |= {each["path"]: each for each in json.loads(parts["data"])}
            elif header["event"] == "removed":
                told.removed += json.loads(parts["data"])
            else:
                told.mark, told.complete = header["mark"], header["complete"]
                told.unseen = header["unseen"]
                assert (header["count"], header["gone"]) == (len(told.entries), len(told.removed))
        assert list(told.entries) == sorted(told.entries)
        assert told.removed == sorted(set(told.removed))
        return told

    def chosen(self, *only: str) -> dict[str, bytes | str | None]:
        """What an archive of single paths holds: content, a link's target, None for a folder."""
        number = self.begin(
            "file.pack", {"only": json.dumps(only).encode()}, path="", credit=protocol.CREDIT
        )
        sure = held = b""
        for header, parts in self.events(number):
            if header["event"] == "data":
                assert not held
                sure += parts["data"]
            elif header["event"] == "held":
                held += parts["data"]
            elif header["event"] != "done":
                sure, held = sure + (held if header["event"] == "kept" else b""), b""
        found: dict[str, bytes | str | None] = {}
        with tarfile.open(fileobj=io.BytesIO(sure)) as archive:
            for member in archive:
                read = archive.extractfile(member) if member.isreg() else None
                found[member.name] = read.read() if read else member.linkname or None
        assert len(found) == header["count"]
        return found

    def upload(self, op: str, content: Iterable[bytes], **header: Any) -> dict[str, Any]:
        """`file.write` or `file.unpack`, never further ahead than allowed."""
        number = self.begin(op, **header)
        ahead = 0
        for piece in content:
            while ahead >= protocol.AHEAD:
                assert self.event(number)[0]["event"] == "taken"
                ahead -= 1
            self.send({"op": "data", "target": number}, [("data", piece)])
            ahead += 1
        self.send({"op": "end", "target": number})
        while True:
            header, _ = self.event(number)
            if header["event"] == "done":
                return header
            assert header["event"] == "taken"

    def write(self, path: str, content: bytes, **header: Any) -> dict[str, Any]:
        size = protocol.CHUNK_BYTES
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        done = self.upload("file.write", pieces, path=path, **header)
        entry: dict[str, Any] = done["entry"]
        return entry

    # Commands.

    def spawn(self, *argv: str, **header: Any) -> int:
        if argv:
            header["argv"] = list(argv)
        pid: int = self.call("spawn", **header)["pid"]
        return pid

    def follow(self, pid: int, after: int = 0) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Both streams until its end, and what is said of the process."""
        streams = {"stdout": b"", "stderr": b""}
        number = self.begin("follow", pid=pid, after=after, credit=protocol.CREDIT)
        for header, parts in self.events(number):
            if header["event"] == "done":
                process: dict[str, Any] = header["process"]
            else:
                streams[header["event"]] += parts["data"]
        return streams, process

    def shell(self, script: str, **header: Any) -> str:
        """What a script puts out; it must have succeeded."""
        streams, process = self.follow(self.spawn(shell=script, **header))
        assert process["exit_code"] == 0, (streams, process)
        return streams["stdout"].decode("utf-8", "surrogateescape")
