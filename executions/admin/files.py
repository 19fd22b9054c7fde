"""The pages of saved files and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.defaultfilters import filesizeformat
from django.template.loader import render_to_string
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from executions.admin.executions import BoundedPaginator, SessionTenantFilter
from executions.admin.frame import SnapshotModelAdmin, link_to, named_in, shown_entry
from executions.doors.native.downloads import download
from executions.kernel.storage import INERT
from executions.kernel.text import from_text, to_text
from executions.sessions.models import Blob, Snapshot, Workspace
from executions.sessions.storage import browse
from executions.sessions.storage.browse import image_of, preview_of
from providers.admin_pages import ReadOnly
from providers.errors import SandboxError
from providers.hidden_characters import visible
from providers.runtime.guest.names import escape

MOST_LISTED = 500


class SavedFiles:
    """The views of one ModelAdmin whose rows have a workspace. They take the right to view."""

    def __init__(self, model_admin: Any, workspace_of: Callable[[UUID], Workspace | None]) -> None:
        self.model_admin = model_admin
        self._workspace_of = workspace_of
        self._name = f"executions_{model_admin.model._meta.model_name}_saved"

    @property
    def urls(self) -> list[URLPattern]:
        wrap = self.model_admin.admin_site.admin_view
        return [
            path("<uuid:pk>/saved", wrap(self.folder), name=self._name),
            path("<uuid:pk>/saved/file", wrap(self.file), name=f"{self._name}_file"),
            path("<uuid:pk>/saved/image", wrap(self.image), name=f"{self._name}_image"),
            path("<uuid:pk>/saved/download", wrap(self.download), name=f"{self._name}_download"),
        ]

    def folder(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """What is in one of its folders."""
        workspace = self._workspace(request, pk)
        name, after = named_in(request), from_text(request.GET.get("after", ""))

        def found() -> dict[str, Any]:
            entries, more = browse.list_folder(workspace, name, 1, after, MOST_LISTED)
            return {
                "folder": visible(escape(name)),
                "above": link_to(name.rpartition("/")[0]) if name else "",
                "entries": [
                    {**shown_entry(each), "file": self._link(pk, "_file", each.path)}
                    for each in entries
                ],
                "following": link_to(name, to_text(entries[-1].path)) if more else "",
                "workspace": workspace,
            }

        return self._page(request, pk, found)

    def file(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """The beginning of one of its files."""
        workspace, name = self._workspace(request, pk), named_in(request)

        def found() -> dict[str, Any]:
            blob = browse.blob_at(workspace, name)
            above = name.rpartition("/")[0]
            return {
                "file": visible(escape(name)),
                "folder_link": reverse(f"admin:{self._name}", args=[pk]) + link_to(above),
                "blob": blob,
                "preview": preview_of(blob, name),
                "image": self._link(pk, "_image", name),
                "download": self._link(pk, "_download", name),
            }

        return self._page(request, pk, found)

    def image(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """A raster image, as what its bytes are, whatever it is called."""
        blob = self._blob(request, pk)
        if not (mime_type := image_of(blob)):
            raise Http404
        return StreamingHttpResponse(_begun(blob), content_type=mime_type, headers=INERT)

    def download(self, request: HttpRequest, pk: UUID) -> HttpResponseBase:
        """A file for saving: neither run, rendered nor guessed at by a browser."""
        blob = self._blob(request, pk)
        response = download(_begun(blob), named_in(request))
        response["Content-Length"] = str(blob.size)
        return response

    def _workspace(self, request: HttpRequest, pk: UUID) -> Workspace | None:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        if request.method != "GET" or not self.model_admin.model.objects.filter(pk=pk).exists():
            raise Http404
        return self._workspace_of(pk)

    def _blob(self, request: HttpRequest, pk: UUID) -> Blob:
        workspace = self._workspace(request, pk)
        try:
            return browse.blob_at(workspace, named_in(request))
        except SandboxError:
            raise Http404 from None

    def _link(self, pk: UUID, view: str, name: str) -> str:
        return reverse(f"admin:{self._name}{view}", args=[pk]) + link_to(name)

    def _page(
        self, request: HttpRequest, pk: UUID, find: Callable[[], dict[str, Any]]
    ) -> HttpResponse:
        opts = self.model_admin.opts
        context: dict[str, Any] = {
            **self.model_admin.admin_site.each_context(request),
            "opts": opts,
            "title": "Saved files",
            "original": self.model_admin.model.objects.get(pk=pk),
            "pk": pk,
            "row_url": reverse(f"admin:executions_{opts.model_name}_change", args=[pk]),
        }
        status = 200
        try:
            context |= find()
        except SandboxError as error:
            status = error.http_status
            context["error"] = f"{error.code}: {visible(error.message)}"
        page = render_to_string("admin/executions/saved_files.html", context, request=request)
        return HttpResponse(page, status=status, headers={"Cache-Control": "private, no-store"})


def _begun(blob: Blob) -> Any:
    """Its pieces. What cannot be read is told before anything is sent."""
    pieces = browse.read(blob)
    try:
        return chain([next(pieces, b"")], pieces)
    except SandboxError:
        raise Http404 from None


@admin.register(Snapshot)
class SnapshotAdmin(ReadOnly, SnapshotModelAdmin):
    """The files of sessions as they were once. For looking at; their tenants remove them."""

    list_display = ("short_id", "shown_name", "tenant_slug", "files", "size", "owner", "created_at")
    list_filter = (SessionTenantFilter,)
    ordering = ("-id",)
    sortable_by = ()
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    fields = (
        *("id", "shown_name", "tenant_slug", "owner", "shown_source", "files", "size"),
        *("created_at", "shown_files"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Snapshot]:
        return super().get_queryset(request).filter(workspace__isnull=False)

    def get_urls(self) -> list[URLPattern]:
        views = SavedFiles(self, lambda pk: Workspace.objects.filter(snapshot=pk).first())
        return [*views.urls, *super().get_urls()]

    @admin.display(description="id")
    def short_id(self, snapshot: Snapshot) -> str:
        return str(snapshot.pk)

    @admin.display(description="name")
    def shown_name(self, snapshot: Snapshot) -> str:
        return visible(snapshot.name) or "-"

    @admin.display(description="size")
    def size(self, snapshot: Snapshot) -> str:
        return filesizeformat(snapshot.bytes)

    @admin.display(description="owner")
    def owner(self, snapshot: Snapshot) -> str:
        both = (snapshot.api_key_name, snapshot.api_key_prefix)
        return visible(" ".join(filter(None, both))) or "-"

    @admin.display(description="session")
    def shown_source(self, snapshot: Snapshot) -> SafeString:
        url = reverse("admin:executions_session_change", args=[snapshot.source])
        return format_html('<a href="{}">{}</a>', url, snapshot.source)

    @admin.display(description="saved files")
    def shown_files(self, snapshot: Any) -> SafeString:
        url = reverse("admin:executions_snapshot_saved", args=[snapshot.pk])
        return format_html('<a href="{}">Saved files</a>', url)
