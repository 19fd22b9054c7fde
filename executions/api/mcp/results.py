"""What tools are called with, and how they answer: as an object of a schema, and as text."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import UUID

import mcp_types as types

from executions.api.mcp.door import Door, Tell
from executions.kernel.declarations import refuse, shown
from executions.kernel.text import from_json
from executions.runs.listing import error_of, exception_of, omissions_of
from executions.runs.models import Execution
from executions.runs.results import bundles_of
from executions.tenants.models import Scope
from providers.slices import json_text

# Of each stream, and of a result: more of it is read with execution_output.
MOST_CHARACTERS = 16_000
MOST_IMAGES, MOST_IMAGE_CHARACTERS = 4, 2_000_000
MOST_LINKS = 50

_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}


@dataclass(frozen=True)
class Call:
    """A tool's call, with what was given to it and not yet taken."""

    door: Door
    given: dict[str, Any]
    tell: Tell

    def take(self, name: str, default: Any = None) -> Any:
        value = self.given.pop(name, None)
        return default if value is None else value

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            refuse(name, "Must be a non-empty string.")
        return value

    def id(self, name: str) -> UUID:
        try:
            return UUID(self.text(name))
        except ValueError:
            refuse(name, "Must be an id that another tool returned.")

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            refuse(name, f"Must be a whole number of {least} to {most}.")
        return value


@dataclass(frozen=True)
class Tool:
    """A tool as clients see it. `needs` are the scopes of the endpoint that it stands for."""

    name: str
    title: str
    description: str
    takes: Mapping[str, Any]
    gives: Mapping[str, Any]
    needs: Sequence[Scope]
    call: Callable[[Call], Awaitable[types.CallToolResult]]
    requires: Sequence[str] = ()
    only_reads: bool = False
    destroys: bool = False

    def refuse_unknown(self, given: Mapping[str, Any]) -> None:
        """Raises InvalidConfiguration: what a tool does not say that it takes means nothing."""
        for name in given:
            if name not in self.takes:
                refuse(shown(name), f"Unknown argument. Known are: {', '.join(self.takes)}.")

    def described(self, languages: Sequence[str] = ()) -> types.Tool:
        """As clients see it, where code can be in these languages; none: nobody knows."""
        takes = dict(self.takes)
        if languages and "language" in takes:
            takes["language"] = {**takes["language"], "enum": list(languages)}
        return types.Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema={
                "type": "object",
                "properties": takes,
                "required": list(self.requires),
                "additionalProperties": False,
            },
            output_schema={"type": "object", **self.gives},
            annotations=types.ToolAnnotations(
                read_only_hint=self.only_reads,
                destructive_hint=self.destroys,
                open_world_hint=False,
            ),
        )


def answered(said: Mapping[str, Any], *more: types.ContentBlock) -> types.CallToolResult:
    text = json_text(said)
    text = text.encode(errors="replace").decode()
    return types.CallToolResult(
        content=[types.TextContent(text=text), *more], structured_content=json.loads(text)
    )


def refused(
    code: str, message: str, *, field: str | None = None, execution_id: str | None = None
) -> types.CallToolResult:
    """An error that a model can put right, or give up on."""
    said = {"error": {"code": code, "message": message, "field": field}}
    text = json.dumps({**said, "execution_id": execution_id}, ensure_ascii=False)
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)


def execution_uri(execution_id: object) -> str:
    return f"cofferdam://executions/{execution_id}"


def artifact_uri(execution_id: object, name: str) -> str:
    return f"{execution_uri(execution_id)}/artifacts/{quote(name, safe='')}"


