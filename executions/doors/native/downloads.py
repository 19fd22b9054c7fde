"""Downloads of artifacts and files, also by links that expire."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from django.http import FileResponse, Http404, HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.views.decorators.http import require_safe

from executions.doors.native.frame import error_response
from executions.kernel.storage import INERT, disposition, safe_type
from executions.runs.artifacts import BadLink, artifact_for_token
from executions.runs.models import Artifact
from executions.sessions.files import range_of
from executions.sessions.models import Blob
from executions.sessions.storage import blobs, browse
from providers.errors import ProviderUnavailable

logger = logging.getLogger(__name__)


def download(
    pieces: Iterator[bytes], path: str, mime_type: str = "application/octet-stream"
) -> StreamingHttpResponse:
    """What is saved under the last part of `path`, cleaned."""
    headers = {**INERT, "Content-Disposition": disposition(path)}
    return StreamingHttpResponse(pieces, content_type=safe_type(mime_type), headers=headers)


def ranged_download(
    asked: str,
    size: int,
    read: Callable[[int, int], Iterator[bytes]],
    path: str,
    mime_type: str = "application/octet-stream",
) -> HttpResponseBase:
    """The one range of a file of `size` bytes that the header `asked` wants, or all of it; 416 for
    one behind its end. `read` gives so many bytes from an offset on.
    """
    try:
        part = range_of(asked, size)
    except ValueError as error:
        refused = error_response(416, "range_not_satisfiable", f"Range: {error}.", field="Range")
        refused["Content-Range"] = f"bytes */{size}"
        return refused
    start, length = part or (0, size)
    response = download(read(start, length), path, mime_type)
    response["Content-Length"] = str(length)
    response["Accept-Ranges"] = "bytes"
    if part is not None:
        response.status_code = 206
        response["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
    return response


def download_response(artifact: Artifact) -> FileResponse:
    """The bytes, for saving: neither run, rendered nor guessed at by a browser.

    Raises Http404 when they are not kept any more, and ProviderUnavailable when they cannot be
    fetched now.
    """
    if not artifact.file:
        raise Http404
    try:
        opened = artifact.file.open("rb")
    except FileNotFoundError:
        raise Http404 from None
    except OSError as error:
        logger.exception("artifact %s cannot be read", artifact.pk)
        raise ProviderUnavailable(
            "The artifact exists, but its storage does not answer. Try again later."
        ) from error
    response = FileResponse(
        opened, as_attachment=True, content_type=artifact.mime_type, headers=INERT
    )
    # A name may hold signs that turn text around.
    response["Content-Disposition"] = disposition(artifact.name)
    return response


@require_safe
def signed_download(request: HttpRequest, token: str) -> HttpResponseBase:
    """The artifact a signed link stands for, to whoever holds the link, until it expires."""
    return _for_holder(lambda: download_response(artifact_for_token(token)))


@require_safe
def workspace_download(request: HttpRequest, token: str) -> HttpResponseBase:
    """The saved file that a signed link stands for, to whoever holds it, until it expires."""
    return _for_holder(lambda: blob_response(request, *browse.target_of(token)))


def _for_holder(answer: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    try:
        return answer()
    except (BadLink, Http404):
        return error_response(404, "not_found", "The link is invalid or has expired.")
    except ProviderUnavailable as error:
        return error_response(error.http_status, error.code, error.message)


def blob_response(
    request: HttpRequest, blob: Blob, filename: str, mime_type: str
) -> HttpResponseBase:
    """As `download_response`, of a saved file: of the one range that is asked for, if any."""
    etag = f'"{blob.sha256}"'
    # Whoever goes on with another content than he began with gets all of this one.
    same = request.META.get("HTTP_IF_RANGE", etag) == etag
    asked = request.META.get("HTTP_RANGE", "") if same else ""
    response = ranged_download(asked, blob.size, partial(_open, blob), filename, mime_type)
    if response.status_code != 416:
        response["ETag"] = etag
    return response


def _open(blob: Blob, start: int, length: int) -> Iterator[bytes]:
    """What cannot be read is told before anything is sent."""
    pieces = blobs.read(blob, start, length)
    try:
        return chain([next(pieces, b"")], pieces)
    except FileNotFoundError:
        raise Http404 from None
    except OSError as error:
        logger.exception("blob %s cannot be read", blob.pk)
        raise ProviderUnavailable(
            "The file exists, but its storage does not answer. Try again later."
        ) from error
