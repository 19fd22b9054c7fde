"""An event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for other threads. The thread ends with `stop`, or with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, waited for in the calling thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Let the coroutine run without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """End the loop and its thread. Nothing may be running in it any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
