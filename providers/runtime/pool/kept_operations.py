"""Operations of a kept sandbox: begun, held to their time, stopped, and what goes wrong in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from providers.errors import (
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.runtime.guest.protocol import STOP_SECONDS
from providers.runtime.pool.channel import Frame
from providers.runtime.pool.conversation import (
    Allowance,
    Conversation,
    ConversationEnded,
    Operation,
    Parts,
    Refused,
)
from providers.runtime.pool.sandbox import Sandbox

# How much later than it must an answer may come before the sandbox is ended: all that it holds
# would be lost to a machine that was busy.
GRACE_SECONDS = 5.0
# When to ask again what a process that ends has left to the next.
LEFT_RETRY_SECONDS = 2.0

T = TypeVar("T")


class Operations:
    """What is under way in one kept sandbox. Whatever its guest is late with ends it."""

    def __init__(self, sandbox: Sandbox, conversation: Conversation) -> None:
        self.conversation = conversation
        self.used_at = time.monotonic()
        self.is_left = False
        self._sandbox = sandbox
        self._ended_by_us = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    def leave(self) -> None:
        """What was under way ends, for those who asked; the sandbox stays for the next."""
        self.is_left = True
        self._sandbox.leave()

    def begin(
        self,
        name: str,
        fields: Mapping[str, object],
        parts: Parts = (),
        *,
        events: frozenset[str] = frozenset(),
    ) -> Operation:
        """Send what begins one. Raises ConversationEnded."""
        self.used_at = time.monotonic()
        return self.conversation.begin(name, fields, parts, allowance=Allowance(events))

    def send(self, operation: Operation, what: str, piece: bytes = b"") -> None:
        """A further frame for one that is under way."""
        parts = [("data", piece)] if piece else []
        self.conversation.tell({"op": what, "target": operation.number}, parts)

    def answer(self, operation: Operation, call: int, answer: bytes) -> None:
        """What a run's call of a tool is answered with."""
        self.used_at = time.monotonic()
        header = {"op": "data", "target": operation.number}
        self.conversation.tell(header, [(f"answer:{call}", answer)])

    async def last(self, operation: Operation) -> Frame:
        """Its answer, its events passed over."""
        while await operation.next_event() is not None:
            continue
        return operation.answer.result()

    async def in_time(self, awaited: Awaitable[T], seconds: float | None) -> T:
        """What is awaited. The guest has so many seconds for it, and is ended after them."""
        if isinstance(awaited, asyncio.Future):
            awaited = asyncio.shield(awaited)
        try:
            async with asyncio.timeout(seconds):
                return await awaited
        except TimeoutError:
            raise await self._end("it did not answer in time") from None

    def stop(self, operation: Operation) -> None:
        """Have what nobody waits for any more end, or the sandbox."""
        if not operation.answer.done():
            operation.stop()
            self.spawn(self._see_it_stop(operation))

    async def destroy(self, why: str = "") -> None:
        """End it and everything in it."""
        self._ended_by_us = self._ended_by_us or why
        await self._sandbox.destroy()

    @property
    def end_of_ours(self) -> str:
        """Why we have ended it, "" where it was not us."""
        return self._ended_by_us or ("it was closed" if self._sandbox.destroyed else "")

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """What goes wrong in a conversation, as the error to raise."""
        try:
            yield
        except ConversationEnded as error:
            if self.is_left:
                raise left() from error
            reason = self.end_of_ours or str(error) or "it ended by itself"
            raise KeptSandboxLost(f"The sandbox is gone: {reason}.") from error
        except Refused as refused:
            raise told(refused) from None
        finally:
            self.used_at = time.monotonic()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, why: str) -> KeptSandboxLost:
        await self.destroy(why)
        return KeptSandboxLost(f"The sandbox was ended: {why}.")

    async def _see_it_stop(self, operation: Operation) -> None:
        with contextlib.suppress(KeptSandboxLost, ConversationEnded, Refused):
            await self.in_time(self.last(operation), STOP_SECONDS + GRACE_SECONDS)


def left() -> ProviderUnavailable:
    """What is told of what was under way in a sandbox that was left to the next process."""
    return ProviderUnavailable(
        "The pool service was stopped during this request. The sandbox still exists, but the "
        "result of this request is lost.",
        started=True,
        retry_after=LEFT_RETRY_SECONDS,
    )


def told(refused: Refused) -> SandboxError:
    """What a guest refuses, as the error to raise. It is the request's fault, or says so."""
    if refused.code == "exhausted":
        return RateLimited(refused.reason)
    field = refused.field or ("path" if refused.code == "missing" else None)
    return InvalidConfiguration(refused.reason, field=field)
