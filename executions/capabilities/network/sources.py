"""Credentials whose values come from Vault: fetched when they are saved, and again each minute."""

from __future__ import annotations

import logging
import random
import time

from django.core.exceptions import ValidationError
from django.db import transaction
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network.credentials import put_credential, revoke
from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.network.vault import Gone, NotFetched, fetch, read_place
from providers import draining
from providers.credentials import check_value
from providers.remote.secret import Secret

logger = logging.getLogger(__name__)

# A turn ends before the schedule begins the next one.
TURN_SECONDS = 40.0
_ALERT = {"alert": "credential_source"}
_MOST_NAMED = 20


@sensitive_variables()
def fetch_value(source: str) -> str:
    """Return the value at `mount/path#key`. Raises ValidationError at `source`."""
    try:
        return _fetched(source).reveal()
    except (Gone, NotFetched) as error:
        raise ValidationError({"source": str(error)}) from None


@sensitive_variables()
def _fetched(source: str) -> Secret:
    """Raises Gone and NotFetched."""
    try:
        place = read_place(source)
    except ValueError as error:
        raise NotFetched(str(error)) from None
    found = fetch(place)
    try:
        check_value(found.reveal())
    except ValueError as error:
        raise NotFetched(f"The value at {place} is no credential. {error}") from None
    return found


def follow_sources() -> int:
    """Give active credentials the values that their sources have now. Return how many changed.

    One whose value is deleted at its source is revoked. One whose value cannot be fetched keeps
    what it has, and the log says so.
    """
    rows: dict[str, list[NetworkCredential]] = {}
    for row in NetworkCredential.objects.filter(revoked_at=None).exclude(source="").defer("value"):
        if _value_of(row) is not None:
            rows.setdefault(row.source, []).append(row)
    # None is always the last, where there is no time for all of them.
    sources = random.sample(sorted(rows), len(rows))
    ends = time.monotonic() + TURN_SECONDS
    kept: dict[str, list[str]] = {}
    changed = 0
    for source in sources:
        if draining.is_draining():
            break
        try:
            if time.monotonic() >= ends:
                raise NotFetched("There was no time for it, as the server is slow.")
            found = _fetched(source)
        except Gone as error:
            changed += sum(_revoke(row, str(error)) for row in rows[source])
        except NotFetched as error:
            kept.setdefault(str(error), []).extend(map(str, rows[source]))
        else:
            for row in rows[source]:
                try:
                    changed += _put(row, found)
                except ValidationError as error:
                    # Such as of a tenant that is being removed. The others have theirs.
                    kept.setdefault(" ".join(error.messages), []).append(str(row))
    for why, names in kept.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        logger.error(
            "The value of a network credential was not fetched, and stays as it is: %s%s. %s",
            ", ".join(names[:_MOST_NAMED]),
            more,
            why,
            extra=_ALERT,
        )
    return changed


@sensitive_variables()
def _put(row: NetworkCredential, found: Secret) -> bool:
    """Return whether it had another value. Raises ValidationError."""
    with transaction.atomic():
        locked = _locked(row)
        if locked is None or _value_of(locked) in (None, found.reveal()):
            return False
        put_credential(
            row.name, found.reveal(), tenant_slug=row.tenant_slug, reason="Fetched from its source."
        )
    return True


def _revoke(row: NetworkCredential, why: str) -> bool:
    with transaction.atomic():
        locked = _locked(row)
        if locked is None or _value_of(locked) is None or not revoke(locked):
            return False
    logger.error(
        "The network credential %s is revoked. %s Once it has a value there, fetch it on the "
        "credential's page.",
        row,
        why,
        extra=_ALERT,
    )
    return True


def _locked(row: NetworkCredential) -> NetworkCredential | None:
    """The row as it is now, and stays until the transaction ends. None for another source."""
    rows = NetworkCredential.objects.select_for_update(no_key=True).defer("value")
    return rows.filter(pk=row.pk, revoked_at=None, source=row.source).first()


@sensitive_variables()
def _value_of(row: NetworkCredential) -> str | None:
    """None where the row was changed outside the service. What is stored anew would seal that."""
    try:
        return row.open_value()
    except ValueError:
        return None
