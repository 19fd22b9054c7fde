"""API keys: made, rotated, checked, revoked, refused. Only here is a key's text ever known.

A change that extends a key takes a second person under the two-person rule. What takes power away,
and a key that opens nothing yet, waits for nobody.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import Error as DatabaseFailure
from django.db import OperationalError, connection, transaction
from django.db.models import Q
from django.utils import timezone

from executions.kernel.database import Columns, limit_lock_wait
from executions.kernel.text import storable
from executions.ledger.append import append, enter_row, look_at
from executions.ledger.entry import LedgerUnavailable
from executions.tenants.models import USUAL_SCOPES, WORD_BOUNDS, ApiKey, KeyRefusal, Scope, Tenant
from providers.errors import InvalidConfiguration
from providers.guarded import Change, Guarded, Values
from providers.isolation import meets

logger = logging.getLogger(__name__)

EVERY = timedelta(minutes=1)
UNKNOWN = "unknown"
_MOST_DETAIL = 200
_PATIENCE_SECONDS = 0.5

_TABLE = KeyRefusal._meta.db_table
# One statement, so that of several processes one alone enters it.
_CLAIM = (
    f"INSERT INTO {_TABLE} (subject, reason, entered_at) VALUES (%s, %s, %s)"  # noqa: S608
    " ON CONFLICT (subject, reason) DO UPDATE SET entered_at = excluded.entered_at"
    f" WHERE {_TABLE}.entered_at <= %s"
)

_KEY, _TENANT = Columns(ApiKey), Columns(Tenant)
_FIND = (
    f"SELECT {_KEY.select('k')}, {_TENANT.select('t')} FROM {ApiKey._meta.db_table} k"  # noqa: S608
    f" JOIN {Tenant._meta.db_table} t ON t.id = k.tenant_id WHERE k.key_hash = %s"
)

# By key and reason, when this process asked last: most of a flood ends here, without a query.
_asked: dict[tuple[str, str], float] = {}
_MOST_ASKED = 10_000


def note_refusal(
    api_key: ApiKey | None, reason: str, *, detail: str = "", address: str = ""
) -> None:
    """Enter that a key was refused, unless that was just entered.

    `reason` is one of a few words, `detail` what it was refused. It is refused all the same where
    nothing can be entered; the log then has it.
    """
    subject = UNKNOWN if api_key is None else str(api_key.pk)
    place, now = (subject, reason), time.monotonic()
    if now - _asked.get(place, -EVERY.total_seconds()) < EVERY.total_seconds():
        return
    if len(_asked) >= _MOST_ASKED:
        _asked.clear()
    try:
        with limit_lock_wait(_PATIENCE_SECONDS), transaction.atomic():
            if _claim(subject, reason):
                _enter(api_key, reason, detail, address)
    except (DatabaseFailure, LedgerUnavailable) as error:
        logger.warning("the refusal of a key (%s) could not be entered: %s", reason, error)
        return
    _asked[place] = now


def _claim(subject: str, reason: str) -> bool:
    now = timezone.now()
    moments = [connection.ops.adapt_datetimefield_value(each) for each in (now, now - EVERY)]
    with connection.cursor() as cursor:
        cursor.execute(_CLAIM, [subject, reason, *moments])
        return bool(cursor.rowcount == 1)


def _enter(api_key: ApiKey | None, reason: str, detail: str, address: str) -> None:
    append(
        "refusal",
        UNKNOWN if api_key is None else api_key.prefix,
        {
            "actor": UNKNOWN if api_key is None else f"key:{api_key.prefix}",
            "tenant": None if api_key is None else api_key.tenant.slug,
            "key": None if api_key is None else storable(api_key.name),
            "reason": reason,
            "detail": storable(detail)[:_MOST_DETAIL],
            "address": storable(address)[:64],
        },
    )


OURS, OF_E2B = "cfd_", "e2b_"
_PREFIX_LENGTH = 10
_GIVEN_PREFIX_LENGTH = 4
_USE_RECORDED_EVERY = timedelta(minutes=1)


class Unauthenticated(Exception):
    """No valid key came with the request. Deliberately the same for every reason."""


def create_api_key(
    tenant: Tenant,
    name: str,
    expires_at: datetime | None = None,
    scopes: str = USUAL_SCOPES,
    form: str = OURS,
    **bounds: str,
) -> tuple[ApiKey, str]:
    """A new key and its text, which is known only now. Raises InvalidConfiguration.

    `scopes` and each of the `bounds` (languages, providers, templates, addresses) are words with
    spaces between; `minimum_isolation` is a level. Without scopes the key opens nothing.
    `form` is what it begins with: some clients of E2B send none that does not look like one of its.
    """
    if not name or len(name) > 100:
        raise InvalidConfiguration("name: Must be 1 to 100 characters long.", field="name")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidConfiguration("expires_at: Must be in the future.", field="expires_at")
    key_text = form + (secrets.token_hex(32) if form == OF_E2B else secrets.token_urlsafe(32))
    api_key = ApiKey(
        tenant=tenant,
        name=name,
        prefix=key_text[:_PREFIX_LENGTH],
        key_hash=_hash(key_text),
        expires_at=expires_at,
        scopes=scopes,
        **bounds,
    )
    try:
        api_key.full_clean(exclude=("tenant", "key_hash"))
    except ValidationError as error:
        field, problems = next(iter(error.message_dict.items()))
        raise InvalidConfiguration(f"{field}: {' '.join(problems)}", field=field) from error
    api_key.save(force_insert=True)
    return api_key, key_text


def rotate(
    api_key: ApiKey,
    valid_until: datetime,
    *,
    expires_at: datetime | None = None,
    scopes: str | None = None,
) -> tuple[ApiKey, str]:
    """A new key in the place of this one, and its text. The old one is valid until then.

    The new one is held to what the old one is, and has its scopes unless others are given. Raises
    InvalidConfiguration for a key that is not valid any more.
    """
    with transaction.atomic():
        former = ApiKey.objects.select_for_update().select_related("tenant").get(pk=api_key.pk)
        if not former.is_valid(timezone.now()):
            raise InvalidConfiguration("It is no longer valid. Create a new key.", field="api_key")
        bounds = {name: getattr(former, name) for name in (*WORD_BOUNDS, "minimum_isolation")}
        new, key_text = create_api_key(
            former.tenant,
            former.name,
            expires_at,
            former.scopes if scopes is None else scopes,
            OF_E2B if former.prefix.startswith(OF_E2B) else OURS,
            **bounds,
            rotated_from=former.prefix,
        )
        before = look_at(ApiKey, former.pk)
        if former.expires_at is None or valid_until < former.expires_at:
            ApiKey.objects.filter(pk=former.pk).update(expires_at=valid_until)
        api_key.refresh_from_db(fields=["expires_at"])
        enter_row(api_key, "rotated", before, {"tenant": former.tenant.slug, "new": new.prefix})
    return new, key_text


def ensure_key(tenant: Tenant, name: str, key_text: str) -> bool:
    """Make `key_text`, which was chosen elsewhere, the tenant's only key of this name.

    Called again it changes nothing. Whether it did. Raises InvalidConfiguration for a text that is
    a key already: another one's, or one that was revoked.
    """
    key_hash = _hash(key_text)
    with transaction.atomic():
        named = ApiKey.objects.filter(tenant=tenant, name=name, revoked_at=None)
        if named.filter(key_hash=key_hash).exists():
            return False
        if ApiKey.objects.filter(key_hash=key_hash).exists():
            raise InvalidConfiguration(
                f"{name}: This key belongs to another tenant, or was revoked. Choose a new one.",
                field=name,
            )
        for former in named:
            revoke(former)
        # Less of it than of our own, which are longer.
        ApiKey.objects.create(
            tenant=tenant, name=name, prefix=key_text[:_GIVEN_PREFIX_LENGTH], key_hash=key_hash
        )
    return True


def authenticate(key_text: str, address: str = "") -> ApiKey:
    """The valid key, with its tenant, in one query. Raises Unauthenticated.

    `address` is the client's. A refusal is entered in the ledger, as `note_refusal` does.
    """
    api_key, problem = look_up(key_text)
    if api_key is not None and not problem and not api_key.allows_address(address):
        problem = "address"
    if api_key is None or problem:
        note_refusal(api_key, problem, address=address)
        raise Unauthenticated
    _record_use(api_key, timezone.now())
    return api_key


def of_id(key_id: int) -> ApiKey | None:
    """The key of this id, valid or not, with its tenant: for who can prove what it was given."""
    found = ApiKey.objects.select_related("tenant").filter(pk=key_id).order_by()
    return next(iter(found), None)


def ensure_valid(api_key: ApiKey, address: str = "") -> None:
    """What `authenticate` asks of a key that is known. Raises Unauthenticated."""
    problem = problem_of(api_key)
    if not problem and not api_key.allows_address(address):
        problem = "address"
    if problem:
        note_refusal(api_key, problem, address=address)
        raise Unauthenticated
    _record_use(api_key, timezone.now())


def look_up(key_text: str) -> tuple[ApiKey | None, str]:
    """The key, if there is one, and why it is not valid; "" for one that is.

    What is compared is the hash, by an index, so the time taken says nothing of the key.
    """
    with connection.cursor() as cursor:
        cursor.execute(_FIND, [_hash(key_text)])
        row = cursor.fetchone()
    if row is None:
        return None, UNKNOWN
    of_tenant = len(_KEY.names)
    api_key = _KEY.read(row[:of_tenant])
    api_key.tenant = _TENANT.read(row[of_tenant:])
    return api_key, problem_of(api_key)


def problem_of(api_key: ApiKey) -> str:
    """Why it is not valid; "" where it is."""
    if api_key.revoked_at is not None:
        return "revoked"
    if not api_key.is_valid(timezone.now()):
        return "expired"
    return "" if api_key.tenant.is_active else "inactive tenant"


def revoke(api_key: ApiKey) -> bool:
    """True when the key was valid until now, False when it had been revoked before."""
    now = timezone.now()
    with transaction.atomic():
        before = look_at(ApiKey, api_key.pk)
        if not ApiKey.objects.filter(pk=api_key.pk, revoked_at=None).update(revoked_at=now):
            return False
        api_key.refresh_from_db(fields=["revoked_at"])
        enter_row(api_key, "revoked", before, {"tenant": api_key.tenant.slug})
    return True


def _record_use(api_key: ApiKey, now: datetime) -> None:
    threshold = now - _USE_RECORDED_EVERY
    if api_key.last_used_at is not None and api_key.last_used_at > threshold:
        return
    try:
        with limit_lock_wait(_PATIENCE_SECONDS):
            ApiKey.objects.filter(
                Q(last_used_at=None) | Q(last_used_at__lte=threshold), pk=api_key.pk
            ).update(last_used_at=now)
    except OperationalError as error:
        # What is only read can be served while another writes, or while nothing can be written.
        logger.warning("the last use of key %s could not be recorded: %s", api_key.prefix, error)


def _hash(key_text: str) -> str:
    return hashlib.sha256(key_text.encode("utf-8", "surrogatepass")).hexdigest()


CONFIGURE = "providers.change_providerconfig"


def is_escalation(change: Change) -> bool:
    """Whether the key can do anything after the change that it could not before."""
    before, after = change.before, change.after
    if after is None:
        return False
    if before is None:
        return bool(after["scopes"])
    return (
        before["tenant"] != after["tenant"]
        or not _words(after, "scopes") <= _words(before, "scopes")
        or any(_is_looser(before, after, name) for name in WORD_BOUNDS)
        or not meets(after["minimum_isolation"], before["minimum_isolation"])
        or _is_later(before["expires_at"], after["expires_at"])
    )


def _words(values: Values, name: str) -> set[str]:
    return set(values[name].split())


def _is_looser(before: Values, after: Values, name: str) -> bool:
    """By the words alone: a network within another one counts as something else."""
    former, now = _words(before, name), _words(after, name)
    return bool(former) and (not now or not now <= former)


def _is_later(before: str | None, after: str | None) -> bool:
    if before is None or after is None:
        return before is not None
    return datetime.fromisoformat(after) > datetime.fromisoformat(before)


def _refuse(person: Any, change: Change) -> str:
    """Who may not configure providers could otherwise do so with a key made or widened here."""
    states = [values for values in (change.before, change.after) if values]
    if not is_escalation(change) or not any(
        Scope.ADMIN in _words(values, "scopes") for values in states
    ):
        return ""
    if person.has_perm(CONFIGURE):
        return ""
    return (
        "The scope admin, and changes that extend a key with this scope, need the permission to "
        "configure providers."
    )


def _begin(row: ApiKey) -> None:
    raise InvalidConfiguration("The text of a deleted key is not stored. Create a new key.")


KEYS = Guarded(
    ApiKey,
    left_out=frozenset(
        ("prefix", "key_hash", "rotated_from", "created_at", "revoked_at", "last_used_at")
    ),
    refuse=_refuse,
    begin=_begin,
    takes_two=is_escalation,
)
