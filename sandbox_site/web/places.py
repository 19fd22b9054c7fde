"""Who holds what of a web process: requests under way, streams, and answers that are not read.

A request has a place from when its headers are here until its answer was handed to the system. The
place belongs to the client's address until a key says which tenant it is of. One owner has a share
of everything, so that no owner holds all of it. Health, metrics and the admin have places of their
own beside those, which no request of the API can take.
"""

from __future__ import annotations

import hashlib
import resource
import threading
from collections import Counter
from enum import Enum

from django.conf import settings

from providers.errors import RateLimited
from sandbox_site.web.body import Refused

# One owner has at most one of so many parts: of the places, of the streams among them, and of the
# bytes that are not read. Who shows no key has a smaller part of the bytes.
TENANT_PLACE_PARTS, ADDRESS_PLACE_PARTS, STREAM_PARTS = 4, 2, 8
TENANT_PARTS, ADDRESS_PARTS = 2, 8
LEAST_STREAMS = 4
# Places beside WEB_CONNECTIONS: one for so many, and how many at least.
SPARE_PARTS, LEAST_SPARE = 8, 8
RETRY_SECONDS = 5
# Keys whose tenant is remembered, so that their requests are counted for it at once.
MOST_KEYS = 4096
# What sandboxes, answers on disk, other files and the database need beside the connections.
SPARE_FILES = 3072

NOBODY = ""


class Kind(Enum):
    """What a request is for, as far as its path says it."""

    USUAL = "usual"
    PROBE = "probe"
    ADMIN = "admin"


def kind_of(path: str) -> Kind:
    if path in ("/healthz", "/readyz", "/metrics"):
        return Kind.PROBE
    # The admin's pages are of no use without their styles and scripts.
    return Kind.ADMIN if path.startswith(("/admin/", "/static/")) else Kind.USUAL


