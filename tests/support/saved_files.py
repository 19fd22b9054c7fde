"""Files of sessions in storage, for tests: who writes them and sleeps, and what is there of them."""

from __future__ import annotations

import io
import tarfile
from typing import Any

from django.db.models import Sum
from django.utils import timezone

from executions.kernel import background
from executions.kernel.text import from_text, key_of
from executions.ledger.models import LedgerEntry
from executions.sessions.maintenance import maintain
from executions.sessions.models import (
    Blob,
    LooseFile,
    Session,
    StoredTotal,
    Workspace,
    WorkspaceFile,
)
from executions.sessions.storage import blobs, browse
from executions.tenants.models import Tenant
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.sessions import URL, aged, cell, opened, row


def saved(session: dict[str, Any]) -> dict[str, bytes | None]:
    """By path, what is in storage of a session; None for what has no bytes."""
    rows = WorkspaceFile.objects.filter(workspace__session=session["id"]).select_related("blob")
    return {
        from_text(each.path): b"".join(blobs.read(each.blob)) if each.blob else None
        for each in rows
    }


def looked_at(caller: Caller, session: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = caller.client.get(f"{URL}/{session['id']}").json()
    return found


def counts_are_right(session: dict[str, Any]) -> None:
    # What was cut off or refused is collected behind the answer.
    assert background.wait_for_keyed_work(60)
    assert background.wait_until_idle(60)
    workspace = Workspace.objects.get(session=session["id"])
    rows = workspace.rows.all()
    assert workspace.files == rows.count()
    assert workspace.bytes == (rows.aggregate(total=Sum("size"))["total"] or 0)
    assert workspace.names == sum(each.names for each in rows)
    of_all = Workspace.objects.filter(tenant=workspace.tenant)
    total = StoredTotal.objects.get(tenant=workspace.tenant)
    for counted in ("files", "names"):
        assert getattr(total, counted) == of_all.aggregate(total=Sum(counted))["total"]
    assert total.files == WorkspaceFile.objects.filter(workspace__tenant=workspace.tenant).count()
    # What was cut off on its way to storage counts until it has been collected.
    assert total.bytes == sum(
        of_tenant.filter(tenant=workspace.tenant).aggregate(total=Sum("size"))["total"] or 0
        for of_tenant in (Blob.objects, LooseFile.objects)
    )


def stored(tenant: Tenant, *contents: bytes) -> list[Blob]:
    taken = [blobs.receive([content]) for content in contents]
    found = blobs.store_all(tenant, taken)
    return [found[each.sha256] for each in taken]


def linked(tenant: Tenant, blob: Blob, **changed: Any) -> str | None:
    """A link to it for a minute, and None where there is none for this tenant."""
    seconds = changed.pop("expires_in", 60)
    wanted = browse.Wanted(blob, **{"filename": "f", **changed})
    [url] = browse.links_to(tenant, [wanted], expires_in=seconds)
    return url


def write(name: str, text: str) -> str:
    return f"open({name!r}, 'w').write({text!r})"


def asleep(caller: Caller, code: str = write("f", "kept"), **body: Any) -> dict[str, Any]:
    """A session that has run this and then went to sleep."""
    session = opened(caller, **body)
    assert cell(caller, session, code).json()["status"] == "succeeded"
    assert background.wait_for_keyed_work()
    aged(session, used_at=601)
    maintain()
    assert row(session).state == "asleep"
    return session


def listed(caller: Caller, session: dict[str, Any], **query: Any) -> list[str]:
    answer = caller.client.get(f"{URL}/{session['id']}/files", query)
    assert answer.status_code == 200, answer.content
    return [entry["path"] for entry in answer.json()["entries"]]


def still_asleep(session: dict[str, Any]) -> bool:
    found = row(session)
    return (found.state, found.wakes, kept_here.sandboxes()) == ("asleep", 0, [])


def packed(*members: tuple[str, bytes | None, str]) -> bytes:
    """A tar of files (bytes), folders (None) and links (a target)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content, target in members:
            member = tarfile.TarInfo(name)
            if target.startswith("="):
                member.type, member.linkname = tarfile.LNKTYPE, target[1:]
            elif target:
                member.type, member.linkname = tarfile.SYMTYPE, target
            elif content is None:
                member.type = tarfile.DIRTYPE
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return stream.getvalue()


def actions(session: dict[str, Any]) -> list[str]:
    entries = LedgerEntry.objects.filter(kind="session").order_by("pk")
    return [e.stated["action"] for e in entries if e.stated["row"] == session["id"]]


def filled(workspace: Workspace, size: int) -> None:
    """Give a workspace a folder `d` of so many files, and have them counted."""
    tenant = workspace.tenant
    (blob,) = stored(tenant, b"x")
    facts: dict[str, Any] = {"workspace": workspace, "mode": 0o644, "modified": 1.0}
    rows = [WorkspaceFile(key=key_of("d"), path="d", type="directory", **facts)]
    rows += [
        WorkspaceFile(key=key_of(path), path=path, type="file", blob=blob, size=1, **facts)
        for path in (f"d/{number}" for number in range(size))
    ]
    WorkspaceFile.objects.bulk_create(rows)
    names = sum(row.names for row in rows)
    counts = {"files": len(rows), "names": names}
    Workspace.objects.filter(pk=workspace.pk).update(bytes=size, saved_at=timezone.now(), **counts)
    total = StoredTotal.objects.get(tenant=tenant)
    StoredTotal.objects.filter(pk=total.pk).update(
        files=total.files + len(rows), names=total.names + names
    )


def sleeping(caller: Caller, size: int, **facts: Any) -> Session:
    """A session that sleeps with such a folder, without having run anything."""
    session = Session.objects.create(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        api_key=caller.api_key,
        provider="kept_here",
        language="python",
        contexts=[{"id": "default", "language": "python", "cwd": ""}],
        idle_seconds=600,
        max_seconds=100_000,
        **{"state": Session.State.ASLEEP, **facts},
    )
    filled(Workspace.objects.create(tenant=caller.tenant, session=session), size)
    return session
