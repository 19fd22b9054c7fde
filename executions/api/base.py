"""What every endpoint shares: strict JSON in, JSON out, a request id on every answer.

What a key asks counts for its tenant here, and every answer says what is left of the minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import IO, Any, Concatenate, ParamSpec, TypeVar, cast
from uuid import uuid4

from django.conf import settings
from django.db import transaction
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.encoders import JSONEncoder
from rest_framework.views import APIView

from executions.api.authentication import ApiKeyAuthentication, HasApiKey, place_of
from executions.api.errors import render_error
from executions.api.later import answer
from executions.api.scopes import is_entered
from executions.kernel.bodies import BODY, SMALL, BodyTooLarge, reading, requests_of, value_of
from executions.kernel.coroutines import Waits
from executions.runs.record import Caller
from executions.tenants.models import ApiKey
from executions.tenants.rate_limit import ENTRY_COUNTS_AS, Rate, take
from providers.errors import InvalidConfiguration
from providers.json_reading import Bounds, Read
from providers.slices import JSONInSlices

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
            counts_as = requests_of(_announced(request.META))
            if is_entered(request):
                counts_as += ENTRY_COUNTS_AS - 1
            self.rate = take(request.auth.tenant, only_reads=only_reads, counts_as=counts_as)
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

    def told(self, work: Waits[HttpResponseBase]) -> Waits[HttpResponseBase]:
        """The work, whose errors are answers, also when they come later."""
        try:
            return (yield from work)
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
        )


# The row of an attempt must be committed before anything runs, and what is waited for must not be
# in a transaction.
@method_decorator(transaction.non_atomic_requests, name="dispatch")
class RunningView(ApiView):
    """An endpoint that has code run, or waits for a sandbox."""


def answered_later(
    handle: Callable[Concatenate[V, Request, P], Waits[Any]],
) -> Callable[Concatenate[V, Request, P], HttpResponseBase]:
    """A handler of requests whose thread is free while it waits. Its body is read before that."""

    @wraps(handle)
    def begin(view: V, request: Request, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        return answer(request, view.told(handle(view, request, *args, **kwargs)))

    return begin


def _value_of(meta: Mapping[str, Any], stream: IO[Any], bounds: Bounds) -> Any:
    require_length(meta, bounds.bytes)
    read: Future[Read] | None = meta.get(BODY)
    if read is not None:
        return value_of(read, bounds)
    try:
        body = stream.read()
    except OSError:
        raise InvalidConfiguration("body: Was not received in full.", field="body") from None
    return value_of(reading(body, bounds), bounds)


def require_length(meta: Mapping[str, Any], most: int) -> None:
    """Raises BodyTooLarge, by the announced length, which is also all that will be read."""
    if _announced(meta) > most:
        raise BodyTooLarge(f"body: Must be at most {most} bytes.", field="body")


def _announced(meta: Mapping[str, Any]) -> int:
    announced = str(meta.get("CONTENT_LENGTH") or "0")
    return int(announced) if announced.isdigit() else 0


def _check_length(request: Request) -> None:
    require_length(request.META, settings.SANDBOX_MAX_BODY_BYTES)
    if "HTTP_TRANSFER_ENCODING" in request.META and not _announced(request.META):
        raise InvalidConfiguration("body: Send Content-Length, not chunks.", field="body")
