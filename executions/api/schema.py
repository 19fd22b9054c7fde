"""The shapes of the API, for its description at /api/schema. Requests are parsed elsewhere."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiResponse, extend_schema_field
from rest_framework import serializers

from executions.api.authentication import ApiKeyAuthentication
from executions.models import Execution
from executions.services.requests import API_ENTRYPOINTS, MODES

_ERRORS = {
    400: "Refused: the field at fault is named, nothing was run.",
    401: "The API key is missing, wrong, revoked or expired.",
    404: "There is nothing here, or it is another tenant's.",
    409: "The idempotency key was used with another request.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too much at once. Retry-After says when to try again.",
    502: "The provider cannot be reached.",
    503: "No provider can serve now.",
}


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = ApiKeyAuthentication
    name = ["apiKey", "bearer"]

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        """Either header will do."""
        return [{"apiKey": []}, {"bearer": []}]

    def get_security_definition(self, auto_schema: object) -> list[dict[str, str]]:
        return [
            {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            {"type": "http", "scheme": "bearer"},
        ]


class AdminScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "executions.api.admin_authentication.AdminAuthentication"
    name = ["apiKey", "bearer", "session"]

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        """A key of scope admin in either header, or the admin's session."""
        return [{"apiKey": []}, {"bearer": []}, {"session": []}]

    def get_security_definition(self, auto_schema: object) -> list[dict[str, str]]:
        return [
            {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            {"type": "http", "scheme": "bearer"},
            {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME},
        ]


@extend_schema_field({})
class AnyJson(serializers.JSONField):
    """Any JSON value."""


@extend_schema_field({"type": "object", "additionalProperties": {}})
class JsonObject(serializers.JSONField):
    """A JSON object."""


class InputFileSerializer(serializers.Serializer[Any]):
    path = serializers.CharField(help_text="Relative to the workspace, without '..'.")
    content_base64 = serializers.CharField()


class ExecutionRequestSerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="At most 1 MiB.")
    language = serializers.CharField(default="python")
    arguments = JsonObject(allow_null=True, required=False, help_text="What `main` is called with.")
    entrypoint = serializers.ChoiceField(API_ENTRYPOINTS, default="auto")
    timeout = serializers.FloatField(required=False, help_text="Seconds.")
    files = InputFileSerializer(many=True, required=False)
    session = serializers.CharField(
        allow_null=True, required=False, help_text="Not offered yet: leave it out or send null."
    )
    mode = serializers.ChoiceField(MODES, default="sync")
    idempotency_key = serializers.CharField(allow_null=True, required=False, max_length=255)


class ArtifactSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    mime_type = serializers.CharField()
    size_bytes = serializers.IntegerField()
    url = serializers.URLField()


class VerdictSerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="SB001 to SB009.")
    message = serializers.CharField()


class TimingsSerializer(serializers.Serializer[Any]):
    queue_ms = serializers.FloatField(allow_null=True)
    start_ms = serializers.FloatField(allow_null=True)
    run_ms = serializers.FloatField(allow_null=True)
    total_ms = serializers.FloatField(allow_null=True)


class ExecutionSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    status = serializers.ChoiceField(Execution.Status.values)
    language = serializers.CharField()
    provider = serializers.CharField()
    runtime = serializers.CharField(help_text="The tool that isolated.")
    isolation = serializers.CharField(
        help_text="How strongly: microvm, gvisor, namespaces or none; empty when nothing ran."
    )
    sharing = serializers.CharField(
        help_text="Whom the sandbox served: execution, this run alone; tenant, its others too."
    )
    result = AnyJson(allow_null=True, help_text="What `main` returned.")
    has_result = serializers.BooleanField()
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    stdout_truncated = serializers.BooleanField()
    stderr_truncated = serializers.BooleanField()
    exit_code = serializers.IntegerField(allow_null=True)
    outputs = serializers.ListField(
        child=JsonObject(), help_text="Rich outputs, each a map from MIME type to data."
    )
    artifacts = ArtifactSerializer(many=True)
    error = VerdictSerializer(allow_null=True)
    hops = serializers.ListField(
        child=JsonObject(), help_text="The providers that were tried or passed over, and why."
    )
    cost = serializers.CharField(
        allow_null=True, help_text="Estimated; null where the provider has no price."
    )
    timings = TimingsSerializer()
    created_at = serializers.DateTimeField()
    receipt = JsonObject(
        allow_null=True,
        help_text="The signed entry of the ledger, once ended. See examples/receipts.",
    )


class ExecutionSummarySerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    status = serializers.ChoiceField(Execution.Status.values)
    mode = serializers.ChoiceField(MODES)
    language = serializers.CharField()
    provider = serializers.CharField()
    runtime = serializers.CharField()
    isolation = serializers.CharField()
    sharing = serializers.CharField()
    exit_code = serializers.IntegerField(allow_null=True)
    error = VerdictSerializer(allow_null=True)
    timings = TimingsSerializer()
    created_at = serializers.DateTimeField()


class ExecutionPageSerializer(serializers.Serializer[Any]):
    results = ExecutionSummarySerializer(many=True)
    next = serializers.URLField(allow_null=True)


class LanguagesSerializer(serializers.Serializer[Any]):
    languages = serializers.ListField(child=serializers.CharField())


class LedgerKeySerializer(serializers.Serializer[Any]):
    key_id = serializers.CharField()
    algorithm = serializers.CharField()
    public_key = serializers.CharField(help_text="32 bytes in base64.")


class LedgerKeysSerializer(serializers.Serializer[Any]):
    domain = serializers.CharField(help_text="What is signed starts with it and a line feed.")
    keys = LedgerKeySerializer(many=True)


class ErrorBodySerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="SB001 to SB009, or the name of an HTTP error.")
    message = serializers.CharField()
    field = serializers.CharField(allow_null=True)


class ErrorSerializer(serializers.Serializer[Any]):
    error = ErrorBodySerializer()
    id = serializers.CharField(allow_null=True, help_text="Of the record, where there is one.")
    receipt = JsonObject(required=False, help_text="Of an execution that ended so.")


class AgentSandboxRequestSerializer(serializers.Serializer[Any]):
    user_id = serializers.CharField(max_length=255)
    code = serializers.CharField()
    session_id = serializers.CharField(
        allow_null=True, required=False, help_text="Not offered yet: leave it out or send null."
    )
    inputs = serializers.ListField(
        child=serializers.CharField(),
        required=False,
        help_text="Not offered yet: leave it out or send an empty list.",
    )
    presign_expires_in = serializers.IntegerField(default=300, min_value=1, max_value=604800)


class AgentSandboxArtifactSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    size_bytes = serializers.IntegerField()
    mime_type = serializers.CharField()
    download_url = serializers.URLField()


class AgentSandboxAnswerSerializer(serializers.Serializer[Any]):
    """Either `output` and `artifacts`, or `error` alone."""

    output = serializers.CharField(required=False)
    artifacts = AgentSandboxArtifactSerializer(many=True, required=False)
    error = serializers.CharField(required=False)


class DetailSerializer(serializers.Serializer[Any]):
    detail = serializers.CharField()


def errors(*statuses: int) -> dict[int, OpenApiResponse]:
    return {status: OpenApiResponse(ErrorSerializer, _ERRORS[status]) for status in statuses}


class AdminDataSerializer(serializers.Serializer[Any]):
    data = AnyJson()  # type: ignore[assignment]


class AdminMessageSerializer(serializers.Serializer[Any]):
    message = serializers.CharField()


class AdminConfigSerializer(serializers.Serializer[Any]):
    provider_type = serializers.CharField(help_text="The provider's id.")
    config = JsonObject(help_text="A secret that is masked or left out stays what it is.")
    set_active = serializers.BooleanField(default=True)
    test_connection = serializers.BooleanField(default=False)
    reason = serializers.CharField(required=False, help_text="Kept with the version.")


class AdminTestSerializer(serializers.Serializer[Any]):
    provider_type = serializers.CharField(help_text="The provider's id.")
    config = JsonObject(required=False, help_text="The stored one where none is given.")


class AdminTrialSerializer(serializers.Serializer[Any]):
    success = serializers.BooleanField()
    message = serializers.CharField()
    latency_ms = serializers.FloatField(allow_null=True)
    runtime = serializers.CharField(allow_null=True)
    isolation = serializers.CharField(allow_null=True)
    language = serializers.CharField(allow_null=True)
    code = serializers.CharField(allow_null=True, help_text="SB001 to SB009 on failure.")
    field = serializers.CharField(allow_null=True)
    errors = JsonObject(help_text="Refused fields and why.")  # type: ignore[assignment]


class AdminActiveSerializer(serializers.Serializer[Any]):
    provider = serializers.CharField(help_text="The provider's id.")
    reason = serializers.CharField(required=False)
