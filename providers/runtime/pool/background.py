"""An event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

END_SECONDS = 0.5


class BackgroundLoop:
    """Runs coroutines for other threads. The thread ends with `stop`, or with the process.

    Not a thread of `providers.threads`: the service of a pool has no database.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, waited for in the calling thread."""
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """The coroutine's result to be."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Let the coroutine run without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """End the loop and its thread. What still runs in it is cancelled; its callers see it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_forever()
        if asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(self._end_tasks())

    async def _end_tasks(self) -> None:
        """What was about to end may say how; the rest is cancelled."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, late = await asyncio.wait(left, timeout=END_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
