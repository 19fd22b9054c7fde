"""The contents of saved files, each once for a tenant, and uploads that have not ended."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from django.db import IntegrityError, connection, transaction
from django.db.models import Exists, F, OuterRef, QuerySet
from django.db.models.functions import Greatest, Now
from django.utils import timezone

from executions.kernel.database import let_others_write
from executions.kernel.storage import WORKSPACES, file_store
from executions.runs.admission import ensure_disk_space
from executions.sessions.models import Blob, LooseFile, WorkspaceFile
from executions.sessions.storage import quota
from executions.tenants.models import Tenant
from providers.errors import ProviderUnavailable

logger = logging.getLogger(__name__)

# For so long a blob that nothing names yet is about to be named, and an upload is under way.
GRACE = timedelta(hours=1)
PIECE_BYTES = 256 * 1024
_IN_MEMORY_BYTES = 1024 * 1024
# Of one transaction; and of loose files, each of which has one, in one call.
_AT_ONCE = 200
_COLLECTED = 500
_TRIES = 3
# So many short transactions follow one another at once; then others have their turn.
_PAUSE_AFTER = 20
# After so many failures in a row storage is taken to be away.
_AWAY_AFTER = 3


class Damaged(OSError):
    """Storage has less of a content than it was given."""


@dataclass(frozen=True)
class Content:
    """Bytes that have been taken in, hashed and counted by us."""

    sha256: str
    size: int
    stream: IO[bytes]


def receive(pieces: Iterable[bytes]) -> Content:
    """Receive bytes, and hold them until it is known what they are: little in memory, the rest on
    the disk."""
    held: IO[bytes] = SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
    digest, size = hashlib.sha256(), 0
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            held.write(piece)
    except BaseException:
        held.close()
        raise
    return Content(digest.hexdigest(), size, held)


def store_all(tenant: Tenant, contents: Sequence[Content]) -> dict[str, Blob]:
    """The blobs of these contents, by their hash; only what the tenant has not yet goes up, and
    what storage has lost.

    None of them is collected for an hour; name them by then. Raises OSError where storage does not
    take them, and QuotaExceeded.
    """
    wanted = {content.sha256: content for content in contents}
    found: dict[str, Blob] = {}
    lost: dict[str, Blob] = {}
    for _ in range(_TRIES):
        for sha256, blob in _known_blobs(tenant, wanted.keys() - found.keys()).items():
            (found if _has_bytes(blob) else lost)[sha256] = blob
        missing = [content for sha256, content in wanted.items() if sha256 not in found]
        if missing:
            found |= _upload(tenant, missing, lost)
        if len(found) == len(wanted):
            return found
    raise ProviderUnavailable(
        "Another request removed the saved data meanwhile. Try again.", retry_after=1
    )


def store(
    tenant: Tenant, contents: Sequence[Content], *, spared: Iterable[int] = ()
) -> dict[str, Blob]:
    """Store contents as `store_all` does. Over the quota what nothing names any more goes first,
    however young it is; `spared` are others that are about to be named, gone through only then."""
    try:
        return store_all(tenant, contents)
    except quota.QuotaExceeded:
        if not remove_unnamed(tenant.pk, spared=set(spared)):
            raise
        return store_all(tenant, contents)


def read(blob: Blob, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Its bytes, in pieces. Raises OSError."""
    left = blob.size - offset if length is None else min(length, blob.size - offset)
    if left <= 0:
        return
    with closing(file_store(WORKSPACES).open_range(str(blob.file), offset, left)) as pieces:
        for piece in pieces:
            left -= len(piece)
            yield piece
    if left:
        raise Damaged(f"{blob.file} is shorter than it was")


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(PIECE_BYTES):
        yield piece


def keep_until_read(tenant: Tenant, pks: Collection[int], seconds: float) -> set[int]:
    """Have the tenant's stay for so long although nothing may name them: somebody is given links.

    Those that there are; none of a tenant that is not active.
    """
    # Longer than what is about to be named, so that it is not taken for that over the quota.
    until = timezone.now() + GRACE + timedelta(seconds=seconds)
    listed = sorted(pks)
    found: set[int] = set()
    for start in range(0, len(listed), _AT_ONCE):
        rows = Blob.objects.filter(
            pk__in=listed[start : start + _AT_ONCE], tenant=tenant, tenant__is_active=True
        )
        found |= {blob.pk for blob in _keep(rows, until)}
    return found


