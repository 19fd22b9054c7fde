"""The text that is sent so that a remote interpreter calls `main(arguments)` and tells its value.

A service runs cells and knows no entry points, so the call is added to the caller's code. What
`main()` returned comes back on stdout between two marks that no program can print by chance: 128
random bits, made anew for every run. Arguments travel as a JSON text inside a string literal, so
that `true`, `null`, `__proto__` and any character arrive as they were sent.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from providers.errors import InvalidConfiguration
from providers.runtime.guest import program
from providers.values import Entrypoint, RunLimits

JAVASCRIPT = ("javascript", "typescript")

_DEFINES_MAIN = re.compile(
    r"^(?:export\s+(?:default\s+)?)?(?:(?:async\s+)?function\s*\*?\s*main\b|"
    r"(?:const|let|var)\s+main\s*[=:])",
    re.MULTILINE,
)
_CALLS_MAIN = re.compile(r"^(?!.*\bfunction\s*\*?\s*main\b)\S.*\bmain\s*[(),]", re.MULTILINE)
# The same within blocks, imported, or exported as CommonJS has it.
_BINDS_MAIN = re.compile(
    r"\b(?:function\s*\*?\s*main\b|(?:const|let|var)\s+main\s*[=:]|exports\.main\s*=|"
    r"(?:const|let|var|import)\s*\{[^}]*\bmain\b[^}]*\}|exports\s*=\s*\{[^}]*\bmain\b)"
)
_NAMES_MAIN = re.compile(r"\bmain\b|\bimport\s*\*")
_ARGUMENTS = re.compile(r"\barguments\b")
_CALLS_AT_START = re.compile(r"^main\s*\(", re.MULTILINE)

# In a module of its own, which leaves the names of a kernel as they are.
_PYTHON_CALL = """
import types as __cofferdam__
__cofferdam__ = __cofferdam__.ModuleType("cofferdam")
__cofferdam__.__file__ = "<cofferdam>"
exec(compile(%r, "<cofferdam>", "exec", dont_inherit=True), __cofferdam__.__dict__)
__cofferdam__.run_in_kernel(%s)
"""

_JAVASCRIPT_CALL = """
;%(await)s(() => {
  const end = (text) => console.log(%(mark)s + text + %(mark)s)
  const finish = (value) => {
    const text = JSON.stringify(value === undefined ? null : value)
    if (text === undefined) throw new TypeError(`main() returned a ${typeof value}, which is not JSON`)
    end(`{"exit_code": 0, "result": ${text}}`)
  }
  const fail = (error) => {
    console.error(error?.stack ?? error)
    const said = (text, most) => String(text ?? '').slice(0, most)
    const type = error instanceof Error ? (error.name === 'Error' ? error.constructor.name : error.name) : typeof error
    const message = error instanceof Error ? error.message : typeof error === 'object' ? JSON.stringify(error) : error
    const exception = { type: said(type, 200), message: said(message, 10000), traceback: said(error?.stack, 20000) }
    end(JSON.stringify({ exit_code: 1, exception }))
  }
  try {
    const entry = typeof main === 'function' ? main : typeof module === 'object' ? module?.exports?.main : undefined
    if (typeof entry !== 'function') throw new Error("entrypoint 'main': the code defines no function main()")
    const value = entry(%(arguments)s)
    if (typeof value?.then === 'function') return value.then(finish).catch(fail)
    finish(value)
  } catch (error) {
    fail(error)
  }
})()
"""  # noqa: E501


@dataclass(frozen=True)
class Program:
    """What to send. `mark` is empty when the code is sent as it is and nothing comes back."""

    text: str
    mark: str = ""


def build_program(
    code: str,
    language: str,
    entrypoint: Entrypoint,
    arguments: Mapping[str, Any] | None,
    *,
    top_level_await: bool,
    result_bytes: int = RunLimits().result_bytes,
) -> Program:
    """The program for one run. Raises InvalidConfiguration where a language has no `main()`.

    `top_level_await` says that the service's JavaScript waits for an `await` outside of functions.
    """
    # Services compile a text, and compilers take an editor's byte order mark from a file only.
    code = code.removeprefix("\ufeff")
    if language == "python":
        return _python(code, entrypoint, arguments, result_bytes)
    if language in JAVASCRIPT:
        return _javascript(code, entrypoint, arguments, top_level_await)
    if entrypoint == "main" or arguments:
        raise InvalidConfiguration(
            f"{language} code has no main() that could be called with arguments here.",
            field="entrypoint" if entrypoint == "main" else "arguments",
        )
    return Program(code)


def calls_main(code: str, arguments: Mapping[str, Any] | None) -> bool:
    """Whether a cell's arguments are for a `main`: its own, or where it has no code an earlier one.

    Raises InvalidConfiguration for arguments that nobody would take.
    """
    if arguments is None:
        return False
    if not code.strip() or _NAMES_MAIN.search(code):
        return True
    if arguments:
        raise InvalidConfiguration(
            "The arguments were not used: the cell defines no function main().",
            field="arguments",
        )
    return False


def build_call(
    language: str,
    arguments: Mapping[str, Any],
    *,
    top_level_await: bool,
    result_bytes: int = RunLimits().result_bytes,
) -> Program:
    """A cell that calls the `main` which an earlier cell of its context has defined."""
    if language == "python":
        code = "from __main__ import main"
        return _python_program(code, "main", arguments, result_bytes, goes_on=True)
    if language in JAVASCRIPT:
        return _javascript("", "main", arguments, top_level_await)
    raise InvalidConfiguration(
        f"{language} code has no main() that could be called with arguments here.",
        field="arguments",
    )


def _python(
    code: str, entrypoint: Entrypoint, arguments: Mapping[str, Any] | None, result_bytes: int
) -> Program:
    plain = entrypoint in ("script", "repl") or (entrypoint == "auto" and "main" not in code)
    if plain and not arguments:
        return Program(code)
    return _python_program(code, entrypoint, arguments, result_bytes)


def _python_program(
    code: str,
    entrypoint: Entrypoint,
    arguments: Mapping[str, Any] | None,
    result_bytes: int,
    *,
    goes_on: bool = False,
) -> Program:
    mark = _mark()
    given = "" if arguments is None else json.dumps(dict(arguments), separators=(",", ":"))
    text = _PYTHON_CALL % (
        _program_text(),
        ", ".join(map(repr, (code, entrypoint, given, result_bytes, mark, goes_on))),
    )
    return Program(text, mark)


def _javascript(
    code: str, entrypoint: Entrypoint, arguments: Mapping[str, Any] | None, top_level_await: bool
) -> Program:
    if entrypoint == "auto":
        wants = _wants_main if arguments is None else _wants_arguments
        entrypoint = "main" if wants(code) else "script"
    if entrypoint != "main" and arguments and not _ARGUMENTS.search(code):
        raise InvalidConfiguration(
            "The arguments were not used: the code defines no function main() that could be called "
            "with them, and does not use the variable `arguments`.",
            field="arguments",
        )
    given = "" if arguments is None else f"JSON.parse({json.dumps(json.dumps(dict(arguments)))})"
    if entrypoint != "main":
        return Program(f"globalThis.arguments = {given}; {code}" if given else code)
    mark = _mark()
    call = _JAVASCRIPT_CALL % {
        "await": "await " if top_level_await else "",
        "arguments": given,
        "mark": json.dumps(mark),
    }
    return Program(code + call, mark)


def _wants_main(code: str) -> bool:
    """Whether JavaScript seems to define a top-level `main` that it does not call itself.

    The lines tell, not a syntax tree: callers' code is parsed in their sandbox and nowhere else.
    """
    if not _DEFINES_MAIN.search(code):
        return False
    return not (_CALLS_AT_START.search(code) or _CALLS_MAIN.search(code))


def _wants_arguments(code: str) -> bool:
    """Whether JavaScript seems to have a `main` for its arguments, wherever it stands."""
    if not (_DEFINES_MAIN.search(code) or _BINDS_MAIN.search(code)):
        return False
    calls = _CALLS_AT_START.search(code) or _CALLS_MAIN.search(code)
    return not (calls and _ARGUMENTS.search(code))


def _mark() -> str:
    return f"\x1e{secrets.token_hex(16)}\x1e"


@cache
def _program_text() -> str:
    return Path(program.__file__).read_text(encoding="utf-8")
