"""The results and resources of the MCP server."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, unquote
from uuid import UUID

import mcp_types as types
from django.http import Http404
from mcp.server.context import ServerRequestContext

from executions.doors.native.authentication import NEEDS
from executions.doors.native.downloads import download_response
from executions.doors.native.rendering import execution_in_full, render_json
from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import Query, refuse, shown
from executions.kernel.text import from_json, is_storable, to_json
from executions.runs.active_runs import ClientRun
from executions.runs.advice import advice_of
from executions.runs.models import Artifact, Execution
from executions.runs.requests import Caller
from executions.runs.results import (
    ExecutionFilter,
    artifacts_of,
    bundles_of,
    error_of,
    exception_of,
    executions_of,
    list_executions,
    omissions_of,
)
from executions.sessions.queries import SessionFilter, list_sessions, session_of
from executions.tenants.keys import note_refusal
from executions.tenants.models import ApiKey, Scope, Tenant
from providers.slices import json_text

T = TypeVar("T")
# Under which a transport gives its requests their door.
DOOR = "cofferdam.door"
Context = ServerRequestContext[Any, Any]


class Door(Protocol):
    """One client's way in."""

    @property
    def caller(self) -> Caller: ...

    async def do(self, work: Callable[[], Coroutine[T]]) -> T:
        """What the work returns or raises, once it is done."""

    def note(self, run: ClientRun) -> None:
        """Have this run end when the client leaves."""


class Lacking(Exception):
    """The key has not the scopes for this."""


def tenant_of(door: Door) -> Tenant:
    return door.caller.tenant


def by(door: Door) -> str:
    """Who acts, as the ledger and the session itself say it."""
    key = door.caller.api_key
    return "command:mcp" if key is None else f"key:{key.prefix}"


def lacks(door: Door, needs: Sequence[Scope]) -> list[str]:
    key = door.caller.api_key
    return [] if key is None else [scope.value for scope in needs if not key.has_scope(scope)]


def require(door: Door, needs: Sequence[Scope], what: str) -> None:
    """Raises Lacking, which is entered in the ledger."""
    if not (missing := lacks(door, needs)):
        return
    needed = " and ".join(missing)
    key: ApiKey | None = door.caller.api_key
    detail = f"{what} needs {needed}"
    note_refusal(key, "scope", detail=detail, address=door.caller.client_address)
    raise Lacking(f"The API key lacks the required scope: {needed}.")


