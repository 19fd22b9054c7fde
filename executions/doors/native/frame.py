"""The base of the API's views: requests, errors, and the attribution that a caller declares."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from typing import IO, Annotated, Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast
from uuid import uuid4

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseFailure
from django.db import transaction
from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from pydantic import Field
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.encoders import JSONEncoder
from rest_framework.views import APIView

from executions.doors.native.authentication import (
    RECEIVED,
    ApiKeyAuthentication,
    HasApiKey,
    is_entered,
    place_of,
)
from executions.doors.native.deferred import answer
from executions.doors.native.rendering import ErrorBodyShape, ErrorShape, json_response
from executions.kernel.bodies import BODY, SMALL, BodyTooLarge, reading, requests_of, value_of
from executions.kernel.coroutines import Coroutine
from executions.kernel.database import DatabaseUnavailable, nothing_ran, problem_of
from executions.kernel.declarations import Body, Query, declared, refuse
from executions.runs.record import Outcome
from executions.runs.requests import (
    Agent,
    Caller,
    ConversationName,
    IdempotencyKey,
    Model,
    OnBehalfOf,
    Traceparent,
)
from executions.tenants.models import ApiKey
from executions.tenants.quotas import ENTRY_COUNTS_AS, Rate, take_request
from providers.errors import InvalidConfiguration, SandboxError
from providers.json_reading import Bounds, Read
from providers.slices import JSONInSlices

logger = logging.getLogger(__name__)

_CODES = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    415: "unsupported_media_type",
}


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    field: str | None = None,
    record_id: str | None = None,
    receipt: Mapping[str, Any] | None = None,
    retry_after: float | None = None,
    away: DatabaseUnavailable | None = None,
) -> HttpResponse:
    """`record_id` is the execution's, where one was recorded; `retry_after` is seconds. `away` says
    of a database that cannot be used whether any code ran."""
    error: ErrorBodyShape = {"code": code, "message": message, "field": field}
    if away is not None:
        error["ran"] = away.ran
    body: ErrorShape = {"error": error, "id": record_id}
    if receipt is not None:
        body["receipt"] = dict(receipt)
    response = json_response(body, status)
    if retry_after is not None:
        response["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return response


def to_database_error(exc: Exception) -> Exception:
    """Translate a failure of the database to the error that is reported. Before a run, and without
    one, nothing ran: what comes after has been told apart where it happened."""
    problem = problem_of(exc)
    return nothing_ran(problem) if problem else exc


def render_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """What Django REST framework calls with whatever a view raised."""
    exc = to_database_error(exc)
    if isinstance(exc, DatabaseUnavailable):
        return error_response(
            exc.http_status,
            exc.code,
            exc.message,
            record_id=str(exc.record_id) if exc.record_id else None,
            retry_after=exc.retry_after,
            away=exc,
        )
    if isinstance(exc, SandboxError):
        return error_response(
            exc.http_status,
            exc.code,
            exc.message,
            field=exc.field,
            retry_after=exc.retry_after,
        )
    if isinstance(exc, Http404):
        exc = exceptions.NotFound("Not found.")
    elif isinstance(exc, PermissionDenied):
        exc = exceptions.PermissionDenied()
    if isinstance(exc, exceptions.APIException):
        code = _CODES.get(exc.status_code, "error")
        response = error_response(exc.status_code, code, _message(exc))
        if isinstance(exc, exceptions.MethodNotAllowed):
            response["Allow"] = ", ".join(context["view"].allowed_methods)
        if header := getattr(exc, "auth_header", None):
            response["WWW-Authenticate"] = header
        return response
    logger.error("a request failed inside the service", exc_info=exc)
    return error_response(500, "internal_error", "The request failed inside the service.")


@contextmanager
def keep_outcome(outcome: Outcome) -> Iterator[None]:
    """Keep a database that goes away while an outcome is told from hiding the outcome.

    Raises DatabaseUnavailable, also for an outcome that could not be recorded.
    """
    if isinstance(outcome.error, DatabaseUnavailable):
        raise outcome.error
    try:
        yield
    except DatabaseFailure as failure:
        if not (problem := problem_of(failure)):
            raise
        execution = outcome.execution
        raise DatabaseUnavailable(
            f"{problem} Ask for the execution by its id.",
            ran=None if execution.is_open or execution.status == "error" else True,
            record_id=execution.pk,
        ) from failure


def _message(exc: exceptions.APIException) -> str:
    return exc.detail if isinstance(exc.detail, str) else str(exc.default_detail)


P = ParamSpec("P")
V = TypeVar("V", bound="ApiView")

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class StrictJsonParser(BaseParser):
    """JSON as its standard has it: no NaN, no infinity, no depth that exhausts the stack.

    It is at most what the view's `bounds` say.
    """

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        context = parser_context or {}
        return _value_of(context["request"].META, stream, context["view"].bounds)


class AlwaysJson(BaseContentNegotiation):
    """Answers are JSON whatever is accepted; only the body's type is negotiated."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser | None:
        media_type = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == media_type), None)

    def select_renderer(
        self,
        request: Request,
        renderers: Iterable[BaseRenderer],
        format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        return next(iter(renderers)), "application/json"


class RecordJSON(JSONInSlices, JSONEncoder):
    """What answers consist of, as JSON."""


class RecordRenderer(JSONRenderer):
    """JSON, of which long texts are written in slices."""

    encoder_class = RecordJSON


class ApiView(APIView):
    """An endpoint for holders of an API key."""

    authentication_classes: Sequence[type[BaseAuthentication]] = (ApiKeyAuthentication,)
    permission_classes: Sequence[type[BasePermission]] = (HasApiKey,)
    parser_classes = (StrictJsonParser,)
    renderer_classes = (RecordRenderer,)
    content_negotiation_class = AlwaysJson
    metadata_class = None
    # Of bodies in JSON.
    bounds: Bounds = SMALL
    rate: Rate | None = None
    # For the description: the group of endpoints, what any request to the view may be refused with,
    # and the shape of that.
    tag: ClassVar[str] = "executions"
    errors: ClassVar[Sequence[int]] = (400, 401, 403, 429, 503)
    error_shape: ClassVar[Any] = ErrorShape

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        given = request.META.get("HTTP_X_REQUEST_ID", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        _check_length(request)
        super().initial(request, *args, **kwargs)

    def perform_authentication(self, request: Request) -> None:
        """Whatever a key asks is counted, also what it is then refused for."""
        super().perform_authentication(request)
        if isinstance(request.auth, ApiKey):
            if place := place_of(request):
                place.give_to(request.auth.tenant.slug)
            only_reads = request.method in SAFE_METHODS
            counts_as = requests_of(_announced_length(request.META))
            if is_entered(request):
                counts_as += ENTRY_COUNTS_AS - 1
            self.rate = take_request(
                request.auth.tenant, only_reads=only_reads, counts_as=counts_as
            )
            self.rate.require()

    def finalize_response(
        self, request: Request, response: Any, *args: Any, **kwargs: Any
    ) -> Response:
        final = super().finalize_response(request, response, *args, **kwargs)
        final["X-Request-ID"] = self.request_id
        if self.rate is not None:
            final["X-RateLimit-Limit"] = str(self.rate.limit)
            final["X-RateLimit-Remaining"] = str(self.rate.remaining)
            final["X-RateLimit-Reset"] = str(self.rate.resets_at)
        return final

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return render_error

    async def handle_errors(self, work: Coroutine[HttpResponseBase]) -> HttpResponseBase:
        """Await the work, and answer its errors, also when they come later."""
        try:
            return await work
        except Exception as error:
            return cast("HttpResponseBase", self.handle_exception(error))

    @property
    def api_key(self) -> ApiKey:
        return cast("ApiKey", self.request.auth)

    def caller(self) -> Caller:
        return Caller.of_key(
            self.api_key,
            request_id=self.request_id,
            client_address=self.request.META.get("REMOTE_ADDR", "")[:64],
            received=self.request.META.get(RECEIVED),
        )


# The row of an attempt must be committed before anything runs, and what is waited for must not be
# in a transaction.
@method_decorator(transaction.non_atomic_requests, name="dispatch")
class RunningView(ApiView):
    """An endpoint that has code run, or waits for a sandbox."""


def deferred(
    handle: Callable[Concatenate[V, Request, P], Coroutine[Any]],
) -> Callable[Concatenate[V, Request, P], HttpResponseBase]:
    """Decorate a handler of requests whose thread is free while it waits. Its body is read before
    that."""

    @wraps(handle)
    def begin(view: V, request: Request, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        return answer(request, view.handle_errors(handle(view, request, *args, **kwargs)))

    return begin


def _value_of(meta: Mapping[str, Any], stream: IO[Any], bounds: Bounds) -> Any:
    ensure_length(meta, bounds.bytes)
    read: Future[Read] | None = meta.get(BODY)
    if read is not None:
        return value_of(read, bounds)
    try:
        body = stream.read()
    except OSError:
        raise InvalidConfiguration("body: Was not received in full.", field="body") from None
    return value_of(reading(body, bounds), bounds)


def ensure_length(meta: Mapping[str, Any], most: int) -> None:
    """Raises BodyTooLarge, by the announced length, which is also all that will be read."""
    if _announced_length(meta) > most:
        raise BodyTooLarge(f"body: Must be at most {most} bytes.", field="body")


def _announced_length(meta: Mapping[str, Any]) -> int:
    announced = str(meta.get("CONTENT_LENGTH") or "0")
    return int(announced) if announced.isdigit() else 0


def _check_length(request: Request) -> None:
    ensure_length(request.META, settings.SANDBOX_MAX_BODY_BYTES)
    if "HTTP_TRANSFER_ENCODING" in request.META and not _announced_length(request.META):
        raise InvalidConfiguration("body: Send Content-Length, not chunks.", field="body")


T = TypeVar("T")

AGENT, MODEL, CONVERSATION, ON_BEHALF_OF = "X-Agent", "X-Model", "X-Conversation", "X-On-Behalf-Of"
TRACEPARENT, IDEMPOTENCY_KEY = "traceparent", "Idempotency-Key"
_HEADERS = {
    "agent": AGENT,
    "model": MODEL,
    "conversation": CONVERSATION,
    "on_behalf_of": ON_BEHALF_OF,
}
# A string as structured fields have it (RFC 8941), which is how the header's draft writes a key.
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')


@declared
class ClaimHeaders:
    """Who asked, in UTF-8. What the body says as well must be the same."""

    agent: Annotated[Agent, Field(alias=AGENT)] = ""
    model: Annotated[Model, Field(alias=MODEL)] = ""
    conversation: Annotated[ConversationName, Field(alias=CONVERSATION)] = ""
    on_behalf_of: Annotated[OnBehalfOf, Field(alias=ON_BEHALF_OF)] = ""
    traceparent: Annotated[Traceparent, Field(alias=TRACEPARENT)] = ""


@declared
class KeyHeader:
    """The key under which a request runs once, however often it is sent."""

    idempotency_key: Annotated[IdempotencyKey | None, Field(alias=IDEMPOTENCY_KEY)] = None


CLAIMS = Query(ClaimHeaders, headers=(*_HEADERS.values(), TRACEPARENT))
KEY = Query(KeyHeader, headers=(IDEMPOTENCY_KEY,))


def read_run(body: Body[T], request: Request, **ours: Any) -> T:
    """What is to be run, by the request's body and headers.

    Raises InvalidConfiguration also where both name something and it is not the same.
    """
    claims = CLAIMS.read(_headers(request, CLAIMS.headers))
    said = {name: getattr(claims, name) for name in _HEADERS}
    if "idempotency_key" in body.known:
        headers = _headers(request, KEY.headers)
        if quoted := _QUOTED.fullmatch(headers.get(IDEMPOTENCY_KEY, "")):
            headers[IDEMPOTENCY_KEY] = re.sub(r"\\(.)", r"\1", quoted[1])
        said["idempotency_key"] = KEY.read(headers).idempotency_key
    return body.read(_together(request.data, {**said}), traceparent=claims.traceparent, **ours)


def claims_of(request: Request) -> dict[str, str]:
    """What the headers say, for a request whose body has no place for it."""
    return dict(vars(CLAIMS.read(_headers(request, CLAIMS.headers))))


def _together(body: Any, said: Mapping[str, Any]) -> Any:
    if not isinstance(body, dict):
        return body
    given = {name: value for name, value in said.items() if value}
    for name, value in given.items():
        # An empty claim is none, here as in a header.
        if body.get(name) not in (None, value) and (body[name] != "" or name not in _HEADERS):
            header = _HEADERS.get(name, IDEMPOTENCY_KEY)
            refuse(name, f"The header {header} has another value. Send only one of them.")
    return {**body, **given}


def _headers(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    return {name: _text(name, request.headers[name]) for name in names if name in request.headers}


def _text(name: str, value: str) -> str:
    """A header's value as the UTF-8 that it was sent as; WSGI has it as Latin-1."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        refuse(name, "Must be UTF-8.")
