"""Middleware: who acts in a request, and what a page says while the database is away."""

from __future__ import annotations

import sys
from collections.abc import Callable

from django.core.exceptions import DisallowedHost
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.views import defaults

from executions.doors.native.deferred import LATER, DeferredResponse
from executions.doors.native.frame import error_response, render_error
from executions.kernel.audit import SYSTEM, acting_as
from executions.kernel.database import RETRY_SECONDS, DatabaseUnavailable, problem_of
from executions.runs.rights import right_of

_API = ("/api/", "/v1/")
# What is below these is for people, and all else for programs.
_PAGES = ("/admin", "/static/")


class ActorMiddleware:
    """Lets the ledger name the signed-in user. The session is not read unless it asks."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        def user() -> str:
            signed_in = getattr(request, "user", None)
            if signed_in is None or not signed_in.is_authenticated:
                return SYSTEM
            return f"user:{signed_in.get_username()}"

        with acting_as(user):
            return self.get_response(request)


class RightsMiddleware:
    """Lets the web server know with what right an answer that takes its time is received.

    Every such answer passes here, of a page or the API, before its first byte is sent.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        later: DeferredResponse | None = request.META.get(LATER)
        if later is not None and response.streaming:
            later.right = right_of(request)
        return response


class DatabaseAwayMiddleware:
    """503 where a view fails because of the database. The API's own views see to it themselves."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        return away_answer(request, error)


def server_error(request: HttpRequest) -> HttpResponse:
    """Of what fails outside of a view, such as the session."""
    error = sys.exc_info()[1]
    answer = away_answer(request, error) if isinstance(error, Exception) else None
    return answer or defaults.server_error(request)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """What Django refuses before any view: to programs in the API's own words."""
    if request.path.startswith(_PAGES):
        return defaults.bad_request(request, exception)
    if isinstance(exception, DisallowedHost):
        return error_response(
            400,
            "bad_request",
            "Host: The service does not accept this host name. The operator has to add it to "
            "ALLOWED_HOSTS.",
            field="Host",
        )
    return error_response(400, "bad_request", "The request cannot be read.")


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Programs are answered in the API's own words, and people with a page."""
    if request.path.startswith(_API):
        return render_error(Http404(), {})
    return defaults.page_not_found(request, exception)


def away_answer(request: HttpRequest, error: Exception) -> HttpResponse | None:
    """A page that needs no database; None for an error of another kind."""
    problem = error.message if isinstance(error, DatabaseUnavailable) else problem_of(error)
    if not problem:
        return None
    if not request.path.startswith("/admin"):
        return render_error(error, {})
    content = render_to_string("503.html", {"problem": problem})
    response = HttpResponse(content, status=503)
    response["Retry-After"] = str(int(RETRY_SECONDS))
    return response