def by_number(rows: Iterable[WorkspaceFile]) -> list[WorkspaceFile]:
    """In the order in which rows that name blobs are to be written."""
    return sorted(rows, key=lambda row: row.blob_id or 0)


def collect() -> int:
    """Remove blobs that no row names, and what dead processes have left. How many files.

    What storage does not let go of now is tried again in an hour, so that it keeps nothing else
    from its turn.
    """
    removed = 0
    unnamed = _unnamed_blobs().filter(kept_until__lt=Now()).order_by("pk")
    while pks := list(unnamed.values_list("pk", flat=True)[:_AT_ONCE]):
        if not (dropped := _drop(pks, kept_until__lt=Now())):
            break
        removed += _remove(dropped)
    due = LooseFile.objects.filter(due_at__lt=Now()).order_by("due_at", "pk")
    return removed + _remove(list(due[:_COLLECTED]))


def remove_unnamed(
    tenant_id: int, pks: Collection[int] | None = None, *, spared: Collection[int] = ()
) -> int:
    """Remove those of these blobs that no row names, whatever their age; without `pks` all of the
    tenant's, but for what somebody has a link to.

    `spared` are those that the caller is about to name. Another who was finds that it is gone, and
    saves it anew.
    """
    whose: dict[str, Any] = {}
    if pks is None:
        whose = {"kept_until__lte": timezone.now() + GRACE}
        pks = _unnamed_blobs().filter(tenant=tenant_id, **whose).values_list("pk", flat=True)
    pks = [pk for pk in pks if pk not in spared]
    removed = 0
    for start in range(0, len(pks), _AT_ONCE):
        removed += _remove(_drop(pks[start : start + _AT_ONCE], **whose))
    return removed


def _unnamed_blobs() -> QuerySet[Blob]:
    return Blob.objects.exclude(Exists(WorkspaceFile.objects.filter(blob=OuterRef("pk"))))


def _known_blobs(tenant: Tenant, wanted: Collection[str]) -> dict[str, Blob]:
    """Those that are there, and stay for an hour from now."""
    if not wanted:
        return {}
    rows = Blob.objects.filter(tenant=tenant, sha256__in=list(wanted))
    return {blob.sha256: blob for blob in _keep(rows, timezone.now() + GRACE)}


def _keep(rows: QuerySet[Blob], until: datetime) -> list[Blob]:
    """Those that there are, which stay until then."""
    with transaction.atomic():
        found = list(rows.select_for_update(no_key=True, of=("self",)).order_by("pk"))
        mine = Blob.objects.filter(pk__in=[blob.pk for blob in found])
        if found:
            mine.update(kept_until=Greatest(F("kept_until"), until))
    return found


def _has_bytes(blob: Blob) -> bool:
    """Whether storage has as many as it should. Raises OSError where it does not say."""
    try:
        return file_store(WORKSPACES).size(str(blob.file)) == blob.size
    except FileNotFoundError:
        logger.error("%s is not in storage, and is stored again", blob.file)
        return False


def _upload(
    tenant: Tenant, contents: Sequence[Content], lost: Mapping[str, Blob]
) -> dict[str, Blob]:
    """Blobs made of those of them that nobody else made one of meanwhile. What is `lost` gets its
    bytes again.
    """
    ensure_disk_space()
    names = {content.sha256: _name(tenant, content.sha256) for content in contents}
    due_at = timezone.now() + GRACE
    with transaction.atomic():
        quota.reserve(tenant.pk, size=sum(content.size for content in contents))
        LooseFile.objects.bulk_create(
            LooseFile(tenant=tenant, file=names[each.sha256], size=each.size, due_at=due_at)
            for each in contents
        )
    storage = file_store(WORKSPACES)
    loose = LooseFile.objects.filter(file__in=list(names.values()))
    try:
        for content in contents:
            content.stream.seek(0)
            storage.save_stream(names[content.sha256], _pieces(content.stream))
    except BaseException:
        loose.update(due_at=Now())
        raise
    made = _settle(tenant, contents, names, lost)
    if made is None:
        for name in names.values():
            storage.delete(name)
    _remove(list(loose))
    return made or {}


