"""The client: runs, their records, and the way to sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from cofferdam import calls
from cofferdam._async.session import AsyncOpenSession
from cofferdam._async.streams import AsyncRunStream
from cofferdam._async.transport import READ_SECONDS, AsyncTransport
from cofferdam._async.waiting import WAIT_SECONDS, ended, wait_for
from cofferdam.calls import EXECUTIONS, SESSIONS, Call
from cofferdam.decoding import decode
from cofferdam.options import RunOptions, SessionOptions, SubmitOptions
from cofferdam.retries import Retries
from cofferdam.saving import target_in
from cofferdam.settings import settings_from
from cofferdam.shapes import Execution, ExecutionSummary, Session, Usage


class AsyncCofferdam:
    """One service and one API key, from COFFERDAM_URL and COFFERDAM_API_KEY where not given.

    `read_seconds` is how long the service may be silent. Raises InvalidSettings; each method
    raises CofferdamError. A `with` block closes the connections.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        retries: Retries | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        settings = settings_from(url, api_key)
        self._transport = AsyncTransport(settings, retries or Retries(), read_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def run(
        self, code: str, *, wait_seconds: float = WAIT_SECONDS, **options: Unpack[RunOptions]
    ) -> Execution:
        """What came of code, whatever that is: look at `status`.

        However often it is sent, it runs once. Where it is queued, or waits for a person, its end
        is waited for `wait_seconds`. Raises ServiceError where it could not be run, StillRunning.
        """
        return await ended(self._transport, calls.run(EXECUTIONS, code, options), wait_seconds)

    async def submit(self, code: str, **options: Unpack[SubmitOptions]) -> Execution:
        """Have code run later, and be told at once that it is queued. `wait` has its end."""
        call = calls.run(EXECUTIONS, code, options, mode="async")
        return decode(Execution, await self._transport.json(call))

    async def wait(self, execution_id: str, seconds: float = WAIT_SECONDS) -> Execution:
        """The record of an execution, once it has ended. Raises StillRunning."""
        return await wait_for(self._transport, execution_id, seconds)

    def stream(
        self, code: str, *, detach: bool = False, **options: Unpack[RunOptions]
    ) -> AsyncRunStream:
        """Code told event by event, in a `with` block.

        Leaving the block cancels the run; with `detach` it goes on, and a connection that breaks
        is taken up again.
        """
        call = calls.streamed(calls.run(EXECUTIONS, code, options), detach=detach)
        return AsyncRunStream(self._transport, call, detached=detach)

    def follow(self, execution_id: str, after: int = 0) -> AsyncRunStream:
        """The events of an execution behind the one of this number. Leaving them ends nothing."""
        call = calls.followed(f"{EXECUTIONS}/{calls.part(execution_id)}/events", after)
        return AsyncRunStream(self._transport, call, detached=True, id=execution_id, after=after)

    async def execution(self, execution_id: str) -> Execution:
        path = f"{EXECUTIONS}/{calls.part(execution_id)}"
        return decode(Execution, await self._transport.json(calls.get(path)))

    async def executions(self, **filters: str) -> AsyncIterator[ExecutionSummary]:
        """Those of the tenant, newest first; fetched page by page. The API has the filters."""
        call: Call | None = calls.get(EXECUTIONS, **filters)
        while call is not None:
            page = await self._transport.json(call)
            for each in page["results"]:
                yield decode(ExecutionSummary, each)
            call = calls.next_of(EXECUTIONS, page["next"])

    async def cancel(self, execution_id: str) -> Execution:
        """Raises Conflict where it has ended."""
        path = f"{EXECUTIONS}/{calls.part(execution_id)}/cancel"
        return decode(Execution, await self._transport.json(calls.post(path)))

    async def answer(
        self, execution_id: str, call_id: str, result: Any = None, *, error: str | None = None
    ) -> None:
        """Answer what a `tool_call` event of a run asks for. Raises Conflict where nobody waits."""
        path = f"{EXECUTIONS}/{calls.part(execution_id)}/tool_calls/{calls.part(call_id)}"
        body = {"result": result, "error": error}
        await self._transport.send(calls.post(path, body, is_repeatable=True))

    async def artifact(self, execution_id: str, name: str) -> bytes:
        """It is hostile until you have looked at it: untrusted code wrote it."""
        return (await self._transport.send(calls.artifact(execution_id, name))).content

    async def save_artifacts(self, execution: Execution, folder: Path) -> list[Path]:
        """Write all of them below a folder. Raises ValueError for a name that leads out of it."""
        targets = {each.name: target_in(folder, each.name) for each in execution.artifacts}
        for name, target in targets.items():
            content = await self.artifact(execution.id, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return list(targets.values())

    async def open_session(self, **options: Unpack[SessionOptions]) -> AsyncOpenSession:
        """A sandbox that stays. Sent twice it would be two, so it is not sent again by itself
        where it may have arrived."""
        body: dict[str, Any] = {**options}
        body["from"] = body.pop("snapshot", None)
        found = await self._transport.json(calls.post(SESSIONS, body))
        return AsyncOpenSession(self._transport, decode(Session, found))

    async def session(self, session_id: str) -> AsyncOpenSession:
        """One that was opened before."""
        path = f"{SESSIONS}/{calls.part(session_id)}"
        return AsyncOpenSession(
            self._transport, decode(Session, await self._transport.json(calls.get(path)))
        )

    async def sessions(self, state: str | None = None) -> AsyncIterator[AsyncOpenSession]:
        """Those of the tenant; fetched page by page."""
        call: Call | None = calls.get(SESSIONS, state=state)
        while call is not None:
            page = await self._transport.json(call)
            for each in page["results"]:
                yield AsyncOpenSession(self._transport, decode(Session, each))
            call = calls.next_of(SESSIONS, page["next"])

    async def languages(self) -> list[str]:
        """What can be run now."""
        found = await self._transport.json(calls.get("/api/v1/languages"))
        return [str(each) for each in found["languages"]]

    async def usage(self) -> Usage:
        """The tenant's quotas, and what is used of them."""
        return decode(Usage, await self._transport.json(calls.get("/api/v1/usage")))

    async def ledger_keys(self) -> dict[str, Any]:
        """The public keys of receipts. Keep them: a receipt is checked with those kept before."""
        found: dict[str, Any] = await self._transport.json(calls.get("/api/v1/ledger/keys"))
        return found
