"""Calls of tools: those that are held until somebody approves them, exactly, and all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from unfold.admin import ModelAdmin

from executions.admin.policy import VIEW_EXECUTION
from executions.models import ToolCall
from executions.services.policies.approvals import DECIDE, AlreadyDecided, AskedBySame
from executions.services.presentation import visible
from executions.services.tools.calls import decide, is_entered
from executions.services.tools.desk import look_now
from providers.admin.read_only import ReadOnly

if TYPE_CHECKING:
    _ToolCallAdmin = admin.ModelAdmin[ToolCall]
else:
    _ToolCallAdmin = ModelAdmin


@admin.register(ToolCall)
class ToolCallAdmin(ReadOnly, _ToolCallAdmin):
    change_form_template = "admin/executions/toolcall/change_form.html"
    list_display = ("name", "tenant_slug", "shown_state", "asked_at", "decided_by", "answered_by")
    list_filter = ("state", "writes")
    show_full_result_count = False
    fields = (
        *("execution", "tenant_slug", "name", "writes", "shown_state", "asked_at"),
        *("decided_by", "decided_at", "answered_by", "answered_at", "arguments_hash"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[ToolCall]:
        rows = super().get_queryset(request).select_related("execution")
        return rows.only(
            *(field.attname for field in ToolCall._meta.concrete_fields), "execution__finished_at"
        )

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.decide_view)
        return [
            path("<uuid:pk>/decide/", page, name="executions_toolcall_decide"),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        call = self.get_object(request, object_id)
        may_decide = request.user.has_perm(DECIDE)
        context = {**(extra_context or {}), "may_decide": may_decide}
        if call is not None and (may_decide or request.user.has_perm(VIEW_EXECUTION)):
            context |= {"arguments": visible(call.arguments), "answer": visible(call.answer)}
            context["waits"] = call.state == ToolCall.State.HELD and not call.execution.finished_at
            # What is shown is what would be approved.
            context["is_altered"] = context["waits"] and not is_entered(call)
        return super().change_view(request, object_id, form_url, context)

    def decide_view(self, request: HttpRequest, pk: Any) -> HttpResponse:
        if request.method != "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        call = ToolCall.objects.filter(pk=pk).first()
        if call is None:
            raise Http404
        approve = "approve" in request.POST
        arguments_hash = request.POST.get("arguments_hash", "")
        try:
            decide(call, request.user, approve=approve, arguments_hash=arguments_hash)
        except (AlreadyDecided, AskedBySame) as error:
            messages.error(request, error.message)
        else:
            look_now()
            said = "handed out" if approve else "rejected"
            messages.success(request, f"The call of {call.name} is {said}.")
        return redirect("admin:executions_toolcall_change", pk)

    @admin.display(description="state")
    def shown_state(self, call: ToolCall) -> str:
        if call.state in ToolCall.OPEN and call.execution.finished_at is not None:
            return "Over with its run"
        return call.get_state_display()
