# Generated from cofferdam/_async by make_sync.py: do not edit.
"""Sessions: sandboxes that keep variables and files between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from cofferdam import calls
from cofferdam._sync.files import Files
from cofferdam._sync.process import BackgroundProcess
from cofferdam._sync.streams import RunStream
from cofferdam._sync.transport import Transport
from cofferdam._sync.waiting import WAIT_SECONDS, ended
from cofferdam.calls import post, streamed
from cofferdam.decoding import decode
from cofferdam.options import CellOptions, CommandOptions
from cofferdam.shapes import Context, Execution, Process, Session, Snapshot


class OpenSession:
    """One session. `info` is its last known state. A `with` block closes it."""

    def __init__(self, transport: Transport, info: Session) -> None:
        self._transport = transport
        self.info = info
        self._path = f"{calls.SESSIONS}/{calls.part(info.id)}"
        self.files = Files(transport, self._path)

    @property
    def id(self) -> str:
        return self.info.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel its runs and delete its saved files. Closing it twice is no error."""
        self._transport.send(calls.delete(self._path))

    def refresh(self) -> Session:
        self.info = decode(Session, self._transport.json(calls.get(self._path)))
        return self.info

    def change(
        self,
        *,
        idle_seconds: int | None = None,
        max_seconds: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        wanted = {"idle_seconds": idle_seconds, "max_seconds": max_seconds, "metadata": metadata}
        sent = {name: value for name, value in wanted.items() if value is not None}
        call = calls.Call("PATCH", self._path, json=sent)
        self.info = decode(Session, self._transport.json(call))
        return self.info

    def run(
        self, code: str, *, wait_seconds: float = WAIT_SECONDS, **options: Unpack[CellOptions]
    ) -> Execution:
        """Run code and return the result, like `run` of the client."""
        call = calls.run(f"{self._path}/executions", code, options)
        return ended(self._transport, call, wait_seconds)

    def submit(self, code: str, **options: Unpack[CellOptions]) -> Execution:
        """Queue code and return its record at once."""
        call = calls.run(f"{self._path}/executions", code, options, mode="async")
        return decode(Execution, self._transport.json(call))

    def stream(
        self, code: str, *, detach: bool = False, **options: Unpack[CellOptions]
    ) -> RunStream:
        """Run code and read its events, like `stream` of the client."""
        call = streamed(calls.run(f"{self._path}/executions", code, options), detach=detach)
        return RunStream(self._transport, call, detached=detach)

    def command(self, command: str | Sequence[str], **options: Unpack[CommandOptions]) -> Execution:
        """Run a command and return the result. A list is the command's words; a text goes to the
        shell. The request is retried only if it certainly did not arrive."""
        call = post(f"{self._path}/processes", _command(command, options))
        return ended(self._transport, call, WAIT_SECONDS)

    def stream_command(
        self,
        command: str | Sequence[str],
        *,
        detach: bool = False,
        **options: Unpack[CommandOptions],
    ) -> RunStream:
        call = post(f"{self._path}/processes", _command(command, options))
        return RunStream(self._transport, streamed(call, detach=detach), detached=detach)

    def start(
        self, command: str | Sequence[str], **options: Unpack[CommandOptions]
    ) -> BackgroundProcess:
        """Start a background command, which ends with the session at the latest."""
        body = {**_command(command, options), "background": True}
        found = decode(Process, self._transport.json(post(f"{self._path}/processes", body)))
        return BackgroundProcess(self._transport, self._path, found)

    def processes(self) -> list[BackgroundProcess]:
        """The background commands that run, and those that ended recently."""
        found = self._transport.json(calls.get(f"{self._path}/processes"))
        return [
            BackgroundProcess(self._transport, self._path, decode(Process, each))
            for each in found["results"]
        ]

    def contexts(self) -> list[Context]:
        found = self._transport.json(calls.get(f"{self._path}/contexts"))
        return [decode(Context, each) for each in found["results"]]

    def create_context(
        self,
        language: str,
        *,
        cwd: str | None = None,
        id: str | None = None,  # noqa: A002
    ) -> Context:
        """Start another interpreter. Run code in it with the option `context`."""
        body = {"language": language, "cwd": cwd, "id": id}
        return decode(Context, self._transport.json(post(f"{self._path}/contexts", body)))

    def restart_context(self, context_id: str) -> Context:
        path = f"{self._path}/contexts/{calls.part(context_id)}/restart"
        return decode(Context, self._transport.json(post(path)))

    def end_context(self, context_id: str) -> None:
        self._transport.send(calls.delete(f"{self._path}/contexts/{calls.part(context_id)}"))

    def interrupt(self, context: str | None = None) -> bool:
        """Interrupt the run in a context. Returns False if nothing ran."""
        found = self._transport.json(post(f"{self._path}/interrupt", {"context": context}))
        return bool(found["interrupted"])

    def reset(self) -> Session:
        """End all contexts and commands. Files are kept."""
        self.info = decode(Session, self._transport.json(post(f"{self._path}/reset")))
        return self.info

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Save the current files. New sessions can start with them."""
        found = self._transport.json(post(f"{self._path}/snapshot", {"name": name}))
        return decode(Snapshot, found)


def _command(command: str | Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(command, str):
        return {**options, "shell": command}
    return {**options, "command": list(command)}