_SKIPPED = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": _TEXT, "reason": _TEXT}},
}
EXECUTION = {
    "properties": {
        "execution_id": _TEXT,
        "status": {
            "type": "string",
            "description": "succeeded; failed: the code ended with an error, see stderr; "
            "timed_out; out_of_memory; blocked; cancelled; queued: it waits, for example for "
            "approval.",
        },
        "result": {"description": "The return value of main(); null if there is none."},
        "outputs": {
            "type": "array",
            "items": _TEXT,
            "description": "Displayed values, such as the value of a cell's last expression.",
        },
        "stdout": _TEXT,
        "stderr": _TEXT,
        "cut": {
            "type": "array",
            "items": _TEXT,
            "description": "The names of truncated fields. Read the rest with execution_output.",
        },
        "exit_code": {"type": ["integer", "null"]},
        "error": {
            "type": ["object", "null"],
            "properties": {"code": _MAYBE_TEXT, "message": _MAYBE_TEXT},
        },
        "exception": {
            "type": ["object", "null"],
            "properties": {"type": _TEXT, "message": _TEXT},
            "description": "The exception that ended the code; stderr has its traceback.",
        },
        "artifacts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": _TEXT,
                    "mime_type": _TEXT,
                    "size_bytes": {"type": "integer"},
                    "uri": _TEXT,
                },
            },
        },
        "artifacts_skipped": {
            **_SKIPPED,
            "description": "Files in artifacts/ that were not kept, with the reason.",
        },
        "outputs_skipped": {
            **_SKIPPED,
            "description": "Values and ends of streams that were not kept, with the reason.",
        },
        "context_kept": {
            "type": ["boolean", "null"],
            "description": "In a session: whether its variables are kept. If false, they are lost.",
        },
    },
    "required": ["execution_id", "status", "stdout", "stderr", "cut", "exit_code"],
}


def run_answer(execution: Execution) -> types.CallToolResult:
    """What came of a run."""
    if execution.status == Execution.Status.ERROR:
        return refused(
            execution.error_code,
            execution.error_message,
            field=execution.error_field or None,
            execution_id=str(execution.pk),
        )
    cut = [
        name
        for name in ("stdout", "stderr", "result", "outputs")
        if len(getattr(execution, name)) > MOST_CHARACTERS
    ]
    shown = bundles_of(execution)
    texts = [str(each["text/plain"]) for each in shown if "text/plain" in each]
    artifacts = list(execution.artifacts.all()[:MOST_LINKS]) if execution.artifact_count else []
    has_result = bool(execution.result) and "result" not in cut
    said = {
        "execution_id": str(execution.pk),
        "status": execution.status,
        "result": from_json(execution.result) if has_result else None,
        "outputs": _within(texts),
        "stdout": execution.stdout[:MOST_CHARACTERS],
        # Of an error the last lines say what it was.
        "stderr": execution.stderr[-MOST_CHARACTERS:],
        "cut": cut,
        "exit_code": execution.exit_code,
        "error": error_of(execution),
        "exception": _exception(execution),
        "artifacts": [
            {
                "name": each.name,
                "mime_type": each.mime_type,
                "size_bytes": each.size_bytes,
                "uri": artifact_uri(execution.pk, each.name),
            }
            for each in artifacts
        ],
        **omissions_of(execution),
        "context_kept": execution.context_kept,
    }
    links = [
        types.ResourceLink(
            uri=artifact_uri(execution.pk, each.name),
            name=each.name,
            mime_type=each.mime_type,
            size=each.size_bytes,
        )
        for each in artifacts
    ]
    return answered(said, *_images(shown), *links)


def _exception(execution: Execution) -> dict[str, str] | None:
    """What ended the program; its traceback is in stderr."""
    told = exception_of(execution)
    return told and {"type": told["type"], "message": told["message"]}


def _within(texts: Sequence[str]) -> list[str]:
    left, found = MOST_CHARACTERS, []
    for text in texts:
        if left <= 0:
            break
        found.append(text[:left])
        left -= len(text)
    return found


def _images(shown: Sequence[Mapping[str, Any]]) -> list[types.ImageContent]:
    left = MOST_IMAGE_CHARACTERS
    found: list[types.ImageContent] = []
    for each in shown:
        for mime_type in ("image/png", "image/jpeg"):
            data = each.get(mime_type)
            if isinstance(data, str) and len(found) < MOST_IMAGES and len(data) <= left:
                data = "".join(data.split())
                left -= len(data)
                found.append(types.ImageContent(data=data, mime_type=mime_type))
    return found
