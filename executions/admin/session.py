from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from executions.admin.bases import SessionModelAdmin
from executions.admin.filters import (
    FromField,
    SessionConversationField,
    SessionKeyField,
    SessionProviderField,
    SessionStateField,
    SessionTenantField,
    UntilField,
)
from executions.admin.saved_files import SavedFiles
from executions.admin.session_views import OPERATE, SessionViews
from executions.admin.transcript import transcript_of
from executions.kernel.presentation import shown
from executions.kernel.text import to_json
from executions.sessions.models import Session
from executions.sessions.queries import expires_at
from executions.sessions.storage.models import Workspace
from providers.admin.keyset import KeysetAdmin, KeysetList
from providers.admin.read_only import ReadOnly
from providers.hidden_characters import visible
from providers.moments import shown_moment

_BADGES = {Session.State.OPEN: "good", Session.State.ASLEEP: "warn", Session.State.LOST: "bad"}


class SessionList(KeysetList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer("metadata", "contexts")


@admin.register(Session)
class SessionAdmin(ReadOnly, KeysetAdmin, SessionModelAdmin):
    """Sandboxes that stay, and what was done in them. They are acted on through services alone."""

    list_display = (
        *("short_id", "shown_created", "shown_state", "shown_tenant", "where", "last_use"),
        "owner",
    )
    list_filter = (
        *(FromField, UntilField, SessionStateField, SessionTenantField, SessionProviderField),
        *(SessionKeyField, SessionConversationField),
    )
    ordering = ("-id",)
    show_facets = admin.ShowFacets.NEVER
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("id", "shown_name", "shown_state", "shown_end", "age", "last_use"),
                    *("shown_expiry", "idle_seconds", "max_seconds", "turns", "shown_contexts"),
                )
            },
        ),
        ("Owner", {"fields": ("shown_tenant", "owner", "shown_metadata")}),
        (
            "Sandbox",
            {
                "fields": (
                    *("provider", "config_version", "runtime", "isolation", "sharing"),
                    *("language", "template", "created_at", "used_at", "closed_at", "released_at"),
                )
            },
        ),
    )

    class Media:
        css = {"all": ("executions/record.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Session]:
        return super().get_queryset(request).defer("env", "ref")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[KeysetList]:
        return SessionList

    def get_urls(self) -> list[URLPattern]:
        saved = SavedFiles(self, lambda pk: Workspace.objects.filter(session=pk).first())
        return [*SessionViews(self).urls, *saved.urls, *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        context: dict[str, Any] = {"may_operate": request.user.has_perm(OPERATE)}
        if self.has_view_permission(request):
            context["transcript"] = transcript_of(object_id, request.GET.get("page", ""))
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), **context}
        )

    @admin.display(description="id")
    def short_id(self, session: Session) -> SafeString:
        """With the name that it was given, if any."""
        name = format_html(' <span class="remark">{}</span>', visible(session.name))
        return format_html(
            '<span class="one-line">{}</span>{}', session.pk, name if session.name else ""
        )

    @admin.display(description="status")
    def shown_state(self, session: Session) -> SafeString:
        kind = _BADGES.get(Session.State(session.state), "quiet")
        return format_html(
            '<span class="badge badge-{}">{}</span>', kind, session.get_state_display()
        )

    @admin.display(description="name")
    def shown_name(self, session: Session) -> str:
        return visible(session.name)

    @admin.display(description="provider")
    def where(self, session: Session) -> str:
        return " ".join(filter(None, (session.provider, visible(session.runtime))))

    @admin.display(description="age")
    def age(self, session: Session) -> str:
        return timesince(session.created_at, session.closed_at or timezone.now(), depth=1)

    @admin.display(description="last use")
    def last_use(self, session: Session) -> SafeString | str:
        return shown_moment(session.used_at)

    @admin.display(description="tenant")
    def shown_tenant(self, session: Session) -> str:
        return session.tenant_slug

    @admin.display(description="created")
    def shown_created(self, session: Session) -> SafeString | str:
        return shown_moment(session.created_at)

    @admin.display(description="owner")
    def owner(self, session: Session) -> str:
        key = " ".join(filter(None, (session.api_key_name, session.api_key_prefix)))
        for_whom = f"for {session.subject}" if session.subject else ""
        return visible(" ".join(filter(None, (key, for_whom))))

    @admin.display(description="ends")
    def shown_expiry(self, session: Session) -> SafeString | str:
        if session.closed_at is not None:
            return "Ended."
        return format_html("{} (if not used)", shown_moment(expires_at(session)))

    @admin.display(description="end reason")
    def shown_end(self, session: Session) -> str:
        return visible(session.closed_because)

    @admin.display(description="contexts")
    def shown_contexts(self, session: Session) -> SafeString | str:
        return (
            format_html_join(
                "",
                "<div>{}: {}{}</div>",
                (
                    (
                        visible(c["id"]),
                        visible(c["language"]),
                        visible(c["cwd"] and f" in {c['cwd']}"),
                    )
                    for c in session.contexts
                ),
            )
            or "-"
        )

    @admin.display(description="metadata")
    def shown_metadata(self, session: Session) -> SafeString | str:
        if not session.metadata:
            return "-"
        return format_html('<pre class="record">{}</pre>', shown(to_json(session.metadata)).text)
