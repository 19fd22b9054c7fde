"""Middleware: who acts in a request."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from executions.services.actor import SYSTEM, acting_as


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
