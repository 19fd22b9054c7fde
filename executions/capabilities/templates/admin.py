"""The pages of templates and their versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.template.defaultfilters import filesizeformat
from django.template.loader import render_to_string
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin, TabularInline
from unfold.widgets import UnfoldAdminTextareaWidget

from executions.admin.executions import BoundedPaginator, translate_errors
from executions.admin.frame import tenant_choice
from executions.capabilities.templates import builds
from executions.capabilities.templates.additions import added_packages, declaration_of
from executions.capabilities.templates.advisories import findings_of
from executions.capabilities.templates.documents import read_declaration, to_toml
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import with_versions
from executions.capabilities.templates.requests import parts_of
from executions.doors.native.deferred import answer
from executions.kernel.audit import current_actor
from executions.kernel.coroutines import run_sync
from executions.kernel.database import DatabaseUnavailable
from executions.sessions.queries import living_session_of
from executions.sessions.requests import NoSuchSession
from executions.tenants.models import Tenant
from providers.admin_pages import ReadOnly
from providers.errors import InvalidConfiguration, SandboxError
from providers.hidden_characters import visible

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Template]
    _VersionAdmin = admin.ModelAdmin[TemplateVersion]
    _Inline = admin.TabularInline[TemplateVersion, Template]
    _Form = forms.ModelForm[Template]
else:
    _Admin = _VersionAdmin = ModelAdmin
    _Inline, _Form = TabularInline, forms.ModelForm

BUILD = "executions.build_template"
_BADGES = {
    TemplateVersion.State.READY: "good",
    TemplateVersion.State.FAILED: "bad",
}
_EXAMPLE = 'python = ["pandas>=2"]\n\n[environment]\nCOLOUR = "blue"\n'


class TemplateForm(_Form):
    tenant_slug = forms.CharField(label="Tenant", required=False)
    declaration = forms.CharField(
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 14, "spellcheck": "false"}),
        strip=False,
        help_text="TOML with base, python, npm, apt, build, environment, files, run, start, ready, "
        "network and limits.",
    )
    refresh = forms.BooleanField(
        label="Newest packages",
        required=False,
        help_text="Resolve the packages anew, also where the declaration is the same.",
    )

    class Meta:
        model = Template
        fields = ("name", "description")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        newest = None
        if not self.instance._state.adding:
            rows = TemplateVersion.objects.filter(template=self.instance)
            newest = rows.only("declaration").order_by("-number").first()
        self.initial["declaration"] = to_toml(newest.declared) if newest else _EXAMPLE

    def clean_declaration(self) -> str:
        text: str = self.cleaned_data["declaration"]
        try:
            read_declaration(text)
        except InvalidConfiguration as error:
            raise ValidationError(visible(error.message)) from None
        return text

    def _post_clean(self) -> None:
        """Request the build last: whether one may be requested is known once it was."""
        super()._post_clean()  # type: ignore[misc]
        if self.errors:
            return
        try:
            self.instance = self._request().template
        except SandboxError as error:
            name = error.field if error.field in self.fields else None
            self.add_error(name, visible(error.message))

    def save(self, commit: bool = True) -> Template:
        """Return the template, which the request has written."""
        return self.instance

    def _request(self) -> TemplateVersion:
        """Raises SandboxError."""
        declaration = read_declaration(self.cleaned_data["declaration"])
        by, template = current_actor(), self.instance
        if template._state.adding:
            slug = self.cleaned_data.get("tenant_slug")
            tenant = Tenant.objects.get(slug=slug) if slug else None
            described = template.description
            return builds.create(tenant, template.name, declaration, by, described)
        refresh = self.cleaned_data.get("refresh", False)
        return builds.request_build(template, by, declaration, refresh=refresh)


class VersionInline(_Inline):
    model = TemplateVersion
    fields = ("link", "shown_state", "shown_size", "requested_by", "created_at", "ended_at")
    readonly_fields = fields
    extra = 0
    verbose_name_plural = "versions"
    ordering = ("-number",)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[TemplateVersion]:
        rows = super().get_queryset(request).select_related("template")
        return rows.defer("log", "declaration", "lock", "licences")

    @admin.display(description="version")
    def link(self, version: TemplateVersion) -> SafeString:
        url = reverse("admin:executions_templateversion_change", args=[version.pk])
        return format_html('<a href="{}">{}</a>', url, version.number)

    @admin.display(description="status")
    def shown_state(self, version: TemplateVersion) -> SafeString:
        return _badge(version)

    @admin.display(description="size")
    def shown_size(self, version: TemplateVersion) -> str:
        return filesizeformat(version.size_bytes) if version.digest else "-"


@admin.register(Template)
class TemplateAdmin(_Admin):
    """What a version is built of is entered here; each save builds another version."""

    form = TemplateForm
    list_display = ("name", "shown_tenant", "description", "latest", "created_by", "created_at")
    list_select_related = ("tenant",)
    search_fields = ("name", "tenant__slug")
    sortable_by = ()
    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    inlines = (VersionInline,)
    actions = ("build_selected", "cancel_selected", "remove_selected")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Template]:
        return with_versions(super().get_queryset(request).filter(removed_at=None))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(BUILD)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(BUILD)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_build_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(BUILD)

    def get_fields(self, request: HttpRequest, obj: Template | None = None) -> Any:
        if obj is None:
            return ("tenant_slug", "name", "description", "declaration")
        if not self.has_change_permission(request, obj):
            return ("shown_tenant", "name", "description")
        return ("shown_tenant", "name", "description", "declaration", "refresh")

    def get_readonly_fields(self, request: HttpRequest, obj: Template | None = None) -> Any:
        return () if obj is None else ("shown_tenant", "name", "description")

    def get_inlines(self, request: HttpRequest, obj: Template | None) -> Any:
        # They are shown, and no part of the form.
        return () if obj is None or request.method != "GET" else self.inlines

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.session_view)
        name = "executions_template_of_session"
        return [path("of-session/<uuid:session_id>/", page, name=name), *super().get_urls()]

    def session_view(self, request: HttpRequest, session_id: UUID) -> HttpResponseBase:
        """What programs of a session have installed, and the button for a template of it."""
        if not (
            request.user.has_perm("executions.view_session") and self.has_view_permission(request)
        ):
            raise PermissionDenied
        if request.method == "POST" and not self.has_build_permission(request):
            raise PermissionDenied
        work = self._of_session(request, session_id)
        return answer(request, translate_errors(request, work))

    async def _of_session(self, request: HttpRequest, session_id: UUID) -> HttpResponse:
        context: dict[str, Any] = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": "Added packages",
            "may_build": self.has_build_permission(request),
        }
        status = 200
        try:
            session = context["session"] = living_session_of(None, session_id)
            if request.method == "POST":
                declared = await declaration_of(session)
                name = request.POST.get("name", "")
                version = builds.request(session.tenant, name, declared, current_actor())
                self.log_change(request, version.template, f"Requested of session {session.pk}.")
                return redirect("admin:executions_templateversion_change", version.pk)
            context["added"] = (await added_packages(session)).all
        except NoSuchSession:
            raise Http404 from None
        except DatabaseUnavailable:
            raise
        except SandboxError as error:
            status = error.http_status
            context["error"] = f"{error.code}: {visible(error.message)}"
        page = render_to_string("admin/executions/template/of_session.html", context, request)
        return HttpResponse(page, status=status, headers={"Cache-Control": "private, no-store"})

    def get_form(
        self,
        request: HttpRequest,
        obj: Template | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if obj is None and (field := form.base_fields.get("tenant_slug")) is not None:
            form.base_fields["tenant_slug"] = tenant_choice(request, field, "The installation")
        return form

    def save_model(self, request: HttpRequest, obj: Template, form: Any, change: bool) -> None:
        """The form has written it."""

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Versions are written by builds alone."""

    def construct_change_message(self, *args: Any, **kwargs: Any) -> Any:
        return "Requested a build."

    def response_add(
        self, request: HttpRequest, obj: Template, post_url_continue: str | None = None
    ) -> HttpResponse:
        return self._answer(request, obj)

    def response_change(self, request: HttpRequest, obj: Template) -> HttpResponse:
        return self._answer(request, obj)

    def _answer(self, request: HttpRequest, obj: Template) -> HttpResponse:
        messages.success(request, "Build requested. This page shows its status.")
        url = reverse("admin:executions_template_change", args=[obj.pk])
        return HttpResponse(status=302, headers={"Location": url})

    @admin.display(description="tenant", ordering="tenant")
    def shown_tenant(self, template: Template) -> str:
        return template.tenant.slug if template.tenant else "installation"

    @admin.display(description="newest version")
    def latest(self, template: Template) -> SafeString | str:
        version = next(iter(template.versions.all()), None)
        return "-" if version is None else format_html("{} {}", version.number, _badge(version))

    @admin.action(description="Build the selected templates", permissions=["build"])
    def build_selected(self, request: HttpRequest, queryset: QuerySet[Template]) -> None:
        def build(template: Template) -> None:
            builds.request_build(template, current_actor(), refresh=True)

        self._each(request, queryset, build, "Requested a build.")

    @admin.action(description="Cancel builds of the selected templates", permissions=["build"])
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Template]) -> None:
        def cancel(template: Template) -> None:
            active = template.versions.filter(state__in=TemplateVersion.ACTIVE).first()
            if active is not None:
                run_sync(builds.cancel_build(active, current_actor()))

        self._each(request, queryset, cancel, "Cancelled its build.")

    @admin.action(description="Remove the selected templates", permissions=["build"])
    def remove_selected(self, request: HttpRequest, queryset: QuerySet[Template]) -> None:
        def remove(template: Template) -> None:
            run_sync(builds.remove(template, current_actor()))

        self._each(request, queryset, remove, "Removed.")

    def _each(
        self,
        request: HttpRequest,
        queryset: QuerySet[Template],
        act: Callable[[Template], None],
        said: str,
    ) -> None:
        for template in queryset:
            try:
                act(template)
            except SandboxError as error:
                self.message_user(request, f"{template}: {visible(error.message)}", messages.ERROR)
            else:
                self.log_change(request, template, said)
                self.message_user(request, f"{template}: {said}", messages.SUCCESS)


