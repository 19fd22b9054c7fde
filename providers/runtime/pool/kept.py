"""A session sandbox and its operations: begun, held to their time, stopped, and their failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from providers.cancelled_runs import CancelledRuns
from providers.errors import (
    CreationFailed,
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
    before_the_code,
)
from providers.network import NETWORK, Attempt, Network
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import (
    AHEAD,
    CHUNK_BYTES,
    DEFAULT_CONTEXT,
    MOST_CALLS,
    MOST_OPERATIONS,
    STOP_SECONDS,
)
from providers.runtime.pool import claims
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.claims import read_answer
from providers.runtime.pool.protocol import (
    Allowance,
    Conversation,
    ConversationEnded,
    Frame,
    Operation,
    Parts,
    Refused,
)
from providers.runtime.pool.requests import answer_bytes, check_files, parts_of
from providers.runtime.pool.sandbox import START_SECONDS, Sandbox
from providers.values import ExecutionResult, Job, RunLimits

if TYPE_CHECKING:
    from providers.runtime.network.client import NetworkProxy

logger = logging.getLogger(__name__)

# How long a guest may take for what waits for nobody, and to write or take a piece of a file.
OPERATION_SECONDS = 60.0
# How long a process may not read its standard input before its writer gives up.
STDIN_SECONDS = 30.0

# How much later than it must an answer may come before the sandbox is ended: all that it holds
# would be lost to a machine that was busy.
GRACE_SECONDS = 5.0
# When to ask again what a process that ends has left to the next.
LEFT_RETRY_SECONDS = 2.0

T = TypeVar("T")

_RUN_EVENTS = frozenset({"stdout", "stderr", "output"})
_CALLS = frozenset({"call"})
# Events of the operations that are streams, and of those that take one.
STREAMS: Mapping[str, frozenset[str]] = {
    "follow": frozenset({"stdout", "stderr"}),
    "file.list": frozenset({"entries"}),
    "file.read": frozenset({"data"}),
    "file.watch": frozenset({"ready", "changes"}),
    "file.changes": frozenset({"entries", "removed"}),
    "file.pack": frozenset({"data", "held", "kept", "dropped"}),
}
WRITES = frozenset({"file.write", "file.unpack"})
_TAKEN = frozenset({"taken"})
_CARRIED = frozenset({"ready", "data"})
# Those that may be silent for as long as nothing happens.
_PATIENT = frozenset({"follow", "file.watch"})

OnFrame = Callable[[Frame], None]


class Kept:
    """One kept sandbox and its operations. Lives in one event loop.

    Whatever the guest does that it may not, or not in time, ends it: then every operation raises
    KeptSandboxLost, and a run has that for its verdict.
    """

    def __init__(self, sandbox: Sandbox, conversation: Conversation) -> None:
        self.sandbox = sandbox
        # When something was last asked of it or came of that, by time.monotonic().
        self.used_at = time.monotonic()
        self._conversation = conversation
        self._is_left = False
        self._ended_by_us = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._runs = 0
        self._named: dict[str, Operation] = {}
        self._given_up = CancelledRuns()
        self._waiting = 0
        self._oom_kills = sandbox.guest.evidence().oom_kills
        self._carrier: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        environment: Mapping[str, str],
        commands: Mapping[str, Sequence[str]],
        lasting: Mapping[str, object] | None = None,
    ) -> Kept:
        """Have a warm sandbox stay. Raises SandboxError; nothing has run then.

        `commands` is the argument list of each language's interpreter in this sandbox. `lasting`
        has its guest outlive this process, as `protocol` says.
        """
        keep = {
            "environment": dict(environment),
            "memory_bytes": sandbox.template.limits.memory_bytes,
            "start_seconds": START_SECONDS - GRACE_SECONDS,
            "commands": {language: list(command) for language, command in commands.items()},
            **({} if lasting is None else {"lasting": dict(lasting)}),
        }
        try:
            conversation = Conversation(sandbox.keep())
            kept = cls(sandbox, conversation)
            await conversation.ask("keep", keep, seconds=START_SECONDS)
        except (ConversationEnded, wire.FrameError, TimeoutError) as error:
            reason = str(error) or "it ended"
            raise CreationFailed(
                f"The persistent sandbox could not be started: {reason}."
            ) from error
        except Refused as refused:
            raise refusal_error(refused) from None
        return kept

    def lives_for(self, seconds: float) -> None:
        """Tell one that outlives us until when it may. Nothing where it has ended."""
        self._conversation.tell({"op": "lease", "seconds": seconds})

    def leave(self) -> None:
        """Let go of it. What was under way ends, for those who asked; it stays for the next."""
        self._is_left = True
        self.sandbox.leave()

    @property
    def alive(self) -> bool:
        return self.sandbox.alive and not self.sandbox.destroyed

    @property
    def busy(self) -> bool:
        """Whether something is under way that somebody waits for, or that runs code."""
        carries = self._carrier is not None and not self._carrier.done()
        under_way = self._conversation.under_way - carries
        return bool(self._runs or self._waiting or under_way)

    async def run(self, job: Job, emit: OnFrame, *, detach: bool = False) -> ExecutionResult:
        """Run code in its context, after what runs there now.

        `emit` is given the events as they come and must not wait. When this is cancelled the run
        is interrupted, or goes on where `detach` says so.
        """
        job = job if job.run else replace(job, run=secrets.token_hex(8))
        if self.sandbox.network.is_open:
            job = replace(job, environment=self.sandbox.network.extend(job.environment))
        context = job.context or DEFAULT_CONTEXT
        with before_the_code():
            check_files(job)
            parts = parts_of(job)
            if self._waiting + self._runs >= MOST_OPERATIONS // 2:
                raise RateLimited("Too many runs wait for their turn in this sandbox.")
        turn = self._turns.setdefault(context, asyncio.Lock())
        self._waiting += 1
        try:
            await turn.acquire()
        finally:
            self._waiting -= 1
        task = self._spawn(self._run_and_pass_on(job, context, parts, emit, turn))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not detach and not task.done():
                await self.interrupt(context, job.run)
            raise

    async def interrupt(self, context: str, run: str = "") -> bool:
        """Stop what runs in a context, or this run of it alone. False when it did not run."""
        if run:
            if (operation := self._named.get(run)) is None:
                self._given_up.note(run)
                return False
            self._stop(operation)
            return True
        seconds = STOP_SECONDS + GRACE_SECONDS
        header, _ = await self.ask("interrupt", {"target": context}, seconds=seconds)
        return header.get("stopped") is True

    def answer(self, run: str, call: int, answer: bytes) -> bool:
        """Answer a call of a tool, with JSON. False where the run is not under way."""
        if (operation := self._named.get(run)) is None:
            return False
        self._answer(operation, call, answer)
        return True

    async def usage(self) -> dict[str, object]:
        """What all in it uses now: memory in bytes, as the kernel says, else as its guest claims;
        processor time in seconds so far, where the kernel says it; and the disk, as its guest
        claims.
        """
        header, _ = await self.ask("memory", {})
        seen = self.sandbox.guest.memory_bytes()
        return {
            "bytes": claims.count(header.get("bytes")) if seen is None else seen,
            "cpu_seconds": self.sandbox.guest.evidence().cpu_seconds,
            "disk": claims.count(header.get("disk")),
            "disk_total": claims.count(header.get("disk_total")),
        }

    async def ask(
        self,
        name: str,
        fields: Mapping[str, object],
        parts: Parts = (),
        *,
        seconds: float = OPERATION_SECONDS,
    ) -> Frame:
        """An operation that answers once. Raises SandboxError."""
        with self._failures():
            return await self._in_time(self._begin(name, fields, parts).answer, seconds)

    async def write_stdin(self, pid: int, data: bytes, *, close: bool) -> None:
        """To a process. Gives up, without an end of anything, where it does not read."""
        with self._failures():
            operation = self._begin("stdin", {"pid": pid, "close": close}, [("data", data)])
            done, _ = await asyncio.wait([operation.answer], timeout=STDIN_SECONDS)
            if not done:
                operation.stop()
            await self._in_time(operation.answer, STOP_SECONDS + GRACE_SECONDS)
        if not done:
            raise InvalidConfiguration(
                f"data: The process has not read its input for {STDIN_SECONDS:g} s.", field="data"
            )

    async def stream(
        self, name: str, fields: Mapping[str, object], parts: Parts = ()
    ) -> AsyncGenerator[Frame, None]:
        """The events of an operation, and its answer as the last. Raises SandboxError.

        Whoever leaves early has it stopped.
        """
        with self._failures():
            operation = self._begin(name, fields, parts, events=STREAMS[name])
            patience = None if name in _PATIENT else OPERATION_SECONDS
            try:
                while (event := await self._in_time(operation.next_event(), patience)) is not None:
                    self.used_at = time.monotonic()
                    yield event
                yield operation.answer.result()
            finally:
                self._stop(operation)

    async def write(
        self, name: str, fields: Mapping[str, object], content: AsyncIterator[bytes]
    ) -> Frame:
        """A file or an archive, given in pieces of any size. Raises SandboxError."""
        with self._failures():
            operation = self._begin(name, fields, events=_TAKEN)
            sent = 0
            try:
                async for piece in content:
                    for start in range(0, len(piece), CHUNK_BYTES):
                        room = operation.room(sent - AHEAD + 1)
                        await self._in_time(room, OPERATION_SECONDS)
                        self._send(operation, "data", piece[start : start + CHUNK_BYTES])
                        sent += 1
                        await self._conversation.drained()
                self._send(operation, "end")
                return await self._in_time(self._last(operation), OPERATION_SECONDS)
            finally:
                self._stop(operation)

    async def open_network(self, proxy: NetworkProxy, network: Network, owner: str) -> None:
        """Let programs reach these hosts, and no others, from now on. Raises SandboxError."""
        access = self.sandbox.network
        if not (access.is_open or access.has_listener):
            if self._carrier is not None:
                # The guest has one network at a time.
                await self._in_time(self._carrier, OPERATION_SECONDS)
            stream, theirs = socket.socketpair()
            operation = await self._begin_network(stream, theirs)
            try:
                await access.open(proxy, network, owner, theirs)
            except BaseException:
                self._stop(operation)
                stream.close()
                raise
            self._carrier = self._spawn(self._carry(operation, stream))
        else:
            await access.open(proxy, network, owner)

    async def _begin_network(self, *streams: socket.socket) -> Operation:
        """The operation that carries connections, once its guest listens. Raises SandboxError."""
        try:
            with self._failures():
                operation = self._begin("network", {}, events=_CARRIED)
                await self._in_time(operation.next_event(), OPERATION_SECONDS)
                return operation
        except BaseException:
            for stream in streams:
                stream.close()
            raise

    async def _carry(self, operation: Operation, stream: socket.socket) -> None:
        """Pass on what the guest's connections and the proxy say, until one of them ends it."""
        reader, writer = await asyncio.open_connection(sock=stream)
        sender = self._spawn(self._carry_in(operation, reader))
        try:
            while (event := await operation.next_event()) is not None:
                writer.write(event[1].get("data", b""))
                await writer.drain()
        except (ConversationEnded, Refused, OSError) as error:
            logger.debug("the network of a sandbox has ended: %s", error)
        finally:
            sender.cancel()
            writer.close()

    async def _carry_in(self, operation: Operation, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                self._send(operation, "data", data)
                await self._conversation.drained()
        except (ConversationEnded, OSError) as error:
            logger.debug("the network of a sandbox has ended: %s", error)
        else:
            self._stop(operation)

    async def destroy(self, why: str = "") -> None:
        """End it and everything in it."""
        self._ended_by_us = self._ended_by_us or why
        await self.sandbox.destroy()

    async def _run_and_pass_on(
        self, job: Job, context: str, parts: Parts, emit: OnFrame, turn: asyncio.Lock
    ) -> ExecutionResult:
        self._runs += 1
        if self._runs == 1:
            self.sandbox.guest.watch(True)
        try:
            with self.sandbox.network.watched(partial(_pass_on_attempt, emit)):
                return await self._run(job, context, parts, emit)
        finally:
            turn.release()
            self._runs -= 1
            self.used_at = time.monotonic()
            if not self._runs:
                self.sandbox.guest.watch(False)

    async def _run(self, job: Job, context: str, parts: Parts, emit: OnFrame) -> ExecutionResult:
        limits = job.limits
        with before_the_code(), self._failures():
            self._given_up.refuse(job.run)
            operation = self._conversation.begin(
                "run",
                {
                    "context": context,
                    "timeout": job.timeout,
                    "entrypoint": job.entrypoint,
                    "environment": dict(job.environment),
                    "limits": asdict(limits),
                    **({"tools": list(job.tools)} if job.tools else {}),
                },
                parts,
                allowance=_allowance(limits, calls=MOST_CALLS if job.tools else 0),
                on_event=emit,
            )
        began = time.monotonic()
        self._named[job.run] = operation
        try:
            async with asyncio.timeout(job.timeout + STOP_SECONDS + GRACE_SECONDS):
                answer = await asyncio.shield(operation.answer)
        except TimeoutError:
            await self.destroy("a run did not stop at its deadline")
            return self._lost(began, timed_out=True)
        except ConversationEnded as error:
            return self._verdict_of_the_end(error, began)
        except Refused as refused:
            # Its word that nothing ran would be no proof.
            raise refusal_error(refused) from None
        finally:
            del self._named[job.run]
        result = read_answer(answer, limits, self._evidence(), self.sandbox.metadata())
        result.metadata["context_kept"] = answer[0].get("context_kept") is True
        if self.sandbox.network.had_network:
            await self.sandbox.network.sync()
            result.metadata[NETWORK] = self.sandbox.network.take_attempts().to_json()
        return result

    def _evidence(self) -> ResourceUsage:
        """What was seen from outside in this run alone.

        Memory and time are those of all that runs here, so that the guest's figures stand.
        """
        seen = self.sandbox.guest.evidence().oom_kills
        killed, self._oom_kills = seen > self._oom_kills, seen
        return ResourceUsage(out_of_memory=killed)

    def _verdict_of_the_end(self, error: ConversationEnded, began: float) -> ExecutionResult:
        if lost := self._loss_of_the_connection():
            raise lost from error
        if why := self._end_of_ours:
            raise KeptSandboxLost(
                f"The sandbox was ended during the run: {why}.", started=True
            ) from error
        if str(error):
            return self._lost(began, ended=f"It broke the protocol and was ended: {error}")
        guest = self.sandbox.guest
        evidence = guest.evidence()
        if evidence.out_of_memory and (evidence.oom_kills > self._oom_kills or not self._oom_kills):
            return self._lost(began, out_of_memory=True)
        if (seen := guest.last_words()) is None:
            raise KeptSandboxLost(
                "The connection to the sandbox was lost during the run.", started=True
            ) from error
        return self._lost(began, ended=seen)

    def _lost(self, began: float, **verdict: Any) -> ExecutionResult:
        result = self.sandbox.silent_end(time.monotonic() - began, **verdict)
        result.metadata["context_kept"] = False
        return result

    def _begin(
        self,
        name: str,
        fields: Mapping[str, object],
        parts: Parts = (),
        *,
        events: frozenset[str] = frozenset(),
    ) -> Operation:
        """Send what begins one. Raises ConversationEnded."""
        self.used_at = time.monotonic()
        return self._conversation.begin(name, fields, parts, allowance=Allowance(events))

    def _send(self, operation: Operation, what: str, piece: bytes = b"") -> None:
        """A further frame for one that is under way."""
        parts = [("data", piece)] if piece else []
        self._conversation.tell({"op": what, "target": operation.number}, parts)

    def _answer(self, operation: Operation, call: int, answer: bytes) -> None:
        """What a run's call of a tool is answered with."""
        self.used_at = time.monotonic()
        header = {"op": "data", "target": operation.number}
        self._conversation.tell(header, [(f"answer:{call}", answer)])

    async def _last(self, operation: Operation) -> Frame:
        """Its answer, its events passed over."""
        while await operation.next_event() is not None:
            continue
        return operation.answer.result()

    async def _in_time(self, awaited: Awaitable[T], seconds: float | None) -> T:
        """What is awaited. The guest has so many seconds for it, and is ended after them."""
        if isinstance(awaited, asyncio.Future):
            awaited = asyncio.shield(awaited)
        try:
            async with asyncio.timeout(seconds):
                return await awaited
        except TimeoutError:
            raise await self._end("it did not answer in time") from None

    def _stop(self, operation: Operation) -> None:
        """Have what nobody waits for any more end, or the sandbox."""
        if not operation.answer.done():
            operation.stop()
            self._spawn(self._see_it_stop(operation))

    @property
    def _end_of_ours(self) -> str:
        """Why we have ended it, "" where it was not us."""
        return self._ended_by_us or ("it was closed" if self.sandbox.destroyed else "")

    def _loss_of_the_connection(self) -> ProviderUnavailable | None:
        """The error to raise where nothing is lost but what was under way."""
        if self._is_left:
            return left_error("The pool service was stopped")
        if not self._end_of_ours and self.sandbox.guest.is_cut:
            return left_error("The connection to the sandbox was lost")
        return None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What goes wrong in a conversation, as the error to raise."""
        try:
            yield
        except ConversationEnded as error:
            if lost := self._loss_of_the_connection():
                raise lost from error
            reason = self._end_of_ours or str(error) or "it ended by itself"
            raise KeptSandboxLost(f"The sandbox is gone: {reason}.") from error
        except Refused as refused:
            raise refusal_error(refused) from None
        finally:
            self.used_at = time.monotonic()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, why: str) -> KeptSandboxLost:
        await self.destroy(why)
        return KeptSandboxLost(f"The sandbox was ended: {why}.")

    async def _see_it_stop(self, operation: Operation) -> None:
        with contextlib.suppress(KeptSandboxLost, ConversationEnded, Refused):
            await self._in_time(self._last(operation), STOP_SECONDS + GRACE_SECONDS)


def _pass_on_attempt(emit: OnFrame, attempt: Attempt) -> None:
    emit(({"event": "network"}, {"attempt": json.dumps(attempt.to_json()).encode()}))


def _allowance(limits: RunLimits, *, calls: int) -> Allowance:
    """What a run's guest may send: each byte of output as it comes, and once more at the end."""
    return Allowance(
        events=_RUN_EVENTS | _CALLS if calls else _RUN_EVENTS,
        answer_bytes=answer_bytes(limits),
        totals={
            "stdout": limits.output_bytes,
            "stderr": limits.output_bytes,
            "output": limits.rich_output_bytes,
        },
        count=limits.rich_output_count,
        calls=calls,
    )


def left_error(why: str) -> ProviderUnavailable:
    """What is told of what was under way in a sandbox that is found again."""
    return ProviderUnavailable(
        f"{why} during this request. The sandbox still exists, but the result of this request is "
        "lost.",
        started=True,
        retry_after=LEFT_RETRY_SECONDS,
    )


def refusal_error(refused: Refused) -> SandboxError:
    """What a guest refuses, as the error to raise. It is the request's fault, or says so."""
    if refused.code == "exhausted":
        return RateLimited(refused.reason)
    field = refused.field or ("path" if refused.code == "missing" else None)
    return InvalidConfiguration(refused.reason, field=field)
