"""The endpoints of a session's files, and the stream of their changes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from shutil import copyfileobj
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from executions.doors.native import schema
from executions.doors.native.deferred import NDJSON, SSE, EventStream, wanted_form
from executions.doors.native.downloads import download, ranged_download
from executions.doors.native.frame import answered_later
from executions.doors.native.rendering import json_response, next_page
from executions.doors.native.sessions import SESSION_ID, TAGS, SessionApiView
from executions.kernel.coroutines import Coroutine
from executions.sessions import files
from executions.sessions.file_events import watching
from executions.sessions.models import Session
from executions.sessions.requests import FILE, FOLDER, LIST, MKDIR, MOVE, FileListing, named_as
from executions.sessions.shapes import FilePageShape, FileShape, MadeShape, UnpackedShape
from providers.errors import InvalidConfiguration, SandboxError
from providers.guest.names import escape
from providers.sandbox import FileEntry

BYTES = {"application/octet-stream": OpenApiTypes.BINARY}
TAR = {"application/x-tar": OpenApiTypes.BINARY}
_COPIED_BYTES = 256 * 1024
_OF_SANDBOX = (401, 404, 409, 502)


def entry_detail(entry: FileEntry) -> FileShape:
    """With its names as `escape` has them: each can be asked for by that."""
    detail: FileShape = {
        "path": escape(entry.path),
        "type": entry.type,
        "size_bytes": entry.size,
        "mode": entry.mode,
        "modified_at": _moment(entry.modified),
    }
    return {**detail, "target": escape(entry.target)} if entry.type == "symlink" else detail


def _moment(seconds: float) -> str | None:
    """The guest's clock may say anything."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, OSError, ValueError):
        return None


def _or_not_found(session: Session, wanted: FileListing) -> Coroutine[tuple[list[FileEntry], str]]:
    """What is in a folder. Raises Http404 where nothing has this path.

    It is looked up once more only where the list was refused.
    """
    try:
        return (yield from files.listing(session, wanted))
    except InvalidConfiguration as error:
        if error.field != "path" or (yield from files.entry_of(session, wanted.path)) is not None:
            raise
        raise Http404 from error


