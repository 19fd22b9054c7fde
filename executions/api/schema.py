"""The shapes of the API, for its description at /api/schema. Requests are declared in services."""

from __future__ import annotations

from typing import Any, cast

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema_field
from rest_framework import serializers

from executions.api.authentication import ApiKeyAuthentication
from executions.api.observation_schema import ObservationSerializer
from executions.api.streams import NDJSON, SSE
from executions.models import Execution
from executions.services.requests import MODES, PRIORITIES
from executions.services.shapes import Body, Query

ERRORS = {
    400: "Refused: the field at fault is named, nothing was run.",
    401: "The API key is missing, wrong, revoked or expired.",
    403: "The key has not the scope for this, or is held to something else.",
    404: "There is nothing here, or it is another tenant's.",
    409: "The idempotency key was used with another request, or the session has ended or is busy.",
    413: "The body is too large.",
    415: "The body is of another type.",
    416: "The range begins behind the end.",
    429: "A quota is used up, `field` says which. Retry-After says when to try again.",
    502: "The provider cannot be reached.",
    503: "No provider can serve now, or nothing can be recorded; `ran` says whether any code ran.",
}


# An API key in either header, or the admin's session.
_KEY: tuple[dict[str, list[str]], ...] = ({"apiKey": []}, {"bearer": []})
_SESSION: dict[str, list[str]] = {"session": []}


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = ApiKeyAuthentication
    name = ["apiKey", "bearer"]

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        return [*_KEY]

    def get_security_definition(self, auto_schema: object) -> list[dict[str, str]]:
        return [
            {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            {"type": "http", "scheme": "bearer"},
        ]


class KeyOrSessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "executions.api.running.KeyOrSession"
    # All three are those of the others.
    name: list[str] = []

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        return [*_KEY, _SESSION]

    def get_security_definition(self, auto_schema: object) -> list[dict[str, str]]:
        return []


class AdminScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "executions.api.admin_authentication.AdminAuthentication"
    # The other two are those of ApiKeyScheme.
    name = "session"

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        return [*_KEY, _SESSION]

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME}


class BodyExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """What a body is read by describes it."""

    target_class = "executions.services.shapes.Body"

    def get_name(self, auto_schema: object, direction: object) -> str:
        return self._body.name

    def map_serializer(self, auto_schema: object, direction: object) -> dict[str, Any]:
        return self._body.schema()

    @property
    def _body(self) -> Body[Any]:
        return cast("Body[Any]", self.target)


def parameters(*queries: Query[Any]) -> list[OpenApiParameter]:
    """Queries, as they are read."""
    return [each for query in queries for each in _parameters(query)]


def _parameters(query: Query[Any]) -> list[OpenApiParameter]:
    schema = query.schema()
    return [
        OpenApiParameter(
            name,
            _or_empty(each) if query.empty_is_none else _undescribed(each),
            OpenApiParameter.HEADER if name in query.headers else OpenApiParameter.QUERY,
            required=name in schema.get("required", ()),
            description=each.get("description", ""),
        )
        for name, each in schema["properties"].items()
    ]


def _undescribed(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "description"}


def _or_empty(schema: dict[str, Any]) -> dict[str, Any]:
    """Empty, a parameter is left out."""
    return {"anyOf": [_undescribed(schema), {"const": ""}]}


@extend_schema_field({})
class AnyJson(serializers.JSONField):
    """Any JSON value."""


@extend_schema_field({"type": "object", "additionalProperties": {}})
class JsonObject(serializers.JSONField):
    """A JSON object."""


class ArtifactSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    mime_type = serializers.CharField()
    size_bytes = serializers.IntegerField()
    url = serializers.URLField()


class OmissionSerializer(serializers.Serializer[Any]):
    """What code has left or shown, and the answer has not. The last one may say how many more."""

    name = serializers.CharField(
        help_text="Of a file, its path below `artifacts/`; of an output, its number and type, or "
        "the stream. A byte that is no text is told as `\\xNN`."
    )
    reason = serializers.CharField()


class VerdictSerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="SB001 to SB009.")
    message = serializers.CharField()


class TimingsSerializer(serializers.Serializer[Any]):
    queue_ms = serializers.FloatField(allow_null=True)
    start_ms = serializers.FloatField(allow_null=True)
    run_ms = serializers.FloatField(allow_null=True)
    total_ms = serializers.FloatField(allow_null=True)


