"""An interpreter that runs one piece of code after the other, and keeps what they leave behind.

The event loop of a context: cells find it running, and it runs on between them.

While a cell runs outside of a coroutine the loop is said to be running and is not, so that code may
make tasks for it, and may as well run another one, as `asyncio.run` does.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import _thread
import builtins
import linecache
import os
import sys
import traceback

from . import calls, display, ending, network, plots, preload, program, wire
from .job import enter_folder, lend_artifacts
from .kernel import keep_apart
from .streams import Streams

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import _ast
    import asyncio
    import types
    from typing import Any, Callable, NoReturn

    from .calls import Inbox
    from .shell import InteractiveShell


# Interrupts are this thread's.
_MAIN = _thread.get_ident()

# The program may replace what is in `os`, and this is what answers for it.
_exit, _getpid, _fstat = os._exit, os.getpid, os.fstat

# ast.PyCF_ALLOW_TOP_LEVEL_AWAIT and inspect.CO_COROUTINE
TOP_LEVEL_AWAIT, COROUTINE = 0x2000, 0x80
# How many cells' lines are kept for tracebacks.
SOURCES_KEPT = 500
INTERRUPTED = 130


def serve(
    job: int, outputs: display.Outputs, header: "dict[str, object]", *, advised: bool
) -> "NoReturn":
    """Run the cells that come over `job` until that is closed."""
    _signal.signal(_signal.SIGINT, _stay)
    keep_apart()
    preload.load_site()
    os.environ.update(header["environment"])  # type: ignore[call-overload]
    lend_artifacts()
    enter_folder(str(header["cwd"]))
    sys.path.insert(0, "")
    sys.argv[:] = [""]
    sys.excepthook = _print_exception
    outputs.write = _write_whole
    plots.show_saved(outputs.display)
    inbox = calls.Inbox(job)
    end = ending.Ending()
    context = Context(outputs, advised, inbox)
    outputs.report(wire.pack({"type": "ready"}, []))
    process = _getpid()
    while True:
        context.loop.idle(inbox)
        frame = inbox.next_cell()
        if frame is None:
            # The supervisor ends this context, and waits a moment.
            del context, outputs.shell
            for name in ("_", "get_ipython"):
                vars(builtins).pop(name, None)
            ending.run_exit_functions(0)
            end.is_needed()
            end.release()
            _exit(0)
        frame_header, parts = frame
        del frame
        exit_code, result = context.run(frame_header, parts)
        del parts
        if _getpid() != process:
            # A fork of the program that has run on to here, and answers for nothing.
            _exit(exit_code)
        try:
            _fstat(job)
        except OSError:
            # The program has closed it: there will be no other cell.
            _exit(exit_code)
        done = {"type": "done", "number": frame_header["number"], "exit_code": exit_code}
        if not outputs.report(wire.pack(done, outputs.parts_of_end(result))):
            _exit(exit_code)


def _write_whole(fd: int, data: "bytes | memoryview") -> None:
    """Write a frame. Interrupts wait meanwhile: half a frame would be the context's end."""
    if _thread.get_ident() != _MAIN:
        wire.write_all(fd, data)
        return
    came: "list[int]" = []
    former = _signal.signal(_signal.SIGINT, lambda number, _: came.append(number))
    try:
        wire.write_all(fd, data)
    finally:
        _signal.signal(_signal.SIGINT, former or _signal.SIG_DFL)
    if came:
        _signal.raise_signal(came[0])


def _stay(*_: object) -> None:
    """An interrupt while nothing runs is none."""


