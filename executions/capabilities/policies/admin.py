"""The pages of policies, and the base of pages on which somebody decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from unfold.admin import ModelAdmin
from unfold.widgets import UnfoldAdminTextInputWidget

from executions.admin.frame import refuse_unknown, tenant_choice
from executions.capabilities.policies.approvals import DECIDE, AlreadyDecided, AskedBySame
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
from providers.admin.guarded import GuardedAdmin
from providers.admin.read_only import ReadOnly
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


class DecidedByHand(ReadOnly, _ModelAdmin):
    """Rows of executions; what is decided about one is bound to a hash of what was shown."""

    show_full_result_count = False
    # The column of that hash, and those of the execution that the pages need.
    hash_field: ClassVar[str]
    of_execution: ClassVar[tuple[str, ...]]

    def shown(self, row: Any) -> dict[str, Any]:
        """What the page's template shows of it, to those who may see code."""
        raise NotImplementedError

    def decide(self, row: Any, person: Any, *, approve: bool, shown_hash: str) -> str:
        """Carry it out. Returns what to say; raises AlreadyDecided and AskedBySame."""
        raise NotImplementedError

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request).select_related("execution")
        return rows.only(
            *(field.attname for field in self.opts.concrete_fields),
            *(f"execution__{name}" for name in self.of_execution),
        )

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.decide_view)
        name = f"{self.opts.app_label}_{self.opts.model_name}_decide"
        return [path("<path:pk>/decide/", page, name=name), *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        row = self.get_object(request, object_id)
        may_decide = request.user.has_perm(DECIDE)
        context = {**(extra_context or {}), "may_decide": may_decide}
        if row is not None and (may_decide or request.user.has_perm(VIEW_EXECUTION)):
            context |= {"hash_field": self.hash_field, "shown_hash": getattr(row, self.hash_field)}
            context |= self.shown(row)
        return super().change_view(request, object_id, form_url, context)

    def decide_view(self, request: HttpRequest, pk: str) -> HttpResponse:
        if request.method != "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, pk)
        if row is None:
            raise Http404
        approve = "approve" in request.POST
        shown_hash = request.POST.get(self.hash_field, "")
        try:
            said = self.decide(row, request.user, approve=approve, shown_hash=shown_hash)
        except (AlreadyDecided, AskedBySame) as error:
            messages.error(request, error.message)
        else:
            messages.success(request, said)
        return redirect(f"admin:{self.opts.app_label}_{self.opts.model_name}_change", pk)
