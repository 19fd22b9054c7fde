"""Sessions: sandboxes that keep variables and files between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from cofferdam import calls
from cofferdam._async.files import AsyncFiles
from cofferdam._async.process import AsyncBackgroundProcess
from cofferdam._async.streams import AsyncRunStream
from cofferdam._async.transport import AsyncTransport
from cofferdam._async.waiting import WAIT_SECONDS, ended
from cofferdam.calls import post, streamed
from cofferdam.decoding import decode
from cofferdam.options import CellOptions, CommandOptions
from cofferdam.shapes import Context, Execution, Process, Session, Snapshot


class AsyncOpenSession:
    """One session. `info` is its last known state. A `with` block closes it."""

    def __init__(self, transport: AsyncTransport, info: Session) -> None:
        self._transport = transport
        self.info = info
        self._path = f"{calls.SESSIONS}/{calls.part(info.id)}"
        self.files = AsyncFiles(transport, self._path)

    @property
    def id(self) -> str:
        return self.info.id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel its runs and delete its saved files. Closing it twice is no error."""
        await self._transport.send(calls.delete(self._path))

    async def refresh(self) -> Session:
        self.info = decode(Session, await self._transport.json(calls.get(self._path)))
        return self.info

    async def change(
        self,
        *,
        idle_seconds: int | None = None,
        max_seconds: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        wanted = {"idle_seconds": idle_seconds, "max_seconds": max_seconds, "metadata": metadata}
        sent = {name: value for name, value in wanted.items() if value is not None}
        call = calls.Call("PATCH", self._path, json=sent)
        self.info = decode(Session, await self._transport.json(call))
        return self.info

    async def run(
        self, code: str, *, wait_seconds: float = WAIT_SECONDS, **options: Unpack[CellOptions]
    ) -> Execution:
        """Run code and return the result, like `run` of the client."""
        call = calls.run(f"{self._path}/executions", code, options)
        return await ended(self._transport, call, wait_seconds)

    async def submit(self, code: str, **options: Unpack[CellOptions]) -> Execution:
        """Queue code and return its record at once."""
        call = calls.run(f"{self._path}/executions", code, options, mode="async")
        return decode(Execution, await self._transport.json(call))

    def stream(
        self, code: str, *, detach: bool = False, **options: Unpack[CellOptions]
    ) -> AsyncRunStream:
        """Run code and read its events, like `stream` of the client."""
        call = streamed(calls.run(f"{self._path}/executions", code, options), detach=detach)
        return AsyncRunStream(self._transport, call, detached=detach)

    async def command(
        self, command: str | Sequence[str], **options: Unpack[CommandOptions]
    ) -> Execution:
        """Run a command and return the result. A list is the command's words; a text goes to the
        shell. The request is retried only if it certainly did not arrive."""
        call = post(f"{self._path}/processes", _command(command, options))
        return await ended(self._transport, call, WAIT_SECONDS)

    def stream_command(
        self,
        command: str | Sequence[str],
        *,
        detach: bool = False,
        **options: Unpack[CommandOptions],
    ) -> AsyncRunStream:
        call = post(f"{self._path}/processes", _command(command, options))
        return AsyncRunStream(self._transport, streamed(call, detach=detach), detached=detach)

    async def start(
        self, command: str | Sequence[str], **options: Unpack[CommandOptions]
    ) -> AsyncBackgroundProcess:
        """Start a background command, which ends with the session at the latest."""
        body = {**_command(command, options), "background": True}
        found = decode(Process, await self._transport.json(post(f"{self._path}/processes", body)))
        return AsyncBackgroundProcess(self._transport, self._path, found)

    async def processes(self) -> list[AsyncBackgroundProcess]:
        """The background commands that run, and those that ended recently."""
        found = await self._transport.json(calls.get(f"{self._path}/processes"))
        return [
            AsyncBackgroundProcess(self._transport, self._path, decode(Process, each))
            for each in found["results"]
        ]

    async def contexts(self) -> list[Context]:
        found = await self._transport.json(calls.get(f"{self._path}/contexts"))
        return [decode(Context, each) for each in found["results"]]

    async def create_context(
        self,
        language: str,
        *,
        cwd: str | None = None,
        id: str | None = None,  # noqa: A002
    ) -> Context:
        """Start another interpreter. Run code in it with the option `context`."""
        body = {"language": language, "cwd": cwd, "id": id}
        return decode(Context, await self._transport.json(post(f"{self._path}/contexts", body)))

    async def restart_context(self, context_id: str) -> Context:
        path = f"{self._path}/contexts/{calls.part(context_id)}/restart"
        return decode(Context, await self._transport.json(post(path)))

    async def end_context(self, context_id: str) -> None:
        await self._transport.send(calls.delete(f"{self._path}/contexts/{calls.part(context_id)}"))

    async def interrupt(self, context: str | None = None) -> bool:
        """Interrupt the run in a context. Returns False if nothing ran."""
        found = await self._transport.json(post(f"{self._path}/interrupt", {"context": context}))
        return bool(found["interrupted"])

    async def reset(self) -> Session:
        """End all contexts and commands. Files are kept."""
        self.info = decode(Session, await self._transport.json(post(f"{self._path}/reset")))
        return self.info

    async def snapshot(self, name: str | None = None) -> Snapshot:
        """Save the current files. New sessions can start with them."""
        found = await self._transport.json(post(f"{self._path}/snapshot", {"name": name}))
        return decode(Snapshot, found)


def _command(command: str | Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(command, str):
        return {**options, "shell": command}
    return {**options, "command": list(command)}
