"""Shares of those who are not signed in: requests for pages, and passwords that are checked.

Pages are for people. Whoever has no session there shares with nobody: each address has a rate, and
the web server has threads for all strangers together (`sandbox_site.web.bridge`). An IPv6 network
of 64 bits is one address. The API's own paths are not counted here: what it answers without a key
costs no more than the refusal would.

All of it is known to this process alone, in bounded memory.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string

from executions.doors.e2b import credentials as e2b_credentials
from sandbox_site.client_address import address_of

# What is not a page: the API, and the links that it gives out.
API_PATHS = ("/api/v1", "/v1/", "/mcp", "/artifacts/", *e2b_credentials.PATHS)
# For whoever watches the service or configures it, often and without a session.
_FOR_PROGRAMS = ("/healthz", "/readyz", "/metrics", "/api/admin/")

# Requests for pages: so many at once, and so many in each minute after that.
PAGES_AT_ONCE, PAGES_PER_MINUTE = 120, 120
# Passwords: to check one takes a quarter of a second of a processor and more, also where nobody
# has the name.
PASSWORDS_AT_ONCE, PASSWORDS_PER_MINUTE = 20, 20
# That are checked, or wait for it, of one address; that are checked of all; seconds of waiting.
OF_ONE_ADDRESS, CHECKED_AT_ONCE, PATIENCE_SECONDS = 2, 1, 5.0
# Addresses and sessions that are remembered.
_MOST_KNOWN = 10_000


class TooMany(Exception):
    """The address has had its share. `wait` is the seconds until there is more."""

    def __init__(self, wait: float) -> None:
        self.wait = max(1, math.ceil(wait))
        seconds = "1 second" if self.wait == 1 else f"{self.wait} seconds"
        super().__init__(f"Your address has sent too many requests. Wait {seconds}.")


class Rate:
    """So many for each address at once, and `per_minute` more in a minute."""

    def __init__(self, at_once: int, per_minute: int) -> None:
        self._most = at_once
        self._per_second = per_minute / 60
        self._lock = threading.Lock()
        # What was left to each, and when; the one that has come last is last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str) -> None:
        """Raises TooMany where there is none left."""
        now = time.monotonic()
        with self._lock:
            left, since = self._left.pop(address, (float(self._most), now))
            left = min(self._most, left + (now - since) * self._per_second)
            has_one = left >= 1
            self._left[address] = (left - has_one, now)
            if len(self._left) > _MOST_KNOWN:
                self._left.popitem(last=False)
        if not has_one:
            raise TooMany((1 - left) / self._per_second)

    def forget(self) -> None:
        with self._lock:
            self._left.clear()


class Places:
    """Who may have a password checked now: one after the other, and by few of one address."""

    def __init__(self) -> None:
        self._rate = Rate(PASSWORDS_AT_ONCE, PASSWORDS_PER_MINUTE)
        self._lock = threading.Lock()
        self._here: Counter[str] = Counter()
        self._free = threading.BoundedSemaphore(CHECKED_AT_ONCE)

    @contextmanager
    def taken(self, address: str) -> Iterator[None]:
        """Raises TooMany where the address has its share already, or where it would take long."""
        with self._lock:
            if self._here[address] >= OF_ONE_ADDRESS:
                raise TooMany(1)
            self._here[address] += 1
        try:
            self._rate.take(address)
            if not self._free.acquire(timeout=PATIENCE_SECONDS):
                raise TooMany(PATIENCE_SECONDS)
            try:
                yield
            finally:
                self._free.release()
        finally:
            with self._lock:
                self._here[address] -= 1
                if not self._here[address]:
                    del self._here[address]

    def forget(self) -> None:
        self._rate.forget()


class Sessions:
    """The sessions in which somebody was seen to be signed in, as far as this process knows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def note(self, session_key: str) -> None:
        with self._lock:
            self._known[_digest(session_key)] = None
            self._known.move_to_end(_digest(session_key))
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def are_in(self, cookies: str) -> bool:
        """Whether a `Cookie` header has one of them. It says which threads serve the request, and
        nothing of what it may do."""
        for part in cookies.split(";"):
            name, _, value = part.strip().partition("=")
            if name == settings.SESSION_COOKIE_NAME:
                return _digest(value) in self._known
        return False


def _digest(session_key: str) -> bytes:
    return hashlib.sha256(session_key.encode("utf-8", "replace")).digest()


pages = Rate(PAGES_AT_ONCE, PAGES_PER_MINUTE)
passwords = Places()
sessions = Sessions()


def is_page(path: str) -> bool:
    """Whether strangers are counted where they ask for this."""
    return not path.startswith((*_FOR_PROGRAMS, *API_PATHS))


class StrangersMiddleware:
    """429 for a stranger whose address has had its share. Nobody who is signed in is refused."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if not is_page(request.path):
            return self.get_response(request)
        try:
            pages.take(address_of(request) or "")
        except TooMany as refusal:
            # Without a session this asks the database nothing.
            if not request.user.is_authenticated:
                return too_many(request, refusal)
        response = self.get_response(request)
        user = getattr(request, "_cached_user", None)
        if user is not None and user.is_authenticated and request.session.session_key:
            sessions.note(request.session.session_key)
        return response


def too_many(request: HttpRequest, refusal: TooMany) -> HttpResponse:
    """The answer to who has had its share: a page to people, and the API's error to programs."""
    if request.path.startswith("/api/"):
        error = {"code": "SB008", "message": str(refusal), "field": None}
        answer: HttpResponse = JsonResponse({"error": error, "id": None}, status=429)
    else:
        answer = HttpResponse(render_to_string("429.html", {"problem": str(refusal)}), status=429)
    answer["Retry-After"] = str(refusal.wait)
    answer["Cache-Control"] = "no-store"
    return answer
