"""Runs Python code in this process, which waits for its job with everything already warm."""

import gc
import os
import sys

from . import display, ending, preload, printing, wire
from .job import PROGRAMS, free_name, lend_artifacts, limit_cpu_time, write_files

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import _ast
    from collections.abc import Callable

# The program may replace what is in `os`, and would come back to whoever called us.
_exit = os._exit

# ast.PyCF_ONLY_AST
ONLY_AST = 0x400
FILE = PROGRAMS["python"]


class ProgramError(Exception):
    """The program does not do what its entry point promises. The message goes to stderr."""


def prepare() -> None:
    """What is the same for every child, done once before the first is forked."""
    sys.stdin = open(0, closefd=False)
    printing.open_streams()
    preload.set_environment()


def serve(job: int, report: int, template: "dict[str, object]") -> None:
    """Rehearse, say so, wait for the one job, run it, report, and end the process."""
    preload.reseed()
    outputs = display.Outputs(report)
    outputs.open()
    _rehearse(outputs)
    wire.write_all(report, wire.pack({"type": "ready"}, []))
    if not template.get("once"):
        preload.use_the_wait(job)
    frame = wire.read_frame(job, wire.Parser(sys.maxsize))
    if frame is None:
        os._exit(0)
    header, parts = frame
    del frame
    if header.get("type") == "context":
        # Only here: a single run does not pay for it.
        from . import python_context

        python_context.serve(job, outputs, header, advised=bool(template["advise"]))
    os.close(job)
    os.environ.update(header["environment"])  # type: ignore[call-overload]
    limit_cpu_time(float(header["timeout"]))  # type: ignore[arg-type]
    _choose_file(parts)
    _complete_sys_path()
    lend_artifacts()
    write_files(parts)
    _write_program(parts["code"])
    if template["advise"]:
        # Before anything of the program runs, which could write the like.
        from . import advice

        found = advice.remarks(parts["code"].decode())
        outputs.report(wire.pack({"type": "advice", "remarks": found}, []))
    outputs.allow(int(header["rich_output_bytes"]))  # type: ignore[call-overload]
    # What was loaded while nobody waited is of no interest to a look through all objects.
    gc.freeze()
    end = ending.Ending()
    exit_code, result = run(
        parts["code"].decode(),
        str(header["entrypoint"]),
        parts.get("arguments"),
        int(header["result_bytes"]),  # type: ignore[call-overload]
        outputs,
    )
    outputs.finish()
    exit_code = _run_exit_functions(exit_code)
    reported = outputs.parts_of_end(result)
    # A child that the program forked and that runs on to here reports nothing.
    if end.is_needed():
        outputs.report(wire.pack({"type": "ending", "exit_code": exit_code}, reported))
        end.release()
        reported = []
    outputs.report(wire.pack({"type": "done", "exit_code": exit_code}, reported))
    _exit(exit_code)


def run(
    code: str,
    entrypoint: str,
    arguments: "bytes | None",
    result_limit: int,
    outputs: "display.Outputs | None" = None,
    step: "Callable[..., bytes | None] | None" = None,
) -> "tuple[int, bytes | None]":
    """The exit code, and the JSON text of what `main()` returned, if it was called and did.

    `step` runs the code where it is not to be run as a program of its own.
    """
    try:
        returned = (step or _run)(code, entrypoint, arguments, outputs)
        if returned is not None and len(returned) > result_limit:
            raise ProgramError(
                f"main() returned {len(returned)} bytes of JSON, the limit is {result_limit}"
            )
        return 0, returned
    except BaseException as error:
        ended = error
    try:
        exit_code = _tell_end(ended)
    except BaseException:
        # Its class is the program's own: whoever looks at it runs the program's code.
        exit_code = 1
    if exit_code is None:
        return 0, None
    if outputs is not None:
        outputs.note(ended)
    return exit_code, None


def _tell_end(error: BaseException) -> "int | None":
    """Say on standard error what ended the program. Its exit code, None where it just stopped."""
    # The program's classes may raise where they are asked for their own, as `isinstance` does.
    kind = type(error)
    if issubclass(kind, SystemExit):
        code = error.code  # type: ignore[attr-defined]
        if code is None or issubclass(type(code), int):
            return code if code is None else int.__and__(code, 0xFF)
        _tell(code)
    elif issubclass(kind, ProgramError):
        _tell(error)
    else:
        _print_traceback(error)
    return 1