def spare_of(connections: int) -> int:
    """How many connections there may be beside those: for probes and the admin."""
    return max(LEAST_SPARE, connections // SPARE_PARTS)


def most_connections() -> int:
    """How many connections this process may have beside the spare ones: WEB_CONNECTIONS, or less
    where it may not open as many files. Raises its limit of these as far as it is allowed to."""
    most: int = settings.WEB_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + spare_of(most) + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            left = (soft - SPARE_FILES) * SPARE_PARTS // (SPARE_PARTS + 1)
            most = max(16, min(most, left, soft // 2))
    return most


def owner_of(address: str) -> str:
    """Who is behind an address; no tenant's slug has an @. NOBODY where it is not known."""
    return f"@{address}" if address else NOBODY


class Places:
    """For `most` requests at once, and for `answer_bytes` of answers that are not read."""

    def __init__(self, most: int, answer_bytes: int) -> None:
        self._most = most
        self._answer_bytes = answer_bytes
        self._tenant_share = max(1, most // TENANT_PLACE_PARTS)
        self._address_share = max(1, most // ADDRESS_PLACE_PARTS)
        self._stream_share = max(LEAST_STREAMS, most // STREAM_PARTS)
        self._lock = threading.Lock()
        self._held: dict[Kind, Counter[str]] = {kind: Counter() for kind in Kind}
        self._taken: Counter[Kind] = Counter()
        self._streams: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._tenants: dict[bytes, str] = {}

    def enter(self, kind: Kind, address: str, key_text: bytes = b"") -> Place:
        """A place for a request from this address, "" where that says nothing. Raises Refused.

        Nobody is let in for a key that is known here: it only says who the place is counted for.
        """
        key = hashlib.sha256(key_text).digest() if key_text else b""
        with self._lock:
            owner = self._tenants.get(key) or owner_of(address)
            used = Kind.USUAL
            if problem := self._problem(used, owner):
                if kind is Kind.USUAL or (problem := self._problem(kind, owner)):
                    raise problem
                used = kind
            self._add(used, owner, 1)
        return Place(self, kind, used, owner, key)

    def _remember(self, key: bytes, tenant_slug: str) -> None:
        if key and self._tenants.get(key) != tenant_slug:
            if len(self._tenants) >= MOST_KEYS:
                del self._tenants[next(iter(self._tenants))]
            self._tenants[key] = tenant_slug

    def _problem(self, kind: Kind, owner: str) -> Refused | None:
        most = self._most
        share = self._tenant_share if _is_tenant(owner) else self._address_share
        if kind is not Kind.USUAL:
            most = spare_of(self._most) // 2
            share = most // 2
        if owner and self._held[kind][owner] >= share:
            whose = "of your tenant" if _is_tenant(owner) else "from your address"
            message = f"{share} requests {whose} are already being answered. Wait until one ends."
            return Refused(429, message, RETRY_SECONDS)
        if self._taken[kind] >= most:
            message = "The service has reached its limit of requests. Try again."
            return Refused(503, message, RETRY_SECONDS)
        return None

    def _add(self, kind: Kind, owner: str, count: int) -> None:
        _add(self._held[kind], owner, count)
        self._taken[kind] += count


class Place:
    """One request's. `leave` gives back all that it holds."""

    def __init__(self, places: Places, kind: Kind, used: Kind, owner: str, key: bytes) -> None:
        self._places = places
        self._key = key
        self._kind = kind
        # Which of the places it has: what is for the admin may be in a usual one.
        self._used = used
        self._owner = owner
        self._has_left = False
        self._is_stream = False
        self._unread = 0

    @property
    def owner(self) -> str:
        """A tenant's slug, @ and an address, or "" where it is not known."""
        return self._owner

    def know_key(self, tenant_slug: str) -> None:
        """The key in the request's headers is valid, and this tenant's."""
        with self._places._lock:
            self._places._remember(self._key, tenant_slug)

    def give_to(self, tenant_slug: str) -> None:
        """Count it for the tenant of its key. Raises RateLimited beyond the tenant's share."""
        places = self._places
        with places._lock:
            if places._unread[tenant_slug] >= places._answer_bytes // TENANT_PARTS:
                raise RateLimited(_UNREAD, retry_after=RETRY_SECONDS)
            if self._has_left or self._owner == tenant_slug or self._used is not Kind.USUAL:
                return
            problem = places._problem(Kind.USUAL, tenant_slug)
            # Of all places one is its own.
            if problem is not None and problem.status == 429:
                raise RateLimited(problem.message, retry_after=RETRY_SECONDS)
            places._add(Kind.USUAL, self._owner, -1)
            self._owner = tenant_slug
            places._add(Kind.USUAL, self._owner, 1)

    def begin_stream(self) -> None:
        """Its answer comes event by event, and may take long. Raises RateLimited for one more than
        its owner may have."""
        places = self._places
        with places._lock:
            if self._has_left or self._is_stream:
                return
            if self._owner and places._streams[self._owner] >= places._stream_share:
                raise RateLimited(
                    f"You already have {places._stream_share} open streams. Close one.",
                    retry_after=RETRY_SECONDS,
                )
            self._is_stream = True
            places._streams[self._owner] += 1

    def hold_answer(self, size: int, *, is_lost_else: bool) -> None:
        """Count so many bytes that its client is to read. What `is_lost_else` is counted also
        beyond the share: its work was done, and the owner's next request is refused instead.

        Raises Refused.
        """
        places = self._places
        with places._lock:
            if self._has_left:
                return
            if not is_lost_else and (problem := self._too_much(size)):
                raise problem
            places._unread[self._owner] += size
            self._unread += size

    def _too_much(self, size: int) -> Refused | None:
        places = self._places
        parts = TENANT_PARTS if _is_tenant(self._owner) else ADDRESS_PARTS
        share = places._answer_bytes // parts
        # One is always let through, however large.
        held = places._unread[self._owner]
        if held and held + size > share:
            return Refused(429, _UNREAD, RETRY_SECONDS)
        if self._kind is not Kind.ADMIN and places._unread.total() + size > places._answer_bytes:
            message = (
                "answer: Too many responses are not yet read by their clients. Try again later."
            )
            return Refused(503, message, RETRY_SECONDS)
        return None

    def leave(self) -> None:
        places = self._places
        with places._lock:
            if self._has_left:
                return
            self._has_left = True
            places._add(self._used, self._owner, -1)
            _add(places._streams, self._owner, -self._is_stream)
            _add(places._unread, self._owner, -self._unread)


_UNREAD = (
    "answer: You have too many responses that are not yet read. Read them, or try again later."
)


def _is_tenant(owner: str) -> bool:
    return bool(owner) and not owner.startswith("@")


def _add(counter: Counter[str], owner: str, count: int) -> None:
    counter[owner] += count
    if counter[owner] <= 0:
        del counter[owner]
