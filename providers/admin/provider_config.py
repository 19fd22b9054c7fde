"""Configuring providers and choosing the one that runs the code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import escape, format_html, format_html_join
from django.utils.safestring import SafeString
from django.views.decorators.debug import sensitive_post_parameters

from providers import registry
from providers.admin.exchange import export_view, import_view
from providers.admin.pages import (
    ProviderConfigModelAdmin,
    account_of,
    author_of,
    badge,
    provider_name,
)
from providers.admin.routing import asked_for, pick_page
from providers.admin_pages import SaysWhatHappens
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration
from providers.forms import CLEAR, REASON, VERSION, ProviderConfigForm, build_form
from providers.models import PendingChange, ProviderConfig, ProviderHealth
from providers.schema import mask_secrets
from providers.services import (
    ConfigurationConflict,
    request_change,
    stored_config,
    two_person_rule,
)
from providers.services.configuration import Unreadable, is_readable
from providers.services.impact import without_provider
from providers.services.this_machine import abilities_for
from providers.services.trial import Trial, try_provider

Action = PendingChange.Action

_WAITS = "Change submitted for approval (Pending changes)."
_HEALTH = ("config_version", "healthy", "code", "message", "latency_ms", "checked_at", "figures")
_STATE = ("provider_name", "health", "in_service", "version", "updated_at")
_SHOWN = (*_STATE, "enforced_by")
_OF_A_HOST = ("sessions", "busy", "waiting", "capacity")


def _provider_of(request: HttpRequest, row: ProviderConfig | None) -> type[SandboxProvider] | None:
    try:
        return registry.get(row.provider_id if row else asked_for(request))
    except InvalidConfiguration:
        return None


def _form_of(provider_id: str, stored: Mapping[str, Any] | None) -> type[ProviderConfigForm]:
    try:
        return build_form(provider_id, stored)
    except InvalidConfiguration:
        raise Http404 from None


def _sections(form: type[ProviderConfigForm]) -> list[tuple[str | None, dict[str, Any]]]:
    """The form's fields under the headings of their declarations, the reason last."""
    declared = form.provider.config_fields
    sections: dict[str, list[str]] = {}
    for name in form.base_fields:
        key = name.removeprefix(CLEAR)
        sections.setdefault(declared[key].group if key in declared else "", []).append(name)
    own = sections.pop("", [])
    # What no heading has stands first, with what every provider is asked for at the end.
    last = [name for name in own if name.removeprefix(CLEAR) not in declared]
    first = [name for name in own if name not in last]
    shown: list[tuple[str | None, list[str]]] = [
        (None, first),
        *sections.items(),
        (None, last),
    ]
    return [(title, {"fields": names, "classes": ("columns",)}) for title, names in shown if names]


def _hosts_of(row: ProviderConfig) -> list[dict[str, Any]]:
    """What the last check found of each host of several, of this configuration."""
    if getattr(row, "health_config_version", None) != row.version:
        return []
    found: list[dict[str, Any]] = (getattr(row, "health_figures", None) or {}).get("hosts") or []
    return found


