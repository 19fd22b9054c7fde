"""A session sandbox of a pool service as its callers have it, and its files, streamed both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from providers.archives import IN_MEMORY_BYTES
from providers.errors import (
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    before_the_code,
)
from providers.isolation import of_runtime
from providers.network import Attempts, Network
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import (
    CHOSEN_BYTES,
    CHUNK_BYTES,
    KNOWN_CHARACTERS,
    MOST_CHOSEN,
)
from providers.runtime.pool import claims
from providers.runtime.pool.protocol import Frame
from providers.runtime.service import messages, operations
from providers.sandbox import (
    DEFAULT_CONTEXT,
    Changes,
    Context,
    Contexts,
    FileChange,
    FileEntry,
    Files,
    KeptSandbox,
    Process,
    Processes,
    SandboxState,
)
from providers.self_managed.client import PoolClient, SandboxConnection
from providers.values import Command, Emit, Event, ExecutionResult, Job


class ServiceSandbox(KeptSandbox):
    """Lives in the service. This is only its name here, and any number of processes may have it."""

    def __init__(self, client: PoolClient, described: Any, host: str = "") -> None:
        """`described` is what the service says of it, `host` is what stands before its name there
        in its ref, of several. Raises what it is no description of."""
        self.name = str(described["ref"])
        self.ref = host + self.name
        runtime = str(described["runtime"])
        self.metadata = {
            "runtime": runtime,
            "isolation": of_runtime(runtime),
            "sharing": "session",
        }
        self._line = SandboxConnection(client, self.name)
        self.contexts = ServiceContexts(self._line)
        self.processes = ServiceProcesses(self._line)
        self.files = ServiceFiles(self._line)

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        with before_the_code():
            body = operations.run_to_frame(job, detach=False)
        with self._line.send(body) as frames:
            for frame in frames:
                if frame[0]["event"] == "done":
                    return messages.result_from_json(messages.loads(frame[1].get("result", b"")))
                _tell(frame, emit)
        raise AssertionError("unreachable")

    def close(self) -> bool:
        try:
            self._line.client.ask_of("DELETE", self.name)
        except KeptSandboxLost:
            return False
        return True

    def interrupt(self, context_id: str = DEFAULT_CONTEXT, run: str = "") -> bool:
        header, _ = self._line.ask("interrupt", context=context_id, run=run)
        return header.get("stopped") is True

    def answer(self, run: str, call: int, answer: bytes) -> bool:
        header, _ = self._line.ask("answer", [("data", answer)], run=run, call=call)
        return header.get("told") is True

    def change_network(self, network: Network | None) -> None:
        text = [] if network is None else [("network", messages.dumps(network.to_json()))]
        self._line.ask("network", text)

    def take_attempts(self) -> Attempts:
        _, parts = self._line.ask("attempts")
        return Attempts.from_json(messages.loads(parts.get("attempts", b"{}")))

    def reset(self) -> None:
        self._line.ask("reset")

    def renew(self, seconds: float) -> None:
        self._line.client.ask_of("PATCH", self.name, {"seconds": seconds})

    def state(self) -> SandboxState:
        told = self._line.client.ask_of("GET", self.name)
        header, _ = self._line.ask("memory")
        used = header.get("cpu_seconds")
        return SandboxState(
            self.contexts.list(),
            self.processes.list(),
            claims.count(header.get("bytes")),
            float(used) if isinstance(used, int | float) and 0 <= used < 1e12 else None,
            claims.count(header.get("disk")),
            claims.count(header.get("disk_total")),
            dict(told),
        )


class ServiceContexts(Contexts):
    def __init__(self, line: SandboxConnection) -> None:
        self._line = line

    def create(self, language: str, cwd: str = "", context_id: str = "") -> Context:
        fields: dict[str, Any] = {"language": language, "cwd": cwd}
        if context_id:
            fields["context"] = context_id
        header, _ = self._line.ask("context.create", **fields)
        return claims.one(claims.context, header.get("context"))

    def list(self) -> Sequence[Context]:
        header, _ = self._line.ask("context.list")
        return claims.several(claims.context, header.get("contexts"))

    def destroy(self, context_id: str) -> bool:
        header, _ = self._line.ask("context.destroy", context=context_id)
        return header.get("found") is True

    def restart(self, context_id: str) -> Context:
        header, _ = self._line.ask("context.restart", context=context_id)
        return claims.one(claims.context, header.get("context"))


class ServiceProcesses(Processes):
    def __init__(self, line: SandboxConnection) -> None:
        self._line = line

    def start(self, command: Command) -> Process:
        fields: dict[str, Any] = {
            "cwd": command.cwd,
            "environment": dict(command.environment),
            "user": command.user,
            "stdin": command.stdin,
            "pty": None if command.pty is None else list(command.pty),
            "timeout": command.timeout,
        }
        if command.shell:
            fields["shell"] = command.shell
        if command.argv:
            fields["argv"] = list(command.argv)
        header, _ = self._line.ask("spawn", **fields)
        pid = claims.one(claims.count, header.get("pid"))
        argv = list(command.argv) or ["bash", "-c", command.shell]
        return Process(pid, argv, command.cwd)

    def list(self) -> Sequence[Process]:
        header, _ = self._line.ask("process.list")
        return claims.several(claims.process, header.get("processes"))

    def follow(self, pid: int, emit: Emit, after: int = 0) -> Process:
        with self._line.follow("follow", pid=pid, after=after) as frames:
            for frame in frames:
                if frame[0]["event"] == "done":
                    return claims.one(claims.process, frame[0].get("process"))
                _tell(frame, emit)
        raise AssertionError("unreachable")

    def write(self, pid: int, data: bytes, *, close: bool = False) -> None:
        for start in range(0, len(data) or 1, CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            last = start + len(piece) >= len(data)
            self._line.ask("stdin", [("data", piece)], pid=pid, close=close and last)

    def signal(self, pid: int, name: str) -> bool:
        header, _ = self._line.ask("signal", pid=pid, signal=name)
        return header.get("found") is True

    def resize(self, pid: int, columns: int, rows: int) -> None:
        self._line.ask("resize", pid=pid, columns=columns, rows=rows)


def _tell(frame: Frame, emit: Emit | None) -> None:
    """Hand an event on, as far as it is one."""
    header, parts = frame
    event = header.get("event")
    if emit is None:
        return
    if event == "stdout":
        emit(Event("stdout", parts.get("data", b"")))
    elif event == "stderr":
        emit(Event("stderr", parts.get("data", b"")))
    elif event == "output" and (output := claims.output(parts)) is not None:
        emit(Event("output", output=output))
    elif event == "network" and (attempted := operations.attempt_event(parts)) is not None:
        emit(attempted)
    elif event == "call" and (call := claims.call(parts)) is not None:
        emit(Event("tool_call", call=call))


# What a guest may say of a folder: some 70,000 files. Whoever lists it holds all of it in memory.
LISTED_BYTES = 8 * 1024 * 1024

# What a guest may say of changes: its memory of the workspace, each character escaped.
CHANGES_BYTES = 8 * KNOWN_CHARACTERS
# The largest file that is held back until it is known to be whole.
HELD_BYTES = 4 << 30


class ServiceFiles(Files):
    def __init__(self, line: SandboxConnection) -> None:
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
                    found += claims.several(claims.entry, claimed)
        return sorted(found, key=lambda entry: entry.path)

    def stat(self, path: str) -> FileEntry | None:
        header, _ = self._line.ask("file.stat", path=path)
        claimed = header.get("entry")
        return None if claimed is None else claims.one(claims.entry, claimed)

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
        return claims.one(claims.entry, header.get("entry"))

    def make_directory(self, path: str) -> bool:
        header, _ = self._line.ask("file.mkdir", path=path)
        return header.get("found") is not True

    def move(self, source: str, target: str) -> FileEntry:
        header, _ = self._line.ask("file.move", path=source, target=target)
        return claims.one(claims.entry, header.get("entry"))

    def remove(self, path: str) -> bool:
        header, _ = self._line.ask("file.remove", path=path)
        return header.get("found") is True

    def watch(self, path: str = "") -> Iterator[FileChange | None]:
        changes = self._changes(path)
        # What happens from now on is seen, and what is no folder is told at once.
        next(changes, None)
        return changes

    def changes(self, mark: str = "", *, thorough: bool = False) -> Changes:
        if claims.mark(mark) is None:
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
                    now = claims.one(claims.mark, header.get("mark"))
                    is_complete = header.get("complete") is True
                    unseen = claims.one(claims.unseen, header.get("unseen", []))
                elif header["event"] == "entries":
                    for each in _list(data):
                        entry = claims.one(claims.workspace_entry, each)
                        entries[entry.path] = entry
                else:
                    for each in _list(data):
                        removed.add(claims.one(claims.workspace_path, each))
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
        return claims.one(claims.count, header.get("count"))

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
                    yield from claims.several(claims.change, _list(parts.get("data", b"")))


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
