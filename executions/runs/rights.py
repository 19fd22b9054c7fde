"""The rights of those to whom answers are being sent, and one check a second of all of them.

An answer may be open for a day. Its receiver was asked for his right at its beginning; here he
loses the answer within two seconds of losing the right: a key that is revoked, has expired or has
fewer scopes or other addresses, a tenant that is inactive, a person who is signed out, has another
password, is no longer active or on the staff, or has fewer permissions.

While the database does not answer, open answers go on for AWAY_SECONDS.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.contrib.auth import HASH_SESSION_KEY, get_user_model
from django.contrib.auth.models import Permission
from django.contrib.sessions.models import Session as SignIn
from django.db import Error as DatabaseFailure
from django.http import HttpRequest
from django.utils import timezone
from django.utils.crypto import constant_time_compare

from executions.runs.event_log import Broadcast, resolve
from executions.tenants import keys
from executions.tenants.models import ApiKey
from providers.errors import RateLimited
from providers.threads import Loop

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
AWAY_SECONDS = 60.0
# How long the thread stays when no answer is open: the next one may come at once.
_IDLE_CHECKS = 5
# What a superuser has, and nobody else has by its name.
_ALL = ("all",)
# Of one statement.
_AT_ONCE = 500


@dataclass(frozen=True)
class KeyRight:
    """What a key had when an answer to it began."""

    key_id: int
    tenant_slug: str
    scopes: frozenset[str]
    address: str

    @property
    def owner(self) -> str:
        """Who shares the threads of the web server by turns."""
        return self.tenant_slug

    def is_kept_by(self, key: ApiKey) -> bool:
        is_valid = not keys.problem_of(key) and key.allows_address(self.address)
        return is_valid and self.scopes <= set(key.scopes.split())


@dataclass(frozen=True)
class PersonRight:
    """What a person who is signed in had when an answer to him began."""

    user_id: int
    sign_in: str
    auth_hash: str
    permissions: frozenset[str]

    @property
    def owner(self) -> str:
        return f"user:{self.user_id}"

    def is_kept_by(self, user: Any, permissions: Collection[str]) -> bool:
        is_same = constant_time_compare(user.get_session_auth_hash(), self.auth_hash)
        is_staff = bool(user.is_active and user.is_staff)
        return is_same and is_staff and (user.is_superuser or self.permissions <= set(permissions))


Right = KeyRight | PersonRight


def right_of(request: HttpRequest) -> Right | None:
    """With what right the request was answered; None where anybody is answered so."""
    key = getattr(request, "auth", None)
    if isinstance(key, ApiKey):
        address = request.META.get("REMOTE_ADDR", "")
        return KeyRight(key.pk, key.tenant.slug, frozenset(key.scopes.split()), address)
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return None
    # Usually they are known by now: the view has asked for one of them.
    permissions = frozenset(_ALL if user.is_superuser else user.get_all_permissions())
    session = request.session
    return PersonRight(
        user.pk, session.session_key or "", session.get(HASH_SESSION_KEY, ""), permissions
    )


class OpenAnswers:
    """The answers of this process that are being sent, by the right of their receivers."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end an answer that is counted, in any thread.
        self._lock = threading.RLock()
        self._open: dict[Right, set[Broadcast]] = defaultdict(set)
        self._loop = Loop("rights", self._tick)
        self._idle = 0
        self._answered_at = 0.0

    @contextmanager
    def watch(self, right: Right | None) -> Iterator[Broadcast]:
        """Have the answer be checked while it is open: what is given is done when the right is
        lost, at once where no thread can look."""
        lost = Broadcast()
        if right is None:
            yield lost
            return
        with self._lock:
            if not self._open:
                self._answered_at = time.monotonic()
            self._open[right].add(lost)
        try:
            try:
                self._loop.start()
            except RateLimited as error:
                logger.error("an open stream is ended: %s", error.message)
                resolve([lost])
            yield lost
        finally:
            with self._lock:
                answers = self._open[right]
                answers.discard(lost)
                if not answers:
                    del self._open[right]

    def _tick(self) -> float | None:
        with self._lock:
            rights = list(self._open)
        self._idle = 0 if rights else self._idle + 1
        if not rights:
            return None if self._idle > _IDLE_CHECKS else CHECK_SECONDS
        try:
            kept = _valid_rights(rights)
        except DatabaseFailure as failure:
            seconds = time.monotonic() - self._answered_at
            if seconds < AWAY_SECONDS:
                logger.warning("open streams continue, unchecked for %.0f s: %s", seconds, failure)
                return CHECK_SECONDS
            logger.error("open streams end, unchecked for %.0f s: %s", seconds, failure)
            kept = set()
        else:
            self._answered_at = time.monotonic()
        self._end(set(rights) - kept)
        return CHECK_SECONDS

    def _end(self, lost: Collection[Right]) -> None:
        with self._lock:
            ended = [each for right in lost for each in self._open.get(right, ())]
        if ended:
            logger.info("%d open streams end: their receivers lost the permission", len(ended))
        resolve(ended)


open_answers = OpenAnswers()


def _valid_rights(rights: Sequence[Right]) -> set[Right]:
    """Those that are as they were. Raises what the database does."""
    of_keys = [right for right in rights if isinstance(right, KeyRight)]
    of_people = [right for right in rights if isinstance(right, PersonRight)]
    kept: set[Right] = set()
    for start in range(0, len(of_keys), _AT_ONCE):
        kept.update(_valid_key_rights(of_keys[start : start + _AT_ONCE]))
    for start in range(0, len(of_people), _AT_ONCE):
        kept.update(_valid_person_rights(of_people[start : start + _AT_ONCE]))
    return kept


def _valid_key_rights(rights: Sequence[KeyRight]) -> Iterator[KeyRight]:
    ids = {right.key_id for right in rights}
    found = ApiKey.objects.select_related("tenant").filter(pk__in=ids).order_by().in_bulk()
    for right in rights:
        key = found.get(right.key_id)
        if key is not None and right.is_kept_by(key):
            yield right


def _valid_person_rights(rights: Sequence[PersonRight]) -> Iterator[PersonRight]:
    ids = {right.user_id for right in rights}
    sign_ins = SignIn.objects.filter(
        session_key__in={right.sign_in for right in rights}, expire_date__gt=timezone.now()
    )
    signed_in = set(sign_ins.values_list("session_key", flat=True))
    users = get_user_model().objects.in_bulk(ids)
    permissions: dict[int, set[str]] = defaultdict(set)
    for path in ("user", "group__user"):
        rows = Permission.objects.filter(**{f"{path}__in": ids}).order_by()
        for user_id, app, codename in rows.values_list(path, "content_type__app_label", "codename"):
            permissions[user_id].add(f"{app}.{codename}")
    for right in rights:
        user = users.get(right.user_id)
        is_signed_in = right.sign_in in signed_in
        if user is not None and is_signed_in and right.is_kept_by(user, permissions[user.pk]):
            yield right
