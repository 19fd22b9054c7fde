"""The pages of tenants, their routes and the processes, and what happens when a tenant goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.db.models import Count, F, IntegerField, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape
from django.utils.safestring import SafeString
from django.utils.translation import ngettext

from executions.admin.frame import (
    ProcessModelAdmin,
    TenantModelAdmin,
    ensure_visible_name,
    tenant_choice,
)
from executions.capabilities.dashboard.admin import stacked_bars
from executions.capabilities.dashboard.service import (
    DAYS,
    latest_runs,
    latest_sessions,
    newest_keys,
    runs_by_day,
)
from executions.capabilities.retention import service
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.spending.models import Budget
from executions.capabilities.webhooks.models import WebhookSecret
from executions.runs.models import Execution, Process
from executions.runs.requests import LIMIT_COLUMNS, default_limit
from executions.sessions.capacity import usage_of
from executions.sessions.models import Session
from executions.sessions.storage.snapshots import snapshots_of
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.quotas import COLUMNS, Quota, Use, default_of_column
from providers.admin.routing import RouteAdmin
from providers.admin_pages import GuardedAdmin, ReadOnly, once
from providers.hidden_characters import visible
from providers.models import Route
from providers.timestamps import shown_moment

# Counted no further: a page waits for it.
MOST_COUNTED = 1000


def without_tenant(tenant: Tenant) -> list[str]:
    """Once it is removed."""
    kept = "Records of its runs are kept. Its keys, schedules and saved files are deleted."
    return [*_without_its_power(tenant), kept]


def inactive_tenant(tenant: Tenant) -> list[str]:
    """Once it is not active any more. Nothing for one that is not active now."""
    return _without_its_power(tenant) if tenant.pk is not None and tenant.is_active else []


def revoked_key(key: ApiKey) -> list[str]:
    told = []
    schedules = Schedule.objects.filter(api_key=key, next_at__isnull=False)
    if number := _counted(schedules):
        have = ngettext("%d schedule uses", "%d schedules use", number) % number
        told.append(f"{have} this key and will be paused at the next run.")
    queued = Execution.objects.filter(
        tenant_slug=key.tenant.slug,
        api_key=key,
        finished_at=None,
        status=Execution.Status.QUEUED,
    )
    if number := _counted(queued):
        runs = ngettext("%d queued or scheduled run", "%d queued or scheduled runs", number)
        told.append(f"{runs % number} will not start.")
    if not _others(key).exists():
        tenant = visible(key.tenant.slug)
        told.append(f"This is the last valid key of {tenant}: the tenant loses API access.")
    return told


def without_budget(budget: Budget) -> list[str]:
    whose = budget.tenant_slug or "all tenants together"
    return [f"The spending of {visible(whose)} per {budget.period} is no longer limited."]


def _without_its_power(tenant: Tenant) -> list[str]:
    now = timezone.now()
    unexpired = Q(expires_at=None) | Q(expires_at__gt=now)
    keys = ApiKey.objects.filter(unexpired, tenant=tenant, revoked_at=None)
    queued = Execution.objects.filter(
        tenant_slug=tenant.slug, finished_at=None, status=Execution.Status.QUEUED
    )
    schedules = Schedule.objects.filter(tenant=tenant, next_at__isnull=False)
    sessions = Session.objects.filter(tenant=tenant, state__in=Session.LIVING)
    counts = (
        (keys, "%d key is rejected", "%d keys are rejected", "from the next request on"),
        (queued, "%d queued execution", "%d queued executions", "will not run"),
        (schedules, "%d schedule", "%d schedules", "will not run"),
        (sessions, "%d open session", "%d open sessions", "can no longer be used"),
    )
    return [
        f"{ngettext(one, many, number) % number} {rest}."
        for rows, one, many, rest in counts
        if (number := _counted(rows))
    ]


def _others(key: ApiKey) -> QuerySet[ApiKey]:
    unexpired = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    keys = ApiKey.objects.filter(unexpired, tenant=key.tenant_id, revoked_at=None)
    return keys.exclude(pk=key.pk).exclude(scopes="")


def _counted(rows: QuerySet[Any]) -> int:
    number: int = rows.order_by().values("pk")[:MOST_COUNTED].count()
    return number


_NEAR = 80


@dataclass(frozen=True)
class Bar:
    """How much of a quota is used. `percent` is for drawing, and 100 at most."""

    name: str
    used: str
    limit: str
    percent: int
    tone: str
    until: str


def overview(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """For the template `admin/executions/tenant/overview.html`."""
    use = usage_of(tenant)
    budgets = (Quota.BUDGET_OF_DAY, Quota.BUDGET_OF_MONTH)
    shown: dict[str, Any] = {
        "quotas": [_bar(quota, found) for quota, found in use.items() if quota not in budgets],
        "slug": tenant.slug,
        "days": DAYS,
        "now": timezone.now(),
    }
    may = request.user.has_perm
    if may("executions.view_budget"):
        shown["budgets"] = [
            _bar(quota, use[quota]) for quota in budgets if use[quota].limit is not None
        ]
        shown["may_see_budgets"] = True
    if may("executions.view_execution"):
        days, series, cost = runs_by_day(tenant)
        shown |= {
            "chart": stacked_bars(f"Executions by day, the last {DAYS}", days, series),
            "ended": sum(series[0].values),
            "cost": cost,
            "runs": latest_runs(tenant),
        }
    if may("executions.view_session"):
        shown["sessions"] = [
            (session, visible(session.name or str(session.pk)))
            for session in latest_sessions(tenant)
        ]
    if may("executions.view_apikey"):
        shown["api_keys"] = [(key, visible(str(key))) for key in newest_keys(tenant)]
    return shown


def _bar(quota: Quota, use: Use) -> Bar:
    limit = use.limit or 0.0
    percent = round(100 * use.used / limit) if limit else (100 if use.used else 0)
    told = filesizeformat if "bytes" in quota else "{:,.12g}".format
    return Bar(
        quota.replace("_", " ").capitalize(),
        told(use.used),
        told(limit),
        min(100, percent),
        "bad" if percent >= 100 else "warn" if percent >= _NEAR else "",
        f"until {use.resets_at:%Y-%m-%d %H:%M} UTC" if use.resets_at else "",
    )


_EMPTY = "Leave a field empty to use the installation default, shown in gray."
RETENTION = ("keep_code_days", "keep_output_days", "keep_artifacts_days", "keep_records_days")


@admin.register(Tenant)
class TenantAdmin(GuardedAdmin, TenantModelAdmin):
    list_display = ("slug", "shown_name", "minimum_isolation", "is_active", "removal", "created_at")
    list_filter = ("is_active",)
    search_fields = ("slug", "name")
    change_form_template = "admin/executions/tenant/change_form.html"
    readonly_fields = ("created_at", "snapshots", "removal")
    compressed_fields = False
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("slug", "name", "minimum_isolation", "is_active"),
                    *("snapshots", "created_at"),
                ),
                "classes": ("columns",),
            },
        ),
        (
            "Quotas",
            {
                "fields": COLUMNS,
                "classes": ("tab", "columns"),
                "description": f"{_EMPTY} "
                "A request above a limit returns SB008. Limits apply across all processes. Budgets "
                "have their own page.",
            },
        ),
        (
            "Output and artifacts",
            {
                "fields": tuple(LIMIT_COLUMNS),
                "classes": ("tab", "columns"),
                "description": f"{_EMPTY} "
                "What exceeds a limit is not stored; the response lists it.",
            },
        ),
        (
            "Retention",
            {
                "fields": RETENTION,
                "classes": ("tab", "columns"),
                "description": f"{_EMPTY} 0 keeps the data forever. Hashes are always kept.",
            },
        ),
    )

    def get_fieldsets(self, request: HttpRequest, obj: Tenant | None = None) -> Any:
        fieldsets: Any = super().get_fieldsets(request, obj)
        (title, head), *tabs = fieldsets
        if obj is not None and obj.removal_began_at is not None:
            head = {**head, "fields": (*head["fields"], "removal")}
        return [(title, head), *tabs]

    def get_readonly_fields(
        self, request: HttpRequest, obj: Tenant | None = None
    ) -> tuple[str, ...]:
        # Records carry the slug as text: a changed one would separate a tenant from its own.
        return ("slug", *self.readonly_fields) if obj else self.readonly_fields

    def get_form(
        self, request: HttpRequest, obj: Tenant | None = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm[Tenant]]:
        """Show the default in each empty field."""
        form = super().get_form(request, obj, change, **kwargs)
        ensure_visible_name(form)
        installed = {name: default_of_column(name) for name in COLUMNS}
        installed |= {name: default_limit(name) for name in LIMIT_COLUMNS}
        shown = {name: str(value) for name, value in installed.items()}
        shown |= {name: _days_kept(name) for name in RETENTION}
        for name, text in shown.items():
            if name in form.base_fields:
                form.base_fields[name].widget.attrs["placeholder"] = text
        active = form.base_fields.get("is_active")
        if active is not None and obj is not None:
            told = once(request, "inactive tenant", lambda: inactive_tenant(obj))
            # The theme takes a help text for HTML.
            without = f" If deactivated: {' '.join(told)}" if told else ""
            active.help_text = escape(f"{active.help_text}{without}")
        return form

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if (tenant := kwargs.get("obj")) is not None:
            context["overview"] = overview(request, tenant)
        answer: HttpResponse = super().render_change_form(request, context, *args, **kwargs)
        return answer

    def has_change_permission(self, request: HttpRequest, obj: Tenant | None = None) -> bool:
        goes = obj is not None and obj.removal_began_at is not None
        return not goes and super().has_change_permission(request, obj)

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Without the removal of several at once: each is decided on its own page."""
        return {k: v for k, v in super().get_actions(request).items() if k != "delete_selected"}

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Without reading all that goes along, which may be any number of rows."""
        lacking = {
            str(model._meta.verbose_name)
            for model in (ApiKey, Schedule, WebhookSecret)
            if not request.user.has_perm(f"executions.delete_{model._meta.model_name}")
            and model._default_manager.filter(tenant__in=objs).exists()
        }
        return [visible(str(each)) for each in objs], {"tenants": len(objs)}, lacking, []

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        answer = super().delete_view(request, object_id, extra_context)
        if request.method == "POST":
            service.go_on(service.REQUEST_SECONDS)
        return answer

    def delete_model(self, request: HttpRequest, obj: Tenant) -> None:
        service.begin(obj)

    def response_delete(
        self, request: HttpRequest, obj_display: str, obj_id: int
    ) -> HttpResponseRedirect:
        self.message_user(
            request,
            f"{obj_display} is closed and being deleted. It disappears from the list when done.",
            messages.SUCCESS,
        )
        return HttpResponseRedirect(reverse("admin:executions_tenant_changelist"))

    def consequences(self, row: Tenant) -> list[str]:
        return without_tenant(row)

    @admin.display(description="name", ordering="name")
    def shown_name(self, tenant: Tenant) -> str:
        return visible(tenant.name)

    @admin.display(description="removal", empty_value="")
    def removal(self, tenant: Tenant) -> str | None:
        began = tenant.removal_began_at
        return None if began is None else f"deletion started {began:%Y-%m-%d %H:%M} UTC"

    @admin.display(description="snapshots")
    def snapshots(self, tenant: Tenant) -> str:
        if tenant.pk is None:
            return "None."
        if (known := vars(tenant).get("_snapshots")) is None:
            known = vars(tenant)["_snapshots"] = snapshots_of(tenant).count()
        return str(known)


def _days_kept(column: str) -> str:
    """The installation's retention, as the empty field shows it."""
    days = settings.SANDBOX_KEEP_DAYS[column.removeprefix("keep_").removesuffix("_days")]
    return str(days) if days else "0 (forever)"


