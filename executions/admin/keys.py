from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.middleware.csrf import rotate_token
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.translation import ngettext
from django.views.decorators.debug import sensitive_variables

from executions.admin.connect import Connect
from executions.admin.frame import (
    ApiKeyModelAdmin,
    ApiKeyModelForm,
    ensure_visible_name,
    refuse_unknown,
)
from executions.admin.tenants import revoked_key
from executions.capabilities.playground.admin import example_call
from executions.sessions.queries import ensure_unused
from executions.tenants.keys import CONFIGURE, create_api_key, revoke, rotate
from executions.tenants.models import USUAL_SCOPES, WORD_BOUNDS, ApiKey, Scope, as_words
from providers.admin_pages import WAITS, GuardedAdmin, log_request
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible
from providers.models import PendingChange
from providers.services import two_person_rule
from providers.services.guarded_rows import carry_out

_BOUNDS = (*WORD_BOUNDS, "minimum_isolation")
_SET = ("tenant", "name", "scopes", *_BOUNDS, "expires_at")
_KNOWN = ("prefix", "state", "rotated_from", "created_at", "revoked_at", "last_used_at")


class KeyForm(ApiKeyModelForm):
    scopes = forms.MultipleChoiceField(
        choices=Scope.choices,
        widget=forms.CheckboxSelectMultiple,
        initial=USUAL_SCOPES.split(),
        help_text="What the key can do.",
    )

    class Meta:
        model = ApiKey
        fields = _SET

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk is not None:
            self.initial["scopes"] = self.instance.scopes.split()

    def clean_scopes(self) -> str:
        return as_words(self.cleaned_data["scopes"])

    def clean_expires_at(self) -> Any:
        expires_at = self.cleaned_data["expires_at"]
        if expires_at is not None and expires_at <= timezone.now():
            raise ValidationError("Must be in the future.")
        return expires_at


class RotationForm(forms.Form):
    valid_until = forms.DateTimeField(
        label="Old key valid until (UTC)",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}),
    )
    expires_at = forms.DateTimeField(
        label="New key expires (UTC; empty: never)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}),
    )


