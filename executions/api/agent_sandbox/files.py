"""A conversation's files: sent, fetched, listed, and linked to."""

from __future__ import annotations

from tempfile import TemporaryFile
from typing import IO, Any

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request

from executions.api import schema
from executions.api.agent_sandbox.base import (
    TAGS,
    AgentSandboxView,
    failed,
    file_details,
)
from executions.api.agent_sandbox.requests import (
    FETCH,
    LINK,
    OF_CONVERSATION,
    UploadRequest,
    seconds_of,
)
from executions.api.base import answered_later
from executions.api.rendering import json_response
from executions.capabilities.fetching.filenames import clean_name
from executions.kernel.bodies import LARGE
from executions.kernel.coroutines import Waits
from executions.kernel.database import DatabaseAway
from executions.kernel.declarations import Query, refuse
from executions.kernel.text import storable
from executions.services import conversation_files, conversations
from executions.services.conversations import path_of
from executions.sessions.models import Session
from providers.errors import InvalidConfiguration, SandboxError
from providers.guest.names import escape

# The fields of a form are texts, as those of a query are.
UPLOAD: Query[Any] = Query(UploadRequest)


class _FilesView(AgentSandboxView):
    def detail_of(
        self, request: Request, session: Session | None, path: str, expires_in: int | None
    ) -> dict[str, Any] | None:
        """A file of the conversation, if it is saved."""
        saved = conversations.file(session, path) if session is not None else None
        found = [saved] if saved is not None else []
        details = file_details(request, self.api_key.tenant, found, seconds_of(expires_in))
        return details[0] if details else None


class UploadView(_FilesView):
    parser_classes: Any = (MultiPartParser,)

    @extend_schema(
        operation_id="agent_sandbox_upload",
        summary="Upload a file to a conversation",
        tags=TAGS,
        request={
            "multipart/form-data": {
                "type": "object",
                "properties": {
                    **UPLOAD.schema()["properties"],
                    "file": {"type": "string", "format": "binary"},
                },
                "required": ["user_id", "file"],
                "additionalProperties": False,
            }
        },
        responses={
            200: schema.AgentSandboxUploadSerializer,
            **schema.details(401, 413, 415),
        },
    )
    @answered_later
    def post(self, request: Request) -> Waits[HttpResponse]:
        form: Any = request.data
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        wanted = UPLOAD.read(fields)
        sent = request.FILES.get("file")
        if not isinstance(sent, UploadedFile) or len(request.FILES) != 1:
            refuse("file", "Send one file under this name.")
        path = path_of("path", wanted.path or clean_name(sent.name or ""))
        conversation_files.refuse_too_large(sent.size or 0)
        with _kept(sent) as content:
            session = yield from conversations.held(self.caller(), wanted.conversation)
            yield from conversation_files.putting(session, path, content)
        detail = self.detail_of(request, session, path, wanted.presign_expires_in)
        if detail is None:
            return json_response(
                {"detail": "The file is in the sandbox, but it could not be saved. Try again."}, 503
            )
        return json_response({"status": "success", **detail, "container_id": str(session.pk)})


def _kept(sent: UploadedFile[Any]) -> IO[bytes]:
    """In a file of our own: the server takes its own back when the view has returned."""
    kept: IO[bytes] = TemporaryFile()  # noqa: SIM115
    for piece in sent.chunks():
        kept.write(piece)
    kept.seek(0)
    return kept


class UploadUrlsView(AgentSandboxView):
    bounds = LARGE

    @extend_schema(
        operation_id="agent_sandbox_upload_urls",
        summary="Fetch files by URL into a conversation",
        description="Each file that can be fetched is stored, even if others fail.",
        tags=TAGS,
        request=FETCH,
        responses={200: schema.AgentSandboxFetchedSerializer, **schema.details(401, 413, 415)},
    )
    @answered_later
    def post(self, request: Request) -> Waits[HttpResponse]:
        wanted = FETCH.read(request.data)
        folder = path_of("dest_dir", wanted.dest_dir.rstrip("/")) if wanted.dest_dir else ""
        try:
            session = yield from conversations.held(self.caller(), wanted.conversation)
            arrived = yield from conversation_files.fetching(session, wanted.urls, folder)
        except (DatabaseAway, InvalidConfiguration):
            raise
        except SandboxError as error:
            return failed(error, status="error", uploaded=[], errors=[])
        failures = [{"source_url": storable(url), "error": text} for url, text in arrived.failures]
        status = "partial_success" if failures else "success"
        return json_response(
            {
                "status": status if arrived.paths else "error",
                "uploaded": [escape(path) for path in arrived.paths],
                "errors": failures,
            }
        )


class ListView(AgentSandboxView):
    @extend_schema(
        operation_id="agent_sandbox_list_files",
        summary="List the saved files of a conversation",
        tags=TAGS,
        parameters=schema.parameters(OF_CONVERSATION),
        responses={200: schema.AgentSandboxFilesSerializer, **schema.details(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        wanted = OF_CONVERSATION.read(request.query_params.dict())
        session = conversations.find_files(self.api_key.tenant, wanted.conversation)
        found = conversations.files(session) if session is not None else ()
        return json_response(
            {
                "files": [
                    {
                        "path": escape(each.path),
                        "size_bytes": each.row.size,
                        "mtime": int(each.row.modified),
                    }
                    for each in found
                ]
            }
        )


class DownloadUrlView(_FilesView):
    @extend_schema(
        operation_id="agent_sandbox_download_url",
        summary="Create a link to a saved file",
        tags=TAGS,
        parameters=schema.parameters(LINK),
        responses={200: schema.AgentSandboxLinkSerializer, **schema.details(400, 401, 404)},
    )
    def get(self, request: Request) -> HttpResponse:
        wanted = LINK.read(request.query_params.dict())
        path = path_of("path", wanted.path)
        session = conversations.find_files(self.api_key.tenant, wanted.conversation)
        detail = self.detail_of(request, session, path, wanted.expires_in)
        if detail is None:
            return json_response({"detail": "File not found"}, 404)
        return json_response(
            {
                "status": "success",
                "path": detail["path"],
                "expires_in": seconds_of(wanted.expires_in),
                "download_url": detail["download_url"],
            }
        )
