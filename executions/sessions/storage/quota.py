"""How much a session and a tenant may have in storage: decided in the database, before it is."""

from __future__ import annotations

from typing import NoReturn

from django.conf import settings
from django.db.models import F

from executions.kernel.text import key_of
from executions.sessions.models import Session, StoredTotal, Workspace
from executions.tenants.quotas import Quota, storage_limit
from providers import registry
from providers.errors import InvalidConfiguration, RateLimited
from providers.runtime.guest.protocol import KNOWN_CHARACTERS


class QuotaExceeded(RateLimited):
    """What is to be saved is more than there may be. What was saved before is as it was."""


# The names of a session's files: what its sandbox can tell changes of, asked for when it wakes.
# Those of a tenant's: for each file that it may have.
SESSION_NAMES, _NAMES_OF_A_FILE = KNOWN_CHARACTERS, 128


def check_session(provider: str, files: int, size: int, names: int = 0) -> None:
    """Raise QuotaExceeded where a session at this provider, if it has one yet, would have more than
    it may. `size` is bytes, `names` characters.
    """
    if size > _most(provider):
        refuse_session_bytes(provider)
    if files > settings.SESSION_STORAGE_FILES:
        raise QuotaExceeded(
            f"The session has {files} files and folders, and the limit is "
            f"{settings.SESSION_STORAGE_FILES} (SESSION_STORAGE_FILES). Remove some.",
            field="session_storage_files",
        )
    if names > SESSION_NAMES:
        raise QuotaExceeded(
            f"The names of the session's files and folders have {names} characters together, link "
            f"targets included, and the limit is {SESSION_NAMES}. Shorten some.",
            field="session_storage_names",
        )


def ensure_room(session: Session, path: str, size: int) -> None:
    """Raise QuotaExceeded before a file of so many bytes is put into a session where it would be
    more than can be saved of it."""
    if session.saves == Session.Saves.NEVER:
        return
    workspace = Workspace.objects.filter(session=session.pk).first()
    if workspace is None:
        check_session(session.provider, 1, size)
        return
    before = workspace.rows.filter(key=key_of(path)).values_list("size", flat=True).first()
    files = workspace.files + (before is None)
    check_session(session.provider, files, workspace.bytes + size - (before or 0))


def bytes_left(provider: str, size: int) -> int:
    """Return how many more bytes a session may have that has so many."""
    return _most(provider) - size


def refuse_session_bytes(provider: str) -> NoReturn:
    most = _most(provider)
    by_setting = most == settings.SESSION_STORAGE_BYTES
    why = "SESSION_STORAGE_BYTES" if by_setting else "everything in its sandbox"
    raise QuotaExceeded(
        f"The session's files take more than {most} bytes ({why}). Remove some.",
        field="session_storage_bytes",
    )


def _most(provider: str) -> int:
    """No more than its next sandbox has room for: with more saved it would never wake."""
    most: int = settings.SESSION_STORAGE_BYTES
    try:
        holds = registry.get(provider).workspace_bytes if provider else None
    except InvalidConfiguration:
        # Its package is not installed any more.
        holds = None
    return most if holds is None else min(most, holds)


def reserve(tenant_id: int, *, files: int = 0, size: int = 0, names: int = 0) -> None:
    """Count so much for a tenant, in the caller's transaction. Raises QuotaExceeded.

    Less than nothing gives back.
    """
    if not files and not size and not names:
        return
    rows = StoredTotal.objects.filter(tenant=tenant_id)
    fitting = rows
    if size > 0:
        fitting = fitting.filter(bytes__lte=storage_limit(tenant_id) - size)
    if files > 0:
        fitting = fitting.filter(files__lte=settings.TENANT_STORAGE_FILES - files)
    if names > 0:
        fitting = fitting.filter(names__lte=_tenant_names() - names)
    added = {"bytes": F("bytes") + size, "files": F("files") + files, "names": F("names") + names}
    if fitting.update(**added):
        return
    StoredTotal.objects.bulk_create([StoredTotal(tenant_id=tenant_id)], ignore_conflicts=True)
    if not fitting.update(**added):
        _refuse(rows.get(), files, size, names)


def _tenant_names() -> int:
    return int(settings.TENANT_STORAGE_FILES) * _NAMES_OF_A_FILE


def _refuse(total: StoredTotal, files: int, size: int, names: int) -> None:
    most = storage_limit(total.tenant_id)
    if size > 0 and total.bytes + size > most:
        raise QuotaExceeded(
            f"The tenant's files take {total.bytes} bytes, {size} more are to be saved, and the "
            f"limit is {most} (TENANT_STORAGE_BYTES, or the tenant's own limit). Remove some, or "
            "close sessions.",
            field=Quota.STORAGE_BYTES.value,
        )
    if names > 0 and total.names + names > _tenant_names():
        raise QuotaExceeded(
            f"The names of the tenant's files have {total.names} characters, {names} more are to "
            f"be saved, and the limit is {_tenant_names()} ({_NAMES_OF_A_FILE} for each of "
            "TENANT_STORAGE_FILES). Remove some, or close sessions.",
            field="tenant_storage_names",
        )
    raise QuotaExceeded(
        f"The tenant has {total.files} files and folders, {files} more are to be saved, and the "
        f"limit is {settings.TENANT_STORAGE_FILES} (TENANT_STORAGE_FILES). Remove some, or close "
        "sessions.",
        field=Quota.STORAGE_FILES.value,
    )