@admin.register(TemplateVersion)
class TemplateVersionAdmin(ReadOnly, _VersionAdmin):
    """One build: its packages, its log, and what it was built of."""

    list_display = ("shown_name", "shown_tenant", "shown_state", "requested_by", "created_at")
    list_select_related = ("template__tenant",)
    list_filter = ("state",)
    sortable_by = ()
    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ("approve_selected",)
    fields = (
        *("shown_name", "shown_tenant", "shown_state", "digest", "shown_size", "python"),
        *("shown_base", "requested_by", "approved_by", "created_at", "ended_at", "shown_execution"),
        *("advisories", "packages", "shown_licences", "parts", "shown_declaration", "shown_log"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[TemplateVersion]:
        rows = super().get_queryset(request)
        # A page of one version has all of it.
        is_one = request.resolver_match is not None and "object_id" in request.resolver_match.kwargs
        return rows if is_one else rows.defer("log", "declaration", "lock", "licences")

    def has_build_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(BUILD)

    @admin.display(description="version")
    def shown_name(self, version: TemplateVersion) -> str:
        return str(version)

    @admin.display(description="base")
    def shown_base(self, version: TemplateVersion) -> str:
        base = version.based
        return f"{base.name} {base.image}".strip() or "This machine"

    @admin.display(description="tenant")
    def shown_tenant(self, version: TemplateVersion) -> str:
        tenant = version.template.tenant
        return tenant.slug if tenant else "installation"

    @admin.display(description="status")
    def shown_state(self, version: TemplateVersion) -> SafeString:
        return _badge(version)

    @admin.display(description="size")
    def shown_size(self, version: TemplateVersion) -> str:
        return filesizeformat(version.size_bytes) if version.digest else "-"

    @admin.display(description="execution")
    def shown_execution(self, version: TemplateVersion) -> SafeString | str:
        if version.execution_id is None:
            return "-"
        url = reverse("admin:executions_execution_change", args=[version.execution_id])
        return format_html('<a href="{}">{}</a>', url, version.execution_id)

    @admin.display(description="packages")
    def packages(self, version: TemplateVersion) -> SafeString | str:
        rows = format_html_join(
            "",
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td><code>{}:{}</code></td></tr>",
            (
                (
                    each.kind,
                    each.name,
                    each.version,
                    visible(str(version.licences.get(each.name, ""))) or "-",
                    each.algorithm,
                    each.hash,
                )
                for each in version.locked.packages
            ),
        )
        head = "<th>kind</th><th>name</th><th>version</th><th>licence</th><th>hash</th>"
        return _table(head, rows)

    @admin.display(description="advisories")
    def advisories(self, version: TemplateVersion) -> SafeString | str:
        rows = format_html_join(
            "",
            "<tr><td>{}</td><td>{} {}</td><td>{}</td><td>{}</td></tr>",
            (
                (
                    visible(each.advisory),
                    each.name,
                    each.version,
                    visible(each.summary),
                    visible(each.fixed) or "-",
                )
                for each in findings_of(version.locked)
            ),
        )
        head = "<th>advisory</th><th>package</th><th>summary</th><th>fixed in</th>"
        return _table(head, rows)

    @admin.display(description="licences")
    def shown_licences(self, version: TemplateVersion) -> SafeString | str:
        by_licence: dict[str, list[str]] = {}
        for each in version.locked.packages:
            licence = visible(str(version.licences.get(each.name, ""))) or "none is named"
            by_licence.setdefault(licence, []).append(each.name)
        rows = format_html_join(
            "",
            "<tr><td>{}</td><td>{}</td></tr>",
            (
                (licence, ", ".join(dict.fromkeys(names)))
                for licence, names in sorted(by_licence.items())
            ),
        )
        return _table("<th>licence</th><th>packages</th>", rows)

    @admin.display(description="parts list")
    def parts(self, version: TemplateVersion) -> SafeString | str:
        if version.state != TemplateVersion.State.READY:
            return "-"
        url = reverse("admin:executions_templateversion_sbom", args=[version.pk])
        return format_html('<a href="{}">CycloneDX</a>', url)

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.parts_view)
        name = "executions_templateversion_sbom"
        return [path("<uuid:pk>/sbom/", page, name=name), *super().get_urls()]

    def parts_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The parts list of a version, as a file."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        rows = TemplateVersion.objects.filter(state=TemplateVersion.State.READY)
        version = get_object_or_404(rows.select_related("template").defer("log"), pk=pk)
        name = f"{version.template.name}-{version.number}.cdx.json"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return JsonResponse(parts_of(version), headers=headers)

    @admin.display(description="declaration")
    def shown_declaration(self, version: TemplateVersion) -> SafeString:
        return format_html("<pre>{}</pre>", visible(to_toml(version.declared)))

    @admin.display(description="log")
    def shown_log(self, version: TemplateVersion) -> SafeString:
        return format_html("<pre>{}</pre>", visible(version.log) or "-")

    @admin.action(description="Approve the selected builds", permissions=["build"])
    def approve_selected(self, request: HttpRequest, queryset: QuerySet[TemplateVersion]) -> None:
        for version in queryset:
            try:
                builds.approve(version, current_actor())
            except SandboxError as error:
                self.message_user(request, f"{version}: {error.message}", messages.ERROR)
            else:
                self.log_change(request, version, "Approved.")
                self.message_user(request, f"{version}: Approved.", messages.SUCCESS)


def _table(head: str, rows: SafeString) -> SafeString | str:
    if not rows:
        return "-"
    return format_html(
        "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", SafeString(head), rows
    )


def _badge(version: TemplateVersion) -> SafeString:
    badge = format_html(
        '<span class="badge badge-{}">{}</span>',
        _BADGES.get(TemplateVersion.State(version.state), "quiet"),
        version.get_state_display(),
    )
    if not version.problem:
        return badge
    return format_html("{} {}", badge, visible(version.problem))
