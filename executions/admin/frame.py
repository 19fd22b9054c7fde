"""What the pages of the admin share: bases of forms, lists and decisions, badges, choices."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import FieldDoesNotExist, PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin
from unfold.admin import ModelAdmin as UnfoldModelAdmin

from executions.capabilities.policies.approvals import DECIDE, AlreadyDecided, AskedBySame
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.kernel.text import from_text, to_text
from executions.ledger.bindings import NOT_PROVEN
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution, Process
from executions.runs.routing import MOST_NAMED, check_languages, check_providers, none_of_this_name
from executions.sessions.models import Session, Snapshot
from executions.tenants.models import ApiKey, Tenant
from providers.admin_pages import ReadOnly, choice, once
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible
from providers.runtime.guest.names import escape
from providers.sandbox import FileEntry

if TYPE_CHECKING:
    TenantModelAdmin = admin.ModelAdmin[Tenant]
    ApiKeyModelAdmin = admin.ModelAdmin[ApiKey]
    ApiKeyModelForm = forms.ModelForm[ApiKey]
    ExecutionModelAdmin = admin.ModelAdmin[Execution]
    LedgerEntryModelAdmin = admin.ModelAdmin[LedgerEntry]
    ProcessModelAdmin = admin.ModelAdmin[Process]
    SessionModelAdmin = admin.ModelAdmin[Session]
    SnapshotModelAdmin = admin.ModelAdmin[Snapshot]
    WebhookDeliveryModelAdmin = admin.ModelAdmin[WebhookDelivery]
    WebhookSecretModelAdmin = admin.ModelAdmin[WebhookSecret]
    WebhookSecretModelForm = forms.ModelForm[WebhookSecret]
    ExecutionPaginator = Paginator[Execution]
else:
    TenantModelAdmin = ApiKeyModelAdmin = ExecutionModelAdmin = UnfoldModelAdmin
    LedgerEntryModelAdmin = ProcessModelAdmin = SessionModelAdmin = UnfoldModelAdmin
    SnapshotModelAdmin = UnfoldModelAdmin
    WebhookDeliveryModelAdmin = WebhookSecretModelAdmin = UnfoldModelAdmin
    ApiKeyModelForm = WebhookSecretModelForm = forms.ModelForm
    ExecutionPaginator = Paginator


_S = Execution.Status
_TONES = {
    **dict.fromkeys((_S.SUCCEEDED,), "good"),
    **dict.fromkeys((_S.FAILED, _S.ERROR, _S.OUT_OF_MEMORY, _S.BLOCKED), "bad"),
    **dict.fromkeys((_S.TIMED_OUT, _S.RUNNING), "warn"),
}


def tone_of(execution: Execution) -> str:
    return _TONES.get(Execution.Status(execution.status), "quiet")


def status_badge(execution: Execution) -> SafeString:
    return format_html(
        '<span class="badge badge-{}">{}</span>', tone_of(execution), execution.get_status_display()
    )


# A page with more choices is slow, and nobody finds anything in it.
MOST = 500


def tenant_choice(request: HttpRequest, field: Any, nobody: str, stored: str = "") -> Any:
    """A form field of a tenant's slug as a list of them. `nobody` says what empty means.

    Of very many it stays a text, which is refused where it is no tenant's slug.
    """
    rows = Tenant.objects.values_list("slug", flat=True)
    slugs = once(request, "tenants", lambda: list(rows[: MOST + 1]))
    if len(slugs) <= MOST:
        return choice(field, slugs, nobody, stored)

    def check(slug: str) -> None:
        if slug not in ("", stored) and not Tenant.objects.filter(slug=slug).exists():
            raise ValidationError("Must be the slug of a tenant, or empty.")

    field.validators = [*field.validators, check]
    return field


def refuse_unknown(form: Any, stored: Any = None) -> None:
    """Have a form class refuse languages and providers that there are not.

    What `stored`, the row, has already is kept: a provider may be gone by now. What there is is
    looked up only for what is sent.
    """
    for name, check in (("languages", check_languages), ("providers", check_providers)):
        if (field := form.base_fields.get(name)) is not None:
            kept = frozenset(getattr(stored, name, "").split())
            field.validators = [*field.validators, partial(_validate, check, kept)]


def check_has_run(slug: str) -> None:
    """Raises ValidationError for what is no tenant, and was none of any record that is kept."""
    known = Execution.objects.filter(tenant_slug=slug)
    if not slug or Tenant.objects.filter(slug=slug).exists() or known.exists():
        return
    there = Tenant.objects.order_by("slug").values_list("slug", flat=True)[: MOST_NAMED + 1]
    raise ValidationError(none_of_this_name(slug, there))


def _validate(
    check: Callable[[str, frozenset[str]], None], kept: frozenset[str], text: str
) -> None:
    try:
        check(text, kept)
    except InvalidConfiguration as error:
        raise ValidationError(error.message) from None


def check_visible(text: str) -> None:
    """A validator: raises ValidationError for characters that are not seen or that move others."""
    if visible(text) != text:
        raise ValidationError(
            "Must not contain invisible characters or characters that reorder text."
        )


def ensure_visible_name(form: Any, name: str = "name") -> None:
    """Have a form class refuse them in this field, if it has it."""
    if (field := form.base_fields.get(name)) is not None:
        field.validators = [*field.validators, check_visible]


def mark_pages() -> None:
    """Give each page what its sign explains. Call it when all pages are registered."""
    for model, page in admin.site._registry.items():
        columns = NOT_PROVEN.get(model._meta.label_lower, {})
        shown = _shown(page)
        page.not_proven = [  # type: ignore[attr-defined]
            ("" if name == "*" else _label(model, name), reason)
            for name, reason in columns.items()
            if name == "*" or name in shown
        ]


def _label(model: Any, name: str) -> str:
    try:
        return str(model._meta.get_field(name).verbose_name)
    except FieldDoesNotExist:
        return name.replace("_", " ")


def _shown(page: Any) -> set[str]:
    named = {*page.list_display, *page.readonly_fields, *(page.fields or ())}
    for _, options in page.fieldsets or ():
        named.update(options["fields"])
    return {name for name in named if isinstance(name, str)}


_LATEST = 253_402_300_799


def shown_entry(entry: FileEntry) -> dict[str, Any]:
    is_moment = 0 <= entry.modified <= _LATEST
    return {
        "name": visible(escape(entry.path)),
        "target": visible(escape(entry.target)),
        "type": entry.type,
        "size": entry.size,
        "mode": f"{entry.mode & 0o7777:04o}",
        "modified": datetime.fromtimestamp(entry.modified, UTC) if is_moment else None,
        "link": link_to(entry.path) if entry.type == "directory" else "",
    }


def link_to(path: str, after: str = "") -> str:
    """The query of a page about this path. As the database has it: no query that Django reads holds
    a name that is not UTF-8. `after` is such a text already."""
    asked = {"path": to_text(path), **({"after": after} if after else {})}
    return "?" + urlencode(asked)


def named_in(request: HttpRequest) -> str:
    """The path of such a query."""
    return from_text(request.GET.get("path", ""))


VIEW_EXECUTION = "executions.view_execution"

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
