"""Changes that wait for a second administrator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString

from providers.admin.pages import PendingChangeModelAdmin, badge, diff_table, subject_name
from providers.admin_pages import ReadOnly, only_visible
from providers.errors import InvalidConfiguration
from providers.models import PendingChange
from providers.services import ConfigurationConflict, NotPermitted, approve, approvers, reject
from providers.services.guarded_rows import NotAllowed

_TONES = {"waiting": "warn", "approved": "good", "rejected": "bad"}


@admin.register(PendingChange)
class PendingChangeAdmin(ReadOnly, PendingChangeModelAdmin):
    list_display = ("what", "state", "author", "reason", "created_at", "decided_by", "decided_at")
    list_filter = ("status",)
    search_fields = ("subject", "shown_as", "author", "reason")
    show_full_result_count = False
    change_form_template = "admin/providers/pendingchange/change_form.html"
    fields = readonly_fields = (
        "what",
        "state",
        "author",
        "reason",
        "created_at",
        "decided_by",
        "decided_at",
        "difference",
    )

    def may_decide(self, request: HttpRequest) -> bool:
        return request.user.has_perm("providers.change_pendingchange")

    def get_queryset(self, request: HttpRequest) -> QuerySet[PendingChange]:
        return only_visible(request, super().get_queryset(request).defer("config"))

    @admin.display(description="change")
    def what(self, change: PendingChange) -> str:
        return f"{change.get_action_display()} {subject_name(change.subject, change.shown_as)}"

    @admin.display(description="status", ordering="status")
    def state(self, change: PendingChange) -> SafeString:
        return badge(change.get_status_display(), _TONES[change.status])

    @admin.display(description="changes")
    def difference(self, change: PendingChange) -> SafeString:
        return diff_table(change.diff)

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("<int:pk>/approve/", wrap(self.approve_view), name="providers_approve"),
            path("<int:pk>/reject/", wrap(self.reject_view), name="providers_reject"),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        change = self.get_object(request, object_id)
        waiting = change is not None and change.status == PendingChange.Status.WAITING
        decides = waiting and self.may_decide(request)
        why_not = approvers.why_not(change, request.user) if change and decides else ""
        context = {
            "may_approve": decides and not why_not,
            "may_reject": decides,
            "why_not": why_not,
            "is_own": change is not None and change.author_id == request.user.pk,
            "change_row": change,
        }
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), **context}
        )

    def approve_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        return self._decide(
            request, pk, lambda change, who: approve(change, approver=who), "Approved"
        )

    def reject_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        return self._decide(
            request, pk, lambda change, who: reject(change, decider=who), "Rejected"
        )

    def _decide(
        self,
        request: HttpRequest,
        pk: int,
        decide: Callable[[PendingChange, Any], None],
        done: str,
    ) -> HttpResponse:
        if not self.may_decide(request):
            raise PermissionDenied
        change = self.get_queryset(request).filter(pk=pk).first()
        if change is None:
            raise Http404
        back = HttpResponseRedirect(reverse("admin:providers_pendingchange_change", args=[pk]))
        # Where somebody lands whose session had ended when she pressed the button.
        if request.method != "POST":
            return back
        try:
            decide(change, request.user)
        except (
            NotAllowed,
            NotPermitted,
            InvalidConfiguration,
            ConfigurationConflict,
        ) as error:
            self.log_change(request, change, f"Not {done.lower()}. {error}")
            self.message_user(request, f"Nothing was changed. {error}", messages.ERROR)
        else:
            self.log_change(request, change, f"{done}.")
            self.message_user(request, f"{done}: {self.what(change)}.", messages.SUCCESS)
        return back