class FilesView(SessionApiView):
    operations = {"GET": "list_files", "DELETE": "remove_file"}

    @extend_schema(
        operation_id="list_session_files",
        summary="List a folder of a session",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(LIST)],
        responses={200: FilePageShape, **schema.errors(*_OF_SANDBOX)},
    )
    @answered_later
    def get(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        wanted = self.of(request, LIST)
        entries, after = yield from _or_not_found(session, wanted)
        return json_response(
            FilePageShape(
                entries=[entry_detail(entry) for entry in entries],
                next=next_page(request, after=after),
            )
        )

    @extend_schema(
        operation_id="remove_session_file",
        summary="Delete a file, or a folder with its content",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FILE)],
        responses={204: None, **schema.errors(*_OF_SANDBOX)},
    )
    @answered_later
    def delete(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        if not (yield from files.removing(session, self.of(request, FILE).path)):
            raise Http404
        return HttpResponse(status=204)


class FileContentView(SessionApiView):
    operations = {"GET": "read_file", "PUT": "write_file"}

    @extend_schema(
        operation_id="read_session_file",
        summary="Download a file",
        description="The header `Range` may name one range.",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FILE)],
        responses={
            (200, "*/*"): OpenApiTypes.BINARY,
            (206, "*/*"): OpenApiTypes.BINARY,
            **schema.errors(*_OF_SANDBOX, 416),
        },
    )
    @answered_later
    def get(self, request: Request, session_id: UUID) -> Coroutine[HttpResponseBase]:
        session = self.session(session_id)
        path = self.of(request, FILE).path
        seen = yield from files.file_of(session, path)
        if seen is None:
            raise Http404
        # It may grow while it is read: no more is sent than was announced.
        return ranged_download(
            request.META.get("HTTP_RANGE", ""),
            seen.size,
            lambda start, length: at_most(files.read(session, path, start, length), length),
            path,
        )

    @extend_schema(
        operation_id="write_session_file",
        summary="Write a file",
        description="Missing parent folders are created. Readers see the old file or the complete "
        "new one.",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FILE)],
        request=BYTES,
        responses={200: FileShape, **schema.errors(*_OF_SANDBOX, 413)},
    )
    @answered_later
    def put(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        with received(request) as content:
            session = self.session(session_id)
            path = self.of(request, FILE).path
            entry = yield from files.writing(session, path, files.Rereadable(content))
        return json_response(entry_detail(entry))


class FileMoveView(SessionApiView):
    operations = {"POST": "move_file"}

    @extend_schema(
        operation_id="move_session_file",
        summary="Rename a file or folder",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=MOVE,
        responses={
            200: FileShape,
            **schema.errors(*_OF_SANDBOX, 413, 415),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        wanted = MOVE.read(request.data)
        with named_as({"path": "from", "target": "to"}):
            moved = yield from files.moving(session, wanted.source, wanted.to)
        return json_response(entry_detail(moved))


class FileMkdirView(SessionApiView):
    operations = {"POST": "make_directory"}

    @extend_schema(
        operation_id="make_session_directory",
        summary="Create a folder and its parents",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=MKDIR,
        responses={
            200: MadeShape,
            201: MadeShape,
            **schema.errors(*_OF_SANDBOX, 413, 415),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        path = MKDIR.read(request.data).path
        made = yield from files.making_directory(session, path)
        return json_response(MadeShape(path=escape(path), created=made), 201 if made else 200)


class FileArchiveView(SessionApiView):
    operations = {"GET": "read_archive", "PUT": "write_archive"}

    @extend_schema(
        operation_id="read_session_archive",
        summary="Download a folder as a tar archive",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FOLDER)],
        responses={(200, "application/x-tar"): OpenApiTypes.BINARY, **schema.errors(*_OF_SANDBOX)},
    )
    @answered_later
    def get(self, request: Request, session_id: UUID) -> Coroutine[HttpResponseBase]:
        session = self.session(session_id)
        path = self.of(request, FOLDER).path
        yield from _or_not_found(session, FileListing(path=path))
        response = download(files.read_archive(session, path), f"{path.strip('/') or 'files'}.tar")
        response["Content-Type"] = "application/x-tar"
        return response

    @extend_schema(
        operation_id="write_session_archive",
        summary="Unpack a tar archive into a folder",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FOLDER)],
        request=TAR,
        responses={200: UnpackedShape, **schema.errors(*_OF_SANDBOX, 413)},
    )
    @answered_later
    def put(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        with received(request) as content:
            session = self.session(session_id)
            path = self.of(request, FOLDER).path
            number = yield from files.unpacking(session, path, files.Rereadable(content))
        return json_response(UnpackedShape(entries=number))


def received(request: Request) -> IO[bytes]:
    """The body in a file of our own: the server takes its own back when the view has returned."""
    kept: IO[bytes] = TemporaryFile()  # noqa: SIM115
    if (body := request.stream) is not None:
        copyfileobj(body, kept, _COPIED_BYTES)
    kept.seek(0)
    return kept


def at_most(pieces: Iterator[bytes], length: int) -> Iterator[bytes]:
    """No more bytes than so many: a file may grow while it is read."""
    for piece in pieces:
        yield piece[:length]
        length -= min(length, len(piece))
        if not length:
            return


class FileEventsView(SessionApiView):
    @extend_schema(
        operation_id="watch_session_files",
        summary="Watch a folder of a session",
        description="Sends each change in the folder and below it when it happens: `created`, "
        "`modified`, `deleted`, `moved` or `attributes`, with the path, and for `moved` also the "
        "former path. Server-sent events if `text/event-stream` is accepted, else lines of JSON. "
        "The last event is `done`, or `error` with the reason. A watch does not count as use of "
        "the session.",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FOLDER)],
        responses={
            (200, SSE): OpenApiTypes.STR,
            (200, NDJSON): OpenApiTypes.STR,
            **schema.errors(400, 401, 404, 409, 429, 502, 503),
        },
    )
    @answered_later
    def get(self, request: Request, session_id: UUID) -> Coroutine[HttpResponseBase]:
        session = self.session(session_id)
        path = self.of(request, FOLDER).path
        form = wanted_form(request.headers.get("Accept", "")) or NDJSON
        watch = yield from watching(session, path)
        events = EventStream(form, on_leave=watch.leave)
        events.begin(watch)
        watch.ended.add_done_callback(lambda ended: events.end(_last_event(ended)))
        return events


def _last_event(ended: Future[None]) -> dict[str, Any]:
    error = ended.exception()
    if isinstance(error, SandboxError):
        told = {"code": error.code, "message": error.message, "field": error.field}
        return {"type": "error", "error": told}
    return {"type": "done"}
