"""Configuring providers and choosing the one that runs the code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.decorators import method_decorator
from django.utils.html import escape, format_html_join
from django.utils.safestring import SafeString
from django.views.decorators.debug import sensitive_post_parameters

from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration
from providers.forms import VERSION, ProviderConfigForm, build_form
from providers.models import ProviderConfig
from providers.schema import mask_secrets
from providers.services import ConfigurationConflict, activate, save_config, stored_config

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[ProviderConfig]
else:
    _ModelAdmin = admin.ModelAdmin

_LOST = (
    "The stored configuration cannot be decrypted: the key it was written with is not in "
    "FERNET_KEYS. Put that key back, or enter the whole configuration anew."
)
_STATE = ("provider_name", "is_active", "version", "updated_at")


def _provider_of(request: HttpRequest, row: ProviderConfig | None) -> type[SandboxProvider] | None:
    try:
        return registry.get(row.provider_id if row else request.GET.get("provider", ""))
    except InvalidConfiguration:
        return None


@admin.register(ProviderConfig)
class ProviderConfigAdmin(_ModelAdmin):
    list_display = _STATE
    readonly_fields = (*_STATE, "configuration")
    actions = ("activate_selected",)
    change_form_template = "admin/providers/providerconfig/change_form.html"
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[ProviderConfig]:
        # One row whose key is lost must not take the whole list down.
        return super().get_queryset(request).defer("config")

    @admin.display(description="Provider", ordering="provider_id")
    def provider_name(self, row: ProviderConfig) -> str:
        try:
            return registry.get(row.provider_id).name
        except InvalidConfiguration:
            return f"{row.provider_id} (not available)"

    @admin.display(description="Configuration")
    def configuration(self, row: ProviderConfig) -> SafeString | str:
        """The stored values with masked secrets, for those who may only look."""
        try:
            schema = registry.get(row.provider_id).config_fields
        except InvalidConfiguration:
            schema = {}
        config = stored_config(row)
        if config is None:
            return _LOST
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
        return build_form(provider, stored_config(obj))

    def has_change_permission(
        self, request: HttpRequest, obj: ProviderConfig | None = None
    ) -> bool:
        # Of a provider whose package is gone there is no form: its page is only to be read.
        editable = obj is None or _provider_of(request, obj) is not None
        return editable and super().has_change_permission(request, obj)

    def get_fieldsets(self, request: HttpRequest, obj: ProviderConfig | None = None) -> Any:
        provider = _provider_of(request, obj)
        state = [(None, {"fields": _STATE})] if obj else []
        if provider is None or not self._may_edit(request, obj):
            return [*state, (None, {"fields": ("configuration",)})]
        form = self.get_form(request, obj, change=obj is not None)
        description: str = escape(provider.description)
        if obj and stored_config(obj) is None:
            description = _LOST
        options = {"fields": list(form.base_fields), "description": description}
        return [*state, (provider.name, options)]

    def _may_edit(self, request: HttpRequest, row: ProviderConfig | None) -> bool:
        if row is None:
            return self.has_add_permission(request)
        return self.has_change_permission(request, row)

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
            return self._pick(request)
        row = self.get_queryset(request).filter(provider_id=provider.id).first()
        if row is not None and request.method == "GET":
            return HttpResponseRedirect(f"../{row.pk}/change/")
        return super().add_view(request, form_url, extra_context)

    def _pick(self, request: HttpRequest) -> HttpResponse:
        providers = registry.all_providers()
        configured = {row.provider_id for row in self.get_queryset(request)}
        context = {
            **self.admin_site.each_context(request),
            "opts": self.model._meta,
            "title": "Choose a provider",
            "providers": providers.values(),
            "configured": configured,
            "broken": registry.broken(),
        }
        return TemplateResponse(request, "admin/providers/providerconfig/pick.html", context)

    def save_model(
        self, request: HttpRequest, obj: ProviderConfig, form: ProviderConfigForm, change: bool
    ) -> None:
        saved = save_config(
            obj.provider_id,
            form.config,
            expected_version=form.cleaned_data[VERSION],
            clear=form.cleared,
        )
        obj.pk, obj.version = saved.pk, saved.version

    def response_add(
        self, request: HttpRequest, obj: ProviderConfig, post_url_continue: str | None = None
    ) -> HttpResponse:
        self._activate_if_asked(request, obj)
        return super().response_add(request, obj, post_url_continue)

    def response_change(self, request: HttpRequest, obj: ProviderConfig) -> HttpResponse:
        self._activate_if_asked(request, obj)
        return super().response_change(request, obj)

    def _activate_if_asked(self, request: HttpRequest, row: ProviderConfig) -> None:
        if "_activate" in request.POST and self.has_change_permission(request, row):
            self._activate(request, row)

    @admin.action(description="Activate the selected provider", permissions=["change"])
    def activate_selected(self, request: HttpRequest, rows: QuerySet[ProviderConfig]) -> None:
        chosen = list(rows[:2])
        if len(chosen) != 1:
            self.message_user(request, "Select one provider to activate.", messages.ERROR)
            return
        self._activate(request, chosen[0])

    def _activate(self, request: HttpRequest, row: ProviderConfig) -> None:
        try:
            activate(row.provider_id)
        except InvalidConfiguration as error:
            self.message_user(request, f"Not activated. {error.message}", messages.ERROR)
            return
        except ConfigurationConflict as conflict:
            self.message_user(request, f"Not activated. {conflict}", messages.ERROR)
            return
        self.log_change(request, row, "Activated.")
        self.message_user(request, f"{self.provider_name(row)} runs the code now.")
