"""The shapes of the admin API, for its description."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiResponse, PolymorphicProxySerializer
from rest_framework import serializers

from executions.api.schema import ERRORS, AnyJson, ErrorSerializer, JsonObject


class AdminDataSerializer(serializers.Serializer[Any]):
    data = AnyJson()  # type: ignore[assignment]


class AdminMessageSerializer(serializers.Serializer[Any]):
    message = serializers.CharField()


class AdminPendingSerializer(AdminMessageSerializer):
    pending = serializers.IntegerField(help_text="Id of the change that waits for approval.")


class AdminRefusedSerializer(serializers.Serializer[Any]):
    """An error in RAGFlow's format."""

    error = serializers.CharField()
    details = AnyJson(required=False, help_text="One problem per field, or a text.")


# A body that cannot be read, and a key without the scope, are told as everywhere in this API.
_ERROR = PolymorphicProxySerializer(
    component_name="AdminError",
    serializers=[AdminRefusedSerializer, ErrorSerializer],
    resource_type_field_name=None,
)


def errors(*statuses: int) -> dict[int, OpenApiResponse]:
    """Each with what is told in that case, to whoever administrates."""
    told = sorted({*statuses, 400, 403, 429, 503})
    return {each: OpenApiResponse(_ERROR, ERRORS[each]) for each in told}


class AdminTrialSerializer(serializers.Serializer[Any]):
    success = serializers.BooleanField()
    message = serializers.CharField()
    latency_ms = serializers.FloatField(allow_null=True)
    runtime = serializers.CharField(allow_null=True)
    isolation = serializers.CharField(allow_null=True)
    language = serializers.CharField(allow_null=True)
    code = serializers.CharField(
        allow_null=True, help_text="The error code, SB001 to SB009; null on success."
    )
    field = serializers.CharField(allow_null=True)
    errors = JsonObject(help_text="The refused fields, with the reason for each.")  # type: ignore[assignment]
