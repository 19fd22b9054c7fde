"""The pages of network lists, credentials, and attempts to reach hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import ngettext
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from unfold.admin import ModelAdmin
from unfold.widgets import UnfoldAdminPasswordWidget, UnfoldBooleanWidget

from executions.admin.executions import BoundedPaginator, SessionTenantFilter
from executions.admin.frame import tenant_choice
from executions.capabilities.network.attempts import of_host
from executions.capabilities.network.credentials import revoke
from executions.capabilities.network.dry_run import DAYS, MOST_DAYS, dry_run
from executions.capabilities.network.lists import COLUMNS, draft_of, put_in_force
from executions.capabilities.network.models import (
    NetworkAttempt,
    NetworkCredential,
    NetworkList,
)
from executions.capabilities.network.sources import fetch_value
from providers.admin_pages import GuardedAdmin, ReadOnly
from providers.credentials import MOST_CHARACTERS, check_value
from providers.hidden_characters import visible
from providers.network import PRESETS

if TYPE_CHECKING:
    _ListAdmin = admin.ModelAdmin[NetworkList]
    _AttemptAdmin = admin.ModelAdmin[NetworkAttempt]
    _CredentialAdmin = admin.ModelAdmin[NetworkCredential]
    _CredentialForm = forms.ModelForm[NetworkCredential]
else:
    _ListAdmin = _AttemptAdmin = _CredentialAdmin = ModelAdmin
    _CredentialForm = forms.ModelForm


VIEW_ATTEMPT = "executions.view_networkattempt"


class DaysForm(forms.Form):
    days = forms.IntegerField(
        label="Days of past attempts", min_value=1, max_value=MOST_DAYS, initial=DAYS
    )


@admin.register(NetworkList)
class NetworkListAdmin(GuardedAdmin, _ListAdmin):
    """What is added is a draft. One in force can be changed where it stands, as every guarded
    row."""

    change_form_template = "admin/executions/networklist/change_form.html"
    dry_run_template = "admin/executions/networklist/dry_run.html"
    list_display = ("__str__", "state", "mode", "log_only", "by_default")
    list_filter = ("draft", "mode")
    search_fields = ("tenant_slug", "name", "rules")
    readonly_fields = ("state", "created_at")
    compressed_fields = False
    fieldsets = (
        (None, {"fields": ("tenant_slug", "name", "state"), "classes": ("columns",)}),
        (
            "Hosts",
            {
                "fields": COLUMNS[: COLUMNS.index("connections")],
                "classes": ("tab", "columns"),
                "description": "A sandbox reaches a host only if the list of the installation, the "
                "tenant's list, and the list of the run or session allow it. Without a list of the "
                "installation, no sandbox has a network.",
            },
        ),
        ("Budget", {"fields": COLUMNS[COLUMNS.index("connections") :], "classes": ("tab",)}),
    )

    def get_readonly_fields(
        self, request: HttpRequest, obj: NetworkList | None = None
    ) -> tuple[str, ...]:
        # Whose list is in force is what its versions are of.
        in_force = obj is not None and not obj.draft
        return ("tenant_slug", *self.readonly_fields) if in_force else self.readonly_fields

    def get_form(
        self,
        request: HttpRequest,
        obj: NetworkList | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("tenant_slug")) is not None:
            stored = obj.tenant_slug if obj else ""
            form.base_fields["tenant_slug"] = tenant_choice(
                request, field, "The installation", stored
            )
        return form

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        name = request.GET.get("preset", "")
        return {"name": name, "rules": "\n".join(PRESETS[name])} if name in PRESETS else {}

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        context = {
            **(extra_context or {}),
            "presets": list(PRESETS),
            "may_try": request.user.has_perm(VIEW_ATTEMPT),
        }
        return super().changeform_view(request, object_id, form_url, context)

    def save_model(
        self,
        request: HttpRequest,
        obj: NetworkList,
        form: forms.ModelForm[NetworkList],
        change: bool,
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
            path(route, self.admin_site.admin_view(view), name=f"executions_networklist_{name}")
            for route, view, name in pages
        ]
        return [*own, *super().get_urls()]

    def dry_run_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """What it would have refused, for who may see what was tried."""
        row = _found(pk)
        if not (self.has_view_permission(request, row) and request.user.has_perm(VIEW_ATTEMPT)):
            raise PermissionDenied
        form = DaysForm(request.POST or None)
        run = None
        if request.method == "POST" and form.is_valid():
            run = dry_run(row, form.cleaned_data["days"])
        context = {
            **self.admin_site.each_context(request),
            "title": "Dry run",
            "opts": self.opts,
            "list": row,
            "form": form,
            "run": run,
            # What is shown was named by programs.
            "hosts": [(visible(host), n) for host, n in run.hosts.most_common(100)] if run else (),
            "tenants": run.tenants.most_common(100) if run else (),
            "may_put": row.draft and self.has_change_permission(request),
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
                row = put_in_force(draft)
            except ValidationError as error:
                messages.error(request, " ".join(error.messages))
                return _page(draft)
            self.log_change(request, row, f"Activated from {draft}.")
            messages.success(request, f"{row} is active.")
            return _page(row)

        answer: HttpResponse = self.guarded_view(request, put)
        return answer

    def draft_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        row = _found(pk)
        if request.method != "POST" or not self.has_add_permission(request):
            raise PermissionDenied

        def make() -> HttpResponse:
            try:
                draft = draft_of(row)
            except ValidationError as error:
                messages.error(request, " ".join(error.messages))
                return _page(row)
            self.log_addition(request, draft, f"Duplicated from {row}.")
            return _page(draft)

        answer: HttpResponse = self.guarded_view(request, make)
        return answer

    @admin.display(description="status")
    def state(self, row: NetworkList) -> str:
        if row.pk is None:
            return "Draft. Try it with a dry run, then activate it."
        return "draft" if row.draft else "active"


def _found(pk: int) -> NetworkList:
    row = NetworkList.objects.filter(pk=pk).first()
    if row is None:
        raise Http404
    return row


def _page(row: NetworkList) -> HttpResponseRedirect:
    return HttpResponseRedirect(reverse("admin:executions_networklist_change", args=[row.pk]))


@admin.register(NetworkAttempt)
class NetworkAttemptAdmin(ReadOnly, _AttemptAdmin):
    """Who talked to which host: search for a host, or for all hosts of `*.example.com`."""

    list_display = (
        *("at", "tenant_slug", "shown_host", "port", "shown_request", "outcome", "shown_why"),
        *("sent", "received", "shown_run"),
    )
    list_filter = (SessionTenantFilter, "outcome", "noted")
    search_fields = ("host",)
    search_help_text = "A host, or *.example.com."
    ordering = ("-id",)
    sortable_by = ()
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    fields = (
        *("id", "at", "tenant_slug", "shown_host", "port", "shown_request", "outcome"),
        *(
            "shown_why",
            "layer",
            "shown_rule",
            "credential",
            "noted",
            "sent",
            "received",
            "seconds",
            "shown_run",
        ),
        "session_id",
    )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[NetworkAttempt], search_term: str
    ) -> tuple[QuerySet[NetworkAttempt], bool]:
        return of_host(queryset, search_term.strip()), False

    @admin.display(description="host")
    def shown_host(self, attempt: NetworkAttempt) -> str:
        return visible(attempt.host)

    @admin.display(description="request")
    def shown_request(self, attempt: NetworkAttempt) -> str:
        return visible(f"{attempt.method} {attempt.path}".strip()) or "-"

    @admin.display(description="reason")
    def shown_why(self, attempt: NetworkAttempt) -> str:
        return visible(attempt.why) or "-"

    @admin.display(description="rule")
    def shown_rule(self, attempt: NetworkAttempt) -> str:
        return visible(attempt.rule) or "-"

    @admin.display(description="execution")
    def shown_run(self, attempt: NetworkAttempt) -> SafeString | str:
        if attempt.execution_id is None:
            return "-"
        url = reverse("admin:executions_execution_change", args=[attempt.execution_id])
        return format_html('<a href="{}">{}</a>', url, attempt.execution_id)


class CredentialForm(_CredentialForm):
    """What is entered as a value is taken to the row and never shown again."""

    new_value = forms.CharField(
        label="Value",
        required=False,
        max_length=MOST_CHARACTERS,
        strip=False,
        widget=UnfoldAdminPasswordWidget(attrs={"autocomplete": "new-password"}),
    )

    fetch = forms.BooleanField(
        label="Fetch the value now",
        required=False,
        widget=UnfoldBooleanWidget,
        help_text="A new source is always fetched, and each other value of it within about a "
        "minute. Fetching makes a revoked credential active again.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (field := self.fields.get("new_value")) is None:
            return
        has_value = self.instance.pk is not None and self.instance.revoked_at is None
        if has_value:
            field.help_text = "Stored, and never shown. Leave empty to keep it."
        elif self.instance.pk is not None:
            field.help_text = "Revoked. A new value makes the credential active again."

    @sensitive_variables()
    def clean_new_value(self) -> str:
        text = str(self.cleaned_data["new_value"])
        if text:
            try:
                check_value(text)
            except ValueError as error:
                raise ValidationError(str(error)) from None
        return text

    @sensitive_variables()
    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        text = cleaned.get("new_value")
        if source := cleaned.get("source"):
            if text:
                raise ValidationError({"new_value": "Leave it empty: the source has the value."})
            text = self._fetched(source)
        elif cleaned.get("fetch"):
            raise ValidationError({"source": "Must be where the value is fetched from."})
        if text:
            self.instance.set_value(text)
        return cleaned

    @sensitive_variables()
    def _fetched(self, source: str) -> str:
        """The value to store, "" for the one that is stored. Raises ValidationError."""
        is_new = "source" in self.changed_data
        if self.errors or not (is_new or self.cleaned_data.get("fetch")):
            return ""
        text = fetch_value(source)
        if is_new:
            return text
        try:
            return "" if self.instance.open_value() == text else text
        except ValueError:
            return text

    def add_error(self, field: str | None, error: Any) -> None:
        if field is None and "value" in getattr(error, "error_dict", {}):
            # One that is wrong in itself is said already.
            said = error.error_dict.pop("value")
            if not {"new_value", "source"} & set(self.errors):
                error.error_dict["new_value"] = said
            if not error.error_dict:
                return
        super().add_error(field, error)


@admin.register(NetworkCredential)
class NetworkCredentialAdmin(GuardedAdmin, _CredentialAdmin):
    """Values are entered here and never shown. What is no longer needed is revoked."""

    list_display = (
        *("name", "tenant", "placement", "hosts", "variable", "version", "state", "changed_at"),
    )
    list_filter = ("placement",)
    search_fields = ("tenant_slug", "name", "rules")
    readonly_fields = ("state", "version", "changed_at")
    compressed_fields = False
    form = CredentialForm
    actions = ("revoke_credentials",)
    fieldsets = (
        (None, {"fields": ("tenant_slug", "name", "state"), "classes": ("columns",)}),
        (
            "Value",
            {
                "fields": ("placement", "field", "source", "fetch", "new_value", "variable"),
                "classes": ("tab", "columns"),
                "description": "Code in a sandbox has only the placeholder. The network proxy puts "
                "the value into requests over TLS to the hosts, methods and paths of the rules. "
                "No sandbox has anything of the placement claude.",
            },
        ),
        ("Hosts", {"fields": ("rules", "upstream"), "classes": ("tab",)}),
        ("Version", {"fields": ("version", "changed_at"), "classes": ("tab",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[NetworkCredential]:
        return super().get_queryset(request).defer("value")

    def get_readonly_fields(
        self, request: HttpRequest, obj: NetworkCredential | None = None
    ) -> tuple[str, ...]:
        # Records name it by these.
        return (
            self.readonly_fields
            if obj is None
            else ("tenant_slug", "name", "state", "version", "changed_at")
        )

    def get_form(
        self,
        request: HttpRequest,
        obj: NetworkCredential | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("tenant_slug")) is not None:
            form.base_fields["tenant_slug"] = tenant_choice(request, field, "The installation")
        return form

    @method_decorator(sensitive_post_parameters("new_value"))
    def changeform_view(self, *args: Any, **kwargs: Any) -> Any:
        return super().changeform_view(*args, **kwargs)

    def has_delete_permission(
        self, request: HttpRequest, obj: NetworkCredential | None = None
    ) -> bool:
        return False

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("executions.change_networkcredential")

    @admin.display(description="tenant", ordering="tenant_slug")
    def tenant(self, row: NetworkCredential) -> str:
        return row.tenant_slug or "installation"

    @admin.display(description="hosts")
    def hosts(self, row: NetworkCredential) -> str:
        try:
            return row.hosts
        except ValueError:
            # Written past the service. It is not used.
            return visible(row.rules)[:100]

    @admin.display(description="status")
    def state(self, row: NetworkCredential) -> str:
        if row.pk is None:
            return "-"
        return "active" if row.revoked_at is None else "revoked"

    @admin.action(description="Revoke the selected credentials", permissions=["revoke"])
    def revoke_credentials(
        self, request: HttpRequest, queryset: QuerySet[NetworkCredential]
    ) -> None:
        revoked = 0
        for row in queryset:
            if revoke(row):
                self.log_change(request, row, "Revoked.")
                revoked += 1
        message = (
            ngettext("%d credential was revoked.", "%d credentials were revoked.", revoked)
            % revoked
        )
        self.message_user(request, message, messages.SUCCESS)
