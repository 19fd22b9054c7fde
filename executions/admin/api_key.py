from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import ngettext
from django.views.decorators.debug import sensitive_variables

from executions.admin.bases import ApiKeyModelAdmin, ApiKeyModelForm
from executions.models import ApiKey
from executions.services.keys import create_api_key, revoke

CONFIGURE = "providers.change_providerconfig"


class NewApiKeyForm(ApiKeyModelForm):
    class Meta:
        model = ApiKey
        fields = ("tenant", "name", "scope", "expires_at")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["scope"].required = False

    def clean_expires_at(self) -> Any:
        expires_at = self.cleaned_data["expires_at"]
        if expires_at is not None and expires_at <= timezone.now():
            raise ValidationError("Must be in the future.")
        return expires_at


@admin.register(ApiKey)
class ApiKeyAdmin(ApiKeyModelAdmin):
    """Keys are made here, shown once, and revoked. Nothing of a key can be changed."""

    list_display = (
        "prefix",
        "name",
        "tenant",
        "scope",
        "state",
        "created_at",
        "expires_at",
        "last_used_at",
    )
    list_filter = ("tenant",)
    list_select_related = ("tenant",)
    search_fields = ("name", "prefix", "tenant__slug")
    autocomplete_fields = ("tenant",)
    actions = ("revoke_keys",)
    created_template = "admin/executions/apikey/created.html"

    def get_form(
        self, request: HttpRequest, obj: ApiKey | None = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm[ApiKey]]:
        if obj is None:
            kwargs["form"] = NewApiKeyForm
        return super().get_form(request, obj, change, **kwargs)

    def formfield_for_choice_field(
        self, db_field: Any, request: HttpRequest, **kwargs: Any
    ) -> forms.TypedChoiceField | None:
        if db_field.name == "scope" and not request.user.has_perm(CONFIGURE):
            # Who may not configure providers could otherwise do so with a key made here.
            kwargs["choices"] = ((ApiKey.Scope.EXECUTE, ApiKey.Scope.EXECUTE.label),)
        return super().formfield_for_choice_field(db_field, request, **kwargs)

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> tuple[str, ...]:
        if obj is None:
            return ("tenant", "name", "scope", "expires_at")
        return (
            "tenant",
            "name",
            "scope",
            "prefix",
            "state",
            "created_at",
            "expires_at",
            "revoked_at",
            "last_used_at",
        )

    def has_change_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        return obj is None and super().has_change_permission(request, obj)

    @sensitive_variables("key_text")
    def save_model(
        self, request: HttpRequest, obj: ApiKey, form: forms.ModelForm[ApiKey], change: bool
    ) -> None:
        created, key_text = create_api_key(obj.tenant, obj.name, obj.expires_at, obj.scope)
        obj.pk, obj.prefix, obj.key_hash = created.pk, created.prefix, created.key_hash
        obj._state.adding = False
        request.new_api_key = key_text  # type: ignore[attr-defined]

    def response_add(
        self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None
    ) -> HttpResponse:
        """The page with the key, answered directly: a message would put it into a cookie."""
        context = {
            **self.admin_site.each_context(request),
            "title": "API key created",
            "opts": self.opts,
            "api_key": obj,
            "key_text": request.new_api_key,  # type: ignore[attr-defined]
        }
        response = TemplateResponse(request, self.created_template, context)
        response["Cache-Control"] = "no-store"
        return response

    @admin.display(description="state")
    def state(self, api_key: ApiKey) -> str:
        if api_key.revoked_at is not None:
            return "revoked"
        return "valid" if api_key.is_valid(timezone.now()) else "expired"

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke_keys(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        revoked = 0
        for api_key in queryset:
            if revoke(api_key):
                self.log_change(request, api_key, "Revoked.")
                revoked += 1
        message = ngettext("%d key was revoked.", "%d keys were revoked.", revoked) % revoked
        self.message_user(request, message, messages.SUCCESS)
