"""The pages of policies and of approvals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from unfold.admin import ModelAdmin
from unfold.widgets import UnfoldAdminTextInputWidget

from executions.admin.frame import DecidedByHand, refuse_unknown, tenant_choice
from executions.capabilities.policies.approvals import decide, request_of
from executions.capabilities.policies.models import Policy
from executions.capabilities.policies.service import (
    DAYS,
    MOST_DAYS,
    RULES,
    draft_of,
    dry_run,
    policy_from,
    presets,
    put_in_force,
)
from executions.kernel.text import to_json
from executions.runs.models import Approval
from executions.runs.record import file_facts
from executions.runs.requests import ExecutionRequest
from executions.runs.tool_schemas import to_stored
from providers.admin_pages import GuardedAdmin
from providers.errors import SandboxError
from providers.fields import DecryptionError
from providers.hidden_characters import visible

VIEW_EXECUTION = "executions.view_execution"

if TYPE_CHECKING:
    _PolicyAdmin = admin.ModelAdmin[Policy]
else:
    _PolicyAdmin = ModelAdmin


class DaysForm(forms.Form):
    days = forms.IntegerField(
        label="Days of past executions", min_value=1, max_value=MOST_DAYS, initial=DAYS
    )


@admin.register(Policy)
class PolicyAdmin(GuardedAdmin, _PolicyAdmin):
    """What is added is a draft. One in force can be changed where it stands, as every guarded row;
    a draft can be tried first."""

    change_form_template = "admin/executions/policy/change_form.html"
    dry_run_template = "admin/executions/policy/dry_run.html"
    list_display = ("__str__", "state", "languages", "providers", "analysis", "imports_mode")
    list_filter = ("draft", "analysis")
    search_fields = ("tenant_slug", "name")
    readonly_fields = ("state", "created_at")
    compressed_fields = False
    fieldsets = (
        (None, {"fields": ("tenant_slug", "name", "state"), "classes": ("columns",)}),
        (
            "Limits",
            {"fields": RULES[: RULES.index("analysis")], "classes": ("tab", "columns")},
        ),
        (
            "Static analysis (Python)",
            {
                "fields": RULES[RULES.index("analysis") :],
                "classes": ("tab", "columns"),
                "description": "It catches mistakes; it is not a security boundary, because code "
                "can hide from it. The boundary is the sandbox and the kernel. Code in other "
                "languages is not analyzed. Separate modules and calls with spaces or lines.",
            },
        ),
    )

    def get_readonly_fields(
        self, request: HttpRequest, obj: Policy | None = None
    ) -> tuple[str, ...]:
        # Whose policy is in force is what its versions are of.
        in_force = obj is not None and not obj.draft
        return ("tenant_slug", *self.readonly_fields) if in_force else self.readonly_fields

    def get_form(
        self, request: HttpRequest, obj: Policy | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("tenant_slug")) is not None:
            stored = obj.tenant_slug if obj else ""
            chosen = tenant_choice(request, field, "All tenants without their own policy", stored)
            form.base_fields["tenant_slug"] = chosen
        for name in ("languages", "providers"):
            if name in form.base_fields:
                form.base_fields[name].widget = UnfoldAdminTextInputWidget(
                    attrs={"placeholder": "any"}
                )
        for name in ("imports", "imports_except", "calls"):
            if name in form.base_fields:
                form.base_fields[name].widget.attrs["rows"] = 3
        refuse_unknown(form, obj)
        return form

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        name = request.GET.get("preset", "")
        if name not in presets():
            return {}
        return {each: getattr(policy_from(name), each) for each in ("name", *RULES)}

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        more = {"presets": presets(), "may_try": request.user.has_perm(VIEW_EXECUTION)}
        context = {**(extra_context or {}), **more}
        return super().changeform_view(request, object_id, form_url, context)

    def save_model(
        self, request: HttpRequest, obj: Policy, form: forms.ModelForm[Policy], change: bool
    ) -> None:
        obj.draft = obj.draft or not change
        super().save_model(request, obj, form, change)

    def get_urls(self) -> list[URLPattern]:
        pages = (
            ("<int:pk>/dry-run/", self.dry_run_view, "dry_run"),
            ("<int:pk>/put-in-force/", self.put_in_force_view, "put_in_force"),
            ("<int:pk>/draft/", self.draft_view, "draft"),
        )
        own = [
            path(route, self.admin_site.admin_view(view), name=f"executions_policy_{name}")
            for route, view, name in pages
        ]
        return [*own, *super().get_urls()]

    def dry_run_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """What it would have blocked, for who may see what ran."""
        policy = _found(pk)
        if not (
            self.has_view_permission(request, policy) and request.user.has_perm(VIEW_EXECUTION)
        ):
            raise PermissionDenied
        form = DaysForm(request.POST or None)
        run = None
        if request.method == "POST" and form.is_valid():
            run = dry_run(policy, form.cleaned_data["days"])
        context = {
            **self.admin_site.each_context(request),
            "title": "Dry run",
            "opts": self.opts,
            "policy": policy,
            "form": form,
            "run": run,
            # What is shown was written by whoever wrote the code.
            "rules": [(visible(rule), n) for rule, n in run.rules.most_common(100)] if run else (),
            "hits": [replace(hit, name=visible(hit.name)) for hit in run.hits] if run else (),
            "may_put": policy.draft and self.has_change_permission(request),
        }
        return TemplateResponse(request, self.dry_run_template, context)

    def put_in_force_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        draft = _found(pk)
        if request.method != "POST" or not self.has_change_permission(request):
            raise PermissionDenied
        if not draft.draft:
            raise Http404

        def put() -> HttpResponse:
            try:
                policy = put_in_force(draft)
            except ValidationError as error:
                messages.error(request, " ".join(error.messages))
                return _page(draft)
            self.log_change(request, policy, f"Activated from {draft}.")
            messages.success(request, f"{policy} is active.")
            return _page(policy)

        answer: HttpResponse = self.guarded_view(request, put)
        return answer

    def draft_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        policy = _found(pk)
        if request.method != "POST" or not self.has_add_permission(request):
            raise PermissionDenied

        def make() -> HttpResponse:
            try:
                draft = draft_of(policy)
            except ValidationError as error:
                messages.error(request, " ".join(error.messages))
                return _page(policy)
            self.log_addition(request, draft, f"Duplicated from {policy}.")
            return _page(draft)

        answer: HttpResponse = self.guarded_view(request, make)
        return answer

    @admin.display(description="status")
    def state(self, policy: Policy) -> str:
        if policy.pk is None:
            return "Draft. Try it with a dry run, then activate it."
        return "draft" if policy.draft else "active"


def _found(pk: int) -> Policy:
    policy = Policy.objects.filter(pk=pk).first()
    if policy is None:
        raise Http404
    return policy


def _page(policy: Policy) -> HttpResponseRedirect:
    return HttpResponseRedirect(reverse("admin:executions_policy_change", args=[policy.pk]))


if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = ModelAdmin


@admin.register(Approval)
class ApprovalAdmin(DecidedByHand):
    change_form_template = "admin/executions/approval/change_form.html"
    list_display = ("execution_id", "tenant_slug", "state", "asked_at", "decided_by", "decided_at")
    list_filter = ("status",)
    fields = (
        *("execution", "tenant_slug", "state", "asked_at", "decided_by", "decided_at"),
        *("code_hash", "request_hash"),
    )
    hash_field = "request_hash"
    of_execution = ("status", "finished_at")

    def shown(self, row: Approval) -> dict[str, Any]:
        return _shown(row) if row.status == Approval.Status.WAITING else {}

    def decide(self, row: Approval, person: Any, *, approve: bool, shown_hash: str) -> str:
        decide(row, person, approve=approve, request_hash=shown_hash)
        return f"Execution {row.execution_id} {'approved' if approve else 'rejected'}."

    @admin.display(description="status")
    def state(self, approval: Approval) -> str:
        waits = approval.status == Approval.Status.WAITING
        if waits and not approval.execution.is_open:
            return f"undecided; execution {approval.execution.get_status_display()}"
        return approval.get_status_display()


def _shown(approval: Approval) -> dict[str, Any]:
    """All of what would be run, with what cannot be seen spelled out."""
    try:
        wanted = request_of(approval)
    except SandboxError as error:
        return {"problem": error.message}
    except DecryptionError as error:
        return {"problem": f"The request cannot be read. {error}"}
    if wanted is None:
        return {"problem": "The execution has ended, or differs from the request. It will not run."}
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
        "Tools": to_json(to_stored(wanted.tools)) if wanted.tools else "",
        "Subject": wanted.subject,
        "Arguments": wanted.arguments_json,
        # Its values may be secrets, and are shown to nobody.
        "Environment variables": " ".join(sorted(wanted.env)),
        "Network": to_json(wanted.network.policy.to_json()) if wanted.network else "",
        "Files": to_json([file_facts(file) for file in wanted.files]) if wanted.files else "",
    }
    return [(name, visible(value)) for name, value in parts.items() if value]