def _run(
    code: str, entrypoint: str, arguments: "bytes | None", outputs: "display.Outputs | None"
) -> "bytes | None":
    tree: "_ast.Module | None" = None
    # Only code that names main can have one; the others are spared the syntax tree (1 ms).
    if arguments or (entrypoint == "auto" and "main" in code):
        tree = _parse(code)
    is_open = entrypoint == "auto"
    if entrypoint == "auto":
        wants = _wants_arguments if arguments else _wants_main
        entrypoint = "main" if tree is not None and wants(tree) else "script"
    values = wire.loads(arguments.decode()) if arguments else {}
    # A file of that name may be imported.
    module = type(sys)(FILE[:-3] if entrypoint == "main" else "__main__")
    module.__file__ = os.path.abspath(FILE)
    sys.modules[module.__name__] = module
    namespace = module.__dict__
    namespace["__builtins__"] = __builtins__
    if entrypoint != "main" and arguments:
        namespace["arguments"] = values
    if entrypoint == "repl":
        _run_like_a_prompt(_parse(code), namespace, outputs)
    else:
        exec(compile(code, FILE, "exec", dont_inherit=True), namespace)
    function = namespace.get("main")
    # It may have come otherwise than by its name, as from a module's `*`.
    is_found = is_open and tree is not None and callable(function) and not _calls_main(tree)
    if entrypoint != "main" and not (arguments and is_found):
        _check_taken(tree, values)
        return None
    if not callable(function):
        raise ProgramError("entrypoint 'main': the code defines no function main()")
    returned = function(**values)  # type: ignore[arg-type]
    if hasattr(returned, "__await__"):
        returned = _await(returned)
    return _encode(returned)


def _parse(code: str) -> "_ast.Module":
    return compile(code, FILE, "exec", ONLY_AST, dont_inherit=True)  # type: ignore[no-any-return]


def _run_like_a_prompt(
    tree: "_ast.Module", namespace: "dict[str, object]", outputs: "display.Outputs | None"
) -> None:
    """Run the statements, and print the value of the last one if it is an expression.

    A value that has more to show than its repr() becomes a rich output, too.
    """
    import _ast

    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        last = _ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, FILE, "exec", dont_inherit=True), namespace)
    if last is not None:
        value = eval(compile(last, FILE, "eval", dont_inherit=True), namespace)
        if value is not None:
            print(repr(value))
            if outputs is not None:
                outputs.show_if_rich(value)


def _wants_main(tree: "_ast.Module") -> bool:
    """Whether the code defines a `main` that it does not call itself."""
    import _ast

    functions = (_ast.FunctionDef, _ast.AsyncFunctionDef)
    assigned = any(
        isinstance(node, _ast.Assign) and any(map(_is_main, node.targets)) for node in tree.body
    )
    defined = any(isinstance(node, functions) and node.name == "main" for node in _top_level(tree))
    return (assigned or defined) and not _calls_main(tree)


def _wants_arguments(tree: "_ast.Module") -> bool:
    """Whether the code has a `main` for its arguments, and does not hand them on itself."""
    return _binds_main(tree) and not (_calls_main(tree) and _names_arguments(_top_level(tree)))


def _without_guards(body: "list[_ast.stmt]") -> "list[_ast.stmt]":
    """The statements of a cell without what runs `if __name__ == "__main__"` alone."""
    import _ast

    left: "list[_ast.stmt]" = []
    for node in body:
        is_guard = isinstance(node, _ast.If) and any(
            getattr(each, "id", None) == "__name__" for each in _top_level(node.test)
        )
        left += node.orelse if is_guard else [node]  # type: ignore[attr-defined]
    return left


def _top_level(tree: "_ast.AST") -> "list[_ast.AST]":
    """All nodes but those within functions and classes, which are in it themselves."""
    import _ast

    inner = (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef, _ast.Lambda)
    found = [tree]
    for node in found:
        if not isinstance(node, inner):
            for name in node._fields:
                value = getattr(node, name, None)
                values = value if isinstance(value, list) else [value]
                found.extend(each for each in values if isinstance(each, _ast.AST))
    return found


def _binds_main(tree: "_ast.AST") -> bool:
    """Whether `main` has a value at the top: defined, assigned or imported, wherever it stands."""
    import _ast

    defines = (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef)
    for node in _top_level(tree):
        if isinstance(node, defines) and node.name == "main":
            return True
        if isinstance(node, _ast.ImportFrom):
            if any((each.asname or each.name) == "main" for each in node.names):
                return True
        elif _is_main(node) and isinstance(node.ctx, _ast.Store):  # type: ignore[attr-defined]
            return True
    return False


