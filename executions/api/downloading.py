"""Bytes for saving: neither run, rendered nor guessed at by a browser, as a whole or a range."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase

from executions.api.errors import error_response
from executions.kernel.storage import INERT, disposition, safe_type
from executions.sessions.files import range_of


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
