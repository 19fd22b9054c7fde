"""`/files`: the bytes of a sandbox's files, for who has its token or a link that was signed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.api.base import answered_later
from executions.api.downloading import ranged_download
from executions.api.e2b import tokens
from executions.api.e2b.base import SandboxAuthentication, SandboxView, valid
from executions.api.e2b.credentials import SANDBOX_HEADER
from executions.api.e2b.errors import Refused, file_error, invalid, no_such_file
from executions.api.e2b.paths import require_user, shown, to_named
from executions.api.e2b.uploads import Sent, metadata_in, sent_in
from executions.api.rendering import json_response
from executions.api.session_files import at_most
from executions.kernel.coroutines import Waits
from executions.sessions import files
from executions.tenants.models import ApiKey


class TokenOrSignature(SandboxAuthentication):
    def authenticate(self, request: Request) -> tuple[None, ApiKey]:
        query = request.query_params
        if tokens.token_in(request.META) or "signature" not in query:
            return super().authenticate(request)
        operation = "read" if request.method in ("GET", "HEAD") else "write"
        named = str(request.META.get(SANDBOX_HEADER, ""))
        key, sandbox_id = tokens.holder_of_signature(query.dict(), operation, named)
        if key is None:
            # In E2B's words, which programs look for.
            is_late = tokens.has_expired(query.dict())
            told = "signature is already expired" if is_late else "invalid signature"
            raise Refused(401, "unauthenticated", told)
        # The link names no sandbox: what it was signed with does.
        request.META[SANDBOX_HEADER] = sandbox_id
        return None, valid(key, request)


class FilesView(SandboxView):
    authentication_classes = (TokenOrSignature,)
    operations = {"GET": "read_file", "POST": "write_file"}

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return file_error

    @answered_later
    def get(self, request: Request) -> Waits[HttpResponseBase]:
        session = self.session()
        require_user(request.query_params.get("username"))
        given = request.query_params.get("path", "")
        path = to_named(given)
        entry = yield from files.entry_of(session, path)
        if entry is None:
            raise no_such_file(given)
        if (kind := (entry.end or entry).type) != "file":
            raise invalid(f"path: {shown(path)!r} is not a regular file, but of type {kind}.")
        entry = yield from files.readable(session, path, entry)
        # It may grow while it is read: no more is sent than was announced.
        return ranged_download(
            request.META.get("HTTP_RANGE", ""),
            entry.size,
            lambda start, length: at_most(files.read(session, path, start, length), length),
            path,
        )

    @answered_later
    def post(self, request: Request) -> Waits[HttpResponse]:
        session = self.session()
        require_user(request.query_params.get("username"))
        with ExitStack() as held:
            metadata = metadata_in(request)
            sent: Sent = sent_in(request, request.query_params.get("path", ""))
            for _, content in sent:
                held.enter_context(content)
            wanted = [(to_named(path), content) for path, content in sent]
            written = []
            for path, content in wanted:
                body = files.Rereadable(content)
                yield from files.writing(session, path, body, metadata=metadata)
                name = shown(path)
                told = {"path": name, "name": name.rpartition("/")[2], "type": "file"}
                written.append({**told, "metadata": metadata} if metadata else told)
        return json_response(written)
