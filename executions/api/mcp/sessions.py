"""The tools of sessions and of their files."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import mcp_types as types
from django.http import Http404

from executions.api.mcp.door import Door, by, tenant_of
from executions.api.mcp.results import Call, answered
from executions.api.rendering import session_for
from executions.api.session_files import at_most, entry_detail
from executions.kernel.coroutines import Waits
from executions.kernel.declarations import refuse
from executions.kernel.paths import to_text
from executions.runs.requests import decoded
from executions.sessions import control, files
from executions.sessions.ending import close
from executions.sessions.lifecycle import opening
from executions.sessions.models import Session
from executions.sessions.queries import LIST, list_sessions, living_session_of, session_of
from executions.sessions.requests import OPEN, FileListing, FileRequest
from executions.sessions.session_sandbox import OPERATION_SECONDS
from executions.tenants.rate_limit import ENTRY_COUNTS_AS, take
from providers.errors import ProviderUnavailable
from providers.sandbox import FileEntry
from providers.waiting import within

MOST_READ_BYTES = 64 * 1024
MOST_LISTED, MOST_SESSIONS = 200, 20
_PAUSE_SECONDS = 0.02
_SHOWN = ("name", "state", "language", "provider", "isolation", "created_at", "expires_at")


async def session_open(call: Call) -> types.CallToolResult:
    given = call.given

    def work() -> Waits[dict[str, Any]]:
        return _shown((yield from opening(OPEN.read(given), call.door.caller)), call.door)

    return answered(await call.door.do(work))


async def session_list(call: Call) -> types.CallToolResult:
    query = {name: str(value) for name, value in call.given.items() if value is not None}

    def work() -> Waits[dict[str, Any]]:
        wanted = LIST.read({"limit": str(MOST_SESSIONS), **query})
        page = list_sessions(tenant_of(call.door), wanted)
        return {
            "sessions": [_shown(session, call.door) for session in page.sessions],
            "next": page.next_cursor or None,
        }
        yield

    return answered(await call.door.do(work))


async def session_reset(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")

    def work() -> Waits[dict[str, Any]]:
        tenant = tenant_of(call.door)
        session = living_session_of(tenant, session_id)
        # The message itself was counted as one request.
        take(tenant, counts_as=ENTRY_COUNTS_AS - 1).require()
        return _shown((yield from control.resetting(session, by(call.door))), call.door)

    return answered(await call.door.do(work))


async def session_close(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")

    def work() -> Waits[None]:
        session = session_of(tenant_of(call.door), session_id)
        if session.closed_at is None:
            yield from close(session, by(call.door))

    await call.door.do(work)
    return answered({"closed": True})


async def file_list(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")
    path, after = call.take("path", ""), call.take("after", "")
    depth = call.take("depth", 1)

    def work() -> Waits[dict[str, Any]]:
        wanted = FileListing(path=path, depth=depth, after=after)
        session = living_session_of(tenant_of(call.door), session_id)
        found, more = yield from files.listing(session, wanted)
        page = found[:MOST_LISTED]
        if len(found) > MOST_LISTED:
            more = to_text(page[-1].path)
        return {"entries": [entry_detail(entry) for entry in page], "next": more or None}

    return answered(await call.door.do(work))


async def file_read(call: Call) -> types.CallToolResult:
    session_id, path = call.id("session_id"), call.take("path")
    offset = call.whole("offset", 0, 0, 2**53)

    def work() -> Waits[dict[str, Any]]:
        wanted = FileRequest(path=path)
        session = living_session_of(tenant_of(call.door), session_id)
        seen = yield from files.file_of(session, wanted.path)
        if seen is None:
            raise Http404
        length = max(0, min(MOST_READ_BYTES, seen.size - offset))
        content = b""
        if length:
            content = yield from _all(files.read(session, wanted.path, offset, length), length)
        return _content(content, seen, offset)

    return answered(await call.door.do(work))


async def file_write(call: Call) -> types.CallToolResult:
    session_id, path = call.id("session_id"), call.take("path")
    text, encoded = call.take("text"), call.take("content_base64")
    content = _given(text, encoded)

    def work() -> Waits[FileEntry]:
        wanted = FileRequest(path=path)
        session = living_session_of(tenant_of(call.door), session_id)
        sent = files.Rereadable(io.BytesIO(content))
        return (yield from files.writing(session, wanted.path, sent))

    return answered(entry_detail(await call.door.do(work)))


def _shown(session: Session, door: Door) -> dict[str, Any]:
    detail = session_for(door.caller.api_key, session)
    contexts = [each["id"] for each in detail["contexts"]]
    return {
        "session_id": detail["id"],
        **{name: detail[name] for name in _SHOWN},
        "contexts": contexts,
    }


def _given(text: Any, encoded: Any) -> bytes:
    if (text is None) == (encoded is None):
        refuse("text", "Send either text or content_base64.")
    if text is not None:
        if not isinstance(text, str):
            refuse("text", "Must be a string.")
        return text.encode("utf-8", "replace")
    try:
        return decoded(encoded)
    except ValueError as error:
        refuse("content_base64", str(error))


def _all(pieces: Iterator[bytes], length: int) -> Waits[bytes]:
    """Read it without holding a thread: a guest may take its time, but not all there is."""
    until = time.monotonic() + OPERATION_SECONDS
    parts = []
    for piece in at_most(pieces, length):
        parts.append(piece)
        if not piece:
            if time.monotonic() > until:
                raise ProviderUnavailable("The sandbox did not send the file in time.")
            yield within(_PAUSE_SECONDS, Future[None]())
    return b"".join(parts)


def _content(content: bytes, seen: FileEntry, offset: int) -> dict[str, Any]:
    """As text where it is UTF-8; a character that is cut at the end belongs to the next part."""
    end = offset + len(content)
    text, encoded = None, None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        if end < seen.size and error.start > 0 and error.start >= len(content) - 3:
            content = content[: error.start]
            end = offset + len(content)
            text = content.decode()
        else:
            encoded = base64.b64encode(content).decode()
    return {
        "text": text,
        "content_base64": encoded,
        "size_bytes": seen.size,
        "next_offset": end if content and end < seen.size else None,
    }
