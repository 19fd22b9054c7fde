"""Has the guest's own runner run a program in a remote interpreter. Its source is sent there.

What runs is the text of `providers.runtime.guest.python_runner`; here is only what a notebook's
kernel needs around it. Standard library only.
"""

from __future__ import annotations


def __cofferdam__(
    sources: dict[str, str],
    code: str,
    entrypoint: str,
    arguments: str,
    limit: int,
    mark: str,
    goes_on: bool,
) -> None:
    """Run `code` as the local guest would, and print what came of it as JSON between two marks.

    `sources` are the modules to be made of texts, the last one the runner. `arguments` is a JSON
    object, empty when there are none. `limit` is the most bytes of a result. With `goes_on` the
    interpreter is one that stays, and is left as it was.
    """
    import sys
    import types

    out = sys.stdout
    modules: dict[str, types.ModuleType] = {}
    for name, source in sources.items():
        module = types.ModuleType(name)
        module.__file__ = f"<cofferdam {name}>"
        module.__dict__.update(modules)
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
        modules[name] = module
    former = sys.excepthook, sys.modules.get("main")
    # A kernel has put its own there, which shows other tracebacks than an interpreter.
    sys.excepthook = sys.__excepthook__
    if not goes_on:
        sys.argv[:] = ["main.py"]
        sys.path.insert(0, "")
        module._write_program(code.encode("utf-8", "surrogatepass"))
    # A kernel runs cells within its event loop, in which no other could be run.
    asyncio = sys.modules.get("asyncio")
    loop = asyncio.events._get_running_loop() if asyncio else None
    swap = getattr(asyncio.tasks, "_swap_current_task", None) if asyncio else None
    task = swap(loop, None) if swap and loop else None
    if asyncio and loop:
        asyncio.events._set_running_loop(None)
    try:
        ended = modules["exceptions"].Ending()
        exit_code, result = module.run(code, entrypoint, arguments.encode(), limit, ended)
    finally:
        if asyncio and loop:
            asyncio.set_event_loop(loop)
            asyncio.events._set_running_loop(loop)
            if swap:
                swap(loop, task)
        if goes_on:
            sys.excepthook = former[0]
            sys.modules.pop("main", None)
            if former[1] is not None:
                sys.modules["main"] = former[1]
    sys.stderr.flush()
    returned = "" if result is None else f', "result": {result.decode()}'
    if ended.exception:
        returned = f', "exception": {ended.exception.decode()}'
    print(f'{mark}{{"exit_code": {exit_code}{returned}}}{mark}', file=out, flush=True)
