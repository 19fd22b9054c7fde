"""Contents in storage: one upload each, none lost that a row names, none left that nobody knows."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest
from django.db import IntegrityError, connections, transaction
from django.db.models import Sum
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.kernel import text
from executions.kernel.storage import WORKSPACES, Folder, disposition, file_store
from executions.sessions.models import Blob, LooseFile, StoredTotal, Workspace, WorkspaceFile
from executions.sessions.storage import archives, blobs, quota
from executions.tenants.models import Tenant
from providers.errors import ProviderUnavailable
from tests.conftest import Caller
from tests.support.saved_files import linked, stored
from tests.support.sessions import in_thread


def in_storage() -> set[str]:
    return {entry.name for entry in file_store(WORKSPACES).entries()}


def named(blob: Blob, path: str = "f") -> WorkspaceFile:
    workspace = Workspace.objects.create(tenant=Tenant.objects.get(pk=blob.tenant_id))
    return WorkspaceFile.objects.create(
        workspace=workspace,
        key=text.key_of(path),
        path=text.to_text(path),
        type="file",
        blob=blob,
        size=blob.size,
        mode=0o600,
        modified=0.0,
    )


def grow_old() -> None:
    Blob.objects.update(kept_until=timezone.now() - timedelta(seconds=1))


def counted(tenant: Tenant) -> int:
    """What the tenant's total says, which is what blobs and loose files add up to."""
    rows = sum(
        model.objects.filter(tenant=tenant).aggregate(total=Sum("size"))["total"] or 0
        for model in (Blob, LooseFile)
    )
    total = StoredTotal.objects.filter(tenant=tenant).first()
    assert (total.bytes if total else 0) == rows
    return rows


pytestmark = [pytest.mark.usefixtures("own_storage"), pytest.mark.database]


def test_a_content_goes_up_once_and_comes_back(alice: Caller) -> None:
    content = bytes(range(256)) * 9000
    first, again, other = stored(alice.tenant, content, content, b"other")
    assert (first.pk, first.sha256) == (again.pk, hashlib.sha256(content).hexdigest())
    assert stored(alice.tenant, content)[0].pk == first.pk
    assert b"".join(blobs.read(first)) == content
    assert b"".join(blobs.read(first, 300, 5)) == content[300:305]
    assert len(in_storage()) == 2
    assert counted(alice.tenant) == len(content) + len(b"other")
    assert other.pk != first.pk


def test_tenants_share_no_content(alice: Caller, charlie: Caller) -> None:
    (mine,), (theirs,) = stored(alice.tenant, b"same"), stored(charlie.tenant, b"same")
    assert mine.file.name != theirs.file.name


def test_what_nothing_names_goes_after_its_time_and_what_is_named_stays(alice: Caller) -> None:
    kept_one, unnamed = stored(alice.tenant, b"kept", b"unnamed")
    named(kept_one)
    assert blobs.collect() == 0
    grow_old()
    assert blobs.collect() == 1
    assert set(Blob.objects.values_list("pk", flat=True)) == {kept_one.pk}
    assert in_storage() == {kept_one.file.name}
    assert counted(alice.tenant) == 4
    assert unnamed.sha256 not in Blob.objects.values_list("sha256", flat=True)


@pytest.mark.django_db(transaction=True)
def test_the_database_lets_no_named_blob_go(alice: Caller) -> None:
    (blob,) = stored(alice.tenant, b"kept")
    named(blob)
    with pytest.raises(IntegrityError), transaction.atomic():
        Blob.objects.filter(pk=blob.pk)._raw_delete("default")
    assert b"".join(blobs.read(blob)) == b"kept"


@pytest.mark.django_db(transaction=True)
def test_who_names_a_blob_that_was_removed_is_refused(alice: Caller) -> None:
    (blob,) = stored(alice.tenant, b"gone")
    assert blobs.remove_unnamed(alice.tenant.pk) == 1
    with pytest.raises(IntegrityError), transaction.atomic():
        named(blob)


