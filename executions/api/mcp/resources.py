"""What was made and what happened, as resources: records, artifacts, transcripts of sessions."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import mcp_types as types
from django.http import Http404

from executions.api.files import download_response
from executions.api.mcp.door import Door, lacks, require, tenant_of
from executions.api.mcp.results import artifact_uri
from executions.api.rendering import execution_in_full, json_text
from executions.api.scopes import NEEDS
from executions.kernel.coroutines import Waits
from executions.kernel.declarations import Query, refuse
from executions.kernel.text import is_storable, to_json
from executions.runs.listing import ExecutionFilter, list_executions
from executions.runs.models import Artifact, Execution
from executions.sessions.queries import SessionFilter, list_sessions, session_of
from executions.tenants.tenant_scope import artifacts_of, executions_of

MOST_BYTES = 8 * 1024 * 1024
PAGE, MOST_LINKS = 20, 100
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


def listing(door: Door, cursor: str | None) -> Waits[types.ListResourcesResult]:
    """The transcripts of the last sessions, then the artifacts of runs, newest first."""
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
    for artifact in artifacts_of(tenant).filter(execution__in=having)[:MOST_LINKS]:
        found.append(
            types.Resource(
                uri=artifact_uri(artifact.execution_id, artifact.name),
                name=artifact.name,
                mime_type=artifact.mime_type,
                size=artifact.size_bytes,
            )
        )
    return types.ListResourcesResult(resources=found, next_cursor=page.next_cursor or None)
    yield


def reading(door: Door, uri: str) -> Waits[types.ReadResourceResult]:
    """Raises Lacking, InvalidConfiguration, and Http404 for what is somebody else's as well."""
    for form, endpoint, read in _READERS:
        if parts := form.fullmatch(uri):
            require(door, NEEDS[endpoint]["GET"], f"resource {endpoint}")
            return types.ReadResourceResult(contents=[read(door, uri, *parts.groups())])
    raise Http404
    yield


def _record(door: Door, uri: str, execution_id: str) -> Contents:
    execution = executions_of(tenant_of(door)).filter(pk=UUID(execution_id)).first()
    if execution is None:
        raise Http404
    text = json_text(execution_in_full(execution, str))
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
    cut = partial(_cut, execution)
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


def _cut(execution: Execution, name: str) -> str:
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
