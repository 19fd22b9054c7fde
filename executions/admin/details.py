"""Views beneath an execution's page: its texts, receipt, artifacts and replay."""

from __future__ import annotations

import json
from typing import Any, TypeVar
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import FileResponse, Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from executions.admin.bases import ExecutionModelAdmin
from executions.admin.display import artifact_image_type
from executions.admin.execution_page import CANCEL, REPLAY
from executions.capabilities.playground.service import (
    Difference,
    differences_of,
    providers_for,
    recorded_request,
    replaying,
)
from executions.capabilities.search.admin import export_view
from executions.capabilities.search.service import remove_filter, save_filter
from executions.doors.native.deferred import answer
from executions.doors.native.downloads import download_response
from executions.kernel.audit import current_actor
from executions.kernel.coroutines import Waits
from executions.kernel.database import DatabaseAway
from executions.kernel.page_time import PageTime
from executions.kernel.storage import INERT
from executions.ledger.models import LedgerEntry
from executions.middleware import away_answer
from executions.runs.models import Artifact, Execution
from executions.runs.results import rich_outputs
from executions.runs.service import HasEnded, cancelling
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.hidden_characters import visible

# Of each of two outcomes' aspects side by side; whole, each can be downloaded.
_MOST_ROWS = 400
TEXTS = ("code", "arguments", "result", "outputs", "stdout", "stderr")

Response = TypeVar("Response", bound=HttpResponseBase)


