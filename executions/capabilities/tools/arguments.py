"""Whether the arguments of a call are what its tool takes.

Both the schema and the arguments are somebody's who may mean harm, and the check is made in the
service: it has so many steps.

Loaded with the first call: its library takes longer to load than many a command takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from executions.kernel.text import from_json, to_json
from executions.runs.tool_schemas import KEYWORDS, Tool
from providers.runtime.guest.protocol import CALL_BYTES

# Of one check: a moment of a processor. A step is a keyword that is applied, some values that are
# looked at for it, a problem that is found, or some of the text that says it.
MOST_STEPS = 5_000
_VALUES_OF_A_STEP, _CHARACTERS_OF_A_STEP = 8, 256


class _TooLong(Exception):
    """The check takes more steps than it may."""


class _Steps:
    """What is left of one check."""

    def __init__(self) -> None:
        self._left = MOST_STEPS
        self._sizes: dict[int, int] = {}

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _TooLong

    def values_in(self, part: Any) -> int:
        """How many values a part of the schema holds, which is there for as long as the check."""
        if id(part) not in self._sizes:
            self._sizes[id(part)] = _values_in(part)
        return self._sizes[id(part)]


def _values_in(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_values_in, value.values()))
    return 1 + sum(map(_values_in, value)) if isinstance(value, list) else 1


_steps: ContextVar[_Steps] = ContextVar("steps")


def _counted(name: str, keyword_of: Any) -> Any:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        steps = _steps.get()
        if name in ("enum", "const"):
            looked_at = steps.values_in(value)
        elif name == "additionalProperties":
            looked_at = len(instance) if isinstance(instance, dict) else 0
        else:
            looked_at = len(value) if isinstance(value, (list, dict)) else 0
        steps.take(1 + looked_at // _VALUES_OF_A_STEP)
        for problem in keyword_of(validator, value, instance, schema) or ():
            steps.take(1 + len(problem.message) // _CHARACTERS_OF_A_STEP)
            yield problem

    return check


_Validator: Any = extend(
    Draft202012Validator,
    {
        name: _counted(name, each)
        for name, each in Draft202012Validator.VALIDATORS.items()
        if name in KEYWORDS
    },
)


def read_arguments(tool: Tool, sent: bytes) -> tuple[str, str]:
    """The arguments as JSON text, and what is wrong with them: "" where nothing is."""
    text = sent[: CALL_BYTES + 1].decode("utf-8", "replace")
    try:
        arguments = from_json(sent) if len(sent) <= CALL_BYTES else None
        # Written anew: no two readings of it by those who get it.
        written = to_json(arguments)
        written.encode()
    except (ValueError, RecursionError):
        return to_json(text[:1000]), "they are not JSON"
    if not isinstance(arguments, dict):
        return written, "they are not an object"
    return written, _problem(tool, arguments)


def _problem(tool: Tool, arguments: dict[str, Any]) -> str:
    steps = _steps.set(_Steps())
    try:
        # Without a registry it would fetch what a schema names.
        validator = _Validator(tool.parameters, registry=Registry())
        error = best_match(validator.iter_errors(arguments))
    except _TooLong:
        return "they take too long to check"
    except (RecursionError, Unresolvable, OverflowError, ArithmeticError):
        return "the schema of the tool cannot be applied to them"
    finally:
        _steps.reset(steps)
    if error is None:
        return ""
    place = "".join(f"[{part!r}]" for part in list(error.absolute_path)[:10])
    return f"{place[:100]} {error.message[:300]}".strip()
