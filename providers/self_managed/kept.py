"""A kept sandbox of a pool service, as its callers have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from providers.errors import KeptSandboxLost, before_the_code
from providers.isolation import of_runtime
from providers.runtime.guest.protocol import CHUNK_BYTES
from providers.runtime.pool import kept_claims
from providers.runtime.pool.channel import Frame
from providers.runtime.service import messages, operations
from providers.sandbox import (
    DEFAULT_CONTEXT,
    Context,
    Contexts,
    KeptSandbox,
    Process,
    Processes,
    SandboxState,
)
from providers.self_managed.client import PoolClient
from providers.self_managed.kept_files import ServiceFiles
from providers.self_managed.line import Line
from providers.values import Command, Emit, Event, ExecutionResult, Job


class ServiceSandbox(KeptSandbox):
    """Lives in the service. This is only its name here, and any number of processes may have it."""

    def __init__(self, client: PoolClient, described: Any) -> None:
        """`described` is what the service says of it. Raises what it is no description of."""
        self.ref = str(described["ref"])
        runtime = str(described["runtime"])
        self.metadata = {
            "runtime": runtime,
            "isolation": of_runtime(runtime),
            "sharing": "session",
        }
        self._line = Line(client, self.ref)
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
            self._line.client.ask_of("DELETE", self.ref)
        except KeptSandboxLost:
            return False
        return True

    def interrupt(self, context_id: str = DEFAULT_CONTEXT, run: str = "") -> bool:
        header, _ = self._line.ask("interrupt", context=context_id, run=run)
        return header.get("stopped") is True

    def answer(self, run: str, call: int, answer: bytes) -> bool:
        header, _ = self._line.ask("answer", [("data", answer)], run=run, call=call)
        return header.get("told") is True

    def reset(self) -> None:
        self._line.ask("reset")

    def renew(self, seconds: float) -> None:
        self._line.client.ask_of("PATCH", self.ref, {"seconds": seconds})

    def state(self) -> SandboxState:
        told = self._line.client.ask_of("GET", self.ref)
        header, _ = self._line.ask("memory")
        used = header.get("cpu_seconds")
        return SandboxState(
            self.contexts.list(),
            self.processes.list(),
            kept_claims.count(header.get("bytes")),
            float(used) if isinstance(used, int | float) and 0 <= used < 1e12 else None,
            kept_claims.count(header.get("disk")),
            kept_claims.count(header.get("disk_total")),
            dict(told),
        )


class ServiceContexts(Contexts):
    def __init__(self, line: Line) -> None:
        self._line = line

    def create(self, language: str, cwd: str = "", context_id: str = "") -> Context:
        fields: dict[str, Any] = {"language": language, "cwd": cwd}
        if context_id:
            fields["context"] = context_id
        header, _ = self._line.ask("context.create", **fields)
        return kept_claims.one(kept_claims.context, header.get("context"))

    def list(self) -> Sequence[Context]:
        header, _ = self._line.ask("context.list")
        return kept_claims.several(kept_claims.context, header.get("contexts"))

    def destroy(self, context_id: str) -> bool:
        header, _ = self._line.ask("context.destroy", context=context_id)
        return header.get("found") is True

    def restart(self, context_id: str) -> Context:
        header, _ = self._line.ask("context.restart", context=context_id)
        return kept_claims.one(kept_claims.context, header.get("context"))


class ServiceProcesses(Processes):
    def __init__(self, line: Line) -> None:
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
        pid = kept_claims.one(kept_claims.count, header.get("pid"))
        argv = list(command.argv) or ["bash", "-c", command.shell]
        return Process(pid, argv, command.cwd)

    def list(self) -> Sequence[Process]:
        header, _ = self._line.ask("process.list")
        return kept_claims.several(kept_claims.process, header.get("processes"))

    def follow(self, pid: int, emit: Emit, after: int = 0) -> Process:
        with self._line.follow("follow", pid=pid, after=after) as frames:
            for frame in frames:
                if frame[0]["event"] == "done":
                    return kept_claims.one(kept_claims.process, frame[0].get("process"))
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
    elif event == "output" and (output := kept_claims.output(parts)) is not None:
        emit(Event("output", output=output))
    elif event == "call" and (call := kept_claims.call(parts)) is not None:
        emit(Event("tool_call", call=call))