@admin.register(ProviderConfig)
class ProviderConfigAdmin(SaysWhatHappens, ProviderConfigModelAdmin):
    list_display = _STATE
    readonly_fields = (*_SHOWN, "hosts", "configuration")
    actions = ("activate_selected",)
    compressed_fields = False
    warn_unsaved_form = True
    change_form_template = "admin/providers/providerconfig/change_form.html"
    change_list_template = "admin/providers/providerconfig/change_list.html"
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[ProviderConfig]:
        # One row whose key is lost must not take the whole list down.
        found = ProviderHealth.objects.filter(provider_id=OuterRef("provider_id"))
        health = {f"health_{name}": Subquery(found.values(name)) for name in _HEALTH}
        rows: QuerySet[ProviderConfig] = super().get_queryset(request).defer("config")
        return rows.annotate(**health)

    @admin.display(description="Provider", ordering="provider_id")
    def provider_name(self, row: ProviderConfig) -> str:
        return provider_name(row.provider_id)

    @admin.display(description="Status", ordering="is_active")
    def in_service(self, row: ProviderConfig) -> SafeString:
        return badge("Active", "good") if row.is_active else badge("Standby", "quiet")

    @admin.display(description="Health")
    def health(self, row: ProviderConfig) -> SafeString:
        """What the last background check found, unless the configuration is another by now."""
        if getattr(row, "health_config_version", None) != row.version:
            return badge("Not checked yet", "quiet")
        found = {name: getattr(row, f"health_{name}") for name in _HEALTH}
        when = f"{found['checked_at']:%Y-%m-%d %H:%M:%S} UTC, {found['latency_ms']:g} ms"
        if found["healthy"]:
            return badge("Healthy", "good", when)
        return badge(f"{found['code']} Unhealthy", "bad", f"{found['message']} {when}")

    @admin.display(description="Enforced by")
    def enforced_by(self, row: ProviderConfig) -> SafeString | str:
        """Show which part of the sandbox enforces which limit, as the last check found it."""
        if getattr(row, "health_config_version", None) != row.version:
            return "Not checked yet"
        message = getattr(row, "health_message", "") if getattr(row, "health_healthy", 0) else ""
        if not message:
            return "Not reported by the provider"
        parts = [part.partition(": ") for part in message.split("; ")]
        if not all(separator for _, separator, _ in parts):
            return str(message)
        rows = format_html_join(
            "",
            '<tr><th scope="row">{}</th><td>{}</td></tr>',
            ((limit, enforcer) for limit, _, enforcer in parts),
        )
        return format_html('<table class="plain">{}</table>', rows)

    @admin.display(description="Hosts")
    def hosts(self, row: ProviderConfig) -> SafeString:
        """Show each host with its figures, as the last check found them."""
        numbers = [(each, *(each.get(name, "") for name in _OF_A_HOST)) for each in _hosts_of(row)]
        rows = format_html_join(
            "",
            '<tr><th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>'
            "<td>{}</td></tr>",
            ((each["address"], each["state"], *rest, each["problem"]) for each, *rest in numbers),
        )
        heads = ("Address", "State", "Sessions", "Busy", "Queued", "Max", "Problem")
        head = format_html_join("", '<th scope="col">{}</th>', ((each,) for each in heads))
        return format_html('<table class="plain"><tr>{}</tr>{}</table>', head, rows)

    @admin.display(description="Configuration")
    def configuration(self, row: ProviderConfig) -> SafeString | str:
        """The stored values with masked secrets, for those who may only look."""
        try:
            schema = registry.get(row.provider_id).config_fields
        except InvalidConfiguration:
            schema = {}
        try:
            config = stored_config(row) or {}
        except Unreadable as error:
            return error.message
        shown = mask_secrets(schema, config).items()
        labelled = ((schema[key].label if key in schema else key, value) for key, value in shown)
        return format_html_join("", "<div>{}: {}</div>", labelled)

    def get_form(
        self,
        request: HttpRequest,
        obj: ProviderConfig | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> type[Any]:
        provider = _provider_of(request, obj)
        if provider is None or not self._may_edit(request, obj):
            return super().get_form(request, obj, change, fields=())
        return build_form(obj.provider_id if obj else asked_for(request), stored_config(obj))

    def has_change_permission(
        self, request: HttpRequest, obj: ProviderConfig | None = None
    ) -> bool:
        # Without its package or its key there is no form: the page is only to be read.
        editable = obj is None or (_provider_of(request, obj) is not None and is_readable(obj))
        return super().has_change_permission(request, obj) and editable

    def get_fieldsets(self, request: HttpRequest, obj: ProviderConfig | None = None) -> Any:
        provider = _provider_of(request, obj)
        shown = (*_SHOWN, "hosts") if obj and _hosts_of(obj) else _SHOWN
        state = [("State", {"fields": shown, "classes": ("columns",)})] if obj else []
        if provider is None or not self._may_edit(request, obj):
            return [*state, (None, {"fields": ("configuration",)})]
        form = self.get_form(request, obj, change=obj is not None)
        description: str = escape(provider.description)
        head = {"fields": (), "description": description, "classes": ("provider-head",)}
        return [(provider_name(form.provider_id), head), *_sections(form), *state]

    def _may_edit(self, request: HttpRequest, row: ProviderConfig | None) -> bool:
        if row is None:
            return self.has_add_permission(request)
        return self.has_change_permission(request, row)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        may = self.has_add_permission(request) and self.has_change_permission(request)
        context = {"may_import": may, **(extra_context or {})}
        answer: HttpResponse = super().changelist_view(request, context)
        return answer

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        # The address names the provider; it must not prefill a field that has the same name.
        return {}

    @method_decorator(sensitive_post_parameters())
    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().changeform_view(request, *args, **kwargs)
        except ConfigurationConflict as conflict:
            # Somebody saved between the form's own check and the write.
            self.message_user(request, str(conflict), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())

    def add_view(
        self,
        request: HttpRequest,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if not self.has_add_permission(request):
            raise PermissionDenied
        provider = _provider_of(request, None)
        if provider is None:
            return pick_page(self, request)
        provider_id = asked_for(request)
        row = self.get_queryset(request).filter(provider_id=provider_id).first()
        if row is not None and request.method == "GET":
            return HttpResponseRedirect(f"../{row.pk}/change/")
        return super().add_view(
            request, form_url, {**(extra_context or {}), **self._live(request, provider_id, None)}
        )

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        row = self.get_object(request, object_id)
        live = self._live(request, row.provider_id, row) if row else {}
        return super().change_view(request, object_id, form_url, {**(extra_context or {}), **live})

    def _live(
        self, request: HttpRequest, provider_id: str, row: ProviderConfig | None
    ) -> dict[str, Any]:
        edits = self._may_edit(request, row)
        tests = edits or request.user.has_perm("providers.test_providerconfig")
        return {
            "provider_id": provider_id,
            "may_edit": edits,
            "may_test": tests,
            "may_activate": edits and self._may_activate(request),
            "two_person_rule": two_person_rule(),
            "abilities": abilities_for(provider_id),
            "waiting": PendingChange.objects.filter(
                subject=provider_id, status=PendingChange.Status.WAITING
            ).count(),
        }

    def save_model(
        self, request: HttpRequest, obj: ProviderConfig, form: ProviderConfigForm, change: bool
    ) -> None:
        both = "_activate" in request.POST and self._may_activate(request)
        saved = request_change(
            obj.provider_id,
            Action.SAVE_AND_ACTIVATE if both else Action.SAVE,
            form.config,
            author=author_of(request),
            author_id=account_of(request),
            reason=form.cleaned_data[REASON],
            expected_version=form.cleaned_data[VERSION],
            clear=form.cleared,
        )
        if isinstance(saved, ProviderConfig):
            obj.pk, obj.version, obj.is_active = saved.pk, saved.version, saved.is_active

    def log_addition(self, request: HttpRequest, obj: ProviderConfig, message: Any) -> Any:
        if two_person_rule():
            return self._log_request(request, obj, "Requested a first configuration.")
        return super().log_addition(request, obj, message)

    def log_change(self, request: HttpRequest, obj: ProviderConfig, message: Any) -> Any:
        # The form's own message, a list, says what was changed; under the rule nothing was yet.
        if two_person_rule() and isinstance(message, list):
            return self._log_request(request, obj, "Requested a change.")
        return super().log_change(request, obj, message)

    def log_deletions(self, request: HttpRequest, queryset: QuerySet[ProviderConfig]) -> Any:
        if not two_person_rule():
            return super().log_deletions(request, queryset)
        return [self._log_request(request, row, "Requested removal.") for row in queryset]

    def _log_request(self, request: HttpRequest, row: ProviderConfig, message: str) -> LogEntry:
        """What waits is noted as asked for; a provider that is not configured has no row yet."""
        return LogEntry.objects.create(
            user_id=cast("int", request.user.pk),
            content_type_id=ContentType.objects.get_for_model(ProviderConfig).pk,
            object_id=None if row._state.adding else str(row.pk),
            object_repr=row.provider_id,
            action_flag=CHANGE,
            change_message=message,
        )

    def response_add(
        self, request: HttpRequest, obj: ProviderConfig, post_url_continue: str | None = None
    ) -> HttpResponse:
        return self._saved(request, obj) or super().response_add(request, obj, post_url_continue)

    def response_change(self, request: HttpRequest, obj: ProviderConfig) -> HttpResponse:
        return self._saved(request, obj) or super().response_change(request, obj)

    def _saved(self, request: HttpRequest, row: ProviderConfig) -> HttpResponse | None:
        if two_person_rule():
            self.message_user(request, f"{self.provider_name(row)}: {_WAITS}", messages.WARNING)
            return HttpResponseRedirect(reverse("admin:providers_providerconfig_changelist"))
        if "_activate" in request.POST and self._may_activate(request):
            self.log_change(request, row, "Activated.")
            message = f"{self.provider_name(row)} is now the active provider."
            self.message_user(request, message, messages.SUCCESS)
        return None

    def _may_activate(self, request: HttpRequest) -> bool:
        return request.user.has_perm("providers.activate_providerconfig")

    def has_activate_permission(self, request: HttpRequest) -> bool:
        return self._may_activate(request)

    @admin.action(description="Activate the selected provider", permissions=["activate"])
    def activate_selected(self, request: HttpRequest, rows: QuerySet[ProviderConfig]) -> None:
        chosen = list(rows[:2])
        if len(chosen) != 1:
            self.message_user(request, "Select one provider to activate.", messages.ERROR)
            return
        row = chosen[0]
        try:
            done = request_change(
                row.provider_id,
                Action.ACTIVATE,
                author=author_of(request),
                author_id=account_of(request),
            )
        except (InvalidConfiguration, ConfigurationConflict) as error:
            self.message_user(request, f"Not activated. {error}", messages.ERROR)
            return
        if isinstance(done, PendingChange):
            self.log_change(request, row, "Requested: Activate.")
            self.message_user(request, f"{self.provider_name(row)}: {_WAITS}", messages.WARNING)
            return
        self.log_change(request, row, "Activated.")
        self.message_user(request, f"{self.provider_name(row)} is now the active provider.")

    def consequences(self, row: ProviderConfig) -> list[str]:
        return without_provider(row)

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        # Removing is done one by one, on a page that says what it means.
        return {k: v for k, v in super().get_actions(request).items() if k != "delete_selected"}

    def delete_model(self, request: HttpRequest, obj: ProviderConfig) -> None:
        request_change(
            obj.provider_id,
            Action.REMOVE,
            author=author_of(request),
            author_id=account_of(request),
        )

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: int) -> HttpResponse:
        if not two_person_rule():
            return super().response_delete(request, obj_display, obj_id)
        self.message_user(request, f"{obj_display}: {_WAITS}", messages.WARNING)
        return HttpResponseRedirect(reverse("admin:providers_providerconfig_changelist"))

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path(
                "live/<str:provider_id>/validate/",
                wrap(self.validate_view),
                name="providers_validate",
            ),
            path("live/<str:provider_id>/test/", wrap(self.test_view), name="providers_test"),
            path("export/", wrap(partial(export_view, admin=self)), name="providers_export"),
            path("import/", wrap(partial(import_view, admin=self)), name="providers_import"),
            *super().get_urls(),
        ]

    @method_decorator(sensitive_post_parameters())
    def validate_view(self, request: HttpRequest, provider_id: str) -> JsonResponse:
        """What is wrong with the values as they are in the form, by field. Nothing is saved."""
        _, form = self._unsaved(request, provider_id)
        return JsonResponse({"errors": {key: list(texts) for key, texts in form.errors.items()}})

    @method_decorator(sensitive_post_parameters())
    def test_view(self, request: HttpRequest, provider_id: str) -> JsonResponse:
        """Start a sandbox with the values in the form, or with the stored ones, and run code."""
        if "_stored" in request.POST:
            if not request.user.has_perm("providers.test_providerconfig"):
                raise PermissionDenied
            _form_of(provider_id, None)
            trial = try_provider(provider_id, author=author_of(request))
        else:
            row, form = self._unsaved(request, provider_id)
            errors = {key: " ".join(map(str, texts)) for key, texts in form.errors.items()}
            if errors:
                trial = Trial(False, "The values are refused.", code="SB002", errors=errors)
            else:
                trial = try_provider(
                    provider_id, form.config, clear=tuple(form.cleared), author=author_of(request)
                )
        row = self.get_queryset(request).filter(provider_id=provider_id).first()
        if row is not None:
            outcome = "worked" if trial.success else f"failed with {trial.code}"
            self.log_change(request, row, f"Tested the connection, which {outcome}.")
        return JsonResponse(trial.as_json())

    def _unsaved(
        self, request: HttpRequest, provider_id: str
    ) -> tuple[ProviderConfig | None, ProviderConfigForm]:
        """The form as it was sent, for those alone who may save it: stored secrets complete it."""
        row = ProviderConfig.objects.filter(provider_id=provider_id).defer("config").first()
        if not self._may_edit(request, row):
            raise PermissionDenied
        if request.method != "POST":
            raise Http404
        form_class = _form_of(provider_id, stored_config(row))
        form = form_class(request.POST, instance=row or ProviderConfig())
        return row, form
