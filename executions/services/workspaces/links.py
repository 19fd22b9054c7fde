"""Links to saved files, for whoever holds them until they expire: storage's own, or ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.db.models import QuerySet
from django.urls import reverse

from executions.kernel.declarations import refuse
from executions.kernel.storage import MOST_LINK_SECONDS, WORKSPACES, clean_filename, kept, safe_type
from executions.models.workspace import Blob
from executions.runs.artifacts import BadLink, read_token, sign_token
from executions.services.workspaces import blobs
from executions.tenants.models import Tenant

_SALT = "executions.workspace"


@dataclass(frozen=True)
class Wanted:
    """What a link is to be to, and what it is handed out as."""

    blob: Blob
    filename: str
    mime_type: str = "application/octet-stream"


def links(
    tenant: Tenant,
    wanted: Sequence[Wanted],
    *,
    expires_in: int,
    absolute: Callable[[str], str] = lambda path: path,
) -> list[str | None]:
    """Where each of them can be had for `expires_in` seconds, 7 days at most, whoever removes or
    overwrites the file meanwhile. `absolute` makes a path on this service into a URL.

    None for what is not there any more, is another tenant's, or of one that is not active.
    """
    if type(expires_in) is not int or not 0 < expires_in <= MOST_LINK_SECONDS:
        refuse("expires_in", f"Must be a whole number of seconds, 1 to {MOST_LINK_SECONDS}.")
    there = blobs.keep_until_read(tenant, {each.blob.pk for each in wanted}, expires_in)
    return [_url(each, expires_in, absolute) if each.blob.pk in there else None for each in wanted]


def _url(wanted: Wanted, expires_in: int, absolute: Callable[[str], str]) -> str:
    url = kept(WORKSPACES).link(
        str(wanted.blob.file),
        expires_in=expires_in,
        filename=wanted.filename,
        mime_type=wanted.mime_type,
    )
    if url is not None:
        return url
    # Cleaned here, so that no name makes an address longer than servers take.
    facts = [
        wanted.blob.pk,
        wanted.blob.sha256,
        clean_filename(wanted.filename),
        safe_type(wanted.mime_type),
    ]
    return absolute(reverse("workspace-link", args=[sign_token(_SALT, expires_in, *facts)]))


def target_of(token: str) -> tuple[Blob, str, str]:
    """The blob of a link of ours, and the name and type it is handed out by. Raises BadLink, also
    when its tenant is not active any more.
    """
    pk, sha256, filename, mime_type = read_token(_SALT, token, facts=3)
    # A database that was restored gives numbers again: the link is to these bytes and no others.
    blob = _of_active_tenants().filter(pk=pk, sha256=sha256).first()
    if blob is None:
        raise BadLink
    return blob, filename, mime_type


def _of_active_tenants() -> QuerySet[Blob]:
    return Blob.objects.filter(tenant__is_active=True)