def _settle(
    tenant: Tenant,
    contents: Sequence[Content],
    names: dict[str, str],
    lost: Mapping[str, Blob],
) -> dict[str, Blob] | None:
    """Make blobs of what is in storage now. None when that was taken for a dead process's."""
    until = timezone.now() + GRACE
    with transaction.atomic():
        loose = LooseFile.objects.filter(file__in=list(names.values()))
        if loose.delete()[0] != len(contents):
            transaction.set_rollback(True)
            return None
        for sha256 in sorted(names.keys() & lost.keys(), key=lambda each: lost[each].pk):
            blob = lost[sha256]
            mine = Blob.objects.filter(pk=blob.pk, file=str(blob.file))
            if mine.update(file=names[sha256], kept_until=Greatest(F("kept_until"), until)):
                # What there may be of it, under a name that nobody uses again.
                LooseFile.objects.create(
                    tenant=tenant, file=str(blob.file), size=blob.size, due_at=timezone.now()
                )
        Blob.objects.bulk_create(
            (
                Blob(
                    tenant=tenant,
                    sha256=each.sha256,
                    size=each.size,
                    file=names[each.sha256],
                    kept_until=until,
                )
                # Of two who have the same new contents one waits for the other, and not both.
                for each in sorted(contents, key=lambda each: each.sha256)
            ),
            ignore_conflicts=True,
        )
        mine = Blob.objects.filter(file__in=list(names.values()))
        made = {blob.sha256: blob for blob in mine}
        # Somebody else was faster with the same bytes: theirs is taken, and ours goes.
        LooseFile.objects.bulk_create(
            LooseFile(tenant=tenant, file=names[each.sha256], size=each.size, due_at=until)
            for each in contents
            if each.sha256 not in made
        )
    return made


def _drop(pks: Sequence[int], **whose: Any) -> list[LooseFile]:
    """Let go of those of these blobs that nothing names: from now on they are loose files. `whose`
    is asked of each again: somebody may have been given a link to it meanwhile.
    """
    try:
        return _drop_once(pks, **whose)
    except IntegrityError:
        # One was named meanwhile, and is not ours to drop.
        return [each for pk in pks for each in _drop([pk], **whose)] if len(pks) > 1 else []


def _drop_once(pks: Sequence[int], **whose: Any) -> list[LooseFile]:
    with transaction.atomic():
        # Whoever has named one has committed, or finds it gone: its row is held from here on.
        rows = Blob.objects.select_for_update().filter(pk__in=pks).order_by("pk")
        held = list(rows.values_list("pk", flat=True))
        free = list(_unnamed_blobs().filter(pk__in=held, **whose))
        gone = Blob.objects.filter(pk__in=[blob.pk for blob in free])
        gone._raw_delete(connection.alias)
        return LooseFile.objects.bulk_create(
            LooseFile(
                tenant_id=blob.tenant_id, file=str(blob.file), size=blob.size, due_at=timezone.now()
            )
            for blob in free
        )


def _remove(loose: Sequence[LooseFile]) -> int:
    storage = file_store(WORKSPACES)
    removed = failed = 0
    for number, each in enumerate(loose, 1):
        if number % _PAUSE_AFTER == 0:
            let_others_write()
        try:
            storage.delete(each.file)
        except OSError as error:
            logger.warning("a file of workspaces is still in storage: %s", error)
            LooseFile.objects.filter(pk=each.pk).update(due_at=timezone.now() + GRACE)
            failed += 1
            if failed == _AWAY_AFTER:
                break
            continue
        failed = 0
        with transaction.atomic():
            if LooseFile.objects.filter(pk=each.pk).delete()[0]:
                removed += 1
                if each.tenant_id is not None:
                    quota.reserve(each.tenant_id, size=-each.size)
    return removed


def _name(tenant: Tenant, sha256: str) -> str:
    return f"{tenant.pk}/{sha256[:2]}/{sha256}-{secrets.token_hex(8)}"


# No upload takes so long.
_SECONDS = 24 * 3600


def discard_unfinished() -> int:
    """Remove it; how many uploads they were. Of a storage that is away, the next time."""
    try:
        return file_store(WORKSPACES).discard_unfinished(time.time() - _SECONDS)
    except OSError as error:
        logger.warning("data of unfinished uploads is still in storage: %s", error)
        return 0
