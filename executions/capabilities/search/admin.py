"""What the list of executions shows, as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, StreamingHttpResponse
from django.utils import timezone

from executions.admin.frame import ExecutionModelAdmin
from executions.capabilities.search.export import FORMATS, MIME_TYPES, export
from executions.ledger.append import append

if TYPE_CHECKING:
    from providers.admin_lists import KeysetList

PERMISSION = "executions.export_execution"
# Where in the list one was: the file has all of it.
_PLACES = ("p", "next", "previous", "from", "order")


def export_view(model_admin: ExecutionModelAdmin, request: HttpRequest) -> StreamingHttpResponse:
    """The filtered list in the format of `?format=`, with bodies when `?bodies=1` asks for them.

    Raises PermissionDenied, and BadRequest for a format or filter there is not.
    """
    if not (request.user.has_perm(PERMISSION) and model_admin.has_view_permission(request)):
        raise PermissionDenied
    filters = request.GET.copy()
    file_format = filters.get("format", "")
    bodies = filters.get("bodies") == "1"
    if file_format not in FORMATS:
        raise BadRequest(f"format must be one of: {', '.join(FORMATS)}")
    for name in ("format", "bodies", *_PLACES):
        filters.pop(name, None)
    request.GET = filters  # type: ignore[assignment]
    changelist = cast("KeysetList", model_admin.get_changelist_instance(request))
    if changelist.problems:
        raise BadRequest(" ".join(changelist.problems))
    executions = changelist.queryset
    content = {"format": file_format, "bodies": bodies, "filters": filters.dict()}
    append("export", "executions", content)
    pieces = export(executions, file_format, bodies=bodies)
    response = StreamingHttpResponse(pieces, content_type=MIME_TYPES[file_format])
    name = f"executions-{timezone.now():%Y%m%d-%H%M%S}.{file_format}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["Cache-Control"] = "private, no-store"
    response["X-Content-Type-Options"] = "nosniff"
    return response