Tell = Callable[[float, str], Awaitable[None]]


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

    def describe(self, languages: Sequence[str] = (), importable: str = "") -> types.Tool:
        """Describe the tool to clients, where code can be in these languages, and Python code
        import these packages. Without them: nobody knows."""
        takes = dict(self.takes)
        description = self.description
        if importable and "code" in takes:
            description = f"{description} {importable}"
        if languages and "language" in takes:
            takes["language"] = {**takes["language"], "enum": list(languages)}
        return types.Tool(
            name=self.name,
            title=self.title,
            description=description,
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


def tool_result(said: Mapping[str, Any], *more: types.ContentBlock) -> types.CallToolResult:
    text = json_text(said)
    text = text.encode(errors="replace").decode()
    return types.CallToolResult(
        content=[types.TextContent(text=text), *more], structured_content=json.loads(text)
    )


def error_result(
    code: str, message: str, *, field: str | None = None, execution_id: str | None = None
) -> types.CallToolResult:
    """Return an error that a model can put right, or give up on."""
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
        "advice": {
            "type": "array",
            "items": _TEXT,
            "description": "What helps after a missing package or a refused host.",
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
        return error_result(
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
        "advice": advice_of(execution),
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
    return tool_result(said, *_images(shown), *links)


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


MOST_BYTES = 8 * 1024 * 1024
PAGE, MOST_RESOURCES = 20, 100
MOST_CELLS, MOST_CELL_CHARACTERS = 50, 4_000

_ID = "([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_RECORD = re.compile(f"cofferdam://executions/{_ID}", re.ASCII)
_ARTIFACT = re.compile(f"cofferdam://executions/{_ID}/artifacts/([^/?#]{{1,2000}})", re.ASCII)
_TRANSCRIPT = re.compile(f"cofferdam://sessions/{_ID}/transcript", re.ASCII)
_LIST = Query(ExecutionFilter, empty_is_none=True)
_JSON = "application/json"
Contents = types.TextResourceContents | types.BlobResourceContents


def templates() -> list[types.ResourceTemplate]:
    return [
        types.ResourceTemplate(
            name="execution",
            uri_template="cofferdam://executions/{execution_id}",
            description="The complete record of a run, with its signed receipt.",
            mime_type=_JSON,
        ),
        types.ResourceTemplate(
            name="artifact",
            uri_template="cofferdam://executions/{execution_id}/artifacts/{name}",
            description=f"A file that a run left in artifacts/, of at most {MOST_BYTES} bytes.",
        ),
        types.ResourceTemplate(
            name="transcript",
            uri_template="cofferdam://sessions/{session_id}/transcript",
            description=f"The last {MOST_CELLS} cells and commands of a session, oldest first.",
            mime_type=_JSON,
        ),
    ]


async def list_resources(door: Door, cursor: str | None) -> types.ListResourcesResult:
    """List the transcripts of the last sessions, then the artifacts of runs, newest first."""
    if lacks(door, NEEDS["executions"]["GET"]):
        return types.ListResourcesResult(resources=[])
    query = {"limit": str(PAGE), **({} if cursor is None else {"cursor": cursor})}
    tenant = tenant_of(door)
    page = list_executions(tenant, _LIST.read(query))
    found: list[types.Resource] = []
    if cursor is None:
        for session in list_sessions(tenant, SessionFilter(limit=PAGE)).sessions:
            found.append(
                types.Resource(
                    uri=f"cofferdam://sessions/{session.pk}/transcript",
                    name=f"transcript of {session.name or session.pk}",
                    mime_type=_JSON,
                )
            )
    having = [execution.pk for execution in page.executions if execution.artifact_count]
    for artifact in artifacts_of(tenant).filter(execution__in=having)[:MOST_RESOURCES]:
        found.append(
            types.Resource(
                uri=artifact_uri(artifact.execution_id, artifact.name),
                name=artifact.name,
                mime_type=artifact.mime_type,
                size=artifact.size_bytes,
            )
        )
    return types.ListResourcesResult(resources=found, next_cursor=page.next_cursor or None)


async def read_resource(door: Door, uri: str) -> types.ReadResourceResult:
    """Read a resource. Raises Lacking, InvalidConfiguration, and Http404 for what is somebody
    else's as well."""
    for form, endpoint, read in _READERS:
        if parts := form.fullmatch(uri):
            require(door, NEEDS[endpoint]["GET"], f"resource {endpoint}")
            return types.ReadResourceResult(contents=[read(door, uri, *parts.groups())])
    raise Http404


def _record(door: Door, uri: str, execution_id: str) -> Contents:
    execution = executions_of(tenant_of(door)).filter(pk=UUID(execution_id)).first()
    if execution is None:
        raise Http404
    text = render_json(execution_in_full(execution, str))
    return types.TextResourceContents(uri=uri, mime_type=_JSON, text=text)


def _artifact(door: Door, uri: str, execution_id: str, name: str) -> Contents:
    mine, wanted = artifacts_of(tenant_of(door)), unquote(name)
    if not is_storable(wanted):
        raise Http404
    artifact: Artifact | None = mine.filter(execution=UUID(execution_id), name=wanted).first()
    if artifact is None:
        raise Http404
    if artifact.size_bytes > MOST_BYTES:
        path = f"/api/v1/executions/{execution_id}/artifacts/{name}"
        refuse("uri", f"Has {artifact.size_bytes} bytes. Download it from {path} of the API.")
    with closing(download_response(artifact)) as response:
        content = b"".join(response)
    if artifact.mime_type.startswith("text/") or artifact.mime_type == _JSON:
        try:
            text = content.decode()
        except UnicodeDecodeError:
            pass
        else:
            return types.TextResourceContents(uri=uri, mime_type=artifact.mime_type, text=text)
    blob = b64encode(content).decode()
    return types.BlobResourceContents(uri=uri, mime_type=artifact.mime_type, blob=blob)


def _transcript(door: Door, uri: str, session_id: str) -> Contents:
    session = session_of(tenant_of(door), UUID(session_id))
    mine = executions_of(tenant_of(door)).defer(None).defer("pending", "arguments", "outputs")
    rows = list(mine.filter(session=session.pk).order_by("-turn", "-id")[:MOST_CELLS])
    return _json(uri, {"session": str(session.pk), "cells": [_cell(row) for row in rows[::-1]]})


def _cell(execution: Execution) -> Mapping[str, Any]:
    cut = partial(_truncate, execution)
    return {
        "execution": str(execution.pk),
        "context": execution.context or None,
        "language": execution.language,
        "status": execution.status,
        "exit_code": execution.exit_code,
        "code": cut("code"),
        "stdout": cut("stdout"),
        "stderr": cut("stderr"),
        "created_at": execution.created_at.isoformat(),
    }


def _truncate(execution: Execution, name: str) -> str:
    text: str = getattr(execution, name)
    if len(text) <= MOST_CELL_CHARACTERS:
        return text
    left = len(text) - MOST_CELL_CHARACTERS
    return f"{text[:MOST_CELL_CHARACTERS]}\n[{left} more characters are in the record]"


def _json(uri: str, said: Any) -> Contents:
    return types.TextResourceContents(uri=uri, mime_type=_JSON, text=to_json(said))


_READERS: tuple[tuple[re.Pattern[str], str, Callable[..., Contents]], ...] = (
    (_RECORD, "execution", _record),
    (_ARTIFACT, "execution-artifact", _artifact),
    (_TRANSCRIPT, "session", _transcript),
)
