from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import URLPattern, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from executions.admin.bases import SnapshotModelAdmin
from executions.admin.filters import BoundedPaginator, SessionTenantFilter
from executions.admin.saved_files import SavedFiles
from executions.sessions.storage.models import Snapshot, Workspace
from providers.admin.read_only import ReadOnly
from providers.hidden_characters import visible


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
