"""Holding back whoever guesses passwords."""

from __future__ import annotations

from typing import Any

from axes.backends import AxesStandaloneBackend
from django.http import HttpRequest


class ThrottledLogins(AxesStandaloneBackend):  # type: ignore[misc]
    """Refuses a name from an address that failed too often. Code without a request is no login."""

    def authenticate(self, request: HttpRequest | None, *args: Any, **kwargs: Any) -> None:
        if request is not None:
            super().authenticate(request, *args, **kwargs)