class Details:
    """The views of one admin class. Each asks for the right to view, replaying for its own."""

    def __init__(self, model_admin: ExecutionModelAdmin) -> None:
        self.model_admin = model_admin

    @property
    def urls(self) -> list[URLPattern]:
        wrap = self.model_admin.admin_site.admin_view
        one = "<uuid:execution_id>"
        return [
            path("export/", wrap(self.export), name="executions_export"),
            path("filters/", wrap(self.save_filter), name="executions_save_filter"),
            path(
                "filters/<int:filter_id>/remove",
                wrap(self.remove_filter),
                name="executions_remove_filter",
            ),
            path(f"{one}/text/<str:name>", wrap(self.text), name="executions_text"),
            path(f"{one}/receipt", wrap(self.receipt), name="executions_receipt"),
            path(f"{one}/cancel", wrap(self.cancel), name="executions_cancel"),
            path(f"{one}/replay", wrap(self.replay), name="executions_replay"),
            path(
                f"{one}/artifacts/<int:artifact_id>",
                wrap(self.artifact),
                name="executions_artifact",
            ),
            path(
                f"{one}/artifacts/<int:artifact_id>/image",
                wrap(self.image),
                name="executions_artifact_image",
            ),
            path(
                f"{one}/outputs/<int:number>/image",
                wrap(self.output_image),
                name="executions_output_image",
            ),
        ]

    def export(self, request: HttpRequest) -> HttpResponseBase:
        return export_view(self.model_admin, request)

    def save_filter(self, request: HttpRequest) -> HttpResponse:
        """Keep the list's query under a name, and return to that list."""
        self._only_viewers_post(request)
        query = request.POST.get("query", "")
        try:
            saved = save_filter(
                request.user,
                request.POST.get("name", ""),
                query,
                shared=request.POST.get("shared") == "1",
            )
        except InvalidConfiguration as error:
            messages.error(request, error.message)
        else:
            messages.success(request, f"The filter {saved.name!r} was saved.")
            query = saved.query
        return redirect(f"{reverse('admin:executions_execution_changelist')}?{query.lstrip('?')}")

    def remove_filter(self, request: HttpRequest, filter_id: int) -> HttpResponse:
        self._only_viewers_post(request)
        if not remove_filter(request.user, filter_id):
            raise Http404
        return redirect("admin:executions_execution_changelist")

    def _only_viewers_post(self, request: HttpRequest) -> None:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        if request.method != "POST":
            raise Http404

    def text(self, request: HttpRequest, execution_id: UUID, name: str) -> HttpResponse:
        """A text of the record as it is stored, for saving."""
        if name not in TEXTS:
            raise Http404
        execution = self._execution(request, execution_id)
        response = HttpResponse(getattr(execution, name), content_type="text/plain; charset=utf-8")
        return _for_saving(response, f"{execution_id}-{name}.txt")

    def receipt(self, request: HttpRequest, execution_id: UUID) -> HttpResponse:
        self._execution(request, execution_id)
        entry = LedgerEntry.objects.filter(execution_id=execution_id).first()
        if entry is None:
            raise Http404
        text = json.dumps(entry.receipt, indent=2)
        response = HttpResponse(text, content_type="application/json")
        return _for_saving(response, f"{execution_id}-receipt.json")

    def artifact(
        self, request: HttpRequest, execution_id: UUID, artifact_id: int
    ) -> HttpResponseBase:
        try:
            return download_response(self._artifact(request, execution_id, artifact_id))
        except ProviderUnavailable as error:
            return HttpResponse(error.message, status=503, content_type="text/plain")

    def image(self, request: HttpRequest, execution_id: UUID, artifact_id: int) -> HttpResponseBase:
        """A raster image for the page; its content decides whether it is one, not its name."""
        artifact = self._artifact(request, execution_id, artifact_id)
        mime_type = artifact_image_type(artifact) if artifact.file else ""
        if not mime_type:
            raise Http404
        try:
            return _inert(FileResponse(artifact.file.open("rb"), content_type=mime_type))
        except OSError:
            raise Http404 from None

    def output_image(
        self, request: HttpRequest, execution_id: UUID, number: int
    ) -> HttpResponseBase:
        """A plot that the program showed; its content decides whether it is one."""
        outputs = rich_outputs(self._execution(request, execution_id))
        if number >= len(outputs) or not outputs[number].image:
            raise Http404
        output = outputs[number]
        return _inert(HttpResponse(output.image, content_type=output.mime_type))

    def cancel(self, request: HttpRequest, execution_id: UUID) -> HttpResponseBase:
        """Ends one that is queued or runs, and returns to its page."""
        if not request.user.has_perm(CANCEL):
            raise PermissionDenied
        if request.method != "POST":
            raise Http404
        execution = self._execution(request, execution_id)
        return answer(request, told(request, self._cancel(request, execution)))

    def _cancel(self, request: HttpRequest, execution: Execution) -> Waits[HttpResponse]:
        try:
            yield from cancelling(execution, current_actor())
        except HasEnded as error:
            messages.error(request, error.message)
        return redirect("admin:executions_execution_change", execution.pk)

    def replay(self, request: HttpRequest, execution_id: UUID) -> HttpResponseBase:
        """Asks on which provider, runs it there, and shows both outcomes side by side."""
        if not request.user.has_perm(REPLAY):
            raise PermissionDenied
        execution = self._execution(request, execution_id)
        if request.method == "POST":
            return answer(request, told(request, self._replay(request, execution)))
        return self._comparison(request, execution)

    def _replay(self, request: HttpRequest, execution: Execution) -> Waits[HttpResponse]:
        try:
            outcome = yield from replaying(execution, request.POST.get("provider", ""))
        except DatabaseAway:
            raise
        except SandboxError as error:
            # Refused: it comes before anything is waited for, so that the message is still stored.
            messages.error(request, f"{error.code}: {error.message}")
            return redirect("admin:executions_replay", execution.pk)
        if isinstance(outcome.error, DatabaseAway):
            raise outcome.error
        return redirect(f"{request.path}?with={outcome.execution.pk}")

    def _comparison(self, request: HttpRequest, execution: Execution) -> HttpResponseBase:
        replays = list(execution.replays.defer("pending", "code", "arguments").order_by("-id")[:20])
        chosen = request.GET.get("with", "")
        other = next((one for one in replays if str(one.pk) == chosen), None)
        try:
            recorded_request(execution)
            refused = ""
        except SandboxError as error:
            refused = error.message
        context: dict[str, Any] = {
            **self.model_admin.admin_site.each_context(request),
            "title": "Replay",
            "opts": self.model_admin.opts,
            "execution": execution,
            "providers": providers_for(execution),
            "refused": refused,
            "replays": replays,
            "other": other,
            "differences": _shown(execution, other) if other else [],
        }
        return TemplateResponse(request, "admin/executions/execution/replay.html", context)

    def _execution(self, request: HttpRequest, execution_id: UUID) -> Execution:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        execution = self.model_admin.get_queryset(request).filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        return execution

    def _artifact(self, request: HttpRequest, execution_id: UUID, artifact_id: int) -> Artifact:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        artifact = Artifact.objects.filter(pk=artifact_id, execution=execution_id).first()
        if artifact is None:
            raise Http404
        return artifact


def told(request: HttpRequest, work: Waits[HttpResponse]) -> Waits[HttpResponse]:
    """The work, whose failure because of the database is a page, also when it comes later."""
    try:
        return (yield from work)
    except Exception as error:
        if (away := away_answer(request, error)) is None:
            raise
        return away


def _shown(before: Execution, after: Execution) -> list[dict[str, Any]]:
    page = PageTime()
    return [_shown_difference(each, page) for each in differences_of(before, after)]


def _shown_difference(difference: Difference, page: PageTime) -> dict[str, Any]:
    lines = difference.lines(page)
    return {
        "name": difference.name,
        "is_same": difference.is_same,
        "matters": difference.matters,
        "lines": [
            {
                "kind": line.kind,
                "before": None if line.before is None else visible(line.before[:500]),
                "after": None if line.after is None else visible(line.after[:500]),
            }
            for line in lines[:_MOST_ROWS]
        ],
        "is_cut": difference.is_cut or len(lines) > _MOST_ROWS,
    }


def _for_saving(response: HttpResponse, name: str) -> HttpResponse:
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return _inert(response)


def _inert(response: Response) -> Response:
    for name, value in INERT.items():
        response[name] = value
    return response