@pytest.mark.django_db(transaction=True)
def test_uploads_and_removals_at_once_never_leave_a_row_without_its_bytes(alice: Caller) -> None:
    contents = [bytes([number]) * 10 for number in range(6)]
    failures: list[BaseException] = []

    def save() -> None:
        for _ in range(5):
            for content in contents:
                try:
                    (blob,) = stored(alice.tenant, content)
                    with transaction.atomic():
                        named(blob)
                except (IntegrityError, ProviderUnavailable):
                    # It was removed in between: who saves looks again.
                    continue
                except Exception as error:
                    failures.append(error)
                    return

    def remove() -> None:
        for _ in range(20):
            try:
                blobs.remove_unnamed(alice.tenant.pk)
            except Exception as error:
                failures.append(error)
                return

    threads = [in_thread(save), in_thread(remove)]
    for thread in threads:
        thread.join()
    assert failures == []
    for row in WorkspaceFile.objects.select_related("blob"):
        assert row.blob is not None
        assert hashlib.sha256(b"".join(blobs.read(row.blob))).hexdigest() == row.blob.sha256
    blobs.remove_unnamed(alice.tenant.pk)
    assert in_storage() == set(Blob.objects.values_list("file", flat=True))
    counted(alice.tenant)
    connections.close_all()