def _names_arguments(nodes: "list[_ast.AST]") -> bool:
    """Whether any of the nodes is the variable `arguments`, or its name as text."""
    for node in nodes:
        names = (
            getattr(node, "id", None),
            getattr(node, "name", None),
            getattr(node, "attr", None),
        )
        if "arguments" in (*names, getattr(node, "value", None)):
            return True
    return False


def _check_taken(tree: "_ast.AST | None", values: object) -> None:
    """Raise ProgramError for arguments that the code does not even name."""
    if not values or tree is None:
        return
    import _ast

    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            inner = value if isinstance(value, list) else [value]
            nodes.extend(each for each in inner if isinstance(each, _ast.AST))
    if not _names_arguments(nodes):
        raise ProgramError(
            "the arguments were not used: the code defines no function main() that could be called "
            "with them, and does not use the variable `arguments`"
        )


def _is_main(node: "_ast.AST") -> bool:
    return getattr(node, "id", None) == "main"


def _calls_main(tree: "_ast.AST") -> bool:
    """Whether module-level code calls `main` or hands it to what will call it.

    Bodies of functions and classes do not count, nor does `main = decorated(main)`.
    """
    import _ast

    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef, _ast.Lambda)):
            continue
        if isinstance(node, _ast.Assign) and any(map(_is_main, node.targets)):
            continue
        if isinstance(node, _ast.Call):
            handed = (node.func, *node.args, *(keyword.value for keyword in node.keywords))
            if any(map(_is_main, handed)):
                return True
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, _ast.AST):
                pending.append(value)
            elif isinstance(value, list):
                pending.extend(item for item in value if isinstance(item, _ast.AST))
    return False


def _await(awaitable: object) -> object:
    import asyncio

    async def outcome() -> object:
        return await awaitable  # type: ignore[misc]

    return asyncio.run(outcome())


def _encode(value: object) -> bytes:
    try:
        return wire.dumps_value(value).encode()
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeEncodeError:
        problem = "a string in it is not valid Unicode"
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise ProgramError(f"main() returned a value that is not JSON: {problem}")


def _tell(message: object) -> None:
    try:
        print(message, file=sys.stderr)
    except BaseException:
        # The program has closed or changed its standard error: it does not want to be told.
        return


def _print_traceback(error: BaseException) -> None:
    """Print as the interpreter would, from the caller's first own line on."""
    trace = step = BaseException.__dict__["__traceback__"].__get__(error)
    while step is not None:
        if step.tb_frame.f_code.co_filename == __file__:
            trace = step.tb_next
        step = step.tb_next
    # Our `print` is as good as builtin. Where this was sent as a text, it has no folder.
    folder = __file__.rpartition("/")[0]
    step = trace
    while folder and step is not None and step.tb_next is not None:
        if step.tb_next.tb_frame.f_code.co_filename.startswith(f"{folder}/"):
            step.tb_next = step.tb_next.tb_next
        else:
            step = step.tb_next
    try:
        sys.excepthook(type(error), BaseException.with_traceback(error, trace), trace)
    except BaseException:
        # The program has put something of its own there, which has failed.
        sys.__excepthook__(type(error), error, trace)


def _run_exit_functions(exit_code: int) -> int:
    """Wait for threads, run exit functions, flush: the first half of an interpreter's end."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (getattr(sys, name, None) for name in ("stdout", "stderr")):
            if stream is not None and not stream.closed:
                stream.flush()
        ending.flush_c()
    except BaseException as error:
        try:
            _print_traceback(error)
            sys.stderr.flush()
        except BaseException:
            # Nothing is left to write to; the exit code tells it, as the interpreter's own would.
            return 120
        return exit_code or 120
    return exit_code


def _rehearse(outputs: display.Outputs) -> None:
    """Go the whole way once, so that no page of it is touched first by a caller's code."""
    wire.loads(wire.dumps({"a": [1, None]}))
    end = ending.Ending()
    run("len('warm')", "script", None, 0, outputs)
    outputs.finish()
    end.is_needed()
    end.release()


def _choose_file(parts: "dict[str, bytes]") -> None:
    """Have another name for the program's file where its caller has sent one of that name."""
    global FILE
    FILE = free_name(FILE, parts)


def _write_program(code: bytes) -> None:
    # `open()` would make three more system calls.
    fd = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    wire.write_all(fd, code)
    os.close(fd)


def _complete_sys_path() -> None:
    preload.load_site()
    sys.path.insert(0, os.getcwd())
    sys.argv[:] = [FILE]
