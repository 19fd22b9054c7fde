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
from rest_framework.request import Request

from executions.doors.native.deferred import NDJSON, EventStream, stream_form
from executions.doors.native.downloads import download, ranged_download
from executions.doors.native.frame import deferred
from executions.doors.native.rendering import json_response, next_page
from executions.doors.native.schema import BYTES, EVENT_STREAM, endpoint
from executions.doors.native.sessions import SessionApiView
from executions.sessions import files
from executions.sessions.file_events import watch_folder
from executions.sessions.models import Session
from executions.sessions.requests import (
    FILE,
    FOLDER,
    LIST,
    MKDIR,
    MOVE,
    FileListing,
    FilePageShape,
    FileShape,
    MadeShape,
    UnpackedShape,
    rename_fields,
)
from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.guest.names import escape
from providers.sandbox import FileEntry

_COPIED_BYTES = 256 * 1024


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


async def _list_or_404(session: Session, wanted: FileListing) -> tuple[list[FileEntry], str]:
    """What is in a folder. Raises Http404 where nothing has this path.

    It is looked up once more only where the list was refused.
    """
    try:
        return await files.list_files(session, wanted)
    except InvalidConfiguration as error:
        if error.field != "path" or (await files.entry_of(session, wanted.path)) is not None:
            raise
        raise Http404 from error


class FilesView(SessionApiView):
    operations = {"GET": "list_files", "DELETE": "remove_file"}

    @endpoint(
        "list_session_files", parameters=(LIST,), answers={200: FilePageShape}, errors=(409, 502)
    )
    @deferred
    async def get(self, request: Request, session_id: UUID) -> HttpResponse:
        """List a folder of a session."""
        session = self.session(session_id)
        wanted = self.of(request, LIST)
        entries, after = await _list_or_404(session, wanted)
        return json_response(
            FilePageShape(
                entries=[entry_detail(entry) for entry in entries],
                next=next_page(request, after=after),
            )
        )

    @endpoint("remove_session_file", parameters=(FILE,), answers={204: None}, errors=(409, 502))
    @deferred
    async def delete(self, request: Request, session_id: UUID) -> HttpResponse:
        """Delete a file, or a folder with its content."""
        session = self.session(session_id)
        if not (await files.remove_file(session, self.of(request, FILE).path)):
            raise Http404
        return HttpResponse(status=204)


class FileContentView(SessionApiView):
    operations = {"GET": "read_file", "PUT": "write_file"}

    @endpoint(
        "read_session_file",
        parameters=(FILE,),
        answers={(200, "*/*"): BYTES, (206, "*/*"): BYTES},
        errors=(409, 416, 502),
    )
    @deferred
    async def get(self, request: Request, session_id: UUID) -> HttpResponseBase:
        """Download a file.

        The header `Range` may name one range.
        """
        session = self.session(session_id)
        path = self.of(request, FILE).path
        seen = await files.file_of(session, path)
        if seen is None:
            raise Http404
        # It may grow while it is read: no more is sent than was announced.
        return ranged_download(
            request.META.get("HTTP_RANGE", ""),
            seen.size,
            lambda start, length: at_most(files.read(session, path, start, length), length),
            path,
        )

    @endpoint(
        "write_session_file",
        parameters=(FILE,),
        request={"application/octet-stream": BYTES},
        answers={200: FileShape},
        errors=(409, 502),
    )
    @deferred
    async def put(self, request: Request, session_id: UUID) -> HttpResponse:
        """Write a file.

        Missing parent folders are created. Readers see the old file or the complete new one.
        """
        with copy_body(request) as content:
            session = self.session(session_id)
            path = self.of(request, FILE).path
            entry = await files.write_file(session, path, files.Rereadable(content))
        return json_response(entry_detail(entry))


class FileMoveView(SessionApiView):
    operations = {"POST": "move_file"}

    @endpoint("move_session_file", request=MOVE, answers={200: FileShape}, errors=(409, 502))
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Rename a file or folder."""
        session = self.session(session_id)
        wanted = MOVE.read(request.data)
        with rename_fields({"path": "from", "target": "to"}):
            moved = await files.move_file(session, wanted.source, wanted.to)
        return json_response(entry_detail(moved))


class FileMkdirView(SessionApiView):
    operations = {"POST": "make_directory"}

    @endpoint(
        "make_session_directory",
        request=MKDIR,
        answers={200: MadeShape, 201: MadeShape},
        errors=(409, 502),
    )
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Create a folder and its parents."""
        session = self.session(session_id)
        path = MKDIR.read(request.data).path
        made = await files.make_directory(session, path)
        return json_response(MadeShape(path=escape(path), created=made), 201 if made else 200)


class FileArchiveView(SessionApiView):
    operations = {"GET": "read_archive", "PUT": "write_archive"}

    @endpoint(
        "read_session_archive",
        parameters=(FOLDER,),
        answers={(200, "application/x-tar"): BYTES},
        errors=(409, 502),
    )
    @deferred
    async def get(self, request: Request, session_id: UUID) -> HttpResponseBase:
        """Download a folder as a tar archive."""
        session = self.session(session_id)
        path = self.of(request, FOLDER).path
        await _list_or_404(session, FileListing(path=path))
        response = download(files.read_archive(session, path), f"{path.strip('/') or 'files'}.tar")
        response["Content-Type"] = "application/x-tar"
        return response

    @endpoint(
        "write_session_archive",
        parameters=(FOLDER,),
        request={"application/x-tar": BYTES},
        answers={200: UnpackedShape},
        errors=(409, 502),
    )
    @deferred
    async def put(self, request: Request, session_id: UUID) -> HttpResponse:
        """Unpack a tar archive into a folder."""
        with copy_body(request) as content:
            session = self.session(session_id)
            path = self.of(request, FOLDER).path
            number = await files.unpack(session, path, files.Rereadable(content))
        return json_response(UnpackedShape(entries=number))


def copy_body(request: Request) -> IO[bytes]:
    """Copy the body to a file of our own: the server takes its own back when the view has
    returned."""
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
    @endpoint("watch_session_files", parameters=(FOLDER,), answers=EVENT_STREAM, errors=(409, 502))
    @deferred
    async def get(self, request: Request, session_id: UUID) -> HttpResponseBase:
        """Watch a folder of a session.

        Sends each change in the folder and below it when it happens: `created`, `modified`,
        `deleted`, `moved` or `attributes`, with the path, and for `moved` also the former path.
        Server-sent events if `text/event-stream` is accepted, else lines of JSON. The last event is
        `done`, or `error` with the reason. A watch does not count as use of the session.
        """
        session = self.session(session_id)
        path = self.of(request, FOLDER).path
        form = stream_form(request.headers.get("Accept", "")) or NDJSON
        watch = await watch_folder(session, path)
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