@admin.register(ApiKey)
class ApiKeyAdmin(GuardedAdmin, ApiKeyModelAdmin):
    """Keys are made here and shown once, held to less or more, rotated and revoked.

    Under the two-person rule a new key opens nothing until a second person has given it its scopes:
    its text is there only once, for whoever makes it.
    """

    list_display = (
        "prefix",
        "shown_name",
        "tenant",
        "scopes",
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
    form = KeyForm
    created_template = "admin/executions/apikey/created.html"
    rotate_template = "admin/executions/apikey/rotate.html"
    revoke_template = "admin/executions/apikey/revoke.html"

    def get_urls(self) -> list[URLPattern]:
        rotating = self.admin_site.admin_view(self.rotate_view)
        revoking = self.admin_site.admin_view(self.revoke_view)
        return [
            path("<int:pk>/rotate/", rotating, name="executions_apikey_rotate"),
            path("<int:pk>/revoke/", revoking, name="executions_apikey_revoke"),
            *Connect(self).urls,
            *super().get_urls(),
        ]

    def get_form(
        self, request: HttpRequest, obj: ApiKey | None = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm[ApiKey]]:
        form = super().get_form(request, obj, change, **kwargs)
        ensure_visible_name(form)
        refuse_unknown(form, obj)
        has_it = obj is not None and obj.has_scope(Scope.ADMIN)
        if "scopes" in form.base_fields and not has_it and not request.user.has_perm(CONFIGURE):
            # As key_power has it, which refuses it as well.
            # The declared field itself is that of every other form.
            field: Any = deepcopy(form.base_fields["scopes"])
            form.base_fields["scopes"] = field
            field.choices = [each for each in Scope.choices if each[0] != Scope.ADMIN]
        return form

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> tuple[str, ...]:
        return _SET if obj is None else (*_SET, *_KNOWN)

    def get_readonly_fields(
        self, request: HttpRequest, obj: ApiKey | None = None
    ) -> tuple[str, ...]:
        return () if obj is None else ("tenant", *_KNOWN)

    def has_change_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        is_over = obj is not None and obj.revoked_at is not None
        return not is_over and super().has_change_permission(request, obj)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        if object_id is None and request.method == "POST":
            # What waits is said by `_make`: the key itself is made at once.
            return super(GuardedAdmin, self).changeform_view(
                request, object_id, form_url, extra_context
            )
        return super().changeform_view(request, object_id, form_url, extra_context)

    @sensitive_variables("key_text")
    def save_model(
        self, request: HttpRequest, obj: ApiKey, form: forms.ModelForm[ApiKey], change: bool
    ) -> None:
        if change:
            super().save_model(request, obj, form, change)
            return
        bounds = {name: getattr(obj, name) for name in _BOUNDS}
        created, key_text = self._make(
            request,
            obj.scopes,
            lambda scopes: create_api_key(obj.tenant, obj.name, obj.expires_at, scopes, **bounds),
        )
        obj.pk, obj.prefix, obj.key_hash = created.pk, created.prefix, created.key_hash
        obj.scopes = created.scopes
        obj._state.adding = False
        request.new_api_key = key_text  # type: ignore[attr-defined]

    @sensitive_variables("key_text")
    def _make(
        self, request: HttpRequest, scopes: str, make: Callable[[str], tuple[ApiKey, str]]
    ) -> tuple[ApiKey, str]:
        """Make a key with these scopes, or without any where giving them has to wait."""
        reason = request.POST.get("_reason", "").replace("\0", "")[:500]
        first = "" if two_person_rule() else scopes
        (api_key, key_text), _ = carry_out(request.user, lambda: make(first), reason=reason)
        if first == scopes:
            return api_key, key_text

        def give() -> None:
            given = ApiKey.objects.get(pk=api_key.pk)
            given.scopes = scopes
            given.save()

        for change in carry_out(request.user, give, reason=reason)[1]:
            log_request(request, PendingChange, f"Requested: {change}.", str(change), change.pk)
            messages.warning(request, f"{change}: {WAITS}")
        return api_key, key_text

    def response_add(
        self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None
    ) -> HttpResponse:
        return self._shown_once(request, obj, request.new_api_key)  # type: ignore[attr-defined]

    @sensitive_variables("key_text")
    def _shown_once(self, request: HttpRequest, api_key: ApiKey, key_text: str) -> HttpResponse:
        """The page with the key, answered directly: a message would put it into a cookie.

        What made it is refused when it is sent again, as by loading the page anew: that would make
        another key, which nobody asked for.
        """
        rotate_token(request)
        context = {
            **self.admin_site.each_context(request),
            "title": "API key created",
            "opts": self.opts,
            "api_key": api_key,
            "key_text": key_text,
            "shown_name": visible(api_key.name),
            "example": example_call(request, api_key, key_text),
        }
        response = TemplateResponse(request, self.created_template, context)
        response["Cache-Control"] = "no-store"
        return response

    def revoke_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Asks, with what will happen then, and does it."""
        api_key = ApiKey.objects.select_related("tenant").filter(pk=pk).first()
        if api_key is None:
            raise Http404
        if not self.has_change_permission(request, api_key):
            raise PermissionDenied
        if request.method == "POST":
            if revoke(api_key):
                self.log_change(request, api_key, "Revoked.")
                messages.success(request, f"{visible(str(api_key))} was revoked.")
            return redirect("admin:executions_apikey_change", pk)
        context = {
            **self.admin_site.each_context(request),
            "title": "Revoke key?",
            "opts": self.opts,
            "api_key": api_key,
            "shown_name": visible(str(api_key)),
            "consequences": revoked_key(api_key),
        }
        return TemplateResponse(request, self.revoke_template, context)

    def consequences(self, row: ApiKey) -> list[str]:
        return revoked_key(row)

    def delete_model(self, request: HttpRequest, obj: ApiKey) -> None:
        ensure_unused([obj])
        super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        ensure_unused(list(queryset))
        super().delete_queryset(request, queryset)

    @sensitive_variables("key_text")
    def rotate_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """A key in the place of this one, which stays valid for a while."""
        api_key = ApiKey.objects.select_related("tenant").filter(pk=pk).first()
        if api_key is None:
            raise Http404
        if not (self.has_add_permission(request) and self.has_change_permission(request, api_key)):
            raise PermissionDenied
        form = RotationForm(
            request.POST or None,
            initial={"valid_until": _minutes(timezone.now() + timedelta(days=1))},
        )
        if request.method == "POST" and form.is_valid():
            try:
                with transaction.atomic():
                    new, key_text = self._rotate(request, api_key, form.cleaned_data)
            except InvalidConfiguration as error:
                form.add_error(None, error.message)
            else:
                return self._shown_once(request, new, key_text)
        context = {
            **self.admin_site.each_context(request),
            "title": "Rotate key",
            "opts": self.opts,
            "api_key": api_key,
            "form": form,
        }
        return TemplateResponse(request, self.rotate_template, context)

    def _rotate(
        self, request: HttpRequest, api_key: ApiKey, wanted: dict[str, Any]
    ) -> tuple[ApiKey, str]:
        made = self._make(
            request,
            api_key.scopes,
            lambda scopes: rotate(
                api_key, wanted["valid_until"], expires_at=wanted["expires_at"], scopes=scopes
            ),
        )
        self.log_addition(request, made[0], f"Replaces {api_key}.")
        self.log_change(request, api_key, f"Rotated; valid until {api_key.expires_at}.")
        return made

    @admin.display(description="name", ordering="name")
    def shown_name(self, api_key: ApiKey) -> str:
        return visible(api_key.name)

    @admin.display(description="status")
    def state(self, api_key: ApiKey) -> str:
        if api_key.revoked_at is not None:
            return "revoked"
        if not api_key.is_valid(timezone.now()):
            return "expired"
        return "valid" if api_key.scopes else "no scopes"

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke_keys(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        revoked = 0
        for api_key in queryset:
            if revoke(api_key):
                self.log_change(request, api_key, "Revoked.")
                revoked += 1
        message = ngettext("%d key was revoked.", "%d keys were revoked.", revoked) % revoked
        self.message_user(request, message, messages.SUCCESS)


def _minutes(moment: datetime) -> str:
    """As the browser's field has it."""
    return moment.strftime("%Y-%m-%dT%H:%M")
