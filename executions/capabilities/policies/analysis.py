"""What a Python program imports and calls, held against rules. Advice, and no boundary.

Whoever wants to hide something hides it from any look at the text. What is resolved are the ways
in which it is written without that wish: aliases, names imported from modules, imports by name.

This file runs as a process of its own too (`analysts`), without Django: a parser that hostile text
kills, fills or keeps busy is then not the service's. It knows the standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import resource
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

# Beyond any of these a program is not looked at to its end, which is a finding of its own.
MOST_BYTES = 256 * 1024
CPU_SECONDS = 1.0
MEMORY_BYTES = 1 << 30
# Of findings; more say nothing new.
MOST = 50

LOOKED, UNPARSED, TOO_MUCH = "looked", "unparsed", "too much"

_NAME = 200
_MEANINGS = 8
_DEPTH = 60
_IMPORTERS = ("__import__", "importlib.import_module", "importlib.__import__")
_BUILTINS = ("builtins", "__builtins__")
_WRITES = frozenset("wax+")

# Magics whose text is Python, and what those of a shell come to.
_WITH_PYTHON = ("time", "timeit", "capture", "prun")
_COMMANDS = (
    *("system", "system_raw", "system_piped", "getoutput"),
    *("run_line_magic", "run_cell_magic", "magic"),
)
# What the shell of a notebook is called, however it was come by.
_SHELL = "get_ipython"
# What may stand before the code of `%timeit`.
_OPTIONS = re.compile(r"(?:\s*-(?:[nr]\s*\d+|[a-z])(?=\s|$))+")
_HARMLESS = (
    *("matplotlib", "load_ext", "autoreload", "config", "pinfo", "who", "whos"),
    *("html", "markdown"),
)
_STARTS_PROCESSES = ("os.system", "subprocess.run")

Finding = tuple[int, str, str]


def analyse(code: str, rules: Mapping[str, Any]) -> tuple[str, list[Finding]]:
    """How far it came, and [line, "import" or "call", name] for each thing against the rules.

    `rules`: `mode` is "deny", "allow" or "", `imports` and `except` are modules with what is in
    them, `calls` patterns, `own` the modules that came with the code. UNPARSED is what has no tree.
    """
    if len(code) > MOST_BYTES or len(code.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        return TOO_MUCH, []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trees: list[ast.Module] = [_parse(code)]
            for tree in trees:
                trees += _in_magics(tree)
    except (RecursionError, MemoryError):
        return TOO_MUCH, []
    except (SyntaxError, ValueError):
        return UNPARSED, []
    # One program: what is inside a magic has the names of what is around it.
    found = sorted(set(_Program(*trees).against(rules)))
    return LOOKED, found[:MOST]


def _notebook() -> Any:
    """`providers.runtime.guest.notebook`, which a process of its own finds by its path alone."""
    if __name__ != "__main__":
        from providers.runtime.guest import notebook

        return notebook
    path = Path(__file__).parents[3] / "providers" / "runtime" / "guest" / "notebook.py"
    spec = importlib.util.spec_from_file_location("notebook", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a module.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parse(code: str) -> ast.Module:
    """Parse Python, or what notebooks write beside it, as cells take it. Raises SyntaxError."""
    try:
        return ast.parse(code)
    except SyntaxError:
        text: str = _notebook().plain(code)
    return ast.parse(text)


def _in_magics(tree: ast.Module) -> list[ast.Module]:
    """The Python that magics are given, as `%%time` is. What is none does not run as such."""
    if not any(_SHELL in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(tree)):
        return []
    found: list[ast.Module] = []
    for name, texts in _Program(tree).magics():
        for text in texts if name in _WITH_PYTHON else ():
            for code in (text.strip(" "), _OPTIONS.sub("", text, count=1).strip(" ")):
                try:
                    found.append(_parse(code))
                    break
                except SyntaxError:
                    continue
    return found


class _Program:
    """A tree, and what its names stand for: dotted names, as far as the text says so."""

    def __init__(self, *trees: ast.AST) -> None:
        self._nodes = [node for tree in trees for node in ast.walk(tree)]
        self._meanings: dict[str, set[str]] = {}
        # Names of its own functions, classes and parameters: not those that Python has.
        self._own: set[str] = set()
        self._stars: list[str] = []
        self._learn()

    def _learn(self) -> None:
        assigned: list[tuple[str, ast.expr]] = []
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._mean(alias.asname or top, alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if alias.name == "*":
                        self._stars.append(node.module or "")
                    else:
                        self._mean(alias.asname or alias.name, f"{node.module}.{alias.name}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._own.add(node.name)
            elif isinstance(node, ast.arg):
                self._own.add(node.arg)
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                assigned += [(name, node.value) for name in names]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                assigned += [
                    (each.id, node.value) for each in [node.target] if isinstance(each, ast.Name)
                ]
        # The order of nodes is not that of the lines: an alias of an alias is known a round later.
        for _ in range(3):
            for name, value in assigned:
                for meaning in tuple(self.meanings(value)):
                    self._mean(name, meaning)

    def _mean(self, name: str, dotted: str) -> None:
        meant = self._meanings.setdefault(name, set())
        if len(meant) < _MEANINGS:
            meant.add(dotted[:_NAME])

    def meanings(self, node: ast.expr, depth: int = 0) -> set[str]:
        """The dotted names that an expression may stand for; none where the text does not say."""
        if depth > _DEPTH:
            return set()
        if isinstance(node, ast.Name):
            return self._of_name(node.id)
        if isinstance(node, ast.Attribute):
            return _within(self.meanings(node.value, depth + 1), node.attr)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth)
        if isinstance(node, ast.Subscript) and (key := _text(node.slice)) is not None:
            return self._of_item(node.value, key, depth)
        return set()

    def _of_name(self, name: str) -> set[str]:
        if name in self._meanings:
            return self._meanings[name]
        if name in self._own:
            return set()
        return {name, *(f"{module}.{name}"[:_NAME] for module in self._stars[:_MEANINGS])}

    def _of_call(self, node: ast.Call, depth: int) -> set[str]:
        called = self.meanings(node.func, depth + 1)
        if (module := self.imported_by(node, called)) is not None:
            top = module.partition(".")[0]
            return {module, top} if "__import__" in called else {module}
        if any(each.rpartition(".")[2] == _SHELL for each in called):
            return {_SHELL}
        name = _text(node.args[1]) if "getattr" in called and len(node.args) > 1 else None
        return set() if name is None else _within(self.meanings(node.args[0], depth + 1), name)

    def _of_item(self, node: ast.expr, key: str, depth: int) -> set[str]:
        holders = self.meanings(node, depth + 1)
        if "sys.modules" in holders:
            return {key[:_NAME]}
        inner = {each.removesuffix(".__dict__") for each in holders if each.endswith(".__dict__")}
        return _within(inner | (holders & set(_BUILTINS)), key)

    def imported_by(self, node: ast.Call, called: set[str]) -> str | None:
        """The module of a call that imports by name, "" where the text does not say which."""
        if called.isdisjoint(_IMPORTERS):
            return None
        first = node.args[0] if node.args else next((each.value for each in node.keywords), None)
        return (_text(first) or "")[:_NAME] if first is not None else None

    def against(self, rules: Mapping[str, Any]) -> Iterator[Finding]:
        imports, patterns = _Imports(rules), list(rules.get("calls") or ())
        inner: set[int] = set()
        for node in self._nodes:
            line = getattr(node, "lineno", 0)
            for module, names in self._imports_of(node):
                if said := imports.refuses(module, names):
                    yield line, "import", said
            if isinstance(node, ast.Call):
                for name in self._calls_of(node, patterns):
                    yield line, "call", name
            if imports.watched and isinstance(node, ast.Name | ast.Attribute):
                # Outer nodes come first: of `os.path.join` its parts are no use of `os` as such.
                if isinstance(node, ast.Attribute):
                    inner.add(id(node.value))
                if id(node) in inner or not isinstance(node.ctx, ast.Load):
                    continue
                for meaning in self.meanings(node):
                    if imports.refuses_use(meaning):
                        yield line, "import", meaning

    def _imports_of(self, node: ast.AST) -> Iterator[tuple[str, list[str]]]:
        """Each module that this imports, "" for one that is not said, and what is taken of it."""
        if self._is_command(node):
            yield "subprocess", []
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name[:_NAME], []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "")[:_NAME], [alias.name[:_NAME] for alias in node.names]
        elif isinstance(node, ast.Call):
            module = self.imported_by(node, self.meanings(node.func))
            if module is not None:
                yield module, []
        elif isinstance(node, ast.Subscript) and "sys.modules" in self.meanings(node.value):
            yield (_text(node.slice) or "")[:_NAME], []

    def _calls_of(self, node: ast.Call, patterns: Sequence[str]) -> Iterator[str]:
        names = {_plain(each) for each in self.meanings(node.func)}
        if self._is_command(node):
            names |= {*_STARTS_PROCESSES}
        for pattern in patterns:
            wanted, _, how = pattern.partition(":")
            if wanted.startswith("."):
                if isinstance(node.func, ast.Attribute) and node.func.attr == wanted[1:]:
                    yield wanted
                continue
            for name in names:
                if fnmatchcase(name, wanted) and (how != "write" or _may_write(node)):
                    yield name

    def magics(self) -> Iterator[tuple[str, list[str]]]:
        """The name of each magic that is called, with the texts that it is given."""
        for node in self._nodes:
            if self._shell_method(node).endswith("magic"):
                yield self._magic_of(cast("ast.Call", node))

    def _is_command(self, node: ast.AST) -> bool:
        """Whether a shell runs something: a command, or a magic that is not known as Python."""
        method = self._shell_method(node)
        if method not in _COMMANDS:
            return False
        name = self._magic_of(cast("ast.Call", node))[0] if method.endswith("magic") else ""
        return name not in (*_WITH_PYTHON, *_HARMLESS)

    def _shell_method(self, node: ast.AST) -> str:
        """The method of a notebook's shell that is called, "" for every other node."""
        if not isinstance(node, ast.Call):
            return ""
        called = (each.rpartition(".") for each in self.meanings(node.func))
        return next((name for shell, _, name in called if shell == _SHELL), "")

    def _magic_of(self, call: ast.Call) -> tuple[str, list[str]]:
        name, *texts = [_text(each) or "" for each in call.args] or [""]
        if self._shell_method(call) == "magic":
            name, _, text = name.lstrip("%").partition(" ")
            texts = [text]
        return name, texts