def test_what_a_dead_process_was_uploading_is_removed(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def die(*_: object) -> bool:
        raise Died

    monkeypatch.setattr(blobs, "_settle", die)
    with pytest.raises(Died):
        stored(alice.tenant, b"half")
    assert len(in_storage()) == 1
    assert blobs.collect() == 0
    LooseFile.objects.update(due_at=timezone.now() - timedelta(seconds=1))
    assert blobs.collect() == 1
    assert in_storage() == set()
    assert counted(alice.tenant) == 0


def test_a_file_has_its_name_only_when_its_bytes_are_on_the_disk(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[int, int] = {}
    really = os.fsync

    def note(descriptor: int) -> None:
        assert all("/." in name for name in in_storage())
        really(descriptor)
        found = os.fstat(descriptor)
        written[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", note)
    (blob,) = stored(alice.tenant, b"bytes")
    path = Path(file_store(WORKSPACES).open(str(blob.file)).name)
    assert written[path.stat().st_ino] == len(b"bytes")


def test_a_disk_that_fails_to_write_leaves_nothing(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="lost"):
            stored(alice.tenant, b"x")
    assert in_storage() == set()
    assert not Blob.objects.exists()


def test_a_storage_that_takes_nothing_leaves_nothing(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save_stream", refuse)
        with pytest.raises(OSError, match="no space"):
            stored(alice.tenant, b"x")
    assert Blob.objects.count() == 0
    LooseFile.objects.update(due_at=timezone.now() - timedelta(seconds=1))
    assert blobs.collect() == 1
    assert counted(alice.tenant) == 0


def test_files_that_cannot_be_deleted_keep_no_others_in_storage(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [bytes([number]) for number in range(8)]
    files = [str(blob.file) for blob in stored(alice.tenant, *contents)]
    stuck = {*files[:4], files[5]}
    tried: list[str] = []
    really = Folder.delete

    def delete(self: Folder, name: str) -> None:
        tried.append(name)
        if name in stuck:
            raise PermissionError(name)
        really(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "delete", delete)
        grow_old()
        # The first three look as if storage were away.
        for _ in range(3):
            blobs.collect()
        assert in_storage() == stuck
        assert len(tried) == len(files)
        assert counted(alice.tenant) == len(stuck)
        stuck.clear()
        assert blobs.collect() == 0
    LooseFile.objects.update(due_at=timezone.now() - timedelta(seconds=1))
    assert blobs.collect() == 5
    assert in_storage() == set()
    assert counted(alice.tenant) == 0


def test_a_storage_that_is_away_is_not_asked_for_every_file(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(alice.tenant, *(bytes([number]) for number in range(8)))
    grow_old()
    asked: list[str] = []

    def fail(self: Folder, name: str) -> None:
        asked.append(name)
        raise OSError("away")

    monkeypatch.setattr(Folder, "delete", fail)
    assert blobs.remove_unnamed(alice.tenant.pk) == 0
    assert len(asked) == blobs._AWAY_AFTER


@pytest.mark.parametrize("left", [None, b"", b"bytex and more"])
def test_what_storage_has_lost_goes_up_again(alice: Caller, left: bytes | None) -> None:
    (blob,) = stored(alice.tenant, b"bytes")
    row = named(blob)
    path = Path(file_store(WORKSPACES).open(str(blob.file)).name)
    path.unlink() if left is None else path.write_bytes(left)
    members = archives.to_restore(row.workspace)
    with pytest.raises(ProviderUnavailable, match="'f' differs from what was saved"):
        list(archives.archive_of(members))
    (again,) = stored(alice.tenant, b"bytes")
    assert again.pk == blob.pk == row.blob_id
    assert b"".join(blobs.read(again)) == b"bytes"
    blobs.collect()
    assert in_storage() == {str(again.file)}
    assert counted(alice.tenant) == 5


def test_beyond_the_tenants_bytes_nothing_goes_up(alice: Caller, settings: object) -> None:
    settings.TENANT_STORAGE_BYTES = 10  # type: ignore[attr-defined]
    stored(alice.tenant, b"12345678")
    with pytest.raises(quota.QuotaExceeded, match="TENANT_STORAGE_BYTES"):
        stored(alice.tenant, b"abc")
    assert counted(alice.tenant) == 8
    assert len(in_storage()) == 1
    assert stored(alice.tenant, b"ab", b"12345678")


def test_a_blob_that_somebody_has_a_link_to_stays_until_it_expires(alice: Caller) -> None:
    held, other = stored(alice.tenant, b"linked", b"other")
    url = linked(alice.tenant, held, filename="a b\u2028.csv", mime_type="text/csv")
    assert url is not None
    past = timezone.now() - timedelta(seconds=1)
    Blob.objects.filter(pk=other.pk).update(kept_until=past)
    assert blobs.collect() == 1
    answer = alice.client.get(url)
    assert answer.status_code == 200
    assert b"".join(cast("Any", answer).streaming_content) == b"linked"
    assert answer["Content-Disposition"] == disposition("a b\u2028.csv")
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert alice.client.get(url + "x").status_code == 404


def test_a_link_of_a_minute_outlives_that_its_tenant_needs_the_room(
    alice: Caller, settings: Any
) -> None:
    settings.TENANT_STORAGE_BYTES = 10
    held, _ = stored(alice.tenant, b"linked", b"old")
    url = linked(alice.tenant, held, expires_in=60)
    assert url is not None
    blobs.store(alice.tenant, [blobs.receive([b"new!"])])
    assert in_storage() == set(Blob.objects.values_list("file", flat=True))
    assert set(Blob.objects.values_list("size", flat=True)) == {6, 4}
    assert alice.client.get(url).status_code == 200


def test_a_link_that_is_given_while_old_blobs_are_collected_holds(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    (blob,) = stored(alice.tenant, b"linked")
    grow_old()
    drop, urls = blobs._drop_once, []

    def give_a_link_before(*found: Any, **whose: Any) -> list[LooseFile]:
        urls.append(linked(alice.tenant, blob))
        return drop(*found, **whose)

    monkeypatch.setattr(blobs, "_drop_once", give_a_link_before)
    assert blobs.collect() == 0
    assert alice.client.get(urls[0]).status_code == 200


def test_a_link_expires(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    (blob,) = stored(alice.tenant, b"x")
    url = linked(alice.tenant, blob)
    assert url is not None
    now = timezone.now().timestamp()
    monkeypatch.setattr("time.time", lambda: now + 61)
    assert alice.client.get(url).status_code == 404


_NAME = st.binary(min_size=1, max_size=40).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(_NAME, _NAME)
def test_each_path_has_one_text_and_each_text_one_path(first: str, second: str) -> None:
    assert text.from_text(text.to_text(first)) == first
    assert (text.to_text(first) == text.to_text(second)) == (first == second)
    text.to_text(first).encode()


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/a", "a/", "a//b", ".", "./a", "..", "a/../b", "a/..", "a\0b", "\ud800"),
        *("x" * 256, "/".join("x" * 65), "/".join(["x" * 250] * 17), 7, None),
    ],
)
def test_what_is_no_path(path: object) -> None:
    assert not text.is_path(path)


@pytest.mark.parametrize("path", ["a", "a/b", "...", "a\nb", "\udcff", "é" * 127, "a%b", " "])
def test_what_is_a_path(path: str) -> None:
    assert text.is_path(path)


def test_bytes_are_taken_in_as_they_come() -> None:
    content = blobs.receive(iter([b"a", b"", b"bc"]))
    assert (content.size, content.sha256) == (3, hashlib.sha256(b"abc").hexdigest())
    content.stream.seek(0)
    assert BytesIO(content.stream.read()).getvalue() == b"abc"
