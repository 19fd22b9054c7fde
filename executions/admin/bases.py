"""Django's admin classes with type parameters, which they take only in type checking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django import forms
from django.contrib import admin
from django.core.paginator import Paginator

from executions.models import ApiKey, Artifact, Execution, LedgerEntry, Tenant

if TYPE_CHECKING:
    TenantModelAdmin = admin.ModelAdmin[Tenant]
    ApiKeyModelAdmin = admin.ModelAdmin[ApiKey]
    ApiKeyModelForm = forms.ModelForm[ApiKey]
    ExecutionModelAdmin = admin.ModelAdmin[Execution]
    LedgerEntryModelAdmin = admin.ModelAdmin[LedgerEntry]
    ExecutionPaginator = Paginator[Execution]
    ArtifactTabularInline = admin.TabularInline[Artifact, Execution]
else:
    TenantModelAdmin = ApiKeyModelAdmin = ExecutionModelAdmin = admin.ModelAdmin
    LedgerEntryModelAdmin = admin.ModelAdmin
    ApiKeyModelForm = forms.ModelForm
    ExecutionPaginator = Paginator
    ArtifactTabularInline = admin.TabularInline
