"""The pages of approvals: what waits, exactly, and the decision about it."""

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
from executions.models import Approval
from executions.services.policies.approvals import (
    DECIDE,
    AlreadyDecided,
    AskedBySame,
    decide,
    request_of,
)
from executions.services.presentation import visible
from executions.services.record import file_facts
from executions.services.requests import ExecutionRequest
from executions.services.tools.declaring import stored
from executions.text import to_json
from providers.admin.read_only import ReadOnly
from providers.errors import SandboxError
from providers.fields import DecryptionError

if TYPE_CHECKING:
    _ApprovalAdmin = admin.ModelAdmin[Approval]
else:
    _ApprovalAdmin = ModelAdmin


@admin.register(Approval)
class ApprovalAdmin(ReadOnly, _ApprovalAdmin):
    change_form_template = "admin/executions/approval/change_form.html"
    list_display = ("execution_id", "tenant_slug", "state", "asked_at", "decided_by", "decided_at")
    list_filter = ("status",)
    show_full_result_count = False
    fields = (
        *("execution", "tenant_slug", "state", "asked_at", "decided_by", "decided_at"),
        *("code_hash", "request_hash"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Approval]:
        rows = super().get_queryset(request).select_related("execution")
        kept = ("status", "finished_at")
        return rows.only(
            *(field.attname for field in Approval._meta.concrete_fields),
            *(f"execution__{name}" for name in kept),
        )

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.decide_view)
        return [
            path("<int:pk>/decide/", page, name="executions_approval_decide"),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        approval = self.get_object(request, object_id)
        may_decide = request.user.has_perm(DECIDE)
        may_see = may_decide or request.user.has_perm(VIEW_EXECUTION)
        context = {**(extra_context or {}), "may_decide": may_decide}
        waits = approval is not None and approval.status == Approval.Status.WAITING
        if approval is not None and waits and may_see:
            context |= _shown(approval)
        return super().change_view(request, object_id, form_url, context)

    def decide_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        if request.method != "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        approval = Approval.objects.filter(pk=pk).first()
        if approval is None:
            raise Http404
        approve = "approve" in request.POST
        try:
            decide(
                approval,
                request.user,
                approve=approve,
                request_hash=request.POST.get("request_hash", ""),
            )
        except (AlreadyDecided, AskedBySame) as error:
            messages.error(request, error.message)
        else:
            said = "approved" if approve else "rejected"
            messages.success(request, f"Execution {approval.execution_id} is {said}.")
        return redirect("admin:executions_approval_change", pk)

    @admin.display(description="state")
    def state(self, approval: Approval) -> str:
        waits = approval.status == Approval.Status.WAITING
        if waits and not approval.execution.is_open:
            return f"not decided; the execution is {approval.execution.get_status_display()}"
        return approval.get_status_display()


def _shown(approval: Approval) -> dict[str, Any]:
    """All of what would be run, with what cannot be seen spelled out."""
    try:
        wanted = request_of(approval)
    except SandboxError as error:
        return {"problem": error.message}
    except DecryptionError as error:
        return {"problem": f"Nobody can read what was asked for. {error}"}
    if wanted is None:
        return {"problem": "It has ended, or is not what was asked for: nothing will run."}
    findings = [
        (each.get("line"), each.get("kind"), visible(str(each.get("name"))))
        for each in approval.findings
    ]
    return {"wanted": _parts(wanted), "code": visible(wanted.code), "findings": findings}


def _parts(wanted: ExecutionRequest) -> list[tuple[str, str]]:
    parts = {
        "Language": wanted.language,
        "Entrypoint": wanted.entrypoint,
        "Timeout": "" if wanted.timeout is None else f"{wanted.timeout:g} s",
        "Not before": "" if wanted.run_at is None else wanted.run_at.isoformat(),
        "Session": f"{wanted.session} {wanted.context}" if wanted.session else "",
        "Provider": wanted.provider,
        "Tools": to_json(stored(wanted.tools)) if wanted.tools else "",
        "Asked for by": wanted.subject,
        "Arguments": wanted.arguments_json,
        # Its values may be secrets, and are shown to nobody.
        "Names of the environment": " ".join(sorted(wanted.env)),
        "Files": to_json([file_facts(file) for file in wanted.files]) if wanted.files else "",
    }
    return [(name, visible(value)) for name, value in parts.items() if value]
