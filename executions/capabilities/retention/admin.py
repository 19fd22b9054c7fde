"""The page of legal holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from executions.capabilities.retention.capability import check_hold
from executions.ledger.models import LegalHold
from providers.admin_pages import GuardedAdmin
from providers.errors import InvalidConfiguration

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[LegalHold]
    _Form = forms.ModelForm[LegalHold]
else:
    _Admin, _Form = ModelAdmin, forms.ModelForm


class HoldForm(_Form):
    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                check_hold(LegalHold(**cleaned))
            except InvalidConfiguration as error:
                raise ValidationError({error.field or "__all__": error.message}) from None
        return cleaned


@admin.register(LegalHold)
class LegalHoldAdmin(GuardedAdmin, _Admin):
    """One is placed by one administrator, and lifted, which is to delete it, by two."""

    form = HoldForm
    list_display = ("tenant_slug", "execution_id", "reason", "created_at")
    list_filter = ("tenant_slug",)
    search_fields = ("tenant_slug", "reason")
    fields = ("tenant_slug", "execution_id", "reason")

    def has_change_permission(self, request: HttpRequest, obj: LegalHold | None = None) -> bool:
        # What is held, and for what, does not change: lift it, and place another one.
        return False
