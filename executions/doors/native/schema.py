"""The OpenAPI schema of the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse

from executions.doors.agent_sandbox.shapes import DetailShape
from executions.doors.native.authentication import ApiKeyAuthentication
from executions.doors.native.deferred import NDJSON, SSE
from executions.doors.native.shapes import ErrorShape
from executions.kernel.declarations import Body, Query
from executions.kernel.shapes import is_shape, name_of, schema_of
from executions.runs.shapes import ExecutionShape

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


class ShapeExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """What an answer is rendered as describes it."""

    @classmethod
    def _matches(cls, target: Any) -> bool:
        return is_shape(target)

    def get_name(self, auto_schema: object, direction: object) -> str:
        return name_of(self.target)

    def get_identity(self, auto_schema: object, direction: object) -> str:
        return name_of(self.target)

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        def reference(shape: Any) -> dict[str, Any]:
            found: dict[str, Any] = auto_schema.resolve_serializer(shape, direction).ref
            return found

        return schema_of(self.target, reference)


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


# What answers a call that runs something: the record, or the events on the way to it.
STREAMED_EXECUTION = {
    (200, "application/json"): ExecutionShape,
    (200, SSE): OpenApiTypes.STR,
    (200, NDJSON): OpenApiTypes.STR,
}


def errors(*statuses: int) -> dict[int, OpenApiResponse]:
    """Each with what is told in that case."""
    return {each: OpenApiResponse(ErrorShape, ERRORS[each]) for each in _told(statuses)}


def _told(statuses: tuple[int, ...]) -> list[int]:
    """With what any request with a key may be told before it is read, and when nothing can be."""
    return sorted({*statuses, 400, 403, 429, 503} if 401 in statuses else statuses)


def details(*statuses: int) -> dict[int, OpenApiResponse]:
    """As `errors`, in the shape of Agent Sandbox."""
    return {each: OpenApiResponse(DetailShape, ERRORS[each]) for each in _told(statuses)}


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
