"""The theme's admin classes, with Django's type parameters where types are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django import forms
from django.contrib import admin
from django.core.paginator import Paginator
from unfold.admin import ModelAdmin as UnfoldModelAdmin

from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.runs.process_models import Process
from executions.sessions.models import Session
from executions.sessions.storage.models import Snapshot
from executions.tenants.models import ApiKey, Tenant

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
