"""Run a Python program: call its `main`, and tell its result and what ended it as JSON.

The sandbox of this machine imports this file, and a remote service is sent its text: it imports
nothing but the standard library, and little of that.
"""

import os
import sys

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import _ast
    import types
    from typing import Callable, Protocol

    class Outputs(Protocol):
        """Takes what a program shows and what ended it."""

        def note(self, error: BaseException) -> None: ...
        def show_if_rich(self, value: object) -> None: ...


FILE = "main.py"
# ast.PyCF_ONLY_AST
ONLY_AST = 0x400

# Of what ended a program: characters of each field.
TYPE_CHARACTERS, MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS = 200, 10_000, 20_000
_CUT = "\n[...]\n"


class ProgramError(Exception):
    """The program does not do what its entry point promises. The message goes to stderr."""


def run(
    code: str,
    entrypoint: str,
    arguments: "bytes | None",
    result_limit: int,
    outputs: "Outputs | None" = None,
    step: "Callable[..., bytes | None] | None" = None,
) -> "tuple[int, bytes | None]":
    """Run a program. The exit code, and the JSON text of what `main()` returned, if it was called.

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


def _run(
    code: str, entrypoint: str, arguments: "bytes | None", outputs: "Outputs | None"
) -> "bytes | None":
    tree: "_ast.Module | None" = None
    # Only code that names main can have one; the others are spared the syntax tree (1 ms).
    if arguments or (entrypoint == "auto" and "main" in code):
        tree = _parse(code)
    is_open = entrypoint == "auto"
    if entrypoint == "auto":
        wants = wants_arguments if arguments else _wants_main
        entrypoint = "main" if tree is not None and wants(tree) else "script"
    values = loads(arguments.decode()) if arguments else {}
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
    is_found = is_open and tree is not None and callable(function) and not calls_main(tree)
    if entrypoint != "main" and not (arguments and is_found):
        check_arguments(tree, values)
        return None
    if not callable(function):
        raise ProgramError("entrypoint 'main': the code defines no function main()")
    returned = function(**values)  # type: ignore[arg-type]
    if hasattr(returned, "__await__"):
        returned = _await(returned)
    return encode_result(returned)


def _parse(code: str) -> "_ast.Module":
    return compile(code, FILE, "exec", ONLY_AST, dont_inherit=True)  # type: ignore[no-any-return]


def _run_like_a_prompt(
    tree: "_ast.Module", namespace: "dict[str, object]", outputs: "Outputs | None"
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
    defined = any(isinstance(node, functions) and node.name == "main" for node in top_level(tree))
    return (assigned or defined) and not calls_main(tree)


def wants_arguments(tree: "_ast.Module") -> bool:
    """Whether the code has a `main` for its arguments, and does not hand them on itself."""
    return _binds_main(tree) and not (calls_main(tree) and _names_arguments(top_level(tree)))


def top_level(tree: "_ast.AST") -> "list[_ast.AST]":
    """Return all nodes but those within functions and classes, which are in it themselves."""
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
    for node in top_level(tree):
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


def check_arguments(tree: "_ast.AST | None", values: object) -> None:
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


def calls_main(tree: "_ast.AST") -> bool:
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


def encode_result(value: object) -> bytes:
    """Return what `main()` returned as JSON. Raises ProgramError."""
    try:
        return dumps_value(value).encode()
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeEncodeError:
        problem = "a string in it is not valid Unicode"
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise ProgramError(f"main() returned a value that is not JSON: {problem}")


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
        print_traceback(error)
    return 1


def _tell(message: object) -> None:
    try:
        print(message, file=sys.stderr)
    except BaseException:
        # The program has closed or changed its standard error: it does not want to be told.
        return


def print_traceback(error: BaseException, ours: str = __file__) -> None:
    """Print as the interpreter would, from the first line on that the file `ours` has called."""
    trace = step = BaseException.__dict__["__traceback__"].__get__(error)
    while step is not None:
        if step.tb_frame.f_code.co_filename == ours:
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


def describe_exception(error: BaseException) -> bytes:
    """Return the fields of an exception as JSON: `type`, `message` and `traceback`.

    The traceback has notes, causes and the members of a group. It is empty where the program ended
    itself, by `sys.exit`.
    """
    return encode_exception(_type_of(error), _message_of(error), _traceback_of(error))


def encode_exception(kind: str, message: str, traceback: str) -> bytes:
    """Return the JSON text of what ended a program, within the bounds."""
    said: "dict[str, object]" = {
        "type": _clean(kind)[:TYPE_CHARACTERS],
        "message": _clean(_shortened(message, MESSAGE_CHARACTERS)),
        "traceback": _clean(_shortened(traceback, TRACEBACK_CHARACTERS)),
    }
    return dumps(said).encode()


def own_part(trace: "types.TracebackType | None") -> "types.TracebackType | None":
    """Return a traceback from the first frame on that is neither ours nor the event loop's."""
    loops = getattr(sys.modules.get("asyncio"), "__file__", "")
    # What was sent somewhere as a text has no folder.
    ours, machinery = (
        tuple(file.rpartition("/")[0] + "/" for file in files if "/" in file)
        for files in ((__file__,), (__file__, loops))
    )
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith(machinery):
        own = own.tb_next
    if own is None:
        # Nothing of it is the program's: what is not ours says most.
        own = _without(trace, ours)
    else:
        own.tb_next = _without(own.tb_next, ours)
    return own


