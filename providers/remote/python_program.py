"""Calls `main()` inside a remote Python interpreter. Its source is sent; standard library only."""

from __future__ import annotations

import sys
import types


def __cofferdam__(code: str, entrypoint: str, arguments: str, mark: str) -> None:
    """Run `code` as the local guest would, and print what came of it as JSON between two marks.

    `arguments` is a JSON object, empty when there are none.
    """
    import json
    import linecache
    import traceback

    out, ended = sys.stdout, {"exit_code": 0}
    linecache.cache["main.py"] = (len(code), None, code.splitlines(True), "main.py")
    trace = None
    try:
        tree = compile(code, "main.py", "exec", 0x400, dont_inherit=True)
        if entrypoint == "auto":
            entrypoint = "main" if _wants_main(tree) else "script"  # type: ignore[name-defined]  # noqa: F821
        values = json.loads(arguments) if arguments else {}
        module = types.ModuleType("main" if entrypoint == "main" else "__main__")
        sys.modules["main"] = module
        module.__file__ = "main.py"
        if entrypoint == "script" and arguments:
            module.__dict__["arguments"] = values
        exec(compile(code, "main.py", "exec", dont_inherit=True), module.__dict__)
        if entrypoint == "main":
            function = module.__dict__.get("main")
            if not callable(function):
                raise SystemExit("entrypoint 'main': the code defines no function main()")
            returned = function(**values)
            if hasattr(returned, "__await__"):
                returned = __cofferdam_await__(returned)
            try:
                json.dumps(returned, ensure_ascii=False, allow_nan=False).encode()
            except (RecursionError, TypeError, ValueError) as error:
                raise SystemExit(f"main() returned a value that is not JSON: {error}") from None
            ended["result"] = returned
    except SystemExit as stop:
        if isinstance(stop.code, int):
            ended["exit_code"] = stop.code & 0xFF
        elif stop.code is not None:
            ended["exit_code"] = 1
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        ended["exit_code"] = 1
        trace = step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_name == "__cofferdam__":
                trace = step.tb_next
            step = step.tb_next
        traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()
    print(mark + json.dumps(ended) + mark, file=out, flush=True)


def __cofferdam_await__(awaitable: object) -> object:
    """What an awaitable comes to, in a thread: the interpreter may run an event loop itself."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def outcome() -> object:
        return await awaitable  # type: ignore[misc]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, outcome()).result()
