"""`GET /api/v1/usage`: what a tenant may have, and what it has used of that."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import ApiView
from executions.api.rendering import json_response
from executions.capabilities.spending.usage import usage_of
from executions.tenants.quotas import Quota


class QuotaSerializer(serializers.Serializer[Any]):
    limit = serializers.FloatField(allow_null=True, help_text="Null if no budget is set.")
    used = serializers.FloatField(
        help_text="Includes the amounts that are reserved for work that has not ended."
    )
    resets_at = serializers.DateTimeField(
        allow_null=True,
        help_text="Null if the use decreases by itself, for example when executions end.",
    )


class UsageSerializer(serializers.Serializer[Any]):
    tenant = serializers.CharField()
    quotas = inline_serializer("Quotas", {quota.value: QuotaSerializer() for quota in Quota})


class UsageView(ApiView):
    @extend_schema(
        operation_id="get_usage",
        summary="Get quotas and usage",
        description="The quotas of the tenant, with the usage of all of its keys. Each quota has "
        "the name that an SB008 error gives in `field`. Days are UTC days.",
        tags=["usage"],
        responses={200: UsageSerializer, **schema.errors(401, 503)},
    )
    def get(self, request: Request) -> HttpResponse:
        tenant = self.api_key.tenant
        quotas = {
            quota.value: {
                "limit": use.limit,
                "used": use.used,
                "resets_at": use.resets_at.isoformat() if use.resets_at else None,
            }
            for quota, use in usage_of(tenant).items()
        }
        return json_response({"tenant": tenant.slug, "quotas": quotas})
