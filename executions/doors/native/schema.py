"""The description of the API: what an endpoint declares, as OpenAPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, TypeVar, cast

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse

from executions.doors.native.authentication import ApiKeyAuthentication
from executions.doors.native.deferred import NDJSON, SSE
from executions.kernel.bodies import is_shape, name_of, schema_of
from executions.kernel.declarations import Body, Query

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

# What an answer may be instead of a shape.
EVENT_STREAM = {(200, SSE): OpenApiTypes.STR, (200, NDJSON): OpenApiTypes.STR}
BYTES = OpenApiTypes.BINARY

H = TypeVar("H", bound=Callable[..., Any])


@dataclass(frozen=True)
class Endpoint:
    """What is special to an endpoint. What it has in common with others says its view.

    `answers` are shapes by status, or by status and media type. `errors` are those that neither its
    view nor its body nor its path brings along.
    """

    name: str
    answers: Mapping[Any, Any]
    request: Any
    errors: Sequence[int]
    parameters: Sequence[Query[Any] | OpenApiParameter]


def endpoint(
    name: str,
    *,
    answers: Mapping[Any, Any],
    request: Any = None,
    errors: Sequence[int] = (),
    parameters: Sequence[Query[Any] | OpenApiParameter] = (),
) -> Callable[[H], H]:
    """Describe a handler. The first line of its docstring is the summary, the rest the text."""
    described = Endpoint(name, answers, request, errors, parameters)

    def describe(handle: H) -> H:
        vars(handle)["endpoint"] = described
        return handle

    return describe


class EndpointSchema(AutoSchema):
    """The description of a handler, which drf-spectacular asks for part by part."""

    view: Any

    @property
    def _handler(self) -> Any:
        return getattr(self.view, self.method.lower())

    @property
    def _endpoint(self) -> Endpoint:
        if (found := getattr(self._handler, "endpoint", None)) is None:
            raise TypeError(f"{type(self.view).__name__}.{self.method.lower()} lacks @endpoint.")
        return cast("Endpoint", found)

    def get_operation_id(self) -> str:
        return self._endpoint.name

    def get_summary(self) -> str:
        return self._texts[0].removesuffix(".")

    def get_description(self) -> str:  # type: ignore[override]
        return " ".join(self._texts[2].split())

    @property
    def _texts(self) -> tuple[str, str, str]:
        return (getdoc(self._handler) or "").partition("\n")

    def get_tags(self) -> list[str]:
        return [self.view.tag]

    def get_override_parameters(self) -> list[Any]:
        found: list[Any] = []
        for each in self._endpoint.parameters:
            found += _parameters(each) if isinstance(each, Query) else [each]
        return found

    def get_request_serializer(self) -> Any:
        return self._endpoint.request

    def get_response_serializers(self) -> dict[Any, Any]:  # type: ignore[override]
        shape = self.view.error_shape
        told = {each: OpenApiResponse(shape, ERRORS[each]) for each in self._errors()}
        whole = {**told, **self._endpoint.answers}
        return dict(sorted(whole.items(), key=lambda each: _status(each[0])))

    def _errors(self) -> Iterator[int]:
        yield from self.view.errors
        yield from self._endpoint.errors
        if "{" in self.path:
            yield 404
        if (body := self._endpoint.request) is not None:
            yield 413
            if not (isinstance(body, dict) and BYTES in body.values()):
                yield 415


def _status(key: int | tuple[int, str]) -> int:
    return key if isinstance(key, int) else key[0]


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


def _parameters(query: Query[Any]) -> list[OpenApiParameter]:
    schema = query.schema()
    return [
        OpenApiParameter(
            name,
            _or_empty(each) if query.empty_is_none else _without_description(each),
            OpenApiParameter.HEADER if name in query.headers else OpenApiParameter.QUERY,
            required=name in schema.get("required", ()),
            description=each.get("description", ""),
        )
        for name, each in schema["properties"].items()
    ]


def _without_description(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "description"}


def _or_empty(schema: dict[str, Any]) -> dict[str, Any]:
    """Empty, a parameter is left out."""
    return {"anyOf": [_without_description(schema), {"const": ""}]}


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
