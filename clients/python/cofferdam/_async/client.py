"""The client: runs, their records, and sessions."""

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
    """A client of one service with one API key.

    `url` and `api_key` default to COFFERDAM_URL and COFFERDAM_API_KEY. `read_seconds` is how long
    to wait for the next bytes of an answer. Raises InvalidSettings; each method raises
    CofferdamError. A `with` block closes the connections.
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
        """Run code and return the result. Check its `status`: code that fails raises no error.

        Retries never run the code twice. If the run is queued or needs approval, this waits at
        most `wait_seconds` for its end. Raises ServiceError if the service could not run the code,
        and StillRunning if the time to wait is over.
        """
        return await ended(self._transport, calls.run(EXECUTIONS, code, options), wait_seconds)

    async def submit(self, code: str, **options: Unpack[SubmitOptions]) -> Execution:
        """Queue code and return its record at once. `wait` waits for the end of the run."""
        call = calls.run(EXECUTIONS, code, options, mode="async")
        return decode(Execution, await self._transport.json(call))

    async def wait(self, execution_id: str, seconds: float = WAIT_SECONDS) -> Execution:
        """Wait until an execution has ended, and return its record. Raises StillRunning."""
        return await wait_for(self._transport, execution_id, seconds)

    def stream(
        self, code: str, *, detach: bool = False, **options: Unpack[RunOptions]
    ) -> AsyncRunStream:
        """Run code and read its events one by one, in a `with` block.

        Leaving the block cancels the run. With `detach` the run continues, and after a broken
        connection the stream resumes.
        """
        call = calls.streamed(calls.run(EXECUTIONS, code, options), detach=detach)
        return AsyncRunStream(self._transport, call, detached=detach)

    def follow(self, execution_id: str, after: int = 0) -> AsyncRunStream:
        """The events of an execution after number `after`. Leaving the block cancels nothing."""
        call = calls.followed(f"{EXECUTIONS}/{calls.part(execution_id)}/events", after)
        return AsyncRunStream(self._transport, call, detached=True, id=execution_id, after=after)

    async def execution(self, execution_id: str) -> Execution:
        path = f"{EXECUTIONS}/{calls.part(execution_id)}"
        return decode(Execution, await self._transport.json(calls.get(path)))

    async def executions(self, **filters: str) -> AsyncIterator[ExecutionSummary]:
        """The tenant's executions, newest first, fetched page by page. Filters as in the API."""
        call: Call | None = calls.get(EXECUTIONS, **filters)
        while call is not None:
            page = await self._transport.json(call)
            for each in page["results"]:
                yield decode(ExecutionSummary, each)
            call = calls.next_of(EXECUTIONS, page["next"])

    async def cancel(self, execution_id: str) -> Execution:
        """Cancel an execution and return its record. Raises Conflict if it has ended."""
        path = f"{EXECUTIONS}/{calls.part(execution_id)}/cancel"
        return decode(Execution, await self._transport.json(calls.post(path)))

    async def answer(
        self, execution_id: str, call_id: str, result: Any = None, *, error: str | None = None
    ) -> None:
        """Answer a `tool_call` event of a run. Raises Conflict if the call waits for no answer."""
        path = f"{EXECUTIONS}/{calls.part(execution_id)}/tool_calls/{calls.part(call_id)}"
        body = {"result": result, "error": error}
        await self._transport.send(calls.post(path, body, is_repeatable=True))

    async def artifact(self, execution_id: str, name: str) -> bytes:
        """Download an artifact. Treat it as untrusted: the code that ran wrote it."""
        return (await self._transport.send(calls.artifact(execution_id, name))).content

    async def save_artifacts(self, execution: Execution, folder: Path) -> list[Path]:
        """Save all artifacts in a folder. Raises ValueError for a name that leads out of it."""
        targets = {each.name: target_in(folder, each.name) for each in execution.artifacts}
        for name, target in targets.items():
            content = await self.artifact(execution.id, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return list(targets.values())

    async def open_session(self, **options: Unpack[SessionOptions]) -> AsyncOpenSession:
        """Open a session. The request is retried only if it certainly did not arrive, because a
        second request would open a second session."""
        body: dict[str, Any] = {**options}
        body["from"] = body.pop("snapshot", None)
        found = await self._transport.json(calls.post(SESSIONS, body))
        return AsyncOpenSession(self._transport, decode(Session, found))

    async def session(self, session_id: str) -> AsyncOpenSession:
        """Get a session that exists already."""
        path = f"{SESSIONS}/{calls.part(session_id)}"
        return AsyncOpenSession(
            self._transport, decode(Session, await self._transport.json(calls.get(path)))
        )

    async def sessions(self, state: str | None = None) -> AsyncIterator[AsyncOpenSession]:
        """The tenant's sessions, fetched page by page."""
        call: Call | None = calls.get(SESSIONS, state=state)
        while call is not None:
            page = await self._transport.json(call)
            for each in page["results"]:
                yield AsyncOpenSession(self._transport, decode(Session, each))
            call = calls.next_of(SESSIONS, page["next"])

    async def languages(self) -> list[str]:
        """The languages that can run now."""
        found = await self._transport.json(calls.get("/api/v1/languages"))
        return [str(each) for each in found["languages"]]

    async def packages(self) -> dict[str, str]:
        """The versions of the packages that Python code can import, by name."""
        found = await self._transport.json(calls.get("/api/v1/languages"))
        known = found["packages"].values()
        return {name: str(each["versions"][name]) for each in known for name in each["versions"]}

    async def usage(self) -> Usage:
        """The tenant's quotas and their usage."""
        return decode(Usage, await self._transport.json(calls.get("/api/v1/usage")))

    async def ledger_keys(self) -> dict[str, Any]:
        """The public keys of receipts. Save them: check receipts with keys saved before."""
        found: dict[str, Any] = await self._transport.json(calls.get("/api/v1/ledger/keys"))
        return found