class Context:
    """The namespace of all cells, and how one of them is run in it."""

    def __init__(self, outputs: display.Outputs, advised: bool, inbox: calls.Inbox) -> None:
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.namespace["__builtins__"] = builtins
        self._outputs = outputs
        self._tools = calls.Tools(inbox, outputs)
        self._advised = advised
        self._count = 0
        self._name = ""
        self._shell: "InteractiveShell | None" = None
        self._streams = Streams()
        self.loop = ContextLoop()
        vars(builtins)["get_ipython"] = outputs.shell = self.shell

    def run(
        self, header: "dict[str, Any]", parts: "dict[str, bytes]"
    ) -> "tuple[int, bytes | None]":
        """Run one cell. Its exit code, and the JSON text of what `main()` returned."""
        mark = {"number": header["number"]}
        self._outputs.mark = mark
        self._outputs.allow(header["rich_output_bytes"])
        self._outputs.exception = b""
        code = parts["code"].decode()
        if self._advised:
            from . import advice

            remarks = advice.remarks(code)
            self._outputs.report(wire.pack({"type": "advice", "remarks": remarks, **mark}, []))
        self._streams.restore()
        stdin = getattr(sys, "stdin", None)
        if stdin is None or stdin.closed:
            # exit() closes it.
            sys.stdin = open(0, closefd=False)
        environment: "dict[str, str]" = header["environment"]
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        # Also without a network: a sandbox that slept may have had one before.
        preload.find_own_packages(makes_folder=network.is_open(environment))
        arguments = parts.get("arguments")
        self._tools.offer(header.get("tools", ()))
        try:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            self._outputs.report(wire.pack({"type": "began", **mark}, []))
            limit = header["result_bytes"]
            self.loop.enter()
            ended = program.run(code, "", arguments, limit, self._outputs, self._run)
            self._outputs.end_cell()
        except KeyboardInterrupt:
            ended = (INTERRUPTED, None)
        finally:
            _be_deaf()
            self.loop.leave()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _flush()
        # Files stay open, and what was written to them can be seen.
        ending.flush_files(pipes=False)
        return ended

    def _run(
        self, code: str, _: str, arguments: "bytes | None", outputs: display.Outputs
    ) -> "bytes | None":
        self._remember(code)
        tree, text = self._parse(code)
        import _ast

        # Code that is empty is there to call the `main` of an earlier cell.
        takes = program.wants_arguments(tree) or not tree.body
        hands_on = program.calls_main(tree)
        whole = _ast.Module([*tree.body], [])
        if arguments is not None and takes:
            tree.body = _without_guards(tree.body)
        values: "dict[str, object] | None" = None
        former = self.namespace.get("main")
        if arguments is not None:
            values = wire.loads(arguments.decode())  # type: ignore[assignment]
            self.namespace["arguments"] = values
        value = self._evaluate(tree, text)
        if value is not None:
            vars(builtins)["_"] = value
            outputs.display(value)
        main = self.namespace.get("main")
        if values is None:
            return None
        is_own = takes or (main is not former and not hands_on)
        if not callable(main) or not is_own:
            program.check_arguments(whole, values)
            return None
        returned = main(**values)
        if hasattr(returned, "__await__"):
            returned = self.loop.wait(returned)
        return program.encode_result(returned)

    def shell(self) -> "InteractiveShell":
        """What `get_ipython()` answers with."""
        if self._shell is None:
            # Only here: few cells ask for it.
            from .shell import InteractiveShell

            evaluate = lambda code: self._evaluate(*self._parse(code))  # noqa: E731
            self._shell = InteractiveShell(self.namespace, self._outputs, evaluate)
        return self._shell

    def _parse(self, code: str) -> "tuple[Any, str]":
        """The tree of a cell, and the text that it is of: lines of a notebook's become Python."""
        flags = program.ONLY_AST | TOP_LEVEL_AWAIT
        try:
            return compile(code, self._name, "exec", flags, dont_inherit=True), code
        except SyntaxError as error:
            from . import notebook

            text = notebook.plain(code)
            if text == code:
                raise
            del error
        if (unindented := notebook.dedented(code)) != code:
            # Tracebacks show the lines that were run: places in them are counted there.
            self._show_lines(unindented)
        return compile(text, self._name, "exec", flags, dont_inherit=True), text

    def _evaluate(self, tree: "Any", text: str) -> object:
        """Run a cell. The value of its last expression; None where it has none, or a semicolon
        behind it."""
        import _ast

        last = None
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = tree.body.pop().value
        self._execute(compile(tree, self._name, "exec", TOP_LEVEL_AWAIT, dont_inherit=True))
        if last is None:
            return None
        made = _ast.Expression(last)
        value = self._execute(compile(made, self._name, "eval", TOP_LEVEL_AWAIT, dont_inherit=True))
        if ";" in text:
            from . import notebook

            if notebook.is_quiet(text, last.end_lineno, last.end_col_offset):
                return None
        return value

    def _execute(self, code: "types.CodeType") -> object:
        value = eval(code, self.namespace)
        return self.loop.wait(value) if code.co_flags & COROUTINE else value

    def _remember(self, code: str) -> None:
        """Give the cell a name, under which tracebacks and `inspect` find its lines."""
        self._count += 1
        self._name = f"<cell {self._count}>"
        self._show_lines(code)
        linecache.cache.pop(f"<cell {self._count - SOURCES_KEPT}>", None)

    def _show_lines(self, code: str) -> None:
        lines = code.splitlines(True)
        linecache.cache[self._name] = (len(code), None, lines, self._name)


def _without_guards(body: "list[_ast.stmt]") -> "list[_ast.stmt]":
    """The statements of a cell without what runs `if __name__ == "__main__"` alone."""
    import _ast

    left: "list[_ast.stmt]" = []
    for node in body:
        is_guard = isinstance(node, _ast.If) and any(
            getattr(each, "id", None) == "__name__" for each in program.top_level(node.test)
        )
        left += node.orelse if is_guard else [node]  # type: ignore[attr-defined]
    return left


def _be_deaf() -> None:
    """Take no notice of interrupts any more, not even of one that comes just now."""
    while True:
        try:
            _signal.signal(_signal.SIGINT, _stay)
            return
        except KeyboardInterrupt:
            continue


def _flush() -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        # The program may have deleted it.
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            # It is the program's own, or has lost its descriptor; the next cell may mend it.
            continue
    ending.flush_c()


def _print_exception(
    kind: "type[BaseException]", error: BaseException, trace: "types.TracebackType | None"
) -> None:
    # The interpreter's own looks for the lines of a program in files alone.
    traceback.print_exception(kind, error, program.own_part(trace))


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