class PolicyRemarkSerializer(serializers.Serializer[Any]):
    line = serializers.IntegerField(help_text="Of the code, from 1; 0 is all of it.")
    kind = serializers.CharField(help_text="import, call, code, remark or note.")
    name = serializers.CharField()


class PolicySerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField(allow_null=True)
    version = serializers.IntegerField(allow_null=True, help_text="In the policy's history.")
    warnings = PolicyRemarkSerializer(many=True)
    approved = JsonObject(allow_null=True, help_text="Who has approved which code, and when.")


class LateResultSerializer(serializers.Serializer[Any]):
    """What came of a run after its record had been closed."""

    status = serializers.ChoiceField(Execution.Status.values)
    result = AnyJson()
    has_result = serializers.BooleanField()
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    stdout_truncated = serializers.BooleanField()
    stderr_truncated = serializers.BooleanField()
    exit_code = serializers.IntegerField(allow_null=True)
    outputs = serializers.ListField(child=JsonObject())
    artifacts = serializers.ListField(
        child=JsonObject(), help_text="Names and hashes; the bytes were not kept."
    )
    error = VerdictSerializer(allow_null=True)
    finished_at = serializers.DateTimeField()


class PlaceSerializer(serializers.Serializer[Any]):
    """Which execution it is, and where it ran."""

    id = serializers.CharField()
    status = serializers.ChoiceField(Execution.Status.values)
    session = serializers.CharField(allow_null=True, help_text="Where it ran; null: by itself.")
    context = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    context_kept = serializers.BooleanField(
        allow_null=True, help_text="Whether the context still has its state."
    )
    pid = serializers.IntegerField(allow_null=True, help_text="Of a command in a session.")
    agent = serializers.CharField(allow_null=True, help_text="Who asked, by the caller's word.")
    model = serializers.CharField(allow_null=True)
    conversation = serializers.CharField(allow_null=True)
    on_behalf_of = serializers.CharField(
        allow_null=True, help_text="Null also where it was erased with the code."
    )
    traceparent = serializers.CharField(allow_null=True)


class ProgramExceptionSerializer(serializers.Serializer[Any]):
    """What ended the program, by its own account."""

    type = serializers.CharField(help_text="Such as ValueError; Error where there are no types.")
    message = serializers.CharField()
    traceback = serializers.CharField(
        help_text="With notes, causes and members of groups; empty where there is none."
    )


class ExecutionSerializer(PlaceSerializer):
    language = serializers.CharField()
    provider = serializers.CharField()
    runtime = serializers.CharField(help_text="The tool that isolated.")
    isolation = serializers.CharField(
        help_text="How strongly: microvm, gvisor, namespaces or none; empty when nothing ran."
    )
    sharing = serializers.CharField(
        help_text="Whom the sandbox served: execution, this run alone; tenant, its others too."
    )
    result = AnyJson(help_text="What `main` returned.")
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
    artifacts_skipped = OmissionSerializer(
        many=True, help_text="Files that the code left and that were not kept, and why."
    )
    outputs_skipped = OmissionSerializer(
        many=True, help_text="Rich outputs and ends of streams that were not kept, and why."
    )
    error = VerdictSerializer(allow_null=True)
    exception = ProgramExceptionSerializer(
        allow_null=True,
        help_text="What ended a program that failed; null where it has not, or said nothing.",
    )
    hops = serializers.ListField(
        child=JsonObject(), help_text="The providers that were tried or passed over, and why."
    )
    cost = serializers.CharField(
        allow_null=True, help_text="Estimated; null where the provider has no price."
    )
    timings = TimingsSerializer()
    created_at = serializers.DateTimeField()
    run_at = serializers.DateTimeField(allow_null=True, help_text="Nobody takes it before.")
    schedule = serializers.CharField(allow_null=True)
    receipt = JsonObject(
        allow_null=True,
        help_text="The signed entry of the ledger, once ended. See examples/receipts.",
    )
    late_result = LateResultSerializer(
        allow_null=True,
        help_text="What came of it after the record had been closed as lost; changes nothing else.",
    )
    files_saved = serializers.BooleanField(
        allow_null=True,
        help_text="Whether the files of its session are in storage as it left them.",
    )
    restored = serializers.BooleanField(
        help_text="The first since its session was woken: files are there, variables are not."
    )
    policy = PolicySerializer(allow_null=True, help_text="Which held, and what was found by it.")
    observations = ObservationSerializer(many=True, help_text="What was seen of it.")


