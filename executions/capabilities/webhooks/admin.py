from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import ngettext
from django.views.decorators.debug import sensitive_variables

from executions.admin.executions import BoundedPaginator, SessionTenantFilter
from executions.admin.frame import (
    WebhookDeliveryModelAdmin,
    WebhookSecretModelAdmin,
    WebhookSecretModelForm,
)
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.capabilities.webhooks.service import check_room, create_secret, retire, send_again
from executions.tenants.models import Tenant
from providers.admin_pages import ReadOnly
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible

RESEND = "executions.resend_webhookdelivery"


class SecretForm(WebhookSecretModelForm):
    class Meta:
        model = WebhookSecret
        fields = ("tenant",)

    def clean_tenant(self) -> Tenant:
        tenant: Tenant = self.cleaned_data["tenant"]
        try:
            check_room(tenant)
        except InvalidConfiguration as error:
            raise forms.ValidationError(error.message) from None
        return tenant


@admin.register(WebhookSecret)
class WebhookSecretAdmin(WebhookSecretModelAdmin):
    """Secrets are made here and shown once, and retired. Nothing else of them changes."""

    list_display = ("tenant", "state", "created_at", "retired_at")
    list_filter = ("tenant",)
    list_select_related = ("tenant",)
    autocomplete_fields = ("tenant",)
    fieldsets = (
        (
            None,
            {
                "fields": ("tenant",),
                "description": "The secret is created and shown once when you save. It signs the "
                "tenant's webhooks. All active secrets sign, so that receivers can switch.",
            },
        ),
    )
    form = SecretForm
    actions = ("retire_secrets",)
    created_template = "admin/executions/webhooksecret/created.html"

    def has_change_permission(self, request: HttpRequest, obj: WebhookSecret | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: WebhookSecret | None = None) -> bool:
        return False

    def has_retire_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("executions.change_webhooksecret")

    @sensitive_variables("text")
    def save_model(
        self,
        request: HttpRequest,
        obj: WebhookSecret,
        form: forms.ModelForm[WebhookSecret],
        change: bool,
    ) -> None:
        created, text = create_secret(obj.tenant)
        obj.pk = created.pk
        obj._state.adding = False
        request.new_webhook_secret = text  # type: ignore[attr-defined]

    def response_add(
        self, request: HttpRequest, obj: WebhookSecret, post_url_continue: str | None = None
    ) -> HttpResponse:
        """The page with the secret, answered directly: a message would put it into a cookie."""
        context = {
            **self.admin_site.each_context(request),
            "title": "Webhook secret created",
            "opts": self.opts,
            "secret": obj,
            "text": request.new_webhook_secret,  # type: ignore[attr-defined]
        }
        response = TemplateResponse(request, self.created_template, context)
        response["Cache-Control"] = "no-store"
        return response

    @admin.display(description="status")
    def state(self, secret: WebhookSecret) -> str:
        return "retired" if secret.retired_at else "active"

    @admin.action(description="Retire the selected secrets", permissions=["retire"])
    def retire_secrets(self, request: HttpRequest, queryset: QuerySet[WebhookSecret]) -> None:
        retired = 0
        for secret in queryset.select_related("tenant"):
            if retire(secret):
                self.log_change(request, secret, "Retired.")
                retired += 1
        message = ngettext("%d secret was retired.", "%d secrets were retired.", retired) % retired
        self.message_user(request, message, messages.SUCCESS)


@admin.register(WebhookDelivery)
class WebhookDeliveryAdmin(ReadOnly, WebhookDeliveryModelAdmin):
    """What became of each webhook, and sending it again. Of answers their status alone is kept."""

    list_display = (
        *("created_at", "state", "shown_receiver", "tenant", "shown_execution", "event"),
        *("tries", "last_answer", "claimed_until"),
    )
    list_filter = (SessionTenantFilter, "event", "state")
    ordering = ("-id",)
    sortable_by = ()
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    actions = ("send_again",)
    fields = (
        *("id", "tenant", "shown_execution", "event", "shown_receiver", "state", "tries"),
        *("last_status", "problem", "created_at", "claimed_until", "give_up_at", "ended_at"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[WebhookDelivery]:
        return super().get_queryset(request).defer("url")

    def has_resend_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(RESEND)

    @admin.display(description="tenant")
    def tenant(self, delivery: WebhookDelivery) -> str:
        return delivery.tenant_slug

    @admin.display(description="last response")
    def last_answer(self, delivery: WebhookDelivery) -> str:
        return visible(delivery.problem) or str(delivery.last_status or "-")

    @admin.display(description="execution")
    def shown_execution(self, delivery: Any) -> SafeString:
        url = reverse("admin:executions_execution_change", args=[delivery.execution_id])
        return format_html('<a href="{}">{}</a>', url, delivery.execution_id)

    @admin.display(description="receiver")
    def shown_receiver(self, delivery: WebhookDelivery) -> str:
        return visible(delivery.receiver)

    @admin.action(description="Resend delivered or failed webhooks", permissions=["resend"])
    def send_again(self, request: HttpRequest, queryset: QuerySet[WebhookDelivery]) -> None:
        sent = 0
        for delivery in queryset:
            if send_again(delivery):
                self.log_change(request, delivery, "Sent again.")
                sent += 1
        message = ngettext("%d webhook is queued.", "%d webhooks are queued.", sent) % sent
        self.message_user(request, message, messages.SUCCESS)
