"""Artifacts as downloads. Their content is hostile: it is never shown, only saved."""

from __future__ import annotations

from django.http import FileResponse, Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.views.decorators.http import require_safe

from executions.api.errors import error_response
from executions.models import Artifact
from executions.services.artifacts import BadLink, artifact_for_token


def download_response(artifact: Artifact) -> FileResponse:
    """The bytes, for saving: neither run, rendered nor guessed at by a browser.

    Raises Http404 when they are not kept any more.
    """
    if not artifact.file:
        raise Http404
    try:
        opened = artifact.file.open("rb")
    except FileNotFoundError:
        raise Http404 from None
    response = FileResponse(
        opened,
        as_attachment=True,
        filename=artifact.name.rpartition("/")[2] or "artifact",
        content_type=artifact.mime_type,
    )
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    response["Cache-Control"] = "private, no-store"
    return response


@require_safe
def signed_download(request: HttpRequest, token: str) -> HttpResponseBase:
    """The artifact a signed link stands for, to whoever holds the link, until it expires."""
    try:
        return download_response(artifact_for_token(token))
    except (BadLink, Http404):
        return error_response(404, "not_found", "The link is not valid, or not any more.")