def _without(
    trace: "types.TracebackType | None", folders: "tuple[str, ...]"
) -> "types.TracebackType | None":
    """A traceback without the frames of code in these folders."""
    kept: "list[types.TracebackType]" = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(folders):
            kept.append(trace)
        trace = trace.tb_next
    for before, after in zip(kept, [*kept[1:], None]):
        before.tb_next = after
    return kept[0] if kept else None


def _type_of(error: BaseException) -> str:
    return str(type.__dict__["__name__"].__get__(type(error)))


def _message_of(error: BaseException) -> str:
    try:
        # By its type: an exception may have what it likes for a class where it is asked.
        if issubclass(type(error), SyntaxError) and issubclass(type(error.msg), str):  # type: ignore[attr-defined]
            # Where it is belongs to the traceback.
            return error.msg  # type: ignore[attr-defined, no-any-return]
        return str(error)
    except BaseException:
        return "<exception str() failed>"


def _traceback_of(error: BaseException) -> str:
    if issubclass(type(error), SystemExit):
        return ""
    try:
        import traceback

        own = own_part(BaseException.__dict__["__traceback__"].__get__(error))
        return "".join(traceback.format_exception(type(error), error, own))
    except BaseException:
        # Parts of it are the program's own code.
        return ""


def _shortened(text: str, most: int) -> str:
    """The text without its middle where it is too long: the ends say most."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


try:
    # CPython's own accelerators. `import json` pulls in `re` and costs 8 ms in every sandbox.
    from _json import make_encoder, make_scanner
except ImportError:
    import json

    def loads(text: str) -> object:
        return json.loads(text)

    def dumps(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

else:
    from _json import encode_basestring

    class _Scanner:
        strict = True
        object_hook = None
        object_pairs_hook = None
        parse_float = float
        parse_int = int
        parse_constant = float

    _scan = make_scanner(_Scanner())  # type: ignore[arg-type]

    def loads(text: str) -> object:
        """Parse compact JSON (no white space around it). Raises ValueError."""
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            raise ValueError("not JSON") from None
        if end != len(text):
            raise ValueError("text after the JSON value")
        return value

    def dumps(value: object) -> str:
        """Make compact JSON. Raises TypeError or ValueError for what is not JSON, as NaN."""
        encode = make_encoder({}, _refuse, encode_basestring, None, ":", ",", False, False, False)
        return "".join(encode(value, 0))


def dumps_value(value: object) -> str:
    """Do as `dumps`, with null for NaN and infinities, as JavaScript does."""
    try:
        return dumps(value)
    except ValueError:
        return dumps(_finite(value, []))


def _finite(value: object, above: "list[int]") -> object:
    """A copy with null for each number that JSON has not."""
    if isinstance(value, float):
        return value if _is_finite(value) else None
    if not isinstance(value, (list, tuple, dict)):
        return value
    if id(value) in above:
        raise ValueError("Circular reference detected")
    below = [*above, id(value)]
    if isinstance(value, dict):
        return {_finite_key(key): _finite(each, below) for key, each in value.items()}
    return [_finite(each, below) for each in value]


def _finite_key(key: object) -> object:
    if isinstance(key, float) and not _is_finite(key):
        return "NaN" if key != key else "Infinity" if key > 0 else "-Infinity"
    return key


def _is_finite(number: float) -> bool:
    # Without `math`, and without the warnings of numpy's numbers.
    plain = float(number)
    return plain - plain == 0


def _refuse(value: object) -> object:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class _Outputs:
    """Keep what ended a program, and show nothing."""

    def __init__(self) -> None:
        self.exception = b""

    def note(self, error: BaseException) -> None:
        self.exception = describe_exception(error)

    def show_if_rich(self, value: object) -> None:
        """Do nothing: the service shows values."""


def run_in_kernel(
    code: str, entrypoint: str, arguments: str, limit: int, mark: str, goes_on: bool
) -> None:
    """Run `code` in a notebook's kernel, and print what came of it as JSON between two marks.

    `arguments` is a JSON object, empty when there are none. `limit` is the most bytes of a result.
    With `goes_on` the interpreter is one that stays, and is left as it was.
    """
    out = sys.stdout
    former = sys.excepthook, sys.modules.get("main")
    # A kernel has put its own there, which shows other tracebacks than an interpreter.
    sys.excepthook = sys.__excepthook__
    if not goes_on:
        sys.argv[:] = [FILE]
        sys.path.insert(0, "")
        with open(FILE, "wb") as file:
            file.write(code.encode("utf-8", "surrogatepass"))
    # A kernel runs cells within its event loop, in which no other could be run.
    asyncio = sys.modules.get("asyncio")
    loop = asyncio.events._get_running_loop() if asyncio else None
    swap = getattr(asyncio.tasks, "_swap_current_task", None) if asyncio else None
    task = swap(loop, None) if swap and loop else None
    if asyncio and loop:
        asyncio.events._set_running_loop(None)
    outputs = _Outputs()
    try:
        exit_code, result = run(code, entrypoint, arguments.encode(), limit, outputs)
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
    if outputs.exception:
        returned = f', "exception": {outputs.exception.decode()}'
    print(f'{mark}{{"exit_code": {exit_code}{returned}}}{mark}', file=out, flush=True)
