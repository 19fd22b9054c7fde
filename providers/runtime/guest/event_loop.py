"""The event loop of a context: cells find it running, and it runs on between them.

While a cell runs outside of a coroutine the loop is said to be running and is not, so that code may
make tasks for it, and may as well run another one, as `asyncio.run` does.
"""

import _thread
import sys

from . import plots

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import asyncio
    from typing import Any, Callable

    from .calls import Inbox

_MAIN = _thread.get_ident()


class ContextLoop:
    """Nothing happens before the program imports asyncio."""

    def __init__(self) -> None:
        self._loop: "asyncio.AbstractEventLoop | None" = None
        self._in_cell = False
        plots.when_imported("asyncio", self._take_over)

    def enter(self) -> None:
        """A cell begins."""
        self._in_cell = True
        if "asyncio" in sys.modules:
            try:
                self._mark()
            except OSError:
                # The program has left no descriptor for a loop; a cell may well need none.
                return

    def leave(self) -> None:
        """A cell has ended."""
        self._in_cell = False
        if "asyncio" in sys.modules:
            sys.modules["asyncio"]._set_running_loop(None)

    def wait(self, awaitable: "Any") -> object:
        """Run it to its end. The loop's other tasks go on meanwhile."""
        import asyncio

        async def outcome() -> object:
            return await awaitable

        loop = self._living()
        asyncio._set_running_loop(None)
        try:
            task = loop.create_task(outcome())
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except asyncio.CancelledError as cancelled:
                    interrupt = KeyboardInterrupt()
                    raise interrupt.with_traceback(cancelled.__traceback__) from None
                raise
        finally:
            self._mark()

    def idle(self, inbox: "Inbox") -> None:
        """Run what cells have left in the loop, until the next one is there."""
        while self._loop is not None and not self._loop.is_closed():
            loop = self._loop
            try:
                inbox.when_there(loop)
                try:
                    loop.run_forever()
                finally:
                    inbox.ignore(loop)
                return
            except (OSError, RuntimeError, ValueError):
                # The program has closed what it needs, or changed it: the next cell has another.
                self._loop = None
            except BaseException as error:
                # What ends a program ends a task alone.
                sys.excepthook(type(error), error, error.__traceback__)

    def _living(self) -> "asyncio.AbstractEventLoop":
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._loop

    def _mark(self) -> None:
        if self._in_cell and _thread.get_ident() == _MAIN:
            asyncio = sys.modules["asyncio"]
            loop = self._living()
            asyncio.set_event_loop(loop)
            asyncio._set_running_loop(loop)

    def _take_over(self, asyncio: "Any") -> None:
        """Let loops be run where ours is but said to be running."""
        loops, runner = asyncio.base_events.BaseEventLoop, getattr(asyncio, "Runner", None)
        for kind, names in ((loops, ("run_forever", "run_until_complete")), (runner, ("run",))):
            for name in names if kind is not None else ():
                setattr(kind, name, self._unmarked(getattr(kind, name)))
        asyncio.run = asyncio.runners.run = self._unmarked(asyncio.run, anew=True)
        self._mark()

    def _unmarked(self, function: "Callable[..., Any]", *, anew: bool = False) -> "Any":
        import functools

        asyncio = sys.modules["asyncio"]

        @functools.wraps(function)
        def call(*args: object, **options: object) -> object:
            loop = self._loop
            if loop is None or loop.is_running() or asyncio._get_running_loop() is not loop:
                return function(*args, **options)
            asyncio._set_running_loop(None)
            try:
                return function(*args, **options)
            finally:
                if anew:
                    self._mark()
                elif not loop.is_closed():
                    asyncio._set_running_loop(loop)

        return call
