"""The OpenAPI schema of the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema_field
from rest_framework import serializers

from executions.doors.native.authentication import ApiKeyAuthentication
from executions.doors.native.deferred import NDJSON, SSE
from executions.kernel.declarations import Body, Query
from executions.runs.models import Execution
from executions.runs.requests import MODES, PRIORITIES
from executions.sessions.models import Session
from providers.observations import KINDS, WITNESSES


class ObservationSerializer(serializers.Serializer[Any]):
    kind = serializers.ChoiceField(
        tuple(KINDS), help_text="; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    )
    seen_by = serializers.ChoiceField(
        WITNESSES,
        help_text="Who saw it: the host, outside the sandbox, or the supervisor, inside it.",
    )
    count = serializers.IntegerField()


ERRORS = {
    400: "The request is invalid. The error names the field. No code ran.",
    401: "The API key is missing, wrong, revoked or expired.",
    403: "The key lacks the required scope, or a restriction of the key forbids this.",
    404: "Not found, or it belongs to another tenant.",
    409: "The idempotency key was used with another request, or the session has ended or is busy.",
    413: "The body is too large.",
    415: "The media type of the body is not supported.",
    416: "The range begins after the end of the file.",
    429: "A quota is used up; `field` names it. Retry-After says when to try again.",
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
    target_class = "executions.doors.native.executions.KeyOrSession"
    # All three are those of the others.
    name: list[str] = []

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        return [*_KEY, _SESSION]

    def get_security_definition(self, auto_schema: object) -> list[dict[str, str]]:
        return []


class AdminScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "executions.doors.native.admin_sandbox.AdminAuthentication"
    # The other two are those of ApiKeyScheme.
    name = "session"

    def get_security_requirement(self, auto_schema: object) -> list[dict[str, list[str]]]:
        return [*_KEY, _SESSION]

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME}


class BodyExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """What a body is read by describes it."""

    target_class = "executions.kernel.declarations.Body"

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
    """A file or an output that the answer does not contain. The last one may give their number."""

    name = serializers.CharField(
        help_text="For a file, its path below `artifacts/`; for an output, its number and type, "
        "or the name of the stream. A byte that is not text is written as `\\xNN`."
    )
    reason = serializers.CharField()


class VerdictSerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="The error code, SB001 to SB009.")
    message = serializers.CharField()


class TimingsSerializer(serializers.Serializer[Any]):
    queue_ms = serializers.FloatField(allow_null=True)
    start_ms = serializers.FloatField(allow_null=True)
    run_ms = serializers.FloatField(allow_null=True)
    total_ms = serializers.FloatField(allow_null=True)


class PolicyRemarkSerializer(serializers.Serializer[Any]):
    line = serializers.IntegerField(
        help_text="The line of the code, from 1; 0 for all of the code."
    )
    kind = serializers.CharField(help_text="`import`, `call`, `code`, `remark` or `note`.")
    name = serializers.CharField()


class PolicySerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField(allow_null=True)
    version = serializers.IntegerField(
        allow_null=True, help_text="The version in the policy's history."
    )
    warnings = PolicyRemarkSerializer(many=True)
    approved = JsonObject(allow_null=True, help_text="The approval: which code, by whom, and when.")


class LateResultSerializer(serializers.Serializer[Any]):
    """The result of a run that ended after its record was closed."""

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
        child=JsonObject(), help_text="Names and hashes only; the bytes were not kept."
    )
    error = VerdictSerializer(allow_null=True)
    finished_at = serializers.DateTimeField()


class PlaceSerializer(serializers.Serializer[Any]):
    """The execution, with its session and its caller."""

    id = serializers.CharField()
    status = serializers.ChoiceField(Execution.Status.values)
    session = serializers.CharField(
        allow_null=True, help_text="The session that it ran in; null for a run outside of sessions."
    )
    context = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    context_kept = serializers.BooleanField(
        allow_null=True,
        help_text="Whether the context still has its state, such as variables. "
        "If false, it was restarted.",
    )
    pid = serializers.IntegerField(
        allow_null=True, help_text="The process id of a command in a session."
    )
    agent = serializers.CharField(allow_null=True, help_text="The agent, as claimed by the caller.")
    model = serializers.CharField(allow_null=True)
    conversation = serializers.CharField(allow_null=True)
    on_behalf_of = serializers.CharField(
        allow_null=True,
        help_text="The person, as claimed by the caller. Null also after it was "
        "erased with the code.",
    )
    traceparent = serializers.CharField(allow_null=True)


class ProgramExceptionSerializer(serializers.Serializer[Any]):
    """The exception that ended the program, as the program reported it."""

    type = serializers.CharField(
        help_text="For example ValueError; Error in a language without exception types."
    )
    message = serializers.CharField()
    traceback = serializers.CharField(
        help_text="With notes, causes and the members of exception groups; empty if there is none."
    )


class ExecutionSerializer(PlaceSerializer):
    language = serializers.CharField()
    provider = serializers.CharField()
    runtime = serializers.CharField(help_text="The tool that isolated the sandbox.")
    isolation = serializers.CharField(
        help_text="The isolation level: microvm, gvisor, namespaces or none; empty if nothing ran."
    )
    sharing = serializers.CharField(
        help_text="Who shared the sandbox: execution, only this run; tenant, also its other runs."
    )
    result = AnyJson(help_text="The return value of `main`.")
    has_result = serializers.BooleanField(
        help_text="Whether there is a result: it distinguishes the result null from no result."
    )
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    stdout_truncated = serializers.BooleanField()
    stderr_truncated = serializers.BooleanField()
    exit_code = serializers.IntegerField(allow_null=True)
    outputs = serializers.ListField(
        child=JsonObject(),
        help_text="Rich outputs. Each is an object with the data for each MIME type.",
    )
    artifacts = ArtifactSerializer(many=True)
    artifacts_skipped = OmissionSerializer(
        many=True, help_text="Files in `artifacts/` that were not kept, with the reason."
    )
    outputs_skipped = OmissionSerializer(
        many=True, help_text="Rich outputs and ends of streams that were not kept, with the reason."
    )
    error = VerdictSerializer(allow_null=True)
    exception = ProgramExceptionSerializer(
        allow_null=True,
        help_text="The exception that ended the program; null if it did not fail or reported none.",
    )
    hops = serializers.ListField(
        child=JsonObject(),
        help_text="The providers that were tried or skipped, in order, each "
        "with the outcome and the reason.",
    )
    cost = serializers.CharField(
        allow_null=True, help_text="The estimated cost; null if the provider has no price."
    )
    timings = TimingsSerializer()
    created_at = serializers.DateTimeField()
    run_at = serializers.DateTimeField(
        allow_null=True, help_text="The execution does not start before this time."
    )
    schedule = serializers.CharField(allow_null=True)
    receipt = JsonObject(
        allow_null=True,
        help_text="The signed entry of the ledger, after the end. See examples/receipts.",
    )
    late_result = LateResultSerializer(
        allow_null=True,
        help_text="A result that arrived after the execution was recorded as lost. It changes no "
        "other field.",
    )
    files_saved = serializers.BooleanField(
        allow_null=True,
        help_text="Whether the files of its session were saved to storage as they were after the "
        "run; null outside of sessions.",
    )
    restored = serializers.BooleanField(
        help_text="Whether it is the first run after its session was resumed from storage. Files "
        "were restored, variables were lost."
    )
    policy = PolicySerializer(
        allow_null=True, help_text="The policy that applied, with its findings."
    )
    observations = ObservationSerializer(
        many=True, help_text="Security events that were seen during the run."
    )


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
    run_at = serializers.DateTimeField(
        allow_null=True, help_text="The execution does not start before this time."
    )
    schedule = serializers.CharField(allow_null=True)


class ExecutionPageSerializer(serializers.Serializer[Any]):
    results = ExecutionSummarySerializer(many=True)
    next = serializers.URLField(allow_null=True)


class PackagesSerializer(serializers.Serializer[Any]):
    state = serializers.ChoiceField(["ready", "preparing", "failed"])
    reason = serializers.CharField(
        allow_blank=True, help_text="Why the packages could not be installed; else empty."
    )
    versions = serializers.DictField(
        child=serializers.CharField(), help_text="The version of each package, by name."
    )


class LanguagesSerializer(serializers.Serializer[Any]):
    languages = serializers.ListField(child=serializers.CharField())
    packages = serializers.DictField(
        child=PackagesSerializer(),
        help_text="The packages that Python code can import, by provider id. Providers that do "
        "not know theirs are missing.",
    )


class LedgerKeySerializer(serializers.Serializer[Any]):
    key_id = serializers.CharField()
    algorithm = serializers.CharField()
    public_key = serializers.CharField(help_text="The key: 32 bytes in base64.")


class LedgerKeysSerializer(serializers.Serializer[Any]):
    domain = serializers.CharField(
        help_text="The signed text starts with this domain and a line feed."
    )
    keys = LedgerKeySerializer(many=True)


class ErrorBodySerializer(serializers.Serializer[Any]):
    code = serializers.CharField(
        help_text="SB001 to SB009, or a name such as `not_found`. SB002 "
        "is the code of an invalid request."
    )
    message = serializers.CharField()
    field = serializers.CharField(allow_null=True)
    ran = serializers.BooleanField(
        required=False,
        allow_null=True,
        help_text="Only if the database cannot be used: whether any code ran; null if unknown.",
    )


class ErrorSerializer(serializers.Serializer[Any]):
    error = ErrorBodySerializer()
    id = serializers.CharField(
        allow_null=True, help_text="The id of the execution, if one was recorded."
    )
    receipt = JsonObject(required=False, help_text="The receipt of the failed execution.")


class AgentSandboxArtifactSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    size_bytes = serializers.IntegerField()
    mime_type = serializers.CharField()
    download_url = serializers.URLField()


class AgentSandboxAnswerSerializer(serializers.Serializer[Any]):
    """Either `output` and `artifacts`, or only `error`."""

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


class ContextSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    language = serializers.CharField()
    cwd = serializers.CharField(
        allow_blank=True, help_text="The working folder, relative to the workspace."
    )


class ContextPageSerializer(serializers.Serializer[Any]):
    results = ContextSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class SavedFilesSerializer(serializers.Serializer[Any]):
    """The files of a session in storage."""

    count = serializers.IntegerField(help_text="The number of files, folders and links.")
    bytes = serializers.IntegerField()
    saved_at = serializers.DateTimeField(allow_null=True)
    unsaved_since = serializers.DateTimeField(
        allow_null=True, help_text="Since when changes are unsaved; null if everything is saved."
    )
    problem = serializers.CharField(allow_null=True, help_text="Why the changes are not saved.")


class SessionSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField(allow_null=True)
    state = serializers.ChoiceField(Session.State.values)
    provider = serializers.CharField()
    runtime = serializers.CharField()
    isolation = serializers.CharField()
    sharing = serializers.CharField()
    language = serializers.CharField()
    template = serializers.CharField(allow_null=True)
    metadata = JsonObject()
    idle_seconds = serializers.IntegerField()
    max_seconds = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    used_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(
        help_text="When its idle time or its total time ends, whichever is earlier."
    )
    closed_at = serializers.DateTimeField(allow_null=True)
    closed_because = serializers.CharField(
        allow_null=True, help_text="Why it was closed or lost; null while it is not."
    )
    contexts = ContextSerializer(many=True)
    saves = serializers.ChoiceField(
        Session.Saves.values,
        help_text="When its files are saved to storage: before the answer, after it, or never.",
    )
    files = SavedFilesSerializer()
    woken_at = serializers.DateTimeField(
        allow_null=True,
        help_text="When it was last resumed from storage. Its files were "
        "restored, its variables were lost.",
    )


class SessionPageSerializer(serializers.Serializer[Any]):
    results = SessionSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class InterruptedSerializer(serializers.Serializer[Any]):
    interrupted = serializers.BooleanField(help_text="False if nothing was running.")


class FileSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    type = serializers.ChoiceField(["file", "directory", "symlink", "other"])
    size_bytes = serializers.IntegerField()
    mode = serializers.IntegerField()
    modified_at = serializers.DateTimeField(allow_null=True)
    target = serializers.CharField(required=False, help_text="The target of a symbolic link.")


class FilePageSerializer(serializers.Serializer[Any]):
    entries = FileSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class MadeSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    created = serializers.BooleanField(help_text="False if the folder already existed.")


class UnpackedSerializer(serializers.Serializer[Any]):
    entries = serializers.IntegerField()


class ProcessSerializer(serializers.Serializer[Any]):
    pid = serializers.IntegerField()
    execution = serializers.CharField(allow_null=True)
    state = serializers.ChoiceField(["running", "exited"])
    exit_code = serializers.IntegerField(allow_null=True)


class ProcessPageSerializer(serializers.Serializer[Any]):
    results = ProcessSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class SignalledSerializer(serializers.Serializer[Any]):
    signalled = serializers.BooleanField(help_text="False if the command had already ended.")


_WHAT = {
    "X-RateLimit-Limit": "Requests that the tenant may send per minute.",
    "X-RateLimit-Remaining": "Requests that are left in this minute.",
    "X-RateLimit-Reset": "When the full number is available again, in seconds since 1970.",
}
_RETRY = {
    "description": "Seconds to wait before the next try.",
    "schema": {"type": "integer"},
}
_REFUSED = {
    "description": "The tenant has used up its requests for this minute.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def describe_rate_headers(result: Any, generator: object, request: object, public: bool) -> Any:
    """A hook of drf-spectacular. Without a key, by whose 401 it is told, there are none."""
    headers = result["components"].setdefault("headers", {})
    for name, text in _WHAT.items():
        headers[name] = {"description": text, "schema": {"type": "integer"}}
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in _WHAT}
    for methods in result["paths"].values():
        for operation in methods.values():
            answers = operation.get("responses", {})
            if {"apiKey": []} not in operation.get("security", ()):
                continue
            answers.setdefault("429", {**_REFUSED})
            for status, answer in answers.items():
                if status != "401":
                    answer.setdefault("headers", {}).update(references)
                if status == "429":
                    answer["headers"]["Retry-After"] = _RETRY
    return result


_TOO_LONG = {
    "query": ("414", "The URL is too long for the web server."),
    "header": ("431", "A header is too long for the web server."),
}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def describe_transport(result: Any, generator: object, request: object, public: bool) -> Any:
    """A hook of drf-spectacular."""
    for methods in result["paths"].values():
        for operation in methods.values():
            places = {each["in"] for each in operation.get("parameters", ())}
            for place, (status, text) in _TOO_LONG.items():
                if place in places:
                    answer = {"description": text, "content": _TEXT}
                    operation["responses"].setdefault(status, answer)
            body = operation.get("requestBody")
            if body and all(_has_fields(each) for each in _schemas(body, result["components"])):
                body["required"] = True
    return result


def _schemas(body: Any, components: Any) -> Iterator[Any]:
    for content in body["content"].values():
        schema = content["schema"]
        name = schema.get("$ref", "").rpartition("/")[2]
        yield components["schemas"][name] if name else schema


def _has_fields(schema: Any) -> bool:
    """Whether it is an object, and nothing else will do."""
    return bool(schema.get("type") == "object")
