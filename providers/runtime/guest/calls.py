"""The module `tools` of a cell: functions of the caller's, each call of which goes out of here.

A call is a report, and its answer comes over the job pipe, which a thread reads from the first cell
with tools on: an interrupt that met a read half done would lose what was read.
"""

import _thread
import os
import select
import sys

from . import display, wire
from .protocol import CALL_BYTES

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import asyncio
    from _queue import SimpleQueue
    from collections.abc import Iterable
    from typing import Any

    Frame = tuple[dict[str, object], dict[str, bytes]]

MODULE = "tools"

# The program may replace what is in `os`.
_getpid, _read = os.getpid, os.read


class ToolError(Exception):
    """A call was refused, or its answer is an error."""


class Inbox:
    """What comes over the job pipe: cells, and answers to calls of the one that runs."""

    def __init__(self, job: int) -> None:
        self.waiting: "dict[int, SimpleQueue[bytes]]" = {}
        self._job = job
        self._parser = wire.Parser(sys.maxsize)
        self._cells: "SimpleQueue[Frame | None] | None" = None
        self._loop: "asyncio.AbstractEventLoop | None" = None

    def next_cell(self) -> "Frame | None":
        """The next cell, waiting for it; None at the end of the pipe."""
        if self._cells is None:
            return wire.read_frame(self._job, self._parser)
        return self._cells.get()

    def when_there(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Stop a loop as soon as there is a cell, or the end of the pipe."""
        if self._cells is None:
            loop.add_reader(self._job, loop.stop)
            return
        self._loop = loop
        if not self._cells.empty():
            loop.call_soon(loop.stop)

    def ignore(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Let the loop be."""
        self._loop = None
        if self._cells is None:
            loop.remove_reader(self._job)

    def open(self) -> None:
        """From now on a thread reads. Raises RuntimeError where there can be no other."""
        if self._cells is None:
            from _queue import SimpleQueue

            cells: "SimpleQueue[Frame | None]" = SimpleQueue()
            _thread.start_new_thread(self._pass_on, (cells,))
            self._cells = cells

    def _pass_on(self, cells: "SimpleQueue[Frame | None]") -> None:
        try:
            while True:
                try:
                    data = _read(self._job, 1 << 16)
                except BlockingIOError:
                    wire.wait(self._job, select.POLLIN)
                    continue
                if not data:
                    break
                for header, parts in self._parser.feed(data):
                    if header.get("type") != "answer":
                        cells.put((header, parts))
                        self._wake()
                        continue
                    # Whoever asked may have been interrupted.
                    waiting = self.waiting.pop(header["call"], None)  # type: ignore[call-overload]
                    if waiting is not None:
                        waiting.put(parts["answer"])
        except (OSError, wire.FrameError):
            # The program has closed or read what was not its own.
            pass
        cells.put(None)
        self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(loop.stop)
            except RuntimeError:
                # It was closed just now: nobody waits in it.
                return


class Tools:
    """The tools of the cell that runs, and the calls that wait for their answers."""

    def __init__(self, inbox: Inbox, outputs: display.Outputs) -> None:
        self._inbox = inbox
        self._outputs = outputs
        self._process = _getpid()
        self._names: "frozenset[str]" = frozenset()
        self._module: object = None
        self._counting = _thread.allocate_lock()
        self._count = 0

    def offer(self, names: "Iterable[str]") -> None:
        """Have just these be there for the cell that begins."""
        self._names = frozenset(names)
        if sys.modules.get(MODULE) is self._module:
            # A file of the program's may have the name where a cell has no tools.
            sys.modules.pop(MODULE, None)
        if self._names:
            try:
                self._inbox.open()
            except RuntimeError:
                # No thread is to be had; a cell without tools would run.
                self._names = frozenset()
                return
            self._module = module = type(sys)(MODULE)
            module.__dict__.update({name: self._function(name) for name in self._names})
            module.__dict__.update({"ToolError": ToolError, "__all__": sorted(self._names)})
            sys.modules[MODULE] = module

    def _function(self, name: str) -> "Any":
        def tool(**arguments: object) -> object:
            return self._call(name, arguments)

        tool.__name__ = tool.__qualname__ = name
        tool.__module__ = MODULE
        return tool

    def _call(self, name: str, arguments: "dict[str, object]") -> object:
        if _getpid() != self._process:
            raise ToolError("only the process that runs the code can call a tool, not its forks")
        if name not in self._names:
            raise ToolError(f"{name} is not a tool of this run")
        try:
            body = wire.dumps(arguments).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the arguments of {name} are not JSON: {error}") from None
        if len(body) > CALL_BYTES:
            raise ToolError(f"the arguments of {name} are more than {CALL_BYTES} bytes of JSON")
        from _queue import SimpleQueue

        answer: "SimpleQueue[bytes]" = SimpleQueue()
        with self._counting:
            self._count += 1
            number = self._count
        self._inbox.waiting[number] = answer
        try:
            said = {"type": "call", **self._outputs.mark, "call": number, "name": name}
            if not self._outputs.report(wire.pack(said, [("arguments", body)])):
                raise ToolError("no call can be sent: the code has closed its file descriptors")
            told: "Any" = wire.loads(answer.get().decode())
        finally:
            self._inbox.waiting.pop(number, None)
        if "error" in told:
            raise ToolError(told["error"])
        return told["result"]