class _Imports:
    """Which modules a program may import."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._mode = rules.get("mode") or ""
        self._named = list(rules.get("imports") or ())
        self._except = list(rules.get("except") or ())
        self._own = {*(rules.get("own") or ()), "__future__"}
        # Modules that may be imported for the sake of a part: their use is looked at instead.
        self.watched = [
            name
            for name in self._named
            if self._mode == "deny" and any(_covers(name, each) for each in self._except)
        ]

    def refuses(self, module: str, names: Sequence[str]) -> str:
        """What of it is against the rules, "" for nothing."""
        wanted = [f"{module}.{name}" for name in names]
        if self._mode == "allow":
            if not module:
                return "a name that is not in the text"
            if module.partition(".")[0] in self._own or _any_covers(self._named, module):
                return ""
            left = [each for each in wanted if not _any_covers(self._named, each)]
            return (left[0] if left else "") if wanted else module
        if self._mode != "deny" or not module:
            return ""
        if not wanted and module in self.watched:
            return ""
        for each in wanted or [module]:
            if _any_covers(self._named, each) and not _any_covers(self._except, each):
                return each
        return ""

    def refuses_use(self, name: str) -> bool:
        return _any_covers(self.watched, name) and not _any_covers(self._except, name)


def _covers(module: str, name: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _any_covers(modules: Sequence[str], name: str) -> bool:
    return any(_covers(module, name) for module in modules)


def _within(holders: set[str], name: str) -> set[str]:
    return {f"{holder}.{name}" for holder in holders if len(holder) + len(name) < _NAME}


def _plain(name: str) -> str:
    """A builtin as programs call it."""
    holder, _, rest = name.partition(".")
    return rest if holder in _BUILTINS and rest else name


def _text(node: ast.AST | None, depth: int = 0) -> str | None:
    """The text that an expression is; None for one that is not written out."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and depth < _DEPTH:
        left, right = _text(node.left, depth + 1), _text(node.right, depth + 1)
        return None if left is None or right is None else (left + right)[:_NAME]
    return None


def _may_write(node: ast.Call) -> bool:
    """Whether an `open` has a mode that writes, or one that the text does not say."""
    named = [each.value for each in node.keywords if each.arg in ("mode", None)]
    mode = node.args[1] if len(node.args) > 1 else next(iter(named), None)
    if mode is None:
        return False
    text = _text(mode)
    return text is None or not _WRITES.isdisjoint(text)


def main() -> None:
    """Answer each line, [code, rules], with one of [outcome, findings].

    What takes too much processor time ends this process: SIGPROF comes also within the parser.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        code, rules = json.loads(line)
        answer = json.dumps(analyse(code, rules)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