@admin.register(Process)
class ProcessAdmin(ReadOnly, ProcessModelAdmin):
    """Who runs executions now, and who did until a day ago. For looking at."""

    list_display = (
        *("kind", "instance", "pid", "state", "running"),
        *("started_at", "last_sign_of_life", "ended_at"),
    )
    list_display_links = None
    list_filter = ("kind",)
    ordering = (F("ended_at").desc(nulls_first=True), "-id")
    sortable_by = ()
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Process]:
        # That it is not null is what lets the index of running ones serve.
        open_rows = Execution.objects.filter(
            process_id=OuterRef("pk"), process__isnull=False, finished_at=None
        )
        counted = open_rows.order_by().values("process_id").annotate(number=Count("pk"))
        running = Subquery(counted.values("number"), output_field=IntegerField())
        return super().get_queryset(request).annotate(running=Coalesce(running, 0))

    @admin.display(description="status")
    def state(self, process: Process) -> str:
        if process.ended_at is not None:
            return "ended"
        return "draining" if process.draining else "serving"

    @admin.display(description="last heartbeat")
    def last_sign_of_life(self, process: Process) -> SafeString | str:
        return shown_moment(process.renewed_at)

    @admin.display(description="running")
    def running(self, process: Any) -> int:
        return int(process.running)


admin.site.unregister(Route)


@admin.register(Route)
class TenantRouteAdmin(RouteAdmin):
    def get_form(
        self, request: HttpRequest, obj: Route | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("owner")) is not None:
            stored = obj.owner if obj else ""
            form.base_fields["owner"] = tenant_choice(request, field, "All tenants", stored)
        return form