class ExecutionSummarySerializer(PlaceSerializer):
    mode = serializers.ChoiceField(MODES)
    priority = serializers.ChoiceField(PRIORITIES)
    language = serializers.CharField()
    provider = serializers.CharField()
    runtime = serializers.CharField()
    isolation = serializers.CharField()
    sharing = serializers.CharField()
    exit_code = serializers.IntegerField(allow_null=True)
    error = VerdictSerializer(allow_null=True)
    timings = TimingsSerializer()
    created_at = serializers.DateTimeField()
    run_at = serializers.DateTimeField(allow_null=True, help_text="Nobody takes it before.")
    schedule = serializers.CharField(allow_null=True)


class ExecutionPageSerializer(serializers.Serializer[Any]):
    results = ExecutionSummarySerializer(many=True)
    next = serializers.URLField(allow_null=True)


class PackagesSerializer(serializers.Serializer[Any]):
    state = serializers.ChoiceField(["ready", "preparing", "failed"])
    reason = serializers.CharField(allow_blank=True, help_text="Why they could not be installed.")
    versions = serializers.DictField(child=serializers.CharField(), help_text="By name.")


class LanguagesSerializer(serializers.Serializer[Any]):
    languages = serializers.ListField(child=serializers.CharField())
    packages = serializers.DictField(
        child=PackagesSerializer(),
        help_text="What Python programs can import, by the id of a provider that knows its own.",
    )


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
    ran = serializers.BooleanField(
        required=False,
        allow_null=True,
        help_text="Only where the database cannot be used: whether any code ran; null: unknown.",
    )


class ErrorSerializer(serializers.Serializer[Any]):
    error = ErrorBodySerializer()
    id = serializers.CharField(allow_null=True, help_text="Of the record, where there is one.")
    receipt = JsonObject(required=False, help_text="Of an execution that ended so.")


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


class AgentSandboxAwaySerializer(serializers.Serializer[Any]):
    detail = serializers.CharField()
    error = serializers.CharField()
    ran = serializers.BooleanField(allow_null=True)
    id = serializers.CharField(allow_null=True)


class AgentSandboxStatusSerializer(serializers.Serializer[Any]):
    status = serializers.CharField(help_text="success or error")
    output = serializers.CharField(required=False)
    container_id = serializers.CharField(required=False, help_text="The session's id.")
    message = serializers.CharField(required=False)


class AgentSandboxUploadSerializer(AgentSandboxArtifactSerializer):
    status = serializers.CharField()
    container_id = serializers.CharField(help_text="The session's id.")


class AgentSandboxNotFetchedSerializer(serializers.Serializer[Any]):
    source_url = serializers.CharField()
    error = serializers.CharField()


class AgentSandboxFetchedSerializer(serializers.Serializer[Any]):
    status = serializers.CharField(help_text="success, partial_success or error")
    uploaded = serializers.ListField(child=serializers.CharField())
    errors = AgentSandboxNotFetchedSerializer(many=True)  # type: ignore[assignment]


class AgentSandboxFileSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    size_bytes = serializers.IntegerField()
    mtime = serializers.IntegerField(help_text="Seconds since 1970, by the sandbox's clock.")


class AgentSandboxFilesSerializer(serializers.Serializer[Any]):
    files = AgentSandboxFileSerializer(many=True)


class AgentSandboxLinkSerializer(serializers.Serializer[Any]):
    status = serializers.CharField()
    path = serializers.CharField()
    expires_in = serializers.IntegerField()
    download_url = serializers.URLField()


class DetailSerializer(serializers.Serializer[Any]):
    detail = serializers.CharField()


# What answers a call that runs something: the record, or the events on the way to it.
STREAMED_EXECUTION = {
    (200, "application/json"): ExecutionSerializer,
    (200, SSE): OpenApiTypes.STR,
    (200, NDJSON): OpenApiTypes.STR,
}


def errors(*statuses: int) -> dict[int, OpenApiResponse]:
    """Each with what is told in that case."""
    return {each: OpenApiResponse(ErrorSerializer, ERRORS[each]) for each in _told(statuses)}


def _told(statuses: tuple[int, ...]) -> list[int]:
    """With what any request with a key may be told before it is read, and when nothing can be."""
    return sorted({*statuses, 400, 403, 429, 503} if 401 in statuses else statuses)


def details(*statuses: int) -> dict[int, OpenApiResponse]:
    """As `errors`, in the shape of Agent Sandbox."""
    return {each: OpenApiResponse(DetailSerializer, ERRORS[each]) for each in _told(statuses)}
