"""What a program asks for over the bridge, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from django.conf import settings
from pydantic import Field

from executions.kernel.declarations import Body, at_most, declared, refuse, shown
from executions.kernel.text import from_json
from executions.runs.requests import API_ENTRYPOINTS, ExecutionRequest
from providers.errors import InvalidConfiguration
from providers.json_reading import MOST_DEPTH, MOST_VALUES
from providers.json_values import check
from providers.languages import normalize_language

MOST_ID_CHARACTERS = 200
_LARGEST_ID = 2**53

CODE_EXEC = Body(
    ExecutionRequest,
    "CodeExec",
    ours=(
        *("timeout", "usual_timeout", "mode", "idempotency_key", "subject", "webhook"),
        *("priority", "run_at"),
        *("session", "context", "env", "background"),
    ),
    only={"entrypoint": API_ENTRYPOINTS},
)


@declared
class _Time:
    timeout: (
        Annotated[float, Field(ge=0, allow_inf_nan=False), at_most("COMPONENT_EXEC_TIMEOUT")] | None
    ) = None


@dataclass(frozen=True)
class Frame:
    """One request. `id` is the caller's own name for it, None where it has none."""

    id: str | int | None
    body: Mapping[str, Any]


def too_long() -> InvalidConfiguration:
    """The refusal of a request that was not read to its end."""
    most = settings.SANDBOX_MAX_BODY_BYTES
    return InvalidConfiguration(f"request: Must be at most {most} bytes long.", field="request")


def read_frame(text: bytes) -> Frame:
    """The JSON object in a text. Raises InvalidConfiguration."""
    try:
        # Of bytes a JSON reader guesses the encoding.
        check(text, MOST_VALUES, MOST_DEPTH)
        body = from_json(text.decode())
    except UnicodeDecodeError:
        refuse("request", "Must be UTF-8.")
    except ValueError as error:
        refuse("request", f"Must be one JSON object: {error}.")
    if not isinstance(body, dict):
        refuse("request", "Must be one JSON object.")
    return Frame(_id(body.pop("id", None)), body)


def read_request(body: Mapping[str, Any]) -> ExecutionRequest:
    """What is to be run. Raises InvalidConfiguration, which names the field at fault.

    The time is cut to what the provider carries out: RAGFlow sends COMPONENT_EXEC_TIMEOUT with
    every call, and means the most that it waits. 0 stands for a time left out.
    """
    fields = dict(body)
    seconds = _Time(timeout=fields.pop("timeout", None)).timeout
    for key in fields:
        if key not in CODE_EXEC.known:
            known = ", ".join((*CODE_EXEC.known, "timeout"))
            refuse(shown(key), f"Unknown field. Known are: {known}.")
    if isinstance(fields.get("language"), str):
        # RAGFlow knows some by more names than are offered.
        fields["language"] = normalize_language(fields["language"])
    usual = float(seconds or settings.COMPONENT_EXEC_TIMEOUT)
    return CODE_EXEC.read(fields, usual_timeout=usual)


def read_arguments(code: str, language: str, timeout: str, arguments: str) -> dict[str, Any]:
    """The body that four arguments of a command line stand for. Raises InvalidConfiguration."""
    try:
        seconds = float(timeout) if timeout else None
    except ValueError:
        refuse("timeout", "Must be a number of seconds.")
    try:
        values = from_json(arguments) if arguments else None
    except ValueError as error:
        refuse("arguments", f"Must be a JSON object: {error}.")
    return {"code": code, "language": language, "timeout": seconds, "arguments": values}


def _id(value: Any) -> str | int | None:
    is_text = isinstance(value, str) and len(value) <= MOST_ID_CHARACTERS
    is_number = type(value) is int and abs(value) <= _LARGEST_ID
    if not (value is None or is_text or is_number):
        refuse("id", f"Must be a whole number or at most {MOST_ID_CHARACTERS} characters.")
    return cast("str | int | None", value)
